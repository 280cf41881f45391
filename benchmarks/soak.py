"""Ten thousand steps of the real engine on every profile that a signal mechanism claims, half of them with faults.

python benchmarks/soak.py --out benchmarks/results/soak.json
"""

import argparse
import json
import platform
import time
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for profile, signal in CLAIMED:
        for faults in (False, True):
            soak = Soak(
                profile, signal, options.ranks, options.tokens, options.steps // 2, schedule="adversary", faults=faults
            )
            began, steps, choices, masked, finding = time.perf_counter(), 0, 0, 0, None
            for part in run(soak):
                if isinstance(part, Finding):
                    finding = asdict(part)
                else:
                    steps, choices, masked = steps + part.steps, choices + part.choices, masked + part.masked
            seconds = time.perf_counter() - began
            rows.append(
                {
                    "soak": asdict(soak),
                    "steps": steps,
                    "choices": choices,
                    "masks": masked,
                    "seconds": seconds,
                    "finding": finding,
                }
            )
            print(
                f"{profile:18} {signal:11} faults={faults!s:5} {steps:6} steps  {choices:10,} choices  {seconds:6.0f} s",
                flush=True,
            )
            if options.out:
                document = {
                    "command": "python benchmarks/soak.py",
                    "machine": platform.processor() or platform.machine(),
                    "versions": {
                        "expertwire": expertwire.__version__,
                        "python": platform.python_version(),
                        "torch": torch.__version__,
                    },
                    "rows": rows,
                }
                options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
