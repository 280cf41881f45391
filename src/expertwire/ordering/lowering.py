"""From protocol operations to network operations: one rank's thread of a program.

Rows are words that hold the step that wrote them, so that the checker can say which step a reader saw. Rows and words
for the own rank are local stores, as in every engine. Nothing here knows any protocol: the encoding of signal words and
the truth about counts are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Literal

from expertwire.errors import InvalidArgument
from expertwire.ordering.operations import Load, Operation, Order, PutSignal, Region, Scope, Signal, Wait, Word
from expertwire.ordering.program import Answer, Thread, in_turn
from expertwire.ordering.ptx_verbs import Arrive, Ld, Leave, St
from expertwire.ordering.signals import Mechanism, Message, counter_of
from expertwire.ordering.verbs import Await, Claim, LoadWord, Loc, Queue, Sometimes, StoreWord

Steps = Generator[Operation, int | None, None]
Actions = Generator[Any, Answer, None]


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a signal word holds (epoch, count)."""

    pack: Callable[[int, int], int]
    unpack: Callable[[int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a rank's operations are carried out; the fields below `truth` are ways to do it wrong.

    `truth(word, epoch, reader)` is the count that the writer sends, for the check of what the reader gets; None where
    the count means nothing. `may_expire(word, epoch, reader)` lets a wait end without its signal: the writer is masked
    from then on, or readmitted at its next wait. `paired` gives the word that vouches for rows.
    """

    mechanism: Mechanism
    encoding: Encoding
    truth: Callable[[Word, int, int], int | None]
    paired: Callable[[Region], Word]
    may_expire: Callable[[Word, int, int], bool] = lambda word, epoch, reader: False
    signal_first: bool = False
    signal_queue: str = ""
    clean_after: bool = False
    readmit: Literal["never", "by epoch", "by any word"] = "never"
    order: Order = Order.RELEASE
    scope: Scope = Scope.SYS


def rank_name(rank: int) -> str:
    """The name of a rank in traces."""
    return f"r{rank}"


def rows_of(owner: int, region: Region, count: int) -> tuple[Loc, ...]:
    """The words that stand for `count` rows: first and last."""
    name = f"{region.lane}.b{region.bank}.from r{region.writer}"
    places = ("first", "last") if count > 1 else ("first",) * min(count, 1)
    return tuple(Loc(rank_name(owner), f"{name}.{place}") for place in places)


def word_of(owner: int, word: Word) -> Loc:
    """The place of a signal word in its reader's window."""
    return Loc(rank_name(owner), f"{word.purpose}.b{word.bank}.from r{word.writer}")


class RankThread:
    """The state of one rank while its protocol is lowered: what it has sent, awaited and masked."""

    def __init__(self, rank: int, settings: Settings) -> None:
        self.rank, self.settings = rank, settings
        self.sent: dict[Loc, int] = {}
        self.awaited: dict[Word, int] = {}
        self.counted: dict[Loc, int] = {}
        self.masked: set[int] = set()
        self.bundle = 0

    def run(self, steps: Steps) -> Actions:
        """Lower every operation of `steps`, answering its waits."""
        answer: int | None = None
        while True:
            try:
                operation = steps.send(answer)
            except StopIteration:
                return
            answer = None
            match operation:
                case PutSignal(peer, region, count, word, epoch):
                    if not self._skips(peer):
                        yield from self._send(peer, rows_of(peer, region, count), word, epoch, count)
                case Signal(peer, word, epoch, count):
                    if not self._skips(peer):
                        yield from self._send(peer, (), word, epoch, count)
                case Wait(word, epoch):
                    answer = yield from self._wait(word, epoch)
                case Load(region, count):
                    yield from self._load(region, count)
                case _:
                    raise InvalidArgument(f"no protocol uses {type(operation).__name__}; lower it here when one does")

    def _skips(self, peer: int) -> bool:
        return peer in self.masked and self.settings.readmit == "never"

    # ---- writing -----------------------------------------------------------------------------------------------------

    def _send(self, peer: int, rows: tuple[Loc, ...], word: Word, epoch: int, count: int) -> Actions:
        place, value = word_of(peer, word), self.settings.encoding.pack(epoch, count)
        self.bundle += 1
        old = 0 if self.settings.mechanism.reader == "cleaned" else self.sent.get(place, 0)
        message = Message(rank_name(peer), rows, epoch, place, old, value, self.bundle)
        self.sent[place] = value
        if peer == self.rank:
            for row in rows:
                yield StoreWord(row, epoch)
            yield StoreWord(place, value)
            return
        actions = list(self.settings.mechanism.lower(message, Queue(f"q{peer}")))
        if self.settings.signal_queue:
            signal: Any = actions[-1]
            actions[-1] = replace(signal, queue=Queue(self.settings.signal_queue))
        if self.settings.signal_first:
            actions = [actions[-1], *actions[:-1]]
        yield from in_turn(actions)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def _wait(self, word: Word, epoch: int) -> Generator[Any, Answer, int | None]:
        settings, writer = self.settings, word.writer
        if self._skips(writer):
            return None
        place = word_of(self.rank, word)
        expire = settings.may_expire(word, epoch, self.rank)
        any_word = writer in self.masked and settings.readmit == "by any word"
        wanted = 1 if any_word else settings.encoding.pack(epoch, -1)
        note = f"{word.purpose} of step {epoch} from r{writer}"
        seen = yield Await(place, ">=", wanted, expire, note=note)
        if seen is None:
            self.masked.add(writer)
            yield Sometimes("a peer was masked")
            return None
        if settings.mechanism.reader == "cleaned" or settings.clean_after:
            yield StoreWord(place, 0, note="cleaned by the reader")
        found, count = settings.encoding.unpack(seen)
        truth = settings.truth(word, epoch, self.rank)
        if truth is not None and count != truth:
            text = f"r{self.rank} got {count} rows from r{writer} for step {epoch} (word of step {found})"
            yield Claim(False, "wrong count", f"{text}, sent were {truth}")
        self.awaited[word] = epoch
        if settings.mechanism.reader == "counted" and truth is not None and writer != self.rank:
            counter = counter_of(place)
            self.counted[counter] = self.counted.get(counter, 0) + len(rows_of(self.rank, Region("", 0, 0), count))
            yield Await(counter, ">=", self.counted[counter], note=f"all rows of step {epoch} from r{writer}")
        return count

    def _load(self, region: Region, count: int) -> Actions:
        step = self.awaited[self.settings.paired(region)]
        for row in rows_of(self.rank, region, count):
            if self.settings.mechanism.reader == "tagged":
                yield Await(row, ">=", step, note=f"tag of step {step}")
            yield LoadWord(row, expect=step, note=f"{region.lane} rows from r{region.writer}")


def network_thread(rank: int, protocol: Callable[[], Steps], settings: Settings) -> list[Thread]:
    """The thread of a rank on a network profile."""
    name = rank_name(rank)
    return [Thread(name, name, lambda: RankThread(rank, settings).run(protocol()))]


# ---- ptx: a rank is a CTA of two threads -----------------------------------------------------------------------------


class _Cta:
    """One thread of a CTA. The leader waits and signals, the mover writes and reads rows.

    Both run the same protocol and meet at a barrier when the mover needs what the leader acquired, or the leader
    publishes what the mover did. The mover knows the counts as the real mover would after the barrier.
    """

    def __init__(self, rank: int, settings: Settings, leads: bool, barriers: bool) -> None:
        self.rank, self.settings, self.leads, self.barriers = rank, settings, leads, barriers
        self.awaited: dict[Word, int] = {}
        self.num_barriers = 0
        self.acquired = self.moved = False

    def run(self, steps: Steps) -> Actions:
        """Lower every operation of `steps`."""
        answer: int | None = None
        while True:
            try:
                operation = steps.send(answer)
            except StopIteration:
                return
            answer = None
            match operation:
                case PutSignal(peer, region, count, word, epoch):
                    yield from self._move([St(row, epoch) for row in rows_of(peer, region, count)])
                    yield from self._signal(peer, word, epoch, count)
                case Signal(peer, word, epoch, count):
                    yield from self._signal(peer, word, epoch, count)
                case Wait(word, epoch):
                    answer = yield from self._wait(word, epoch)
                case Load(region, count):
                    step = self.awaited[self.settings.paired(region)]
                    note = f"{region.lane} rows from r{region.writer}"
                    yield from self._move(
                        [Ld(row, expect=step, note=note) for row in rows_of(self.rank, region, count)]
                    )
                case _:
                    raise InvalidArgument(f"no protocol uses {type(operation).__name__}; lower it here when one does")

    def _meet(self) -> Actions:
        self.acquired = self.moved = False
        if self.barriers:
            self.num_barriers += 1
            name = f"r{self.rank} bar {self.num_barriers}"
            yield Arrive(name, 2)
            yield Leave(name, 2)

    def _move(self, actions: list[Any]) -> Actions:
        if self.acquired and actions:
            yield from self._meet()
        self.moved |= bool(actions)
        yield from in_turn([] if self.leads else actions)

    def _signal(self, peer: int, word: Word, epoch: int, count: int) -> Actions:
        if self.moved:
            yield from self._meet()
        if self.leads:
            value = self.settings.encoding.pack(epoch, count)
            yield St(word_of(peer, word), value, self.settings.order, self.settings.scope)

    def _wait(self, word: Word, epoch: int) -> Generator[Any, Answer, int | None]:
        settings = self.settings
        self.acquired = True
        self.awaited[word] = epoch
        truth = settings.truth(word, epoch, self.rank)
        if not self.leads:
            return truth
        note = f"{word.purpose} of step {epoch} from r{word.writer}"
        wanted = settings.encoding.pack(epoch, -1)
        place = word_of(self.rank, word)
        seen = yield Ld(place, Order.ACQUIRE, settings.scope, compare=">=", value=wanted, note=note)
        count = settings.encoding.unpack(seen or 0)[1]
        if truth is not None and count != truth:
            yield Claim(False, "wrong count", f"r{self.rank} got {count} rows for step {epoch}, sent were {truth}")
        return count


def cta_threads(rank: int, protocol: Callable[[], Steps], settings: Settings, barriers: bool = True) -> list[Thread]:
    """The threads of a rank on a ptx profile: rank = device."""

    def body(leads: bool) -> Callable[[], Actions]:
        return lambda: _Cta(rank, settings, leads, barriers).run(protocol())

    return [
        Thread(f"r{rank} {role}", rank_name(rank), body(i == 0), place=(rank, 0, i))
        for i, role in enumerate(("leader", "mover"))
    ]
