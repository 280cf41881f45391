"""Round trips of small shapes under compute-sanitizer: memcheck and racecheck, one rank and two processes.

    python benchmarks/gpu_sanitize.py --out sanitize.json

All layouts and wires, counts on the host and on the device; every element of every sum is compared. Without MPS, under
which the sanitizer does not work, processes take turns on the GPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import expertwire as ew
from expertwire.cli.bench_report import commit
from expertwire.testing import Processes, uniform_routing
from expertwire.topology import Placement

TOKENS, HIDDEN, EXPERTS, TOPK = 9, 264, 8, 3
WIRES = (ew.BF16(), ew.FP8Block(decode=True), ew.FP8Block(scale="ue8m0", decode=True))


def round_trips(group, stacks_after_s):
    """How many elements of sums are wrong. Powers of two and zeros are exact in every wire format."""
    faulthandler.dump_traceback_later(stacks_after_s)
    rank, num_ranks, wrong = dist.get_rank(group), dist.get_world_size(group), 0
    placement = Placement.contiguous(EXPERTS, num_ranks)
    options = {"num_experts": EXPERTS, "hidden": HIDDEN, "num_topk": TOPK, "num_max_tokens_per_rank": TOKENS}
    with ew.Buffer(group, device="cuda", timeout_s=100.0, **options) as buf:
        for number, layout in enumerate(ew.Layout):
            for wire in WIRES:
                for counts in ("host", "device"):
                    num_tokens = TOKENS if counts == "host" else TOKENS - 4
                    powers = 2.0 ** torch.randint(4, (num_tokens, HIDDEN)) * torch.randint(-1, 2, (num_tokens, HIDDEN))
                    ids = uniform_routing(10 * number + rank, num_tokens, TOPK, EXPERTS)
                    x, routing, zero_copy = powers.bfloat16().cuda(), ids.cuda(), counts == "device"
                    sent = buf.dispatch(x, routing, layout=layout, wire=wire, counts=counts, zero_copy=zero_copy)
                    out = buf.combine(sent.x.contiguous(), sent.handle).x
                    owners = [len({placement.expert_ranks[e] for e in row}) for row in ids.tolist()]
                    times = torch.tensor(owners if layout is ew.Layout.COMPACT else [TOPK] * num_tokens)
                    wrong += int((out.cpu() != (x.cpu().float() * times[:, None]).bfloat16()).sum())
        buf.synchronize()
    faulthandler.cancel_dump_traceback_later()
    return wrong


def sanitized(tool, num_ranks, limit_s):
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [found, "--tool", tool, "--target-processes", "all", sys.executable, __file__]
    command += ["--ranks", str(num_ranks), "--limit", str(limit_s)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks, which would go on using the GPU
        output.seek(0)
        lines = output.read().splitlines()
    summary = next((line for line in lines if "SUMMARY" in line), f"no summary within {limit_s} s: {lines[-60:]}")
    wrong = next((line for line in lines if line.startswith("wrong")), "did not end")
    clean = (
        process.wait() == 0 and re.search(r"SUMMARY: 0 ", summary) is not None and wrong == f"wrong {[0] * num_ranks}"
    )
    return {"tool": tool, "ranks": num_ranks, "clean": clean, "summary": summary.strip("= "), "sums": wrong}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="make the round trips here, with so many processes")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--limit", type=float, default=150, help="seconds for each run of the sanitizer")
    args = parser.parse_args()
    if args.ranks:
        with Processes(args.ranks) as processes:
            print("wrong", processes.run(round_trips, 0.7 * args.limit, timeout_s=args.limit), flush=True)
        return
    results = []
    for tool in ("memcheck", "racecheck"):
        for num_ranks in (1, 2):
            results.append(sanitized(tool, num_ranks, args.limit))
            print(results[-1], flush=True)
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": args.commit or commit()}
    if args.out:
        args.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
    sys.exit(not all(result["clean"] for result in results))


if __name__ == "__main__":
    main()
