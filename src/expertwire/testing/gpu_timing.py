"""Timing on a GPU: kernels by the profiler, replays of a graph and eager calls by CUDA events, the host by its clock.

A `Line` measures once and returns seconds per call. Ranks that wait for each other are timed all at once, and the
slowest rank's median counts (`timing.summarise`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Line = Callable[[], float]

_MIN_ROUNDS, _MAX_ROUNDS = 5, 200


def kernel_times(fn: Callable[[], object], repeats: int = 30, warmups: int = 5) -> dict[str, float]:
    """Microseconds of each kernel that a call of fn launches, by name: medians from the profiler."""
    for _ in range(warmups):
        fn()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            fn()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profile.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:  # type: ignore[attr-defined]
            found.setdefault(event.name, []).append(event.device_time)
    return {name: statistics.median(times) * len(times) / repeats for name, times in found.items()}


def replay(fn: Callable[[], object], calls: int) -> Line:
    """Capture `calls` calls of fn, which must have run before; a replay gives seconds per call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            fn()
    return _between_events(graph.replay, calls)


def eager(fn: Callable[[], object], calls: int) -> Line:
    """`calls` calls one after another, from the first launch to the end of the last kernel."""

    def call() -> None:
        for _ in range(calls):
            fn()

    return _between_events(call, calls)


def host(fn: Callable[[], object], calls: int) -> Line:
    """What `calls` calls keep the host busy for, with nobody waiting for the GPU; few enough for its launch queue."""

    def line() -> float:
        torch.cuda.current_stream().synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            fn()
        took = time.perf_counter() - began
        torch.cuda.current_stream().synchronize()
        return took / calls

    return line


def _between_events(run: Callable[[], None], calls: int) -> Line:
    """`run` twice, and time the second: the first brings ranks into step that came from a barrier one by one."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def line() -> float:
        run()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000 / calls

    return line


def median(line: Line, rounds: int = 20) -> float:
    """Median seconds per call, after one round that does not count."""
    line()
    return statistics.median(line() for _ in range(rounds))


def copy_bandwidth(num_bytes: int = 1 << 30) -> float:
    """Bytes per second, read and written, of a large device copy."""
    source = torch.randint(0, 100, (num_bytes // 4,), dtype=torch.int32, device="cuda")
    out = torch.empty_like(source)
    return 2 * 4 * source.numel() / median(eager(lambda: out.copy_(source), 4))


def in_turns(rank: int, num_ranks: int, barrier: Callable[[], None], make: Callable[[], T]) -> T:
    """`make()` on one rank after the other, with no rank's kernels running: a process captures one graph at a time."""
    torch.cuda.current_stream().synchronize()
    barrier()
    made: list[T] = []
    for turn in range(num_ranks):
        if turn == rank:
            made.append(make())
        barrier()
    return made[0]


def take_turns(
    lines: Mapping[str, Line], all_gather: Callable[[Any], list[Any]], barrier: Callable[[], None], seconds: float
) -> dict[str, list[float]]:
    """Samples of every line on this rank, line after line in each round, each after a barrier.

    Collective: same lines, in the same order, on all ranks. `seconds` is about how long all lines together take.
    """
    spent = 0.0
    for line in lines.values():
        barrier()
        began = time.perf_counter()
        line()
        spent += time.perf_counter() - began
    slowest: float = max(all_gather(spent))
    rounds = max(_MIN_ROUNDS, min(_MAX_ROUNDS, round(seconds / max(slowest, 1e-6))))
    samples: dict[str, list[float]] = {name: [] for name in lines}
    for _ in range(rounds):
        for name, line in lines.items():
            barrier()
            samples[name].append(line())
    return samples
