"""The recorded halves are what the generators of the lane yield, for every step."""

import pytest

from expertwire.host.halves import acts, record
from expertwire.ordering.operations import PutSignal, Signal, Wait
from expertwire.protocols import lane as protocol
from expertwire.protocols.epoch_signal import REFUSED
from expertwire.protocols.lane import Lane


def operations(half, epoch, counts=None):
    """What the runtime makes of a recorded half, as operations of step `epoch`."""
    for kind, peer, word, region, count, when in half:
        if kind is Wait:
            yield Wait(word, epoch + when)
        elif kind is Signal:
            yield Signal(peer, word, epoch + when, count)
        else:
            yield PutSignal(peer, region, counts[count], word, epoch + when)


def is_done_of(operation, rank):
    """A signal or a wait by which a rank tells itself that it is done."""
    peer = operation.word.writer if isinstance(operation, Wait) else operation.peer
    return peer == rank and operation.word.purpose.endswith("_done")


@pytest.mark.parametrize("num_banks", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_recorded_half_is_that_of_its_generator(num_ranks, num_banks):
    lane, counts = Lane("dispatch", num_banks), [REFUSED, 0, 3, 5][:num_ranks]
    for rank in range(num_ranks):
        halves = record(lane, rank, num_ranks)
        for epoch in range(1, 4 * num_banks):
            recorded, ready = halves[epoch % num_banks], protocol.receive(lane, rank, epoch, num_ranks)
            sent = [op for op in protocol.send(lane, rank, epoch, counts) if not is_done_of(op, rank)]
            done = [op for op in protocol.finish(lane, rank, epoch, num_ranks) if not is_done_of(op, rank)]
            assert [op for op in operations(recorded.send, epoch, counts) if op.epoch > 0] == sent
            assert list(operations(recorded.receive, epoch)) == list(ready)
            assert list(operations(recorded.finish, epoch)) == done


def test_acts_of_another_half_have_its_own_epochs_and_counts():
    half = acts(protocol.send(Lane("combine", 2), 0, 5, [7, 8]))
    assert list(operations(half, 0, range(10))) == list(protocol.send(Lane("combine", 2), 0, 5, [7, 8]))
