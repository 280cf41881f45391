"""`explore`: every execution of a program on a profile, or many, or the worst ones.

    exhaustive   all executions, one per class of equivalent ones (`stubborn`); the verdict "holds" is a proof
    random       `runs` executions, each move chosen at random from `seed`
    pct          `runs` executions by random priorities with `depth` - 1 changes (Burckhardt et al., ASPLOS 2010)
    adversary    one execution per operation, whose placement is delayed as long as the profile allows

A wait is a move that does not exist until its condition holds, so a program that hangs ends in a state without moves:
deadlocks and lost signals are found, not spun on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from expertwire.errors import InvalidArgument
from expertwire.ordering.build import build
from expertwire.ordering.profiles import Profile
from expertwire.ordering.program import Answer, Program
from expertwire.ordering.shrink import shrink
from expertwire.ordering.trace import Trace, ordered_moves, record
from expertwire.ordering.transitions import Machine, Move, State, Violation

MODES = ("exhaustive", "random", "pct", "adversary")
Path = tuple[Any, ...] | None
Query = Callable[[dict[str, Answer], bool], bool]
REPORT_EVERY = 2048


class Verdict(StrEnum):
    """What an exploration has shown."""

    HOLDS = "holds"
    FAILS = "fails"
    BOUND = "bound reached"


@dataclass(frozen=True, slots=True)
class Result:
    """`states` were expanded and `executions` ran to an end. `missing` are goals that no execution reached: then
    "holds" says little."""

    verdict: Verdict
    trace: Trace | None
    states: int
    executions: int
    seconds: float
    reached: frozenset[str]
    missing: tuple[str, ...]
    outcomes: frozenset[tuple[tuple[str, Answer], ...]] = frozenset()


def explore(
    program: Program,
    profile: Profile,
    mode: str = "exhaustive",
    *,
    query: Query | None = None,
    seed: int = 0,
    runs: int = 200,
    depth: int = 3,
    max_states: int = 2_000_000,
    reduce: bool = True,
    collect: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Look for an execution that breaks a check of the program, deadlocks, or (with `query`) ends as asked.

    `query` gets the final registers and memory and whether all threads ended; a deadlock then is an ordinary end.
    `collect` keeps the set of final outcomes. `progress` is called with the number of states now and then.
    """
    if mode not in MODES:
        raise InvalidArgument(f"unknown mode {mode!r}; valid: {', '.join(MODES)}")
    search = _Search(build(program, profile), profile, query, max_states, reduce, collect, progress)
    started = time.perf_counter()
    if mode == "exhaustive":
        verdict, path = search.exhaustive()
    else:
        verdict, path = search.sample(_choosers(search.machine, mode, seed, runs, depth))
    trace = None
    if path is not None:
        moves = shrink(search.machine, path, search.ends_badly)
        trace = record(search.machine, moves, profile.name)
    reached = frozenset(search.machine.reached)
    return Result(
        verdict,
        trace,
        search.states,
        search.executions,
        time.perf_counter() - started,
        reached,
        tuple(g for g in program.goals if g not in reached),
        frozenset(search.outcomes),
    )


