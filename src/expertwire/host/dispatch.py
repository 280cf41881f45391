"""Dispatch on the host: from a token's row to a peer's window, and from the own window to a place in the output; or,
where there are many rows, straight to their place in the peer's output (`protocols.rendezvous`).

Rows travel as raw bytes; what they mean is the wire format's business. A row of the own rank needs no trip through the
window: unless the receive half is deferred, it is read where the caller keeps it.

A call makes a record of each kind, so they are cheap ones: with slots, and not frozen.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from expertwire.host.halves import acts
from expertwire.host.kernels import Array
from expertwire.host.runtime import ABSENT, ANNOUNCES, DEFERS, NEEDS_GRAD, Header, HostRuntime, Segments
from expertwire.layouts.rows import DispatchRow, routing_bytes
from expertwire.ordering.operations import Region
from expertwire.protocols import rendezvous
from expertwire.protocols.epoch_signal import REFUSED
from expertwire.protocols.lane import Lane, ring


@dataclass(slots=True)
class Routing:
    """Where the selections of this rank's tokens go. Made from `topk_idx` alone; T tokens, K slots, R ranks.

    slots [3, T, K] int32     rank and local expert of each slot, -1 = none; 1 where it is the highest of its token that
                              its rank serves
    bounds [R + 1], tokens    rank r gets tokens[bounds[r]:bounds[r + 1]]
    rows_per_peer             how many that are, per rank
    weights [T, K] float32    all ones where the caller gave none (`weighted` False)
    repeats, illegal          selections that count as none: repeats of an expert, ids that are none
    """

    slots: Array
    bounds: list[int]
    tokens: Array
    rows_per_peer: list[int]
    weights: Array
    weighted: bool
    repeats: int
    illegal: int

    @property
    def num_tokens(self) -> int:
        return int(self.slots.shape[1])

    @property
    def slot_rank(self) -> Array:
        """[T, K] the rank of each slot, -1 = none."""
        ranks: Array = self.slots[0]
        return ranks

    def tokens_for(self, peer: int) -> Array:
        tokens: Array = self.tokens[self.bounds[peer] : self.bounds[peer + 1]]
        return tokens


@dataclass(slots=True)
class Arrivals:
    """What arrived: m rows by source rank, then source token.

    rows_per_peer            how many came from each rank
    bounds, offsets [R + 1]  rows offsets[s]:offsets[s + 1] come from rank s; once as a list, once for kernels
    topk_idx [m, K] int32    local expert ids, -1 for experts elsewhere
    weights [m, K] float32   0 where topk_idx is -1
    tokens [m] int32         token index on the source rank
    """

    rows_per_peer: list[int]
    bounds: list[int]
    offsets: Array
    topk_idx: Array
    weights: Array
    tokens: Array

    @property
    def num_rows(self) -> int:
        return self.bounds[-1]

    def rows_from(self, peer: int) -> slice:
        return slice(self.bounds[peer], self.bounds[peer + 1])

    @property
    def last_slot(self) -> Array:
        """[m] the highest slot of each row that this rank serves."""
        slots: Array = self.topk_idx.shape[1] - 1 - np.argmax(self.topk_idx[:, ::-1] >= 0, axis=1)
        return slots


@dataclass(slots=True)
class WireRows:
    """Encoded rows of this rank: address of row 0, bytes per row, for payload and scale factors. `owner` keeps them."""

    payload: int
    payload_bytes: int
    sf: int
    sf_bytes: int
    owner: object


@dataclass(slots=True)
class Sent:
    """What a rank that receives at once still has to do with its own rows: place them, and put the announced ones to
    `announced` peers."""

    routing: Routing
    rows: WireRows
    announced: tuple[int, ...]


class Meeting(NamedTuple):
    """What the headers said: `coming`, the rows that peers announced; `deferring`, the peers that give no places."""

    coming: Mapping[int, int]
    deferring: Sequence[int]


NO_MEETING = Meeting({}, ())
Place = tuple[int, int]  # where in the reader's outputs payload and scale factors of a writer's first row go
IN_WINDOW: Place = (-1, -1)
_PLACE = struct.Struct("<qq")


def _put_rows(
    runtime: HostRuntime, routing: Routing, rows: WireRows, peer: int, payload: int, sf: int, strides: tuple[int, int]
) -> None:
    """Copy the rows for `peer` to address `payload`, their scale factors to `sf`."""
    tokens, gather = routing.tokens_for(peer), runtime.kernels.gather_rows
    stream = runtime.streams(len(routing.tokens), rows.payload_bytes)
    gather(rows.payload, tokens, payload, strides[0], rows.payload_bytes, stream)
    if rows.sf_bytes:
        gather(rows.sf, tokens, sf, strides[1], rows.sf_bytes, False)


def send(
    runtime: HostRuntime,
    lane: Lane,
    epoch: int,
    sent: Sent,
    row: DispatchRow,
    header: Header,
    *,
    cached: bool,
    defers: bool,
) -> None:
    """Send half. With `cached` the receivers know the routing already; own rows are copied only if the receive half is
    deferred."""
    layout, kernels, routing = runtime.layout, runtime.kernels, sent.routing
    described = header.flags | (DEFERS if defers else 0)

    def put(peer: int, region: Region, count: int) -> Segments:
        later = peer in sent.announced
        flags = header.flags | ANNOUNCES if later else described
        segments = runtime.write_header(peer, runtime.header_at(region), header.settings, flags)
        if count == 0:
            return segments
        first = runtime.rows_at(region)
        if not later and (defers or peer != runtime.rank):
            records = runtime.base[peer] + first
            _put_rows(runtime, routing, sent.rows, peer, records, records + row.sf, (row.stride, row.stride))
        routing_at = runtime.routing_at(region)
        if not cached:
            kernels.write_routing(
                runtime.base[peer] + routing_at, routing.tokens_for(peer), peer,
                routing.slots, routing.weights,
            )  # fmt: skip
        if runtime.hands_over:
            segments.append((first + row.stride * np.arange(count), row.stride))
            segments.append((np.array([routing_at]), count * routing_bytes(layout.num_topk)))
        return segments

    runtime.run("dispatch send", runtime.halves(lane, epoch).send, put, epoch=epoch, counts=routing.rows_per_peer)


def refuse(runtime: HostRuntime, lane: Lane, epoch: int, reason: str) -> None:
    """Tell every peer that this rank's call is void, and why."""
    header = Header.make(epoch, reason)

    def put(peer: int, region: Region, count: int) -> Segments:
        return runtime.write_header(peer, runtime.header_at(region), *header)

    counts = [REFUSED] * runtime.num_ranks
    runtime.run(f"{lane.name} send", runtime.halves(lane, epoch).send, put, epoch=epoch, counts=counts)


