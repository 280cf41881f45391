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
    token = tl.load(source + 1, mask=mask, other=0).to(tl.int64)
    place = tl.load(source + 2, mask=mask, other=0)
    base = tl.load(bases + tl.maximum(rank, 0))
    return rank, base, token * SENDS + place


@triton.jit(do_not_specialize=["rank", "pieces"])
def combine_push(
    output, meta, lengths, offsets, counts, bases, rank, pieces, targets,
    GROUPS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, units: tl.constexpr,
    SENDS: tl.constexpr, META: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """output [rows, units] int32: the first lengths[g] rows of each group g, which begins at offsets[g], to `bases` [R]
    of their ranks, the own ones too if OWN. Nothing, if the dispatch is VOID in `counts`.

    A group is cut into `pieces`, whose chunks of CHUNK rows alternate. A block first finds where the rows of a chunk
    go, in its part of targets [blocks, CHUNK], and then moves ROWS at a time: rows wait for one more load, not for
    their routing and what follows from that.
    """
    column = tl.arange(0, UNITS)[None, :]
    mine = targets + tl.program_id(0) * CHUNK
    end = tl.where(tl.load(counts + VOID) == 0, GROUPS * pieces, 0)
    for unit in range(tl.program_id(0), end, tl.num_programs(0)):
        group = unit // pieces
        count = tl.load(lengths + group)
        begin = tl.load(offsets + group).to(tl.int64)
        for first in range(unit % pieces * CHUNK, count, pieces * CHUNK):
            index = first + tl.arange(0, CHUNK)
            to, base, at = rows_at_source(meta, begin + index, index < count, bases, SENDS, META)
            sends = (to >= 0) if OWN else (to >= 0) & (to != rank)
            tl.store(mine + tl.arange(0, CHUNK), tl.where(sends, base + at * (4 * units), 0))
            tl.debug_barrier()
            for tile in range(0, tl.minimum(CHUNK, count - first), ROWS):
                nth = tile + tl.arange(0, ROWS)
                target = tl.load(mine + nth)
                mask = (target != 0)[:, None] & (column < units)
                values = tl.load(output + (begin + first + nth)[:, None] * units + column, mask=mask, other=0)
                target = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
                tl.store(target[:, None] + column, values, mask=mask)
            tl.debug_barrier()
