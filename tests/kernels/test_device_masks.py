"""Ranks that are killed, and those that go on without them: kernels in the interpreter and one process per rank."""

import importlib.util
import signal

import masks
import pytest
from interpreted_buffer import interpreted_buffer

from expertwire.testing import Processes

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
PATIENCE_S = 4.0


def rank_work(group, check, arguments):
    buf = interpreted_buffer(group, mask_peers=True)
    getattr(masks, check)(buf, *arguments, PATIENCE_S)
    return buf.masked_ranks


CASES = [
    (3, "check_all", ((1,), "dispatch")),
    (3, "check_all", ((0,), "dispatch of device counts")),
    (3, "check_all", ((2,), "combine")),
    (4, "check_all", ((1, 3), "first call of a kind")),
    (3, "check_gradients", ((1,),)),
]


@pytest.mark.parametrize(("num_ranks", "check", "arguments"), CASES, ids=str)
def test_the_others_go_on(num_ranks, check, arguments):
    with Processes(num_ranks) as crew:
        outcomes = crew.outcomes(rank_work, check, arguments, timeout_s=240)
    for rank, outcome in enumerate(outcomes):
        if rank in arguments[0]:
            assert outcome.exit_code == -signal.SIGKILL
        else:
            assert outcome.ok, outcome.error
            assert outcome.value == arguments[0]
