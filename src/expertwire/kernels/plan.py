"""The first half of a plan, for any number of tokens: counts, their exchange, and where this rank's rows begin.

Tokens are cut into blocks. Each block is counted by itself; the last block out adds the blocks up, sends the totals to
all peers, waits for theirs, and finds where this rank's rows of every expert (EXPERT_*) or rank (COMPACT) begin at
their destination. `place` then numbers the selections inside their blocks; for COMPACT, where a token serves a rank
once, a running sum over a [tokens, ranks] table does that here.

If a peer refused the step, makes another call, or does not come in time, the step is void: the first rows are -1, so
that `place` finds nothing to send. If a peer has not given the bank back, it may still read its counts: it is told
REFUSED instead.

Orders: block counts go through the ticket (acq_rel, gpu), totals to peers through `exchange_release` / `load_acquire`
(sys). Only the last block waits.

Bytes moved: T * K ids, 4 * T * K for keys (COMPACT: 12 * T * K), 12 * blocks * (E + R) for counts. Worked example:
`routing`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.counts import (
    NUM_ROWS,
    NUMBER,
    PER_RANK,
    VOID,
    offsets_of,
    padded_per_expert,
    per_expert,
    sent_to,
)
from expertwire.kernels.memory import ticket_acq_rel
from expertwire.kernels.routing import (
    COUNTS,
    DONE,
    await_peers,
    histogram,
    last_of_rank,
    load_block,
    ranks_of,
    say,
    signal,
)
from expertwire.kernels.tally import add_dropped, add_rows

COMPACT = tl.constexpr(0)
EXPERT_MAJOR = tl.constexpr(1)
EXPERT_SLOTS = tl.constexpr(2)


@triton.jit
def _load_table(
    block_counts, num_blocks, column, end, WIDTH: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Counts of all blocks [BLOCKS, COLUMNS], where they are, and the mask."""
    block = tl.arange(0, BLOCKS)
    at = block_counts + block[:, None] * WIDTH + column[None, :]
    mask = (block < num_blocks)[:, None] & (column < end)[None, :]
    return tl.load(at, mask=mask, other=0), at, mask


