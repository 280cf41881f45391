"""The oracle: from every rank's inputs to every rank's outputs, in one process, in plain torch.

This is what "correct" means in expertwire, bit for bit. Lists are indexed by rank; the tokens of all ranks, one after
another, are called the N tokens, so that ascending order of them is "by source rank, then source token".

    routing = route(topk_idx, topk_weights, placement=placement, layout=Layout.EXPERT_MAJOR)
    received = dispatch(x, routing)                         # received[r].x are the rows of rank r
    back = combine([experts(part.x) for part in received], routing)

Letters: R ranks, T tokens of one rank, N tokens of all, K top-k slots, H hidden, L experts of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from expertwire._math import round_up
from expertwire.formats import BF16, FP8Block, WireFormat
from expertwire.layouts.receive import Layout
from expertwire.topology import Placement

Tensors = Sequence[torch.Tensor]
Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class Routing:
    """Which row of which rank holds which token.

    num_tokens              T of every rank
    topk_idx                [N, K] int64 global expert ids, -1 = no selection
    topk_weights            [N, K] float32, or None
    slot_rank, slot_local   [N, K] int64 rank and local expert id of each selection, -1 = none
    places                  per rank [rows, 2] int64: token (of the N) and slot of each row, -1 for padding; a COMPACT
                            row serves several slots and stands at the highest
    group_sizes             per rank, rows of each local expert's group, padding included; empty for COMPACT
    """

    layout: Layout
    placement: Placement
    expert_alignment: int
    capacity: int
    num_tokens: list[int]
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    slot_rank: torch.Tensor
    slot_local: torch.Tensor
    places: list[torch.Tensor]
    group_sizes: list[list[int]]

    @property
    def num_ranks(self) -> int:
        return len(self.num_tokens)


@dataclass(frozen=True)
class Received:
    """What one rank receives; the fields are those of `Dispatched`. Padding rows of `x` and `sf` are zero here."""

    x: torch.Tensor
    sf: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    row_source: torch.Tensor | None
    num_tokens_per_expert: torch.Tensor
    num_padded_tokens_per_expert: torch.Tensor
    expert_offsets: torch.Tensor | None
    num_tokens_per_rank: torch.Tensor


@dataclass(frozen=True)
class Returned:
    """What one rank gets back; the fields are those of `Combined`."""

    x: torch.Tensor
    topk_weights: torch.Tensor | None


@dataclass(frozen=True)
class CombineGradients:
    """Gradients of what one rank gave to combine, and of the weights it had given to dispatch.

    y              like the rows given to combine; zero on padding
    topk_weights   EXPERT_*: [T, K] float32 for the weights of the routing (None if it has none);
                   COMPACT: [rows, K] float32 for the weights given to combine (None without `grad_topk_weights`)
    bias           [T, H], of every bias
    """

    y: torch.Tensor
    topk_weights: torch.Tensor | None
    bias: torch.Tensor


def route(
    topk_idx: Tensors,
    topk_weights: Tensors | None = None,
    *,
    placement: Placement,
    layout: Layout = Layout.COMPACT,
    expert_alignment: int = 1,
    capacity: int = 0,
) -> Routing:
    """topk_idx[r] [T, K] integers, negative = no selection; topk_weights[r] [T, K] float32.

    `capacity` is num_max_tokens_per_rank; only EXPERT_SLOTS depends on it. There, a slot that repeats an expert of the
    same token counts as no selection.
    """
    ids = torch.cat(list(topk_idx)).long().clamp(min=-1)
    if layout is Layout.EXPERT_SLOTS:
        for slot in range(1, ids.shape[1]):
            repeated = (ids[:, :slot] == ids[:, slot : slot + 1]).any(dim=1)
            ids[repeated, slot] = -1
    slot_rank = torch.tensor([*placement.expert_ranks, -1])[ids]  # the last entry serves id -1
    slot_local = torch.tensor([*placement.local_ids(), -1])[ids]

    places: list[torch.Tensor] = []
    group_sizes: list[list[int]] = []
    for rank in range(len(topk_idx)):
        if layout is Layout.COMPACT:
            highest = torch.where(slot_rank == rank, torch.arange(ids.shape[1]), -1).amax(dim=1)
            tokens = (highest >= 0).nonzero().squeeze(1)
            places.append(torch.stack([tokens, highest[tokens]], dim=1))
            group_sizes.append([])
            continue
        groups = [torch.empty(0, 2, dtype=torch.int64)]
        for expert in placement.local_experts(rank):
            selections = (ids == expert).nonzero()  # by token, then slot
            size = len(topk_idx) * capacity
            if layout is Layout.EXPERT_MAJOR:
                size = round_up(len(selections), expert_alignment)
            groups += [selections, torch.full((size - len(selections), 2), -1)]
        places.append(torch.cat(groups))
        group_sizes.append([len(a) + len(b) for a, b in zip(groups[1::2], groups[2::2], strict=True)])

    return Routing(
        layout, placement, expert_alignment, capacity,
        [len(part) for part in topk_idx], ids, None if topk_weights is None else torch.cat(list(topk_weights)),
        slot_rank, slot_local, places, group_sizes,
    )  # fmt: skip


def dispatch(x: Sequence[Rows], routing: Routing, wire: WireFormat | None = None) -> list[Received]:
    """x[r]: [T, H] bfloat16 to travel in the format `wire`, or pre-quantised (payload, sf), opaque bytes."""
    payload, sf = _encode(x, wire or BF16())
    return [_received(rank, payload, sf, routing) for rank in range(routing.num_ranks)]


def _encode(x: Sequence[Rows], wire: WireFormat) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Payload and scale factors of all N tokens."""
    encoded = [part if isinstance(part, tuple) else wire.encode(part) for part in x]
    factors = [sf for _, sf in encoded if sf is not None]
    payload = torch.cat([payload.view(torch.uint8) for payload, _ in encoded]).view(encoded[0][0].dtype)
    sf = torch.cat(factors) if factors else None
    if isinstance(wire, FP8Block) and wire.decode:
        return wire.decode_bfloat16(payload, sf, payload.shape[1]), None
    return payload, sf


