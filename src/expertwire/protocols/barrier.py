"""Barrier: signal everyone, wait for everyone."""

from __future__ import annotations

from expertwire.ordering.operations import Signal, Wait, Word
from expertwire.protocols.lane import Step, ring

PURPOSE = "barrier"


def barrier(rank: int, epoch: int, num_ranks: int) -> Step:
    """Nobody leaves barrier `epoch` before everybody has entered it."""
    for peer in ring(rank, num_ranks):
        yield Signal(peer, Word(PURPOSE, rank), epoch)
    for peer in ring(rank, num_ranks):
        yield Wait(Word(PURPOSE, peer), epoch)
