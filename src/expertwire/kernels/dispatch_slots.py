"""EXPERT_SLOTS in one launch, for the few tokens of a decode step: count, exchange counts, place, quantise, write,
signal, wait.

Blocks 0 .. R - 1 count this rank's selections and send the counts to one peer each. Every other block takes a part of a
token: it loads the row, finds the token's rows by comparing its ids with all ids of this rank, waits for the counts of
the other ranks, and writes the row to its final places. The last block out signals, and waits for the peers' rows.
With one rank there is nobody to wait for, and no word is written.

Orders: counts and rows are plain stores, published by `exchange_release` (sys) after a barrier, rows after the ticket
(acq_rel, gpu) that orders the blocks; words are read by `load_acquire` (sys). Blocks wait for blocks of other ranks, so
a launch must fit on the device beside the other ranks' launches: the caller bounds the grid.

Bytes moved: T * (2 * hidden) read, T * K * (payload + scale factors + 12) written. Worked example: `routing`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.memory import exchange_release, pack_word, ticket_acq_rel
from expertwire.kernels.profile import dispatch_slots_bytes
from expertwire.kernels.quantize import encode_blocks, load_blocks, store_scales
from expertwire.kernels.routing import (
    COUNTS,
    DONE,
    HOME_LOCAL,
    HOME_RANK,
    READY,
    WHERE_RANK,
    await_peers,
    histogram,
    load_block,
    load_slots,
    ranks_of,
    signal,
    words_to,
)
from expertwire.kernels.tally import add_dropped, add_rows


@triton.jit
def _send_counts(
    peer, topk_idx, sent, tally, home, word_bases, count_bases, epoch, status, rank, num_tokens, spin_limit,
    R: tl.constexpr, RANKS: tl.constexpr, E: tl.constexpr, BINS: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Selections per expert, and rows for `peer`, into the peer's window; then the word that vouches for them."""
    ids = load_block(topk_idx, 0, num_tokens, E, K, SLOTS, TOKENS, True)
    here = (ranks_of(ids, home) == peer).to(tl.int32)
    rows = tl.sum(tl.max(here, axis=1), axis=0)
    found = histogram(tl.reshape(ids, [TOKENS * SLOTS]), TOKENS * SLOTS, BINS)
    if R > 1:
        await_peers(word_bases, DONE, epoch - 1, rank, status, spin_limit, R, RANKS)
    counts = tl.load(count_bases + peer).to(tl.pointer_type(tl.int32)) + rank * (E + R)
    bins = tl.arange(0, BINS)
    tl.store(counts + bins, found, mask=bins < E)
    tl.store(counts + E + peer, rows)
    if R > 1:
        pointers, peers, _ = words_to(word_bases, COUNTS, rank, R, RANKS)
        exchange_release(pointers, pack_word(epoch + tl.zeros([RANKS], tl.int64), rows), peers == peer)
    tl.store(sent + peer, rows)
    if peer == 0:
        add_dropped(tally, topk_idx, 0, num_tokens, ids, K, SLOTS, TOKENS, R)


@triton.jit
def _rows_before(ids, token, topk_idx, E: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr):
    """For each of the token's ids [SLOTS]: how many earlier tokens of this rank selected the same expert."""
    earlier = load_block(topk_idx, 0, token, E, K, SLOTS, TOKENS, False)
    same = ((earlier[None, :, :] == ids[:, None, None]) & (ids >= 0)[:, None, None]).to(tl.int32)
    return tl.sum(tl.max(same, axis=2), axis=1)


