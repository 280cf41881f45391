"""LogFMT10 encode and decode in numba, bit-identical to `expertwire.formats.logfmt`, which defines every bit.

Every float32 operation that the format names is rounded once: constants are np.float32 (a Python float would make
numba compute in float64) and nothing is fused (numba does not contract without fastmath). Sixteen values, 160 bits, are
packed in local buffers, so the payload may lie at any address. A signed code is a code with its sign in bit 9.
"""

# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import njit

from expertwire.formats import logfmt
from expertwire.host.cache import KEEP
from expertwire.host.memory import bits_float, copy_bytes, float_bits, view

_GROUP = logfmt.GROUP
_LONGEST_CHUNK = 1024
_L = tuple(np.float32(c) for c in logfmt.LOG2_1P)
_Q = tuple(np.float32(c) for c in logfmt.EXP2_NEG)
_ONE = np.float32(1)
_HALF = np.float32(0.5)
_TOP_CODE = np.float32(logfmt.TOP_CODE)
_HIGHEST_ESTIMATE = np.float32(logfmt.TOP_CODE - 1)
_MAX_SPAN = np.float32(logfmt.MAX_SPAN)
_LOWEST_AMAX = np.uint16(logfmt.LOWEST_AMAX_BITS)
_ONE_BITS = np.uint16(logfmt.ONE_BITS)
_PAIR = np.uint64((1 << 18) - 1)
_QUAD = np.uint64((1 << 36) - 1)
_QUAD_SIGNS = np.uint64(0xF << 36)


@njit(nogil=True, inline="always")
def _log2_mantissa(bits):
    """L(m - 1) of a bfloat16 magnitude m * 2^e."""
    z = np.float32(np.int32(bits & np.uint32(0x7F))) * np.float32(1 / 128)
    return ((((((_L[7] * z + _L[6]) * z + _L[5]) * z + _L[4]) * z + _L[3]) * z + _L[2]) * z + _L[1]) * z + _L[0]


@njit(nogil=True, inline="always")
def _exp2_neg(f):
    """Q(f), about 2^-f for 0 <= f < 1."""
    return ((((_Q[5] * f + _Q[4]) * f + _Q[3]) * f + _Q[2]) * f + _Q[1]) * f + _Q[0]


@njit(nogil=True, inline="always")
def _grid(amax, step, below):
    """The grid value `below` codes under amax: (amax * Q(f)) * 2^-i with i + f = below * step."""
    t = below * step
    i = np.int32(t)
    power_of_two = bits_float(np.uint32(np.uint32(np.int32(127) - i) << np.uint32(23)))
    return amax * _exp2_neg(t - np.float32(i)) * power_of_two


@njit(nogil=True, inline="always")
def _step(amax, amin):
    """Bits of amax and amin -> log2 of the ratio of neighbours on the grid."""
    octaves = np.float32(np.int32(amax >> np.uint32(7)) - np.int32(amin >> np.uint32(7)))
    span = octaves + (_log2_mantissa(amax) - _log2_mantissa(amin))
    return min(span, _MAX_SPAN) / _HIGHEST_ESTIMATE


@njit(nogil=True, cache=KEEP, error_model="numpy")
def _limits(values):
    """Bits of the largest and the smallest magnitude; as integers they sort like |x|, NaN above Inf."""
    amax, amin = np.uint16(0), np.uint16(0x7FFF)
    for h in range(values.size):
        magnitude = np.uint16(values[h] & np.uint16(0x7FFF))
        amax = max(amax, magnitude)
        amin = min(amin, magnitude)
    return amax, amin


