"""A lane with counts first: how GPUs dispatch. Rows go to their final places, which follow from everybody's counts.

A rank sends its counts into a bank only after every reader's DONE of the step that used the bank before, and its rows
only after every reader's counts of this step. A reader sends those no earlier than its own DONE, so rows need no wait
of their own; and it has read its peers' counts before it sends rows, so READY vouches that counts may be overwritten,
once DONE has come. READY, the receive half and DONE are those of the lane.

A rank that refuses a step says so in both words, and gives its bank back. All ranks see that before they send rows, so
none are sent, unless they repeat an old plan.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from expertwire.ordering.operations import Load, Operation, PutSignal, Signal, Wait
from expertwire.protocols.epoch_signal import REFUSED
from expertwire.protocols.lane import Lane, Step, ring

Exchange = Generator[Operation, int | None, bool]


def counts_lane(lane: Lane) -> Lane:
    """Counts travel as rows of a lane of their own, with READY but without DONE: the rows' DONE vouches for both."""
    return Lane(f"{lane.name}_counts", lane.num_banks)


def await_bank(lane: Lane, rank: int, epoch: int, num_ranks: int) -> Step:
    """All readers are done with the step that used the bank before."""
    if epoch > lane.num_banks:
        for peer in ring(rank, num_ranks):
            yield Wait(lane.done(epoch, peer), epoch - lane.num_banks)


def exchange(lane: Lane, rank: int, epoch: int, counts: Sequence[int]) -> Exchange:
    """Counts to everybody, once the bank is free everywhere; then everybody's counts. A word carries the number of rows
    that will follow, and vouches for as many entries of the table of counts. Returns whether the step is void."""
    yield from await_bank(lane, rank, epoch, len(counts))
    table = counts_lane(lane)
    for peer in ring(rank, len(counts)):
        yield PutSignal(peer, table.rows(epoch, rank), counts[peer], table.ready(epoch, rank), epoch)
    coming = {}
    for peer in ring(rank, len(counts)):
        coming[peer] = yield Wait(table.ready(epoch, peer), epoch)
    void = REFUSED in coming.values()
    for peer in range(len(counts)):
        count = coming[peer]
        if count and not void:
            yield Load(table.rows(epoch, peer), count)
    return void


def send_rows(lane: Lane, rank: int, epoch: int, counts: Sequence[int]) -> Step:
    """Rows to their places, and READY."""
    for peer in ring(rank, len(counts)):
        yield PutSignal(peer, lane.rows(epoch, rank), counts[peer], lane.ready(epoch, rank), epoch)


def send(lane: Lane, rank: int, epoch: int, counts: Sequence[int]) -> Exchange:
    """Send half: the exchange, then `counts[peer]` rows for every peer. In a void step READY has no rows behind it."""
    void = yield from exchange(lane, rank, epoch, counts)
    if void:
        for peer in ring(rank, len(counts)):
            yield Signal(peer, lane.ready(epoch, rank), epoch, counts[peer])
    else:
        yield from send_rows(lane, rank, epoch, counts)
    return void


def repeat(lane: Lane, rank: int, epoch: int, counts: Sequence[int]) -> Step:
    """Send half where all ranks repeat an earlier step, whose counts they know: nobody waits for them. Their word is
    sent all the same, for a reader that does not repeat: it would wait for it, and sees that this is another step."""
    yield from await_bank(lane, rank, epoch, len(counts))
    for peer in ring(rank, len(counts)):
        yield Signal(peer, counts_lane(lane).ready(epoch, rank), epoch, counts[peer])
    yield from send_rows(lane, rank, epoch, counts)


def refuse(lane: Lane, rank: int, epoch: int, num_ranks: int, *, in_order: bool = True) -> Step:
    """A whole step of a rank that refuses it. It waits for the bank too: until then, readers may not have seen the
    words of the step before.

    Where writes of a peer may overtake each other, not `in_order`, its counts of this step could land on later ones: it
    must have sent its last before the bank is given back.
    """
    yield from await_bank(lane, rank, epoch, num_ranks)
    for one in (counts_lane(lane), lane):
        for peer in ring(rank, num_ranks):
            yield Signal(peer, one.ready(epoch, rank), epoch, REFUSED)
    if not in_order:
        for peer in ring(rank, num_ranks):
            yield Wait(lane.ready(epoch, peer), epoch)
    for peer in ring(rank, num_ranks):
        yield Signal(peer, lane.done(epoch, rank), epoch)
