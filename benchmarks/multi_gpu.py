"""Several GPUs of one host: are dispatch and combine right between them, and how long do they take?

    python benchmarks/multi_gpu.py --out results.json                 one process for each visible GPU
    python benchmarks/multi_gpu.py --virtual 2 --tokens 512           a dry run: processes that share GPU 0, under MPS

One call checks peer access and a copy of every pair of GPUs, runs the conformance checks over symm_mem and cuda_ipc,
soaks 2,000 round trips of integers whose sums are exact, goes on without a rank that is killed, and times, slowest
rank's median, all in this run: prefill on 12, 24 and all SMs; decode with 16 to 512 tokens, as graphs and eager; NCCL
with torch index work; and copies of the same bytes between GPUs. It ends within --limit seconds: sections that come
late are skipped, and say so. The table is last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# NVLink multicast stays off, in all that is started from here.
OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
DECODE_TOKENS = (16, 64, 128, 256, 512)
SMS = (24, None, 12)  # None: all, or a rank's share of the GPU


@dataclass
class Clock:
    """Seconds that are left of all that may be used."""

    limit_s: float
    now: Callable[[], float] = time.monotonic
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.now()

    def spent(self) -> float:
        return self.now() - self.started

    def budget(self, wanted_s: float) -> float | None:
        """How long a section may take: what it wants, or what is left; None if that is less than half of it."""
        left = self.limit_s - self.spent()
        return None if left < wanted_s / 2 else min(wanted_s, left)


@dataclass(frozen=True)
class Section:
    """A part of the run. `fn` is called on all ranks as fn(group, setup, *args); at most `wanted_s` seconds."""

    name: str
    fn: str
    args: tuple[Any, ...]
    wanted_s: float


def plan(transports: tuple[str, ...], tokens: int, trips: int, only: Sequence[str] = ()) -> list[Section]:
    """What is run, the most telling first. TRANSPORT: the first transport that has passed its conformance checks.

    `only` names sections by the beginnings of their names; the first conformance section is always run.
    """
    first, *others = transports
    sections = [
        Section("pairs", "pairs", (), 60),
        Section(f"conformance {first}", "conformance", (first,), 120),
        Section("soak", "soak", ("TRANSPORT", trips), 60),
        *(Section(f"prefill {sms or 'all'}", "prefill", ("TRANSPORT", tokens, sms, 1.0), 90) for sms in SMS),
        *(Section(f"decode {n}", "decode", ("TRANSPORT", n, 1.0), 45) for n in DECODE_TOKENS),
        Section("nccl", "nccl", (nccl_cases(tokens), 0.5), 60),
        Section("floor", "floor", ("TRANSPORT", "SIZES"), 30),
        *(Section(f"conformance {name}", "conformance", (name,), 90) for name in others),
        Section("masks", "masks", ("TRANSPORT",), 60),
    ]
    wanted = (f"conformance {first}", *only)
    return [s for s in sections if not only or s.name.startswith(wanted)]


def nccl_cases(tokens: int) -> list[tuple[int, str, tuple[str, ...]]]:
    return [
        (tokens, "compact", ("fp8", "bf16")),
        (tokens, "expert_major", ("fp8", "bf16")),
        *((n, "expert_major", ("fp8",)) for n in DECODE_TOKENS),
    ]


# -- what came out -----------------------------------------------------------------------------------------------------


@dataclass
class Timed:
    """A line of the table: seconds of the slowest rank's median, and the most bytes that a rank sends to its peers."""

    section: str
    tokens: int
    sms: str
    layout: str
    wire: str
    operation: str
    seconds: float
    fastest_s: float
    peer_bytes: int = 0
    nccl_s: float | None = None
    floor_s: float | None = None


def timed(section: Section, of_rank: list[dict[Any, Any]]) -> list[Timed]:
    """The results of a prefill or decode section."""
    from expertwire.testing.timing import summarise

    found = []
    for key in of_rank[0]:
        summary = summarise([answers[key][0] for answers in of_rank])
        most = max(answers[key][1] for answers in of_rank)
        if section.fn == "prefill":
            layout, wire, operation = key
            tokens, sms = section.args[1], str(section.args[2] or "all")
        else:
            layout, wire, operation, tokens, sms = "expert_slots", "fp8", key, section.args[1], "all"
            wire = "bf16" if operation == "combine" else "fp8"
        found.append(
            Timed(section.name, tokens, sms, layout, wire, operation, summary.median_s, summary.fastest_rank_s, most)
        )
    return found


