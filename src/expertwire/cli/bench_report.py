"""What the bench says: a table per case, JSON with everything needed to judge the numbers, a plot of a sweep."""

from __future__ import annotations

import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from expertwire.cli.bench_cases import Case
from expertwire.cli.bench_measure import Measured
from expertwire.testing.timing import Summary, summarise

FORMULA = (
    "bytes = rows in the result of dispatch, or rows summed by combine, times bytes of one row (payload and scale "
    "factors), mean over ranks; GB/s = bytes / median of the slowest rank / 1e9"
)
_PACKAGES = ("expertwire", "torch", "numba", "numpy", "mpi4py", "mpich", "triton")


@dataclass(frozen=True)
class Result:
    """One line of one operation of one case. `slower` is its median over that of expertwire."""

    case: Case
    operation: str
    line: str
    summary: Summary
    num_bytes: float
    slower: float

    @property
    def gbs(self) -> float | None:
        return self.num_bytes / self.summary.median_s / 1e9 if self.num_bytes else None


def results(case: Case, of_rank: Sequence[Sequence[Measured]]) -> list[Result]:
    found = []
    for parts in zip(*of_rank, strict=True):
        num_bytes = sum(part.num_bytes for part in parts) / len(parts)
        summaries = {line: summarise([part.samples[line] for part in parts]) for line in parts[0].samples}
        ours = summaries["expertwire"].median_s
        found += [
            Result(case, parts[0].operation, line, summary, num_bytes, summary.median_s / ours)
            for line, summary in summaries.items()
        ]
    return found


_FULL_WIDTH = 112  # columns that all of a table takes; below, those that fewer readers need are left out


def show(console: Console, title: str, rows: Sequence[Result]) -> None:
    """One table; on a narrow terminal without the fastest rank and the percentiles, which `--json` has."""
    spread = ("fastest rank", "p10", "p90") if console.width >= _FULL_WIDTH else ()
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    table.add_column("operation", no_wrap=True)
    table.add_column("line", no_wrap=True)
    for name in ("median us", *spread, "GB/s", "expertwire is"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = ""
    for r in rows:
        s, ours = r.summary, r.line == "expertwire"
        seconds = (s.median_s, s.fastest_rank_s, s.p10_s, s.p90_s) if spread else (s.median_s,)
        table.add_row(
            r.operation if r.operation != previous else "", r.line,
            *(f"{1e6 * value:,.1f}" for value in seconds),
            "" if r.gbs is None else f"{r.gbs:.2f}", "" if ours else f"{r.slower:.2f} x as fast",
            style="bold" if ours else None,
        )  # fmt: skip
        previous = r.operation
    console.print(table)
    console.print()


def as_json(rows: Sequence[Result], formula: str = FORMULA, gpu: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "command": shlex.join(["expertwire", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine() | (gpu or {}),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "formula": formula,
        "results": [
            {
                "case": asdict(r.case) if r.case.name != "row work" else {"name": r.case.name},
                "operation": r.operation,
                "line": r.line,
                **{f"{name.removesuffix('_s')}_us": round(1e6 * getattr(r.summary, name), 3) for name in _SECONDS},
                "rounds": r.summary.rounds,
                "bytes": r.num_bytes,
                "gbs": None if r.gbs is None else round(r.gbs, 3),
                "slower_than_expertwire": round(r.slower, 3),
            }
            for r in rows
        ],
    }


_SECONDS = ("median_s", "fastest_rank_s", "p10_s", "p90_s")


def machine() -> dict[str, Any]:
    processor = platform.processor() or platform.machine()
    try:
        names = [
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ]
        processor = names[0] if names else processor
    except OSError:
        pass
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the source tree, with a plus if files were changed; None outside a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    found = git("rev-parse", "HEAD")
    return found and found + ("+" if git("status", "--porcelain", "--", str(here.parent)) else "")


_WIDTH, _HEIGHT, _MARGIN = 720, 440, 70
_COLOURS = ("#0b6e99", "#d9730d", "#6c8f3d", "#9065b0")


def plot(rows: Sequence[Result]) -> str:
    """SVG, both axes logarithmic: microseconds per call over rows per rank, of the cases named "rows"."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for r in rows:
        if r.case.name == "rows" and r.line in ("expertwire", "memory copy", "floor"):
            curves.setdefault(f"{r.operation}, {r.line}", []).append((r.case.tokens, 1e6 * r.summary.median_s))
    if not curves:
        return ""
    xs, ys = zip(*(point for points in curves.values() for point in points), strict=True)
    x_low, x_high = math.log10(min(xs)), max(math.log10(max(xs)), math.log10(min(xs)) + 1)
    y_low, y_high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))

    def place(x: float, y: float) -> tuple[float, float]:
        right = _MARGIN + (math.log10(x) - x_low) / (x_high - x_low) * (_WIDTH - 2 * _MARGIN)
        down = _HEIGHT - _MARGIN - (math.log10(y) - y_low) / (y_high - y_low) * (_HEIGHT - 2 * _MARGIN)
        return round(right, 1), round(down, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_MARGIN}" y="24" font-size="14">Microseconds per call over rows per rank '
        f"({rows[0].case.ranks} ranks, hidden {rows[0].case.hidden}, bfloat16)</text>",
    ]
    for exponent in range(y_low, y_high + 1):
        _, down = place(min(xs), 10.0**exponent)
        parts.append(f'<line x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="{down}" y2="{down}" stroke="#ddd"/>')
        parts.append(f'<text x="{_MARGIN - 8}" y="{down + 4}" text-anchor="end">{10**exponent:,}</text>')
    for x in sorted(set(xs)):
        right, _ = place(x, 10.0**y_low)
        parts.append(f'<text x="{right}" y="{_HEIGHT - _MARGIN + 18}" text-anchor="middle">{int(x):,}</text>')
    for i, (name, points) in enumerate(curves.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        dash = "" if "expertwire" in name else ' stroke-dasharray="5 4"'
        path = " ".join(f"{right},{down}" for right, down in (place(*point) for point in points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        y = _MARGIN + 18 * i
        parts.append(f'<line x1="{_MARGIN + 12}" x2="{_MARGIN + 40}" y1="{y}" y2="{y}" stroke="{colour}"{dash}/>')
        parts.append(f'<text x="{_MARGIN + 48}" y="{y + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
