"""Processes that share a GPU, of which some are killed: what the others see, eager and from a graph."""

import masks
import on_gpu
import pytest
import torch
from device_checks import HIDDEN, SLOTS

import expertwire as ew
from expertwire.testing import assert_equal

pytestmark = on_gpu.MARKS
PATIENCE_S = 4.0


def rank_work(group, check, arguments, on_timeout):
    torch.cuda.set_device(0)
    buf = on_gpu.buffer(group, on_timeout=on_timeout, timeout_s=60.0)
    find = getattr(masks, check, None) or globals()[check]
    find(buf, *arguments, PATIENCE_S)
    masked = buf.masked_ranks
    buf.close()
    return masked


def check_graph(buf, doomed, patience_s):
    """A decode step that was captured before a rank ended is replayed without it."""
    x, ids, weights = (t.cuda() for t in masks.inputs(0, buf.rank))
    x, weights = (x * 0 + 2.0 ** (buf.rank % 3)).bfloat16(), weights * 0 + 1.0

    def step():
        sent = buf.dispatch(x, ids, weights, layout=SLOTS, counts="device", zero_copy=True)
        y = buf.combine_input(sent.handle)
        y.copy_(sent.x)
        return buf.combine(y, sent.handle).x

    def served(without):
        owners = torch.tensor(buf.settings.placement.expert_ranks)
        chosen = ids.cpu()
        kept = (chosen >= 0) & ~torch.isin(owners[chosen.clamp(min=0)], torch.tensor(without, dtype=torch.int64))
        return (kept.sum(1, keepdim=True) * x[:1, :1].cpu().float()).expand(-1, HIDDEN).bfloat16()

    for _ in range(2):
        step()
    buf.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(5):
        graph.replay()
    buf.synchronize()
    assert_equal(out.cpu(), served(()))
    masks.lose(buf, doomed, "dispatch of device counts", patience_s)
    for _ in range(5):
        graph.replay()
    buf.synchronize()
    assert_equal(out.cpu(), served(doomed))


@pytest.mark.parametrize("case", [*masks.CASES, (3, "check_graph", ((1,),))], ids=str)
def test_the_others_go_on(case):
    masks.run_case(rank_work, *case)


def test_a_virtual_rank_that_does_not_come_is_not_masked():
    def rank_work(rank):
        with on_gpu.buffer(rank, on_timeout="mask", timeout_s=0.5) as buf:
            masks.check_step(buf, 1, SLOTS)
            rank.barrier()
            if rank.rank == 0:
                buf.dispatch(*(t.cuda() for t in masks.inputs(0, 2)), layout=SLOTS, counts="device")
                with pytest.raises(ew.PeerTimeout, match="Only ranks that have left are masked on a GPU"):
                    buf.synchronize()
                assert buf.masked_ranks == ()
            rank.barrier()

    ew.World(2, device="cuda").run(rank_work)


def test_virtual_ranks_cannot_be_ended():
    with pytest.raises(ew.TransportUnavailable, match="the ranks of a World share one; use 'mask'"):
        ew.World(2, device="cuda").run(lambda rank: on_gpu.buffer(rank, on_timeout="end"))


def test_a_virtual_rank_that_returns_is_masked():
    def rank_work(rank):
        buf = on_gpu.buffer(rank, on_timeout="mask", timeout_s=2.0)
        masks.check_step(buf, 1, SLOTS)
        masks.check_step(buf, 1, SLOTS, counts="device")
        rank.barrier()
        if rank.rank == 1:
            return
        with pytest.raises(ew.PeerMasked) as caught:
            masks.check_step(buf, 2, SLOTS)
        assert caught.value.peers == (1,)
        masks.check_step(buf, 3, SLOTS, counts="device")
        with pytest.raises(ew.TransportUnavailable, match="prepare every kind of call with warmup"):
            buf.dispatch(*(t.cuda() for t in masks.inputs(rank.rank, 4)))
        masks.check_step(buf, 5, SLOTS)
        buf.close()

    ew.World(3, device="cuda").run(rank_work)
