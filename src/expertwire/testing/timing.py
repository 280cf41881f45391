"""Timing of lines that compete: interleaved, so that noise hits all of them alike, and with its spread.

On a shared machine a number alone says little. So lines are measured turn by turn in one loop, on all ranks at once,
and what is stated is the median of the slowest rank, beside the fastest rank and the 10th and 90th percentile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_WARM_UP_CALLS = 3
_SAMPLE_S = 20e-3
_MAX_CALLS = 200
_MIN_ROUNDS, _MAX_ROUNDS = 5, 2000


@dataclass(frozen=True)
class Summary:
    """Seconds per call. `median_s`, `p10_s` and `p90_s` are those of the rank with the largest median."""

    median_s: float
    fastest_rank_s: float
    p10_s: float
    p90_s: float
    rounds: int


def interleaved(
    lines: Mapping[str, Callable[[], object]],
    all_gather: Callable[[Any], list[Any]],
    barrier: Callable[[], None],
    seconds: float = 1.0,
) -> dict[str, list[float]]:
    """Samples in seconds per call of every line on this rank. Collective: same lines, in the same order, on all ranks.

    `seconds` is about how long one line is measured. A sample is one call, or as many calls back to back as take 20 ms:
    ranks leave a barrier one after the other, which must not count.
    """
    calls: dict[str, int] = {}
    per_round_s = 0.0
    for name, line in lines.items():
        for _ in range(_WARM_UP_CALLS):
            line()
        barrier()
        slowest_s: float = max(all_gather(_timed(line, 1)))
        calls[name] = max(1, min(_MAX_CALLS, round(_SAMPLE_S / slowest_s)))
        per_round_s += calls[name] * slowest_s
    rounds = round(seconds * len(lines) / per_round_s)
    rounds = max(all_gather(max(_MIN_ROUNDS, min(_MAX_ROUNDS, rounds))))
    samples: dict[str, list[float]] = {name: [] for name in lines}
    for _ in range(rounds):
        for name, line in lines.items():
            barrier()
            samples[name].append(_timed(line, calls[name]))
    return samples


def summarise(samples_of_rank: Sequence[Sequence[float]]) -> Summary:
    """One line's samples on every rank.

    >>> summarise([[1.0, 2.0, 3.0], [2.0, 2.0, 5.0]]).median_s
    2.0
    """
    ranks = sorted((sorted(samples) for samples in samples_of_rank), key=lambda samples: _quantile(samples, 0.5))
    slowest = ranks[-1]
    return Summary(
        median_s=_quantile(slowest, 0.5),
        fastest_rank_s=_quantile(ranks[0], 0.5),
        p10_s=_quantile(slowest, 0.1),
        p90_s=_quantile(slowest, 0.9),
        rounds=len(slowest),
    )


def _timed(line: Callable[[], object], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        line()
    return (time.perf_counter() - began) / calls


def _quantile(ascending: Sequence[float], share: float) -> float:
    at = share * (len(ascending) - 1)
    low = int(at)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (at - low) * (ascending[high] - ascending[low])
