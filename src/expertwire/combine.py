"""The combine call: check, send, receive, build the record, tie the gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from expertwire import _check
from expertwire.autograd import Kept, attach
from expertwire.call import Context, any_requires_grad, as_rows, check_handle, record
from expertwire.errors import InvalidArgument
from expertwire.formats import BF16, WireFormat
from expertwire.handle import Combined, Handle
from expertwire.host.combine import Rows
from expertwire.host.engine import Received
from expertwire.host.placed import Placed
from expertwire.host.runtime import Header
from expertwire.layouts.receive import Layout
from expertwire.steps import Sums


@dataclass(slots=True)
class _Plan:
    """A combine whose arguments were checked."""

    handle: Handle
    x: torch.Tensor
    topk_weights: torch.Tensor | None
    biases: tuple[torch.Tensor, ...]
    rows: Rows
    weighted: bool
    wire: WireFormat
    header: Header


class Combiner:
    """Makes the combine calls of one buffer."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._rank, self._settings, self._steps = context.rank, context.settings, context.steps
        self._engine = context.engine

    def __call__(
        self, x: Any, handle: Any, topk_weights: Any, bias: Any, reduce: Any, wire: Any, defer_receive: bool
    ) -> Combined:
        epoch = self._steps.combines.begin()
        try:
            check_handle(self._rank, self._context.owner, handle)
            plan = self._plan(epoch, x, handle, topk_weights, bias, reduce, wire)
        except BaseException as error:
            self._context.refuse(self._steps.combines, epoch, error)
            raise
        handle._busy = True
        placed: Placed = handle._arrived
        weights = None if topk_weights is None else topk_weights.detach()[: placed.arrivals.num_rows]
        kept = Kept("combine's input x", x) if plan.weighted else None
        receive = self._steps.combine(
            epoch, x, placed, handle._routing, plan.header, plan.wire, rows=plan.rows, weighted=plan.weighted,
            weights=weights, biases=[b.detach() for b in plan.biases],
            keep_own=not defer_receive and isinstance(plan.wire, BF16),
        )  # fmt: skip

        def complete() -> dict[str, Any]:
            try:
                sums = receive()
            finally:
                handle._busy = False
            handle.release()
            combined, returned = self._tie(plan, sums, kept) if sums.needs_grad else (sums.x, sums.weights)
            return {"x": combined, "topk_weights": returned, "num_missing": sums.num_missing}

        return record(Combined, complete, defer_receive, event=None)

    def _plan(self, epoch: int, x: Any, handle: Handle, topk_weights: Any, bias: Any, reduce: Any, wire: Any) -> _Plan:
        rank, settings, placed = self._rank, self._settings, handle._arrived
        compact = handle.layout is Layout.COMPACT
        _check.choice("reduce", reduce, ("token", "rank"), rank)
        wire = _check.combine_wire(rank, wire, settings.hidden)
        num_rows = placed.num_rows
        dims: tuple[int, ...] = (num_rows, settings.hidden)
        if handle.layout is Layout.EXPERT_SLOTS:
            dims = (self._engine.num_local_experts, self._engine.num_ranks * self._engine.capacity, settings.hidden)
        _check.tensor(rank, "x", x, (torch.bfloat16,), dims, "{}, as the dispatch of this handle returned")
        if topk_weights is not None:
            if not compact:
                raise InvalidArgument(
                    f"rank {rank}: topk_weights can be returned for COMPACT only, not {handle.layout}"
                )
            dims = (num_rows, settings.num_topk)
            _check.tensor(rank, "topk_weights", topk_weights, (torch.float32,), dims)
        biases = () if bias is None else tuple(bias) if isinstance(bias, (tuple, list)) else (bias,)
        if len(biases) > 2:
            raise InvalidArgument(f"rank {rank}: bias must be one or two tensors, got {len(biases)}")
        for one in biases:
            dims = (handle.num_tokens, settings.hidden)
            _check.tensor(rank, "bias", one, (torch.bfloat16,), dims)
        weighted = not compact and handle._routing.weighted
        rows: Rows = "rank" if compact or reduce == "rank" else "token"
        needs_grad = torch.is_grad_enabled() and any_requires_grad(
            x, topk_weights, *biases, handle._edge, handle.topk_weights if weighted else None
        )
        kind = _kind(wire.name, rows, compact, weighted, topk_weights is not None)
        header = Header.make(epoch, f"{kind}, routing of dispatch {handle._number}", needs_grad=needs_grad)
        return _Plan(handle, x, topk_weights, biases, rows, weighted, wire, header)

    # -- gradients -----------------------------------------------------------------------------------------------

    def _tie(self, plan: _Plan, sums: Sums, kept: Kept | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Backward of combine: the sums' gradients are dispatched along the same routing.

        A weighted row's gradient is weight * g, and its weight's gradient the dot product of row and g, which only the
        expert's rank can form: it travels back to the token's rank by a combine of weights alone.
        """
        handle, shape, num_biases = plan.handle, plan.x.shape, len(plan.biases)
        placed: Placed = handle._arrived
        returned = None if plan.topk_weights is None else plan.topk_weights.shape

        def backward(grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
            if kept is not None:
                kept.raise_if_modified()
            grad_sums = as_rows(grads[0], handle.num_tokens, self._settings.hidden)
            spread = self._spread(handle, grad_sums, None if returned is None else grads[1])
            grad_rows = spread.payload
            grad_returned = grad_weights = None
            if returned is not None:
                grad_returned = torch.zeros(returned)
                arrivals = spread.placed.arrivals
                grad_returned[: arrivals.num_rows] = torch.from_numpy(arrivals.weights)
            if kept is not None:
                grad_weights = self._gradient_of_weights(handle, grad_rows, kept.tensor)
                scale = torch.from_numpy(placed.row_weights())
                grad_rows = (scale[:, None] * grad_rows.float()).to(torch.bfloat16)
            return [grad_rows.view(shape), grad_returned, grad_weights, *[grad_sums] * num_biases]

        outputs = [sums.x] if sums.weights is None else [sums.x, sums.weights]
        inputs = (plan.x, plan.topk_weights, handle.topk_weights if plan.weighted else None, *plan.biases)
        tied, _ = attach(handle._edge, outputs, inputs, backward)
        return tied[0], None if sums.weights is None else tied[1]

    def _spread(self, handle: Handle, rows: torch.Tensor, weights: torch.Tensor | None) -> Received:
        """Dispatch `rows` [T, hidden] along the routing of `handle`, with `weights` [T, K] if given."""
        routing = handle._routing
        if weights is not None:
            routing = replace(routing, weights=weights.contiguous().numpy())
        epoch = self._steps.dispatches.begin()
        receive = self._steps.dispatch(
            epoch, routing, self._engine.encode(rows, BF16()),
            Header.make(epoch, f"backward of combine of dispatch {handle._number}"),
            handle._arrangement, known=handle._arrived, send_routing=weights is not None, zero_unused=True,
        )  # fmt: skip
        return receive()

    def _gradient_of_weights(self, handle: Handle, grad_rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        placed: Placed = handle._arrived
        arrival, slot = np.nonzero(placed.rows >= 0)
        at = torch.from_numpy(placed.rows[arrival, slot])
        x = x.view(-1, self._settings.hidden)
        dots = torch.zeros(placed.rows.shape, dtype=torch.float32)
        dots[arrival, slot] = (grad_rows[at].float() * x[at].float()).sum(-1)
        epoch = self._steps.combines.begin()
        receive = self._steps.combine(
            epoch, x, placed, handle._routing,
            Header.make(epoch, f"backward of combine of dispatch {handle._number}, weights"), BF16(), rows="none",
            weights=dots,
        )  # fmt: skip
        returned = receive().weights
        assert returned is not None
        return returned


@lru_cache(maxsize=256)
def _kind(name: str, rows: Rows, compact: bool, weighted: bool, weights: bool) -> str:
    """What all ranks must have in common."""
    return f"{name}, a row per {rows}, compact={compact}, weighted={weighted}, weights={weights}"
