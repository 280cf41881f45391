"""Where every selection goes: counts per expert and rank, and the final row of each (token, slot). No atomics.

Letters: T tokens of this rank, K top-k slots, E experts of all ranks, R ranks, L experts of one rank.

A selection's row is: first row of its expert (or rank) at the destination + rows of lower source ranks + rows of this
rank before it. So order is a function of the inputs alone. The first two come from the counts that ranks exchange.

Of a masked rank the address of its words and counts is 0: nothing is signalled there, and no row has its place there.

`home` [E] int32 is owner rank << 16 | local id. A place, int64, is rank << 40 | row, -1 = nothing to send. `sends_to`
has a token's places: [T, K], one for each slot; COMPACT, with one row per (token, rank): [T, min(K, R)], each once.

Worked example, 2 ranks with experts (0, 1) and (2, 3), seen from rank 1, whose topk_idx is [[0, 2], [1, 0]] while rank
0 has selected expert 0 three times, with room for 8 rows per expert (EXPERT_SLOTS):
    counts [2, 1, 1, 0 | 2, 1]   sends_to = [[0:3, 1:0], [0:8, 0:4]]   (rank:row)
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels import names
from expertwire.kernels.counts import NUMBER, VOID, combine_number
from expertwire.kernels.memory import COUNT_BITS, exchange_release, pack_word, ticket_acq_rel, wait
from expertwire.layouts import device_window

HOME_RANK = tl.constexpr(16)
HOME_LOCAL = tl.constexpr(0xFFFF)
WHERE_RANK = tl.constexpr(40)
WHERE_ROW = tl.constexpr((1 << 40) - 1)
LINE_WORDS = tl.constexpr(8)
PURPOSES = tl.constexpr(len(device_window.PURPOSES))
ROUTINGS = tl.constexpr(1 << names.NUMBER_BITS)  # that a word tells apart
SOURCE_WORDS = tl.constexpr(device_window.SOURCE_WORDS)

# Purposes of `layouts.device_window`, and how a status record names the wait that gave up.
COUNTS = tl.constexpr(0)
READY = tl.constexpr(1)
DONE = tl.constexpr(2)
COMBINE_READY = tl.constexpr(3)
COMBINE_DONE = tl.constexpr(4)

REFUSED_OR_LATE = tl.constexpr((1 << 16) - 1)  # of a number that says why a step is void
OTHER_CALL = tl.constexpr(1 << 16)


@triton.jit
def say(name, number):
    """What the words of a call carry: see `names`. `number` of the dispatch whose routing it has."""
    return name | (number & (ROUTINGS - 1)).to(tl.int32)


@triton.jit
def words_to(word_bases, purpose: tl.constexpr, rank, bank, R: tl.constexpr, RANKS: tl.constexpr):
    """Pointers to this rank's word for `purpose` on every peer, peer numbers, mask. `bank` is counted from that of
    `word_bases` on."""
    peers = tl.arange(0, RANKS)
    bases = tl.load(word_bases + peers, mask=peers < R, other=0)
    at = ((bank * PURPOSES + purpose) * R + rank) * LINE_WORDS * 8
    return (bases + at).to(tl.pointer_type(tl.int64)), peers, bases != 0


@triton.jit
def words_from(word_bases, purpose: tl.constexpr, rank, bank, R: tl.constexpr, RANKS: tl.constexpr):
    """Pointers to every peer's word for `purpose` in the own window, peer numbers, mask."""
    peers = tl.arange(0, RANKS)
    base = tl.load(word_bases + rank).to(tl.pointer_type(tl.int64))
    return base + ((bank * PURPOSES + purpose) * R + peers) * LINE_WORDS, peers, peers < R


@triton.jit
def signal(word_bases, purpose: tl.constexpr, epoch, counts, rank, R: tl.constexpr, RANKS: tl.constexpr, bank=0):
    """Tell every peer; what this block stored, or acquired, before is visible to whoever acquires the word."""
    pointers, _, mask = words_to(word_bases, purpose, rank, bank, R, RANKS)
    exchange_release(pointers, pack_word(epoch + tl.zeros([RANKS], tl.int64), counts), mask)


@triton.jit
def await_peers(
    word_bases, purpose: tl.constexpr, epoch, said, rank, status, timeout_us, R: tl.constexpr, RANKS: tl.constexpr,
    bank=0, known=0,
):  # fmt: skip
    """Wait until every peer has signalled `purpose` for `epoch`; returns, unless 0, why the step is void, so that no
    rows are read or written: how many refused it or did not come in time, and OTHER_CALL for each that has `said`
    something else than this rank.

    What they have said is told to the host, unless it is `known` that the step is void: behind the addresses of words
    stands that of this bank's record there.
    """
    pointers, peers, mask = words_from(word_bases, purpose, rank, bank, R, RANKS)
    seen, refused, late = wait(pointers, mask, epoch, purpose + 1, status, peers, timeout_us)
    if purpose == COMBINE_DONE:
        return 0
    if purpose == DONE:  # which nobody refuses, and of the step before the first no word was written
        return late
    here = mask & (seen >> COUNT_BITS == epoch)  # not of masked ranks
    differs = here & (seen != pack_word(epoch, said)) & (seen != pack_word(epoch, -1))
    void = refused + OTHER_CALL * tl.sum(differs.to(tl.int32), axis=0)
    if (void > 0) & (known == 0):
        record = tl.load(word_bases + R).to(tl.pointer_type(tl.int64)) + bank * 2 * R
        if purpose == COMBINE_READY:
            record += R
        tl.store(record + peers, seen, mask=here)
    return void + late


