"""The protocol of the GPU kernels, counts before rows, under the rules of each transport; and with mistakes in it."""

import pytest

from expertwire.cli import models
from expertwire.ordering import profiles
from expertwire.ordering.explore import Verdict
from expertwire.ordering.operations import Load, PutSignal, Signal, Wait
from expertwire.protocols import counted, lane
from expertwire.protocols.epoch_signal import REFUSED
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


def repeated_by_turns(one, rank, epoch, counts):
    """Every second step repeats the routing of the one before."""
    if epoch % 2:
        yield from counted.exchange(one, rank, epoch, counts)
        yield from counted.send_rows(one, rank, epoch, counts)
    else:
        yield from counted.repeat(one, rank, epoch, counts)


@pytest.mark.parametrize("send", [counted.send, counted.repeat, repeated_by_turns])
@pytest.mark.parametrize(("profile", "mechanism"), [("ptx", "release"), ("host", "release"), ("rc.spec", "atomic")])
@pytest.mark.parametrize("num_banks", [1, 2])
def test_counts_first_holds(profile, mechanism, num_banks, send):
    result = models.check(dispatch(send, num_banks=num_banks), mechanism, profiles.get(profile))
    assert result.verdict is Verdict.HOLDS, result


def repeated_at_once(one, rank, epoch, counts):
    """Repeats without waiting for the bank."""
    for operation in counted.repeat(one, rank, epoch, counts):
        if not isinstance(operation, Wait):
            yield operation


def test_who_repeats_must_wait_for_the_bank():
    result = models.check(dispatch(repeated_at_once), "release", profiles.get("ptx"))
    assert result.verdict is Verdict.FAILS, result


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


def rows_unless_refused(writer, reader, epoch):
    """Rank 0 refuses step 2, in which rank 1 has rows for it."""
    return REFUSED if (writer, epoch) == (0, 2) else models.rows_sent(writer, reader, epoch)


def refuse_settled(one, rank, epoch, num_ranks):
    return counted.refuse(one, rank, epoch, num_ranks, in_order=False)


def refused(refuse=counted.refuse, send=counted.send, num_banks=1, steps=3):
    one = Lane("dispatch", num_banks)

    def protocol(rank, num_ranks):
        for epoch in range(1, steps + 1):
            if (rank, epoch) == (0, 2):
                yield from refuse(one, rank, epoch, num_ranks)
                continue
            void = yield from send(one, rank, epoch, models.counts(rank, num_ranks, epoch))
            if void:
                for peer in ring(rank, num_ranks):
                    yield Wait(one.ready(epoch, peer), epoch)
            else:
                yield from lane.receive(one, rank, epoch, num_ranks)
            yield from lane.finish(one, rank, epoch, num_ranks)

    return models.Model("dispatch, counts first, refused", "", protocol, sent=rows_unless_refused)


def refuse_at_once(one, rank, epoch, num_ranks):
    """Does not wait for the bank: whatever `refuse` does after its first waits."""
    steps = counted.refuse(one, rank, epoch, num_ranks)
    for operation in steps:
        if not (isinstance(operation, Wait) and operation.epoch < epoch):
            yield operation


def refuse_counts_only(one, rank, epoch, num_ranks):
    """Keeps the peers waiting for its READY."""
    for operation in counted.refuse(one, rank, epoch, num_ranks):
        if not (isinstance(operation, Signal) and operation.word == one.ready(epoch, rank)):
            yield operation


def send_all_the_same(one, rank, epoch, counts):
    """Sends its rows also in a void step."""
    void = yield from counted.exchange(one, rank, epoch, counts)
    yield from counted.send_rows(one, rank, epoch, counts)
    return void


@pytest.mark.parametrize("send", [counted.send, send_all_the_same])
@pytest.mark.parametrize("num_banks", [1, 2])
def test_a_refused_step_is_void_and_the_next_one_right(send, num_banks):
    for profile in ("ptx", "host"):
        result = models.check(refused(send=send, num_banks=num_banks), "release", profiles.get(profile))
        assert result.verdict is Verdict.HOLDS, result
    result = models.check(refused(refuse_settled, send, num_banks), "atomic", profiles.get("rc.spec"))
    assert result.verdict is Verdict.HOLDS, result


@pytest.mark.parametrize(
    ("mistake", "profile", "mechanism"),
    [
        (refuse_at_once, "ptx", "release"),
        (refuse_counts_only, "ptx", "release"),
        (counted.refuse, "rc.spec", "atomic"),
    ],
)
def test_a_rank_that_refuses_must_take_part_in_all_else(mistake, profile, mechanism):
    result = models.check(refused(mistake), mechanism, profiles.get(profile))
    assert result.verdict is Verdict.FAILS, result
