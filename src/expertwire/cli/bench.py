"""`expertwire bench`: dispatch and combine on this machine, against lines measured in the same run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expertwire.errors import InvalidArgument, PeerError

if TYPE_CHECKING:
    from expertwire.cli.bench_cases import Case
    from expertwire.cli.bench_device import DeviceCase

_TIMEOUT_S = 3600.0


def bench(
    device: Annotated[str, typer.Option(help="cpu, or cuda: the kernels on a GPU.")] = "cpu",
    ranks: Annotated[str, typer.Option(help="Ranks; like all numbers here, one or several: 2,4.")] = "2",
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
    num_sms: Annotated[str, typer.Option(help="cuda: SMs per rank, 0 for its share.")] = "0",
    processes: Annotated[bool, typer.Option("--processes", help="cuda: ranks as processes, not threads.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers here.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the sweep over rows here, as SVG.")] = None,
) -> None:
    """Time dispatch and combine, after checking that all is correct.

    On the CPU beside gloo, MPI and plain memory copies; on a GPU beside plain torch and what the bytes alone take.
    """
    for option, path in (("--json", json_file), ("--plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidArgument(f"{option}: there is no folder {path.absolute().parent}")
    if not 0 < seconds <= 600:
        raise InvalidArgument(f"--seconds must be in (0, 600], got {seconds}")
    if device not in ("cpu", "cuda"):
        raise InvalidArgument(f"--device must be cpu or cuda, got {device!r}")
    if device == "cpu" and (processes or num_sms != "0"):
        raise InvalidArgument("--processes and --num-sms are for --device cuda; on the CPU ranks are processes")

    from expertwire.cli.bench_cases import ROUTINGS, SUITES, Case, saved_routing
    from expertwire.cli.bench_device import DEVICE_SUITES, DeviceCase

    if suite and suite not in SUITES:
        raise InvalidArgument(f"--suite must be one of {', '.join(SUITES)}, got {suite!r}")
    if plot is not None and suite != "scaling":
        raise InvalidArgument("--plot needs the sweep over rows: use --suite scaling")
    if routing not in ROUTINGS:
        saved, num_experts = saved_routing(routing)
        experts, topk = str(num_experts), str(saved.shape[-1])
    found = [
        (*numbers, *words, routing)
        for numbers in itertools.product(
            _numbers("ranks", ranks),
            _numbers("tokens", tokens),
            _numbers("hidden", hidden),
            _numbers("experts", experts),
            _numbers("topk", topk),
        )
        for words in itertools.product(layout.split(","), wire.split(","), combine_wire.split(","))
    ]
    if device == "cpu":
        _run(
            SUITES.get(suite) or [Case(*values) for values in found], seconds, mpi, suite == "standard", json_file, plot
        )
        return
    budgets = _numbers("num-sms", num_sms)
    chosen = [DeviceCase(*values, num_sms=budget) for values in found for budget in budgets]
    chosen = [replace(case, processes=processes) for case in DEVICE_SUITES.get(suite) or chosen]
    _run_on_gpu(chosen, seconds, json_file, plot)


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise InvalidArgument(f"--{name} must be a number, or several with commas between, got {text!r}") from None


def _run(
    cases: list[Case], seconds: float, mpi: bool, row_work: bool, json_file: Path | None, plot: Path | None
) -> None:
    from expertwire.cli.bench_cases import Case
    from expertwire.cli.bench_measure import measure, measure_row_work
    from expertwire.testing.ranks import Processes

    launcher = _mpi_launcher() if mpi else None
    report = _Report()
    with Processes(max(case.ranks for case in cases)) as processes:
        for case in cases:
            if launcher is not None and case.ranks > 1:
                report.add(case, lambda case=case: launcher.run(measure, case, seconds, num_ranks=case.ranks))  # type: ignore[misc]
                continue
            report.add(
                case,
                lambda case=case: processes.run(measure, case, seconds, num_ranks=case.ranks, timeout_s=_TIMEOUT_S),  # type: ignore[misc]
            )  # fmt: skip
        if row_work:
            title = "row work: 128 x 7168, FP8 quantisation and the weighted sum of 8 rows, one rank"
            report.add(
                Case(name="row work"),
                lambda: processes.run(measure_row_work, seconds, num_ranks=1, timeout_s=_TIMEOUT_S), title,
            )  # fmt: skip
    report.end(json_file, plot)


def _run_on_gpu(cases: list[DeviceCase], seconds: float, json_file: Path | None, plot: Path | None) -> None:
    from expertwire.cli import bench_device
    from expertwire.testing.ranks import Processes

    with Processes(max(case.ranks for case in cases)) as processes:
        run = bench_device.runner(seconds, processes)
        gpu = bench_device.gpu_facts()
        if any(case.processes and case.ranks > gpu["gpus"] for case in cases) and not gpu["mps"]:
            typer.echo("without MPS, processes that share a GPU take turns: start nvidia-cuda-mps-control -d", err=True)
        report = _Report(bench_device.FORMULA, gpu)
        for case in cases:
            report.add(case, lambda case=case: run(case))  # type: ignore[misc]
    report.end(json_file, plot)


class _Report:
    """Shows results as they come, and writes them down at the end. What fails is said, and the rest is measured."""

    def __init__(self, formula: str | None = None, gpu: dict[str, Any] | None = None) -> None:
        from rich.console import Console

        from expertwire.cli import bench_report

        self._console = Console()
        if not self._console.is_terminal:
            self._console = Console(width=120)
        self._formula, self._gpu = formula or bench_report.FORMULA, gpu
        self._found: list[bench_report.Result] = []
        self._failed: list[str] = []

    def add(self, case: Case, call: Callable[[], list[Any]], title: str = "") -> None:
        from expertwire.cli import bench_report

        title = title or (f"{case.name}: {case.title}" if case.name else case.title)
        try:
            with self._console.status(title):
                rows = bench_report.results(case, call())
        except (AssertionError, PeerError) as error:
            why = "not correct, so not timed" if isinstance(error, AssertionError) else "not measured"
            self._failed.append(f"{why}: {title}: {error}")
            typer.echo(self._failed[-1], err=True)
            return
        bench_report.show(self._console, title, rows)
        self._found.extend(rows)

    def end(self, json_file: Path | None, plot: Path | None) -> None:
        from expertwire.cli import bench_report

        self._console.print(self._formula, style="dim", highlight=False)
        if json_file is not None:
            report = bench_report.as_json(self._found, self._formula, self._gpu)
            json_file.write_text(json.dumps(report, indent=1) + "\n")
        if plot is not None and (drawing := bench_report.plot(self._found)):  # empty if all of the sweep failed
            plot.write_text(drawing)
        if self._failed:
            typer.echo("\n".join([f"{len(self._failed)} of the cases failed:", *self._failed]), err=True)
            raise typer.Exit(1)


def _mpi_launcher() -> Any:
    """None where MPI is not installed; `expertwire doctor` says how to change that."""
    import importlib.util

    from expertwire.cli.bench_mpi import MpiLauncher
    from expertwire.cli.doctor import mpiexec

    program = mpiexec()
    return MpiLauncher(program) if program and importlib.util.find_spec("mpi4py") else None
