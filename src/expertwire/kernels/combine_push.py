"""Rows back to the ranks of their tokens, for combine: where peers cannot read the experts' output, or not in time.

Every row knows from which rank, token and place of that token it came; it is written to that place there, in memory of
[T, SENDS] rows. Only rows in use are moved, and each has its place, so there is nothing to agree about.

Orders: plain stores, which the signal of `combine_send`, a later launch, publishes. The memory is free: the combine
before, in this bank, ended when all ranks had read what they were sent.
Bytes moved: 4 * hidden per row pushed. Worked example, 2 places a token: the row of (rank 1, token 3, place 0) is
written as row 6 of rank 1's memory.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.counts import VOID


@triton.jit
def rows_at_source(meta, row, mask, bases, SENDS: tl.constexpr, META: tl.constexpr):
    """For rows with routing meta [rows, META]: their ranks, the bases there, and which row of [T, SENDS] each is there;
    rank -1 where not `mask`, and for rows of masked ranks."""
    source = meta + row.to(tl.int64) * META
    rank = tl.load(source, mask=mask, other=-1)
    mask &= rank >= 0
    token = tl.load(source + 1, mask=mask, other=0).to(tl.int64)
    place = tl.load(source + 2, mask=mask, other=0)
    base = tl.load(bases + tl.maximum(rank, 0), mask=mask, other=0)
    return rank, base, token * SENDS + place


@triton.jit(do_not_specialize=["group_rows", "rank"])
def combine_push(
    y, meta, lengths, offsets, counts, group_rows, bases, rank,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, units: tl.constexpr, SENDS: tl.constexpr,
    META: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """y [rows, units] int32: the first lengths[g] rows of each group g, which begins at offsets[g], to `bases` [R] of
    their ranks, the own ones too if OWN. Nothing, if the dispatch is VOID in `counts`. group_rows as in `copy_rows`."""
    column = tl.arange(0, UNITS)[None, :]
    per_group = tl.cdiv(group_rows, ROWS)
    end = tl.where(tl.load(counts + VOID) == 0, GROUPS * per_group, 0)
    for unit in range(tl.program_id(0), end, tl.num_programs(0)):
        group = unit // per_group
        count = tl.load(lengths + group)
        for first in range(unit % per_group * ROWS, count, per_group * ROWS):
            index = first + tl.arange(0, ROWS)
            row = tl.load(offsets + group).to(tl.int64) + index
            to, base, at = rows_at_source(meta, row, index < count, bases, SENDS, META)
            sends = to >= 0
            if not OWN:
                sends &= to != rank
            mask = sends[:, None] & (column < units)
            values = tl.load(y + row[:, None] * units + column, mask=mask, other=0)
            out = tl.multiple_of((base + at * (4 * units)).to(tl.pointer_type(tl.int32)), 16)
            tl.store(out[:, None] + column, values, mask=mask)