@triton.jit
def _add_blocks(
    counts, at, mask, totals, count_bases, rank, column, end, void, R: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Turn the counts of blocks into counts before each block; their sums go to `totals` and, unless the step is void,
    to every peer."""
    before, total = tl.cumsum(counts, axis=0) - counts, tl.sum(counts, axis=0)
    tl.debug_barrier()  # a small table is loaded by several warps
    tl.store(at, before, mask=mask)
    tl.store(totals + column, total, mask=column < end)
    for peer in range(R):
        base = tl.load(count_bases + peer)
        theirs = base.to(tl.pointer_type(tl.int32)) + rank * WIDTH
        tl.store(theirs + column, total, mask=column < tl.where((base != 0) & (void == 0), end, 0))


@triton.jit
def _first_rows(
    arrived, expert, start, first_rows, counts, rank, room, alignment, first_own, L, void, E: tl.constexpr,
    EXPERTS: tl.constexpr, R: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """first_rows [E]: this rank's first row of each expert, -1 for experts of masked ranks; and what this rank receives
    per local expert. Of a void step: -1, and nothing.

    `expert` and `start` [EXPERTS] are `by_owner` and `owner_start`.
    """
    position = tl.arange(0, EXPERTS)
    mask = position < E
    total = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    known = tl.where(void > 0, 0, E)
    for source in range(R):
        theirs = tl.load(arrived + source * (E + R) + expert, mask=position < known, other=0)
        total += theirs
        before += tl.where(source < rank, theirs, 0)
    if LAYOUT == EXPERT_SLOTS:
        padded = tl.zeros([EXPERTS], tl.int32) + room
        group = (position - start) * room
    else:
        padded = (total + alignment - 1) // alignment * alignment
        running = tl.cumsum(padded, axis=0) - padded
        group = running - tl.gather(running, tl.maximum(start, 0), axis=0)
    if LAYOUT != COMPACT:
        tl.store(first_rows + expert, tl.where((void > 0) | (start < 0), -1, group + before), mask=mask)
    local = position - first_own
    mine = (local >= 0) & (local < L)
    tl.store(per_expert(counts, R) + local, total, mask=mine)
    if LAYOUT != EXPERT_SLOTS:  # there, both are fixed
        offsets = offsets_of(counts, L, R)
        tl.store(padded_per_expert(counts, L, R) + local, padded, mask=mine)
        tl.store(offsets + local + 1, group + padded, mask=mine)
        tl.store(offsets, 0)


@triton.jit(
    do_not_specialize=[
        "rank", "num_tokens", "num_blocks", "room", "alignment", "first_own", "L", "timeout_us", "name", "bank",
        "banks",
    ]
)  # fmt: skip
def plan_count(
    topk_idx, owners, counts, num_tokens, num_blocks, alignment, name, timeout_us,
    keys, indexes, block_counts, first_rows, totals, tally, word_bases, count_bases, home, by_owner, owner_start,
    epochs, tickets, status, rank, room, first_own, L, bank, banks,
    R: tl.constexpr, RANKS: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr, RANK_BINS: tl.constexpr,
    K: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Block b counts tokens [b * TOKENS, (b + 1) * TOKENS). Writes keys [T, K]: the expert, or the rank for COMPACT,
    whose rows a selection is numbered among, -1 = none; for COMPACT also indexes [T, K], the rows before it in its
    block, and owners [T, K], the rank that serves it; block_counts [num_blocks, E + R]; first_rows [E + R]; `counts`.
    Of all dispatches this is number epoch * banks + bank, the epoch being that of its bank.

    by_owner [E] are experts in order of (owner, local id), owner_start [E] the position of the owner's first one, -1 if
    it is masked; those of this rank are L from position first_own on.
    """
    block = tl.program_id(0)
    epoch = tl.load(epochs) + 1
    width: tl.constexpr = E + R
    token = block * TOKENS + tl.arange(0, TOKENS)
    slot = tl.arange(0, SLOTS)
    ids = load_block(topk_idx, block * TOKENS, num_tokens, E, K, SLOTS, TOKENS, LAYOUT == EXPERT_SLOTS)
    owner = ranks_of(ids, home)
    last = last_of_rank(owner, SLOTS)
    key = last if LAYOUT == COMPACT else ids
    at = token.to(tl.int64)[:, None] * K + slot[None, :]
    listed = (token < num_tokens)[:, None] & (slot < K)[None, :]
    tl.store(keys + at, key, mask=listed)
    if LAYOUT == COMPACT:
        tl.store(owners + at, owner, mask=listed)
        serves = (last[:, :, None] == tl.arange(0, RANKS)[None, None, :]).to(tl.int32)  # [TOKENS, SLOTS, RANKS]
        table = tl.sum(serves, axis=1)
        earlier = tl.cumsum(table, axis=0) - table
        tl.store(indexes + at, tl.sum(serves * earlier[:, None, :], axis=2), mask=listed)
    experts, ranks = histogram(ids, EXPERTS), histogram(last, RANK_BINS)
    bins = tl.arange(0, EXPERTS)
    tl.store(block_counts + block * width + bins, experts, mask=bins < E)
    bins = tl.arange(0, RANK_BINS)
    tl.store(block_counts + block * width + E + bins, ranks, mask=bins < R)
    add_dropped(tally, topk_idx, block * TOKENS, num_tokens, ids, K, SLOTS, TOKENS, R)
    if ticket_acq_rel(tickets) == num_blocks - 1:
        tl.store(tickets, 0)
        # One block works alone here, so what it waits for is memory: all loads that can be early are.
        position = tl.arange(0, EXPERTS)
        expert = tl.load(by_owner + position, mask=position < E, other=0)
        start = tl.load(owner_start + position, mask=position < E, other=0)
        source = tl.arange(0, RANKS)
        of_ranks, ranks_at, ranks_mask = _load_table(block_counts, num_blocks, E + source, width, width, BLOCKS)
        void = 0
        if R > 1:
            void = await_peers(word_bases, DONE, epoch - 1, 0, rank, status, timeout_us, R, RANKS)
        for first in range(0, E, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            of_experts, experts_at, experts_mask = _load_table(block_counts, num_blocks, column, E, width, BLOCKS)
            _add_blocks(of_experts, experts_at, experts_mask, totals, count_bases, rank, column, E, void, R, width)
        _add_blocks(of_ranks, ranks_at, ranks_mask, totals, count_bases, rank, E + source, width, void, R, width)
        tl.debug_barrier()
        if R > 1:
            number = epoch * banks + bank
            said = say(name, number)
            tl.store(counts + NUMBER, number.to(tl.int32))
            signal(word_bases, COUNTS, epoch, tl.where(void > 0, -1, said), rank, R, RANKS)
            void += await_peers(word_bases, COUNTS, epoch, said, rank, status, timeout_us, R, RANKS)
            tl.store(counts + VOID, void)
        arrived = tl.load(count_bases + rank).to(tl.pointer_type(tl.int32))
        arriving = tl.load(arrived + source * width + E + rank, mask=source < tl.where(void > 0, 0, R), other=0)
        before = tl.zeros([RANKS], tl.int32)
        for other in range(R):
            theirs = tl.load(arrived + other * width + E + source, mask=source < R, other=0)
            before += tl.where(other < rank, theirs, 0)
        _first_rows(
            arrived, expert, start, first_rows, counts, rank, room, alignment, first_own, L, void, E, EXPERTS, R, LAYOUT
        )  # fmt: skip
        reached = tl.load(count_bases + source, mask=source < R, other=0) != 0
        tl.store(first_rows + E + source, tl.where((void == 0) & reached, before, -1), mask=source < R)
        tl.store(counts + PER_RANK + source, arriving, mask=source < R)
        tl.store(counts + NUM_ROWS, tl.sum(arriving, axis=0))
        sending = tl.load(totals + E + source, mask=reached, other=0)
        tl.store(sent_to(counts, R) + source, sending, mask=source < R)
        add_rows(tally, sending, arriving, void, R, RANKS)
