"""Ranks that are killed, and those that go on without them: kernels in the interpreter and one process per rank."""

import importlib.util

import masks
import pytest
from interpreted_buffer import interpreted_buffer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
PATIENCE_S = 4.0


def rank_work(group, check, arguments, on_timeout):
    buf = interpreted_buffer(group, on_timeout=on_timeout)
    getattr(masks, check)(buf, *arguments, PATIENCE_S)
    return buf.masked_ranks


@pytest.mark.parametrize("case", masks.CASES[:-1], ids=str)
def test_the_others_go_on(case):
    masks.run_case(rank_work, *case)