def beside(rows: list[Timed], nccl: dict[Any, float], floors: dict[int, float]) -> None:
    """Put the baseline and the floor into the rows. EXPERT_SLOTS is compared with NCCL's rows by expert; a round trip
    with both halves, also of the floor."""
    for row in rows:
        layout = "expert_major" if row.layout == "expert_slots" else row.layout
        halves = [(row.wire, row.operation)]
        if row.operation.startswith("round trip"):
            halves = [("fp8", "dispatch"), ("bf16", "combine")]
        keys = [(row.tokens, layout, wire, operation) for wire, operation in halves]
        if all(key in nccl for key in keys) and "host" not in row.operation:
            row.nccl_s = sum(nccl[key] for key in keys)
        if "host" not in row.operation:
            row.floor_s = floors.get(row.peer_bytes)


def table(rows: list[Timed]) -> list[str]:
    """Times in us; x: NCCL's time over ours; share: of the floor in ours.

    >>> row = Timed("prefill 24", 4096, "24", "compact", "fp8", "dispatch", 2e-4, 1e-4, 8, 6e-4, 1e-4)
    >>> print(*table([row]), sep="\\n")
    tokens  SMs layout        wire  operation             us  fastest    NCCL      x   floor  share
      4096   24 compact       fp8   dispatch           200.0    100.0   600.0    3.0   100.0   50 %
    """

    def number(value: float | None, width: int, scale: float = 1e6) -> str:
        return " " * (width - 1) + "-" if value is None else f"{scale * value:{width}.1f}"

    lines = ["tokens  SMs layout        wire  operation             us  fastest    NCCL      x   floor  share"]
    for r in rows:
        times = None if r.nccl_s is None else r.nccl_s / r.seconds
        share = "     -" if r.floor_s is None else f"{100 * r.floor_s / r.seconds:4.0f} %"
        lines.append(
            f"{r.tokens:6} {r.sms:>4} {r.layout:<13} {r.wire:<5} {r.operation:<17}{number(r.seconds, 7)} "
            f"{number(r.fastest_s, 8)} {number(r.nccl_s, 7)} {number(times, 6, 1)} {number(r.floor_s, 7)} {share}"
        )
    return lines


class Report:
    """Everything that came out, written down after every section, so that a run that is ended leaves what it had."""

    def __init__(self, facts: dict[str, Any], out: Path | None) -> None:
        self.facts, self.out = facts, out
        self.sections: list[dict[str, Any]] = []
        self.rows: list[Timed] = []

    def add(self, name: str, **fields: Any) -> None:
        self.sections.append({"section": name, **fields})
        print(name, *(f"{key}={value}" for key, value in fields.items()), flush=True)
        self.write()

    def write(self) -> None:
        if self.out is not None:
            rows = [vars(row) for row in self.rows]
            self.out.write_text(json.dumps({"machine": self.facts, "sections": self.sections, "rows": rows}, indent=1))

    def end(self) -> None:
        self.write()
        print(json.dumps(self.facts))
        for section in self.sections:
            if section.get("failed") or section.get("skipped"):
                print("NOT DONE", section["section"], section.get("failed") or section["skipped"])
        print(*table(self.rows), sep="\n", flush=True)


