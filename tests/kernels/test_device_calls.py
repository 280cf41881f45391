"""The calls that a GPU's Buffer makes, with kernels in the interpreter and one process per rank."""

import importlib.util

import pytest
import torch
from device_checks import CAPACITY, COMPACT, EXPERTS, HIDDEN, MAJOR, SLOTS, TOPK, check_rank
from interpreted_buffer import interpreted_buffer

from expertwire.buffer import Buffer
from expertwire.formats import BF16, FP8Block
from expertwire.testing import assert_equal, random_rows, uniform_routing

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def rank_work(group, layout, wire, options):
    buf = interpreted_buffer(group)
    state = buf._steps.engine.state
    check_rank(buf, layout, wire, steps=2, **options)
    if not options.get("deferred"):
        size = Buffer.size_hint(
            num_ranks=buf.num_ranks, hidden=HIDDEN, num_topk=TOPK, num_max_tokens_per_rank=CAPACITY, device="cuda",
            num_experts=EXPERTS, layout=layout, expert_alignment=options.get("alignment", 1), wire=wire,
            combine_input=True,
        )  # fmt: skip
        state.inputs(layout, options.get("alignment", 1))
        assert state.total_bytes == size
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


def zero_copy_tensors(group, layout, counts):
    """Rows of one bank are the same memory every time, but nobody's tensor is another's."""
    buf, seen = interpreted_buffer(group), []
    x, ids = random_rows(1, 5, HIDDEN), uniform_routing(1, 5, TOPK, EXPERTS)
    for _ in range(3):
        sent = buf.dispatch(x, ids, layout=layout, counts=counts, zero_copy=True)
        assert not sent.x.requires_grad
        seen.append(sent.x.requires_grad_())
        sent.handle.release()
    assert seen[0].data_ptr() == seen[2].data_ptr()
    assert not hasattr(sent, "_engine")
    wires = FP8Block(), FP8Block(decode=True)
    coded, decoded = (buf.dispatch(x, ids, layout=layout, counts=counts, zero_copy=True, wire=w) for w in wires)
    rows = wires[0].decode_bfloat16(coded.x.flatten(0, -2), coded.sf.flatten(0, -2), HIDDEN)
    used = torch.zeros(len(rows), dtype=torch.bool)
    for first, count in zip(coded.expert_offsets.tolist(), coded.num_tokens_per_expert.tolist(), strict=False):
        used[first : first + count] = True
    assert used.sum() == 5 * TOPK
    assert_equal(decoded.x.flatten(0, -2)[used], rows[used])
    assert decoded.x.shape == coded.x.shape
    assert decoded.sf is None


@pytest.mark.parametrize(("layout", "counts"), [(SLOTS, "device"), (MAJOR, "device"), (MAJOR, "host")])
def test_zero_copy_tensors_are_the_callers_own(processes, layout, counts):
    processes.run(zero_copy_tensors, layout, counts, num_ranks=1, timeout_s=120)
