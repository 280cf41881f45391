"""The arithmetic of combine: float32 from +0, biases first, slots ascending, one rounding to bfloat16.

Products and sums are not fused: the launch passes enable_fp_fusion=False. Rows are plain loads, wherever they lie; the
caller has acquired the words that vouch for them.

`where` [T, SENDS] int64 names a token's rows, rank << 40 | row, -1 = none. With one rank they are rows of y. Otherwise
row_bases [R] int64 are the addresses of every rank's rows; where that is 0, they were pushed: they are rows of y
[T, SENDS, hidden], one for each place, and y is None if no rank pushes.

Worked examples, hidden 1. Rows 1.0 and 3.0 with weights 0.5 and 2.0, bias 1.0: `sum_rows` gives 0 + 1 + 0.5 + 6 = 7.5.
Rows 256.0, 1.0 on rank 0 and 1.0, 1.0 on rank 1: `sum_rows` gives 260 (259 rounded), `sum_ranks` 256 (257 rounded) + 2
= 258.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.routing import WHERE_RANK, WHERE_ROW


@triton.jit
def _sum_biases(bias0, bias1, at, mask, ROWS: tl.constexpr, COLUMNS: tl.constexpr, NUM_BIASES: tl.constexpr):
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if NUM_BIASES > 0:
        total += tl.load(bias0 + at, mask=mask, other=0.0).to(tl.float32)
    if NUM_BIASES > 1:
        total += tl.load(bias1 + at, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _load_rows(y, row_bases, place, listed, present, columns, R: tl.constexpr, hidden: tl.constexpr):
    """Some columns of the rows at `place` [ROWS], entries `listed` of `where`, in float32; +0 where not `present`."""
    if R == 1:
        row = tl.multiple_of(y + place * hidden, 16)
    else:
        base = tl.load(row_bases + (tl.maximum(place, 0) >> WHERE_RANK), mask=present, other=0)
        address = base + (place & WHERE_ROW) * (2 * hidden)
        if y is not None:
            address = tl.where(base == 0, y.to(tl.int64) + listed * (2 * hidden), address)
        row = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16)
    inside = (columns < hidden)[None, :]
    return tl.load(row[:, None] + columns[None, :], mask=present[:, None] & inside, other=0.0).to(tl.float32)


@triton.jit
def sum_rows(
    y, row_bases, where, weights, bias0, bias1, out, tokens, columns, num_tokens,
    R: tl.constexpr, SENDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, hidden: tl.constexpr,
    WEIGHTED: tl.constexpr, NUM_BIASES: tl.constexpr,
):  # fmt: skip
    """out[token] = biases + sum over places of weight * row, for ROWS tokens and some columns."""
    live = tokens < num_tokens
    at = tokens[:, None] * hidden + columns[None, :]
    mask = live[:, None] & (columns < hidden)[None, :]
    total = _sum_biases(bias0, bias1, at, mask, ROWS, COLUMNS, NUM_BIASES)
    for nth in tl.static_range(SENDS):
        listed = tokens * SENDS + nth
        place = tl.load(where + listed, mask=live, other=-1)
        present = place >= 0
        value = _load_rows(y, row_bases, place, listed, present, columns, R, hidden)
        if WEIGHTED:
            weight = tl.load(weights + listed, mask=live, other=0.0)
            value = tl.where(present[:, None], value * weight[:, None], 0.0)
        total += value  # adding +0 for an absent row changes nothing, since a sum from +0 is never -0
    tl.store(out + at, total.to(tl.bfloat16), mask=mask)


@triton.jit
def sum_ranks(
    y, row_bases, where, weights, bias0, bias1, out, tokens, columns, num_tokens,
    R: tl.constexpr, SENDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, hidden: tl.constexpr,
    WEIGHTED: tl.constexpr, NUM_BIASES: tl.constexpr,
):  # fmt: skip
    """As if every rank had summed its rows of a token and sent the sum as one bfloat16 row: `sum_rows` over those, in
    order of the highest slot that each rank serves."""
    live = tokens < num_tokens
    at = tokens[:, None] * hidden + columns[None, :]
    mask = live[:, None] & (columns < hidden)[None, :]
    total = _sum_biases(bias0, bias1, at, mask, ROWS, COLUMNS, NUM_BIASES)
    for last in range(SENDS):
        rank = tl.load(where + tokens * SENDS + last, mask=live, other=-1) >> WHERE_RANK  # -1 stays -1
        is_last = rank >= 0
        for later in range(last + 1, SENDS):
            is_last &= (tl.load(where + tokens * SENDS + later, mask=live, other=-1) >> WHERE_RANK) != rank
        of_rank = tl.zeros([ROWS, COLUMNS], tl.float32)
        for nth in range(last + 1):
            listed = tokens * SENDS + nth
            place = tl.load(where + listed, mask=live, other=-1)
            present = is_last & (place >> WHERE_RANK == rank)
            value = _load_rows(y, row_bases, place, listed, present, columns, R, hidden)
            if WEIGHTED:
                weight = tl.load(weights + listed, mask=present, other=0.0)
                value = tl.where(present[:, None], value * weight[:, None], 0.0)
            of_rank += value
        total += of_rank.to(tl.bfloat16).to(tl.float32)
    tl.store(out + at, total.to(tl.bfloat16), mask=mask)
