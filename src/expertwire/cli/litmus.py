"""`expertwire litmus`: the facts about transports that the checker rests on, each run as a small program."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from expertwire.cli.words import number
from expertwire.ordering import litmus as rows
from expertwire.ordering.litmus import MEANING, RowResult


def litmus(
    profile: Annotated[str | None, typer.Option(help="Only cases on this profile.")] = None,
    id_: Annotated[list[str] | None, typer.Option("--id", help="Only this row; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the litmus table: expected and found verdicts. Exit code 1 on any disagreement."""
    started = time.perf_counter()
    results = rows.run(id_ or None, profile)
    seconds = time.perf_counter() - started
    if as_json:
        typer.echo(json.dumps([_plain(r) for r in results], indent=1))
    else:
        _show(results, seconds, details=len(results) <= 3)
    if not all(r.agrees for r in results):
        raise typer.Exit(1)


def _plain(result: RowResult) -> dict[str, Any]:
    row = result.row
    return {
        "id": row.id,
        "expected": result.expected,
        "found": result.found,
        "agrees": result.agrees,
        "confidence": row.confidence,
        "source": row.source,
        "amended": row.amended,
        "reason": row.reason,
        "states": result.states,
        "cases": [{"profile": f.profile, "expected": f.expected, "found": f.found} for f in result.findings],
    }


def _show(results: list[RowResult], seconds: float, details: bool) -> None:
    console = Console(highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("id", "expected", "found", "states", "", "conf"):
        table.add_column(heading, no_wrap=True)
    table.add_column("profiles: source", overflow="fold")
    for result in results:
        row = result.row
        where = " ".join(dict.fromkeys(f.profile for f in result.findings))
        agreement = "[green]agrees[/]" if result.agrees else "[bold red]DISAGREES[/]"
        table.add_row(
            row.id, MEANING.get(result.expected, result.expected), MEANING.get(result.found, result.found),
            str(result.states), agreement if result.findings else "not run", row.confidence, f"{where}: {row.source}",
        )  # fmt: skip
    console.print(table)
    for result in results:
        for f in result.disagreeing:
            console.print(f"{result.row.id} on {f.profile}: {MEANING[f.found]}, expected {MEANING[f.expected]}")
        if result.row.amended:
            console.print(f"{result.row.id}: {result.row.amended}")
        if result.row.reason:
            console.print(f"{result.row.id} is not run here: {result.row.reason}")
    if details:
        _details(console, results)
    bad = [r.row.id for r in results if not r.agrees]
    run = sum(1 for r in results if r.findings)
    states = sum(r.states for r in results)
    counts = f"{number(run, 'row')} run, {number(states, 'state')}, {seconds:.1f} s, {number(len(bad), 'disagreement')}"
    console.print(" ".join([counts, *bad]))


def _details(console: Console, results: list[RowResult]) -> None:
    """The programs, and a schedule for every state that is reachable."""
    for result in results:
        ran = {f.profile for f in result.findings}
        for case in [case for case in result.row.cases if ran & {*case.profiles}]:
            console.print(f"\n[bold]{result.row.id}[/] {case.remark}")
            for header, actions in case.threads.items():
                console.print(f"    {header}: {actions}", markup=False)
            console.print(f"    reachable? {case.query}", markup=False)
        for finding in result.findings:
            if finding.result.trace:
                typer.echo("\n" + finding.result.trace.timeline())
