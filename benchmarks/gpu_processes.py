"""Processes that share one GPU through CUDA IPC: COMPACT dispatch and combine with a budget of SMs per process.

python benchmarks/gpu_processes.py 2 4 --out results.json        under MPS, which this script starts and ends
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

import torch

from expertwire.testing import Processes, first_mismatch, random_rows, random_weights, uniform_routing

HIDDEN, TOPK, EXPERTS = 7168, 8, 256


def measure(group, tokens, num_sms, check):
    """One rank: times in us of FP8 dispatch, BF16 dispatch and BF16 combine, and what differs from the oracle."""
    import torch.distributed as dist

    from expertwire import reference
    from expertwire.formats import BF16, FP8Block
    from expertwire.kernels.engine import DeviceEngine, Rows
    from expertwire.layouts.receive import Layout
    from expertwire.testing.gpu_timing import replay
    from expertwire.topology import Placement
    from expertwire.transports.device import CudaIpc
    from expertwire.world import bootstrap

    torch.cuda.set_device(0)
    ranks = bootstrap(group)
    memory = CudaIpc(ranks, torch.device("cuda", 0))
    rank, num_ranks = memory.rank, memory.num_ranks
    placement = Placement.contiguous(EXPERTS, num_ranks)
    engine = DeviceEngine(
        memory,
        placement,
        capacity=tokens,
        hidden=HIDDEN,
        num_topk=TOPK,
        num_banks=1,
        num_sms=num_sms,
        timeout_us=10_000_000,
        strict_sms=True,
    )
    xs = (
        [random_rows(r, tokens, HIDDEN) for r in range(num_ranks)]
        if check
        else {rank: random_rows(rank, tokens, HIDDEN)}
    )
    ids = [uniform_routing(50 + r, tokens, TOPK, EXPERTS) for r in range(num_ranks)]
    weights = [random_weights(r, tokens, TOPK) for r in range(num_ranks)]
    x = xs[rank].cuda()
    step = engine.state.step(0, Layout.COMPACT, ids[rank].cuda(), weights[rank].cuda())
    found, wrong = {}, []

    def timed(name, fn):
        engine.launch.compiling = True
        fn()
        engine.launch.compiling = False
        dist.barrier(group)
        fn()
        torch.cuda.synchronize()
        dist.barrier(group)
        line = replay(fn, 4)
        dist.barrier(group)
        times = []
        for _ in range(16):
            dist.barrier(group)
            times.append(1e6 * line())
        times = times[1:]
        found[name] = (statistics.median(times), min(times))

    for wire in (FP8Block(), BF16()):
        places = engine.state.places(Layout.COMPACT, Rows.of_wire(wire, HIDDEN))

        def dispatch(places=places):
            plan = engine.planner.plan(step)
            engine.send(x, None, plan, step, places, receive=True)
            engine.give_back(0)

        timed(f"{wire.name} dispatch", dispatch)
        if check:
            routing = reference.route(ids, weights, placement=placement, layout=Layout.COMPACT)
            want = reference.dispatch(xs, routing, wire)
            rows = want[rank].x.shape[0]
            got = places.payload(0)[:rows].cpu()
            difference = first_mismatch(got, want[rank].x.view(torch.uint8))
            if difference is not None:
                wrong.append(f"rank {rank} {wire.name} rows: {difference}")
    inputs, returned = engine.state.inputs(Layout.COMPACT), engine.state.returned(Layout.COMPACT)
    y, out = inputs.payload(0).view(torch.bfloat16), torch.empty_like(x)
    y.copy_(places.payload(0).view(torch.bfloat16))
    ordinary, meta = y.clone(), places.meta(0)
    torch.cuda.synchronize()

    def in_place():
        engine.combine_ready(y, step, inputs.seen_at[0])
        engine.gather(y, step, out, weighted=False, returned=returned)

    def push_and_combine():
        engine.push(ordinary, meta, step, returned)
        engine.combine_ready(ordinary, step, engine.state.nowhere)
        engine.gather(ordinary, step, out, weighted=False, returned=returned)

    timed("bf16 combine, output in the window", in_place)
    timed("bf16 combine, ordinary tensor", push_and_combine)
    if check:
        summed = reference.combine([part.x for part in want], routing)[rank].x
        difference = first_mismatch(out.cpu(), summed)
        if difference is not None:
            wrong.append(f"rank {rank} sums: {difference}")
    if engine.state.status.any():
        wrong.append(f"rank {rank} gave up: {engine.state.status.tolist()}")
    return found, wrong


class Mps:
    """The multi-process service, with folders of its own."""

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory()
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = self.folder.name + "/pipe"
        os.environ["CUDA_MPS_LOG_DIRECTORY"] = self.folder.name + "/log"
        for name in ("pipe", "log"):
            os.makedirs(f"{self.folder.name}/{name}")
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        return self

    def __exit__(self, *error):
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False, timeout=30)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", nargs="+", type=int)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--num-sms", type=int, default=24)
    parser.add_argument("--check", action="store_true", help="compare with the oracle")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    with Mps():
        for num_ranks in args.ranks:
            with Processes(num_ranks) as processes:
                answers = processes.run(measure, args.tokens, args.num_sms, args.check, timeout_s=150)
            wrong = [line for _, lines in answers for line in lines]
            for name in answers[0][0]:
                slowest = max(times[name][0] for times, _ in answers)
                fastest = min(times[name][0] for times, _ in answers)
                results.append(
                    {
                        "processes": num_ranks,
                        "tokens": args.tokens,
                        "num_sms": args.num_sms,
                        "case": name,
                        "slowest_rank_us": slowest,
                        "fastest_rank_us": fastest,
                        "checked": args.check,
                    }
                )
                print(results[-1], flush=True)
            print("wrong:", wrong[:4], flush=True)
            if args.out:
                args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
