"""The protocol of the GPU kernels, counts before rows, under the rules of each transport; and with mistakes in it."""

import pytest

from expertwire.cli import models
from expertwire.ordering import profiles
from expertwire.ordering.explore import Verdict
from expertwire.ordering.operations import Load, PutSignal, Wait
from expertwire.protocols import counted, lane
from expertwire.protocols.lane import Lane, ring


def dispatch(send=counted.send, num_banks=1, steps=3):
    one = Lane("dispatch", num_banks)

    def protocol(rank, num_ranks):
        for epoch in range(1, steps + 1):
            yield from send(one, rank, epoch, models.counts(rank, num_ranks, epoch))
            yield from lane.receive(one, rank, epoch, num_ranks)
            yield from lane.finish(one, rank, epoch, num_ranks)

    return models.Model("dispatch, counts first", "", protocol)


def rows_before_counts(one, rank, epoch, counts):
    """Sends rows without having seen that the readers have begun this step."""
    yield from counted.send_rows(one, rank, epoch, counts)
    yield from counted.exchange(one, rank, epoch, counts)


def without_done(one, rank, epoch, counts):
    """Does not wait for DONE."""
    table = counted.counts_lane(one)
    for peer in ring(rank, len(counts)):
        yield PutSignal(peer, table.rows(epoch, rank), counts[peer], table.ready(epoch, rank), epoch)
    coming = {}
    for peer in ring(rank, len(counts)):
        coming[peer] = yield Wait(table.ready(epoch, peer), epoch)
    for peer in range(len(counts)):
        if coming[peer]:
            yield Load(table.rows(epoch, peer), coming[peer])
    yield from counted.send_rows(one, rank, epoch, counts)


def own_counts_only(one, rank, epoch, counts):
    """Waits for the bank, but sends rows before the readers' counts of this step have come."""
    if epoch > one.num_banks:
        for peer in ring(rank, len(counts)):
            yield Wait(one.done(epoch, peer), epoch - one.num_banks)
    yield from counted.send_rows(one, rank, epoch, counts)
    yield from counted.exchange(one, rank, epoch, counts)


@pytest.mark.parametrize(("profile", "mechanism"), [("ptx", "release"), ("host", "release"), ("rc.spec", "atomic")])
@pytest.mark.parametrize("num_banks", [1, 2])
def test_counts_first_holds(profile, mechanism, num_banks):
    result = models.check(dispatch(num_banks=num_banks), mechanism, profiles.get(profile))
    assert result.verdict is Verdict.HOLDS, result


def test_rows_before_counts_are_caught():
    result = models.check(dispatch(rows_before_counts), "release", profiles.get("ptx"))
    assert result.verdict is Verdict.FAILS, result


@pytest.mark.parametrize("num_banks", [1, 2])
def test_the_counts_of_a_step_already_say_that_the_bank_is_free(num_banks):
    """DONE could be dropped: a reader sends the counts of a step only when it has finished with that bank itself."""
    result = models.check(dispatch(without_done, num_banks=num_banks), "release", profiles.get("ptx"))
    assert result.verdict is Verdict.HOLDS, result


def test_waiting_for_the_bank_is_enough_for_the_rows():
    """Rows may even precede the readers' counts: it is DONE that frees a bank. Places are what need the counts."""
    result = models.check(dispatch(own_counts_only), "release", profiles.get("ptx"))
    assert result.verdict is Verdict.HOLDS, result
