"""Calls that one rank refuses, on a device: kernels in the interpreter and one process per rank."""

import importlib.util

import pytest
import refusals
import torch
from device_checks import CAPACITY, EXPERTS, HIDDEN, TOPK
from interpreted_buffer import interpreted_buffer

from expertwire.buffer import Buffer
from expertwire.errors import InvalidArgument
from expertwire.testing import assert_equal

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


def handle_and_routing(group):
    """The same errors on the CPU and, as it were, on a GPU."""
    cpu = Buffer(group, num_experts=EXPERTS, hidden=HIDDEN, num_topk=TOPK, num_max_tokens_per_rank=CAPACITY)
    for buf in (cpu, interpreted_buffer(group)):
        x, ids = refusals.inputs(buf, 1)
        handle = buf.dispatch(x, ids).handle
        for given in ((ids, None), (None, torch.ones(ids.shape))):
            with pytest.raises(InvalidArgument, match="pass either handle or topk_idx and topk_weights, not both"):
                buf.dispatch(x, *given, handle=handle)
        with pytest.raises(InvalidArgument, match="zero_copy is not offered together with handle"):
            buf.dispatch(x, handle=handle, zero_copy=True)
        with pytest.raises(InvalidArgument, match="x has 3 tokens, its handle 8"):
            buf.dispatch(x[:3], handle=handle)
        assert_equal(buf.combine(buf.dispatch(x, handle=handle).x, handle).x, x)


def test_a_handle_together_with_routing(processes):
    processes.run(handle_and_routing, num_ranks=1, timeout_s=120)
