"""Rows given as (payload, scale factors) to a GPU's Buffer, as on the CPU; kernels in the interpreter."""

import importlib.util
import re

import pytest
import torch
from device_checks import CAPACITY, COMPACT, EXPERTS, HIDDEN, MAJOR, SLOTS, TOPK
from interpreted_buffer import interpreted_buffer

from expertwire.buffer import Buffer
from expertwire.errors import InvalidArgument
from expertwire.testing import assert_equal, uniform_routing

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def buffers(group, **options):
    """The same on the CPU and, as it were, on a GPU."""
    cpu = Buffer(group, num_experts=EXPERTS, hidden=HIDDEN, num_topk=TOPK, num_max_tokens_per_rank=CAPACITY)
    return cpu, interpreted_buffer(group, **options)


def values(dtype, num_tokens, width, seed):
    """[num_tokens, width] of any bytes."""
    dtype = getattr(torch, dtype)
    size = num_tokens * width * dtype.itemsize
    found = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return found.view(dtype).view(num_tokens, width)


def same(got, want):
    assert (got is None) == (want is None)
    if want is None:  # the scale factors, if they have no width
        return
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert_equal(bytes_of(got), bytes_of(want))


def bytes_of(t):
    return t.contiguous().view(-1).view(torch.uint8)


def compare(cpu, gpu, x, ids, layout, **options):
    """Exact counts, in a layout without unused rows; copies, views, deferred and cached."""
    want, sent = (buf.dispatch(x, ids, layout=layout, **options) for buf in (cpu, gpu))
    if options.get("defer_receive"):
        want, sent = want.hook(), sent.hook()
    same(sent.x, want.x)
    same(sent.sf, want.sf)
    want, again = (buf.dispatch(x, handle=one.handle) for buf, one in ((cpu, want), (gpu, sent)))
    same(again.x, want.x)
    same(again.sf, want.sf)
    sent.handle.release()
    want.handle.release()


