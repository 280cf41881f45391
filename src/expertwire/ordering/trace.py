"""One execution: its id, its replay, and its timeline for people.

The id spells the choice made at every state with more than one possible move, so it replays exactly on the same program
and profile.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from expertwire.errors import InvalidArgument
from expertwire.ordering.build import build
from expertwire.ordering.profiles import Profile
from expertwire.ordering.program import Program
from expertwire.ordering.transitions import Machine, Move, Violation

_COMPLETED = ("local completions are there", "quiet returns")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Line:
    """One move: at which rank it is seen, which other rank it came from (a link), and what happened."""

    rank: str
    peer: str
    text: str


@dataclass(frozen=True, slots=True)
class Trace:
    """An execution that ends in a violation, a deadlock, or the final state that was asked for."""

    id: str
    program: str
    profile: str
    violation: Violation | None
    lines: tuple[Line, ...]
    blocked: tuple[str, ...] = ()
    outcome: dict[str, Any] = field(default_factory=dict)

    def timeline(self) -> str:
        """The trace as text: one column per rank and per link that occurs, time runs downwards. Completions that nobody
        waits for are left out."""
        columns = sorted({x for line in self.lines for x in (line.rank, line.peer) if x})
        columns += sorted({_link(line) for line in self.lines if line.peer})
        width = max([3, *(len(c) for c in columns)]) + 1
        head = "".join(c.center(width) for c in columns)
        out = [f"{self.program} on {self.profile}, trace {self.id}", "", f"     {head} what happens"]
        awaited = any(line.text in _COMPLETED for line in self.lines)
        shown = [line for line in self.lines if awaited or not line.text.startswith(("ack: ", "cqe: "))]
        for number, line in enumerate(shown, 1):
            at = columns.index(_link(line) if line.peer else line.rank)
            marks = "".join(("●" if i == at else "│").center(width) for i in range(len(columns)))
            out.append(f"{number:4} {marks} {line.text}")
        if self.violation:
            out += ["", f"{self.violation.kind.upper()}: {self.violation.text}"]
        out += [f"     still waiting: {text}" for text in self.blocked]
        return "\n".join(out)

    def to_json(self) -> dict[str, Any]:
        """The trace as plain data."""
        return {
            "id": self.id,
            "program": self.program,
            "profile": self.profile,
            "violation": None if self.violation is None else {"kind": self.violation.kind, "text": self.violation.text},
            "blocked": list(self.blocked),
            "steps": [{"rank": line.rank, "from": line.peer, "what": line.text} for line in self.lines],
            "outcome": self.outcome,
        }

    def dumps(self) -> str:
        return json.dumps(self.to_json(), indent=1)


def _link(line: Line) -> str:
    return f"{line.peer}→{line.rank}"


def ordered_moves(machine: Machine, state: Any) -> list[Move]:
    """The possible moves in an order that is a function of the program and the state alone."""
    return sorted(machine.moves(state), key=machine.key)


def record(machine: Machine, moves: list[Move], profile: str) -> Trace:
    """Run `moves` on a machine and describe each."""
    state = machine.initial()
    lines, spelled = [], []
    violation: Violation | None = None
    for move in moves:
        options = ordered_moves(machine, state)
        if len(options) > 1:
            spelled.append(_spell(options.index(move)))
        lines.append(Line(*machine.describe(state, move)))
        state, violation = machine.apply(state, move)
    blocked = () if violation or machine.moves(state) else tuple(machine.unfinished(state))
    if blocked:
        violation = Violation("lost signal" if machine.lost(state) else "deadlock", "; ".join(blocked))
    name = machine.program.name
    # registers, and the memory that changed
    outcome = {k: v for k, v in machine.outcome(state).items() if v or "." not in k}
    return Trace("".join(spelled) or "-", name, profile, violation, tuple(lines), blocked, outcome)


def replay(program: Program, profile: Profile, trace_id: str) -> Trace:
    """The execution that `trace_id` names."""
    machine = build(program, profile)
    state, moves, choices = machine.initial(), [], _choices(trace_id)
    violation: Violation | None = None
    while violation is None and (options := ordered_moves(machine, state)):
        if len(options) > 1:
            if not choices:
                break
            at = choices.pop(0)
            if at >= len(options):
                raise InvalidArgument(f"trace {trace_id!r} does not fit program {program.name!r} on {profile.name}")
            move = options[at]
        else:
            move = options[0]
        moves.append(move)
        state, violation = machine.apply(state, move)
    return record(build(program, profile), moves, profile.name)


def _spell(index: int) -> str:
    return _DIGITS[index] if index < len(_DIGITS) else f"({index})"


def _choices(trace_id: str) -> list[int]:
    found, rest = [], trace_id.replace("-", "")
    while rest:
        if rest[0] == "(":
            number, _, rest = rest[1:].partition(")")
            found.append(int(number))
        elif rest[0] in _DIGITS:
            found.append(_DIGITS.index(rest[0]))
            rest = rest[1:]
        else:
            raise InvalidArgument(f"not a trace id: {trace_id!r}")
    return found
