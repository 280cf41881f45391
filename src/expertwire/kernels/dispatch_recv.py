"""Receive half of dispatch: wait for the peers' rows; for tensors that the caller owns, copy the rows out.

Rows already lie at their final places, so that is all. The copy runs over the rows that are in use, which only the
device knows; then `give_back` tells the peers that the window may be written again.

Orders: `load_acquire` (sys) of the peers' words, then plain loads by later launches of the stream.
Bytes moved by the copy: 2 * (payload + scale factors + routing) per row in use.
Worked example: groups begin at rows 0 and 8 and hold 3 and 2 rows: rows 0, 1, 2, 8 and 9 are copied.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.routing import DONE, receive_rows, signal


@triton.jit(do_not_specialize=["rank", "timeout_us"])
def await_rows(counts, timeout_us, word_bases, epochs, status, rank, R: tl.constexpr, RANKS: tl.constexpr):
    """One block: wait for the rows of the step that was sent last in this bank; VOID of `counts` is written."""
    receive_rows(counts, word_bases, tl.load(epochs), rank, status, timeout_us, R, RANKS)


@triton.jit(do_not_specialize=["rank"])
def give_back(word_bases, epochs, rank, R: tl.constexpr, RANKS: tl.constexpr):
    """Tell the peers that the rows of the bank's last step have been read."""
    signal(word_bases, DONE, tl.load(epochs), 0, rank, R, RANKS)


@triton.jit
def export_values(values, out, size: tl.constexpr, SIZE: tl.constexpr):
    """values [size] int32 to pinned host memory. A kernel, not a copy: a copy that waits behind a kernel that waits for
    a peer may hold up the copies of that peer, where both are in one process."""
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(values + at, mask=at < size, other=0), mask=at < size)


@triton.jit(do_not_specialize=["group_rows"])
def copy_rows(
    source, out, lengths, offsets, group_rows, GROUPS: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
    units: tl.constexpr,
):  # fmt: skip
    """source, out [rows, units]: copy the first lengths[g] rows of each group g, which begins at offsets[g].

    group_rows: what a group is cut for, most have fewer; EXPERT_MAJOR may have more, if tokens name an expert twice."""
    column = tl.arange(0, UNITS)[None, :]
    per_group = tl.cdiv(group_rows, ROWS)
    for unit in range(tl.program_id(0), GROUPS * per_group, tl.num_programs(0)):
        group = unit // per_group
        count = tl.load(lengths + group)
        for first in range(unit % per_group * ROWS, count, per_group * ROWS):
            index = first + tl.arange(0, ROWS)
            row = tl.load(offsets + group).to(tl.int64) + index
            at = row[:, None] * units + column
            mask = (index < count)[:, None] & (column < units)
            tl.store(out + at, tl.load(source + at, mask=mask, other=0), mask=mask)