def _received(rank: int, payload: torch.Tensor, sf: torch.Tensor | None, routing: Routing) -> Received:
    layout, placement = routing.layout, routing.placement
    token, slot = routing.places[rank].unbind(1)
    num_local_experts = len(placement.local_experts(rank))
    source = torch.arange(routing.num_ranks).repeat_interleave(torch.tensor(routing.num_tokens))
    first = torch.tensor([0, *routing.num_tokens]).cumsum(0)
    here = routing.slot_rank == rank
    counts = torch.bincount(routing.slot_local[here], minlength=num_local_experts).int()
    padded = [round_up(count, routing.expert_alignment) for count in counts.tolist()]
    shape: tuple[int, ...] = (len(token),)
    idx, weights, row_source, offsets = None, None, None, None
    if layout is Layout.COMPACT:
        idx = torch.where(here, routing.slot_local, -1)[token].int()
        if routing.topk_weights is not None:
            weights = torch.where(here, routing.topk_weights, 0.0)[token]
    else:
        origin = _take(source[:, None], token)[:, 0]
        origin = torch.stack([origin, token - first[origin], slot], dim=1)
        row_source = torch.where(token[:, None] < 0, -1, origin).int()
        padded = routing.group_sizes[rank]
        offsets = torch.tensor([0, *padded]).cumsum(0).int()
        if layout is Layout.EXPERT_SLOTS:
            shape = (num_local_experts, routing.num_ranks * routing.capacity)
            row_source = row_source.view(*shape, 3)

    return Received(
        _take(payload, token).view(*shape, payload.shape[1]),
        None if sf is None else _take(sf, token).view(*shape, sf.shape[1]),
        idx, weights, row_source, counts, torch.tensor(padded, dtype=torch.int32), offsets,
        torch.bincount(source[here.any(dim=1)], minlength=routing.num_ranks).int(),
    )  # fmt: skip


