"""Signal mechanisms: the ways in which a transport can turn "put, then signal" into network operations.

A mechanism is a choice; whether it is a correct one on a profile is what the checker answers. Every mechanism moves the
same rows; the last row of a message may lie far from the first, so rows are two words unless there is only one.

>>> from expertwire.ordering.verbs import Loc
>>> message = Message("r1", (Loc("r1", "first"), Loc("r1", "last")), 7, Loc("r1", "word"), 0, 7 << 24 | 3)
>>> [type(op).__name__ for op in get("atomic").lower(message, Queue())]
['Write', 'Write', 'Atomic']
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from expertwire.errors import InvalidArgument
from expertwire.ordering.profiles import Profile
from expertwire.ordering.verbs import (
    Action,
    Arrival,
    Atomic,
    Completion,
    Loc,
    Notify,
    OrderPuts,
    Queue,
    Quiet,
    Read,
    Send,
    Write,
)


@dataclass(frozen=True, slots=True)
class Message:
    """Rows for `peer`, each holding `step`, and the word that vouches for them: it held `old` and shall hold `new`.

    `bundle` numbers the messages of a thread. Without rows it is a mere signal.
    """

    peer: str
    rows: tuple[Loc, ...]
    step: int
    word: Loc
    old: int
    new: int
    bundle: int = 1


Reader = Literal["word", "counted", "tagged", "cleaned"]


@dataclass(frozen=True, slots=True)
class Mechanism:
    """`lower` yields the operations of one message. `reader` says what the reading side does besides waiting for the
    word: count immediates, wait for the tag of each row, or clean the word. `suits` says where it exists at all."""

    name: str
    text: str
    lower: Callable[[Message, Queue], Iterator[Action]]
    suits: Callable[[Profile], bool]
    reader: Reader = "word"


def counter_of(word: Loc) -> Loc:
    """Where the immediates that belong to a word are counted."""
    return Loc(word.rank, f"{word.name}.count")


def _rows(message: Message, queue: Queue, bundled: bool = False) -> Iterator[Action]:
    for row in message.rows:
        yield Write(queue, (row,), (message.step,), bundle=message.bundle if bundled else 0)


def _write(message: Message, queue: Queue) -> Iterator[Action]:
    yield from _rows(message, queue)
    yield Write(queue, (message.word,), (message.new,))


def _atomic(message: Message, queue: Queue) -> Iterator[Action]:
    yield from _rows(message, queue)
    yield Atomic(queue, message.word, message.new - message.old)


def _add(message: Message, queue: Queue) -> Iterator[Action]:
    yield from _rows(message, queue)
    yield Atomic(queue, message.word, message.new)


def _imm(message: Message, queue: Queue) -> Iterator[Action]:
    arrival = Arrival(message.word, "max", message.new)
    for row in message.rows[:-1]:
        yield Write(queue, (row,), (message.step,))
    if message.rows:
        yield Write(queue, message.rows[-1:], (message.step,), arrival=arrival)
    else:
        yield Send(queue, arrival)


def _counted(message: Message, queue: Queue) -> Iterator[Action]:
    for row in message.rows:
        yield Write(queue, (row,), (message.step,), arrival=Arrival(counter_of(message.word)))
    yield Send(queue, Arrival(message.word, "max", message.new))


def _put_signal(message: Message, queue: Queue) -> Iterator[Action]:
    if message.rows:
        yield Write(queue, message.rows, (message.step,) * len(message.rows), bundle=message.bundle)
    yield Notify(queue, message.word, message.new, covers="own", bundle=message.bundle)


def _signal_last(message: Message, queue: Queue, covers: Any) -> Iterator[Action]:
    for i, row in enumerate(message.rows):
        last = i == len(message.rows) - 1
        yield Write(queue, (row,), (message.step,), bundle=message.bundle if last else 0)
    yield Notify(queue, message.word, message.new, covers=covers, bundle=message.bundle)


def _weak(message: Message, queue: Queue) -> Iterator[Action]:
    return _signal_last(message, queue, "own")


def _strong(message: Message, queue: Queue) -> Iterator[Action]:
    return _signal_last(message, queue, "profile")


def _fence(message: Message, queue: Queue) -> Iterator[Action]:
    yield from _rows(message, queue)
    yield OrderPuts(queue)
    yield Write(queue, (message.word,), (message.new,))


def _flush(message: Message, queue: Queue) -> Iterator[Action]:
    yield from _rows(message, queue)
    yield Quiet(queue)
    yield Write(queue, (message.word,), (message.new,))


def _read_back(message: Message, queue: Queue) -> Iterator[Action]:
    yield from _rows(message, queue)
    if message.rows:
        yield Read(queue, message.rows[-1], Loc("", f"{message.word.name}.read {message.bundle}"))
    yield Completion(queue)
    yield Write(queue, (message.word,), (message.new,))


def _verbs(profile: Profile) -> bool:
    return profile.name.startswith(("rc", "srd"))


def _signals(*families: str) -> Callable[[Profile], bool]:
    return lambda profile: profile.name.startswith(families)


def _remote(profile: Profile) -> bool:
    return not profile.covers_all and profile.machine == "network"


MECHANISMS: dict[str, Mechanism] = {
    m.name: m
    for m in (
        Mechanism("write", "rows, then a plain write of the word", _write, lambda p: p.machine == "network"),
        Mechanism("atomic", "rows, then a fetch-add of the known growth of the word", _atomic, _remote),
        Mechanism("add", "rows, then an atomic add onto 0; the reader cleans the word", _add, _remote, "cleaned"),
        Mechanism("imm", "the last row is written with an immediate", _imm, _verbs),
        Mechanism(
            "counted", "every row carries an immediate, counted; the count travels too", _counted, _verbs, "counted"
        ),
        Mechanism("put_signal", "one put of all rows, fused with its signal", _put_signal, _signals("shmem", "gin")),
        Mechanism("weak", "puts, then a signal bundled with the last of them", _weak, _signals("shmem", "gin")),
        Mechanism("strong", "puts, then a signal as strong as the profile has", _strong, _signals("gin")),
        Mechanism("fence", "puts, a fence, then a put of the word", _fence, lambda p: p.order_puts),
        Mechanism("flush", "puts, wait for quiet (completion), then a put of the word", _flush, _remote),
        Mechanism("read", "puts, a READ, wait for it, then a write of the word", _read_back, _signals("rc", "srd")),
        Mechanism("tagged", "the word lies in the data and every row carries its step", _write, _remote, "tagged"),
        Mechanism("release", "stores, then a release store of the word", _strong, _signals("host", "ptx")),
    )
}


def get(name: str) -> Mechanism:
    """The mechanism of that name."""
    if name not in MECHANISMS:
        raise InvalidArgument(f"unknown signal {name!r}; valid: {', '.join(MECHANISMS)}")
    return MECHANISMS[name]


# ---- cost ------------------------------------------------------------------------------------------------------------

_BTH, _RETH, _IMM, _ATOMIC, _AETH, _ATOMIC_ACK = 16, 16, 4, 28, 4, 8  # InfiniBand transport headers with the ICRC
_WORD, _WORD_NAME = 8, "word"


@dataclass(frozen=True, slots=True)
class Cost:
    """What the signal of one message costs on top of its rows.

    `round_trips` are extra round trips before the reader sees the word, `packets` and `bytes` count both directions
    without link headers, `completions` are (at the writer, at the reader).
    """

    round_trips: int
    packets: int
    bytes: int
    completions: tuple[int, int]

    def __str__(self) -> str:
        writer, reader = self.completions
        return (
            f"+{self.round_trips} round trips, {self.packets} packets, {self.bytes} bytes, "
            f"completion entries {writer} at the writer, {reader} at the reader"
        )


def cost(mechanism: Mechanism, profile: Profile, num_rows: int = 2) -> Cost:
    """The cost of one signal, from the operations that the mechanism posts, less those of the bare rows.

    >>> from expertwire.ordering.profiles import get as profile
    >>> str(cost(get("atomic"), profile("rc.spec")))
    '+0 round trips, 2 packets, 72 bytes, completion entries 0 at the writer, 0 at the reader'
    """
    peer = "r1"
    rows = tuple(Loc(peer, f"row{i}") for i in range(num_rows))
    word = Loc(peer, _WORD_NAME)
    actions = list(mechanism.lower(Message(peer, rows, 1, word, 0, 1 << 24), Queue()))
    bare = _sum([replace(a, arrival=None) for a in actions if isinstance(a, Write) and word not in a.target], profile)
    whole = _sum(actions, profile)
    packets, size = whole.packets - bare.packets, whole.bytes - bare.bytes
    if mechanism.reader == "tagged":  # the word travels in the packet of the first row, and every row has a tag
        packets, size = 0, _WORD * (num_rows + 1)
    return Cost(whole.round_trips, packets, size, whole.completions)


def _sum(actions: Sequence[Action], profile: Profile) -> Cost:
    trips = packets = size = local = remote = 0
    for action in actions:
        match action:
            case Write(target=target, arrival=arrival):
                packets += 2
                size += 2 * _BTH + _RETH + _AETH + _WORD * sum(loc.name == _WORD_NAME for loc in target)
                if arrival:
                    size, remote = size + _IMM, remote + 1
            case Notify():
                packets, size = packets + 2, size + 2 * _BTH + _RETH + _AETH + _WORD
            case Atomic():
                packets, size = packets + 2, size + 2 * _BTH + _ATOMIC + _AETH + _ATOMIC_ACK
                # on a network that reorders, the NIC holds the atomic until earlier writes are acknowledged
                trips += int(profile.wire == "any" and profile.amo_waits == "placed")
            case Send():
                packets, size, remote = packets + 2, size + 2 * _BTH + _AETH + _IMM, remote + 1
            case Read():
                packets, size = packets + 2, size + 2 * _BTH + _RETH + _AETH + _WORD
            case Completion() | Quiet():
                trips, local = trips + 1, local + 1
            case OrderPuts():
                trips += int(profile.wire == "any")
    return Cost(trips, packets, size, (local, remote))
