"""A model of DeepEP V1's low-latency dispatch and combine, written from its description in words.

Every operation k (dispatch or combine alike) uses buffer k % 2, and every rank does, in stream order:

    send(k)      WRITE the rows to every peer; set the flags of operation k + 1 to 0 (`next_clean`); then add n + 1 to
                 the own flag at every peer, by an atomic on the queue of the rows
    receive(k)   wait until every peer's flag is not 0; n = flag - 1; read n rows

The argument why two buffers are enough: a peer adds to my flag of k + 1 only after it received my flag of k, which I
sent after I had cleaned that flag. `Options` turns each assumption of this argument off. (The code adds -n - 1; the
sign plays no role. Flags and rows for the own rank are left out.)
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal

from expertwire.ordering.program import Answer, Program, Thread
from expertwire.ordering.verbs import AddWord, Atomic, Await, Claim, LoadWord, Loc, Queue, Sometimes, StoreWord, Write

Actions = Generator[Any, Answer, None]
Half = tuple[Literal["send", "receive", "unmask"], int]


def in_order(num_ops: int) -> tuple[Half, ...]:
    """Stream order: receive(k) before send(k + 1)."""
    return tuple(half for k in range(1, num_ops + 1) for half in (("send", k), ("receive", k)))


@dataclass(frozen=True, slots=True)
class Options:
    """What a rank does; the defaults are DeepEP's.

    `halves` is its order of sends and receives. `masks` lists (rank, peer): that rank skips that peer from the start,
    `gives_up` those who may time out. `unmask` in `halves` ends that without a clean. `flags_at(k)` names the flag area
    of operation k, `keeps(k)` an earlier operation whose rows are still needed when k is sent (combine of dispatch).
    """

    halves: tuple[Half, ...] = in_order(3)
    signal: Literal["atomic", "write"] = "atomic"
    flag_queue: str = "q"
    clean: Literal["before", "after", "skip 2"] = "before"
    num_data_buffers: int = 2
    count: Callable[[int], int] = lambda k: (k + 1) % 3
    zero_is_zero: bool = False
    masks: tuple[tuple[int, int], ...] = ()
    gives_up: tuple[tuple[int, int], ...] = ()
    flags_at: Callable[[int], str] = lambda k: f"flags{k % 2}"
    rows_at: Callable[[int], str] | None = None
    keeps: Callable[[int], int] = lambda k: 0


def ll_program(name: str, options: Options, num_ranks: int = 2) -> Program:
    """The program of all ranks."""
    names = [f"r{rank}" for rank in range(num_ranks)]
    return Program(name, tuple(Thread(n, n, _body(rank, num_ranks, options)) for rank, n in enumerate(names)))


def _body(rank: int, num_ranks: int, options: Options) -> Callable[[], Actions]:
    return lambda: _Rank(rank, num_ranks, options).run()


class _Rank:
    def __init__(self, rank: int, num_ranks: int, options: Options) -> None:
        self.rank, self.options = rank, options
        self.peers = [p for p in range(num_ranks) if p != rank]
        self.masked = {peer for who, peer in options.masks if who == rank}

    def run(self) -> Actions:
        for half, k in self.options.halves:
            if half == "send":
                yield from self._send(k)
            elif half == "receive":
                yield from self._receive(k)
            else:
                self.masked.clear()

    def _flag(self, owner: int, k: int, writer: int) -> Loc:
        return Loc(f"r{owner}", f"{self.options.flags_at(k)}.from r{writer}")

    def _rows(self, owner: int, k: int, writer: int) -> Loc:
        area = self.options.rows_at or (lambda k: f"rows{k % self.options.num_data_buffers}")
        return Loc(f"r{owner}", f"{area(k)}.from r{writer}")

    def _send(self, k: int) -> Actions:
        options = self.options
        kept = options.keeps(k)
        for peer in self.peers:
            if kept:
                yield LoadWord(
                    self._rows(self.rank, kept, peer), expect=kept, note=f"rows that operation {k} sends back"
                )
            if options.count(k) and peer not in self.masked:
                yield Write(Queue(f"q{peer}"), (self._rows(peer, k, self.rank),), (k,))
        if options.clean == "before" or (options.clean == "skip 2" and k != 2):
            yield from self._clean(k + 1)
        for peer in self.peers:
            if peer not in self.masked:
                yield from self._raise_flag(peer, k)
        if options.clean == "after":
            yield from self._clean(k + 1)

    def _clean(self, k: int) -> Actions:
        for peer in self.peers:
            yield StoreWord(self._flag(self.rank, k, peer), 0, note=f"clean for operation {k}")

    def _raise_flag(self, peer: int, k: int) -> Actions:
        options = self.options
        value = options.count(k) + (0 if options.zero_is_zero else 1)
        queue = Queue(f"q{peer}" if options.flag_queue == "q" else options.flag_queue)
        flag = self._flag(peer, k, self.rank)
        if options.signal == "atomic":
            yield Atomic(queue, flag, value)
        else:
            yield Write(queue, (flag,), (value,))

    def _receive(self, k: int) -> Actions:
        options = self.options
        for peer in self.peers:
            if peer in self.masked:
                continue
            may_expire = (self.rank, peer) in options.gives_up
            seen = yield Await(self._flag(self.rank, k, peer), "!=", 0, may_expire, note=f"flag of operation {k}")
            if seen is None:
                self.masked.add(peer)
                yield Sometimes("a peer was masked")
                continue
            count = seen - (0 if options.zero_is_zero else 1)
            if count != options.count(k):
                text = f"r{self.rank} got {count} rows from r{peer} in operation {k}, sent were {options.count(k)}"
                yield Claim(False, "wrong count", text)
            if count:
                yield LoadWord(self._rows(self.rank, k, peer), expect=k, note=f"rows of operation {k} from r{peer}")


# ---- other pieces of the same code -----------------------------------------------------------------------------------


def shared_slots(two_streams: bool) -> Program:
    """Two operations allocate slots from one workspace counter and reset it at their end (D15)."""

    def operation(k: int) -> Actions:
        counter = Loc("A", "slots")
        slot = yield _take(counter)
        yield Write(Queue(f"q{k}"), (Loc("B", f"op{k}.slot{slot}"),), (k,))
        yield Atomic(Queue(f"q{k}"), Loc("B", f"flag{k}"))
        yield StoreWord(counter, 0)

    def one_stream() -> Actions:
        yield from operation(1)
        yield from operation(2)

    def reader() -> Actions:
        for k in (1, 2):
            yield Await(Loc("B", f"flag{k}"), ">=", 1)
            yield LoadWord(Loc("B", f"op{k}.slot0"), expect=k, note=f"the row of operation {k}")

    if two_streams:
        senders = [Thread(f"stream {k}", "A", lambda k=k: operation(k)) for k in (1, 2)]  # type: ignore[misc]
    else:
        senders = [Thread("stream", "A", one_stream)]
    return Program("slots", (*senders, Thread("B", "B", reader)))


def counter_barrier(generation_first: bool) -> Program:
    """A barrier of two threads on a counter with generations (D16)."""

    def thread() -> Actions:
        generation, arrived = Loc("A", "generation"), Loc("A", "arrived")
        seen: Answer = 0
        if generation_first:
            seen = yield LoadWord(generation)
        before = yield _take(arrived)
        if not generation_first:
            seen = yield LoadWord(generation)
        if before == 1:
            yield StoreWord(arrived, 0)
            yield StoreWord(generation, (seen or 0) + 1)
        else:
            yield Await(generation, "!=", seen or 0)

    return Program("counter barrier", tuple(Thread(f"t{i}", "A", thread) for i in (1, 2)))


def _take(counter: Loc) -> Any:
    return AddWord(counter, 1)


def wide_signal(mask: int) -> Program:
    """A signal whose low 32 bits are 0, awaited with `mask` (D17)."""

    def writer() -> Actions:
        yield Atomic(Queue(), Loc("B", "f"), 1 << 32)

    def reader() -> Actions:
        yield Await(Loc("B", "f"), "!=", 0, mask=mask)

    return Program("wide signal", (Thread("A", "A", writer), Thread("B", "B", reader)))


# ---- cases -----------------------------------------------------------------------------------------------------------

_RC = ("rc.spec", "rc.hw", "rc.ro", "rc.ooo")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A case: "A" = the fault is reachable, "F" = the model holds on all interleavings."""

    profiles: tuple[str, ...]
    verdict: Literal["A", "F"]
    build: Callable[[], Program]
    remark: str = ""


