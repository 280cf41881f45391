"""The first half of a plan, for any number of tokens: counts, their exchange, and where this rank's rows begin.

Tokens are cut into blocks. Each block is counted by itself; the last block out adds the blocks up, sends the totals to
all peers, waits for theirs, and finds where this rank's rows of every expert (EXPERT_*) or rank (COMPACT) begin at
their destination. Of many blocks, the last one out of each group adds up its group, and the last of all the groups.
Rows are numbered among those of an expert (EXPERT_*) or a rank (COMPACT), so these counts are added up in order; of
the others only sums are needed. `place` then numbers the selections inside their blocks; for COMPACT, where a token
serves a rank once, a running sum over a [tokens, ranks] table does that here.

If a peer refused the step, or does not come in time, the step is void: the first rows are -1, so that `place` finds
nothing to send. If a peer has not given the bank back, it may still read its counts: it is told REFUSED instead.

Orders: block counts, and sums (relaxed atomics), go through the tickets (acq_rel, gpu), totals to peers through
`exchange_release` / `load_acquire` (sys). Only the last block waits.

Bytes moved: T * K ids, 4 * T * K for keys (COMPACT: 12 * T * K), 12 * blocks * E for counts (COMPACT: * R). Worked
example: `routing`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.counts import NUM_ROWS, PER_RANK, VOID, offsets_of, padded_per_expert, per_expert, sent_to
from expertwire.kernels.memory import exchange_release, pack_word, ticket_acq_rel
from expertwire.kernels.routing import (
    COUNTS,
    DONE,
    await_peers,
    histogram,
    last_of_rank,
    load_block,
    ranks_of,
    words_to,
)
from expertwire.kernels.tally import add_dropped, add_rows

COMPACT = tl.constexpr(0)
EXPERT_MAJOR = tl.constexpr(1)
EXPERT_SLOTS = tl.constexpr(2)


@triton.jit
def _add_up(table, num_rows, column, N: tl.constexpr, ROWS: tl.constexpr):
    """Turn counts [num_rows, N] of blocks, or of groups of them, into sums of those before each, in some columns;
    returns the sums of all."""
    row = tl.arange(0, ROWS)
    at = table + row[:, None] * N + column[None, :]
    mask = (row < num_rows)[:, None] & (column < N)[None, :]
    counts = tl.load(at, mask=mask, other=0)
    before, total = tl.cumsum(counts, axis=0) - counts, tl.sum(counts, axis=0)
    tl.debug_barrier()  # a small table is loaded by several warps
    tl.store(at, before, mask=mask)
    return total


@triton.jit
def _is_last(
    block_counts, tickets, group_tickets, block, num_blocks, N: tl.constexpr, BLOCKS: tl.constexpr,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Whether this block is the last one out. Of each group of blocks the last one out adds the group up: behind the
    counts of BLOCKS blocks are those of groups."""
    if GROUP == 1:
        last = ticket_acq_rel(tickets) == num_blocks - 1
    else:
        group, last = block // GROUP, block < 0
        begin = group * GROUP
        members = tl.minimum(GROUP, num_blocks - begin)
        if ticket_acq_rel(group_tickets + group) == members - 1:
            tl.store(group_tickets + group, 0)
            for first in range(0, N, COLUMNS):
                column = first + tl.arange(0, COLUMNS)
                total = _add_up(block_counts + begin * N, members, column, N, GROUP)
                tl.store(block_counts + (BLOCKS + group) * N + column, total, mask=column < N)
            last = ticket_acq_rel(tickets) == tl.cdiv(num_blocks, GROUP) - 1
    return last


@triton.jit
def _tell_peers(total, count_bases, rank, column, end, void, R: tl.constexpr, WIDTH: tl.constexpr):
    """Sums to every peer, unless the step is void."""
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


