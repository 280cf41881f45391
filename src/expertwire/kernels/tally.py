"""What `Buffer.statistics` says of a rank on a device: int64 [2 * R + 1], added up by kernels that know the numbers.

    tally[p]        rows sent to rank p, one per (token, rank)
    tally[R + p]    rows received from rank p
    tally[2 * R]    selections that counted as -1: illegal ids, and repeats in EXPERT_SLOTS

Orders: rows are added by one block of a launch, and launches of a stream come one after another: plain loads and
stores. Bytes moved: 32 a rank. Worked example, 2 ranks, at rank 0, which
sends 3 rows to each, while rank 1 sends it 2: (3, 3, 3, 2, 0).
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_rows(tally, sent, received, void, R: tl.constexpr, RANKS: tl.constexpr):
    """sent, received [RANKS] int32. Nothing, if the step is void."""
    peers = tl.arange(0, RANKS)
    mask = peers < tl.where(void > 0, 0, R)
    tl.store(tally + peers, tl.load(tally + peers, mask=mask, other=0) + sent, mask=mask)
    tl.store(tally + R + peers, tl.load(tally + R + peers, mask=mask, other=0) + received, mask=mask)


@triton.jit
def add_dropped(
    tally, topk_idx, first, num_tokens, ids, K: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """ids [TOKENS, SLOTS]: what `routing.load_block` made of the tokens from `first` on. Any block may add."""
    token = first + tl.arange(0, TOKENS)
    slot = tl.arange(0, SLOTS)
    at = token.to(tl.int64)[:, None] * K + slot[None, :]
    given = tl.load(topk_idx + at, mask=(token < num_tokens)[:, None] & (slot < K)[None, :], other=-1)
    dropped = tl.sum(tl.reshape(((given != -1) & (ids < 0)).to(tl.int64), [TOKENS * SLOTS]), axis=0)
    if dropped > 0:
        tl.atomic_add(tally + 2 * R, dropped, sem="relaxed")
