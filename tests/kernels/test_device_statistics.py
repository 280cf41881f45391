"""Row totals on a device: kernels in the interpreter and one process per rank."""

import importlib.util

import pytest
import torch
from device_checks import EXPERTS, HIDDEN, TOPK
from interpreted_buffer import interpreted_buffer
from statistics_checks import check_statistics

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def rank_work(group):
    check_statistics(interpreted_buffer(group))
    torch.distributed.barrier(group)


def totals_example(group):
    """The worked example of `kernels.tally`, at rank 0."""
    buf = interpreted_buffer(group)
    ids = torch.full((3, TOPK), -1)
    ids[:, 0], ids[:, 1] = 0, EXPERTS - 1
    if buf.rank == 1:
        ids = ids[:2].clone()
        ids[:, 1] = -1
    buf.dispatch(torch.zeros(len(ids), HIDDEN, dtype=torch.bfloat16), ids).handle.release()
    return buf._engine.runtime.engine.state.tally.tolist()


def test_worked_example(processes):
    assert processes.run(totals_example)[0] == [3, 3, 3, 2, 0]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_statistics(processes, num_ranks):
    processes.run(rank_work, num_ranks=num_ranks, timeout_s=120)
