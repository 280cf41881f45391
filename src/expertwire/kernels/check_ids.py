"""Which id of a dispatch is to be refused, where the call waits for the device anyway: one that is none, or, in
EXPERT_SLOTS, one that its token has named before.

The first illegal id is named, else the first repeat. So every selection gets a score, of which the largest counts:
2 * FIRST - index of illegal ids, FIRST - index of repeats, else 0; the index is token * K + slot.

Orders: scores of blocks go through the ticket (acq_rel, gpu); the last block out leaves `worst` and `ticket` as zeros.
Bytes moved: T * K ids, 16. Worked example, experts 0 to 3: [[2, 2], [1, 7], [-1, -1]] leaves (3, 7), for token 1, slot
1; without the 7 it leaves (1, 2) if ids must be distinct, else (-1, 0).
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.memory import ticket_acq_rel
from expertwire.kernels.routing import load_block

FIRST = tl.constexpr(1 << 24)  # no index is that large


@triton.jit(do_not_specialize=["num_tokens", "distinct"])
def check_ids(
    topk_idx, num_tokens, distinct, found, worst, ticket, E: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Block b looks at tokens [b * TOKENS, (b + 1) * TOKENS). Writes found [2] int64: the index of the id that is
    refused, -1 = none, and the id."""
    first = tl.program_id(0) * TOKENS
    token, slot = first + tl.arange(0, TOKENS), tl.arange(0, SLOTS)
    at = token[:, None] * K + slot[None, :]
    given = tl.load(topk_idx + at, mask=(token < num_tokens)[:, None] & (slot < K)[None, :], other=-1)
    kept = load_block(topk_idx, first, num_tokens, E, K, SLOTS, TOKENS, True)
    illegal = (given < -1) | (given >= E)
    repeat = (given != -1) & (kept < 0) & (distinct != 0)
    score = tl.max(tl.ravel(tl.where(illegal, 2 * FIRST - at, tl.where(repeat, FIRST - at, 0))), axis=0)
    if score > 0:
        tl.atomic_max(worst, score, sem="relaxed")
    if ticket_acq_rel(ticket) == tl.num_programs(0) - 1:
        tl.store(ticket, 0)
        score = tl.atomic_xchg(worst, 0, sem="relaxed")
        index = tl.where(score > 0, (2 * FIRST - score) & (FIRST - 1), -1)
        tl.store(found, index)
        tl.store(found + 1, tl.load(topk_idx + index, mask=score > 0, other=0))
