"""Row kernels called with tensors in place of addresses, on both engines."""

import numpy as np
import pytest
import torch

from expertwire.host.kernels import numba_missing

NUMBA = pytest.param("numba", marks=pytest.mark.skipif(numba_missing() is not None, reason=numba_missing() or ""))
ENGINES = [NUMBA, "torch"]
HIDDENS = [8, 24, 128, 512, 768, 2880, 7168]
EVERY_CODE = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def addresses(rows):
    """int64 [n] of a contiguous [n, width] tensor."""
    assert rows.is_contiguous()
    return rows.data_ptr() + rows.shape[1] * rows.element_size() * np.arange(rows.shape[0], dtype=np.int64)


def bits(t):
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def assert_same(seen, expected):
    """Bit for bit, except that one NaN is as good as another."""
    assert seen.dtype == expected.dtype
    assert seen.shape == expected.shape
    differs = bits(seen) != bits(expected)
    if seen.is_floating_point():
        differs &= ~(seen.float().isnan() & expected.float().isnan())
    assert not differs.any(), (
        f"{int(differs.sum())} of {differs.numel()} differ, first at {differs.nonzero()[0].tolist()}"
    )


def normal(rows, hidden, seed, scale=1.0):
    return (torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def mixed(rows, hidden, seed, scale=1.0):
    """Normal values with rows of tiny values, zeros, a large value, NaN and Inf among them."""
    x = normal(max(rows, 7), hidden, seed, scale)
    x[1] *= 2.0**-40
    x[2, hidden // 2] = 3.0
    x[3, ::5] = 0.0
    x[4, hidden // 3] = torch.nan
    x[5, hidden - 1] = -torch.inf
    x[6] = 0.375
    return x[:rows].clone()


def routed(kernels, topk_idx, expert_rank, expert_local, num_ranks, distinct, weights=None):
    """`topk_idx` [T, K] int64 and `weights` [T, K] float32 are arrays."""
    assert topk_idx.dtype == np.int64
    at = 0 if weights is None else weights.ctypes.data
    return kernels.route(topk_idx.ctypes.data, at, *topk_idx.shape, expert_rank, expert_local, num_ranks, distinct)


def encode_fp8(kernels, x, wire, spare=0):
    """payload, sf in rows of `spare` bytes more than needed."""
    rows, hidden = x.shape
    payload = torch.full((rows, hidden), 7, dtype=torch.uint8)
    sf = torch.full((rows, wire.sf_bytes(hidden) + spare), 7, dtype=torch.uint8)
    packed = wire.scale == "ue8m0"
    kernels.encode_fp8(
        x.data_ptr(), rows, hidden, wire.block, packed, payload.data_ptr(), sf.data_ptr(), sf.shape[1]
    )  # fmt: skip
    return payload.view(torch.float8_e4m3fn), sf


def decode_fp8(kernels, payload, sf, wire):
    """sf as uint8 rows."""
    rows, hidden = payload.shape
    out = torch.full((rows, hidden), 7, dtype=torch.bfloat16)
    packed = wire.scale == "ue8m0"
    kernels.decode_fp8(
        payload.data_ptr(), sf.data_ptr(), rows, hidden, wire.block, packed, sf.shape[1], out.data_ptr()
    )  # fmt: skip
    return out


def encode_logfmt(kernels, x):
    rows, hidden = x.shape
    payload = torch.full((rows, 2 * hidden), 7, dtype=torch.uint8)
    sf = torch.full((rows, 2 * -(-hidden // 128)), 7, dtype=torch.bfloat16)
    kernels.encode_logfmt(x.data_ptr(), rows, hidden, payload.data_ptr(), sf.data_ptr())
    return payload, sf


def decode_logfmt(kernels, payload, sf):
    rows, hidden = payload.shape[0], payload.shape[1] // 2
    out = torch.full((rows, hidden), 7, dtype=torch.float32)
    kernels.decode_logfmt(payload.data_ptr(), sf.data_ptr(), rows, hidden, out.data_ptr())
    return out


def reduce_rows(kernels, rows, weights=None, biases=(), present=None, stream=False):
    """rows [n, K, hidden], weights [n, K] or None, biases of [n, hidden] -> bfloat16 [n, hidden]."""
    count, topk, hidden = rows.shape
    operands = addresses(rows.view(count * topk, hidden)).reshape(count, topk)
    if present is not None:
        operands = np.where(present.numpy(), operands, 0)
    shares = np.ones((count, topk), np.float32) if weights is None else weights.numpy()
    bias_at = np.array([b.data_ptr() for b in biases], np.int64)
    out = torch.full((count, hidden), 7, dtype=torch.bfloat16)
    kernels.reduce_rows(
        operands, rows.dtype == torch.float32, shares, weights is not None, bias_at, out.data_ptr(), hidden, stream
    )
    return out


def write_routing(kernels, num_rows, tokens, rank, slots, weights):
    """int32 [num_rows, 2 * K + 1]; the weights among them are float32."""
    routing = torch.full((num_rows, 2 * slots.shape[2] + 1), 7, dtype=torch.int32)
    kernels.write_routing(routing.data_ptr(), tokens, rank, slots, weights)
    return routing
