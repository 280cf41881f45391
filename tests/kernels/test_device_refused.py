"""Calls that one rank refuses, on a device: kernels in the interpreter and one process per rank."""

import importlib.util

import pytest
import refusals
import torch
from device_checks import CAPACITY, EXPERTS, HIDDEN, TOPK
from interpreted_buffer import interpreted_buffer

from expertwire.buffer import Buffer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


NUM_PROCESSES = 3


def rank_work(group, check, options):
    buf = interpreted_buffer(group)
    getattr(refusals, f"check_{check}")(buf, **options)
    torch.distributed.barrier(group)


CASES = [
    ("first_call", {}, 3),
    ("host_counts", {}, 3),
    ("host_counts", {"layout": refusals.SLOTS, "defer_receive": True}, 2),
    ("device_counts", {}, 2),
    ("device_counts", {"layout": refusals.SLOTS}, 2),
    ("cached", {}, 2),
    ("cached_device_counts", {}, 2),
    ("new_combine_of_a_void_dispatch", {}, 2),
    ("combine", {}, 3),
    ("zero_copy", {}, 2),
]


@pytest.mark.parametrize(("check", "options", "num_ranks"), CASES)
def test_refused(processes, check, options, num_ranks):
    processes.run(rank_work, check, options, num_ranks=num_ranks, timeout_s=120)


def ids_of_both(group, num_topk):
    """The same errors on the CPU and, as it were, on a GPU."""
    sizes = {"hidden": HIDDEN, "num_topk": num_topk}
    refusals.check_ids(Buffer(group, num_experts=EXPERTS, num_max_tokens_per_rank=CAPACITY, **sizes))
    refusals.check_ids(interpreted_buffer(group, **sizes))
    torch.distributed.barrier(group)


@pytest.mark.parametrize(("num_topk", "num_ranks"), [(TOPK, 2), (32, 1)])  # one block looks at all ids, or several do
def test_ids(processes, num_topk, num_ranks):
    processes.run(ids_of_both, num_topk, num_ranks=num_ranks, timeout_s=120)
