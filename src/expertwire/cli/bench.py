"""`expertwire bench`: dispatch and combine on this machine, against lines measured in the same run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expertwire.errors import InvalidArgument

if TYPE_CHECKING:
    from expertwire.cli.bench_cases import Case

_TIMEOUT_S = 3600.0


def bench(
    ranks: Annotated[str, typer.Option(help="Processes; like all numbers here, one or several: 2,4.")] = "2",
    tokens: Annotated[str, typer.Option(help="Tokens per rank.")] = "1024",
    hidden: Annotated[str, typer.Option(help="Channels of a row.")] = "7168",
    experts: Annotated[str, typer.Option(help="Experts of all ranks.")] = "256",
    topk: Annotated[str, typer.Option(help="Experts per token.")] = "8",
    layout: Annotated[str, typer.Option(help="compact, expert_major, expert_slots.")] = "compact",
    wire: Annotated[str, typer.Option(help="Of dispatch: bf16, fp8, fp8_ue8m0.")] = "bf16",
    combine_wire: Annotated[str, typer.Option(help="Of combine: bf16, logfmt10.")] = "bf16",
    routing: Annotated[str, typer.Option(help="uniform, skewed, or a file of `demo --save-routing`.")] = "uniform",
    suite: Annotated[str, typer.Option(help="standard or scaling: a fixed set of cases in place of the above.")] = "",
    seconds: Annotated[float, typer.Option(help="How long each line is measured.")] = 1.0,
    mpi: Annotated[bool, typer.Option(help="A line for MPI Alltoallv, if mpi4py and an MPI are installed.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers here.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the sweep over rows here, as SVG.")] = None,
) -> None:
    """Time dispatch and combine beside gloo, MPI and plain memory copies, after checking that all are correct."""
    for option, path in (("--json", json_file), ("--plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidArgument(f"{option}: there is no folder {path.absolute().parent}")
    if not 0 < seconds <= 600:
        raise InvalidArgument(f"--seconds must be in (0, 600], got {seconds}")

    from expertwire.cli.bench_cases import ROUTINGS, SUITES, Case, saved_routing

    if suite and suite not in SUITES:
        raise InvalidArgument(f"--suite must be one of {', '.join(SUITES)}, got {suite!r}")
    if routing not in ROUTINGS:
        saved, num_experts = saved_routing(routing)
        experts, topk = str(num_experts), str(saved.shape[-1])
    cases = SUITES.get(suite) or [
        Case(*numbers, *words, routing)
        for numbers in itertools.product(
            _numbers("ranks", ranks),
            _numbers("tokens", tokens),
            _numbers("hidden", hidden),
            _numbers("experts", experts),
            _numbers("topk", topk),
        )
        for words in itertools.product(layout.split(","), wire.split(","), combine_wire.split(","))
    ]
    _run(cases, seconds, mpi, suite == "standard", json_file, plot)


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise InvalidArgument(f"--{name} must be a number, or several with commas between, got {text!r}") from None


def _run(
    cases: list[Case], seconds: float, mpi: bool, row_work: bool, json_file: Path | None, plot: Path | None
) -> None:
    from rich.console import Console

    from expertwire.cli import bench_report
    from expertwire.cli.bench_cases import Case
    from expertwire.cli.bench_measure import measure, measure_row_work
    from expertwire.testing.ranks import Processes

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    launcher = _mpi_launcher() if mpi else None
    found: list[bench_report.Result] = []

    def add(case: Case, title: str, call: Callable[[], list[Any]]) -> None:
        try:
            with console.status(title):
                rows = bench_report.results(case, call())
        except AssertionError as error:
            typer.echo(f"not correct, so not timed: {title}: {error}", err=True)
            raise typer.Exit(1) from None
        bench_report.show(console, title, rows)
        found.extend(rows)

    with Processes(max(case.ranks for case in cases)) as processes:
        for case in cases:
            title = f"{case.name}: {case.title}" if case.name else case.title
            if launcher is not None and case.ranks > 1:
                add(case, title, lambda case=case: launcher.run(measure, case, seconds, num_ranks=case.ranks))  # type: ignore[misc]
                continue
            add(
                case, title,
                lambda case=case: processes.run(measure, case, seconds, num_ranks=case.ranks, timeout_s=_TIMEOUT_S),  # type: ignore[misc]
            )  # fmt: skip
        if row_work:
            case = Case(name="row work")
            title = "row work: 128 x 7168, FP8 quantisation and the weighted sum of 8 rows, one rank"
            add(case, title, lambda: processes.run(measure_row_work, seconds, num_ranks=1, timeout_s=_TIMEOUT_S))
    console.print(bench_report.FORMULA, style="dim", highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps(bench_report.as_json(found), indent=1) + "\n")
    if plot is not None:
        drawing = bench_report.plot(found)
        if not drawing:
            raise InvalidArgument("--plot needs the sweep over rows: use --suite scaling")
        plot.write_text(drawing)


def _mpi_launcher() -> Any:
    """None where MPI is not installed; `expertwire doctor` says how to change that."""
    import importlib.util

    from expertwire.cli.bench_mpi import MpiLauncher
    from expertwire.cli.doctor import mpiexec

    program = mpiexec()
    return MpiLauncher(program) if program and importlib.util.find_spec("mpi4py") else None