def combine(
    y: Tensors,
    routing: Routing,
    *,
    reduce: Literal["token", "rank"] = "token",
    wire: WireFormat | None = None,
    bias: Sequence[Tensors] = (),
    topk_weights: Tensors | None = None,
) -> list[Returned]:
    """y[r]: rows shaped as rank r received them, bfloat16. bias: up to two, each with a [T, H] for every rank.

    COMPACT sums unweighted; topk_weights[r] [rows, K] are sent back to the slots that each row serves.
    EXPERT_* weights by the weights of the routing. Sums are float32, from +0, biases first, slots ascending, each
    product and sum rounded by itself, and one rounding to bfloat16 at the end.
    """
    hidden = y[0].shape[-1]
    num_all = len(routing.topk_idx)
    rows, places = [part.detach().reshape(-1, hidden) for part in y], routing.places
    weights = None if routing.layout is Layout.COMPACT else routing.topk_weights
    if reduce == "rank" and routing.layout is not Layout.COMPACT:
        compact = route(_split(routing.topk_idx, routing), placement=routing.placement)
        for rank, place in enumerate(compact.places):
            total = torch.zeros(num_all, hidden)
            _add([rows[rank].float()], [places[rank]], weights, total)
            rows[rank] = total[place[:, 0]].bfloat16()
        places, weights = compact.places, None

    total = torch.zeros(num_all, hidden)
    for part in bias:
        total = total + torch.cat(list(part)).float()
    wire = wire or BF16()
    _add([wire.decode_float32(*wire.encode(part), hidden) for part in rows], places, weights, total)

    back: Sequence[torch.Tensor | None] = [None] * routing.num_ranks
    if topk_weights is not None:
        on_slots = torch.zeros(routing.topk_idx.shape)
        for rank, place in enumerate(routing.places):
            served = routing.slot_rank[place[:, 0]] == rank
            on_slots[place[:, 0]] = torch.where(served, topk_weights[rank].detach(), on_slots[place[:, 0]])
        back = _split(on_slots, routing)
    return [Returned(*parts) for parts in zip(_split(total.bfloat16(), routing), back, strict=True)]


def _add(rows: Tensors, places: Tensors, weights: torch.Tensor | None, total: torch.Tensor) -> None:
    """total[token] += weights[token, slot] * row, for ascending slots. rows[r] float32 [rows, H], total [N, H]."""
    for slot in range(max((int(place[:, 1].max()) + 1 for place in places if len(place)), default=0)):
        for part, place in zip(rows, places, strict=True):
            here = place[:, 1] == slot
            token, summand = place[here, 0], part[here]
            if weights is not None:
                summand = weights[token, slot, None] * summand
            total[token] = total[token] + summand


def dispatch_backward(grad_x: Tensors, routing: Routing, grad_topk_weights: Tensors | None = None) -> list[Returned]:
    """grad_x[r]: like the rows that rank r received; grad_topk_weights[r] [rows, K] (COMPACT). Returns the gradients.

    A combine without weights, in bfloat16 whatever the wire format was.
    """
    return combine(grad_x, replace(routing, topk_weights=None), topk_weights=grad_topk_weights)


def combine_backward(
    grad_out: Tensors, y: Tensors, routing: Routing, grad_topk_weights: Tensors | None = None
) -> list[CombineGradients]:
    """grad_out[r] [T, H] bfloat16, y[r] what rank r gave to combine, grad_topk_weights[r] [T, K] (COMPACT).

    A cached dispatch of grad_out, for every `reduce` and in bfloat16 whatever the wire format was:
    grad_y = w * g, one rounding to bfloat16; grad of w[t, k] = sum over H of g * y, in float32.
    """
    weights = None if routing.layout is Layout.COMPACT else routing.topk_weights
    all_grads = torch.cat(list(grad_out))
    grad_rows, grad_weights = [], []
    on_slots = torch.zeros(routing.topk_idx.shape)
    for rank, (token, slot) in enumerate(place.unbind(1) for place in routing.places):
        g, used = _take(all_grads, token), token >= 0
        rows = y[rank].reshape(g.shape)
        on_slots[token[used], slot[used]] = (g.float() * rows.float()).sum(-1)[used]
        if weights is not None:
            g = torch.where(used[:, None], weights[token, slot, None] * g.float(), 0.0).bfloat16()
        grad_rows.append(g.view(y[rank].shape))
        if grad_topk_weights is not None:
            here = routing.slot_rank == rank
            grad_weights.append(torch.where(here, torch.cat(list(grad_topk_weights)), 0.0)[token])
    of_weights: Sequence[torch.Tensor | None] = grad_weights or [None] * routing.num_ranks
    if weights is not None:
        of_weights = _split(on_slots, routing)
    return [CombineGradients(*parts) for parts in zip(grad_rows, of_weights, grad_out, strict=True)]


def _split(t: torch.Tensor, routing: Routing) -> list[torch.Tensor]:
    """[N, ...] -> the part of every rank."""
    return list(torch.split(t, routing.num_tokens))


def _take(rows: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """rows[token], and zeros where token is -1; as bytes, so for every dtype."""
    octets = rows.detach().contiguous().view(torch.uint8)
    octets = torch.cat([octets, octets.new_zeros(1, octets.shape[1])])
    return octets[token].view(rows.dtype)
