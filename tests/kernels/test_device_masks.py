"""Ranks that are killed, and those that go on without them: kernels in the interpreter and one process per rank."""

import importlib.util
import time

import masks
import pytest
import torch
from device_checks import COMPACT, SLOTS
from interpreted_buffer import interpreted_buffer

import expertwire as ew
from expertwire.testing import Processes

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
PATIENCE_S = 4.0


def rank_work(group, check, arguments, on_timeout):
    buf = interpreted_buffer(group, on_timeout=on_timeout)
    getattr(masks, check)(buf, *arguments, PATIENCE_S)
    return buf.masked_ranks


@pytest.mark.parametrize("case", masks.CASES[:-1], ids=str)
def test_the_others_go_on(case):
    masks.run_case(rank_work, *case)


def one_closes(group):
    """Who has closed its buffer, and lives, is masked as if it had ended."""
    buf = interpreted_buffer(group, on_timeout="mask")
    masks.check_step(buf, 1, COMPACT)
    torch.distributed.barrier(group)
    if buf.rank == 1:
        buf.close()
    else:
        buf.timeout_s = PATIENCE_S
        began = time.monotonic()
        with pytest.raises(ew.PeerMasked) as caught:
            masks.check_step(buf, 2, COMPACT)
        assert caught.value.peers == buf.masked_ranks == (1,)
        assert time.monotonic() - began < 2 * PATIENCE_S
        buf.timeout_s = 60.0
        masks.check_step(buf, 3, SLOTS)
    torch.distributed.barrier(group)


def test_who_closes_is_masked():
    with Processes(3) as crew:
        crew.run(one_closes, timeout_s=120)
