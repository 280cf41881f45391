"""The second half of a plan: the row of every selection, its address, and its routing written at the destination.

A selection's row is the first row of this rank there (from `plan`) + the rows of earlier blocks + the rows before it in
its own block. For experts that last number comes from comparing keys, for ranks from `plan`. A block that is about to
send some tokens does this for them, while their rows are being loaded; where few blocks send many tokens each, it is a
launch of its own. Where the first row is -1 nothing is sent: the step is void, or the rank is masked.

Outputs, for SENDS places a token (SENDS = K, or the number of ranks if COMPACT needs fewer), each listed once:
    sends_to [T, SENDS]     rank << 40 | row, -1 = nothing to send
    addresses [T, SENDS]    address of the row's payload, 0 = none
The routing of a row is int32 (source rank, token, which of the token's places); COMPACT adds K local expert ids (-1 =
elsewhere) and K float32 weights. So the rank of the row knows where to bring it back (`combine_push`).

Orders: plain stores; a block reads back only what it stored before a barrier; the signal of the rows, which comes
later, vouches for their routing too.
Bytes moved: 4 * T * K keys, 24 * T * K places, and per row 12 (EXPERT_*) or 12 + 8 * K (COMPACT). Worked example:
keys of one block [[5, 7], [7, 5]], first rows 10 (expert 5) and 20 (7): rows [[10, 20], [21, 11]].
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.counts import NUMBER, PER_RANK, REPEATED, sent_to
from expertwire.kernels.memory import ticket_acq_rel
from expertwire.kernels.routing import (
    COUNTS,
    DONE,
    HOME_LOCAL,
    HOME_RANK,
    SOURCE_WORDS,
    WHERE_RANK,
    WHERE_ROW,
    await_peers,
    legal_ids,
    say,
    signal,
    store_source,
)
from expertwire.kernels.tally import add_rows


@triton.jit
def place_experts(
    keys, block_counts, first_rows, home, row_bases, where, addresses, first, num_tokens, rank, meta_at,
    R: tl.constexpr, E: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, payload_bytes: tl.constexpr,
):  # fmt: skip
    """EXPERT_*: ROWS tokens from `first` on, of TOKENS that were counted together.

    `sends_to` is `where`. KEYS >= TOKENS * K.
    """
    entry = tl.arange(0, ROWS * SLOTS)
    token, slot = first + entry // SLOTS, entry % SLOTS
    listed = (token < num_tokens) & (slot < K)
    at = token.to(tl.int64) * K + slot
    key = tl.load(keys + at, mask=listed, other=-1)
    block = first // TOKENS
    earlier = tl.arange(0, KEYS)  # counted from the block's first selection, as `own`
    own = (token - block * TOKENS) * K + slot
    end = tl.max(tl.where(listed, own, 0), axis=0)
    theirs = tl.load(keys + block.to(tl.int64) * TOKENS * K + earlier, mask=earlier < end, other=-2)
    sends = key >= 0
    known = tl.maximum(key, 0)
    index = tl.load(block_counts + block * (E + R) + known, mask=sends, other=0)
    first_row = tl.load(first_rows + known, mask=sends, other=0)
    owner = tl.load(home + known, mask=sends, other=0) >> HOME_RANK
    base = tl.load(row_bases + owner, mask=sends, other=0)
    index += first_row
    sends &= first_row >= 0
    before = (theirs[None, :] == key[:, None]) & (earlier[None, :] < own[:, None])
    row = (index + tl.sum(before.to(tl.int32), axis=1)).to(tl.int64)
    tl.store(where + at, tl.where(sends, (owner.to(tl.int64) << WHERE_RANK) | row, -1), mask=listed)
    tl.store(addresses + at, tl.where(sends, base + row * payload_bytes, 0), mask=listed)
    store_source((base + meta_at + row * (4 * SOURCE_WORDS)).to(tl.pointer_type(tl.int32)), rank, token, slot, sends)
    tl.debug_barrier()


@triton.jit
def place_ranks(
    topk_idx, topk_weights, keys, indexes, block_counts, first_rows, home, row_bases, where, addresses, first,
    num_tokens, rank, meta_at,
    R: tl.constexpr, E: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, SENDS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, payload_bytes: tl.constexpr,
):  # fmt: skip
    """COMPACT, likewise. topk_weights may be None: ones."""
    entry = tl.arange(0, ROWS * SLOTS)
    token, slot = (first + entry // SLOTS).to(tl.int64), entry % SLOTS
    live = token < num_tokens
    key = tl.load(keys + token * K + slot, mask=live & (slot < K), other=-1)
    sends = key >= 0
    known = tl.maximum(key, 0)
    index = tl.load(indexes + token * K + slot, mask=sends, other=0)
    index += tl.load(block_counts + first // TOKENS * (E + R) + E + known, mask=sends, other=0)
    first_row = tl.load(first_rows + E + known, mask=sends, other=0)
    base = tl.load(row_bases + known, mask=sends, other=0)
    row = (index + first_row).to(tl.int64)
    sends &= first_row >= 0

    table = tl.reshape(sends.to(tl.int32), [ROWS, SLOTS])
    nth = tl.reshape(tl.cumsum(table, axis=1), [ROWS * SLOTS]) - 1
    count = tl.reshape(tl.zeros([ROWS, SLOTS], tl.int32) + tl.sum(table, axis=1)[:, None], [ROWS * SLOTS])
    none = live & (slot >= count) & (slot < SENDS)
    tl.store(where + token * SENDS + nth, (key.to(tl.int64) << WHERE_RANK) | row, mask=sends)
    tl.store(where + token * SENDS + slot, tl.full([ROWS * SLOTS], -1, tl.int64), mask=none)
    tl.store(addresses + token * SENDS + nth, base + row * payload_bytes, mask=sends)
    tl.store(addresses + token * SENDS + slot, tl.zeros([ROWS * SLOTS], tl.int64), mask=none)

    meta = (base + meta_at + row * (4 * (SOURCE_WORDS + 2 * K))).to(tl.pointer_type(tl.int32))
    store_source(meta, rank, token, nth, sends)
    field = tl.arange(0, SLOTS)[None, :]
    at = token[:, None] * K + field
    mask = sends[:, None] & (field < K)
    ids = legal_ids(tl.load(topk_idx + at, mask=mask, other=-1), E, mask)
    at_home = tl.load(home + tl.maximum(ids, 0), mask=ids >= 0, other=-1)
    here = (at_home >> HOME_RANK) == key[:, None]
    weights = tl.full([ROWS * SLOTS, SLOTS], 1.0, tl.float32)
    if topk_weights is not None:
        weights = tl.load(topk_weights + at, mask=mask, other=0.0)
    fields = meta[:, None] + SOURCE_WORDS + field
    tl.store(fields, tl.where(here, at_home & HOME_LOCAL, -1), mask=mask)
    fields = (fields + K).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(fields, tl.where(here, weights, 0.0), mask=mask)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["num_tokens", "rank", "meta_at"])
def place_rows(
    topk_idx, topk_weights, sends_to, num_tokens, keys, indexes, block_counts, first_rows, home, row_bases, addresses,
    rank, meta_at,
    R: tl.constexpr, E: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, SENDS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, COMPACT: tl.constexpr, payload_bytes: tl.constexpr,
):  # fmt: skip
    """The launch of its own: ROWS tokens a block."""
    first = tl.program_id(0) * ROWS
    if COMPACT:
        place_ranks(
            topk_idx, topk_weights, keys, indexes, block_counts, first_rows, home, row_bases, sends_to, addresses,
            first, num_tokens, rank, meta_at, R, E, K, SLOTS, SENDS, TOKENS, ROWS, payload_bytes,
        )  # fmt: skip
    else:
        place_experts(
            keys, block_counts, first_rows, home, row_bases, sends_to, addresses, first, num_tokens, rank, meta_at,
            R, E, K, SLOTS, TOKENS, ROWS, KEYS, payload_bytes,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_slots"])
def rows_of_slots(
    owners, sends_to, num_slots, where, K: tl.constexpr, SENDS: tl.constexpr, ENTRIES: tl.constexpr
):  # fmt: skip
    """COMPACT: where [T, K], each slot's row, from the rank that serves it: owners [T, K], -1 = none. num_slots: T * K.

    Only values that go along the routing need it. Example: owners [[1, 0, 1]], sends_to [[0:3, 1:5]] give
    [[1:5, 0:3, 1:5]].
    """
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES).to(tl.int64)
    mask = entry < num_slots
    owner = tl.load(owners + entry, mask=mask, other=-1).to(tl.int64)
    found = tl.full([ENTRIES], -1, tl.int64)
    for nth in tl.static_range(SENDS):
        place = tl.load(sends_to + entry // K * SENDS + nth, mask=mask, other=-1)
        found = tl.where((place >= 0) & (place >> WHERE_RANK == owner), place, found)
    tl.store(where + entry, found, mask=mask)


@triton.jit(do_not_specialize=["num_places", "rank", "timeout_us", "name"])
def address_rows(
    sends_to, counts, num_places, name, timeout_us,
    row_bases, addresses, tally, word_bases, epochs, tickets, status, rank,
    R: tl.constexpr, RANKS: tl.constexpr, PLACES: tl.constexpr, payload_bytes: tl.constexpr,
):  # fmt: skip
    """Repeat a plan in another bank, whose rows the peers must have given back: sends_to -> addresses.

    COUNTS is signalled, with no counts, for a peer that does not repeat its plan: it sees that this is another call.
    """
    if tl.program_id(0) == 0:
        peers = tl.arange(0, RANKS)
        sending = tl.load(sent_to(counts, R) + peers, mask=peers < R, other=0)
        add_rows(tally, sending, tl.load(counts + PER_RANK + peers, mask=peers < R, other=0), 0, R, RANKS)
    at = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    place = tl.load(sends_to + at, mask=at < num_places, other=-1)
    base = tl.load(row_bases + (tl.maximum(place, 0) >> WHERE_RANK), mask=place >= 0, other=0)
    tl.store(addresses + at, tl.where(place >= 0, base + (place & WHERE_ROW) * payload_bytes, 0), mask=at < num_places)
    if R > 1:
        if ticket_acq_rel(tickets) == tl.num_programs(0) - 1:
            tl.store(tickets, 0)
            epoch = tl.load(epochs)
            void = await_peers(word_bases, DONE, epoch, 0, rank, status, timeout_us, R, RANKS)
            said = say(name, tl.load(counts + NUMBER))
            signal(word_bases, COUNTS, epoch + 1, tl.where(void > 0, -1, said), rank, R, RANKS)
            tl.store(counts + REPEATED, void)
            if void > 0:  # they may still read what would be overwritten
                for first in range(0, num_places, PLACES):
                    at = first + tl.arange(0, PLACES)
                    tl.store(addresses + at, tl.zeros([PLACES], tl.int64), mask=at < num_places)
