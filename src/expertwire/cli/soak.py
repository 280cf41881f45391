"""`expertwire soak`: the real engine on a hostile network, for as many steps as you like."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from expertwire.cli.words import number

if TYPE_CHECKING:
    from rich.console import Console

    from expertwire.testing.soak import Finding


def soak(
    profile: Annotated[
        str, typer.Option(help="Network profile, for instance rc.ooo, srd, shmem, gin.strong.")
    ] = "rc.ooo",
    signal: Annotated[str, typer.Option(help="Mechanism of put_signal, for instance atomic, imm, counted.")] = "atomic",
    ranks: Annotated[int, typer.Option(min=2, max=64)] = 4,
    tokens: Annotated[int, typer.Option(min=1, max=1024, help="Most tokens per rank and step.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Steps, each a dispatch and a combine.")] = 1000,
    seed: Annotated[int, typer.Option(help="The run is a function of it.")] = 0,
    schedule: Annotated[str, typer.Option(help="adversary (rows as late as allowed) or random.")] = "adversary",
    faults: Annotated[bool, typer.Option(help="Ranks sleep past the time-out and leave; peers mask them.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Run the engine on a simulated network and compare every row. Exits 1 if a row or a count was wrong."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from expertwire.testing.soak import Finding, Soak, run, shrink

    console = Console(stderr=as_json)
    request = Soak(profile, signal, ranks, tokens, steps, seed, schedule, faults)
    began, done, choices, masked = time.perf_counter(), 0, 0, 0
    finding: Finding | None = None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{profile} {signal}", total=steps)
        try:
            for part in run(request):
                if isinstance(part, Finding):
                    bar.update(task, description="shrinking")
                    finding = shrink(part)
                else:
                    done, choices, masked = done + part.steps, choices + part.choices, masked + part.masked
                    bar.update(task, completed=done)
        except KeyboardInterrupt:
            console.print(f"interrupted: {done} of {steps} steps were right so far")
            raise
    seconds = time.perf_counter() - began
    if as_json:
        found = None if finding is None else asdict(finding)
        summary = {"request": asdict(request), "steps": done, "choices": choices, "seconds": seconds, "finding": found}
        typer.echo(json.dumps(summary))
    elif finding is not None:
        _show(console, finding)
    else:
        console.print(
            f"[bold green]right[/]: {number(done, 'step')} on {ranks} ranks over {profile} with {signal} ({schedule}, "
            f"seed {seed}), {number(choices, 'choice')}, {60 * done / seconds:,.0f} steps a minute"
            + (f", {number(masked, 'mask')}" if faults else ""),
            soft_wrap=True,
        )
    return int(finding is not None)


def _show(console: Console, finding: Finding) -> None:
    s = finding.soak
    console.print(f"[bold red]wrong[/] at step {finding.step}: {finding.text}", soft_wrap=True)
    console.print("what the network did last:")
    for line in [line for line in finding.trace if ": ack:" not in line and ": cqe:" not in line][-24:]:
        console.print(f"  {line}", highlight=False, soft_wrap=True)
    console.print(
        f"replay: expertwire soak --profile {s.profile} --signal {s.signal} --ranks {s.ranks} --tokens {s.tokens} "
        f"--steps {s.steps} --seed {s.seed} --schedule {s.schedule}{' --faults' if s.faults else ''}",
        highlight=False,
        soft_wrap=True,
    )
