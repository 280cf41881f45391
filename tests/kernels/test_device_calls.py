"""The calls that a GPU's Buffer makes, with kernels in the interpreter and one process per rank."""

import importlib.util

import pytest
import torch
from device_checks import CAPACITY, COMPACT, EXPERTS, HIDDEN, MAJOR, SLOTS, TOPK, check_rank
from interpreted_buffer import interpreted_buffer

from expertwire.buffer import Buffer
from expertwire.formats import BF16, FP8Block

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def rank_work(group, layout, wire, options):
    buf = interpreted_buffer(group)
    state = buf._steps.engine.state
    check_rank(buf, layout, wire, steps=2, **options)
    if not options.get("deferred"):
        size = Buffer.size_hint(
            num_ranks=buf.num_ranks, hidden=HIDDEN, num_topk=TOPK, num_max_tokens_per_rank=CAPACITY, device="cuda",
            num_experts=EXPERTS, layout=layout, expert_alignment=options.get("alignment", 1), wire=wire,
        )  # fmt: skip
        inputs = state.inputs(layout, options.get("alignment", 1)).region.total_bytes
        assert state.total_bytes == size + 2 * inputs
    torch.distributed.barrier(group)


NUM_PROCESSES = 3


CASES = [
    (SLOTS, FP8Block(), {"zero_copy": True, "counts": "device"}, 3),
    (MAJOR, BF16(), {"alignment": 4, "deferred": True}, 3),
    (COMPACT, FP8Block(scale="ue8m0"), {}, 3),
    (MAJOR, BF16(), {"counts": "device"}, 1),
]


@pytest.mark.parametrize(("layout", "wire", "options", "num_ranks"), CASES)
def test_device_calls(processes, layout, wire, options, num_ranks):
    processes.run(rank_work, layout, wire, options, num_ranks=num_ranks, timeout_s=120)