class _Search:
    def __init__(
        self,
        machine: Machine,
        profile: Profile,
        query: Query | None,
        max_states: int,
        reduce: bool,
        collect: bool,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.machine, self.profile, self.query = machine, profile, query
        self.max_states, self.reduce, self.collect, self.progress = max_states, reduce, collect, progress
        self.states = self.executions = 0
        self.outcomes: set[tuple[tuple[str, Answer], ...]] = set()

    # ---- exhaustive --------------------------------------------------------------------------------------------------

    def exhaustive(self) -> tuple[Verdict, list[Move] | None]:
        """Depth first. While the program is still being discovered the reduction may miss moves, so explore again
        until a whole exploration discovered nothing."""
        self._discover()
        while True:
            self.machine.tree.grew = False
            self.states = self.executions = 0
            self.outcomes.clear()
            verdict, path = self._depth_first()
            if verdict is not Verdict.HOLDS or not self.reduce or not self.machine.tree.grew:
                return verdict, path

    def _discover(self) -> None:
        """Run a few random executions, so that the tree is mostly known."""
        for seed in range(2):
            self._run(_random_chooser(random.Random(seed)))

    def _depth_first(self) -> tuple[Verdict, list[Move] | None]:
        machine, seen = self.machine, set[State]()
        stack: list[tuple[State, Path]] = [(machine.initial(), None)]
        while stack:
            state, path = stack.pop()
            while True:  # follow states with one successor without storing them
                moves = machine.moves(state)
                if self.reduce and len(moves) > 1:
                    moves = machine.reduced(state, moves)
                if len(moves) != 1:
                    break
                self.states += 1
                path = (path, moves[0])
                state, violation = machine.apply(state, moves[0])
                if violation is not None and self._bad(violation):
                    return Verdict.FAILS, _moves(path)
            if not moves:
                self.executions += 1
                if self._end(state):
                    return Verdict.FAILS, _moves(path)
                continue
            if state in seen:
                continue
            seen.add(state)
            self.states += 1
            if self.states > self.max_states:
                return Verdict.BOUND, None
            if self.progress is not None and len(seen) % REPORT_EVERY == 0:
                self.progress(self.states)
            for move in moves:
                after, violation = machine.apply(state, move)
                if violation is not None and self._bad(violation):
                    return Verdict.FAILS, _moves((path, move))
                stack.append((after, (path, move)))
        return Verdict.HOLDS, None

    def _bad(self, violation: Violation) -> bool:
        """With a query, only the contract's own 'undefined' counts."""
        return self.query is None or violation.kind == "undefined"

    def _end(self, state: State) -> bool:
        """Judge a final state."""
        finished = not self.machine.unfinished(state)
        if self.collect:
            outcome = {**self.machine.outcome(state), "finished": int(finished)}
            self.outcomes.add(tuple(sorted(outcome.items(), key=lambda item: item[0])))
        if self.query is not None:
            return self.query(self.machine.outcome(state), finished)
        return not finished

    # ---- sampling ----------------------------------------------------------------------------------------------------

    def sample(self, choosers: Iterator[Callable[[State, list[Move]], Move]]) -> tuple[Verdict, list[Move] | None]:
        for chooser in choosers:
            path, bad = self._run(chooser)
            self.executions += 1
            if bad:
                return Verdict.FAILS, path
            if self.progress is not None:
                self.progress(self.states)
            if self.states > self.max_states:
                break
        return Verdict.BOUND, None

    def _run(self, chooser: Callable[[State, list[Move]], Move]) -> tuple[list[Move], bool]:
        state, path = self.machine.initial(), []
        while moves := ordered_moves(self.machine, state):
            move = chooser(state, moves) if len(moves) > 1 else moves[0]
            path.append(move)
            state, violation = self.machine.apply(state, move)
            self.states += 1
            if violation is not None and self._bad(violation):
                return path, True
        return path, self._end(state)

    def ends_badly(self, violation: Violation | None) -> bool:
        return violation is not None and self._bad(violation)


def _moves(path: Path) -> list[Move]:
    found = []
    while path is not None:
        path, move = path
        found.append(move)
    return found[::-1]


def _random_chooser(rng: random.Random) -> Callable[[State, list[Move]], Move]:
    return lambda state, moves: rng.choice(moves)


def _choosers(
    machine: Machine, mode: str, seed: int, runs: int, depth: int
) -> Iterator[Callable[[State, list[Move]], Move]]:
    if mode == "random":
        rng = random.Random(seed)
        for _ in range(runs):
            yield _random_chooser(rng)
    elif mode == "pct":
        for run in range(runs):
            yield _Pct(machine, random.Random(seed + run), depth)
    else:
        for victim in range(1 << 16):
            adversary = _Adversary(machine, victim)
            yield adversary
            if victim >= len(adversary.met):
                return


class _Pct:
    """Every thread and operation gets a random priority; at `depth` - 1 random steps the running one loses its."""

    def __init__(self, machine: Machine, rng: random.Random, depth: int, length: int = 200) -> None:
        self.machine, self.rng = machine, rng
        self.priority: dict[tuple[int, int], float] = {}
        self.changes = {rng.randrange(length) for _ in range(depth - 1)}
        self.step = 0

    def __call__(self, state: State, moves: list[Move]) -> Move:
        for move in moves:
            self.priority.setdefault(self.machine.process(state, move), 1 + self.rng.random())
        best = max(moves, key=lambda m: self.priority[self.machine.process(state, m)])
        self.step += 1
        if self.step in self.changes:
            self.priority[self.machine.process(state, best)] = self.rng.random()
        return best


class _Adversary:
    """Everything else goes first; the victim's placement happens only when nothing else can."""

    def __init__(self, machine: Machine, victim: int) -> None:
        self.machine, self.victim = machine, victim
        self.met: list[tuple[int, int]] = []

    def __call__(self, state: State, moves: list[Move]) -> Move:
        for move in moves:
            process = self.machine.process(state, move)
            if process[0] and process not in self.met:
                self.met.append(process)

        def delay(move: Move) -> tuple[bool, bool]:
            process = self.machine.process(state, move)
            hit = process[0] == 1 and self.met.index(process) == self.victim
            return hit and self.machine.is_placement(move), hit

        return min(moves, key=delay)
