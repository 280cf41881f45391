"""The host engine: dispatch and combine of one rank on CPU memory, as send and receive halves.

The way of a token:  `route` (where to) -> `send_dispatch` (its row into the peers' windows) -> `receive_dispatch`
(rows into their final places) -> the caller's experts -> `send_combine` (rows into the windows of the ranks they came
from) -> `receive_combine` (sums).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from operator import add

import numpy as np
import torch

from expertwire.formats import BF16, FP8Block, LogFMT10, WireFormat
from expertwire.host import combine, dispatch
from expertwire.host.combine import Rows
from expertwire.host.dispatch import IN_WINDOW, Arrivals, Meeting, Routing, Sent, WireRows
from expertwire.host.kernels import Array
from expertwire.host.placed import Arrangement, Placed
from expertwire.host.pool import Pool
from expertwire.host.runtime import Header, HostRuntime
from expertwire.layouts.receive import Layout, worst_case_rows
from expertwire.layouts.rows import CombineRow, DispatchRow
from expertwire.protocols.lane import Lane
from expertwire.topology import Placement

Dtypes = tuple[torch.dtype, torch.dtype | None]  # of payload and scale factors

_POISON = 0xFF
_ANNOUNCE_FROM_BYTES = 1 << 20  # rows for one peer; below, waiting for a place costs more than a copy
_NO_BIAS = np.empty(0, np.int64)
_dispatch_row = lru_cache(maxsize=64)(DispatchRow)
_combine_row = lru_cache(maxsize=64)(CombineRow)


@dataclass(slots=True)
class Received:
    """One dispatch as it arrived: [num_rows, ...] of payload and scale factors, in their places."""

    placed: Placed
    payload: torch.Tensor
    sf: torch.Tensor | None
    needs_grad: bool


class HostEngine:
    """Row work of one rank. `dispatches` and `combines` count the steps of the two lanes."""

    def __init__(self, runtime: HostRuntime, placement: Placement) -> None:
        self.runtime = runtime
        self.kernels = runtime.kernels
        self.rank, self.num_ranks = runtime.rank, runtime.num_ranks
        self.capacity, self.num_topk = runtime.layout.capacity, runtime.layout.num_topk
        self.hidden = runtime.layout.hidden
        self.pool = Pool()
        self.expert_rank = np.array(placement.expert_ranks, np.int32)
        self.expert_local = np.array(placement.local_ids(), np.int32)
        self.num_local_experts = len(placement.local_experts(self.rank))
        self.dispatch_lane = Lane("dispatch", runtime.layout.num_banks)
        self.combine_lane = Lane("combine", runtime.layout.num_banks)
        self.rows_sent = [0] * self.num_ranks
        self.rows_received = [0] * self.num_ranks
        self.bytes_sent = [0] * self.num_ranks
        self.announce_from_bytes = _ANNOUNCE_FROM_BYTES
        self._workspaces: dict[tuple[int, int, bool], torch.Tensor] = {}

    # -- send dispatch -------------------------------------------------------------------------------------------

    def route(self, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, *, distinct: bool) -> Routing:
        """Where the selections go; `distinct` drops a later slot that repeats an expert of its token."""
        ids, weighted = topk_idx if topk_idx.dtype is torch.int64 else topk_idx.long(), topk_weights is not None
        slots, offsets, tokens, weights, repeats, illegal = self.kernels.route(
            ids.data_ptr(), topk_weights.data_ptr() if topk_weights is not None else 0, ids.shape[0], self.num_topk,
            self.expert_rank, self.expert_local, self.num_ranks, distinct,
        )  # fmt: skip
        bounds: list[int] = offsets.tolist()
        per_peer = [last - first for first, last in pairwise(bounds)]
        return Routing(slots, bounds, tokens, per_peer, weights, weighted, repeats, illegal)

    def encode(self, x: torch.Tensor, wire: WireFormat) -> WireRows:
        """Rows in their wire format. BF16 rows are not copied."""
        if isinstance(wire, BF16):
            return self.opaque(x, None)
        if isinstance(wire, FP8Block):
            payload = self.pool.empty(x.shape, torch.uint8)
            sf_bytes = wire.sf_bytes(x.shape[1])
            sf = self.pool.empty((x.shape[0], sf_bytes), torch.uint8)
            packed = wire.scale == "ue8m0"
            self.kernels.encode_fp8(
                x.data_ptr(), x.shape[0], x.shape[1], wire.block, packed, payload.data_ptr(), sf.data_ptr(), sf_bytes
            )
            return self.opaque(payload, sf)
        if isinstance(wire, LogFMT10):
            payload = self.pool.empty((x.shape[0], wire.payload_bytes(x.shape[1])), torch.uint8)
            sf = self.pool.empty((x.shape[0], wire.sf_bytes(x.shape[1])), torch.uint8)
            self.kernels.encode_logfmt(x.data_ptr(), x.shape[0], x.shape[1], payload.data_ptr(), sf.data_ptr())
            return self.opaque(payload, sf)
        return self.opaque(*wire.encode(x))

    def decode(self, payload: torch.Tensor, sf: torch.Tensor, wire: FP8Block) -> torch.Tensor:
        """FP8 rows [n, hidden] with contiguous scale factors as bfloat16."""
        num_rows, hidden = payload.shape
        out = self.pool.empty((num_rows, hidden), torch.bfloat16)
        sf_bytes, packed = wire.sf_bytes(hidden), wire.scale == "ue8m0"
        self.kernels.decode_fp8(
            payload.data_ptr(), sf.data_ptr(), num_rows, hidden, wire.block, packed, sf_bytes, out.data_ptr()
        )
        return out

    def opaque(self, payload: torch.Tensor, sf: torch.Tensor | None) -> WireRows:
        """Rows whose bytes are not interpreted: contiguous payload [T, W] and scale factors [T, S]."""
        sf_row = 0 if sf is None else sf.shape[1] * sf.element_size()
        sf_at = 0 if sf is None else sf.data_ptr()
        return WireRows(payload.data_ptr(), payload.shape[1] * payload.element_size(), sf_at, sf_row, (payload, sf))

    def dispatch_row(self, payload_bytes: int, sf_bytes: int) -> DispatchRow:
        return _dispatch_row(payload_bytes, sf_bytes)

    def send_dispatch(
        self,
        epoch: int,
        routing: Routing,
        rows: WireRows,
        row: DispatchRow,
        header: Header,
        layout: Layout,
        *,
        cached: bool,
        defers: bool,
    ) -> Sent:
        """Send half; the result is what a receive half that follows at once still has to do."""
        counts = routing.rows_per_peer
        announced = () if defers else self._announced(counts, row, layout)
        sent = Sent(routing, rows, announced)
        dispatch.send(self.runtime, self.dispatch_lane, epoch, sent, row, header, cached=cached, defers=defers)
        self.rows_sent = [*map(add, self.rows_sent, counts)]
        self._count_bytes(counts, row.stride)
        return sent

    def _count_bytes(self, counts: Sequence[int], row_bytes: int) -> None:
        if any(counts):
            self.bytes_sent = [seen + count * row_bytes for seen, count in zip(self.bytes_sent, counts, strict=True)]

    def _announced(self, counts: list[int], row: DispatchRow, layout: Layout) -> tuple[int, ...]:
        """The peers whose rows had better wait for their final place. COMPACT rows stand there once, one after the
        other; where a peer may be masked, it must not be given memory that the caller will see."""
        if layout is not Layout.COMPACT or self.runtime.mask_peers or self.runtime.hands_over:
            return ()
        least = self.announce_from_bytes
        if max(counts) * row.data_bytes < least:
            return ()
        return tuple(p for p, n in enumerate(counts) if n and p != self.rank and n * row.data_bytes >= least)

    # -- receive dispatch ----------------------------------------------------------------------------------------

    def receive_dispatch(
        self,
        epoch: int,
        row: DispatchRow,
        header: Header,
        arrangement: Arrangement,
        *,
        known: Placed | None,
        send_routing: bool,
        sent: Sent | None,
        dtypes: Dtypes,
        zero_unused: bool,
        reuse_bank: bool,
    ) -> Received:
        """Wait for all peers and put their rows into place.

        `known` repeats an earlier placement (cached dispatch), though with `send_routing` weights come along anew;
        `sent` is given unless this half was deferred: own rows are placed from there, announced ones leave now;
        `dtypes` are those of the tensors to be made;
        `zero_unused` clears rows that nobody fills; `reuse_bank` places into the bank's workspace.
        """
        runtime, lane, since = self.runtime, self.dispatch_lane, self.runtime.clock()
        repeated = known.arrivals if known and not send_routing else None
        arrivals, records, needs_grad, meeting = dispatch.receive(runtime, lane, epoch, header, repeated, since)
        self.rows_received = [*map(add, self.rows_received, arrivals.rows_per_peer)]
        placed = replace(known, arrivals=arrivals) if known else self._place(arrivals, arrangement)
        bank = lane.bank(epoch) if reuse_bank else None
        blank = zero_unused or bool(runtime.masked)
        direct = sent is not None and bool(meeting.coming) and placed.layout is Layout.COMPACT
        outputs, shared = self._outputs(bank, placed.num_rows, row, dtypes, blank, direct)
        try:
            if sent is not None and (meeting.coming or sent.announced):
                places = self._give_places(meeting, arrivals, row, outputs if shared else None)
                dispatch.meet(runtime, lane, epoch, sent, row, meeting, places, since)
            if meeting.coming and not shared:
                dispatch.land(runtime, lane, epoch, meeting, since)
            self._fill(outputs, row, records, placed, sent, meeting.coming if shared else ())
            if shared:
                dispatch.land(runtime, lane, epoch, meeting, since)
        except BaseException:
            if shared:
                runtime.outputs.keep(outputs)
            raise
        return Received(placed, outputs[0], outputs[1] if len(outputs) == 2 else None, needs_grad)

    def _give_places(
        self, meeting: Meeting, arrivals: Arrivals, row: DispatchRow, outputs: list[torch.Tensor] | None
    ) -> dict[int, tuple[int, int]]:
        """Where each peer that announced rows puts its first one: straight into `outputs`, or else into the window."""
        if outputs is None:
            return dict.fromkeys(meeting.coming, IN_WINDOW)
        widths = row.payload_bytes, row.sf_bytes
        first = [(self.runtime.outputs.place(out), width) for out, width in zip(outputs, widths, strict=False)]
        places = {}
        for peer in meeting.coming:
            at = [begin + row_bytes * arrivals.bounds[peer] for begin, row_bytes in first]
            places[peer] = at[0], at[-1]
        return places

    def _place(self, arrivals: Arrivals, arrangement: Arrangement) -> Placed:
        """The output row of every arrival, before any row has moved."""
        layout, alignment = arrangement.layout, arrangement.alignment
        room = self.num_ranks * self.capacity if layout is Layout.EXPERT_SLOTS else 0
        compact = layout is Layout.COMPACT
        rows, groups = self.kernels.arrange(arrivals.topk_idx, self.num_local_experts, alignment, room, compact)
        num_rows = arrivals.num_rows if compact else int(groups[2, -1])
        if arrangement.fixed_size:
            num_rows = worst_case_rows(
                layout, self.num_ranks, self.capacity, self.num_topk, self.num_local_experts, alignment
            )
        return Placed(layout, arrivals, rows, groups, num_rows)

    def _outputs(
        self, bank: int | None, num_rows: int, row: DispatchRow, dtypes: Dtypes, blank: bool, direct: bool
    ) -> tuple[list[torch.Tensor], bool]:
        """[num_rows, ...] for payload and, if there are any, scale factors; and whether peers can write there, which
        they should if `direct`."""
        parts, outputs = [(row.payload_bytes, dtypes[0])], []
        if row.sf_bytes and dtypes[1] is not None:
            parts.append((row.sf_bytes, dtypes[1]))
        for part, (row_bytes, dtype) in enumerate(parts):
            out = self._output(bank, part, (num_rows, row_bytes // dtype.itemsize), dtype, direct)
            if out is None:
                return self._outputs(bank, num_rows, row, dtypes, blank, False)
            if blank or self.runtime.debug_poison:
                out.view(torch.uint8).fill_(0 if blank else _POISON)
            outputs.append(out)
        return outputs, direct

    def _output(
        self, bank: int | None, part: int, shape: tuple[int, int], dtype: torch.dtype, shared: bool
    ) -> torch.Tensor | None:
        """New memory, or the workspace of `bank`; None if there is no `shared` memory left."""
        if bank is None:
            return self.runtime.outputs.empty(shape, dtype) if shared else self.pool.empty(shape, dtype)
        workspace, num_bytes = self._workspaces.get((bank, part, shared)), shape[0] * shape[1] * dtype.itemsize
        if workspace is None or workspace.numel() < num_bytes:
            workspace = self._output(None, part, (1, num_bytes), torch.uint8, shared)
            if workspace is None:
                return None
            self._workspaces[bank, part, shared] = workspace
        return workspace.view(-1)[:num_bytes].view(dtype).view(shape)

    def _fill(
        self,
        outputs: list[torch.Tensor],
        row: DispatchRow,
        records: list[int],
        placed: Placed,
        sent: Sent | None,
        direct: Collection[int],
    ) -> None:
        """Copy every arrival to its rows of `outputs`, from the records in the window (0 = missing) or, if it is the
        own rank's and `sent` tells, from where the caller keeps it. The rows of `direct` peers are there already."""
        arrivals, own = placed.arrivals, -1 if sent is None else self.rank
        if not arrivals.num_rows:
            return
        stream = self.runtime.streams(placed.num_filled, row.payload_bytes)
        for part, out in enumerate(outputs):
            at, row_bytes = (row.sf, row.sf_bytes) if part else (0, row.payload_bytes)
            first = [record + at if record and peer not in direct else 0 for peer, record in enumerate(records)]
            if sent is not None:
                first[own] = sent.rows.sf if part else sent.rows.payload
            self.kernels.place_rows(
                np.array(first, np.int64), row.stride, arrivals.offsets, own, arrivals.tokens, placed.rows,
                out.data_ptr(), row_bytes, stream,
            )  # fmt: skip

    def finish_dispatch(self, epoch: int) -> None:
        """The windows of this step may be written again."""
        layout, bank = self.runtime.layout, self.dispatch_lane.bank(epoch)
        for (of_bank, _, _), workspace in self._workspaces.items():
            if of_bank == bank:
                workspace[:0].zero_()  # autograd now refuses a backward pass that would read the recycled views
        if self.runtime.debug_poison:
            for writer in range(self.num_ranks):
                self.runtime.poison(layout.dispatch_header(bank, writer), layout.dispatch_region_bytes)
        self.runtime.run("dispatch receive", self.runtime.halves(self.dispatch_lane, epoch).finish, epoch=epoch)

    # -- combine -------------------------------------------------------------------------------------------------

    def send_combine(
        self,
        epoch: int,
        y: torch.Tensor,
        placed: Placed,
        header: Header,
        wire: WireFormat,
        *,
        rows: Rows,
        weighted: bool,
        weights: torch.Tensor | None,
        keep_own: bool,
    ) -> tuple[Array, object]:
        """Send back y [rows, hidden] bfloat16; returns the addresses of the rows sent [m, K] and what keeps them alive.

        With `rows="rank"` the rows of one token are first summed here, in ascending slots, weighted if `weighted`.
        `weights` [m, K] float32 travel back for every slot that this rank serves.
        """
        arrivals = placed.arrivals
        table, row_counts = self.kernels.outgoing_rows(placed.rows, y.data_ptr(), 2 * self.hidden, arrivals.offsets)
        counts = row_counts.tolist()
        outgoing = table if rows != "none" else np.zeros_like(table)
        keep: object = y
        if rows == "rank" and placed.layout is not Layout.COMPACT:
            outgoing, keep = self._partial_sums(outgoing, arrivals, weighted)
            counts = arrivals.rows_per_peer
        metadata = None
        row = self.combine_row(wire)
        if not isinstance(wire, BF16):
            is_row = outgoing != 0
            encoded = self.encode(self._gather(outgoing[is_row]), wire)
            index = np.cumsum(is_row).reshape(is_row.shape) - 1
            outgoing = np.where(is_row, encoded.payload + encoded.payload_bytes * index, 0)
            metadata = np.where(is_row, encoded.sf + encoded.sf_bytes * index, 0) if encoded.sf_bytes else None
            keep = encoded
        back = None if weights is None else weights.detach().numpy()
        sent = list(counts) if rows != "none" else [0] * self.num_ranks
        combine.send(
            self.runtime, self.combine_lane, epoch, arrivals, outgoing, sent, row, metadata, back, header,
            keep_own=keep_own,
        )  # fmt: skip
        self._count_bytes(sent, row.stride)
        return outgoing, keep

    def combine_row(self, wire: WireFormat) -> CombineRow:
        return _combine_row(wire.payload_bytes(self.hidden), wire.sf_bytes(self.hidden))

    def _gather(self, addresses: Array) -> torch.Tensor:
        rows = self.pool.empty((len(addresses), self.hidden), torch.bfloat16)
        self.runtime.move(addresses, _addresses(rows), 2 * self.hidden)
        return rows

    def _partial_sums(self, outgoing: Array, arrivals: Arrivals, weighted: bool) -> tuple[Array, torch.Tensor]:
        """One row per arrival, in the place of its highest slot."""
        sums = self.pool.empty((arrivals.num_rows, self.hidden), torch.bfloat16)
        self.kernels.reduce_rows(
            outgoing,
            False,
            arrivals.weights,
            weighted,
            _NO_BIAS,
            sums.data_ptr(),
            self.hidden,
            self.runtime.streams(arrivals.num_rows, 2 * self.hidden),
        )
        table = np.zeros(outgoing.shape, np.int64)
        table[np.arange(arrivals.num_rows), arrivals.last_slot] = _addresses(sums)
        return table, sums

    def receive_combine(
        self,
        epoch: int,
        routing: Routing,
        header: Header,
        wire: WireFormat,
        *,
        rows: Rows,
        weighted: bool,
        biases: Sequence[torch.Tensor],
        return_weights: bool,
        own: tuple[Arrivals, Array] | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, int, bool]:
        """Wait for all peers and sum their rows: (x [T, hidden], weights [T, K] or None, rows missing, needs_grad)."""
        row = self.combine_row(wire)
        records, brought, num_missing, needs_grad = combine.receive(
            self.runtime, self.combine_lane, epoch, routing, row, header, rows
        )
        returned = None
        if return_weights:
            returned = self._returned_weights(epoch, routing, row, brought >= 0)
        operands = records
        if own is not None:
            arrivals, outgoing = own
            first, end = arrivals.bounds[self.rank : self.rank + 2]
            if first < end:
                self.kernels.overlay_rows(operands, arrivals.tokens, outgoing, first, end)
        is_float32 = not isinstance(wire, BF16)
        decoded = None
        if is_float32:
            operands, decoded = self._decode(operands, row, wire)
        out = self.pool.empty((routing.num_tokens, self.hidden), torch.bfloat16)
        self.kernels.reduce_rows(
            operands,
            is_float32,
            routing.weights,
            weighted,
            np.array([bias.data_ptr() for bias in biases], np.int64) if biases else _NO_BIAS,
            out.data_ptr(),
            self.hidden,
            self.runtime.streams(routing.num_tokens, 2 * self.hidden),
        )
        del decoded
        return out, returned, num_missing, needs_grad

    def _decode(self, records: Array, row: CombineRow, wire: WireFormat) -> tuple[Array, torch.Tensor]:
        """Addresses of the float32 rows that the records decode to, and what keeps them."""
        is_row = records != 0
        count = int(is_row.sum())
        payload = self.pool.empty((count, row.payload_bytes), torch.uint8)
        self.runtime.move(records[is_row], _addresses(payload), row.payload_bytes)
        sf = None
        if row.sf_bytes:
            assert wire.sf_dtype is not None
            sf_bytes = self.pool.empty((count, row.sf_bytes), torch.uint8)
            self.runtime.move(records[is_row] + row.sf, _addresses(sf_bytes), row.sf_bytes)
            sf = sf_bytes.view(wire.sf_dtype)
        if isinstance(wire, LogFMT10):
            assert sf is not None
            rows = self.pool.empty((count, self.hidden), torch.float32)
            self.kernels.decode_logfmt(payload.data_ptr(), sf.data_ptr(), count, self.hidden, rows.data_ptr())
        else:
            rows = wire.decode_float32(payload.view(wire.payload_dtype), sf, self.hidden).contiguous()
        table = np.zeros(records.shape, np.int64)
        table[is_row] = _addresses(rows)
        return table, rows

    def _returned_weights(self, epoch: int, routing: Routing, row: CombineRow, heard: Array) -> torch.Tensor:
        bank = self.combine_lane.bank(epoch)
        present = (routing.slot_rank >= 0) & heard[routing.slot_rank]
        weights = torch.zeros(routing.slot_rank.shape, dtype=torch.float32)
        cells = np.arange(present.size).reshape(present.shape)[present]
        layout = self.runtime.layout
        first = self.runtime.base[self.rank] + layout.combine_rows(bank, 0) + row.weight
        places = first + layout.combine_apart * routing.slot_rank[present].astype(np.int64) + row.stride * cells
        self.runtime.move(places, weights.data_ptr() + 4 * cells, 4)
        return weights

    def finish_combine(self, epoch: int) -> None:
        """The windows of this step may be written again."""
        layout, bank = self.runtime.layout, self.combine_lane.bank(epoch)
        if self.runtime.debug_poison:
            self.runtime.poison(layout.combine_header(bank, 0), layout.combine_bank_bytes)
        self.runtime.run("combine receive", self.runtime.halves(self.combine_lane, epoch).finish, epoch=epoch)


def _addresses(rows: torch.Tensor) -> Array:
    """Address of every row of a contiguous [n, width] tensor."""
    return rows.data_ptr() + rows.shape[1] * rows.element_size() * np.arange(rows.shape[0], dtype=np.int64)
