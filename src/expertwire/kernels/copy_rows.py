"""Rows in use from one memory to another: out of the window, for tensors that the caller owns, or into it.

How many rows each group has is known on the device only. A group is cut into pieces, whose rows alternate, so that few
rows of many groups and many rows of one group both find many blocks.

Orders: plain loads and stores. Rows of peers are there, since an earlier launch of the stream has waited for them; a
later launch tells the peers that the window may be written again.
Bytes moved per row in use: 2 * (payload + scale factors + routing); decoded, 3 * hidden + scale factors + 2 * routing.
Worked example: groups begin at rows 0 and 8 and hold 3 and 2 rows: rows 0, 1, 2, 8 and 9 are copied.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.quantize import decode_blocks


@triton.jit
def _copy(source, out, row, mask, UNITS: tl.constexpr, row_bytes: tl.constexpr):
    """In units of 4 bytes, or in bytes where these do not fit."""
    unit: tl.constexpr = tl.int32 if row_bytes % 4 == 0 else tl.uint8
    units: tl.constexpr = row_bytes // 4 if row_bytes % 4 == 0 else row_bytes
    source, out = source.to(tl.pointer_type(unit)), out.to(tl.pointer_type(unit))
    column = tl.arange(0, UNITS)[None, :]
    at = row[:, None] * units + column
    mask = mask[:, None] & (column < units)
    tl.store(out + at, tl.load(source + at, mask=mask, other=0), mask=mask)


@triton.jit(do_not_specialize=["pieces"])
def copy_rows(
    payload, out, sf, sf_out, meta, meta_out, lengths, offsets, pieces,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, row_bytes: tl.constexpr,
    SF_UNITS: tl.constexpr, sf_bytes: tl.constexpr, META_UNITS: tl.constexpr, meta_bytes: tl.constexpr,
    BLOCK: tl.constexpr, UE8M0: tl.constexpr,
):  # fmt: skip
    """The first lengths[g] rows of each group g, which begins at offsets[g], ROWS at a time: payload, sf and meta, each
    of so many bytes a row, if there is an `out` for it.

    With BLOCK, rows of e4m3 values in blocks of BLOCK, with scale factors sf, become bfloat16 in `out`.
    """
    for unit in range(tl.program_id(0), GROUPS * pieces, tl.num_programs(0)):
        group = unit // pieces
        count = tl.load(lengths + group)
        begin = tl.load(offsets + group).to(tl.int64)
        for first in range(unit % pieces * ROWS, count, pieces * ROWS):
            index = first + tl.arange(0, ROWS)
            row, mask = begin + index, index < count
            if BLOCK:
                decode_blocks(payload, sf, begin + first, out, row_bytes, UNITS // BLOCK, BLOCK, sf_bytes, UE8M0)
            else:
                _copy(payload, out, row, mask, UNITS, row_bytes)
                if sf_out is not None:
                    _copy(sf, sf_out, row, mask, SF_UNITS, sf_bytes)
            if meta_out is not None:
                _copy(meta, meta_out, row, mask, META_UNITS, meta_bytes)
