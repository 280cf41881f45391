"""Ranks that are killed, and those that go on without them: kernels in the interpreter and one process per rank."""

import importlib.util

import masks
import pytest
from interpreted_buffer import interpreted_buffer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
PATIENCE_S = 4.0


def rank_work(group, check, arguments):
    buf = interpreted_buffer(group, mask_peers=True)
    getattr(masks, check)(buf, *arguments, PATIENCE_S)
    return buf.masked_ranks


@pytest.mark.parametrize(("num_ranks", "check", "arguments"), masks.CASES, ids=str)
def test_the_others_go_on(num_ranks, check, arguments):
    masks.run_case(rank_work, num_ranks, check, arguments)
