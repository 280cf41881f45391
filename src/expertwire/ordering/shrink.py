"""Shrinking a failing execution: leave out every move without which it still fails."""

from __future__ import annotations

from collections.abc import Callable

from expertwire.ordering.transitions import Machine, Move, Violation


def shrink(machine: Machine, moves: list[Move], is_bad: Callable[[Violation | None], bool]) -> list[Move]:
    """The moves of a failing execution without those that do not matter: no single one can be left out.

    Moves that become impossible when an earlier one is left out are left out with it. A deadlock is a state without
    moves, so its executions cannot be shortened; they are returned as they are.
    """
    kept = _replayed(machine, moves, is_bad)
    if kept is None:
        return moves
    at = len(kept) - 2
    while at >= 0:
        shorter = _replayed(machine, kept[:at] + kept[at + 1 :], is_bad)
        if shorter is not None:
            kept = shorter
        at = min(at, len(kept) - 1) - 1
    return kept


def _replayed(machine: Machine, moves: list[Move], is_bad: Callable[[Violation | None], bool]) -> list[Move] | None:
    """The moves that were possible, up to the failure; None if there was none."""
    state, done = machine.initial(), []
    for move in moves:
        if move not in machine.moves(state):
            continue
        state, violation = machine.apply(state, move)
        done.append(move)
        if is_bad(violation):
            return done
    return None
