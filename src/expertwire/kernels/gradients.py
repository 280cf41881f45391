"""Backward of combine at the expert's rank: from the rows' arrived gradients to those of its output and of its weights.

Row r of the output, y, was added with weight w: its gradient is w * g, rounded once to bfloat16, and the weight's is
the dot product of g and y. Rows that nobody fills get zeros, since experts compute on them.

Orders: none of its own. The rows arrived in an earlier launch, which acquired the peers' words.

Arithmetic: the products of the dot product are rounded to float32 and summed in float32, COLUMNS at a time, in the
order of the compiler's reduction: the same at every run, but other than on the CPU, so that the last bits may differ.

Bytes moved: per row 2 * hidden written and, where it is filled, 2 * hidden read, or 4 * hidden if weighted.

Worked example, hidden 2: g = (1, 2), y = (3, -1), w = 0.5: gradient of y (0.5, 1), of w 3 - 2 = 1.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def gradient_rows(
    arrived, y, weights, out, dots, lengths, offsets, num_rows,
    GROUPS: tl.constexpr, GROUP_BINS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, hidden: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """arrived, y, out [num_rows, hidden] bfloat16; weights, dots [num_rows] float32, if WEIGHTED. Group g begins at row
    offsets[g] and has lengths[g] rows that are filled, GROUPS of them, GROUP_BINS >= that."""
    groups = tl.arange(0, GROUP_BINS)
    begins = tl.load(offsets + groups, mask=groups < GROUPS, other=0)
    for chunk in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = chunk * ROWS + tl.arange(0, ROWS)
        inside = row < num_rows
        begun = (begins[None, :] <= row[:, None]) & (groups < GROUPS)[None, :]
        group = tl.maximum(tl.sum(begun.to(tl.int32), axis=1) - 1, 0)
        known = inside & (GROUPS > 0)
        count = tl.load(lengths + group, mask=known, other=0)
        filled = row - tl.load(offsets + group, mask=known, other=0) < count
        if WEIGHTED:
            weight = tl.load(weights + row, mask=filled, other=0.0)
            dot = tl.zeros([ROWS], tl.float32)
        for first in range(0, hidden, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            at = row.to(tl.int64)[:, None] * hidden + column[None, :]
            mask = filled[:, None] & (column < hidden)[None, :]
            gradient = tl.load(arrived + at, mask=mask, other=0.0)
            if WEIGHTED:
                wide = gradient.to(tl.float32)
                dot += tl.sum(wide * tl.load(y + at, mask=mask, other=0.0).to(tl.float32), axis=1)
                gradient = tl.where(mask, wide * weight[:, None], 0.0).to(tl.bfloat16)
            tl.store(out + at, gradient, mask=inside[:, None] & (column < hidden)[None, :])
        if WEIGHTED:
            tl.store(dots + row, dot, mask=inside)