def receive(
    runtime: HostRuntime, lane: Lane, epoch: int, header: Header, known: Arrivals | None, since: float
) -> tuple[Arrivals, list[int], bool, Meeting]:
    """Receive half, up to where every row has a place: what arrived; the address of each writer's first record in the
    own window (0 where the writer is masked); whether any rank needs gradients; and which rows are still to come.

    With `known` (cached dispatch) the routing is taken from there. Time-outs count from `since`.
    """
    layout, num_ranks = runtime.layout, runtime.num_ranks
    counts = runtime.run("dispatch receive", runtime.halves(lane, epoch).receive, epoch=epoch, since=since)
    own, apart, region = runtime.base[runtime.rank], layout.dispatch_apart, lane.rows(epoch, 0)
    any_flags, flags = runtime.check_headers("dispatch", epoch, counts, runtime.header_at(region), apart, header)
    first = own + runtime.rows_at(region)
    present, records = counts, list(range(first, first + num_ranks * apart, apart))
    if runtime.masked:
        present = [max(count, 0) for count in counts]
        records = [0 if count == ABSENT else at for at, count in zip(records, counts, strict=True)]
    arrivals = known
    if arrivals is None:
        bounds = [*accumulate(present, initial=0)]
        offsets = np.array(bounds, np.int64)
        routing = runtime.kernels.read_routing(own + runtime.routing_at(region), apart, offsets, layout.num_topk)
        arrivals = Arrivals(present, bounds, offsets, *routing)
    else:
        rows = arrivals.rows_per_peer
        assert all(seen in (0, n) for seen, n in zip(present, rows, strict=True)), f"{present} cached rows, not {rows}"
    meeting = NO_MEETING
    if any_flags & (ANNOUNCES | DEFERS):
        coming = {peer: counts[peer] for peer, flag in flags.items() if flag & ANNOUNCES}
        meeting = Meeting(coming, [peer for peer, flag in flags.items() if flag & DEFERS])
    return arrivals, records, bool(any_flags & NEEDS_GRAD), meeting


def meet(
    runtime: HostRuntime, lane: Lane, epoch: int, sent: Sent, row: DispatchRow, meeting: Meeting,
    places: dict[int, Place], since: float,
) -> None:  # fmt: skip
    """Give the peers in `coming` their `places`, and put the own announced rows to where their readers want them:
    straight into their outputs, or into their windows."""
    layout, bank = runtime.layout, lane.bank(epoch)
    given = rendezvous.places(lane).name

    def put(peer: int, region: Region, count: int) -> Segments:
        if region.lane == given:
            _PLACE.pack_into(runtime.bytes_of[peer], layout.place_record(bank, runtime.rank), *places[peer])
            return []
        payload, sf = IN_WINDOW
        if peer not in meeting.deferring:
            payload, sf = _PLACE.unpack_from(runtime.bytes_of[runtime.rank], layout.place_record(bank, peer))
        if payload < 0:
            records = runtime.base[peer] + runtime.rows_at(lane.rows(epoch, runtime.rank))
            _put_rows(runtime, sent.routing, sent.rows, peer, records, records + row.sf, (row.stride, row.stride))
        else:
            outputs, strides = runtime.output_base[peer], (row.payload_bytes, row.sf_bytes)
            _put_rows(runtime, sent.routing, sent.rows, peer, outputs + payload, outputs + sf, strides)
        return []

    counts = sent.routing.rows_per_peer
    leaving = {peer: counts[peer] for peer in ring(runtime.rank, runtime.num_ranks) if peer in sent.announced}
    step = rendezvous.meet(lane, runtime.rank, epoch, meeting.coming, leaving, meeting.deferring)
    asked = [peer for peer in leaving if peer not in meeting.deferring]
    runtime.run("dispatch receive", acts(step), put, since=since, asked=asked)


def land(runtime: HostRuntime, lane: Lane, epoch: int, meeting: Meeting, since: float) -> None:
    """Wait until the rows that were announced have come."""
    step = rendezvous.land(lane, epoch, meeting.coming)
    runtime.run("dispatch receive", acts(step), since=since, asked=meeting.coming)