@triton.jit(do_not_specialize=["rank", "num_tokens", "num_blocks", "room", "alignment", "first_own", "L", "timeout_us"])
def plan_count(
    topk_idx, owners, counts, num_tokens, num_blocks, alignment, timeout_us,
    keys, indexes, block_counts, first_rows, totals, tally, word_bases, count_bases, home, by_owner, owner_start,
    epochs, tickets, status, rank, room, first_own, L,
    R: tl.constexpr, RANKS: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr, RANK_BINS: tl.constexpr,
    K: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Block b counts tokens [b * TOKENS, (b + 1) * TOKENS). Writes keys [T, K]: the expert, or the rank for COMPACT,
    whose rows a selection is numbered among, -1 = none; for COMPACT also indexes [T, K], the rows before it in its
    block, and owners [T, K], the rank that serves it; block_counts [BLOCKS, E], or R for COMPACT, the rows in earlier
    blocks of its group, and behind them [groups, E] those in earlier groups, if a GROUP is more than one block;
    first_rows [E + R]; `counts`. totals [E + R + groups] is 0 before and after: sums, and tickets of groups.

    by_owner [E] are experts in order of (owner, local id), owner_start [E] the position of the owner's first one, -1 if
    it is masked; those of this rank are L from position first_own on.
    """
    block = tl.program_id(0)
    epoch = tl.load(epochs) + 1
    width: tl.constexpr = E + R
    N: tl.constexpr = R if LAYOUT == COMPACT else E
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
    expert, peer = tl.arange(0, EXPERTS), tl.arange(0, RANK_BINS)
    if LAYOUT == COMPACT:
        tl.store(block_counts + block * N + peer, ranks, mask=peer < R)
        tl.atomic_add(totals + expert, experts, mask=(expert < E) & (experts > 0), sem="relaxed")
    else:
        tl.store(block_counts + block * N + expert, experts, mask=expert < E)
        tl.atomic_add(totals + E + peer, ranks, mask=(peer < R) & (ranks > 0), sem="relaxed")
    add_dropped(tally, topk_idx, block * TOKENS, num_tokens, ids, K, SLOTS, TOKENS, R)
    if _is_last(block_counts, tickets, totals + width, block, num_blocks, N, BLOCKS, GROUP, COLUMNS):
        tl.store(tickets, 0)
        # One block works alone here, so what it waits for is memory: all loads that can be early are.
        position = tl.arange(0, EXPERTS)
        expert = tl.load(by_owner + position, mask=position < E, other=0)
        start = tl.load(owner_start + position, mask=position < E, other=0)
        source = tl.arange(0, RANKS)
        counted = block_counts + (BLOCKS * N if GROUP > 1 else 0)
        num_rows = tl.cdiv(num_blocks, GROUP)
        if LAYOUT == COMPACT:
            of_experts = tl.load(totals + position, mask=position < E, other=0)
            of_ranks = _add_up(counted, num_rows, source, N, BLOCKS // GROUP)
        else:
            of_ranks = tl.load(totals + E + source, mask=source < R, other=0)
        void = 0
        if R > 1:
            void = await_peers(word_bases, DONE, epoch - 1, rank, status, timeout_us, R, RANKS)
        if LAYOUT == COMPACT:
            _tell_peers(of_experts, count_bases, rank, position, E, void, R, width)
        else:
            for first in range(0, E, COLUMNS):
                column = first + tl.arange(0, COLUMNS)
                total = _add_up(counted, num_rows, column, N, BLOCKS // GROUP)
                _tell_peers(total, count_bases, rank, column, E, void, R, width)
        _tell_peers(of_ranks, count_bases, rank, E + source, width, void, R, width)
        tl.debug_barrier()
        if LAYOUT == COMPACT:
            tl.store(totals + position, tl.zeros([EXPERTS], tl.int32), mask=position < E)
        else:
            tl.store(totals + E + source, tl.zeros([RANKS], tl.int32), mask=source < R)
        if R > 1:
            pointers, _, mask = words_to(word_bases, COUNTS, rank, R, RANKS)
            rows = tl.where(void > 0, -1, of_ranks)
            exchange_release(pointers, pack_word(epoch + tl.zeros([RANKS], tl.int64), rows), mask)
            void += await_peers(word_bases, COUNTS, epoch, rank, status, timeout_us, R, RANKS)
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
        sending = tl.where(reached, of_ranks, 0)
        tl.store(sent_to(counts, R) + source, sending, mask=source < R)
        add_rows(tally, sending, arriving, void, R, RANKS)
