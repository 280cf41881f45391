"""Where the host time of an eager dispatch goes, one rank: us per call, of its launches, and of what is left without.

python benchmarks/gpu_host.py --out host.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import expertwire as ew
from expertwire.cli.bench_report import commit
from expertwire.kernels.state import Rows
from expertwire.layouts.receive import Layout
from expertwire.testing import random_rows, random_weights, uniform_routing

HIDDEN, EXPERTS, TOPK = 1024, 256, 8
CASES = ((Layout.COMPACT, 4096), (Layout.COMPACT, 128), (Layout.EXPERT_MAJOR, 128), (Layout.EXPERT_SLOTS, 128))


class NoLaunch:
    """In the place of a `Launcher`."""

    compiling = False

    def __call__(self, *call):
        pass


def host_us(fn, calls=40, rounds=25):
    """Median over rounds of few enough calls for the launch queue."""
    for _ in range(10):
        fn()
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            fn()
        found.append((time.perf_counter() - began) / calls)
    return round(1e6 * statistics.median(found), 1)


def case(rank, layout, tokens):
    options = {"num_experts": EXPERTS, "hidden": HIDDEN, "num_topk": TOPK, "num_max_tokens_per_rank": tokens}
    with ew.Buffer(rank, device="cuda", validate=False, max_in_flight=1, **options) as buf:
        x, wire = random_rows(0, tokens, HIDDEN).cuda(), ew.FP8Block()
        ids, weights = uniform_routing(0, tokens, TOPK, EXPERTS).cuda(), random_weights(0, tokens, TOPK).cuda()
        engine = buf._engine.runtime.engine

        def dispatch(zero_copy=True):
            sent = buf.dispatch(x, ids, weights, layout=layout, wire=wire, counts="device", zero_copy=zero_copy)
            sent.handle.release()

        found = {"zero_copy_us": host_us(dispatch), "owned_us": host_us(lambda: dispatch(False))}
        step, places = (
            engine.state.step(0, layout, ids, weights),
            engine.state.places(layout, Rows.of_wire(wire, HIDDEN)),
        )
        found["tensors_of_a_step_us"] = host_us(lambda: engine.state.step(0, layout, ids, weights))
        if layout is Layout.EXPERT_SLOTS:
            found["launch_us"] = host_us(lambda: engine.dispatch_fused(x, step, places))
        else:
            plan = engine.planner.plan(step)
            found["launch_of_plan_us"] = host_us(lambda: engine.planner.plan(step))
            found["launch_of_send_us"] = host_us(lambda: engine.send(x, None, plan, step, places, receive=True))
        launcher = engine.launch
        engine.launch = engine.planner.launch = NoLaunch()
        found["zero_copy_without_launches_us"] = host_us(dispatch)
        engine.launch = engine.planner.launch = launcher
        return {"layout": str(layout), "tokens": tokens} | found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="where git is missing: the commit that is measured")
    args = parser.parse_args()
    results = ew.World(1, device="cuda").run(lambda rank: [case(rank, *shape) for shape in CASES])[0]
    small = torch.zeros(64, dtype=torch.int32, device="cuda")
    results.append({
        "torch_empty_us": host_us(lambda: torch.empty(64, dtype=torch.int32, device="cuda")),
        "torch_add_us": host_us(lambda: small.add_(1)),
        "1000_turns_of_python_us": host_us(lambda: [None for _ in range(1000)]),
    })  # fmt: skip
    for result in results:
        print(result, flush=True)
    if args.out:
        machine = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "commit": args.commit or commit(),
        }
        args.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
