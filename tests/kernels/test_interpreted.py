"""Triton kernels through the interpreter, one process per rank, bit for bit against the oracle."""

import importlib.util

import pytest
from interpreted import Case, run

from expertwire.layouts.receive import Layout

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

SLOTS, MAJOR, COMPACT = Layout.EXPERT_SLOTS, Layout.EXPERT_MAJOR, Layout.COMPACT
CASES = [
    Case(SLOTS, "fp8", steps=4),  # banks are used again
    Case(SLOTS, "bf16", deferred=True, routing="repeats"),
    Case(SLOTS, "bf16", fused=True, num_ranks=1, routing="repeats"),
    Case(SLOTS, "ue8m0", fused=True, num_ranks=1, hidden=384, routing="special"),
    Case(COMPACT, "bf16", deferred=True, steps=4, strict=True),  # several rows a block
    Case(COMPACT, "fp8", routing="repeats", hidden=136, num_topk=4),
    Case(MAJOR, "ue8m0", alignment=4, routing="special", hidden=1152),  # several blocks a row
    Case(MAJOR, "fp8", strict=True),
    Case(MAJOR, "fp8_b32", num_ranks=1, num_topk=1, num_experts=1),
    Case(MAJOR, "bf16", hidden=16, together=2),  # in several blocks, as many tokens are
    Case(COMPACT, "bf16", hidden=16, together=2, routing="repeats"),
    Case(SLOTS, "bf16", hidden=16, together=1, strict=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_the_oracle(processes, case):
    wrong = processes.run(run, case, num_ranks=case.num_ranks, timeout_s=120)
    assert not [line for lines in wrong for line in lines]
