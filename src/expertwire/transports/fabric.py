"""A simulated network under the real engine: a transport profile decides when each piece of each transfer is placed.

The engine writes a put into a staging copy of the peer's window and hands it over. From there the put is the
operations that the chosen signal mechanism makes of it, these are events, and the events happen when the schedule
likes, as far as the profile's edges allow (`ordering.events`). Bytes are read from staging at the source-read event
and appear in the peer's window at the place event, piece by piece. A protocol that trusts more than the profile
promises reads stale rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from expertwire.errors import InvalidArgument
from expertwire.ordering import profiles, signals
from expertwire.ordering.events import Event, Kind, Numbering, Posted, events_of, peer_of
from expertwire.ordering.transitions import MODIFY, bits
from expertwire.ordering.verbs import Action, Arrival, Completion, Loc, OrderPuts, Post, Queue, Quiet, Send, Write
from expertwire.ordering.words import event_words
from expertwire.transports.base import Bootstrap
from expertwire.transports.inproc import Inproc
from expertwire.transports.schedule import Turns

Bytes = NDArray[np.uint8]
Segments = list[tuple[NDArray[np.int64], int]]
_PIECES = 3
_COMPACT_AFTER = 2000
_UNSUPPORTED = ("tagged", "cleaned")  # these need a reader that cleans words, or tags inside rows


@dataclass(eq=False, slots=True)
class _Piece:
    """Bytes on their way from staging to a window, held in `data` between source read and placement."""

    staging: Bytes
    window: Bytes
    first: int
    last: int
    data: Bytes | None = None


@dataclass(slots=True)
class _Word:
    """A signal word in a window. With counted immediates, a value is shown once as many have arrived as it `needs`."""

    window: NDArray[np.int64]
    at: int
    needs: dict[int, int] = field(default_factory=dict)
    arrived: int = 0
    announced: int = 0

    def change(self, action: str, value: int) -> None:
        self.window[self.at] = MODIFY[action](int(self.window[self.at]), value)

    def show(self) -> None:
        if self.announced and self.arrived >= self.needs.get(self.announced, 0):
            self.change("max", self.announced)


@dataclass(slots=True)
class _Writer:
    """What one rank has posted that still matters, and what its fences have put before later posts, per peer."""

    posts: list[Posted] = field(default_factory=list)
    ordered: dict[str, int] = field(default_factory=dict)
    sent: dict[Loc, int] = field(default_factory=dict)
    counted: dict[Loc, int] = field(default_factory=dict)
    bundle: int = 0


class Fabric:
    """The network of one World: ranks post to it when it is their turn, the schedule lets its events happen."""

    def __init__(self, num_ranks: int, profile: str, signal: str, seed: int, schedule: str) -> None:
        if schedule not in ("random", "adversary"):
            raise InvalidArgument(f"schedule must be 'random' or 'adversary', got {schedule!r}")
        self.profile, self.mechanism = profiles.get(profile), signals.get(signal)
        usable = usable_signals(profile)
        if signal not in usable:
            raise InvalidArgument(f"signal {signal!r} cannot run on fabric {profile!r}; usable: {', '.join(usable)}")
        self.adversarial = schedule == "adversary"
        self.turns = Turns(num_ranks, seed, self, patience=0.9 if self.adversarial else 0.5)
        self.windows: list[Bytes] = []
        self._writers = [_Writer() for _ in range(num_ranks)]
        self._words: dict[Loc, _Word] = {}
        self._pieces: dict[Event, list[_Piece]] = {}
        self._number = Numbering()
        self._pending: dict[Event, int] = {}  # to how many events, that have not happened, it comes after
        self._followers: dict[Event, list[Event]] = {}
        self._able_rows: list[Event] = []
        self._able_others: list[Event] = []
        self._done = 0
        self._nics: dict[int, list[int]] = {}

    # -- what ranks do -------------------------------------------------------------------------------------------

    def put_signal(self, rank: int, peer: int, staging: Bytes, segments: Segments, word: int, value: int) -> None:
        """Send the segments of `staging` to the window of `peer`, with a signal that sets the word at byte `word`."""
        writer = self._writers[rank]
        extent = {
            Loc(f"r{peer}", f"{rank}:{int(first)}"): (int(first), num_bytes)
            for offsets, num_bytes in segments
            for first in offsets
        }
        place = Loc(f"r{peer}", f"word {word}")
        if place not in self._words:
            self._words[place] = _Word(self.windows[peer].view(np.int64), word // 8)
        writer.bundle += 1
        message = signals.Message(
            f"r{peer}", tuple(extent), 0, place, writer.sent.get(place, 0), value, writer.bundle
        )  # fmt: skip
        writer.sent[place] = value
        writer.counted[place] = self._words[place].needs[value] = writer.counted.get(place, 0) + len(extent)
        for action in self.mechanism.lower(message, Queue(f"q{peer}")):
            self._act(rank, action, lambda loc: self._cut(loc, peer, staging, *extent[loc]))

    def _act(self, rank: int, action: Action, cut: Callable[[Loc], dict[Loc, _Piece]]) -> None:
        writer = self._writers[rank]
        match action:
            case Write(target=(first, *_)) if first not in self._words:
                pieces = {place: piece for loc in action.target for place, piece in cut(loc).items()}
                source = Loc(f"r{rank}", "staging")
                self._post(rank, replace(action, target=tuple(pieces), values=(), source=source), list(pieces.values()))
            case OrderPuts():
                for post in writer.posts:
                    writer.ordered[post.peer] = writer.ordered.get(post.peer, 0) | post.places | post.shown
            case Completion() | Quiet():
                placed = isinstance(action, Quiet) and self.profile.quiet == "placed"
                waits = [e for p in writer.posts for e in p.events if e.bit & (p.places if placed else p.cqes)]
                while any(event in self._pending for event in waits):
                    self.turns.stop(rank, lambda: not any(event in self._pending for event in waits))
            case _:
                self._post(rank, action, [])  # type: ignore[arg-type]

    def _cut(self, loc: Loc, peer: int, staging: Bytes, first: int, num_bytes: int) -> dict[Loc, _Piece]:
        """A message lands in pieces; the network has no idea where rows end."""
        cuts = sorted({first + num_bytes * i // _PIECES for i in range(_PIECES + 1)})
        return {
            Loc(loc.rank, f"{loc.name}+{begin - first}"): _Piece(staging, self.windows[peer], begin, end)
            for begin, end in pairwise(cuts)
        }

    def _post(self, rank: int, op: Post, pieces: list[_Piece]) -> None:
        writer = self._writers[rank]
        if len(self._number.events) > _COMPACT_AFTER:
            self._compact()
        ordered = writer.ordered.get(peer_of(op), 0)
        post = events_of(self.profile, op, f"r{rank}", rank, writer.posts, ordered, self._number)
        writer.posts.append(post)
        if pieces:
            sources = [event for event in post.events if event.kind is Kind.SOURCE]
            places = [event for event in post.events if event.kind is Kind.PLACE]
            self._pieces.update(dict.fromkeys(sources, pieces))
            self._pieces.update({event: [piece] for event, piece in zip(places, pieces, strict=True)})
        for event in post.events:
            before = bits(event.after & ~self._done)
            self._pending[event] = len(before)
            for number in before:
                self._followers.setdefault(self._number.events[number], []).append(event)
            if not before:
                self._enable(event)

    def _enable(self, event: Event) -> None:
        rows = event.kind is Kind.PLACE and event in self._pieces
        (self._able_rows if rows else self._able_others).append(event)

    # -- what the network does -----------------------------------------------------------------------------------

    def happen(self, choose: random.Random) -> bool:
        """Let one event happen. An adversary places rows only when nothing else can happen, the latest first."""
        rows, others = self._first_in_line(self._able_rows), self._first_in_line(self._able_others)
        if not rows and not others:
            return False
        if self.adversarial:
            event = choose.choice(others) if others else rows[-1]
        else:
            at = choose.randrange(len(rows) + len(others))
            event = rows[at] if at < len(rows) else others[at - len(rows)]
        (self._able_others if event in self._able_others else self._able_rows).remove(event)
        del self._pending[event]
        self._done |= event.bit
        self._take_effect(event)
        for follower in self._followers.pop(event, ()):
            self._pending[follower] -= 1
            if not self._pending[follower]:
                self._enable(follower)
        self.turns.log.append((self.turns.time_s, event))
        return True

    def history(self) -> list[str]:
        """What happened last, in words: events of the network, and which rank went on when."""
        lines = []
        for time_s, what in self.turns.log:
            if isinstance(what, Event):
                rank, peer, words = event_words(what)
                lines.append(
                    f"{time_s:7.2f} s  {rank} -> {peer}: {words}" if peer else f"{time_s:7.2f} s  {rank}: {words}"
                )
            else:
                lines.append(f"{time_s:7.2f} s  rank {what} goes on")
        return lines

    def _first_in_line(self, able: list[Event]) -> list[Event]:
        """Without those that stand behind others in a NIC's queue of posted writes."""
        if self.profile.place_ww != "fifo_nic":
            return able
        first = {nic: queue[0] for nic, queue in self._nics.items() if queue}
        return [e for e in able if e.queue < 0 or e.kind is Kind.ACCEPT or first.get(e.queue, 0) & e.entry]

    def _take_effect(self, event: Event) -> None:
        op = event.post.op
        pieces = self._pieces.pop(event, [])
        match event.kind:
            case Kind.SOURCE:
                for piece in pieces:
                    piece.data = piece.staging[piece.first : piece.last].copy()
            case Kind.PLACE if pieces:
                (piece,) = pieces
                assert piece.data is not None
                piece.window[piece.first : piece.last] = piece.data
            case Kind.PLACE | Kind.RMW:
                target = op.target[0] if isinstance(op, Write) else op.target  # type: ignore[union-attr]
                self._words[target].change("add" if event.kind is Kind.RMW else event.action, event.value)
            case Kind.RCQE:
                assert isinstance(op, Write | Send)
                assert op.arrival is not None
                self._arrive(op.arrival)
        if event.queue >= 0 and event.kind is Kind.ACCEPT:
            self._nics.setdefault(event.queue, []).append(event.enters)
        elif event.queue >= 0 and event.kind is not Kind.RMW_READ:
            queue = self._nics[event.queue]
            queue[0] &= ~event.entry
            if not queue[0]:
                queue.pop(0)

    def _arrive(self, arrival: Arrival) -> None:
        """A completion at the target: a signal, or, if its word is a counter, one row more."""
        if arrival.word in self._words:
            word = self._words[arrival.word]
            if self.mechanism.reader != "counted":
                return word.change(arrival.action, arrival.value)
            word.announced = max(word.announced, arrival.value)
        else:
            word = self._words[Loc(arrival.word.rank, arrival.word.name.removesuffix(".count"))]
            word.arrived += 1
        return word.show()

    def _compact(self) -> None:
        """Renumber the pending events and forget the others, so that bit sets stay short."""
        old = {event: event.bit for event in self._pending}
        for number, event in enumerate(self._pending):
            event.bit = 1 << number
        renamed = {bit: event.bit for event, bit in old.items()}

        def rename(mask: int) -> int:
            mask &= ~self._done
            found = 0
            while mask:
                low = mask & -mask
                mask ^= low
                found |= renamed.get(low, 0)
            return found

        for event in self._pending:
            event.entry, event.enters = rename(event.entry), rename(event.enters)
        alive = {event.post.thread: {} for event in self._pending}  # type: dict[int, dict[int, None]]
        for event in self._pending:
            alive[event.post.thread][id(event.post)] = None
        for rank, writer in enumerate(self._writers):
            writer.posts = [post for post in writer.posts if id(post) in alive.get(rank, {})]
            writer.ordered = {peer: rename(mask) for peer, mask in writer.ordered.items()}
            for post in writer.posts:
                for name in ("accepts", "places", "shown", "returns", "cqes", "rcqes", "flushes"):
                    setattr(post, name, rename(getattr(post, name)))
        self._nics = {nic: [rename(mask) for mask in queue] for nic, queue in self._nics.items()}
        self._number.events = list(self._pending)
        self._done = 0


