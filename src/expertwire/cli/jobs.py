"""Many checks at once: on all cores, with a count of states that moves, and a result for what an interrupt left."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from expertwire.cli import models
from expertwire.ordering import profiles
from expertwire.ordering.report import Cell, cell

_POLL_S = 0.1
_counter: Any = None


@dataclass(frozen=True, slots=True)
class Job:
    """One cell to check."""

    model: str
    signal: str
    profile: str
    num_ranks: int = 2
    mode: str = "exhaustive"
    max_states: int = 2_000_000
    seed: int = 0


def run_job(job: Job) -> Cell:
    """Check one cell in this process."""
    profile = profiles.get(job.profile)
    last = 0

    def progress(states: int) -> None:
        nonlocal last
        if _counter is not None:
            with _counter.get_lock():
                _counter.value += states - last
            last = states

    result = models.check(
        models.get(job.model), job.signal, profile,
        num_ranks=job.num_ranks, mode=job.mode, max_states=job.max_states, seed=job.seed, progress=progress,
    )  # fmt: skip
    progress(result.states)
    return cell(job.model, job.signal, profile, result)


def _start(counter: Any) -> None:
    global _counter
    _counter = counter
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means


def run_jobs(
    jobs: Sequence[Job], on_progress: Callable[[int, int], None], num_workers: int | None = None
) -> list[Cell]:
    """Check all cells; `on_progress(done, states)` is called several times a second.

    On an interrupt the cells that are done are returned; compare the length.
    """
    workers = min(num_workers or os.cpu_count() or 1, len(jobs))
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    done: dict[Job, Cell] = {}
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(counter,))
    children: list[Any] = []
    try:
        futures: dict[Future[Cell], Job] = {pool.submit(run_job, job): job for job in jobs}
        children = list((pool._processes or {}).values())
        waiting = set(futures)
        while waiting:
            finished, waiting = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            done |= {futures[f]: f.result() for f in finished}
            on_progress(len(done), counter.value)
    except KeyboardInterrupt:
        for child in children:
            child.terminate()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return [done[job] for job in jobs if job in done]


@contextlib.contextmanager
def progress_bar(total: int, what: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar with cells, states and states per second."""
    if quiet:
        yield lambda done, states: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    started = time.perf_counter()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, rate="")

        def update(done: int, states: int) -> None:
            seconds = time.perf_counter() - started
            bar.update(task, completed=done, rate=f"{states:,} states, {states / seconds:,.0f} per second")

        yield update
