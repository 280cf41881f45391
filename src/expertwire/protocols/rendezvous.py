"""Rendezvous: large rows go straight to their final places in the reader's memory, instead of into its window.

A writer with many rows for a reader announces them: its READY, header and routing come without the rows. Once a rank
has READY of all ranks it knows every count, hence the place of every row. It then tells each writer that announced rows
where they go (PLACE); the writer puts them there and signals LANDED.

A rank that defers its receive half says so in its headers and gives no places: its peers put the rows into its window
at once. Waiting for it could last for ever, since it may wait for these very peers before it receives. A deferring rank
announces nothing either: its rows must have left when its send half ends.

A void step (refused, or called differently) is known to all ranks from READY and the headers: nobody moves an announced
row then, and nobody waits for one. Memory that is given away in a step which fails otherwise is never used again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from expertwire.ordering.operations import Load, PutSignal, Wait
from expertwire.protocols.lane import Lane, Step


def places(lane: Lane) -> Lane:
    """Places travel as rows of a lane of their own. A record may be written again when the next rows are announced for
    its bank: by then its reader has used it."""
    return Lane(f"{lane.name}_place", lane.num_banks)


def landing(lane: Lane) -> Lane:
    """Announced rows at the place that was given, or in the window; READY of this lane is LANDED."""
    return Lane(f"{lane.name}_landing", lane.num_banks)


def meet(
    lane: Lane, rank: int, epoch: int, coming: Collection[int], leaving: Mapping[int, int], deferring: Collection[int]
) -> Step:
    """Give the writers in `coming` their places, then put `leaving[reader]` rows to where each reader wants them."""
    given, landed = places(lane), landing(lane)
    for writer in coming:
        yield PutSignal(writer, given.rows(epoch, rank), 1, given.ready(epoch, rank), epoch)
    for reader, count in leaving.items():
        if reader not in deferring:
            yield Wait(given.ready(epoch, reader), epoch)
            yield Load(given.rows(epoch, reader), 1)
        yield PutSignal(reader, landed.rows(epoch, rank), count, landed.ready(epoch, rank), epoch)


def land(lane: Lane, epoch: int, coming: Mapping[int, int]) -> Step:
    """Wait until the announced rows are there."""
    landed = landing(lane)
    for writer, count in coming.items():
        yield Wait(landed.ready(epoch, writer), epoch)
        yield Load(landed.rows(epoch, writer), count)