def usable_signals(profile: str) -> list[str]:
    """The signal mechanisms that the simulated fabric can run on a profile, right or wrong there."""
    contract = profiles.get(profile)
    if contract.machine != "network" or contract.covers_all:
        networks = [n for n, p in profiles.PROFILES.items() if p.machine == "network" and not p.covers_all]
        raise InvalidArgument(f"fabric {profile!r} is no network; valid: {', '.join(networks)}")
    return [n for n, m in signals.MECHANISMS.items() if m.suits(contract) and m.reader not in _UNSUPPORTED]


class FabricTransport(Inproc):
    """One rank's end of a Fabric: threads as in `Inproc`, but `windows` holds the own window and staging copies of the
    others."""

    name = "fabric"
    mechanism = "simulated: the World's `signal`"
    profile = "the World's `fabric`"

    def __init__(self, bootstrap: Bootstrap, window_bytes: int, output_bytes: int) -> None:
        super().__init__(bootstrap, window_bytes, 0)  # no peer could write there
        assert isinstance(self._crew.fabric, Fabric)
        self._fabric = self._crew.fabric
        self._fabric.windows = self.windows
        own = self.windows[self.rank]
        self.windows = [w if w is own else np.zeros(window_bytes, np.uint8) for w in self.windows]

    def put_signal(self, peer: int, segments: Segments, word: int, value: int) -> None:
        self._fabric.put_signal(self.rank, peer, self.windows[peer], segments, word, value)

    def wait(self, word: int, wanted: int) -> int:
        """The own window's word once it is >= `wanted`, or whatever it is when time has advanced."""
        words = self.windows[self.rank].view(np.int64)
        self._fabric.turns.stop(self.rank, lambda: int(words[word // 8]) >= wanted)
        return int(words[word // 8])

    def clock(self) -> float:
        """Simulated seconds: time advances only when nothing else can happen."""
        return self._fabric.turns.time_s
