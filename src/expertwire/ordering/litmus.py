"""The litmus table: facts about transports, as programs with the verdicts that the sources give.

`run_row` computes each verdict from the machine; the table's verdict is only compared with it.

>>> row = table()["R2"]
>>> row.source, run_row(row).agrees
('o9-20 atomic clause; OOO_DP text', True)
"""

from __future__ import annotations

import functools
import importlib.resources
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from expertwire.errors import InvalidArgument
from expertwire.ordering import deepep, profiles
from expertwire.ordering.explore import Result, Verdict, explore
from expertwire.ordering.litmus_text import parse_program, parse_query
from expertwire.ordering.profiles import Profile
from expertwire.ordering.program import Program
from expertwire.ordering.ptx_text import parse_ptx

Letter = Literal["A", "F", "U", "?"]
MEANING: dict[str, str] = {"A": "allowed", "F": "forbidden", "U": "undefined", "?": "contested"}
_RC = ("rc.spec", "rc.hw", "rc.ro", "rc.ro_pcieatomic", "rc.ooo")


@dataclass(frozen=True, slots=True)
class Case:
    """One program with one query on some profiles, and the verdict that the source gives. With `build` the program is a
    model that checks itself."""

    profiles: tuple[str, ...]
    verdict: str
    threads: Mapping[str, str]
    query: str
    remark: str = ""
    build: Callable[[], Program] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A fact. A contested row has one case per reading, whose verdicts differ. A row without cases is not run, and
    `reason` says why. `amended` says where and why the row departs from the reference."""

    id: str
    verdict: str
    confidence: str
    source: str
    cases: tuple[Case, ...]
    reason: str = ""
    amended: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One case on one profile."""

    profile: str
    expected: str
    found: str
    result: Result


@dataclass(frozen=True, slots=True)
class RowResult:
    """A row with what the machine found."""

    row: Row
    findings: tuple[Finding, ...] = field(default_factory=tuple)
    seconds: float = 0.0

    @property
    def expected(self) -> str:
        """What the source says of the first case that was run; contested if the readings that were run differ. Without
        a filter that is the verdict of the row."""
        return self._letter([f.expected for f in self.findings])

    @property
    def found(self) -> str:
        """The same of what the machine found."""
        return self._letter([f.found for f in self.findings])

    def _letter(self, letters: list[str]) -> str:
        if self.row.verdict == "?" and len(set(letters)) > 1:
            return "?"
        return letters[0] if letters else "-"

    @property
    def disagreeing(self) -> list[Finding]:
        return [f for f in self.findings if f.expected != f.found]

    @property
    def agrees(self) -> bool:
        return not self.disagreeing

    @property
    def states(self) -> int:
        return sum(f.result.states for f in self.findings)


@functools.cache
def table() -> dict[str, Row]:
    """All rows, in the order of the reference."""
    text = importlib.resources.files("expertwire.ordering").joinpath("litmus_table.txt").read_text("utf-8")
    return {row.id: row for row in parse_table(text)}


def parse_table(text: str) -> list[Row]:
    """Rows from the format that the table's first lines explain."""
    rows: list[Row] = []
    for paragraph in text.split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line.strip() and not line.startswith("#")]
        if lines:
            rows.append(_row(lines))
    ids = [row.id for row in rows]
    if len(set(ids)) != len(ids):
        raise InvalidArgument(f"litmus ids are not unique: {sorted(i for i in set(ids) if ids.count(i) > 1)}")
    return rows


def _row(lines: list[str]) -> Row:
    name, where, verdict, confidence, source = (part.strip() for part in lines[0].split(" | "))
    if where == "-":
        return Row(name, verdict, confidence, source, (), lines[1].strip())
    if where == "deepep":
        modelled = tuple(Case(c.profiles, c.verdict, {}, "", c.remark, c.build) for c in deepep.SCENARIOS[name])
        return Row(name, verdict, confidence, source, modelled)
    cases: list[Case] = []
    threads: dict[str, str] = {}
    query, amended, heading = "", "", (where, verdict, "")

    def close() -> None:
        if threads:
            cases.append(Case(_expand(heading[0]), heading[1], dict(threads), query, heading[2]))

    for line in lines[1:]:
        if line.startswith("+"):
            if not (verdict == "?" and heading[1] == "?"):
                close()
            heading = (*(part.strip() for part in line[1:].split(" | ")),)  # type: ignore[assignment]
        elif line.strip().startswith("!"):
            amended = line.strip()[1:].strip()
        elif line.strip().startswith("?"):
            query = line.strip()[1:].strip()
        else:
            header, _, actions = line.strip().partition(":")
            threads[header] = actions
    close()
    return Row(name, verdict, confidence, source, tuple(cases), amended=amended)


def _expand(where: str) -> tuple[str, ...]:
    return tuple(p for word in where.split() for p in (_RC if word == "rc.*" else (word,)))


def program_of(row: Row, case: Case, profile: Profile) -> Program:
    """The program of a case."""
    if case.build is not None:
        return case.build()
    if profile.machine == "ptx":
        return parse_ptx(row.id, case.threads, profile)
    return parse_program(row.id, case.threads)


def run_row(row: Row, profile: str | None = None, reduce: bool = True) -> RowResult:
    """Run every case of a row (on `profile` alone, with whichever knobs the case turns) and compare."""
    findings = []
    started = time.perf_counter()
    for case in row.cases:
        for name in case.profiles:
            if _is_on(name, profile):
                used = profiles.get(name)
                query = parse_query(case.query) if case.query else None
                result = explore(program_of(row, case, used), used, query=query, reduce=reduce)
                findings.append(Finding(name, case.verdict, _letter(result), result))
    return RowResult(row, tuple(findings), time.perf_counter() - started)


def _letter(result: Result) -> str:
    if result.verdict is Verdict.HOLDS:
        return "F"
    violation = result.trace.violation if result.trace else None
    return "U" if violation is not None and violation.kind == "undefined" else "A"


def _is_on(name: str, profile: str | None) -> bool:
    return profile in (None, name, name.partition("+")[0])


def run(ids: Iterable[str] | None = None, profile: str | None = None) -> list[RowResult]:
    """Run rows of the table. InvalidArgument if none of them has a case on `profile`."""
    known = table()
    chosen = list(known) if ids is None else list(ids)
    for name in chosen:
        if name not in known:
            raise InvalidArgument(f"unknown litmus row {name!r}; valid: {', '.join(known)}")
    if profile is not None:
        profiles.get(profile)
    where = {name: dict.fromkeys(p for case in known[name].cases for p in case.profiles) for name in chosen}
    matching = [name for name in chosen if any(_is_on(p, profile) for p in where[name])]
    if profile is not None and not matching:
        valid = dict.fromkeys(p for name in chosen for p in where[name])
        raise InvalidArgument(f"no case of these litmus rows is on {profile}; valid: {', '.join(valid)}")
    return [run_row(known[name], profile) for name in (chosen if profile is None else matching)]
