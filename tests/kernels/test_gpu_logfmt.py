"""combine(wire=LogFMT10()) on a real GPU: every bit is that of `formats.logfmt` and of the oracle."""

from functools import partial

import on_gpu
import pytest
import torch
from device_checks import COMPACT, EXPERTS, MAJOR, SLOTS, TOPK, check_rank
from logfmt_rows import mixed_rows

import expertwire as ew
from expertwire.testing import assert_equal, run_processes

pytestmark = on_gpu.MARKS
buffer = partial(on_gpu.buffer, timeout_s=20.0)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("layout", [SLOTS, MAJOR, COMPACT], ids=str)
@pytest.mark.parametrize("deferred", [False, True])
def test_layouts(num_ranks, layout, deferred):
    def rank_work(rank):
        with buffer(rank) as buf:
            check_rank(buf, layout, ew.BF16(), back_wire=ew.LogFMT10(), deferred=deferred)

    ew.World(num_ranks, device="cuda").run(rank_work)


@pytest.mark.parametrize("hidden", [7168, 1536, 1096, 2880, 136])
def test_round_trip(hidden):
    """A token with one expert gets its row back as the format makes it."""

    def rank_work(rank):
        x = mixed_rows(512, hidden, seed=hidden)
        ids = torch.full((512, TOPK), -1, device="cuda")
        ids[:, 1] = torch.arange(512, device="cuda") % EXPERTS
        wire = ew.LogFMT10()
        wanted = wire.decode_float32(*wire.encode(x), hidden)
        with buffer(rank, hidden=hidden, num_max_tokens_per_rank=512) as buf:
            for layout in (COMPACT, MAJOR):
                sent = buf.dispatch(x.cuda(), ids, layout=layout)
                out = buf.combine(sent.x, sent.handle, wire=wire).x
                assert_equal(out.cpu(), (0.0 + wanted).bfloat16())

    ew.World(1, device="cuda").run(rank_work)


def processes_work(group):
    torch.cuda.set_device(0)
    with buffer(group, timeout_s=60.0) as buf:
        for layout in (COMPACT, MAJOR, SLOTS):
            check_rank(buf, layout, ew.BF16(), back_wire=ew.LogFMT10(), steps=2)


def test_processes_share_a_gpu():
    run_processes(2, processes_work)
