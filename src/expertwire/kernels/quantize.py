"""bfloat16 to e4m3 with a scale factor per block and back, bit-identical to `formats.fp8`, whose docstring has the
arithmetic.

Both divisions are `div_rn`: a plain `/` differs in most scales. The dispatch kernels encode rows that they hold in
registers.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
AMAX_FLOOR = tl.constexpr(1e-4)
NAN_BITS = tl.constexpr(0x7FC00000)
MANTISSA = tl.constexpr(0x007FFFFF)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def encode_blocks(values, UE8M0: tl.constexpr):
    """values [G, B] bfloat16, one block per line -> (e4m3 [G, B], scale [G]).

    `scale` is float32 bits as int32, or the exponent byte as int32 with UE8M0. Worked example: `formats.fp8`.
    """
    x = values.to(tl.float32)
    largest = tl.reduce(tl.abs(x), 1, _larger)
    finite = largest < float("inf")  # false for NaN
    amax = tl.where(finite, tl.maximum(largest, AMAX_FLOOR), 1.0)
    limit = tl.zeros_like(amax) + E4M3_MAX
    scale = tl.div_rn(amax, limit)
    if UE8M0:
        exponent = (scale.to(tl.int32, bitcast=True) + MANTISSA) >> 23
        factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        sf = tl.where(finite, exponent, 255)
    else:
        factor = tl.div_rn(limit, amax)
        sf = tl.where(finite, scale.to(tl.int32, bitcast=True), NAN_BITS)
    factor = tl.where(finite, factor, float("nan"))
    return (x * factor[:, None]).to(tl.float8e4nv), sf  # finite products are <= 448 after rounding


@triton.jit
def load_blocks(row, first, hidden: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr):
    """LINES blocks of a bfloat16 row, from block `first` on: (values [LINES, BLOCK], columns, mask)."""
    columns = (first + tl.arange(0, LINES))[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = columns < hidden
    return tl.load(row + columns, mask=mask, other=0.0), columns, mask


@triton.jit
def store_scales(
    sf, first, scales, hidden: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, UE8M0: tl.constexpr
):
    """Scale factors of blocks `first`... of one row, at address `sf`; bytes behind the last block become zero."""
    num_blocks: tl.constexpr = (hidden + BLOCK - 1) // BLOCK
    line = first + tl.arange(0, LINES)
    if UE8M0:
        padded: tl.constexpr = (num_blocks + 3) // 4 * 4
        scales = tl.where(line < num_blocks, scales, 0)
        tl.store(sf.to(tl.pointer_type(tl.uint8)) + line, scales.to(tl.uint8), mask=line < padded)
    else:
        tl.store(sf.to(tl.pointer_type(tl.int32)) + line, scales, mask=line < num_blocks)


@triton.jit
def decode_blocks(
    payload, sf, row, out, hidden: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, sf_bytes: tl.constexpr,
    UE8M0: tl.constexpr,
):  # fmt: skip
    """One row of payload [rows, hidden] e4m3, with sf [rows, sf_bytes], to out [rows, hidden] bfloat16.

    Scale factors are float32, or exponent bytes with UE8M0: of a row that was encoded, so no exponent is 0.
    """
    line = tl.arange(0, LINES)
    if UE8M0:
        exponents = tl.load(sf.to(tl.pointer_type(tl.uint8)) + row * sf_bytes + line, mask=line < sf_bytes, other=0)
        bits = exponents.to(tl.int32) << 23
        bits = tl.where(exponents == 255, NAN_BITS, bits)
    else:
        sf_units: tl.constexpr = sf_bytes // 4
        bits = tl.load(sf.to(tl.pointer_type(tl.int32)) + row * sf_units + line, mask=line < sf_units, other=0)
    columns = line[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = columns < hidden
    codes = tl.load(payload.to(tl.pointer_type(tl.uint8)) + row * hidden + columns, mask=mask, other=0)
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * bits.to(tl.float32, bitcast=True)[:, None]
    tl.store(out.to(tl.pointer_type(tl.bfloat16)) + row * hidden + columns, values.to(tl.bfloat16), mask=mask)
