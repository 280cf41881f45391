"""Transition systems: what a machine offers to the explorer.

A state is a tuple of plain values, so states compare and hash cheaply. A move is either a step of a thread or an event
of the network. A machine says which moves are possible and what they do; it never chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from expertwire.ordering.program import Answer, Program, Tree
from expertwire.ordering.verbs import Loc

State = tuple[Any, ...]
EXPIRED = 1  # the alternative of an Await that gives up


class Move(NamedTuple):
    """A transition: of thread `thread` with alternative `choice`, or of event `event` (then thread is -1)."""

    thread: int
    choice: int = 0
    event: int = -1


@dataclass(frozen=True, slots=True)
class Violation:
    """What went wrong: a `kind` of docs/memory-model.md and one sentence."""

    kind: str
    text: str


class Machine(Protocol):
    """What the explorer needs of a machine."""

    program: Program
    tree: Tree
    reached: set[str]

    def initial(self) -> State:
        """Nothing has happened."""

    def moves(self, state: State) -> list[Move]:
        """Everything that may happen next."""

    def reduced(self, state: State, moves: list[Move]) -> list[Move]:
        """A stubborn set of `moves`."""

    def apply(self, state: State, move: Move) -> tuple[State, Violation | None]:
        """The state after `move`, and what that move breaks."""

    def unfinished(self, state: State) -> list[str]:
        """One sentence per thread that has not ended."""

    def lost(self, state: State) -> bool:
        """Whether a thread waits for a signal that has been sent and placed."""

    def outcome(self, state: State) -> dict[str, Answer]:
        """Registers and memory, by name."""

    def describe(self, state: State, move: Move) -> tuple[str, str, str]:
        """(rank, peer or "", what happens), for traces."""

    def process(self, state: State, move: Move) -> tuple[int, int]:
        """The thing that moves: (0, thread) or (1, post), for priorities."""

    def key(self, move: Move) -> tuple[int, int, int, int]:
        """A name of the move that does not depend on the order in which the program was discovered."""

    def is_placement(self, move: Move) -> bool:
        """Whether this move makes data visible, which an adversary delays."""


MODIFY: dict[str, Callable[[int, int], int]] = {
    "set": lambda old, new: new,
    "add": lambda old, new: old + new,
    "max": lambda old, new: max(old, new),
}
COMPARE: dict[str, Callable[[int, int], bool]] = {
    "==": lambda a, b: a == b,
    ">=": lambda a, b: a >= b,
    "!=": lambda a, b: a != b,
}


def fetch(memory: tuple[int, ...], location: int) -> int:
    """A word; memory grows while locations are discovered, and all memory is 0 at the start."""
    return memory[location] if location < len(memory) else 0


def store(memory: tuple[int, ...], location: int, value: int) -> tuple[int, ...]:
    """Memory with one word changed."""
    if location >= len(memory):
        memory += (0,) * (location + 1 - len(memory))
    return (*memory[:location], value, *memory[location + 1 :])


def bits(mask: int) -> list[int]:
    """The positions of the set bits.

    >>> bits(0b10010)
    [1, 4]
    """
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def check_read(loc: Loc, seen: int, expect: int, note: str) -> Violation | None:
    """Compare what a reader saw with the step that it must see."""
    if seen == expect:
        return None
    what = note or str(loc)
    if seen < expect:
        return Violation(
            "stale read", f"{what}: expected step {expect}, saw {f'step {seen}' if seen else 'what was there before'}"
        )
    return Violation("bank reused too early", f"{what}: expected step {expect}, already overwritten by step {seen}")