@triton.jit
def total_counts(
    count_bases, own_experts, expert_counts, rank_counts, sent, tally, void, rank, L,
    R: tl.constexpr, RANKS: tl.constexpr, E: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """What this rank receives, from the counts in its window: per local expert, and rows per source rank. Nothing, if
    the step is void."""
    counts = tl.load(count_bases + rank).to(tl.pointer_type(tl.int32))
    local = tl.arange(0, LOCAL)
    expert = tl.load(own_experts + local, mask=local < L, other=0)
    total = tl.zeros([LOCAL], tl.int32)
    used = tl.where(void > 0, 0, L)
    for source in range(R):
        total += tl.load(counts + source * (E + R) + expert, mask=local < used, other=0)
    tl.store(expert_counts + local, total, mask=local < L)
    source = tl.arange(0, RANKS)
    rows = tl.load(counts + source * (E + R) + E + rank, mask=source < tl.where(void > 0, 0, R), other=0)
    tl.store(rank_counts + source, rows, mask=source < R)
    tl.store(rank_counts + R, tl.sum(rows, axis=0))
    add_rows(tally, tl.load(sent + source, mask=source < R, other=0), rows, void, R, RANKS)


@triton.jit(
    do_not_specialize=["rank", "num_tokens", "spin_limit", "room", "L", "sf_at", "meta_at"],
    launch_metadata=dispatch_slots_bytes,
)
def dispatch_slots(
    x, topk_idx, where, expert_counts, rank_counts, sent, tally, void,
    word_bases, count_bases, row_bases, home, own_experts, epochs, tickets, status,
    rank, num_tokens, room, L, spin_limit, sf_at, meta_at,
    R: tl.constexpr, RANKS: tl.constexpr, E: tl.constexpr, BINS: tl.constexpr, LOCAL: tl.constexpr,
    K: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr,
    hidden: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    FP8: tl.constexpr, UE8M0: tl.constexpr, sf_bytes: tl.constexpr, RECEIVE: tl.constexpr,
):  # fmt: skip
    """x [T, hidden] bfloat16, topk_idx [T, K]; writes `where` [T, K], the peers' rows, and with RECEIVE the counts, and
    in `void` how many ranks refused the step: then nothing is sent.

    word_bases, count_bases, row_bases [R] int64: addresses of this bank's words, counts and `RowRegion` on every rank.
    epochs, tickets: this bank's step counter (int64) and block counter (int32), both private to this rank. `room` is
    R * capacity, `sf_at` and `meta_at` are offsets of the region's parts. A part of a row is LINES blocks of BLOCK
    values, PARTS of them make a row.
    """
    block = tl.program_id(0)
    epoch = tl.load(epochs) + 1
    if block < R:
        _send_counts(
            block, topk_idx, sent, tally, home, word_bases, count_bases, epoch, status, rank, num_tokens, spin_limit,
            R, RANKS, E, BINS, K, SLOTS, TOKENS,
        )  # fmt: skip
    else:
        slot = tl.arange(0, SLOTS)
        refused = tl.full((), 0, tl.int32)
        for unit in range(block - R, num_tokens * PARTS, tl.num_programs(0) - R):
            token = unit // PARTS
            part = unit % PARTS
            row = x + token.to(tl.int64) * hidden
            values, columns, mask = load_blocks(row, part * LINES, hidden, LINES, BLOCK)
            ids = load_slots(topk_idx, token, E, K, SLOTS, True)
            at_home = tl.load(home + tl.maximum(ids, 0), mask=ids >= 0, other=0)
            owner = (at_home >> HOME_RANK).to(tl.int64)
            bases = tl.load(row_bases + owner, mask=ids >= 0, other=0)
            index = _rows_before(ids, token, topk_idx, E, K, SLOTS, TOKENS)
            if FP8:
                payload, scales = encode_blocks(values, UE8M0)
            else:
                payload, scales = values, tl.zeros([LINES], tl.int32)
            if R > 1:
                if unit == block - R:
                    refused = await_peers(word_bases, COUNTS, epoch, rank, status, spin_limit, R, RANKS)
                ids = tl.where(refused > 0, -1, ids)
                bases = tl.where(refused > 0, 0, bases)
                counts = tl.load(count_bases + rank).to(tl.pointer_type(tl.int32))
                source = tl.arange(0, RANKS)
                lower = tl.load(
                    counts + source[None, :] * (E + R) + tl.maximum(ids, 0)[:, None],
                    mask=(source < rank)[None, :] & (ids >= 0)[:, None], other=0,
                )  # fmt: skip
                index += tl.sum(lower, axis=1)
            places = (at_home & HOME_LOCAL).to(tl.int64) * room + index
            if part == 0:
                tl.store(
                    where + token.to(tl.int64) * K + slot,
                    tl.where(ids >= 0, (owner << WHERE_RANK) | places, -1), mask=slot < K,
                )  # fmt: skip
                meta = (bases + meta_at + places * 12).to(tl.pointer_type(tl.int32))
                tl.store(meta, tl.zeros([SLOTS], tl.int32) + rank, mask=ids >= 0)
                tl.store(meta + 1, tl.zeros([SLOTS], tl.int32) + token, mask=ids >= 0)
                tl.store(meta + 2, slot, mask=ids >= 0)
            for k in tl.static_range(K):
                base = tl.sum(tl.where(slot == k, bases, 0), axis=0)
                place = tl.sum(tl.where(slot == k, places, 0), axis=0)
                if base != 0:
                    if FP8:
                        out = (base + place * hidden).to(tl.pointer_type(tl.float8e4nv))
                    else:
                        out = (base + place * (2 * hidden)).to(tl.pointer_type(tl.bfloat16))
                    tl.store(tl.multiple_of(out, 16 if hidden % 16 == 0 else 8) + columns, payload, mask=mask)
                    if FP8:
                        sf = base + sf_at + place * sf_bytes
                        store_scales(sf, part * LINES, scales, hidden, LINES, BLOCK, UE8M0)
    if R > 1:
        last = ticket_acq_rel(tickets) == tl.num_programs(0) - 1
        if last:
            tl.store(tickets, 0)
            tl.store(epochs, epoch)
            signal(word_bases, READY, epoch, 0, rank, R, RANKS)
            if RECEIVE:
                late_void = await_peers(word_bases, READY, epoch, rank, status, spin_limit, R, RANKS)
                tl.store(void, late_void)
                total_counts(
                    count_bases, own_experts, expert_counts, rank_counts, sent, tally, late_void, rank, L,
                    R, RANKS, E, LOCAL,
                )  # fmt: skip
    elif block == 0:
        tl.debug_barrier()
        total_counts(
            count_bases, own_experts, expert_counts, rank_counts, sent, tally, 0, rank, L, R, RANKS, E, LOCAL
        )  # fmt: skip
