"""torch symmetric memory on real GPUs: one rank, several GPUs where there are several, and what is refused."""

import os
from functools import partial

import on_gpu
import pytest
import torch
from device_checks import CAPACITY, COMPACT, EXPERTS, HIDDEN, MAJOR, SLOTS, TOPK, check_rank

import expertwire as ew
from expertwire.formats import BF16, FP8Block
from expertwire.testing import Processes, assert_equal

pytestmark = on_gpu.MARKS
buffer = partial(on_gpu.buffer, timeout_s=20.0, transport="symm_mem")


def conformance(group, transport):
    """All layouts and wires, then kinds of calls, then a second buffer after the first was closed."""
    torch.cuda.set_device(torch.distributed.get_rank(group))
    assert os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") in (None, "1")
    with buffer(group, transport=transport) as buf:
        assert buf.settings.transport == transport
        for layout in (SLOTS, MAJOR, COMPACT):
            for wire in (BF16(), FP8Block(), FP8Block(scale="ue8m0")):
                check_rank(buf, layout, wire, alignment=4 if layout is MAJOR else 1)
            check_rank(buf, layout, FP8Block(), counts="device", zero_copy=True, deferred=True)
    with buffer(group, transport=transport) as buf:
        check_rank(buf, SLOTS, FP8Block(), repeats=False)


def graph(group):
    """A captured step counts on when it is replayed."""
    torch.cuda.set_device(torch.distributed.get_rank(group))
    with buffer(group, max_in_flight=1) as buf:
        x = torch.zeros(CAPACITY, HIDDEN, dtype=torch.bfloat16, device="cuda")
        ids = (torch.arange(CAPACITY * TOPK, device="cuda") % EXPERTS).view(CAPACITY, TOPK)

        def step():
            sent = buf.dispatch(x, ids, layout=SLOTS, counts="device", zero_copy=True)
            return buf.combine(sent.x, sent.handle).x

        step()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = step()
        for number in range(10):
            x.fill_(number + buf.rank)
            captured.replay()
            assert_equal(out.cpu(), torch.full((CAPACITY, HIDDEN), TOPK * (number + buf.rank), dtype=torch.bfloat16))


def shared_gpu(group):
    torch.cuda.set_device(0)
    with pytest.raises(ew.TransportUnavailable, match=r"ranks 0 and 1 share cuda:0.*use 'cuda_ipc'"):
        buffer(group)


def test_one_rank():
    with Processes(1) as processes:
        processes.run(conformance, "symm_mem", timeout_s=240)
        processes.run(graph, timeout_s=120)


def test_two_ranks_on_one_gpu_are_refused():
    with Processes(2) as processes:
        processes.run(shared_gpu, timeout_s=120)


def test_threads_are_refused():
    def rank_work(rank):
        with pytest.raises(ew.TransportUnavailable, match="use 'inproc'"):
            buffer(rank)

    ew.World(1, device="cuda").run(rank_work)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("transport", ["symm_mem", "cuda_ipc"])
def test_several_gpus(transport):
    num_ranks = min(8, torch.cuda.device_count())
    with Processes(num_ranks) as processes:
        processes.run(conformance, transport, timeout_s=240)
        if transport == "symm_mem":
            processes.run(graph, timeout_s=120)
