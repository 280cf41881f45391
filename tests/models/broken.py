"""Our protocols with one thing wrong each."""

from dataclasses import dataclass

from expertwire.cli import models
from expertwire.ordering.lowering import Encoding
from expertwire.ordering.operations import Load, Order, PutSignal, Scope, Signal, Wait, Word
from expertwire.protocols import lane
from expertwire.protocols.lane import Lane, ring


@dataclass(frozen=True)
class OneReadyWord(Lane):
    """All banks share one READY word."""

    def ready(self, epoch, writer):
        return Word(f"{self.name}_ready", writer)


@dataclass(frozen=True)
class OneDoneWord(Lane):
    """All banks share one DONE word."""

    def done(self, epoch, reader):
        return Word(f"{self.name}_done", reader)


def send_early(one, rank, epoch, counts):
    """Waits for the step before the one that used this bank last."""
    for peer in ring(rank, len(counts)):
        if epoch > one.num_banks + 1:
            yield Wait(one.done(epoch - 1, peer), epoch - one.num_banks - 1)
        yield PutSignal(peer, one.rows(epoch, rank), counts[peer], one.ready(epoch, rank), epoch)


def receive_after_done(one, rank, epoch, num_ranks):
    """Acknowledges before it reads."""
    counts = {}
    for peer in ring(rank, num_ranks):
        counts[peer] = yield Wait(one.ready(epoch, peer), epoch)
    for peer in ring(rank, num_ranks):
        yield Signal(peer, one.done(epoch, rank), epoch)
    for peer in range(num_ranks):
        if counts[peer]:
            yield Load(one.rows(epoch, peer), counts[peer])


def rows_by_put(one, rank, epoch, counts):
    """Signals each peer with the count of the next one."""
    for peer in ring(rank, len(counts)):
        if epoch > one.num_banks:
            yield Wait(one.done(epoch, peer), epoch - one.num_banks)
        wrong = counts[(peer + 1) % len(counts)]
        yield PutSignal(peer, one.rows(epoch, rank), wrong, one.ready(epoch, rank), epoch)


def deferred(send):
    """Two steps in flight on two banks."""
    one = Lane("dispatch", 2)

    def protocol(rank, num_ranks):
        for epoch in range(1, 5):
            if epoch <= 3:
                yield from send(one, rank, epoch, models.counts(rank, num_ranks, epoch))
            if epoch > 1:
                yield from lane.receive(one, rank, epoch - 1, num_ranks)
                yield from lane.finish(one, rank, epoch - 1, num_ranks)

    return models.Model("deferred", "", protocol)


def dispatch(steps=3, one=None, send=lane.send, receive=lane.receive, finish=lane.finish):
    one = one or Lane("dispatch", 1)

    def protocol(rank, num_ranks):
        for epoch in range(1, steps + 1):
            yield from send(one, rank, epoch, models.counts(rank, num_ranks, epoch))
            yield from receive(one, rank, epoch, num_ranks)
            yield from finish(one, rank, epoch, num_ranks)

    return models.Model("dispatch", "", protocol)


def finished_out_of_order(one):
    """Two steps in flight, and the second one is finished first: its views were given back earlier."""

    def protocol(rank, num_ranks):
        for first in (1, 3):
            for epoch in (first, first + 1):
                yield from lane.send(one, rank, epoch, models.counts(rank, num_ranks, epoch))
            yield from lane.receive(one, rank, first + 1, num_ranks)
            yield from lane.finish(one, rank, first + 1, num_ranks)
            yield from lane.receive(one, rank, first, num_ranks)
            yield from lane.finish(one, rank, first, num_ranks)

    return models.Model("dispatch, finished out of order", "", protocol)


def nothing(one, rank, epoch, num_ranks):
    return
    yield


FEW_BITS = Encoding(lambda epoch, count: (epoch << 1) + count + 1, lambda word: (word >> 1, (word & 1) - 1))

DISPATCH = models.get("dispatch")

# name -> (model, mechanism, profile, mistakes, violation, what the trace must name)
VARIANTS = {
    "signal before rows": (DISPATCH, "atomic", "rc.hw", {"signal_first": True}, "stale read", "fetch-add"),
    "release dropped": (DISPATCH, "release", "ptx", {"order": Order.RELAXED}, "stale read", "st.relaxed.sys"),
    "release dropped on the host": (DISPATCH, "write", "host", {}, "stale read", "dispatch_ready"),
    "wrong scope": (DISPATCH, "release", "ptx", {"scope": Scope.GPU}, "stale read", "st.release.gpu"),
    "no barrier before the signal": (DISPATCH, "release", "ptx", {"barriers": False}, "stale read", "mover"),
    "other queue pair": (DISPATCH, "atomic", "rc.hw", {"signal_queue": "other"}, "stale read", "on other"),
    "bank one epoch early": (
        deferred(send_early), "atomic", "rc.spec", {}, "bank reused too early, wrong count", "step 3",
    ),
    "acknowledgement before the read": (
        dispatch(receive=receive_after_done, finish=nothing), "atomic", "rc.spec", {},
        "bank reused too early", "dispatch_done",
    ),
    "word cleaned": (DISPATCH, "atomic", "rc.spec", {"clean_after": True}, "lost signal", "cleaned by the reader"),
    "count in too few bits": (DISPATCH, "atomic", "rc.spec", {"encoding": FEW_BITS}, "wrong count", "word of step"),
    "unmask without epoch": (
        models.get("masked"), "atomic", "rc.spec", {"readmit": "by any word"}, "wrong count", "gives up",
    ),
    "one READY word for all banks": (
        dispatch(one=OneReadyWord("dispatch", 2)), "atomic", "rc.spec",
        {"paired": lambda rows: Word("dispatch_ready", rows.writer)}, "wrong count", "word of step 2",
    ),
    "one DONE word for all banks": (
        finished_out_of_order(OneDoneWord("dispatch", 2)), "atomic", "rc.spec", {},
        "bank reused too early, wrong count", "dispatch_done.b0",
    ),
    "count of another peer": (dispatch(send=rows_by_put), "atomic", "rc.spec", {}, "wrong count", "dispatch_ready"),
    "add onto a word that is cleaned, in a barrier": (
        models.get("barrier"), "add", "rc.spec", {}, "lost signal", "cleaned by the reader",
    ),
    "set onto a word that may be set again, in a barrier": (
        models.get("barrier"), "put_signal", "shmem", {}, "lost signal", "barrier",
    ),
}  # fmt: skip
