"""The parts of a step's counts for kernels: `layouts.step_counts`. Worked example: there."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.layouts import step_counts

NUM_ROWS = tl.constexpr(step_counts.NUM_ROWS)
VOID = tl.constexpr(step_counts.VOID)
REFUSED = tl.constexpr(step_counts.REFUSED)
REPEATED = tl.constexpr(step_counts.REPEATED)
NUMBER = tl.constexpr(step_counts.NUMBER)
COMBINE = tl.constexpr(step_counts.COMBINE)
PER_RANK = tl.constexpr(step_counts.PER_RANK)


@triton.jit
def combine_number(counts):
    """Pointer to the number of the combine under way."""
    return (counts + COMBINE).to(tl.pointer_type(tl.int64))


@triton.jit
def sent_to(counts, R: tl.constexpr):
    """Pointer to the rows sent to each rank."""
    return counts + PER_RANK + (R + 3) // 4 * 4


@triton.jit
def per_expert(counts, R: tl.constexpr):
    """Pointer to the selections of each local expert."""
    return counts + PER_RANK + (R + 3) // 4 * 8


@triton.jit
def padded_per_expert(counts, L, R: tl.constexpr):
    """Pointer to the same with padding, of L local experts."""
    return per_expert(counts, R) + (L + 3) // 4 * 4


@triton.jit
def offsets_of(counts, L, R: tl.constexpr):
    """Pointer to where the rows of each local expert begin."""
    return per_expert(counts, R) + (L + 3) // 4 * 8