def _ll(
    profiles: tuple[str, ...], verdict: Literal["A", "F"], remark: str = "", ranks: int = 2, **options: Any
) -> Scenario:
    return Scenario(profiles, verdict, lambda: ll_program(remark or "DeepEP LL", Options(**options), ranks), remark)


_HOOKS: tuple[Half, ...] = (("send", 1), ("send", 2), ("receive", 1), ("receive", 2))
_TWO_EACH = in_order(4)
_UNMASK: tuple[Half, ...] = (
    ("send", 1), ("receive", 1), ("send", 2), ("receive", 2), ("unmask", 0), ("send", 3), ("receive", 3),
)  # fmt: skip
_BOTH = ((0, 1), (1, 0))

SCENARIOS: dict[str, tuple[Scenario, ...]] = {
    "D1": (
        _ll(("rc.spec", "rc.ro", "rc.ooo"), "A", "plain WRITE count", signal="write"),
        _ll(("rc.hw",), "F", "plain WRITE count, one static path", signal="write"),
        _ll(_RC, "F", "the atomic that replaced it"),
    ),
    "D2": (_ll(_RC, "A", "flag on another queue pair", flag_queue="other"),),
    "D3": (_ll(_RC, "A", "cleaned after the own flag was sent", clean="after"),),
    "D4": (_ll(_RC, "A", "send 2 before receive 1", halves=_HOOKS),),
    "D5": (
        _ll(_RC, "F", "three operations in stream order"),
        _ll(("rc.spec",), "F", "the same with three ranks", ranks=3),
        _ll(("rc.spec",), "F", "five operations", halves=in_order(5)),
    ),
    "D6": (_ll(_RC, "A", "one data buffer", num_data_buffers=1, count=lambda k: 1),),
    "D7": (
        _ll(_RC, "A", "zero rows sent as 0", zero_is_zero=True),
        _ll(_RC, "F", "zero rows sent as 1"),
    ),
    "D8": (_ll(_RC, "A", "one clean is missed", clean="skip 2", halves=in_order(3)),),
    "D9": (
        _ll(_RC, "A", "timeout, late flag, unmask without clean", halves=_UNMASK, gives_up=_BOTH),
        _ll(_RC, "F", "masked for good", halves=in_order(3), gives_up=_BOTH),
    ),
    "D15": (
        Scenario(_RC, "A", lambda: shared_slots(two_streams=True), "two streams"),
        Scenario(_RC, "F", lambda: shared_slots(two_streams=False), "one stream"),
    ),
    "D16": (
        Scenario(("host",), "A", lambda: counter_barrier(generation_first=False), "generation read after the arrival"),
        Scenario(("host",), "F", lambda: counter_barrier(generation_first=True), "generation read before"),
    ),
    "D17": (
        Scenario(("rc.spec",), "A", lambda: wide_signal(0xFFFFFFFF), "compared in 32 bits"),
        Scenario(("rc.spec",), "F", lambda: wide_signal(-1), "compared in 64 bits"),
    ),
    "D18": (
        _ll(
            _RC, "A", "operation 2 has its flags where operation 1 has rows", count=lambda k: 1,
            flags_at=lambda k: "a" if k == 2 else f"flags{k % 2}", rows_at=lambda k: "a" if k == 1 else f"rows{k}",
        ),
        _ll(_RC, "F", "flags at a fixed place", count=lambda k: 1),
    ),
    "D19": (
        _ll(_RC, "A", "r0 skips r1, r1 does not skip r0", halves=_UNMASK, masks=((0, 1),), gives_up=((1, 0),)),
    ),
    "D22": (
        _ll(
            _RC, "A", "dispatch, dispatch, combine, combine", halves=_TWO_EACH, count=lambda k: 1,
            keeps=lambda k: {3: 1, 4: 2}.get(k, 0), rows_at=lambda k: f"rows{k % 2}",
        ),
        _ll(
            _RC, "F", "dispatch, combine, dispatch, combine", halves=_TWO_EACH, count=lambda k: 1,
            keeps=lambda k: {2: 1, 4: 3}.get(k, 0), rows_at=lambda k: f"rows{k % 2}",
        ),
    ),
}  # fmt: skip
