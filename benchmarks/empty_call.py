"""An empty `COMPACT` dispatch and its combine on the CPU, two processes, back to back.

    python benchmarks/empty_call.py --out cpu_empty.json

Nothing moves, so this is Python, at whatever speed the machine runs it. Beside the slowest rank's median of every round
stands the speed of the interpreter before and after it: microseconds of a loop of 10,000 additions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import expertwire as ew
from expertwire.cli.bench_report import commit, machine
from expertwire.testing import Processes

OPTIONS = {"num_experts": 256, "hidden": 7168, "num_topk": 8, "num_max_tokens_per_rank": 16}


def additions():
    began, total = time.perf_counter(), 0
    for number in range(10_000):
        total += number
    return 1e6 * (time.perf_counter() - began)


def rounds(group, how_many, trips):
    """For every round: microseconds of a round trip, its median and its tenth percentile, and of the loop."""
    x = torch.zeros(0, OPTIONS["hidden"], dtype=torch.bfloat16)
    ids, weights = torch.zeros(0, OPTIONS["num_topk"], dtype=torch.int64), torch.zeros(0, OPTIONS["num_topk"])
    found = []
    with ew.Buffer(group, **OPTIONS) as buf:

        def trip():
            began = time.perf_counter()
            sent = buf.dispatch(x, ids, weights, layout=ew.Layout.COMPACT)
            buf.combine(sent.x, sent.handle)
            return 1e6 * (time.perf_counter() - began)

        for _ in range(how_many + 1):
            before = statistics.median(additions() for _ in range(9))
            times = sorted(trip() for _ in range(trips))
            after = statistics.median(additions() for _ in range(9))
            found.append((times[trips // 2], times[trips // 10], (before + after) / 2))
    return found[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--trips", type=int, default=3000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with Processes(2) as processes:
        ranks = processes.run(rounds, args.rounds, args.trips, timeout_s=60 + args.rounds * args.trips * 0.01)
    results = []
    for of_ranks in zip(*ranks, strict=True):
        median, p10, loop = max(of_ranks)
        results.append({"median_us": round(median, 1), "p10_us": round(p10, 1), "additions_us": round(loop, 1)})
        print(results[-1], flush=True)
    print("median of the rounds:", statistics.median(r["median_us"] for r in results), "us")
    if args.out:
        command = f"benchmarks/empty_call.py --rounds {args.rounds} --trips {args.trips}"
        facts = machine() | {"torch": torch.__version__, "commit": commit(), "command": command}
        text = json.dumps({"machine": facts, "results": results}, indent=1)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
