"""`expertwire check`: our protocols, explored on the contracts of the transports.

expertwire check dispatch --signal write --profile rc.spec     one cell, with the schedule if it fails
expertwire check dispatch                                      all signals and profiles
expertwire check --all                                         all protocols too
expertwire check --weakest dispatch                            what it needs of a transport
"""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from expertwire.cli import models
from expertwire.cli.jobs import Job, progress_bar, run_jobs
from expertwire.cli.weakest import show_weakest
from expertwire.cli.words import number
from expertwire.errors import InvalidArgument
from expertwire.ordering import profiles, signals
from expertwire.ordering.explore import MODES, Result, Verdict, explore
from expertwire.ordering.report import SHORT, Cell, cell, mark
from expertwire.ordering.trace import replay

_COLOUR = {"holds": "green", "fails": "red", "bound reached": "yellow"}
_INTERRUPTED = 130
_UNLIMITED = 10_000


def check(
    protocol: Annotated[str | None, typer.Argument(help=f"One of: {', '.join(models.MODELS)}.")] = None,
    signal: Annotated[str | None, typer.Option(help=f"One of: {', '.join(signals.MECHANISMS)}.")] = None,
    profile: Annotated[str | None, typer.Option(help="A profile, and knobs: rc.spec+wire=any,amo_waits=none.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every protocol, signal and profile.")] = False,
    weakest: Annotated[str | None, typer.Option(help="Show what this protocol needs of a transport.")] = None,
    ranks: Annotated[int, typer.Option(min=2, help="Number of ranks.")] = 2,
    mode: Annotated[str, typer.Option(help=f"One of: {', '.join(MODES)}.")] = "exhaustive",
    seed: Annotated[int, typer.Option(help="Seed of the modes random and pct.")] = 0,
    max_states: Annotated[int, typer.Option(min=1, help="Stop a check after so many states.")] = 2_000_000,
    trace: Annotated[str | None, typer.Option(help="Replay the execution of one check with this id.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explore a protocol under a transport's memory-ordering rules.

    Exit code 1 if the one check fails, or among several one that a transport of ours relies on (holds*). What is not
    decided, because a check came to --max-states or its mode only samples, does not count as failed.
    """
    if mode not in MODES:
        raise InvalidArgument(f"unknown mode {mode!r}; valid: {', '.join(MODES)}")
    one = protocol is not None and signal is not None and profile is not None and not all_ and weakest is None
    if trace is not None and not one:
        raise InvalidArgument("--trace replays one check: name a protocol, --signal and --profile")
    if weakest is not None:
        show_weakest(weakest, signal, profile, as_json)
    elif all_ or (protocol is not None and (signal is None or profile is None)):
        jobs = _jobs(None if all_ else protocol, signal, profile, ranks, mode, max_states, seed)
        bound = f"within {number(max_states, 'state')}" if mode == "exhaustive" else f"by mode {mode}"
        _matrix(jobs, bound, as_json)
    elif protocol is not None and signal is not None and profile is not None:
        _one(Job(protocol, signal, profile, ranks, mode, max_states, seed), trace, as_json)
    else:
        raise InvalidArgument(f"name a protocol ({', '.join(models.MODELS)}), --all, or --weakest PROTOCOL")


# ---- one cell --------------------------------------------------------------------------------------------------------


def _one(job: Job, trace: str | None, as_json: bool) -> None:
    profile, model = profiles.get(job.profile), models.get(job.model)
    if not signals.get(job.signal).suits(profile):
        valid = ", ".join(models.suitable(profile))
        raise InvalidArgument(f"signal {job.signal!r} does not exist on {profile.name}; valid: {valid}")
    program = models.program(model, profile, models.settings(model, job.signal), job.num_ranks)
    if trace is not None:
        replayed = replay(program, profile, trace)
        typer.echo(replayed.dumps() if as_json else replayed.timeline())
        return
    covered = 0
    started = time.perf_counter()
    with progress_bar(1, f"{job.model}, {job.signal}, {profile.name}", as_json) as update:

        def progress(states: int) -> None:
            nonlocal covered
            covered = states
            update(0, states)

        try:
            result = explore(program, profile, job.mode, seed=job.seed, max_states=job.max_states, progress=progress)
        except KeyboardInterrupt:
            seconds = time.perf_counter() - started
            typer.echo(f"interrupted after {covered:,} states in {seconds:.1f} s, no failure so far", err=True)
            raise typer.Exit(_INTERRUPTED) from None
    found = cell(job.model, job.signal, profile, result)
    _report(found, result, as_json)
    if not (found.holds or found.undecided):
        raise typer.Exit(1)


def _report(found: Cell, result: Result, as_json: bool) -> None:
    if as_json:
        data = found.to_json() | {"trace": result.trace.to_json() if result.trace else None}
        typer.echo(json.dumps(data, indent=1))
        return
    console = Console(highlight=False)
    colour = _COLOUR[found.verdict]
    console.print(
        f"{found.model} with signal {found.signal} on {found.profile}: [bold {colour}]{found.verdict}[/] "
        f"({number(result.states, 'state')}, {number(result.executions, 'execution')}, {result.seconds:.2f} s)",
        soft_wrap=True,
    )
    if found.cost:
        console.print(f"cost of one signal: {found.cost}", soft_wrap=True)
    if found.violation and result.verdict is not Verdict.FAILS:
        console.print(found.violation, soft_wrap=True)
    if result.trace:
        typer.echo("\n" + result.trace.timeline())


# ---- many cells ------------------------------------------------------------------------------------------------------


def _jobs(
    name: str | None, signal: str | None, profile: str | None, ranks: int, mode: str, limit: int, seed: int
) -> list[Job]:
    if name is not None:
        models.get(name)
    if signal is not None:
        signals.get(signal)
    known = [profiles.get(profile)] if profile is not None else list(profiles.PROFILES.values())
    return [
        Job(m, s, p, ranks, mode, limit, seed)
        for m, s, p in models.cells(known)
        if name in (None, m) and signal in (None, s)
    ]


def _matrix(jobs: list[Job], bound: str, as_json: bool) -> None:
    started = time.perf_counter()
    with progress_bar(len(jobs), "checking", as_json) as update:
        cells = run_jobs(jobs, update)
    seconds = time.perf_counter() - started
    open_claims = [c for c in cells if not c.holds and models.claimed(c.model, c.signal, c.profile)]
    broken = [c for c in open_claims if not c.undecided]
    if as_json:
        typer.echo(json.dumps({"seconds": round(seconds, 2), "cells": [c.to_json() for c in cells]}, indent=1))
    else:
        console = Console(highlight=False)
        _show(console if console.is_terminal else Console(highlight=False, width=160), cells, seconds)
        for c in open_claims:
            claim = f"{c.model} with signal {c.signal} on {c.profile}"
            typer.echo(f"not decided {bound}: {claim}" if c.undecided else f"CLAIM BROKEN: {claim}: {c.violation}")
    if len(cells) < len(jobs):
        typer.echo(f"interrupted: {len(cells)} of {len(jobs)} checks are done", err=True)
        raise typer.Exit(_INTERRUPTED)
    if broken:
        raise typer.Exit(1)


def _show(console: Console, cells: list[Cell], seconds: float) -> None:
    for model in dict.fromkeys(c.model for c in cells):
        chosen = {(c.profile, c.signal): c for c in cells if c.model == model}
        columns = [m for m in signals.MECHANISMS if any(s == m for _, s in chosen)]
        while columns:  # as many as fit, then the rest below
            fits = len(columns)
            while fits > 1 and _width(console, _table(model, columns[:fits], chosen)) > console.width:
                fits -= 1
            console.print(_table(model, columns[:fits], chosen))
            columns = columns[fits:]
    states = sum(c.states for c in cells)
    console.print("; ".join(f"{short} = {kind}" for kind, short in SHORT.items()) + "; bound = not decided")
    console.print("[bold green]holds*[/] is what a transport of ours relies on; an empty cell: no such signal there.")
    console.print(
        f"{number(len(cells), 'check')}, {number(states, 'state')} in {seconds:.1f} s, "
        f"{states / seconds:,.0f} states per second"
    )


def _width(console: Console, table: Table) -> int:
    return console.measure(table, options=console.options.update(max_width=_UNLIMITED)).minimum


def _table(model: str, columns: list[str], chosen: dict[tuple[str, str], Cell]) -> Table:
    table = Table(title=f"{model}: {models.get(model).text}", title_justify="left")
    for column in ("profile", *columns):
        table.add_column(column, no_wrap=True)
    for profile in dict.fromkeys(p for p, _ in chosen):
        table.add_row(profile, *(_styled(model, column, profile, chosen) for column in columns))
    return table


def _styled(model: str, signal: str, profile: str, chosen: dict[tuple[str, str], Cell]) -> str:
    found = chosen.get((profile, signal))
    if found is None:
        return ""
    star = "*" if models.claimed(model, signal, profile) else ""
    return f"[{_COLOUR[found.verdict]}]{mark(found)}{star}[/]"
