"""Send half of dispatch along a plan: each token's row, quantised on the way if asked, to all of its final places.

With PLACE the plan is finished here: a block finds the places of its tokens while their rows are being loaded.

A block takes ROWS whole rows at a time as one tile, so that few blocks keep many loads in flight; a row is loaded (and
quantised) once, however many places it goes to, and the next tile is loaded meanwhile. The last block out signals; with
RECEIVE it then waits for the peers.

Orders: rows are plain stores, ordered by the ticket (acq_rel, gpu), published by `exchange_release` (sys).

Bytes moved: T * 2 * hidden read, payload + scale factors written for every place. Worked example: `place`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.counts import NUMBER
from expertwire.kernels.memory import ticket_acq_rel
from expertwire.kernels.place import place_experts, place_ranks
from expertwire.kernels.profile import dispatch_send_bytes
from expertwire.kernels.quantize import encode_blocks
from expertwire.kernels.routing import (
    READY,
    REFUSED_OR_LATE,
    WHERE_RANK,
    WHERE_ROW,
    receive_rows,
    say,
    signal,
)


@triton.jit
def _scale_rows(sends_to, row_bases, token, live, nth, sf_at, sf_bytes: tl.constexpr, SENDS: tl.constexpr):
    """Addresses of the scale factors of the nth place of each token, 0 = no such place."""
    place = tl.load(sends_to + token * SENDS + nth, mask=live, other=-1)
    base = tl.load(row_bases + (tl.maximum(place, 0) >> WHERE_RANK), mask=place >= 0, other=0)
    return tl.where(place >= 0, base + sf_at + (place & WHERE_ROW) * sf_bytes, 0)


@triton.jit
def _copy_scales(
    sf_in, sends_to, row_bases, chunk, num_tokens, sf_at, sf_type: tl.constexpr,
    SENDS: tl.constexpr, ROWS: tl.constexpr, sf_units: tl.constexpr, SF_UNITS: tl.constexpr,
    sf_unit_bytes: tl.constexpr,
):  # fmt: skip
    """Scale factors that came with opaque rows, to all places of ROWS rows."""
    token = (chunk * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
    live = token < num_tokens
    unit = tl.arange(0, SF_UNITS)[None, :]
    scales = tl.load(sf_in + token * sf_units + unit, mask=live & (unit < sf_units), other=0)
    for nth in tl.static_range(SENDS):
        sf = _scale_rows(sends_to, row_bases, token, live, nth, sf_at, sf_units * sf_unit_bytes, SENDS)
        tl.store(sf.to(tl.pointer_type(sf_type)) + unit, scales, mask=(sf != 0) & (unit < sf_units))


@triton.jit(
    do_not_specialize=["rank", "num_tokens", "sf_at", "meta_at", "timeout_us", "name"],
    launch_metadata=dispatch_send_bytes,
)
def dispatch_send(
    x, sf_in, sends_to, topk_idx, topk_weights, counts, num_tokens, name, timeout_us,
    keys, indexes, block_counts, first_rows, home, addresses, row_bases, word_bases, epochs, tickets, status, rank,
    sf_at, meta_at,
    R: tl.constexpr, RANKS: tl.constexpr, E: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr,
    KEYS: tl.constexpr, PLACE: tl.constexpr, COMPACT: tl.constexpr, SENDS: tl.constexpr, ROWS: tl.constexpr,
    LINES: tl.constexpr, BLOCK: tl.constexpr, width: tl.constexpr, unit_bytes: tl.constexpr, sf_units: tl.constexpr,
    SF_UNITS: tl.constexpr, sf_unit_bytes: tl.constexpr, FP8: tl.constexpr, UE8M0: tl.constexpr, RECEIVE: tl.constexpr,
    VOID: tl.constexpr,
):  # fmt: skip
    """Rows [T, width], of values (FP8: bfloat16 in, e4m3 out) or of opaque units of `unit_bytes`.

    A tile has ROWS * LINES lines of BLOCK columns, LINES of them a row. Scale factors: sf_units units of sf_unit_bytes
    a row, made here (FP8, one a line) or taken from sf_in [T, sf_units]. keys, indexes, block_counts and first_rows are
    of the plan, None without PLACE; topk_idx and topk_weights [T, K] are for COMPACT, whose rows take them along. In a
    step that the plan found void no rows go out, and READY says REFUSED: a peer for whom nobody was late must not take
    its rows to be complete; unless peers only made other calls, which they see from `name`. That is in number VOID of
    `counts`, which is written with RECEIVE.
    """
    line = tl.arange(0, ROWS * LINES)
    column = (line % LINES)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < width
    out_bytes: tl.constexpr = width if FP8 else width * unit_bytes
    align: tl.constexpr = 16 if out_bytes % 16 == 0 else (8 if out_bytes % 8 == 0 else (1 if FP8 else unit_bytes))
    sf_type: tl.constexpr = tl.int32 if sf_unit_bytes == 4 else tl.uint8
    token = tl.program_id(0) * ROWS + (line // LINES).to(tl.int64)
    coming = tl.load(x + token[:, None] * width + column, mask=(token < num_tokens)[:, None] & inside, other=0)
    for chunk in range(tl.program_id(0), tl.cdiv(num_tokens, ROWS), tl.num_programs(0)):
        values = coming
        if PLACE and COMPACT:
            place_ranks(
                topk_idx, topk_weights, keys, indexes, block_counts, first_rows, home, row_bases, sends_to, addresses,
                chunk * ROWS, num_tokens, rank, meta_at, R, E, K, SLOTS, SENDS, TOKENS, ROWS, out_bytes,
            )  # fmt: skip
        elif PLACE:
            place_experts(
                keys, block_counts, first_rows, home, row_bases, sends_to, addresses, chunk * ROWS, num_tokens, rank,
                meta_at, R, E, K, SLOTS, TOKENS, ROWS, KEYS, out_bytes,
            )  # fmt: skip
        token = chunk * ROWS + (line // LINES).to(tl.int64)
        live = token < num_tokens
        address = tl.load(addresses + token * SENDS, mask=live, other=0)
        after = token + tl.num_programs(0) * ROWS
        coming = tl.load(x + after[:, None] * width + column, mask=(after < num_tokens)[:, None] & inside, other=0)
        if FP8:
            values, scales = encode_blocks(values, UE8M0)
            if UE8M0:
                scales = tl.where(line % LINES < (width + BLOCK - 1) // BLOCK, scales, 0).to(tl.uint8)
        for nth in tl.static_range(SENDS):
            out = tl.multiple_of(address.to(tl.pointer_type(values.dtype)), align)
            sends = address != 0
            if nth + 1 < SENDS:
                address = tl.load(addresses + token * SENDS + nth + 1, mask=live, other=0)
            tl.store(out[:, None] + column, values, mask=sends[:, None] & inside)
        if FP8:
            for nth in tl.static_range(SENDS):
                sf = _scale_rows(sends_to, row_bases, token, live, nth, sf_at, sf_units * sf_unit_bytes, SENDS)
                unit = line % LINES
                tl.store(sf.to(tl.pointer_type(sf_type)) + unit, scales, mask=(sf != 0) & (unit < sf_units))
        elif sf_units > 0:
            _copy_scales(
                sf_in,
                sends_to,
                row_bases,
                chunk,
                num_tokens,
                sf_at,
                sf_type,
                SENDS,
                ROWS,
                sf_units,
                SF_UNITS,
                sf_unit_bytes,
            )
    if R > 1:
        epoch = tl.load(epochs) + 1
        if ticket_acq_rel(tickets) == tl.num_programs(0) - 1:
            tl.store(tickets, 0)
            tl.store(epochs, epoch)
            said = say(name, tl.load(counts + NUMBER))
            refused = (tl.load(counts + VOID) & REFUSED_OR_LATE) > 0
            signal(word_bases, READY, epoch, tl.where(refused, -1, said), rank, R, RANKS)
            if RECEIVE:
                receive_rows(counts, VOID, name, word_bases, epoch, rank, status, timeout_us, R, RANKS)