@njit(nogil=True, cache=KEEP, error_model="numpy")
def _is_cast(limits, first, width):
    """Whether the chunk of `width` channels that begins with group `first` travels in ten bits."""
    fits = width % 16 == 0
    for g in range(first, first + (width + _GROUP - 1) // _GROUP):
        amax, amin = limits[2 * g], limits[2 * g + 1]
        fits = fits and amax >= _LOWEST_AMAX and amax < _ONE_BITS and amin < amax
    return fits


@njit(nogil=True, cache=KEEP, error_model="numpy")
def _encode_group(values, amax_bits, amin_bits, codes):
    """bfloat16 bits of one group -> signed codes uint16.

    The estimate is the position of |x| on the grid by logarithms, rounded down: the code is that or the next one. One
    comparison with the edge between the two decides, so any error below a third of a step is harmless.
    """
    amax = bits_float(np.uint32(np.uint32(amax_bits) << np.uint32(16)))
    step = _step(np.uint32(amax_bits), np.uint32(amin_bits))
    half = (_exp2_neg(step) + _ONE) * _HALF
    codes_per_octave = _ONE / step
    exponent = np.int32(amax_bits >> np.uint16(7))
    log2_mantissa = _log2_mantissa(np.uint32(amax_bits))
    for h in range(values.size):
        bits = np.uint32(values[h] & np.uint16(0x7FFF))
        whole_octaves = np.float32(np.int32(exponent - np.int32(bits >> np.uint32(7))))
        octaves = whole_octaves + (log2_mantissa - _log2_mantissa(bits))
        position = _TOP_CODE - octaves * codes_per_octave
        low = np.int32(min(max(position, np.float32(0)), _HIGHEST_ESTIMATE))
        edge = _grid(amax, step, _HIGHEST_ESTIMATE - np.float32(low)) * half
        reached = bits_float(np.uint32(bits << np.uint32(16))) >= edge
        sign = np.uint16((values[h] & np.uint16(0x8000)) >> np.uint16(6))
        codes[h] = np.uint16(np.int32(low + np.int32(reached))) | sign


@njit(nogil=True, cache=KEEP, error_model="numpy")
def _decode_group(codes, amax_bits, amin_bits, out):
    """Signed codes uint16 -> float32 bits."""
    amax = bits_float(np.uint32(np.uint32(amax_bits) << np.uint32(16)))
    step = _step(np.uint32(amax_bits), np.uint32(amin_bits))
    for h in range(codes.size):
        code = np.int32(codes[h] & np.uint16(0x1FF))
        bits = float_bits(_grid(amax, step, _TOP_CODE - np.float32(code)))
        magnitude = np.uint32(0) if code == 0 else bits
        out[h] = np.uint32(magnitude | np.uint32(np.uint32(codes[h] >> np.uint16(9)) << np.uint32(31)))


@njit(nogil=True, cache=KEEP, error_model="numpy")
def _pack(codes, pairs, quads, words):
    """Signed codes uint16 [16 * n] -> words uint32 [5 * n]: code v at bit 9v of 160, sign v at bit 144 + v.

    Two steps that vectorise, to two and then four values with their signs behind them (18 + 2, 36 + 4 bits), then one
    step per sixteen. `pairs` uint32 [8 * n] and `quads` uint64 [4 * n] are scratch.
    """
    for n in range(codes.size // 2):
        a, b = np.uint32(codes[2 * n]), np.uint32(codes[2 * n + 1])
        both = np.uint32((a & np.uint32(0x1FF)) | np.uint32((b & np.uint32(0x1FF)) << np.uint32(9)))
        signs = np.uint32((a >> np.uint32(9)) | np.uint32((b >> np.uint32(9)) << np.uint32(1)))
        pairs[n] = np.uint32(both | np.uint32(signs << np.uint32(18)))
    for n in range(codes.size // 4):
        a, b = np.uint64(pairs[2 * n]), np.uint64(pairs[2 * n + 1])
        signs = (a >> np.uint64(18)) | ((b >> np.uint64(18)) << np.uint64(2))
        quads[n] = (a & _PAIR) | ((b & _PAIR) << np.uint64(18)) | (signs << np.uint64(36))
    for n in range(codes.size // 16):
        a, b, c, d = quads[4 * n], quads[4 * n + 1], quads[4 * n + 2], quads[4 * n + 3]
        signs = (a >> np.uint64(36)) | ((b >> np.uint64(36)) << np.uint64(4))
        signs |= ((c >> np.uint64(36)) << np.uint64(8)) | ((d >> np.uint64(36)) << np.uint64(12))
        low = (a & _QUAD) | (b << np.uint64(36))
        middle = ((b & _QUAD) >> np.uint64(28)) | ((c & _QUAD) << np.uint64(8)) | (d << np.uint64(44))
        high = ((d & _QUAD) >> np.uint64(20)) | (signs << np.uint64(16))
        words[5 * n], words[5 * n + 1] = np.uint32(low), np.uint32(low >> np.uint64(32))
        words[5 * n + 2], words[5 * n + 3] = np.uint32(middle), np.uint32(middle >> np.uint64(32))
        words[5 * n + 4] = np.uint32(high)


@njit(nogil=True, cache=KEEP, error_model="numpy")
def _unpack(words, pairs, quads, codes):
    """The inverse of `_pack`."""
    for n in range(codes.size // 16):
        low = np.uint64(words[5 * n]) | np.uint64(words[5 * n + 1]) << np.uint64(32)
        middle = np.uint64(words[5 * n + 2]) | np.uint64(words[5 * n + 3]) << np.uint64(32)
        high = np.uint64(words[5 * n + 4])
        signs = (high >> np.uint64(16)) << np.uint64(36)
        quads[4 * n] = (low & _QUAD) | (signs & _QUAD_SIGNS)
        b = (low >> np.uint64(36)) | (middle << np.uint64(28))
        quads[4 * n + 1] = (b & _QUAD) | ((signs >> np.uint64(4)) & _QUAD_SIGNS)
        quads[4 * n + 2] = ((middle >> np.uint64(8)) & _QUAD) | ((signs >> np.uint64(8)) & _QUAD_SIGNS)
        d = (middle >> np.uint64(44)) | (high << np.uint64(20))
        quads[4 * n + 3] = (d & _QUAD) | ((signs >> np.uint64(12)) & _QUAD_SIGNS)
    for n in range(codes.size // 4):
        q = quads[n]
        pairs[2 * n] = np.uint32((q & _PAIR) | (((q >> np.uint64(36)) & np.uint64(3)) << np.uint64(18)))
        pairs[2 * n + 1] = np.uint32(((q >> np.uint64(18)) & _PAIR) | ((q >> np.uint64(38)) << np.uint64(18)))
    for n in range(codes.size // 2):
        p = pairs[n]
        sign = np.uint32((p >> np.uint32(9)) & np.uint32(0x200))
        codes[2 * n] = np.uint16((p & np.uint32(0x1FF)) | sign)
        sign = np.uint32((p >> np.uint32(10)) & np.uint32(0x200))
        codes[2 * n + 1] = np.uint16(np.uint32((p >> np.uint32(9)) & np.uint32(0x1FF)) | sign)


@njit(nogil=True)
def _buffers():
    """Room for one chunk: codes, pairs, quads, words."""
    return (
        np.empty(_LONGEST_CHUNK, np.uint16),
        np.empty(_LONGEST_CHUNK // 2, np.uint32),
        np.empty(_LONGEST_CHUNK // 4, np.uint64),
        np.empty(_LONGEST_CHUNK * 5 // 16, np.uint32),
    )


@njit(nogil=True, cache=KEEP, error_model="numpy")
def encode_logfmt(x, num_rows, hidden, payload, sf) -> None:
    """x bfloat16 [num_rows, hidden] -> payload uint8 [num_rows, 2 * hidden], sf bfloat16 [num_rows, 2 * num_groups].

    The three are addresses of contiguous arrays, num_groups = ceil(hidden / 128). The payload behind the used bytes is
    zeroed.
    Bytes moved: 4 * hidden per row and the scale factors. Worked example: `formats.logfmt`.
    """
    num_groups = (hidden + _GROUP - 1) // _GROUP
    size = _LONGEST_CHUNK if hidden % _LONGEST_CHUNK == 0 else _LONGEST_CHUNK // 2
    codes, pairs, quads, words = _buffers()
    for i in range(num_rows):
        row = view(x + 2 * hidden * i, hidden, np.uint16)
        limits = view(sf + 4 * num_groups * i, 2 * num_groups, np.uint16)
        for g in range(num_groups):
            limits[2 * g], limits[2 * g + 1] = _limits(row[g * _GROUP : min(hidden, (g + 1) * _GROUP)])
        at = payload + 2 * hidden * i
        end = at + 2 * hidden
        for start in range(0, hidden, size):
            width = min(size, hidden - start)
            if not _is_cast(limits, start // _GROUP, width):
                copy_bytes(at, x + 2 * (hidden * i + start), 2 * width)
                at += 2 * width
                continue
            for first in range(0, width, _GROUP):
                last = min(width, first + _GROUP)
                g = (start + first) // _GROUP
                _encode_group(row[start + first : start + last], limits[2 * g], limits[2 * g + 1], codes[first:last])
            _pack(codes[:width], pairs, quads, words)
            copy_bytes(at, words.ctypes.data, width * 5 // 4)
            at += width * 5 // 4
        rest = view(at, end - at, np.uint8)
        for b in range(rest.size):
            rest[b] = np.uint8(0)


@njit(nogil=True, cache=KEEP, error_model="numpy")
def decode_logfmt(payload, sf, num_rows, hidden, out) -> None:
    """The inverse of `encode_logfmt`, up to the rounding: its payload and sf -> out float32 [num_rows, hidden].

    The three are addresses of contiguous arrays.
    Bytes moved: 5.25 to 6 * hidden per row and the scale factors. Worked example: `formats.logfmt`.
    """
    num_groups = (hidden + _GROUP - 1) // _GROUP
    size = _LONGEST_CHUNK if hidden % _LONGEST_CHUNK == 0 else _LONGEST_CHUNK // 2
    codes, pairs, quads, words = _buffers()
    for i in range(num_rows):
        row = view(out + 4 * hidden * i, hidden, np.uint32)
        limits = view(sf + 4 * num_groups * i, 2 * num_groups, np.uint16)
        at = payload + 2 * hidden * i
        for start in range(0, hidden, size):
            width = min(size, hidden - start)
            if not _is_cast(limits, start // _GROUP, width):
                exact = view(at, width, np.uint16)
                for h in range(width):
                    row[start + h] = np.uint32(np.uint32(exact[h]) << np.uint32(16))
                at += 2 * width
                continue
            copy_bytes(words.ctypes.data, at, width * 5 // 4)
            at += width * 5 // 4
            _unpack(words, pairs, quads, codes[:width])
            for first in range(0, width, _GROUP):
                last = min(width, first + _GROUP)
                g = (start + first) // _GROUP
                values = row[start + first : start + last]
                _decode_group(codes[first:last], limits[2 * g], limits[2 * g + 1], values)
