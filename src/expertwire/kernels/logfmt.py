"""LogFMT10 for combine: rows are encoded where the experts left them, into memory of the ranks of their tokens, as
`combine_push` brings others there, and decoded there.

The bits are those of `formats.logfmt`, whose docstring has the arithmetic and a worked example; every float32 operation
that it names is rounded once (launches pass enable_fp_fusion=False). In memory a chunk stays at the place that it would
have as bfloat16, whether it was cast or not, so that nobody has to add up the sizes of the chunks before it.

Orders: as in `combine_recv`. The encoded rows are stores of an earlier launch, which `combine_send` publishes.
Bytes moved: encode 2 * hidden read and 1.25 * hidden written per row; combine 1.25 * hidden per row gathered, and 2 *
hidden per output and bias row. A chunk that is not cast is 2 bytes a value.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.formats import logfmt
from expertwire.kernels.combine_push import rows_at_source
from expertwire.kernels.counts import REFUSED, VOID
from expertwire.kernels.routing import end_combine

GROUP = tl.constexpr(logfmt.GROUP)
TOP_CODE = tl.constexpr(logfmt.TOP_CODE)
MAX_SPAN = tl.constexpr(logfmt.MAX_SPAN)
LOWEST_AMAX = tl.constexpr(logfmt.LOWEST_AMAX_BITS)
ONE = tl.constexpr(logfmt.ONE_BITS)
L0, L1, L2, L3, L4, L5, L6, L7 = (tl.constexpr(c) for c in logfmt.LOG2_1P)
Q0, Q1, Q2, Q3, Q4, Q5 = (tl.constexpr(c) for c in logfmt.EXP2_NEG)


@triton.jit
def _log2_mantissa(bits):
    """L(m - 1) of bfloat16 magnitudes m * 2^e, given as int32 bits."""
    z = (bits & 0x7F).to(tl.float32) * (1 / 128)
    return ((((((z * L7 + L6) * z + L5) * z + L4) * z + L3) * z + L2) * z + L1) * z + L0


@triton.jit
def _exp2_neg(f):
    return ((((f * Q5 + Q4) * f + Q3) * f + Q2) * f + Q1) * f + Q0


@triton.jit
def _grid_step(amax, amin):
    """Bits of the limits -> log2 of the ratio of neighbours on the grid."""
    span = ((amax >> 7) - (amin >> 7)).to(tl.float32) + (_log2_mantissa(amax) - _log2_mantissa(amin))
    return tl.div_rn(tl.minimum(span, MAX_SPAN), tl.zeros_like(span) + (TOP_CODE - 1))


@triton.jit
def _grid(amax, step, below):
    """The grid values `below` codes under amax: (amax * Q(f)) * 2^-i with i + f = below * step."""
    t = below.to(tl.float32) * step
    i = t.to(tl.int32)
    power_of_two = ((127 - i) << 23).to(tl.float32, bitcast=True)
    return amax * _exp2_neg(t - i.to(tl.float32)) * power_of_two


@triton.jit
def _is_cast(amax, amin, inside, width):
    """Whether a chunk of `width` values with these limits travels in ten bits; `inside`: groups that exist."""
    fits = (amax >= LOWEST_AMAX) & (amax < ONE) & (amin < amax)
    return (tl.min((fits | ~inside).to(tl.int32), axis=0) > 0) & (width % 16 == 0)


@triton.jit
def _codes(magnitude, amax, amin):
    """Bits of |x| [G, 128] -> codes. The estimate is the code or the one below; one comparison decides."""
    step = _grid_step(amax, amin)
    half = (_exp2_neg(step) + 1.0) * 0.5
    octaves = ((amax >> 7)[:, None] - (magnitude >> 7)).to(tl.float32)
    octaves += _log2_mantissa(amax)[:, None] - _log2_mantissa(magnitude)
    position = -octaves / step[:, None] + TOP_CODE
    low = tl.minimum(tl.maximum(position, 0.0), TOP_CODE - 1.0).to(tl.int32)
    limit = (amax << 16).to(tl.float32, bitcast=True)
    edge = _grid(limit[:, None], step[:, None], -low + (TOP_CODE - 1)) * half[:, None]
    return low + ((magnitude << 16).to(tl.float32, bitcast=True) >= edge).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "sf_at"])
def encode_rows(
    rows, meta, lengths, offsets, counts, num_rows, bases, sf_at,
    R: tl.constexpr, GROUPS: tl.constexpr, GROUP_BINS: tl.constexpr, hidden: tl.constexpr, CHUNK: tl.constexpr,
    SENDS: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """rows [num_rows, hidden] bfloat16 as int16, with routing meta [num_rows, META], to `bases` [R]: there, payload
    [T * SENDS, hidden] int16 and, sf_at bytes behind, limits [T * SENDS, 2 * ceil(hidden / 128)] int16. Only rows that
    are filled: groups of rows as in `gradients`. CHUNK: values of a chunk."""
    per_chunk: tl.constexpr = CHUNK // GROUP
    num_groups: tl.constexpr = (hidden + GROUP - 1) // GROUP
    groups = tl.arange(0, GROUP_BINS)
    begins = tl.load(offsets + groups, mask=groups < GROUPS, other=0)
    index = tl.arange(0, per_chunk)
    v = tl.arange(0, 16)
    if R > 1:
        num_rows = tl.where(tl.load(counts + VOID) == 0, num_rows, 0)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        group = tl.maximum(tl.sum(((begins <= row) & (groups < GROUPS)).to(tl.int32), axis=0) - 1, 0)
        count = tl.load(lengths + group, mask=GROUPS > 0, other=0)
        first = tl.zeros([1], tl.int64) + row
        filled = first - tl.load(offsets + group, mask=GROUPS > 0, other=0) < count
        rank, base, index_there = rows_at_source(meta, first, filled, bases, SENDS, META)
        if tl.max(rank, axis=0) >= 0:
            payload = (base + index_there * (2 * hidden)).to(tl.pointer_type(tl.int16))
            sf = (base + sf_at + index_there * (4 * num_groups)).to(tl.pointer_type(tl.int16))
            for start in range(0, hidden, CHUNK):
                column = start + index[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
                at = first[:, None] * hidden + column
                inside = column < hidden
                bits = tl.load(rows + at, mask=inside, other=0).to(tl.int32) & 0xFFFF
                magnitude = bits & 0x7FFF
                amax = tl.max(tl.where(inside, magnitude, 0), axis=1)
                amin = tl.min(tl.where(inside, magnitude, 0x7FFF), axis=1)
                nth = start // GROUP + index
                limits = sf + nth * 2
                tl.store(limits, amax.to(tl.int16), mask=nth < num_groups)
                tl.store(limits + 1, amin.to(tl.int16), mask=nth < num_groups)
                width = tl.minimum(hidden - start, CHUNK)
                if _is_cast(amax, amin, nth < num_groups, width):
                    code = tl.reshape(_codes(magnitude, amax, amin), [CHUNK // 16, 16])
                    sign = tl.reshape(bits >> 15, [CHUNK // 16, 16])
                    block = tl.arange(0, CHUNK // 16)
                    words = (payload + start).to(tl.pointer_type(tl.int32), bitcast=True) + block * 5
                    for w in tl.static_range(5):
                        shift = (v * 9 - 32 * w)[None, :]
                        left = code << tl.minimum(tl.maximum(shift, 0), 31)
                        right = code >> tl.minimum(tl.maximum(-shift, 0), 31)
                        part = tl.where(shift >= 32, 0, tl.where(shift >= 0, left, right))
                        if w == 4:
                            part = part | (sign << (16 + v)[None, :])
                        tl.store(words + w, tl.sum(part, axis=1), mask=block * 16 < width)
                else:
                    tl.store(payload[:, None] + column, bits.to(tl.int16), mask=inside)


@triton.jit
def _load_chunk(row, sf, start, width, hidden: tl.constexpr, CHUNK: tl.constexpr):
    """One chunk of an encoded row, [CHUNK // 128, 128] float32; row, sf: where it and its limits begin."""
    per_chunk: tl.constexpr = CHUNK // GROUP
    index = tl.arange(0, per_chunk)
    nth = start // GROUP + index
    exists = nth * GROUP < hidden
    limits = sf.to(tl.pointer_type(tl.int16), bitcast=True) + nth * 2
    amax = tl.load(limits, mask=exists, other=0).to(tl.int32) & 0xFFFF
    amin = tl.load(limits + 1, mask=exists, other=0).to(tl.int32) & 0xFFFF
    inner = index[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.zeros([per_chunk, GROUP], tl.float32)
    if _is_cast(amax, amin, exists, width):
        words = (row + start * 2).to(tl.pointer_type(tl.int32), bitcast=True) + inner // 16 * 5
        v = inner % 16
        shift = v * 9 % 32
        low = tl.load(words + v * 9 // 32, mask=inner < width, other=0).to(tl.uint32, bitcast=True)
        high = tl.load(words + tl.minimum(v * 9 // 32 + 1, 4), mask=inner < width, other=0)
        signs = tl.load(words + 4, mask=inner < width, other=0).to(tl.uint32, bitcast=True)
        both = (high.to(tl.int64) & 0xFFFFFFFF) << 32 | low.to(tl.int64)
        code = (both >> shift.to(tl.int64)).to(tl.int32) & 0x1FF
        limit = (amax << 16).to(tl.float32, bitcast=True)
        value = _grid(limit[:, None], _grid_step(amax, amin)[:, None], -code + TOP_CODE)
        negative = (signs >> (16 + v).to(tl.uint32)) & 1
        found = tl.where(code == 0, 0, value.to(tl.int32, bitcast=True)) | (negative.to(tl.int32) << 31)
        value = found.to(tl.float32, bitcast=True)
    else:
        raw = tl.load(
            (row + start * 2).to(tl.pointer_type(tl.int16), bitcast=True) + inner, mask=inner < width, other=0
        )
        value = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value


@triton.jit(do_not_specialize=["rank", "num_tokens", "timeout_us"])
def combine_logfmt(
    where, topk_weights, bias0, bias1, out, counts, num_tokens, timeout_us,
    payload, sf, word_bases, tickets, dispatch_words, dispatch_epochs, status, rank,
    R: tl.constexpr, RANKS: tl.constexpr, BANKS: tl.constexpr, SENDS: tl.constexpr, CHUNK: tl.constexpr,
    PARTS: tl.constexpr, hidden: tl.constexpr, WEIGHTED: tl.constexpr, NUM_BIASES: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    """As `combine_gather`, of encoded rows that were brought here, `payload` [T * SENDS, 2 * hidden] uint8, with their
    limits `sf`. A unit of work is one chunk of one token, PARTS of them a row."""
    sf_bytes: tl.constexpr = (hidden + GROUP - 1) // GROUP * 4
    per_chunk: tl.constexpr = CHUNK // GROUP
    if R > 1:
        num_tokens = tl.where(tl.load(counts + REFUSED) > 0, 0, num_tokens)
    inner = tl.arange(0, per_chunk)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    for unit in range(tl.program_id(0), num_tokens * PARTS, tl.num_programs(0)):
        token = unit // PARTS
        start = unit % PARTS * CHUNK
        width = tl.minimum(hidden - start, CHUNK)
        at = (tl.zeros([1, 1], tl.int64) + token) * hidden + start + inner
        total = tl.zeros([per_chunk, GROUP], tl.float32)
        if NUM_BIASES > 0:
            total += tl.load(bias0 + at, mask=inner < width, other=0.0).to(tl.float32)
        if NUM_BIASES > 1:
            total += tl.load(bias1 + at, mask=inner < width, other=0.0).to(tl.float32)
        for nth in range(SENDS):
            place = tl.load(where + token * SENDS + nth)
            if place >= 0:
                index = token.to(tl.int64) * SENDS + nth
                value = _load_chunk(payload + index * (2 * hidden), sf + index * sf_bytes, start, width, hidden, CHUNK)
                if WEIGHTED:
                    value = value * tl.load(topk_weights + token * SENDS + nth)
                total += value
        tl.store(out + at, total.to(tl.bfloat16), mask=inner < width)
    if R > 1:
        end_combine(
            counts, word_bases, tickets, dispatch_words, dispatch_epochs, rank, status, timeout_us, R, RANKS, BANKS,
            FINISH,
        )  # fmt: skip
