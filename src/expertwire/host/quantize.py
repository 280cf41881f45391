"""FP8 encode and decode in numba, bit-identical to `expertwire.formats`.

bfloat16 is read as uint16 and e4m3 written as uint8, by integer arithmetic that the compiler vectorises.
"""

# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import njit

from expertwire.host.cache import KEEP
from expertwire.host.memory import bits_float, float_bits, view

_INF_BITS = np.uint16(0x7F80)
_E4M3_NAN = np.uint8(0x7F)
_NAN_SCALE = np.uint32(0x7FC00000)
_FLOOR = np.float32(1e-4)
_E4M3_MAX = np.float32(448)
# Adding 2^14 to |v| < 2^-6 leaves v / 2^-9, rounded to nearest even, in the low bits of the sum.
_SUBNORMAL_SHIFT = np.float32(16384)
_SUBNORMAL_SHIFT_BITS = np.uint32(0x46800000)
_SMALLEST_NORMAL_BITS = np.uint32(0x3C800000)
_SMALLEST_NORMAL = np.float32(2**-6)
_E4M3_EXPONENT = np.uint32((127 - 7) << 23)
_LOWEST_UE8M0 = np.uint32(0x00400000)


@njit(nogil=True, cache=KEEP, error_model="numpy")
def _largest_magnitude(values):
    """Bits of the largest |value| (bfloat16 bits are ordered like the magnitudes; NaN above Inf above all)."""
    largest = np.uint16(0)
    for h in range(values.size):
        largest = max(largest, np.uint16(values[h] & np.uint16(0x7FFF)))
    return largest


@njit(nogil=True, cache=KEEP, error_model="numpy")
def _round_e4m3(values, factor, out):
    """out = e4m3(values * factor), to nearest even, saturating at 448. `values` are finite bfloat16 bits."""
    for h in range(values.size):
        product = bits_float(np.uint32(values[h]) << np.uint32(16)) * factor
        bits = float_bits(product)
        sign = np.uint32(np.uint32(bits >> np.uint32(24)) & np.uint32(0x80))
        magnitude = min(bits_float(np.uint32(bits & np.uint32(0x7FFFFFFF))), _E4M3_MAX)
        bits = float_bits(magnitude)
        odd = np.uint32(np.uint32(bits >> np.uint32(20)) & np.uint32(1))
        normal = np.uint32(np.uint32(bits - _E4M3_EXPONENT + np.uint32(0x7FFFF) + odd) >> np.uint32(20))
        subnormal = np.uint32(float_bits(magnitude + _SUBNORMAL_SHIFT) - _SUBNORMAL_SHIFT_BITS)
        code = normal if bits >= _SMALLEST_NORMAL_BITS else subnormal
        out[h] = np.uint8(code | sign)


@njit(nogil=True, cache=KEEP, error_model="numpy")
def encode_fp8(x, num_rows, hidden, block, packed, payload, sf, sf_stride) -> None:
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


@njit(nogil=True, cache=KEEP, error_model="numpy")
def _scale_e4m3(codes, scale, out):
    """out = bfloat16(e4m3 value * scale), one rounding to float32 and one to bfloat16, both to nearest even.

    A float32 with the code's exponent and mantissa is the value; below 8 (subnormal codes) it is what 2^-6 with that
    mantissa exceeds 2^-6 by. Worked example: code 0x2a, scale 1: (0x2a << 20) + (120 << 23) = 0x3ea00000 = 0.3125.
    """
    for h in range(codes.size):
        code = np.uint32(codes[h] & np.uint8(0x7F))
        normal = bits_float(np.uint32(np.uint32(code << np.uint32(20)) + _E4M3_EXPONENT))
        subnormal = bits_float(np.uint32(np.uint32(code << np.uint32(20)) | _SMALLEST_NORMAL_BITS)) - _SMALLEST_NORMAL
        magnitude = normal if code >= np.uint32(8) else subnormal
        magnitude = bits_float(_NAN_SCALE) if code == np.uint32(0x7F) else magnitude
        bits = float_bits(magnitude * scale)
        odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
        rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
        sign = np.uint32(np.uint32(codes[h] & np.uint8(0x80)) << np.uint32(8))
        is_nan = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[h] = np.uint16(0x7FC0) if is_nan else np.uint16(rounded ^ sign)


@njit(nogil=True, cache=KEEP, error_model="numpy")
def decode_fp8(payload, sf, num_rows, hidden, block, packed, sf_stride, out) -> None:
    """The inverse of `encode_fp8`, up to the rounding: payload and sf -> out [num_rows, hidden] bfloat16 at `out`.

    The same bits as `FP8Block.decode_bfloat16`; every NaN is 0x7fc0. A row of sf begins every `sf_stride` bytes.
    Bytes moved: 3 * hidden per row and the scale factors. Worked example: `formats.fp8`.
    """
    num_blocks = (hidden + block - 1) // block
    for i in range(num_rows):
        for b in range(num_blocks):
            first = b * block
            width = min(block, hidden - first)
            if packed:
                exponent = np.uint32(view(sf + i * sf_stride + b, 1, np.uint8)[0])
                bits = np.uint32(exponent << np.uint32(23))
                if exponent == 0:
                    bits = _LOWEST_UE8M0
                elif exponent == 255:
                    bits = _NAN_SCALE
                scale = bits_float(bits)
            else:
                scale = view(sf + i * sf_stride + 4 * b, 1, np.float32)[0]
            codes = view(payload + i * hidden + first, width, np.uint8)
            _scale_e4m3(codes, scale, view(out + 2 * (i * hidden + first), width, np.uint16))
