"""EXPERT_SLOTS in one launch, for one rank and the few tokens of a decode step: count, place, quantise, write.

There is nobody to tell and nobody to wait for: no word is written. Block 0 counts. Every other block takes a part of a
token: it loads the row, finds the token's rows by comparing its ids with all ids before it, and writes the row to its
final places. No order between blocks is needed.

Bytes moved: T * (2 * hidden) read, T * K * (payload + scale factors + 12) written. Worked example, experts 0 and 1 with
room for 4 rows each, topk_idx [[0, 1], [1, -1]]: where [[0, 4], [5, -1]], rows per expert 1 and 2, 2 rows in all, one
for each token.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.counts import NUM_ROWS, PER_RANK, per_expert, sent_to
from expertwire.kernels.profile import dispatch_slots_bytes
from expertwire.kernels.quantize import encode_blocks, load_blocks, store_scales
from expertwire.kernels.routing import HOME_LOCAL, SOURCE_WORDS, histogram, load_block, load_slots, store_source
from expertwire.kernels.tally import add_dropped, add_rows


@triton.jit
def _count(
    topk_idx, counts, tally, home, num_tokens,
    E: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Rows per local expert; and tokens with a selection, which is what there is of rows between ranks."""
    ids = load_block(topk_idx, 0, num_tokens, E, K, SLOTS, TOKENS, True)
    found = histogram(ids, EXPERTS)
    expert = tl.arange(0, EXPERTS)
    at_home = tl.load(home + expert, mask=expert < E, other=0)
    tl.store(per_expert(counts, 1) + (at_home & HOME_LOCAL), found, mask=expert < E)
    rows = tl.sum(tl.max((ids >= 0).to(tl.int32), axis=1), axis=0)
    tl.store(counts + PER_RANK, rows)
    tl.store(counts + NUM_ROWS, rows)
    tl.store(sent_to(counts, 1), rows)
    add_rows(tally, rows, rows, 0, 1, 1)
    add_dropped(tally, topk_idx, 0, num_tokens, ids, K, SLOTS, TOKENS, 1)


@triton.jit
def _rows_before(ids, token, topk_idx, E: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr):
    """For each of the token's ids [SLOTS]: how many earlier tokens of this rank selected the same expert."""
    earlier = load_block(topk_idx, 0, token, E, K, SLOTS, TOKENS, False)
    same = ((earlier[None, :, :] == ids[:, None, None]) & (ids >= 0)[:, None, None]).to(tl.int32)
    return tl.sum(tl.max(same, axis=2), axis=1)


@triton.jit(do_not_specialize=["num_tokens", "room"], launch_metadata=dispatch_slots_bytes)
def dispatch_slots(
    x, topk_idx, where, counts, num_tokens, tally, rows, sf, meta, home, room,
    E: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr,
    hidden: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    FP8: tl.constexpr, UE8M0: tl.constexpr, sf_bytes: tl.constexpr,
):  # fmt: skip
    """x [T, hidden] bfloat16, topk_idx [T, K]; writes `where` [T, K], the rows with their scale factors and routing
    (rows [E * room, payload], sf [E * room, sf_bytes], meta int32 [E * room, 3]), and the counts.

    A part of a row is LINES blocks of BLOCK values, PARTS of them make a row.
    """
    block = tl.program_id(0)
    if block == 0:
        _count(topk_idx, counts, tally, home, num_tokens, E, EXPERTS, K, SLOTS, TOKENS)
    else:
        slot = tl.arange(0, SLOTS)
        for unit in range(block - 1, num_tokens * PARTS, tl.num_programs(0) - 1):
            token = unit // PARTS
            part = unit % PARTS
            values, columns, mask = load_blocks(x + token.to(tl.int64) * hidden, part * LINES, hidden, LINES, BLOCK)
            ids = load_slots(topk_idx, token, E, K, SLOTS, True)
            at_home = tl.load(home + tl.maximum(ids, 0), mask=ids >= 0, other=0)
            index = _rows_before(ids, token, topk_idx, E, K, SLOTS, TOKENS)
            if FP8:
                payload, scales = encode_blocks(values, UE8M0)
                out = rows.to(tl.pointer_type(tl.float8e4nv))
            else:
                payload, scales = values, tl.zeros([LINES], tl.int32)
                out = rows.to(tl.pointer_type(tl.bfloat16))
            places = tl.where(ids >= 0, (at_home & HOME_LOCAL).to(tl.int64) * room + index, -1)
            if part == 0:
                tl.store(where + token.to(tl.int64) * K + slot, places, mask=slot < K)
                store_source(meta + places * SOURCE_WORDS, 0, token, slot, ids >= 0)
            for k in tl.static_range(K):
                place = tl.sum(tl.where(slot == k, places, 0), axis=0)
                if place >= 0:
                    row = tl.multiple_of(out + place * hidden, 16 if hidden % 16 == 0 else 8)
                    tl.store(row + columns, payload, mask=mask)
                    if FP8:
                        store_scales(sf + place * sf_bytes, part * LINES, scales, hidden, LINES, BLOCK, UE8M0)
