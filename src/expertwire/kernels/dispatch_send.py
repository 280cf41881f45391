"""Send half of dispatch along a plan: each token's row, quantised on the way if asked, to all of its final places.

A block takes ROWS whole rows at a time, so that few blocks keep many loads in flight; a row is loaded (and quantised)
once, however many places it goes to. The last block out signals. With RECEIVE it then waits for the peers' rows.

Orders: rows are plain stores, ordered by the ticket (acq_rel, gpu), published by `exchange_release` (sys).

Bytes moved: T * 2 * hidden read, payload + scale factors + routing written for every place. Worked example, COMPACT
with K = 2: where = [[-1, 0:3], [1:0, 0:4]] sends row 0 to row 3 of rank 0, row 1 to row 0 of rank 1 and row 4 of rank 0.
"""

# ruff: noqa: ANN001, ANN201
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.memory import ticket_acq_rel
from expertwire.kernels.quantize import encode_blocks
from expertwire.kernels.routing import HOME_LOCAL, HOME_RANK, READY, WHERE_RANK, WHERE_ROW, await_peers, signal


@triton.jit
def _row_source(meta, row, slot_of_row, tokens, rank, sends):
    """EXPERT_*: int32 (source rank, token, slot) of a row."""
    at = (meta + row * 12).to(tl.pointer_type(tl.int32))
    tl.store(at, tl.zeros_like(tokens) + rank, mask=sends)
    tl.store(at + 1, tokens, mask=sends)
    tl.store(at + 2, tl.zeros_like(tokens) + slot_of_row, mask=sends)


@triton.jit
def _row_routing(
    meta, row, topk_idx, topk_weights, home, tokens, owner, sends,
    E: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """COMPACT: int32 token, K local expert ids (-1 for experts elsewhere) and K float32 weights of a row."""
    slot = tl.arange(0, SLOTS)[None, :]
    at = (meta + row * (4 * (1 + 2 * K))).to(tl.pointer_type(tl.int32))
    tl.store(at, tokens, mask=sends)
    listed = sends[:, None] & (slot < K)
    source = tokens.to(tl.int64)[:, None] * K + slot
    ids = tl.load(topk_idx + source, mask=listed, other=-1)
    legal = listed & (ids >= 0) & (ids < E)
    at_home = tl.load(home + tl.where(legal, ids, 0), mask=legal, other=-1)
    here = legal & ((at_home >> HOME_RANK) == owner[:, None])
    tl.store(at[:, None] + 1 + slot, tl.where(here, at_home & HOME_LOCAL, -1), mask=listed)
    if WEIGHTED:
        weights = tl.load(topk_weights + source, mask=here, other=0.0)
    else:
        weights = tl.where(here, 1.0, 0.0)
    tl.store((at[:, None] + 1 + K + slot).to(tl.pointer_type(tl.float32), bitcast=True), weights, mask=listed)


@triton.jit(do_not_specialize=["rank", "num_tokens", "spin_limit"])
def dispatch_send(
    x, sf_in, where, topk_idx, topk_weights, home, row_bases, word_bases, epochs, tickets, status,
    rank, num_tokens, sf_at, meta_at, spin_limit,
    R: tl.constexpr, RANKS: tl.constexpr, E: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, width: tl.constexpr, unit_bytes: tl.constexpr,
    sf_units: tl.constexpr, SF_UNITS: tl.constexpr, sf_unit_bytes: tl.constexpr,
    FP8: tl.constexpr, UE8M0: tl.constexpr, COMPACT: tl.constexpr, WEIGHTED: tl.constexpr, ROUTING: tl.constexpr,
    RECEIVE: tl.constexpr,
):  # fmt: skip
    """Rows [T, width], of values (FP8: bfloat16 in, e4m3 out) or of opaque units of `unit_bytes`, in LINES * BLOCK
    columns. Scale factors: sf_units units of sf_unit_bytes a row, made here (FP8) or taken from sf_in [T, sf_units].
    """
    column = tl.arange(0, LINES)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (column < width)[None, :, :]
    slot = tl.arange(0, SLOTS)[None, :]
    sf_column = tl.arange(0, SF_UNITS)[None, :]
    out_bytes: tl.constexpr = width if FP8 else width * unit_bytes
    if sf_units > 0:
        sf_type: tl.constexpr = tl.int32 if sf_unit_bytes == 4 else tl.uint8
    for chunk in range(tl.program_id(0), tl.cdiv(num_tokens, ROWS), tl.num_programs(0)):
        tokens = chunk * ROWS + tl.arange(0, ROWS)
        live = tokens < num_tokens
        source = x + tokens.to(tl.int64)[:, None, None] * width
        values = tl.load(source + column[None, :, :], mask=live[:, None, None] & inside, other=0)
        listed = live[:, None] & (slot < K)
        places = tl.load(where + tokens.to(tl.int64)[:, None] * K + slot, mask=listed, other=-1)
        bases = tl.load(row_bases + (tl.maximum(places, 0) >> WHERE_RANK), mask=places >= 0, other=0)
        if FP8:
            codes, scales = encode_blocks(tl.reshape(values, [ROWS * LINES, BLOCK]), UE8M0)
            values = tl.reshape(codes, [ROWS, LINES, BLOCK])
            scales = tl.reshape(scales, [ROWS, LINES])
            if UE8M0:
                scales = tl.where(sf_column < (width + BLOCK - 1) // BLOCK, scales, 0).to(tl.uint8)
        elif sf_units > 0:
            at = tokens.to(tl.int64)[:, None] * sf_units + sf_column
            scales = tl.load(sf_in + at, mask=live[:, None] & (sf_column < sf_units), other=0)
        for k in tl.static_range(K):
            base = tl.sum(tl.where(slot == k, bases, 0), axis=1)
            place = tl.sum(tl.where(slot == k, places, 0), axis=1)
            sends = base != 0
            row = place & WHERE_ROW
            out = (base + row * out_bytes).to(tl.pointer_type(values.dtype))
            out = tl.multiple_of(out, 16 if out_bytes % 16 == 0 else unit_bytes)
            tl.store(out[:, None, None] + column[None, :, :], values, mask=sends[:, None, None] & inside)
            if sf_units > 0:
                sf = (base + sf_at + row * (sf_units * sf_unit_bytes)).to(tl.pointer_type(sf_type))
                tl.store(sf[:, None] + sf_column, scales, mask=sends[:, None] & (sf_column < sf_units))
            if ROUTING:
                if COMPACT:
                    owner = (place >> WHERE_RANK).to(tl.int32)
                    _row_routing(
                        base + meta_at, row, topk_idx, topk_weights, home, tokens, owner, sends, E, K, SLOTS, WEIGHTED
                    )
                else:
                    _row_source(base + meta_at, row, k, tokens, rank, sends)
    if R > 1:
        epoch = tl.load(epochs) + 1
        last = ticket_acq_rel(tickets) == tl.num_programs(0) - 1
        if last:
            tl.store(tickets, 0)
            tl.store(epochs, epoch)
            signal(word_bases, READY, epoch, 0, rank, R, RANKS)
            if RECEIVE:
                await_peers(word_bases, READY, epoch, rank, status, spin_limit, R, RANKS)
