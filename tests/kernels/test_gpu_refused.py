"""Calls that one rank refuses, on a GPU, and ranks that are gone: virtual ranks of one World, and processes."""

import os
import signal
import time
from functools import partial

import on_gpu
import pytest
import refusals
import torch
from device_checks import CAPACITY, COMPACT, HIDDEN, SLOTS, TOPK, arrive
from statistics_checks import check_statistics

import expertwire as ew
from expertwire.testing import Processes, run_processes

pytestmark = on_gpu.MARKS
buffer = partial(on_gpu.buffer, timeout_s=8.0)
CHECKS = [
    ("first_call", {}),
    ("host_counts", {}),
    ("host_counts", {"layout": SLOTS}),
    ("host_counts", {"layout": SLOTS, "defer_receive": True}),
    ("device_counts", {}),
    ("device_counts", {"layout": SLOTS}),
    ("cached", {}),
    ("combine", {}),
    ("zero_copy", {}),
]


def warm(device):
    """Load torch's kernels of these checks: one that is loaded while another rank's kernel waits would hold both up."""
    ids = torch.zeros(8, TOPK, dtype=torch.int64, device=device)
    (torch.zeros(8, HIDDEN, dtype=torch.bfloat16, device=device)[:, : HIDDEN // 2].contiguous(), ids.cpu())


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("check", "options"), CHECKS, ids=str)
def test_refused(num_ranks, check, options):
    def rank_work(rank):
        warm("cuda")
        with buffer(rank) as buf:
            getattr(refusals, f"check_{check}")(buf, **options)

    ew.World(num_ranks, device="cuda").run(rank_work)


@pytest.mark.parametrize(("num_ranks", "num_topk"), [(1, TOPK), (1, 32), (2, TOPK), (3, 32)])
def test_ids(num_ranks, num_topk):
    def rank_work(rank):
        warm("cuda")
        with buffer(rank, num_topk=num_topk) as buf:
            refusals.check_ids(buf)

    ew.World(num_ranks, device="cuda").run(rank_work)


def test_one_rank_alone_goes_on():
    def rank_work(rank):
        with buffer(rank) as buf:
            for number in range(3):
                refusals.mistaken_dispatch(buf, 0, number, layout=SLOTS)
                refusals.one_batch(buf, number, layout=SLOTS)

    ew.World(1, device="cuda").run(rank_work)


def all_checks(group):
    torch.cuda.set_device(0)
    with buffer(group, timeout_s=60.0) as buf:
        refusals.check_all(buf)


def test_processes():
    run_processes(2, all_checks)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_statistics(num_ranks):
    def rank_work(rank):
        with buffer(rank) as buf:
            check_statistics(buf)

    ew.World(num_ranks, device="cuda").run(rank_work)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_no_refusal_inside_a_capture():
    def rank_work(rank):
        with buffer(rank) as buf:
            refusals.one_batch(buf, 0, layout=SLOTS)
            _, ids = refusals.inputs(buf, 1)
            wide = torch.zeros(CAPACITY + 1, HIDDEN, dtype=torch.bfloat16, device="cuda")
            with pytest.raises(ew.InvalidArgument), torch.cuda.graph(torch.cuda.CUDAGraph()):
                buf.dispatch(wide, ids, layout=SLOTS, counts="device")
            refusals.one_batch(buf, 2, layout=SLOTS)

    ew.World(1, device="cuda").run(rank_work)


def dies_between_dispatch_and_combine(group):
    """Rank 1 is killed; rank 0 gives up in bounded time, can use nothing any more, and closes."""
    torch.cuda.set_device(0)
    buf = buffer(group, timeout_s=5.0)
    refusals.one_batch(buf, 0, layout=COMPACT)
    x, ids = refusals.inputs(buf, 1)
    sent = buf.dispatch(x, ids)
    if buf.rank == 1:
        torch.cuda.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    buf.combine(sent.x, sent.handle)
    with pytest.raises(ew.PeerTimeout) as caught:
        buf.synchronize()
    took = time.monotonic() - began
    with pytest.raises(ew.BufferClosed):
        buf.dispatch(x, ids)
    buf.close()
    return took, caught.value.peers, isinstance(caught.value, ew.PeerLost)


def test_a_killed_process_is_named_in_bounded_time():
    with Processes(2) as crew:
        survivor, killed = crew.outcomes(dies_between_dispatch_and_combine, timeout_s=120)
    assert killed.exit_code == -signal.SIGKILL
    assert survivor.ok, survivor.error
    took, peers, lost = survivor.value
    assert took < 60
    assert peers == (1,)
    assert lost


def test_a_time_out_is_raised_by_the_next_call_and_closing_ends():
    def rank_work(rank):
        buf = buffer(rank, timeout_s=0.5)
        refusals.one_batch(buf, 0)
        rank.barrier()
        if rank.rank == 0:
            x, ids = refusals.inputs(buf, 1)
            buf.dispatch(x, ids, counts="device")
            arrive("cuda")
            with pytest.raises(ew.PeerTimeout) as caught:
                buf.dispatch(x, ids, counts="device")
            assert caught.value.peers == (1,)
            with pytest.raises(ew.BufferClosed):
                buf.dispatch(x, ids, counts="device")
            buf.close()
        rank.barrier()

    ew.World(2, device="cuda").run(rank_work)
