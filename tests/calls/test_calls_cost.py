"""Small calls are Python: how much of it, in function calls, which no machine makes faster or slower."""

import cProfile
import pstats

import pytest
import torch
from small_buffer import make

import expertwire as ew
from expertwire.host.kernels import numba_missing

TRIPS, MOST_CALLS = 20, 230  # 214 on Python 3.11


def calls_per_round_trip(rank, wire):
    """Python and C functions that a dispatch and a combine of no tokens call; a single rank never polls."""
    with make(rank, num_max_tokens_per_rank=1) as buf:
        x, ids = torch.empty(0, buf.settings.hidden, dtype=torch.bfloat16), torch.empty(0, 2, dtype=torch.int64)
        weights, profile = torch.empty(0, 2), cProfile.Profile()
        for trip in range(3 + TRIPS):
            if trip == 3:
                profile.enable()
            sent = buf.dispatch(x, ids, weights, wire=wire)
            buf.combine(sent.x, sent.handle, wire=wire)
        profile.disable()
    return pstats.Stats(profile).total_calls / TRIPS


@pytest.mark.skipif(numba_missing() is not None, reason=numba_missing() or "")
@pytest.mark.parametrize("wire", [None, ew.BF16()])
def test_an_empty_round_trip_makes_few_calls(wire):
    (calls,) = ew.World(1).run(lambda rank: calls_per_round_trip(rank, wire))
    assert TRIPS < calls <= MOST_CALLS
