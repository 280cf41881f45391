"""Ten thousand steps of the real engine on every profile that a signal mechanism claims, half of them with faults.

python benchmarks/soak.py --out benchmarks/results/soak.json
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

import expertwire
from expertwire.testing.soak import Finding, Soak, run

CLAIMED = [
    ("rc.spec", "atomic"), ("rc.spec", "imm"), ("rc.spec", "counted"), ("rc.hw", "write"), ("rc.ro", "atomic"),
    ("rc.ro_pcieatomic", "imm"), ("rc.ooo", "atomic"), ("rc.ooo", "imm"), ("srd", "counted"), ("srd", "flush"),
    ("shmem", "put_signal"), ("shmem", "fence"), ("gin.weak", "put_signal"), ("gin.strong", "strong"), ("ucx", "fence"),
]  # fmt: skip


def soak(request: Soak) -> dict:
    """One row of the result."""
    torch.set_num_threads(1)
    began, steps, choices, masked, finding = time.perf_counter(), 0, 0, 0, None
    for part in run(request):
        if isinstance(part, Finding):
            finding = asdict(part)
        else:
            steps, choices, masked = steps + part.steps, choices + part.choices, masked + part.masked
    seconds = round(time.perf_counter() - began, 1)
    return {
        "soak": asdict(request), "steps": steps, "choices": choices, "masks": masked, "seconds": seconds,
        "finding": finding,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000, help="per pair of profile and signal")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    requests = [
        Soak(profile, signal, options.ranks, options.tokens, options.steps // 2, faults=faults)
        for profile, signal in CLAIMED
        for faults in (False, True)
    ]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    document = {
        "command": "python " + " ".join(sys.argv),
        "commit": commit,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {
            "expertwire": expertwire.__version__, "python": platform.python_version(), "torch": torch.__version__,
        },
        "rows": [],
    }  # fmt: skip
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for row in pool.map(soak, requests):
            document["rows"].append(row)
            request, verdict = row["soak"], "WRONG" if row["finding"] else "right"
            print(
                f"{request['profile']:18} {request['signal']:11} faults={request['faults']!s:5} {row['steps']:6} steps "
                f"{row['choices']:10,} choices {row['masks']:5} masks {row['seconds']:6.0f} s  {verdict}",
                flush=True,
            )
            if options.out:
                options.out.write_text(json.dumps(document, indent=1) + "\n")
    return any(row["finding"] for row in document["rows"])


if __name__ == "__main__":
    sys.exit(main())