def any_dtype(group, payload, sf):
    cpu, gpu = buffers(group, debug_poison=True)
    for number, (layout, options) in enumerate(
        [(COMPACT, {}), (MAJOR, {"zero_copy": True}), (MAJOR, {"defer_receive": True})]
    ):
        tokens = (5, 0)[(number + gpu.rank) % 2]
        x = values(payload, tokens, 6, 3 * number), values(sf, tokens, 3, 3 * number + 1)
        compare(cpu, gpu, x, uniform_routing(number, tokens, TOPK, EXPERTS), layout, **options)
    x = values(payload, 5, 6, 0), values(sf, 5, 3, 1)
    sent = gpu.dispatch(x, torch.zeros(5, TOPK, dtype=torch.int64).add(torch.arange(TOPK)), layout=SLOTS)
    assert sent.x.shape == (EXPERTS // gpu.num_ranks, gpu.num_ranks * CAPACITY, 6)
    if gpu.rank == 0:
        for expert in range(TOPK):
            for rank in range(gpu.num_ranks):
                same(sent.x[expert, 5 * rank : 5 * rank + 5], x[0])
                same(sent.sf[expert, 5 * rank : 5 * rank + 5], x[1])


DTYPES = [
    ("float4_e2m1fn_x2", "float8_e8m0fnu", 2),
    ("complex64", "complex32", 1),
    ("float8_e4m3fnuz", "bool", 1),
    ("float8_e4m3fn", "float32", 1),
    ("int16", "uint8", 1),
    ("float64", "bfloat16", 1),
]


@pytest.mark.parametrize(("payload", "sf", "num_ranks"), DTYPES)
def test_any_dtype(processes, payload, sf, num_ranks):
    if not (hasattr(torch, payload) and hasattr(torch, sf)):
        pytest.skip(f"torch has no {payload} or {sf}")
    processes.run(any_dtype, payload, sf, num_ranks=num_ranks, timeout_s=120)


def no_width(group):
    cpu, gpu = buffers(group, debug_poison=True)
    for layout, options in ((COMPACT, {}), (MAJOR, {"zero_copy": True})):
        for widths in ((8, 0), (0, 3), (0, 0)):
            for tokens in (5, 0):
                x = values("uint8", tokens, widths[0], 1), values("float32", tokens, widths[1], 2)
                compare(cpu, gpu, x, uniform_routing(7, tokens, TOPK, EXPERTS), layout, **options)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rows_without_payload_or_scale_factors(processes, num_ranks):
    processes.run(no_width, num_ranks=num_ranks, timeout_s=120)


def in_memory(group):
    """Tensors that torch calls contiguous, wherever they lie."""
    cpu, gpu = buffers(group)
    ids = uniform_routing(7, 5, TOPK, EXPERTS)
    column = torch.arange(5.0)[None, :].t()
    assert column.is_contiguous()
    assert column.stride() == (1, 5)
    payload, sf = values("uint8", 5, 8, 1), values("float32", 5, 2, 2)
    for x in ((column, sf), (payload, column), (column.half()[:1], column[:1])):
        compare(cpu, gpu, x, ids[: len(x[0])], COMPACT)
    odd = values("uint8", 1, 100, 3).view(-1)[1:]
    compare(cpu, gpu, (payload, odd[:20].view(5, 4)), ids, COMPACT)
    compare(cpu, gpu, (odd[:0].view(0, 8), odd[:0].view(0, 4)), ids[:0], COMPACT)
    with pytest.raises(InvalidArgument, match=r"x\[0\] must begin at a multiple of 16 bytes; pass x\[0\].clone\(\)"):
        gpu.dispatch((odd[:40].view(5, 8), sf), ids)
    compare(cpu, gpu, (odd[:40].view(5, 8).clone(), sf), ids, COMPACT)
    storage = torch.from_numpy(values("uint8", 1, 100, 3).view(-1).numpy()[1:])  # which begins at an odd address
    shifted = storage[-storage.data_ptr() % 16 :][:40].view(5, 8)
    assert shifted.storage_offset() % 2
    compare(cpu, gpu, (shifted, sf), ids, COMPACT)
    needed = torch.ones(5, 8, requires_grad=True)
    compare(cpu, gpu, (needed, needed * 2), ids, COMPACT)


def test_rows_in_any_memory(processes):
    processes.run(in_memory, num_ranks=1, timeout_s=120)


def conjugate(group):
    """The bytes of a lazy view are not its values."""
    for buf in buffers(group):
        ids, x = uniform_routing(7, 5, TOPK, EXPERTS), torch.full((5, 2), 1 + 2j)
        for pair, name in (((x.conj(), x), "x[0]"), ((x, x.conj()), "x[1]")):
            with pytest.raises(InvalidArgument, match=f"{re.escape(name)} must hold its values.*resolve_conj"):
                buf.dispatch(pair, ids)
        assert (buf.dispatch((x.conj().resolve_conj(), x), ids).x == 1 - 2j).all()


def test_conjugate_views(processes):
    processes.run(conjugate, num_ranks=1, timeout_s=120)


def too_wide(group):
    """Each part is counted in whole pieces of 16 bytes."""
    for buf in buffers(group):
        ids = uniform_routing(7, 5, TOPK, EXPERTS)
        buf.dispatch((values("uint8", 5, 2 * HIDDEN - 16, 1), values("uint8", 5, 1, 2)), ids).handle.release()
        what = f"{2 * HIDDEN - 1} payload and 1 scale bytes needs {2 * HIDDEN + 16}"
        with pytest.raises(InvalidArgument, match=what):
            buf.dispatch((values("uint8", 5, 2 * HIDDEN - 1, 1), values("uint8", 5, 1, 2)), ids)


def test_rows_that_are_too_wide(processes):
    processes.run(too_wide, num_ranks=1, timeout_s=120)
