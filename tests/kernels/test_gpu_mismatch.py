"""Ranks that make different calls, on a GPU: virtual ranks of one World, and processes."""

import itertools
from functools import partial

import mismatches
import on_gpu
import pytest
import torch
from device_checks import COMPACT, EXPERTS, HIDDEN, SLOTS, TOPK

import expertwire as ew
from expertwire.testing import run_processes

pytestmark = on_gpu.MARKS
buffer = partial(on_gpu.buffer, timeout_s=8.0)
CHECKS = [
    ("first_calls", {}),
    *(("dispatch", {"kind": kind, "counts": counts}) for kind in mismatches.KINDS for counts in ("host", "device")),
    ("weights", {}),
    ("repeats", {}),
    ("combine", {}),
    ("deferred_combine", {}),
    ("turns", {}),
    ("new_kind", {}),
]


def warm():
    """Load torch's kernels of these checks: one that is loaded while another rank's kernel waits would hold both up."""
    ids, x = torch.zeros(8, TOPK, dtype=torch.int64, device="cuda"), torch.zeros(8, HIDDEN, device="cuda")
    rows = x.bfloat16()
    (ids.flip(0).contiguous(), ids.int(), torch.ones(ids.shape, device="cuda"), torch.zeros_like(rows))
    (x.to(torch.float8_e4m3fn).to(torch.bfloat16), rows.cpu())


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("check", "options"), CHECKS, ids=str)
def test_mismatch(num_ranks, check, options):
    def rank_work(rank):
        warm()
        with buffer(rank) as buf:
            getattr(mismatches, f"check_{check}")(buf, **options)

    ew.World(num_ranks, device="cuda").run(rank_work)


def all_checks(group):
    torch.cuda.set_device(0)
    with buffer(group, timeout_s=60.0) as buf:
        mismatches.check_all(buf)


def test_processes():
    run_processes(2, all_checks)


def replayed(group):
    """Graphs of other layouts on two ranks; those of other sizes may differ."""
    torch.cuda.set_device(0)
    graphs = {}
    with buffer(group, max_in_flight=1, timeout_s=60.0) as buf:
        x, ids = mismatches.inputs(buf, 1)
        chosen = torch.nn.functional.one_hot(ids, EXPERTS).sum(1).count_nonzero(1)
        want = (chosen[:, None] * x.float()).bfloat16()
        for layout, size in itertools.product((COMPACT, SLOTS), (8, 4)):
            mismatches.dispatch(buf, 1, layout=layout, counts="device")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                sent = buf.dispatch(
                    x[:size].contiguous(), ids[:size].contiguous(), layout=layout, counts="device", zero_copy=False
                )
                out = buf.combine(sent.x, sent.handle).x
            graphs[layout, size] = graph, out
        for _ in range(3):
            graph, out = graphs[SLOTS, 8 if buf.rank else 4]
            graph.replay()
            buf.synchronize()
            assert torch.equal(out, want[: len(out)])
            graphs[COMPACT if buf.rank else SLOTS, 8][0].replay()
            with pytest.raises(ew.GroupMismatch, match="ranks call dispatch differently"):
                buf.synchronize()


def test_graphs():
    run_processes(2, replayed)
