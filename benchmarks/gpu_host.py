"""Host time of eager calls, one rank, us: of dispatch and combine against a graph of them; and where that of a dispatch
goes: its launches, its tensors, and what is left without launches.

python benchmarks/gpu_host.py --out host.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import expertwire as ew
from expertwire.cli.bench_report import commit
from expertwire.kernels.state import Rows
from expertwire.layouts.receive import Layout
from expertwire.testing import gpu_timing, random_rows, random_weights, uniform_routing

EXPERTS, TOPK, WIRE = 256, 8, ew.FP8Block()
CASES = ((Layout.COMPACT, 4096), (Layout.COMPACT, 128), (Layout.EXPERT_MAJOR, 128), (Layout.EXPERT_SLOTS, 128))


class NoLaunch:
    """In the place of a `Launcher`."""

    compiling = False

    def __call__(self, *call):
        pass


def host_us(fn):
    """Of few enough calls for the launch queue."""
    for _ in range(10):
        fn()
    return round(1e6 * gpu_timing.median(gpu_timing.host(fn, 40), 25), 1)


def opened(rank, tokens, hidden):
    return ew.Buffer(
        rank, num_experts=EXPERTS, hidden=hidden, num_topk=TOPK, num_max_tokens_per_rank=tokens, max_in_flight=1,
        validate=False, device="cuda",
    )  # fmt: skip


def inputs(tokens, hidden):
    ids, weights = uniform_routing(0, tokens, TOPK, EXPERTS), random_weights(0, tokens, TOPK)
    return random_rows(0, tokens, hidden).cuda(), ids.cuda(), weights.cuda()


def against_a_graph(rank, tokens=128, hidden=7168):
    with opened(rank, tokens, hidden) as buf:
        given, y = inputs(tokens, hidden), torch.randn(EXPERTS, tokens, hidden, device="cuda").bfloat16()

        def call():
            sent = buf.dispatch(*given, layout=Layout.EXPERT_SLOTS, wire=WIRE, counts="device", zero_copy=True)
            return buf.combine(y, sent.handle).x

        found = {"dispatch and combine": "expert_slots", "tokens": tokens, "host_us": host_us(call)}
        found["eager_us"] = round(1e6 * gpu_timing.median(gpu_timing.eager(call, 50)), 1)
        return found | {"graph_us": round(1e6 * gpu_timing.median(gpu_timing.replay(call, 10)), 2)}


def parts_of_dispatch(rank, layout, tokens, hidden=1024):
    with opened(rank, tokens, hidden) as buf:
        (x, ids, weights), engine = inputs(tokens, hidden), buf._engine.runtime.engine

        def dispatch(zero_copy=True):
            sent = buf.dispatch(x, ids, weights, layout=layout, wire=WIRE, counts="device", zero_copy=zero_copy)
            sent.handle.release()

        found = {"zero_copy_us": host_us(dispatch), "owned_us": host_us(lambda: dispatch(False))}
        step = engine.state.step(0, layout, ids, weights)
        places = engine.state.places(layout, Rows.of_wire(WIRE, hidden))
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


def measure(rank):
    return [against_a_graph(rank), *(parts_of_dispatch(rank, *case) for case in CASES)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="where git is missing: the commit that is measured")
    args = parser.parse_args()
    results = ew.World(1, device="cuda").run(measure)[0]
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
