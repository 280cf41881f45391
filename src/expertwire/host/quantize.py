"""FP8 encode and decode in numba, bit-identical to `expertwire.formats`.

bfloat16 is read as uint16 and e4m3 written as uint8, by integer arithmetic that the compiler vectorises.
"""

# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import njit

from expertwire.host.memory import bits_float, float_bits, view

_INF_BITS = np.uint16(0x7F80)
_E4M3_NAN = np.uint8(0x7F)
_NAN_SCALE = np.uint32(0x7FC00000)
_FLOOR = np.float32(1e-4)
_E4M3_MAX = np.float32(448)
# Adding 2^14 to |v| < 2^-6 leaves v / 2^-9, rounded to nearest even, in the low bits of the sum.
_SUBNORMAL_SHIFT = np.float32(16384)
_SMALLEST_NORMAL_BITS = np.uint32(0x3C800000)


@njit(nogil=True, cache=True, error_model="numpy")
def _largest_magnitude(values):
    """Bits of the largest |value| (bfloat16 bits are ordered like the magnitudes; NaN above Inf above all)."""
    largest = np.uint16(0)
    for h in range(values.size):
        largest = max(largest, np.uint16(values[h] & np.uint16(0x7FFF)))
    return largest


@njit(nogil=True, cache=True, error_model="numpy")
def _round_e4m3(values, factor, out):
    """out = e4m3(values * factor), to nearest even, saturating at 448. `values` are finite bfloat16 bits."""
    for h in range(values.size):
        product = bits_float(np.uint32(values[h]) << np.uint32(16)) * factor
        bits = float_bits(product)
        sign = np.uint32((bits >> np.uint32(24)) & np.uint32(0x80))
        magnitude = min(bits_float(bits & np.uint32(0x7FFFFFFF)), _E4M3_MAX)
        bits = float_bits(magnitude)
        normal = (bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
        normal -= np.uint32((127 - 7) << 3)
        subnormal = float_bits(magnitude + _SUBNORMAL_SHIFT) - float_bits(_SUBNORMAL_SHIFT)
        code = normal if bits >= _SMALLEST_NORMAL_BITS else subnormal
        out[h] = np.uint8(code | sign)


@njit(nogil=True, cache=True, error_model="numpy")
def encode_fp8(x, num_rows, hidden, block, packed, payload, sf, sf_stride):
    """Quantise rows: x [num_rows, hidden] bfloat16 at address `x` -> payload [num_rows, hidden] uint8 at `payload`.

    sf: float32 [num_rows, ceil(hidden / block)], or with `packed` one UE8M0 exponent byte per block, zero-filled up to
    `sf_stride` bytes per row. Bytes moved: 3 * hidden per row and the scale factors.
    Worked example: `formats.fp8`.
    """
    num_blocks = (hidden + block - 1) // block
    for i in range(num_rows):
        row_sf = view(sf + i * sf_stride, sf_stride, np.uint8)
        if packed:
            row_sf[:] = np.uint8(0)
        for b in range(num_blocks):
            first = b * block
            width = min(block, hidden - first)
            values = view(x + 2 * (i * hidden + first), width, np.uint16)
            out = view(payload + i * hidden + first, width, np.uint8)
            largest = _largest_magnitude(values)
            if largest >= _INF_BITS:
                out[:] = _E4M3_NAN
                if packed:
                    row_sf[b] = np.uint8(255)
                else:
                    view(sf + i * sf_stride + 4 * b, 1, np.uint32)[0] = _NAN_SCALE
                continue
            amax = max(bits_float(np.uint32(largest) << np.uint32(16)), _FLOOR)
            scale = amax / _E4M3_MAX
            if packed:
                exponent = (float_bits(scale) + np.uint32(0x007FFFFF)) >> np.uint32(23)
                row_sf[b] = np.uint8(exponent)
                factor = np.float32(1) / bits_float(exponent << np.uint32(23))
            else:
                view(sf + i * sf_stride + 4 * b, 1, np.float32)[0] = scale
                factor = _E4M3_MAX / amax
            _round_e4m3(values, factor, out)


@njit(nogil=True, cache=True, error_model="numpy")
def decode_fp8(payload, sf, num_rows, hidden, block, scales, values, out):
    """out [num_rows, hidden] bfloat16 at `out` = e4m3 value * scale, in float32, rounded once.

    `scales` [num_rows, num_blocks] float32 (UE8M0 already expanded), `values` the 256 float32 values of e4m3.
    """
    for i in range(num_rows):
        for first in range(0, hidden, block):
            width = min(block, hidden - first)
            scale = scales[i, first // block]
            codes = view(payload + i * hidden + first, width, np.uint8)
            result = view(out + 2 * (i * hidden + first), width, np.uint16)
            for h in range(width):
                bits = float_bits(values[codes[h]] * scale)
                rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
                is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
                result[h] = np.uint16(0x7FC0) if is_nan else np.uint16(rounded)
