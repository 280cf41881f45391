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
from expertwire.host.runtime import Header, HostRuntime, Segments, any_needs_grad
from expertwire.layouts.rows import CombineRow
from expertwire.layouts.window import HEADER_BYTES
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
    layout, described = runtime.layout, header.pack(epoch)
    parts = [(outgoing, 0, row.payload_bytes)]
    if sf is not None:
        parts.append((sf, row.sf, row.sf_bytes))
    weight_cells = None
    if weights is not None:
        cells = weights.ctypes.data + 4 * np.arange(weights.size).reshape(weights.shape)
        weight_cells = np.where(arrivals.topk_idx >= 0, cells, 0)

    def put(peer: int, region: Region, count: int) -> Segments:
        segments = runtime.write_header(peer, layout.combine_header(region.bank, region.writer), described)
        mine = arrivals.rows_from(peer)
        first, tokens = layout.combine_rows(region.bank, region.writer), arrivals.tokens[mine]
        if count and not (keep_own and peer == runtime.rank):
            for table, at, num_bytes in parts:
                segments += runtime.scatter(peer, table[mine], tokens, first + at, row.stride, num_bytes, count)
        if weight_cells is not None:
            segments += runtime.scatter(peer, weight_cells[mine], tokens, first + row.weight, row.stride, 4, 0)
        return segments

    runtime.run("combine send", protocol.send(lane, runtime.rank, epoch, counts), put)


def receive(
    runtime: HostRuntime, lane: Lane, epoch: int, routing: Routing, row: CombineRow, settings: str, rows: Rows
) -> tuple[Array, Array, int, bool]:
    """Receive half: the address of each record in the own window [T, K], 0 = no row; which ranks were heard [R]; how
    many rows are missing, since their ranks are masked; and whether any rank needs gradients.
    """
    layout, bank = runtime.layout, lane.bank(epoch)
    counts = runtime.run("combine receive", protocol.receive(lane, runtime.rank, epoch, runtime.num_ranks))
    flags = runtime.check_headers("combine", epoch, counts, layout.combine_header(bank, 0), HEADER_BYTES, settings)
    heard = np.array([peer in counts for peer in range(runtime.num_ranks)], np.bool_)
    if rows == "none":
        return np.zeros(routing.slot_rank.shape, np.int64), heard, 0, any_needs_grad(flags)
    records = runtime.base[runtime.rank] + layout.combine_rows(bank, 0)
    table, expected, missing = runtime.kernels.expected_rows(
        routing.slot_rank, routing.is_last, rows == "token", heard, records, layout.combine_apart, row.stride
    )
    brought = [counts.get(peer, 0) for peer in range(runtime.num_ranks)]
    assert brought == expected.tolist(), f"combine brought {brought} rows, not {expected}"
    return table, heard, missing, any_needs_grad(flags)
