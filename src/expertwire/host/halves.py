"""Halves of protocols as data: what their generators yield, in the form in which the host runtime carries it out.

A step of a lane differs from the one `num_banks` before it in nothing but its epoch and its counts. So the three halves
of a lane are recorded once per bank, and calls repeat them: to make the operations anew takes as long as to carry them
out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from expertwire.ordering.operations import Load, Operation, PutSignal, Region, Signal, Wait, Word
from expertwire.protocols import lane as protocol
from expertwire.protocols.lane import Lane

# What to do, with which peer, the word, the rows of a put, its count, the epoch of the word.
Act = tuple[type[Operation], int, Word, Region | None, int, int]


class Halves(NamedTuple):
    """The halves of one bank's steps. Epochs are relative to that of the step; the count of a put is the rank whose
    count it is."""

    send: list[Act]
    receive: list[Act]
    finish: list[Act]


def acts(step: Iterable[Operation], since: int = 0) -> list[Act]:
    """The operations of a half, with epochs relative to `since`. There are no loads: a generator without answers yields
    none, and the engine reads rows where they lie."""
    found: list[Act] = []
    for operation in step:
        if isinstance(operation, Wait):
            found.append((Wait, operation.word.writer, operation.word, None, 0, operation.epoch - since))
        elif isinstance(operation, PutSignal):
            region, count, epoch = operation.region, operation.count, operation.epoch - since
            found.append((PutSignal, operation.peer, operation.word, region, count, epoch))
        elif isinstance(operation, Signal):
            found.append((Signal, operation.peer, operation.word, None, operation.count, operation.epoch - since))
        else:
            assert isinstance(operation, Load), f"the host engine has no {operation}"
    return found


def record(lane: Lane, rank: int, num_ranks: int) -> list[Halves]:
    """The halves of every bank, without DONE of the rank to itself: what it has not finished it does not begin anew
    (`LaneSteps.begin`).

    The first steps, which wait for nobody, are not told apart: every word has reached an epoch that is not positive.
    """
    halves = []
    for epoch in range(2 * lane.num_banks, 3 * lane.num_banks):
        send = acts(protocol.send(lane, rank, epoch, range(num_ranks)), epoch)
        receive = acts(protocol.receive(lane, rank, epoch, num_ranks), epoch)
        finish = acts(protocol.finish(lane, rank, epoch, num_ranks), epoch)
        own = lane.done(epoch, rank)
        halves.append(Halves([a for a in send if a[2] != own], receive, [a for a in finish if a[1] != rank]))
    return halves
