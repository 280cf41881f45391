"""combine(wire=LogFMT10()) as on a GPU, with kernels in the interpreter: every bit is that of `formats.logfmt`."""

import importlib.util

import pytest
import torch
from device_checks import COMPACT, MAJOR, SLOTS, check_rank
from interpreted import use_interpreter
from interpreted_buffer import interpreted_buffer
from logfmt_rows import mixed_rows

from expertwire.errors import TransportUnavailable
from expertwire.formats import BF16, LogFMT10
from expertwire.testing import first_mismatch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def round_trip(group, hidden):
    """Rows, the last one of the first token, through `encode_rows` and `combine_logfmt`, weighted, against the format;
    how many chunks were cast."""
    use_interpreter()
    from expertwire.kernels.logfmt import combine_logfmt, encode_rows

    x = mixed_rows(21, hidden, seed=hidden)
    rows, wire, chunk = len(x), LogFMT10(), 1024 if hidden % 1024 == 0 else 512
    coded = wire.encode(x)
    sf, none = coded[1].view(torch.uint8), torch.zeros(2, dtype=torch.int32)
    memory = torch.zeros(rows, 2 * hidden + sf.shape[1], dtype=torch.uint8)
    came, limits = memory.view(-1)[: 2 * rows * hidden], memory.view(-1)[2 * rows * hidden :]
    count, token = torch.tensor([rows], dtype=torch.int32), torch.arange(rows, dtype=torch.int32).flip(0)
    encode_rows[(2,)](
        x.view(torch.int16), torch.stack([0 * token, token, 0 * token], 1), count, 0 * count, none, rows,
        torch.tensor([memory.data_ptr()]), len(came), R=1, GROUPS=1, GROUP_BINS=1, hidden=hidden, CHUNK=chunk,
        SENDS=1, META=3,
    )  # fmt: skip
    assert torch.equal(limits.view(rows, -1).flip(0), sf)
    weights, out = torch.rand(rows, 1), torch.empty(rows, hidden, dtype=torch.bfloat16)
    combine_logfmt[(2,)](
        torch.arange(rows).flip(0)[:, None].contiguous(), weights, None, None, out, none, rows, 1,
        came, limits, *[none] * 5, 0,
        R=1, RANKS=1, BANKS=1, SENDS=1, CHUNK=chunk, PARTS=-(-hidden // chunk), hidden=hidden, WEIGHTED=True,
        NUM_BIASES=0, FINISH=False,
    )  # fmt: skip
    wanted = (0.0 + weights * wire.decode_float32(*coded, hidden).flip(0)).bfloat16()
    return first_mismatch(out, wanted), int(wire.cast_chunks(coded[1], hidden).sum())


@pytest.mark.parametrize("hidden", [1024, 1536, 1096, 136, 48])
def test_kernels(processes, hidden):
    ((mismatch, num_cast),) = processes.run(round_trip, hidden, num_ranks=1)
    assert mismatch is None
    assert num_cast > 0 or hidden == 136  # which no chunk of 16 values divides


def example(group):
    use_interpreter()
    from expertwire.kernels.logfmt import encode_rows

    x = torch.full((1, 128), 0.125).bfloat16()
    x[0, 0], x[0, 1] = 0.5, -0.25
    memory, one = torch.zeros(130, dtype=torch.int16), torch.ones(1, dtype=torch.int32)
    none = torch.zeros(3, dtype=torch.int32)
    encode_rows[(1,)](
        x.view(torch.int16), none, one, 0 * one, none, 1, torch.tensor([memory.data_ptr()]), 256, R=1, GROUPS=1,
        GROUP_BINS=1, hidden=128, CHUNK=512, SENDS=1, META=3,
    )  # fmt: skip
    words = memory[:10].view(torch.int32).tolist()
    return memory[128:].view(torch.bfloat16).tolist(), [word & 0xFFFFFFFF for word in words]


def test_worked_example(processes):
    ((limits, words),) = processes.run(example, num_ranks=1)
    assert limits == [0.5, 0.125]
    assert words == [0x080601FF, 0x80402010, 0x04020100, 0x40201008, 0x00020080]


def rank_work(group, layout, options):
    buf = interpreted_buffer(group)
    check_rank(buf, layout, BF16(), steps=2, back_wire=LogFMT10(), **options)
    torch.distributed.barrier(group)


CASES = [(MAJOR, {"deferred": True}, 2), (COMPACT, {"counts": "device"}, 2), (SLOTS, {"zero_copy": True}, 1)]


@pytest.mark.parametrize(("layout", "options", "num_ranks"), CASES)
def test_combine(processes, layout, options, num_ranks):
    processes.run(rank_work, layout, options, num_ranks=num_ranks, timeout_s=120)


def refused(group):
    buf = interpreted_buffer(group)
    sent = buf.dispatch(mixed_rows(3, 512), torch.zeros(3, 4, dtype=torch.int64), layout=MAJOR)
    with pytest.raises(TransportUnavailable, match="reduce='token'"):
        buf.combine(sent.x, sent.handle, wire=LogFMT10(), reduce="rank")


def test_sums_of_ranks_are_refused(processes):
    processes.run(refused, num_ranks=1)
