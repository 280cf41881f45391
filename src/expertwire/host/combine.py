"""Combine on the host: from an expert's output row to the window of the rank the token came from, and to its sum.

The record of (token t, slot k) has a fixed place, so ascending slots are the order of summation for every layout: where
a rank sends one row per token, the row takes the place of the highest slot that the rank serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from expertwire.host.dispatch import Arrivals, Routing
from expertwire.host.kernels import Array
from expertwire.host.runtime import NEEDS_GRAD, Header, HostRuntime, Segments
from expertwire.layouts.rows import CombineRow
from expertwire.layouts.window import HEADER_BYTES
from expertwire.ordering.operations import Region
from expertwire.protocols.lane import Lane

Rows = Literal["token", "rank", "none"]  # what travels: a row per (token, slot), one per (token, rank), weights alone


def send(
    runtime: HostRuntime,
    lane: Lane,
    epoch: int,
    arrivals: Arrivals,
    outgoing: Array,
    counts: Sequence[int],
    row: CombineRow,
    sf: Array | None,
    weights: Array | None,
    header: Header,
    *,
    keep_own: bool,
) -> None:
    """Send half: outgoing [m, K] int64 addresses of the rows to send back, 0 = none, counts[p] of them to rank p; `sf`
    likewise, for their metadata.

    `weights` [m, K] float32 travel back for every slot that this rank serves. With `keep_own` own rows are not copied.
    """
    parts = [(outgoing, 0, row.payload_bytes)]
    if sf is not None:
        parts.append((sf, row.sf, row.sf_bytes))
    weight_cells = None
    if weights is not None:
        cells = weights.ctypes.data + 4 * np.arange(weights.size).reshape(weights.shape)
        weight_cells = np.where(arrivals.topk_idx >= 0, cells, 0)

    def put(peer: int, region: Region, count: int) -> Segments:
        segments = runtime.write_header(peer, runtime.header_at(region), *header)
        moves = count > 0 and not (keep_own and peer == runtime.rank)
        if not moves and weight_cells is None:
            return segments
        first, mine = runtime.rows_at(region), arrivals.rows_from(peer)
        tokens = arrivals.tokens[mine]
        if moves:
            for table, at, num_bytes in parts:
                segments += runtime.scatter(peer, table[mine], tokens, first + at, row.stride, num_bytes, count)
        if weight_cells is not None:
            segments += runtime.scatter(peer, weight_cells[mine], tokens, first + row.weight, row.stride, 4, 0)
        return segments

    runtime.run("combine send", runtime.halves(lane, epoch).send, put, epoch=epoch, counts=counts)


def receive(
    runtime: HostRuntime, lane: Lane, epoch: int, routing: Routing, row: CombineRow, header: Header, rows: Rows
) -> tuple[Array, Array, int, bool]:
    """Receive half: the address of each record in the own window [T, K], 0 = no row; how many rows each rank brought
    [R], ABSENT for masked ones; how many rows are missing for that reason; and whether any rank needs gradients.
    """
    layout, region = runtime.layout, lane.rows(epoch, 0)
    counts = runtime.run("combine receive", runtime.halves(lane, epoch).receive, epoch=epoch)
    flags, _ = runtime.check_headers("combine", epoch, counts, runtime.header_at(region), HEADER_BYTES, header)
    needs_grad = bool(flags & NEEDS_GRAD)
    brought = np.array(counts, np.int64)
    if rows == "none":
        return np.zeros(routing.slot_rank.shape, np.int64), brought, 0, needs_grad
    records = runtime.base[runtime.rank] + runtime.rows_at(region)
    table, missing, agrees = runtime.kernels.expected_rows(
        routing.slots, rows == "token", brought, records, layout.combine_apart, row.stride
    )
    assert agrees, f"combine brought {brought} rows, which is not what was dispatched"
    return table, brought, missing, needs_grad