def run(processes: Any, setup: Any, sections: list[Section], clock: Clock, report: Report) -> None:
    """Run the sections, one after the other. What fails or comes late is reported, and the rest goes on."""
    import multi_gpu_ranks

    def _without_the_last(fn: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
        """Of a section in which the last rank is killed."""
        *left, killed = processes.outcomes(fn, *args, timeout_s=timeout_s)
        for outcome in left:
            if not outcome.ok:
                raise outcome.error or RuntimeError(f"the process of rank {outcome.rank} ended ({outcome.exit_code})")
        assert killed.exit_code == -signal.SIGKILL, killed
        return [outcome.value for outcome in left]

    passed: list[str] = []
    nccl: dict[Any, float] = {}
    floors: dict[int, float] = {}
    for section in sections:
        budget = clock.budget(section.wanted_s)
        if budget is None:
            report.add(section.name, skipped=f"too late, after {clock.spent():.0f} s")
            continue
        if "TRANSPORT" in section.args and not passed:
            report.add(section.name, skipped="no transport has passed its checks")
            continue
        sizes = sorted({row.peer_bytes for row in report.rows if row.peer_bytes})
        if "SIZES" in section.args and not sizes:
            report.add(section.name, skipped="no bytes went to peers")
            continue
        stand_in = {"TRANSPORT": passed[0] if passed else "", "SIZES": sizes}
        args = [stand_in[a] if isinstance(a, str) and a in stand_in else a for a in section.args]
        began = clock.spent()
        try:
            call = _without_the_last if section.fn == "masks" else processes.run
            of_rank = call(getattr(multi_gpu_ranks, section.fn), setup, *args, timeout_s=budget)
        except Exception as error:  # noqa: BLE001  # reported, and the other sections still run
            why = repr(error)[:400] + "".join(f" ({note})" for note in getattr(error, "__notes__", ()))[-1500:]
            report.add(section.name, failed=why, seconds=round(clock.spent() - began, 1))
            if section.fn == "conformance":
                _next_transport(section, sections, passed)
            continue
        took = {"seconds": round(clock.spent() - began, 1)}
        if section.fn in ("prefill", "decode"):
            new = timed(section, of_rank)
            report.rows += new
            report.add(
                section.name,
                transport=args[0],
                us={f"{r.layout} {r.wire} {r.operation}": 1e6 * r.seconds for r in new},
                **took,
            )
        elif section.fn in ("nccl", "floor"):
            slowest = _slowest(of_rank)
            (nccl if section.fn == "nccl" else floors).update(slowest)
            beside(report.rows, nccl, floors)
            report.add(section.name, us={str(key): 1e6 * value for key, value in slowest.items()}, **took)
        else:
            if section.fn == "conformance":
                passed.append(args[0])
            if section.fn == "pairs":
                report.facts |= of_rank[0].pop("machine")
            found = of_rank if section.fn == "soak" else of_rank[0]
            report.add(section.name, found=found, **took)


def _next_transport(failed: Section, sections: list[Section], passed: list[str]) -> None:
    """The transport that the others are to use did not pass: the next one is checked at once, not at the end."""
    waiting = [s for s in sections if s.fn == "conformance" and sections.index(s) > sections.index(failed)]
    if not passed and waiting:
        sections.remove(waiting[0])
        sections.insert(sections.index(failed) + 1, waiting[0])


def _slowest(of_rank: list[dict[Any, list[float]]]) -> dict[Any, float]:
    from expertwire.testing.timing import summarise

    return {key: summarise([answers[key] for answers in of_rank]).median_s for key in of_rank[0]}


def facts(num_ranks: int, virtual: bool, commit: str) -> dict[str, Any]:
    """What is known without asking CUDA; the first section adds the rest."""
    return {
        "ranks": num_ranks, "virtual": virtual, "python": platform.python_version(), "host_cores": os.cpu_count(),
        "commit": commit, "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "timing": "slowest rank's median; graphs of 4 (prefill) and 10 (decode) calls, eager where it says so",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--virtual", type=int, default=0, help="a dry run with so many processes on GPU 0")
    parser.add_argument("--tokens", type=int, default=4096, help="of prefill, per rank")
    parser.add_argument("--trips", type=int, default=2000, help="of the soak")
    parser.add_argument("--limit", type=float, default=520.0, help="seconds; leave some for starting and ending")
    parser.add_argument("--only", nargs="+", default=[], help="sections, by the beginnings of their names")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="the commit that is measured, where git is missing")
    args = parser.parse_args()
    clock = Clock(args.limit)
    os.environ.update(OFF)

    import torch
    from gpu_processes import Mps
    from multi_gpu_ranks import Setup

    from expertwire.cli.bench_report import commit
    from expertwire.testing import Processes

    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU")
    num_ranks = args.virtual or torch.cuda.device_count()
    transports = ("cuda_ipc",) if args.virtual else ("symm_mem", "cuda_ipc")
    report = Report(facts(num_ranks, bool(args.virtual), args.commit or commit() or "unknown"), args.out)
    # Loading a kernel waits for the GPU, where another rank's kernel may be waiting for the one that loads.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    setup = Setup(virtual=bool(args.virtual))
    with Mps() if args.virtual > 1 else contextlib.nullcontext(), Processes(num_ranks) as processes:
        run(processes, setup, plan(transports, args.tokens, args.trips, args.only), clock, report)
    report.end()


if __name__ == "__main__":
    main()
