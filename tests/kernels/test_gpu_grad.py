"""Gradients and routed weights on a real GPU: virtual ranks, processes, and ranks that do not agree."""

from functools import partial

import on_gpu
import pytest
import torch
from device_checks import COMPACT, EXPERTS, HIDDEN, MAJOR, SLOTS, TOPK
from gradient_checks import check_gradients

import expertwire as ew
from expertwire.testing import random_rows, run_processes, uniform_routing

pytestmark = on_gpu.MARKS
buffer = partial(on_gpu.buffer, timeout_s=20.0)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("layout", [SLOTS, MAJOR, COMPACT], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"steps": 4},
        {"chained": False, "exact": False, "counts": "device"},
        {"deferred": True, "repeats": True, "wire": ew.FP8Block(decode=True), "exact": False},
        {"weighted": False, "alignment": 4},
    ],
    ids=lambda options: "-".join(options),
)
def test_gradients(num_ranks, layout, options):
    if layout is not MAJOR:
        options = {name: value for name, value in options.items() if name != "alignment"}

    def rank_work(rank):
        with buffer(rank, validate=False) as buf:
            check_gradients(buf, layout, **options)

    ew.World(num_ranks, device="cuda").run(rank_work)


def test_uneven_placement():
    def rank_work(rank):
        with buffer(rank, placement=ew.Placement((2, 0, 0, 2) * 4)) as buf:
            for layout in (SLOTS, MAJOR, COMPACT):
                check_gradients(buf, layout, chained=False)

    ew.World(3, device="cuda").run(rank_work)


def processes_work(group):
    torch.cuda.set_device(0)
    with buffer(group, timeout_s=60.0) as buf:
        for layout in (COMPACT, MAJOR, SLOTS):
            check_gradients(buf, layout, steps=2)
            check_gradients(buf, layout, steps=1, chained=False, weighted=False, counts="device")


def test_processes_share_a_gpu():
    run_processes(2, processes_work)


def batch(rank):
    x = random_rows(rank.rank, 8, HIDDEN).cuda()
    return x, uniform_routing(rank.rank, 8, TOPK, EXPERTS).cuda()


def step(buf, x, ids):
    sent = buf.dispatch(x, ids)
    return buf.combine(2 * sent.x, sent.handle).x


def test_a_rank_that_takes_no_part_in_the_backward_pass_is_named():
    def rank_work(rank):
        buf = buffer(rank, timeout_s=1.0)
        x, ids = batch(rank)
        for _ in range(2):
            step(buf, x.requires_grad_(), ids).sum().backward()
        torch.cuda.current_stream().synchronize()
        rank.barrier()
        out = step(buf, x if rank.rank == 0 else x.detach(), ids)
        assert out.requires_grad == (rank.rank == 0)
        if rank.rank == 0:
            out.sum().backward()
            torch.cuda.current_stream().synchronize()
            with pytest.raises(ew.PeerTimeout) as caught:
                buf.dispatch(x, ids)
            assert caught.value.peers == (1,)
        rank.barrier()

    ew.World(2, device="cuda").run(rank_work)


def test_ranks_that_do_not_agree_at_the_first_call():
    def rank_work(rank):
        with buffer(rank, timeout_s=1.0) as buf:
            x, ids = batch(rank)
            step(buf, x.requires_grad_() if rank.rank == 0 else x, ids)

    with pytest.raises(ew.GroupMismatch, match="gradients"):
        ew.World(2, device="cuda").run(rank_work)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_capture_with_gradients_is_refused():
    def rank_work(rank):
        with buffer(rank) as buf:
            x, ids = batch(rank)

            def captured():
                sent = buf.dispatch(x, ids, layout=SLOTS, counts="device")
                return buf.combine(sent.x, sent.handle).x

            captured()
            x.requires_grad_()
            captured()
            with (
                pytest.raises(ew.TransportUnavailable, match="cannot be captured"),
                torch.cuda.graph(torch.cuda.CUDAGraph()),
            ):
                captured()
            graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(graph):
                captured()
            graph.replay()

    ew.World(1, device="cuda").run(rank_work)
