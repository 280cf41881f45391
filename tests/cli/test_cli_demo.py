"""The demo: identical losses, a saved routing, plain output without a terminal, and Ctrl-C."""

import os
import select
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from expertwire.cli.demo import first_difference
from expertwire.cli.demo_train import Trained
from expertwire.cli.main import run

TINY = ["demo", "--ranks", "2", "--steps", "3", "--experts", "5"]


@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_processes_and_one_process_are_identical(wire, capsys, tmp_path):
    saved = tmp_path / "routing.npz"
    assert run([*TINY, "--wire", wire, "--save-routing", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "identical: bit for bit" in out.splitlines()[-1]
    assert "step    3 of 3  loss" in out
    assert "\x1b" not in out
    with np.load(saved) as file:
        assert file["topk_idx"].shape == (3 * 2, 2, 256, 2)  # steps * layers, ranks, tokens, top-k
        assert int(file["num_experts"]) == 5


def test_first_difference_says_step_rank_and_values():
    def trained(losses, shared="a", expert="b"):
        return Trained(losses, shared, expert, torch.zeros(0))

    same = [trained([3.0, 2.0]), trained([4.0, 1.0])]
    assert first_difference(same, same) is None
    other = [trained([3.0, 2.5]), trained([4.5, 1.0])]
    assert first_difference(same, other) == "first difference in step 0 on rank 1: loss 4.0, and 4.5 in one process"
    other = [trained([3.0, 2.0]), trained([4.0, 1.0], expert="c")]
    assert first_difference(same, other) == "all losses agree, but the final expert weights of rank 1 differ"


def _children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


@pytest.mark.parametrize("moment", ["starting 2 processes", "step    1 of"])
def test_interrupt_ends_all_processes(moment):
    """As a terminal does: SIGINT to the whole process group, while processes start and while they train."""
    command = [sys.executable, "-u", "-m", "expertwire.cli.main", "demo", "--ranks", "2", "--steps", "10"]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    watched = []
    try:
        for line in demo.stdout:
            if moment in line:
                break
        else:
            pytest.fail(f"never saw {moment!r}: {demo.stderr.read()}")
        while len(_children(demo.pid)) < 3:  # two ranks, and the resource tracker of multiprocessing
            os.sched_yield()
        watched = [os.pidfd_open(child) for child in _children(demo.pid)]
        os.killpg(demo.pid, signal.SIGINT)
        _, errors = demo.communicate(timeout=30)
        assert demo.returncode == 130
        assert errors == "interrupted\n"
        for process in watched:
            assert select.select([process], [], [], 10)[0], "a process outlives the demo"
    finally:
        for process in watched:
            os.close(process)
        if demo.poll() is None:
            demo.kill()
            demo.communicate()
