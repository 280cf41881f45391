"""`Buffer.warmup`, and the `event` of a record."""

import pytest
import torch

import expertwire as ew
from expertwire.testing import random_rows, uniform_routing

SIZES = {"num_experts": 4, "hidden": 16, "num_topk": 2, "num_max_tokens_per_rank": 4}


DEFERRED = {"layout": ew.Layout.EXPERT_SLOTS, "wire": ew.FP8Block(), "defer_receive": True}


@pytest.mark.parametrize("calls", [(), (DEFERRED,)])
def test_warmup_prepares_and_counts(calls):
    def rank_work(rank):
        seen = []
        with ew.Buffer(rank, **SIZES) as buf:
            buf.warmup(*calls, progress=lambda done, kinds: seen.append((done, kinds)))
            assert buf.statistics().rows_sent == (0, 0)
            sent = buf.dispatch(random_rows(rank.rank, 3, 16), uniform_routing(rank.rank, 3, 2, 4))
            assert sum(buf.statistics().rows_received) == len(sent.x)
        return seen

    kinds = len(calls) or 6
    assert ew.World(2).run(rank_work) == [[(n + 1, kinds) for n in range(kinds)]] * 2


def test_warmup_checks_what_it_is_given():
    def rank_work(rank):
        with ew.Buffer(rank, **SIZES) as buf:
            with pytest.raises(ew.InvalidArgument, match="layout"):
                buf.warmup({"layout": "square"})
            buf.warmup({"layout": ew.Layout.COMPACT})

    ew.World(1).run(rank_work)


def test_work_on_the_cpu_has_no_event():
    def rank_work(rank):
        with ew.Buffer(rank, **SIZES) as buf:
            sent = buf.dispatch(random_rows(0, 3, 16), uniform_routing(0, 3, 2, 4), defer_receive=True)
            assert sent.event is None
            assert sent.hook().event is None
            assert buf.combine(torch.zeros_like(sent.x), sent.handle).event is None

    ew.World(1).run(rank_work)