@triton.jit
def receive_rows(
    counts, void_at: tl.constexpr, name, word_bases, epoch, rank, status, timeout_us, R: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Wait for the peers' rows. Number `void_at` of `counts` says whether the step was void before, and is written."""
    void = tl.load(counts + void_at)
    said = say(name, tl.load(counts + NUMBER))
    void += await_peers(word_bases, READY, epoch, said, rank, status, timeout_us, R, RANKS, known=void)
    tl.store(counts + void_at, void)


@triton.jit
def leave_combine(word_bases, number, rank, status, timeout_us, R: tl.constexpr, RANKS: tl.constexpr, bank):
    """By one block: when all peers have done the same, what they read here may be overwritten."""
    signal(word_bases, COMBINE_DONE, number, 0, rank, R, RANKS, bank)
    await_peers(word_bases, COMBINE_DONE, number, 0, rank, status, timeout_us, R, RANKS, bank)


@triton.jit
def end_combine(
    counts, word_bases, tickets, dispatch_words, dispatch_epochs, rank, status, timeout_us,
    R: tl.constexpr, RANKS: tl.constexpr, BANKS: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    """By every block that has read its rows; the last one out leaves, unless the dispatch is VOID in `counts` and there
    is no combine. With FINISH it then gives back the views of the dispatch, over which peers may have read the output.
    tickets [BANKS]"""
    number = tl.load(combine_number(counts))
    void = tl.load(counts + VOID)
    bank = tl.where(void == 0, number % BANKS, 0)
    if ticket_acq_rel(tickets + bank) == tl.num_programs(0) - 1:
        tl.store(tickets + bank, 0)
        if void == 0:
            leave_combine(word_bases, number, rank, status, timeout_us, R, RANKS, bank)
        if FINISH:
            signal(dispatch_words, DONE, tl.load(dispatch_epochs), 0, rank, R, RANKS)


@triton.jit
def legal_ids(ids, num_experts, mask):
    return tl.where(mask & (ids >= 0) & (ids < num_experts), ids, -1).to(tl.int32)


@triton.jit
def load_slots(topk_idx, token, num_experts, K: tl.constexpr, SLOTS: tl.constexpr, DISTINCT: tl.constexpr):
    """Expert ids of one token [SLOTS]; illegal ids, and with DISTINCT later repeats, are -1."""
    slot = tl.arange(0, SLOTS)
    ids = legal_ids(tl.load(topk_idx + token.to(tl.int64) * K + slot, mask=slot < K, other=-1), num_experts, slot < K)
    if DISTINCT:
        same = (ids[:, None] == ids[None, :]) & (slot[None, :] < slot[:, None])
        ids = tl.where(tl.max(same.to(tl.int32), axis=1) > 0, -1, ids)
    return ids


@triton.jit
def load_block(
    topk_idx, first, num_tokens, num_experts, K: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr,
    DISTINCT: tl.constexpr,
):  # fmt: skip
    """Expert ids of TOKENS tokens from `first` on, [TOKENS, SLOTS], as `load_slots`."""
    token = first + tl.arange(0, TOKENS)
    slot = tl.arange(0, SLOTS)
    mask = (token < num_tokens)[:, None] & (slot < K)[None, :]
    at = token.to(tl.int64)[:, None] * K + slot[None, :]
    ids = legal_ids(tl.load(topk_idx + at, mask=mask, other=-1), num_experts, mask)
    if DISTINCT:
        same = (ids[:, :, None] == ids[:, None, :]) & (slot[None, None, :] < slot[None, :, None])
        ids = tl.where(tl.max(same.to(tl.int32), axis=2) > 0, -1, ids)
    return ids


@triton.jit
def store_source(meta, rank, token, slot, mask):
    """Where rows are from, int32 (source rank, token, slot or place); slot and mask have the shape of `meta`."""
    tl.store(meta, tl.zeros_like(slot) + rank, mask=mask)
    tl.store(meta + 1, tl.zeros_like(slot) + token.to(tl.int32), mask=mask)
    tl.store(meta + 2, slot, mask=mask)


@triton.jit
def ranks_of(ids, home):
    """Owner of each expert id, -1 for -1."""
    return tl.load(home + tl.maximum(ids, 0), mask=ids >= 0, other=-1) >> HOME_RANK


@triton.jit
def last_of_rank(ranks, SLOTS: tl.constexpr):
    """[TOKENS, SLOTS] the owner where a slot is the highest of its token that this owner serves, else -1."""
    slot = tl.arange(0, SLOTS)
    later = (ranks[:, :, None] == ranks[:, None, :]) & (slot[None, None, :] > slot[None, :, None])
    return tl.where(tl.max(later.to(tl.int32), axis=2) > 0, -1, ranks)


@triton.jit
def histogram(keys, BINS: tl.constexpr):
    """How often each of 0..BINS - 1 occurs in `keys`, of whatever shape; -1 does not count."""
    keys = tl.ravel(keys)
    return tl.histogram(tl.maximum(keys, 0), BINS, mask=keys >= 0)
