"""Two ways to the experts and back, for the demo's model: through a Buffer, and through the oracle in one process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from expertwire import reference
from expertwire.buffer import Buffer
from expertwire.cli.demo_model import Routed
from expertwire.formats import WireFormat
from expertwire.handle import Handle
from expertwire.layouts.receive import Layout
from expertwire.topology import Placement

Tensor = torch.Tensor


class BufferExchange:
    """One rank of many: rows go to the other ranks' processes. Adds up the seconds that the calls took."""

    def __init__(self, buffer: Buffer, wire: WireFormat) -> None:
        self._buffer, self._wire = buffer, wire
        self._handle: Handle | None = None
        self.dispatch_s = self.combine_s = 0.0

    def dispatch(self, routed: Sequence[Routed]) -> list[tuple[Tensor, list[int]]]:
        (mine,) = routed
        began = time.perf_counter()
        sent = self._buffer.dispatch(
            mine.x, mine.topk_idx, mine.topk_weights, layout=Layout.EXPERT_MAJOR, wire=self._wire
        )
        self.dispatch_s += time.perf_counter() - began
        self._handle = sent.handle
        assert sent.num_tokens_per_expert_list is not None
        return [(sent.x, sent.num_tokens_per_expert_list)]

    def combine(self, rows: Sequence[Tensor]) -> list[Tensor]:
        assert self._handle is not None
        began = time.perf_counter()
        back = self._buffer.combine(rows[0], self._handle)
        self.combine_s += time.perf_counter() - began
        return [back.x]


class OracleExchange:
    """All ranks in one process: `expertwire.reference` says what each receives."""

    def __init__(self, placement: Placement, wire: WireFormat) -> None:
        self._placement, self._wire = placement, wire

    def dispatch(self, routed: Sequence[Routed]) -> list[tuple[Tensor, list[int]]]:
        self._weights = [part.topk_weights for part in routed]
        self._routing = reference.route(
            [part.topk_idx for part in routed],
            [weights.detach() for weights in self._weights],
            placement=self._placement,
            layout=Layout.EXPERT_MAJOR,
        )
        rows = _Dispatch.apply(self._routing, self._wire, *(part.x for part in routed))  # type: ignore[no-untyped-call]
        return list(zip(rows, self._routing.group_sizes, strict=True))

    def combine(self, rows: Sequence[Tensor]) -> list[Tensor]:
        return list(_Combine.apply(self._routing, *rows, *self._weights))  # type: ignore[no-untyped-call]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, routing: reference.Routing, wire: WireFormat, *x: Tensor) -> tuple[Tensor, ...]:
        ctx.routing = routing
        return tuple(part.x for part in reference.dispatch(x, routing, wire))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(part.x for part in reference.dispatch_backward(grads, ctx.routing)))


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, routing: reference.Routing, *rows_and_weights: Tensor) -> tuple[Tensor, ...]:
        ctx.routing = routing
        ctx.save_for_backward(*rows_and_weights[: routing.num_ranks])
        return tuple(part.x for part in reference.combine(rows_and_weights[: routing.num_ranks], routing))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parts = reference.combine_backward(grads, ctx.saved_tensors, ctx.routing)
        return (None, *(part.y for part in parts), *(part.topk_weights for part in parts))
