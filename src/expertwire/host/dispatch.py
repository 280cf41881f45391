"""Dispatch on the host: from a token's row to a peer's window, and from the own window to a place in the output.

Rows travel as raw bytes; what they mean is the wire format's business. A row of the own rank needs no trip through the
window: unless the receive half is deferred, it is read where the caller keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from expertwire.host.kernels import Array
from expertwire.host.runtime import Header, HostRuntime, Segments
from expertwire.layouts.rows import DispatchRow
from expertwire.ordering.operations import Region
from expertwire.protocols import lane as protocol
from expertwire.protocols.epoch_signal import REFUSED
from expertwire.protocols.lane import Lane


@dataclass(frozen=True)
class Routing:
    """Where the selections of this rank's tokens go. Made from `topk_idx` alone; T tokens, K slots, R ranks.

    slot_rank, slot_local [T, K] int32   rank and local expert of each slot, -1 = none
    is_last [T, K] bool                  the slot is the highest of its token that its rank serves
    offsets [R + 1], tokens              rank r gets tokens[offsets[r]:offsets[r + 1]]
    weights [T, K] float32               all ones where the caller gave none (`weighted` False)
    """

    slot_rank: Array
    slot_local: Array
    is_last: Array
    offsets: Array
    tokens: Array
    weights: Array
    weighted: bool
    repeats: int

    @property
    def num_tokens(self) -> int:
        return int(self.slot_rank.shape[0])

    @property
    def rows_per_peer(self) -> list[int]:
        rows: list[int] = (self.offsets[1:] - self.offsets[:-1]).tolist()
        return rows


@dataclass(frozen=True)
class Arrivals:
    """What arrived: m rows by source rank, then source token.

    offsets [R + 1]          rows offsets[s]:offsets[s + 1] come from rank s
    tokens [m] int32         token index on the source rank
    topk_idx [m, K] int32    local expert ids, -1 for experts elsewhere
    weights [m, K] float32   0 where topk_idx is -1
    """

    offsets: Array
    tokens: Array
    topk_idx: Array
    weights: Array

    @property
    def num_rows(self) -> int:
        return int(self.offsets[-1])

    @property
    def rows_per_peer(self) -> Array:
        rows: Array = self.offsets[1:] - self.offsets[:-1]
        return rows

    @property
    def last_slot(self) -> Array:
        """[m] the highest slot of each row that this rank serves."""
        slots: Array = self.topk_idx.shape[1] - 1 - np.argmax(self.topk_idx[:, ::-1] >= 0, axis=1)
        return slots


@dataclass(frozen=True)
class WireRows:
    """Encoded rows of this rank: address of row 0, bytes per row, for payload and scale factors. `owner` keeps them."""

    payload: int
    payload_bytes: int
    sf: int
    sf_bytes: int
    owner: object


def send(
    runtime: HostRuntime,
    lane: Lane,
    epoch: int,
    routing: Routing,
    rows: WireRows,
    row: DispatchRow,
    header: Header,
    *,
    cached: bool,
    keep_own: bool,
) -> None:
    """Send half. With `cached` the receivers know the routing already; with `keep_own` own rows are not copied."""
    layout, kernels, described = runtime.layout, runtime.kernels, header.pack(epoch)

    def put(peer: int, region: Region, count: int) -> Segments:
        head = runtime.write_header(peer, layout.dispatch_header(region.bank, region.writer), described)
        if count == 0:
            return head
        tokens = routing.tokens[routing.offsets[peer] : routing.offsets[peer + 1]]
        first = layout.dispatch_rows(region.bank, region.writer)
        records = runtime.base[peer] + first
        if not (keep_own and peer == runtime.rank):
            places = records + row.stride * np.arange(count)
            runtime.move(rows.payload + rows.payload_bytes * tokens.astype(np.int64), places, rows.payload_bytes)
            if rows.sf_bytes:
                runtime.move(rows.sf + rows.sf_bytes * tokens.astype(np.int64), places + row.sf, rows.sf_bytes)
        if not cached:
            kernels.write_routing(
                records, row.stride, row.topk_idx, row.topk_weights, row.token,
                tokens, peer, routing.slot_rank, routing.slot_local, routing.weights,
            )  # fmt: skip
        if runtime.hands_over:
            head.append((first + row.stride * np.arange(count), row.stride))
        return head

    runtime.run("dispatch send", protocol.send(lane, runtime.rank, epoch, routing.rows_per_peer), put)


def refuse(runtime: HostRuntime, lane: Lane, epoch: int, reason: str) -> None:
    """Tell every peer that this rank's call is void, and why."""
    header_of = {"dispatch": runtime.layout.dispatch_header, "combine": runtime.layout.combine_header}[lane.name]

    def put(peer: int, region: Region, count: int) -> Segments:
        return runtime.write_header(peer, header_of(region.bank, region.writer), Header(reason).pack(epoch))

    counts = [REFUSED] * runtime.num_ranks
    runtime.run(f"{lane.name} send", protocol.send(lane, runtime.rank, epoch, counts), put)


def receive(
    runtime: HostRuntime, lane: Lane, epoch: int, row: DispatchRow, settings: str, known: Arrivals | None
) -> tuple[Arrivals, Array, bool]:
    """Receive half: what arrived; the address of each record in the own window (0 where a masked peer's is missing);
    and whether any rank needs gradients.

    With `known` (cached dispatch) the routing is taken from there.
    """
    layout, bank = runtime.layout, lane.bank(epoch)
    counts = runtime.run("dispatch receive", protocol.receive(lane, runtime.rank, epoch, runtime.num_ranks))
    headers = [layout.dispatch_header(bank, writer) for writer in range(runtime.num_ranks)]
    needs_grad = runtime.check_headers("dispatch", epoch, counts, headers, settings)
    present = np.array([counts.get(peer, 0) for peer in range(runtime.num_ranks)])
    if known is None:
        offsets = np.concatenate([[0], np.cumsum(present)])
        shape = (int(offsets[-1]), row.num_topk)
        arrivals = Arrivals(
            offsets, np.empty(shape[0], np.int32), np.empty(shape, np.int32), np.empty(shape, np.float32)
        )
    else:
        arrivals = known
    addresses = np.zeros(arrivals.num_rows, np.int64)
    for writer, count in enumerate(present):
        if count == 0:
            continue
        mine = slice(int(arrivals.offsets[writer]), int(arrivals.offsets[writer + 1]))
        assert count == mine.stop - mine.start, "a cached dispatch brought another number of rows"
        records = runtime.base[runtime.rank] + layout.dispatch_rows(bank, writer)
        addresses[mine] = records + row.stride * np.arange(count)
        if known is None:
            runtime.kernels.read_routing(
                records, row.stride, row.topk_idx, row.topk_weights, row.token,
                arrivals.topk_idx[mine], arrivals.weights[mine], arrivals.tokens[mine],
            )  # fmt: skip
    return arrivals, addresses, needs_grad
