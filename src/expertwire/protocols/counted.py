"""A lane with counts first: how GPUs dispatch. Rows go to their final places, which follow from everybody's counts.

A rank sends its counts into a bank only after every reader's DONE of the step that used the bank before, and its rows
only after every reader's counts of this step. A reader sends those no earlier than its own DONE, so rows need no wait
of their own; and it has read its peers' counts before it sends rows, so READY vouches that counts may be overwritten,
once DONE has come. READY, the receive half and DONE are those of the lane.
"""

from __future__ import annotations

from collections.abc import Sequence

from expertwire.ordering.operations import Load, PutSignal, Wait
from expertwire.protocols.lane import Lane, Step, ring


def counts_lane(lane: Lane) -> Lane:
    """Counts travel as rows of a lane of their own, with READY but without DONE: the rows' DONE vouches for both."""
    return Lane(f"{lane.name}_counts", lane.num_banks)


def exchange(lane: Lane, rank: int, epoch: int, counts: Sequence[int]) -> Step:
    """Counts to everybody, once the bank is free everywhere; then everybody's counts. A word carries the number of rows
    that will follow, and vouches for as many entries of the table of counts."""
    if epoch > lane.num_banks:
        for peer in ring(rank, len(counts)):
            yield Wait(lane.done(epoch, peer), epoch - lane.num_banks)
    table = counts_lane(lane)
    for peer in ring(rank, len(counts)):
        yield PutSignal(peer, table.rows(epoch, rank), counts[peer], table.ready(epoch, rank), epoch)
    coming = {}
    for peer in ring(rank, len(counts)):
        coming[peer] = yield Wait(table.ready(epoch, peer), epoch)
    for peer in range(len(counts)):
        if coming[peer]:
            yield Load(table.rows(epoch, peer), coming[peer] or 0)


def send_rows(lane: Lane, rank: int, epoch: int, counts: Sequence[int]) -> Step:
    """Rows to their places, and READY."""
    for peer in ring(rank, len(counts)):
        yield PutSignal(peer, lane.rows(epoch, rank), counts[peer], lane.ready(epoch, rank), epoch)


def send(lane: Lane, rank: int, epoch: int, counts: Sequence[int]) -> Step:
    """Send half: the exchange, then `counts[peer]` rows for every peer."""
    yield from exchange(lane, rank, epoch, counts)
    yield from send_rows(lane, rank, epoch, counts)
