"""Our protocols as programs for the checker: the generators of `expertwire.protocols`, several steps in a row.

dispatch    one lane, each step sent, received and finished; three steps on two banks, so that a bank is reused
deferred    one lane, two steps in flight, as with `defer_receive`
combine     a dispatch lane and a combine lane, turn by turn
rendezvous  one lane, three steps on two banks: large puts are announced, and a rank defers the first step
barrier     three barriers in a row
refused     one lane, a rank rejects its own arguments in the first step
masked      dispatch with two ranks that may give up on each other at any wait
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from expertwire.errors import InvalidArgument
from expertwire.ordering import signals
from expertwire.ordering.explore import Result, explore
from expertwire.ordering.lowering import Encoding, Settings, cta_threads, network_thread
from expertwire.ordering.operations import Load, Region, Wait, Word
from expertwire.ordering.profiles import Profile
from expertwire.ordering.program import Program
from expertwire.protocols import barrier as barrier_protocol
from expertwire.protocols import epoch_signal, lane, rendezvous
from expertwire.protocols.lane import Lane, Step, ring

ENCODING = Encoding(epoch_signal.pack, epoch_signal.unpack)
Protocol = Callable[[int, int], Step]


def rows_sent(writer: int, reader: int, epoch: int) -> int:
    """Rows per step: none, one and several occur, successive steps differ, and steps that share a bank have rows.

    >>> [rows_sent(0, 1, e) for e in (1, 2, 3)], [rows_sent(1, 0, e) for e in (1, 2, 3)]
    ([2, 0, 2], [0, 2, 1])
    """
    return (2, 1, 2, 0)[(2 * writer + reader + epoch) % 4]


def counts(rank: int, num_ranks: int, epoch: int) -> list[int]:
    """What `rank` sends to every rank."""
    return [rows_sent(rank, peer, epoch) for peer in range(num_ranks)]


def dispatch(rank: int, num_ranks: int, steps: int = 3, banks: int = 2) -> Step:
    """Send, receive, finish."""
    one = Lane("dispatch", banks)
    for epoch in range(1, steps + 1):
        yield from lane.send(one, rank, epoch, counts(rank, num_ranks, epoch))
        yield from lane.receive(one, rank, epoch, num_ranks)
        yield from lane.finish(one, rank, epoch, num_ranks)


def deferred(rank: int, num_ranks: int, steps: int = 3, banks: int = 2) -> Step:
    """Step e is received after step e + 1 has been sent."""
    one = Lane("dispatch", banks)
    for epoch in range(1, steps + 2):
        if epoch <= steps:
            yield from lane.send(one, rank, epoch, counts(rank, num_ranks, epoch))
        if epoch > 1:
            yield from lane.receive(one, rank, epoch - 1, num_ranks)
            yield from lane.finish(one, rank, epoch - 1, num_ranks)


def combine(rank: int, num_ranks: int, steps: int = 3, banks: int = 1) -> Step:
    """Dispatch, then combine, which sends back what came."""
    there, back = Lane("dispatch", banks), Lane("combine", banks)
    for epoch in range(1, steps + 1):
        for one in (there, back):
            yield from lane.send(one, rank, epoch, counts(rank, num_ranks, epoch))
            yield from lane.receive(one, rank, epoch, num_ranks)
            yield from lane.finish(one, rank, epoch, num_ranks)


def rows_unless_refused(writer: int, reader: int, epoch: int) -> int:
    """As `rows_sent`, but rank 1 rejects its own arguments in step 1."""
    return epoch_signal.REFUSED if (writer, epoch) == (1, 1) else rows_sent(writer, reader, epoch)


def refused(rank: int, num_ranks: int, steps: int = 3, banks: int = 2) -> Step:
    """A rank that refuses a step tells so; for the others it is void. The refusing rank reads none of its rows, but
    gives its windows back only when all are there, in its next call: a row under way must not land on a later one."""
    one = Lane("dispatch", banks)
    for epoch in range(1, steps + 1):
        yield from lane.send(one, rank, epoch, [rows_unless_refused(rank, peer, epoch) for peer in range(num_ranks)])
        if (rank, epoch) == (1, 1):
            yield from (Wait(one.ready(epoch, peer), epoch) for peer in ring(rank, num_ranks))
        else:
            yield from lane.receive(one, rank, epoch, num_ranks)
        yield from lane.finish(one, rank, epoch, num_ranks)


def defers(rank: int, epoch: int) -> bool:
    """Rank 1 receives step 1 after step 2."""
    return (rank, epoch) == (1, 1)


def announced(writer: int, reader: int, epoch: int, least: int) -> int:
    """Rows that the writer announces, if they are `least` at least."""
    count = rows_sent(writer, reader, epoch)
    return 0 if count < least or writer == reader or defers(writer, epoch) else count


def receive_announced(one: Lane, rank: int, epoch: int, num_ranks: int, least: int, at_once: bool = True) -> Step:
    """A receive half with its rendezvous. The caller looks at its rows until their memory is given to a peer again,
    which is `num_banks` steps later."""
    ranks, old = range(num_ranks), epoch - one.num_banks
    yield from lane.receive(one, rank, epoch, num_ranks)
    coming = {p: announced(p, rank, epoch, least) for p in ranks if announced(p, rank, epoch, least)}
    if at_once:
        for peer in ranks if old > 0 else ():
            if announced(peer, rank, old, least):
                yield Load(rendezvous.landing(one).rows(old, peer), announced(peer, rank, old, least))
        leaving = {p: announced(rank, p, epoch, least) for p in ranks if announced(rank, p, epoch, least)}
        yield from rendezvous.meet(one, rank, epoch, coming, leaving, [p for p in ranks if defers(p, epoch)])
    yield from rendezvous.land(one, epoch, coming)
    yield from lane.finish(one, rank, epoch, num_ranks)


def meet(rank: int, num_ranks: int, steps: int = 3, banks: int = 2, least: int = 2) -> Step:
    """Large puts wait for their places, small ones do not; rank 1 defers a step."""
    one, waiting = Lane("dispatch", banks), 0
    for epoch in range(1, steps + 1):
        yield from lane.send(one, rank, epoch, counts(rank, num_ranks, epoch))
        if defers(rank, epoch):
            waiting = epoch
            continue
        yield from receive_announced(one, rank, epoch, num_ranks, least)
        if waiting:
            yield from receive_announced(one, rank, waiting, num_ranks, least, at_once=False)
            waiting = 0


def barrier(rank: int, num_ranks: int, steps: int = 3) -> Step:
    """Barriers in a row."""
    for epoch in range(1, steps + 1):
        yield from barrier_protocol.barrier(rank, epoch, num_ranks)


@dataclass(frozen=True, slots=True)
class Model:
    """A protocol to check. `goals` are labels that an exploration must reach, `expiring` lets waits end early, `sent`
    is the truth about counts: (writer, reader, epoch) -> rows."""

    name: str
    text: str
    protocol: Protocol
    expiring: bool = False
    goals: tuple[str, ...] = ()
    sent: Callable[[int, int, int], int] = rows_sent


MODELS: dict[str, Model] = {
    m.name: m
    for m in (
        Model("dispatch", "one lane, three steps on two banks", dispatch),
        Model("deferred", "one lane, two steps in flight", deferred),
        Model("combine", "dispatch and combine lanes, three steps on one bank each", combine),
        Model("rendezvous", "large puts announced, three steps on two banks, a rank defers", meet),
        Model("refused", "one lane, a rank refuses the first step", refused, sent=rows_unless_refused),
        Model("barrier", "three barriers in a row", barrier),
        Model(
            "masked",
            "three steps on one bank, ranks give up on each other",
            lambda rank, n: dispatch(rank, n, steps=3, banks=1),
            expiring=True,
            goals=("a peer was masked",),
        ),
    )
}


def get(name: str) -> Model:
    """The model of that name."""
    if name not in MODELS:
        raise InvalidArgument(f"unknown protocol {name!r}; valid: {', '.join(MODELS)}")
    return MODELS[name]


def _paired(region: Region) -> Word:
    return Lane(region.lane, region.bank + 1).ready(region.bank, region.writer)


def settings(model: Model, mechanism: str, **wrong: Any) -> Settings:
    """How a model is carried out; `wrong` turns on one of the mistakes of `Settings`."""

    def truth(word: Word, epoch: int, reader: int) -> int | None:
        if word.purpose.endswith("_place_ready"):
            return 1
        return model.sent(word.writer, reader, epoch) if word.purpose.endswith("_ready") else None

    base = Settings(signals.get(mechanism), ENCODING, truth, _paired)
    if model.expiring:
        base = replace(base, may_expire=lambda word, epoch, reader: word.writer != reader)
    return replace(base, **wrong)


def program(model: Model, profile: Profile, used: Settings, num_ranks: int = 2, barriers: bool = True) -> Program:
    """The program that checks `model` on a profile. `barriers=False` leaves out those between threads of a CTA."""
    threads = []
    for rank in range(num_ranks):

        def protocol(rank: int = rank) -> Step:
            return model.protocol(rank, num_ranks)

        if profile.machine == "ptx":
            threads += cta_threads(rank, protocol, used, barriers)
        else:
            threads += network_thread(rank, protocol, used)
    name = f"{model.name}, {num_ranks} ranks, signal {used.mechanism.name}"
    return Program(name, tuple(threads), model.goals)


def check(
    model: Model,
    mechanism: str,
    profile: Profile,
    *,
    num_ranks: int = 2,
    mode: str = "exhaustive",
    max_states: int = 2_000_000,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    barriers: bool = True,
    **wrong: Any,
) -> Result:
    """Explore one model with one mechanism on one profile."""
    used = settings(model, mechanism, **wrong)
    if not used.mechanism.suits(profile):
        raise InvalidArgument(
            f"signal {mechanism!r} does not exist on {profile.name}; valid: {', '.join(suitable(profile))}"
        )
    checked = program(model, profile, used, num_ranks, barriers)
    return explore(checked, profile, mode, seed=seed, max_states=max_states, progress=progress)


# What our transports do, per profile: the cells of the matrix that must hold.
CLAIMS = {
    "rc.spec": ("atomic", "imm"),
    "rc.hw": ("atomic", "imm"),
    "rc.ro": ("atomic", "imm"),
    "rc.ro_pcieatomic": ("imm",),
    "rc.ooo": ("atomic", "imm"),
    "srd": ("counted",),
    "srd.transmit": ("counted",),
    "shmem": ("put_signal",),
    "gin.weak": ("put_signal",),
    "gin.strong": ("strong",),
    "ucx": ("fence",),
    "host": ("release",),
    "ptx": ("release",),
}
# Several barriers in a row set one word again before the earlier signal must have landed: they need ordered signals.
BARRIER_CLAIMS = CLAIMS | {"shmem": ("fence",), "gin.weak": ("atomic",)}


def claimed(model: str, mechanism: str, profile: str) -> bool:
    """Whether we rely on this cell."""
    claims = BARRIER_CLAIMS if model == "barrier" else CLAIMS
    return mechanism in claims.get(profile, ())


def suitable(profile: Profile) -> list[str]:
    """The signal mechanisms that exist on a profile."""
    return [m.name for m in signals.MECHANISMS.values() if m.suits(profile)]


def cells(profiles: Iterator[Profile] | list[Profile]) -> Iterator[tuple[str, str, str]]:
    """Everything that can be checked: (model, mechanism, profile). Masks need a network profile."""
    for model in MODELS.values():
        for profile in profiles:
            for mechanism in suitable(profile):
                if not (model.expiring and profile.machine == "ptx"):
                    yield model.name, mechanism, profile.name
