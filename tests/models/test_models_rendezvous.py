"""Rows that go straight to their final places, on shared memory; and with mistakes in it."""

import pytest

from expertwire.cli import models
from expertwire.ordering import profiles
from expertwire.ordering.explore import Verdict
from expertwire.ordering.operations import Load, PutSignal, Signal, Wait
from expertwire.protocols import lane, rendezvous
from expertwire.protocols.lane import Lane, ring

HOST = profiles.get("host")


def model(**options):
    return models.Model("rendezvous", "", lambda rank, n: models.meet(rank, n, **options))


def check(made, **options):
    return models.check(made, "release", HOST, **options)


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("banks", [1, 2])
def test_rendezvous_holds(least, banks):
    """`least` = 1 announces everything, 2 mixes. With one bank nobody can defer past the next step, so nobody does."""
    with pytest.MonkeyPatch.context() as patch:
        if banks == 1:
            patch.setattr(models, "defers", lambda rank, epoch: False)
        assert check(model(least=least, banks=banks, steps=4)).verdict is Verdict.HOLDS


@pytest.mark.parametrize("least", [1, 2])
def test_three_ranks(least):
    result = check(model(least=least), num_ranks=3, max_states=30_000)
    assert result.verdict is not Verdict.FAILS, result.trace.timeline()


def meet_with(monkeypatch, change):
    """`rendezvous.meet` with `change(operation)` in place of each of its operations."""
    meet = rendezvous.meet

    def changed(one, rank, epoch, coming, leaving, deferring):
        step, answer = meet(one, rank, epoch, coming, leaving, deferring), None
        while True:
            try:
                operation = step.send(answer)
            except StopIteration:
                return
            for instead in change(one, rank, epoch, operation):
                answer = yield instead

    monkeypatch.setattr(rendezvous, "meet", changed)


def caught(kind, culprit, **options):
    result = check(model(**options))
    assert result.verdict is Verdict.FAILS
    assert result.trace.violation.kind == kind
    assert culprit in result.trace.timeline() + result.trace.violation.text


def test_memory_given_away_while_in_use_is_caught(monkeypatch):
    """As if a block had been lent again while a tensor still used it."""

    def change(one, rank, epoch, operation):
        yield operation
        old = epoch - one.num_banks
        if isinstance(operation, PutSignal) and operation.word.purpose == "dispatch_place_ready" and old > 0:
            count = models.announced(operation.peer, rank, old, 1)
            if count:
                yield Load(rendezvous.landing(one).rows(old, operation.peer), count)

    meet_with(monkeypatch, change)
    caught("bank reused too early", "dispatch_landing", least=1)


def test_rows_before_their_place_is_known_are_caught(monkeypatch):
    def change(one, rank, epoch, operation):
        if not isinstance(operation, Load | Wait):
            yield operation

    meet_with(monkeypatch, change)
    caught("bank reused too early", "dispatch_landing", least=1)


def test_landed_before_the_rows_is_caught(monkeypatch):
    def change(one, rank, epoch, operation):
        if isinstance(operation, PutSignal) and operation.word.purpose == "dispatch_landing_ready":
            yield Signal(operation.peer, operation.word, epoch, operation.count)
        yield operation

    meet_with(monkeypatch, change)
    caught("stale read", "dispatch_landing")


def test_waiting_for_a_place_from_a_deferring_rank_is_caught(monkeypatch):
    meet = rendezvous.meet
    monkeypatch.setattr(
        rendezvous, "meet", lambda one, rank, epoch, coming, leaving, _: meet(one, rank, epoch, coming, leaving, ())
    )
    caught("deadlock", "dispatch_place")


def test_rows_read_without_landed_are_caught(monkeypatch):
    def land(one, epoch, coming):
        for writer, count in coming.items():
            yield Wait(one.ready(epoch, writer), epoch)
            yield Load(one.rows(epoch, writer), count)
            yield Load(rendezvous.landing(one).rows(epoch, writer), count)

    monkeypatch.setattr(rendezvous, "land", land)
    monkeypatch.setattr(models, "_paired", lambda region: Lane("dispatch", 2).ready(region.bank, region.writer))
    caught("stale read", "dispatch_landing")


def test_a_void_step_moves_no_announced_row_and_needs_no_word(monkeypatch):
    """Rank 1 refuses step 1, for which rank 0 has announced rows: both know from READY, and steps 2 and 3 work."""
    announced = models.announced
    monkeypatch.setattr(models, "announced", lambda w, r, epoch, least: announced(w, r, epoch, least) * (epoch > 1))

    def refused(rank, num_ranks):
        one = Lane("dispatch", 2)
        for epoch in (1, 2, 3):
            sent = [models.rows_unless_refused(rank, peer, epoch) for peer in range(num_ranks)]
            yield from lane.send(one, rank, epoch, sent)
            if epoch > 1:
                yield from models.receive_announced(one, rank, epoch, num_ranks, 1)
                continue
            yield from (Wait(one.ready(epoch, peer), epoch) for peer in ring(rank, num_ranks))
            yield from lane.finish(one, rank, epoch, num_ranks)

    made = models.Model("refused", "", refused, sent=models.rows_unless_refused)
    assert check(made).verdict is Verdict.HOLDS
