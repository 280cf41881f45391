"""LogFMT10: ten bits per value on a logarithmic grid, for the way back (combine).

A row is cut into chunks of 1024 channels if hidden is a multiple of 1024, else of 512; the last chunk may be shorter.
Chunks are cut into groups of 128 (the last may be shorter). Each group has two numbers, amax and amin: the largest and
the smallest |x|, in bfloat16, so exactly. A chunk is **cast** to ten bits per value only if it is a multiple of 16
channels wide and every group of it has 2^-64 <= amax < 1 and amin < amax; else it travels as bfloat16, unchanged. So a
NaN, an Inf, a value of 1 or more, a group of zeros or of one magnitude keeps its chunk exact.

**Grid.** A value becomes a sign and a code 0..511: 0 is zero, 511 is amax, 1 is max(amin, amax * 2^-32), and the others
lie between at equal ratios. To give the same bits everywhere, the grid is defined by float32 operations, each rounded
once to nearest, none fused, no library functions:

    log2(v)  = e + L(m - 1)                 v = m * 2^e with 1 <= m < 2, from the bits of v: e = (bits >> 7) - 127
    span     = (e_amax - e_amin) + (L(m_amax - 1) - L(m_amin - 1)), at most 32
    step     = span / 510
    grid(c)  = (amax * Q(f)) * 2^-i         t = (511 - c) * step,  i = floor(t),  f = t - i
    half     = (1 + Q(step)) * 0.5
    edge(c)  = grid(c) * half               halfway from grid(c) / 2^step to grid(c)

L(z) is about log2(1 + z) and Q(f) is about 2^-f: the polynomials below, by Horner's rule. (step < 1 / 15, so Q(step)
needs no floor. The exponents of subnormal v and of 0 come out as -127, which the limit of 32 swallows.)

**Encode**: the code of x is the number of c in 1..511 with edge(c) <= |x|: rounding to nearest in the linear domain,
ties away from zero. edge is strictly increasing, so a kernel may estimate
c = 511 - round((log2 amax - log2 |x|) / step) with any logarithm good to a tenth of a step, clip it to 0..511, then
correct it once: down if c >= 1 and |x| < edge(c), up if c <= 510 and |x| >= edge(c + 1).
**Decode**: sign * grid(code), or signed zero for code 0, in float32.

**Error**: with s = span / 510 of the group, |x' - x| <= |x| * (1.001 * tanh(0.3466 s) + 2^-20) after
`decode_float32`: half a step, at most 2.18 %. Values below amax * 2^-32 * (1 + 2^-s) / 2 become zero. Chunks that are
not cast have no error.

**Wire**: sf is amax, amin of each group in turn, bfloat16 `[T, 2 * ceil(H / 128)]`. From it the reader knows which
chunks were cast. The payload is the chunks back to back, little-endian: 20 bytes per 16 values in a cast chunk, 2 bytes
per value in the others; what is left of the 2 * H bytes is zero and need not travel (`used_bytes`). Sixteen values make
one 160-bit number, five uint32 words with the lowest first: the code of value v is bits 9v .. 9v + 8, its sign bit
144 + v.

**Worked example**: 128 channels, x[0] = 0.5, x[1] = -0.25, all others 0.125. Then amax = 0.5, amin = 0.125, span = 2,
step = 2 / 510; the codes are 511, 256 and then 1s; grid(256) = 0.25. The first five words are 0x080601ff, 0x80402010,
0x04020100, 0x40201008, 0x00020080 (bit 17 of the fifth is the sign of value 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from expertwire._math import ceil_div
from expertwire.formats.wire import checked_input, checked_part, divide

GROUP = 128
TOP_CODE = 511
MAX_SPAN = 32.0
LOWEST_AMAX_BITS = 0x1F80  # 2^-64: every grid point and edge stays a normal float32
ONE_BITS = 0x3F80

# Lowest power first; each is exactly a float32. |L(z) - log2(1 + z)| < 4e-7 with L(0) = 0 and L(1) = 1;
# |Q(f) - 2^-f| < 2e-7 with Q(0) = 1 and Q(1) = 0.5, so both join from one octave to the next.
LOG2_1P = (
    0.0,
    1.4426664113998413,
    -0.7205542325973511,
    0.473324179649353,
    -0.32514017820358276,
    0.19302965700626373,
    -0.07853496819734573,
    0.015209108591079712,
)
EXP2_NEG = (
    1.0,
    -0.6931442022323608,
    0.2401840090751648,
    -0.05530739948153496,
    0.009216000325977802,
    -0.0009484250331297517,
)

_SLAB = 2048  # groups encoded at a time: bounds the memory of their 511 edges


@dataclass(frozen=True)
class LogFMT10:
    """Ten-bit logarithmic rows where the values allow it; the module docstring defines every bit.

    payload uint8 `[T, 2 * H]` (a row of cast chunks fills 1.25 * H of it), sf bfloat16 `[T, 2 * ceil(H / 128)]`.

    >>> LogFMT10().payload_bytes(7168), LogFMT10().sf_bytes(7168)
    (14336, 224)
    """

    name: ClassVar[str] = "logfmt10"
    payload_dtype: ClassVar[torch.dtype] = torch.uint8
    sf_dtype: ClassVar[torch.dtype] = torch.bfloat16

    def payload_bytes(self, hidden: int) -> int:
        """The most a row can need: no chunk cast."""
        return 2 * hidden

    def sf_bytes(self, hidden: int) -> int:
        return 4 * ceil_div(hidden, GROUP)

    def chunks(self, hidden: int) -> list[tuple[int, int]]:
        """First channel and width of each chunk.

        >>> LogFMT10().chunks(1100)
        [(0, 512), (512, 512), (1024, 76)]
        """
        size = 1024 if hidden % 1024 == 0 else 512
        return [(start, min(size, hidden - start)) for start in range(0, hidden, size)]

    def cast_chunks(self, sf: torch.Tensor, hidden: int) -> torch.Tensor:
        """From the metadata: which chunks of each row travel in ten bits, bool `[T, num_chunks]`."""
        bits = sf.contiguous().view(torch.int16)
        amax, amin = bits[:, 0::2], bits[:, 1::2]
        fits = (amax >= LOWEST_AMAX_BITS) & (amax < ONE_BITS) & (amin < amax)
        chunks = [
            fits[:, start // GROUP : ceil_div(start + width, GROUP)].all(dim=1) & (width % 16 == 0)
            for start, width in self.chunks(hidden)
        ]
        return torch.stack(chunks, dim=1)

    def used_bytes(self, sf: torch.Tensor, hidden: int) -> torch.Tensor:
        """Payload bytes that each row fills, int32 `[T]`; zeros follow up to `payload_bytes`."""
        widths = torch.tensor([width for _, width in self.chunks(hidden)], dtype=torch.int32, device=sf.device)
        return torch.where(self.cast_chunks(sf, hidden), widths * 5 // 4, widths * 2).sum(dim=1, dtype=torch.int32)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """bfloat16 `[T, H]` -> payload uint8 `[T, 2 * H]`, sf bfloat16 `[T, 2 * ceil(H / 128)]`."""
        x = checked_input(self.name, x).contiguous()
        rows, hidden = x.shape
        magnitude = _in_groups(x.view(torch.int16) & 0x7FFF)  # as integers they sort like |x|, NaN above Inf
        limits = torch.stack([magnitude.amax(dim=2), magnitude.amin(dim=2)], dim=2)
        sf = limits.flatten(1).view(torch.bfloat16)

        payload = x.new_zeros(rows, self.payload_bytes(hidden), dtype=torch.uint8)
        for channels, groups, cast, at in self._walk(sf, hidden):
            chunk = x[:, channels]
            _put(payload, ~cast, at, chunk[~cast].view(torch.uint8))
            if cast.any():
                codes = encode_groups(limits[cast, groups], magnitude[cast, groups]).flatten(1)
                _put(payload, cast, at, pack(codes[:, : chunk.shape[1]], chunk[cast].signbit()))
        return payload, sf

    def decode_float32(self, payload: torch.Tensor, sf: torch.Tensor | None, hidden: int) -> torch.Tensor:
        """Payload and sf as `encode` made them -> float32 `[T, H]`."""
        rows = payload.shape[0]
        payload = checked_part(self.name, "payload", payload, self.payload_dtype, [rows, self.payload_bytes(hidden)])
        sf = checked_part(self.name, "sf", sf, self.sf_dtype, [rows, 2 * ceil_div(hidden, GROUP)])
        limits = sf.contiguous().view(torch.int16).view(rows, ceil_div(hidden, GROUP), 2)

        out = torch.empty(rows, hidden, dtype=torch.float32, device=payload.device)
        for channels, groups, cast, at in self._walk(sf, hidden):
            chunk = out[:, channels]
            width = chunk.shape[1]
            chunk[~cast] = _take(payload, ~cast, at, 2 * width).view(torch.bfloat16).float()
            if cast.any():
                codes, negative = unpack(_take(payload, cast, at, width * 5 // 4))
                values = decode_groups(limits[cast, groups], _in_groups(codes)).flatten(1)[:, :width]
                chunk[cast] = torch.where(negative, -values, values)
        return out

    def decode_bfloat16(self, payload: torch.Tensor, sf: torch.Tensor | None, hidden: int) -> torch.Tensor:
        """Payload and sf as `encode` made them -> bfloat16 `[T, H]`."""
        return self.decode_float32(payload, sf, hidden).bfloat16()

    def _walk(self, sf: torch.Tensor, hidden: int) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor]]:
        """Per chunk: its channels, its groups, which rows cast it, and at which payload byte each row has it."""
        at = torch.zeros(sf.shape[0], dtype=torch.int64, device=sf.device)
        for (start, width), cast in zip(self.chunks(hidden), self.cast_chunks(sf, hidden).unbind(1), strict=True):
            stop = start + width
            yield slice(start, stop), slice(start // GROUP, ceil_div(stop, GROUP)), cast, at
            at = at + torch.where(cast, width * 5 // 4, 2 * width)


def pack(codes: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """Codes 0..511 and signs `[N, width]` -> uint8 `[N, 20 * (width // 16)]`; width is a multiple of 16."""
    count, width = codes.shape
    c = codes.to(torch.int64).view(count, width // 16, 16)
    signs = negative.to(torch.int64).view(count, width // 16, 16)
    words = torch.zeros(count, width // 16, 6, dtype=torch.int64, device=codes.device)
    for v in range(16):
        word, shift = divmod(9 * v, 32)
        words[:, :, word] |= c[:, :, v] << shift & 0xFFFFFFFF
        words[:, :, word + 1] |= c[:, :, v] << shift >> 32
        words[:, :, 4] |= signs[:, :, v] << (16 + v)
    octets = words[:, :, :5].unsqueeze(3) >> torch.arange(0, 32, 8, device=codes.device) & 0xFF
    return octets.flatten(1).to(torch.uint8)


def unpack(octets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `pack`: codes int64 and signs bool, `[N, width]` both."""
    count, used = octets.shape
    o = octets.to(torch.int64).view(count, used // 20, 20)
    values = range(16)
    codes = [(o[:, :, 9 * v // 8] | o[:, :, 9 * v // 8 + 1] << 8) >> (9 * v % 8) & 0x1FF for v in values]
    signs = [o[:, :, 18 + v // 8] >> (v % 8) & 1 for v in values]
    return torch.stack(codes, dim=2).flatten(1), torch.stack(signs, dim=2).flatten(1).bool()


def encode_groups(limits: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """Bits of (amax, amin) int16 `[N, G, 2]` and of |x| int16 `[N, G, 128]` -> codes int64 `[N, G, 128]`.

    Every group must be one that may be cast.
    """
    all_codes = torch.arange(1, TOP_CODE + 1, device=limits.device)
    codes = []
    for lim, mag in zip(_slabs(limits), _slabs(magnitude), strict=True):
        step = grid_step(lim)
        half = (_polynomial(EXP2_NEG, step) + 1.0) * 0.5
        edges = grid(lim, step, all_codes) * half
        codes.append(torch.searchsorted(edges, mag.view(torch.bfloat16).float(), right=True))
    return torch.cat(codes).view(magnitude.shape)


def _slabs(t: torch.Tensor) -> Iterator[torch.Tensor]:
    groups = t.flatten(0, 1)
    return (groups[i : i + _SLAB] for i in range(0, groups.shape[0], _SLAB))


def decode_groups(limits: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Bits of (amax, amin) int16 `[N, G, 2]` and codes `[N, G, 128]` -> float32 magnitudes `[N, G, 128]`."""
    lim = limits.flatten(0, 1)
    flat = codes.flatten(0, 1)
    return torch.where(flat == 0, 0.0, grid(lim, grid_step(lim), flat)).view(codes.shape)


def grid_step(limits: torch.Tensor) -> torch.Tensor:
    """Bits of (amax, amin) int16 `[N, 2]` -> float32 `[N, 1]`: log2 of the ratio of neighbours on the grid."""
    bits = limits.to(torch.int32)
    exponent, fraction = bits >> 7, (bits & 0x7F).float() / 128
    log2_m = _polynomial(LOG2_1P, fraction)
    span = (exponent[:, :1] - exponent[:, 1:]).float() + (log2_m[:, :1] - log2_m[:, 1:])
    return divide(span.clamp(max=MAX_SPAN), float(TOP_CODE - 1), like=span)


def grid(limits: torch.Tensor, step: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """int16 `[N, 2]`, float32 `[N, 1]`, codes >= 1 `[N, M]` or `[M]` -> their values, float32 `[N, M]`."""
    amax = limits[:, :1].contiguous().view(torch.bfloat16).float()
    t = (TOP_CODE - codes).float() * step
    i = t.floor()
    power_of_two = (127 - i.to(torch.int32) << 23).view(torch.float32)
    return amax * _polynomial(EXP2_NEG, t - i) * power_of_two


def _polynomial(coefficients: tuple[float, ...], z: torch.Tensor) -> torch.Tensor:
    result = torch.full_like(z, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * z  # two statements: one rounding each
        result = result + coefficient
    return result


def _in_groups(t: torch.Tensor) -> torch.Tensor:
    """`[N, C]` -> `[N, ceil(C / 128), 128]`; a short last group repeats its last column, which changes no statistic."""
    rows, columns = t.shape
    groups = ceil_div(columns, GROUP)
    return t[:, torch.arange(groups * GROUP, device=t.device).clamp(max=columns - 1)].view(rows, groups, GROUP)


def _columns(picked: torch.Tensor, at: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of `width` bytes from `at` on, in each picked row."""
    return picked.nonzero(), at[picked].unsqueeze(1) + torch.arange(width, device=at.device)


def _put(payload: torch.Tensor, picked: torch.Tensor, at: torch.Tensor, data: torch.Tensor) -> None:
    payload[_columns(picked, at, data.shape[1])] = data


def _take(payload: torch.Tensor, picked: torch.Tensor, at: torch.Tensor, width: int) -> torch.Tensor:
    return payload[_columns(picked, at, width)]
