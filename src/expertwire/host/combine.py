"""Combine on the host: from an expert's output row to the window of the rank the token came from, and to its sum.

The record of (token t, slot k) has a fixed place, so ascending slots are the order of summation for every layout: where
a rank sends one row per token, the row takes the place of the highest slot that the rank serves.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from expertwire.host.dispatch import Arrivals, Routing
from expertwire.host.kernels import Array
from expertwire.host.runtime import Header, HostRuntime, Segments
from expertwire.layouts.rows import CombineRow
from expertwire.ordering.operations import Region
from expertwire.protocols import lane as protocol
from expertwire.protocols.lane import Lane

Rows = Literal["token", "rank", "none"]  # what travels: a row per (token, slot), one per (token, rank), weights alone


def send(
    runtime: HostRuntime,
    lane: Lane,
    epoch: int,
    arrivals: Arrivals,
    outgoing: Array,
    row: CombineRow,
    sf: Array | None,
    weights: Array | None,
    header: Header,
    *,
    keep_own: bool,
) -> None:
    """Send half: outgoing [m, K] int64 addresses of the rows to send back, 0 = none; `sf` likewise, for their metadata.

    `weights` [m, K] float32 travel back for every slot that this rank serves. With `keep_own` own rows are not copied.
    """
    layout = runtime.layout
    num_topk = outgoing.shape[1]

    def put(peer: int, region: Region, count: int) -> Segments:
        segments = [runtime.write_header(peer, layout.combine_header(region.bank, region.writer), epoch, header)]
        mine = slice(int(arrivals.offsets[peer]), int(arrivals.offsets[peer + 1]))
        cell = arrivals.tokens[mine, None].astype(np.int64) * num_topk + np.arange(num_topk)
        slots = layout.combine_rows(region.bank) + row.stride * cell
        base = runtime.base[peer]
        if count and not (keep_own and peer == runtime.rank):
            is_row = outgoing[mine] != 0
            runtime.move(outgoing[mine][is_row], base + slots[is_row], row.payload_bytes)
            segments.append((slots[is_row], row.payload_bytes))
            if sf is not None:
                runtime.move(sf[mine][is_row], base + slots[is_row] + row.sf, row.sf_bytes)
                segments.append((slots[is_row] + row.sf, row.sf_bytes))
        if weights is not None:
            served = arrivals.topk_idx[mine] >= 0
            cells = weights.ctypes.data + 4 * np.arange(weights.size).reshape(weights.shape)
            runtime.move(cells[mine][served], base + slots[served] + row.weight, 4)
            segments.append((slots[served] + row.weight, 4))
        return segments

    starts = arrivals.offsets[:-1]
    sent = np.concatenate([[0], np.cumsum((outgoing != 0).sum(axis=1))])
    counts = [int(n) for n in sent[arrivals.offsets[1:]] - sent[starts]]
    runtime.run("combine send", protocol.send(lane, runtime.rank, epoch, counts), put)


def receive(
    runtime: HostRuntime, lane: Lane, epoch: int, routing: Routing, row: CombineRow, settings: str, rows: Rows
) -> tuple[Array, int, bool]:
    """Receive half: the address of each record in the own window [T, K], 0 = no row; how many rows are missing; and
    whether any rank needs gradients.

    Rows are missing if their rank is masked.
    """
    layout, bank = runtime.layout, lane.bank(epoch)
    counts = runtime.run("combine receive", protocol.receive(lane, runtime.rank, epoch, runtime.num_ranks))
    headers = [layout.combine_header(bank, writer) for writer in range(runtime.num_ranks)]
    needs_grad = runtime.check_headers("combine", epoch, counts, headers, settings)
    served = routing.slot_rank >= 0
    expected = {"token": served, "rank": served & routing.is_last, "none": served & False}[rows]
    present = expected & np.isin(routing.slot_rank, list(counts))
    for writer, count in counts.items():
        assert count == (present & (routing.slot_rank == writer)).sum(), "a combine brought another number of rows"
    num_tokens, num_topk = present.shape
    records = runtime.base[runtime.rank] + layout.combine_rows(bank)
    slots = records + row.stride * np.arange(num_tokens * num_topk).reshape(num_tokens, num_topk)
    return np.where(present, slots, 0), int(expected.sum() - present.sum()), needs_grad
