"""The dispatch call: check, send, receive, build the record, tie the gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from expertwire import _check
from expertwire.autograd import attach
from expertwire.call import Context, any_requires_grad, as_rows, check_handle, record
from expertwire.errors import InvalidArgument
from expertwire.formats import BF16, FP8Block, WireFormat
from expertwire.formats.fp8 import column_major
from expertwire.handle import Dispatched, Handle
from expertwire.host.dispatch import Routing, WireRows
from expertwire.host.engine import Dtypes, Received
from expertwire.host.placed import Arrangement, Placed
from expertwire.host.runtime import Header
from expertwire.layouts.receive import Layout


@dataclass(slots=True)
class _Plan:
    """A dispatch whose arguments were checked. `wire` is None for opaque rows, which keep their `dtypes`."""

    handle: Handle
    rows: WireRows
    dtypes: Dtypes
    wire: WireFormat | None
    arrangement: Arrangement
    cached: bool
    header: Header
    x: torch.Tensor | None
    topk_weights: torch.Tensor | None

    @property
    def routing(self) -> Routing:
        routing: Routing = self.handle._routing
        return routing


class Dispatcher:
    """Makes the dispatch calls of one buffer."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._rank, self._settings, self._steps = context.rank, context.settings, context.steps
        self._engine = context.engine
        self._meaning = f"[num_tokens, {context.settings.hidden}]"
        self.dropped_selections = 0

    def __call__(
        self, x: Any, topk_idx: Any, topk_weights: Any, handle: Any, layout: Any, expert_alignment: Any, wire: Any,
        counts: Any, defer_receive: bool, zero_copy: bool,
    ) -> Dispatched:  # fmt: skip
        epoch = self._steps.dispatches.begin()
        try:
            layout = _check.dispatch_options(self._rank, layout, expert_alignment, counts, wire)
            if handle is None:
                self._context.raise_if_full()
                arrangement = _arrangement(layout, expert_alignment, counts == "device")
                handle = self._new_handle(epoch, x, topk_idx, topk_weights, arrangement)
            else:
                self._check_repeat(x, topk_idx, topk_weights, handle, zero_copy)
            plan = self._plan(epoch, x, topk_weights, handle, wire, zero_copy)
        except BaseException as error:
            self._context.refuse(self._steps.dispatches, epoch, error)
            raise
        receive = self._steps.dispatch(
            epoch, plan.routing, plan.rows, plan.header, plan.arrangement,
            known=handle._arrived if plan.cached else None, send_routing=not plan.cached,
            defers=defer_receive, dtypes=plan.dtypes, hold_bank=zero_copy,
        )  # fmt: skip

        def complete() -> dict[str, Any]:
            try:
                received = receive()
            except BaseException:
                plan.handle.finished = plan.handle.finished or not plan.cached
                raise
            if not plan.cached:
                plan.handle._arrived = received.placed
            if zero_copy and plan.handle.finished:  # released before it received
                self._steps.end_dispatch(epoch)
            elif zero_copy:
                plan.handle._on_finish = lambda: self._steps.end_dispatch(epoch)
            return self._fields(plan, received)

        return record(Dispatched, complete, defer_receive, handle=plan.handle, event=None)

    # -- checks --------------------------------------------------------------------------------------------------

    def _new_handle(self, epoch: int, x: Any, topk_idx: Any, topk_weights: Any, arrangement: Arrangement) -> Handle:
        rank, settings = self._rank, self._settings
        if topk_idx is None:
            raise InvalidArgument(f"rank {rank}: topk_idx is missing; pass it, or the handle of an earlier dispatch")
        num_tokens = self._num_tokens(x)
        dims = (num_tokens, settings.num_topk)
        _check.tensor(rank, "topk_idx", topk_idx, (torch.int32, torch.int64), dims)
        if topk_weights is not None:
            _check.tensor(rank, "topk_weights", topk_weights, (torch.float32,), dims)
        distinct = arrangement.layout is Layout.EXPERT_SLOTS
        routing = self._engine.route(topk_idx, topk_weights, distinct=distinct)
        if routing.illegal or routing.repeats:
            self._drop(topk_idx, routing)
        handle = Handle(self._context.owner, epoch, arrangement.layout, num_tokens, topk_weights)
        handle._routing = routing
        handle._arrangement = arrangement
        return handle

    def _check_repeat(self, x: Any, topk_idx: Any, topk_weights: Any, handle: Any, zero_copy: bool) -> None:
        check_handle(self._rank, self._context.owner, handle)
        num_tokens = self._num_tokens(x)
        _check.repeat(self._rank, num_tokens, handle.num_tokens, topk_idx, topk_weights, zero_copy=zero_copy)

    def _num_tokens(self, x: Any) -> int:
        first = x[0] if isinstance(x, tuple) and x else x
        if not isinstance(first, torch.Tensor) or first.ndim != 2:
            seen = list(first.shape) if isinstance(first, torch.Tensor) else type(first).__name__
            raise InvalidArgument(
                f"rank {self._rank}: x must be a tensor [num_tokens, {self._settings.hidden}], or a tuple of two "
                f"tensors (payload, scale factors), got {seen}"
            )
        return int(first.shape[0])

    def _drop(self, topk_idx: torch.Tensor, routing: Routing) -> None:
        """Count the selections that are dropped, or raise for the first of them."""
        if not self._context.validate:
            self.dropped_selections += routing.illegal + routing.repeats
            return
        ids, kernels = topk_idx.to(torch.int64).numpy(), self._engine.kernels
        token, slot = kernels.first_illegal(ids, self._settings.num_experts)
        if token < 0:
            token, slot = kernels.first_repeat(ids)
        raise _check.bad_id(self._rank, token, slot, int(ids[token, slot]), self._settings.num_experts)

    def _plan(
        self, epoch: int, x: Any, topk_weights: Any, handle: Handle, wire: WireFormat | None, zero_copy: bool
    ) -> _Plan:
        rank = self._rank
        cached = handle._arrived is not None
        opaque = isinstance(x, tuple)
        if opaque:
            if wire is not None:
                raise InvalidArgument(f"rank {rank}: rows given as (payload, sf) travel as they are; pass wire=None")
            rows, dtypes = self._opaque_rows(x)
        else:
            wire = wire or BF16()
            rows, dtypes = self._encoded_rows(x, handle.num_tokens, wire)
        tracked = None if opaque else x
        needs_grad = torch.is_grad_enabled() and any_requires_grad(tracked, topk_weights)
        if needs_grad:
            _check.differentiable_rows(rank, tracked, wire, zero_copy)
        kind = _kind(
            wire.name if wire else "opaque", rows.payload_bytes, rows.sf_bytes, handle._routing.weighted,
            handle.layout is Layout.EXPERT_SLOTS,
        )  # fmt: skip
        header = Header.make(epoch, f"{kind}, routing of dispatch {handle._number}", needs_grad=needs_grad)
        return _Plan(handle, rows, dtypes, wire, handle._arrangement, cached, header, tracked, topk_weights)

    def _encoded_rows(self, x: Any, num_tokens: int, wire: WireFormat) -> tuple[WireRows, Dtypes]:
        hidden = self._settings.hidden
        _check.tensor(self._rank, "x", x, (torch.bfloat16,), (num_tokens, hidden), self._meaning)
        _check.tokens(self._rank, "x", num_tokens, self._settings.num_max_tokens_per_rank)
        return self._engine.encode(x, wire), (wire.payload_dtype, wire.sf_dtype)

    def _opaque_rows(self, x: Any) -> tuple[WireRows, Dtypes]:
        rank, settings = self._rank, self._settings
        if len(x) != 2:
            raise InvalidArgument(f"rank {rank}: x must be a tensor or a pair (payload, sf), got {len(x)} parts")
        payload = _check.tensor(rank, "x[0]", x[0], None, (None, None), "[num_tokens, width]")
        sf = _check.tensor(rank, "x[1]", x[1], None, (payload.shape[0], None), f"[{payload.shape[0]}, scales]")
        _check.tokens(rank, "x[0]", payload.shape[0], settings.num_max_tokens_per_rank)
        rows = self._engine.opaque(payload.detach(), sf.detach())
        _check.row_fits(rank, rows.payload_bytes, rows.sf_bytes, settings.hidden)
        return rows, (payload.dtype, sf.dtype)

    # -- the record ----------------------------------------------------------------------------------------------

    def _fields(self, plan: _Plan, received: Received) -> dict[str, Any]:
        placed = received.placed
        x, sf = self._typed(plan, received)
        later = _Later(placed, plan.routing.weighted, not plan.arrangement.fixed_size, x)
        fields: dict[str, Any] = {"missing_ranks": self._engine.runtime.masked_ranks, "_later": later}
        if received.needs_grad:
            x, weights = self._tie(plan, placed, x, None if plan.cached else later.topk_weights())
            if weights is not None:
                fields["topk_weights"] = weights
        fields["x"], fields["sf"] = x, sf
        return fields

    def _typed(self, plan: _Plan, received: Received) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What was received as the caller wants it: decoded, in the shape of the layout."""
        x, sf = received.payload, received.sf
        if isinstance(plan.wire, FP8Block) and plan.wire.decode:
            assert sf is not None
            x, sf = self._engine.decode(x, sf, plan.wire), None
        if plan.arrangement.layout is Layout.EXPERT_SLOTS:
            groups = (self._engine.num_local_experts, self._engine.num_ranks * self._engine.capacity)
            x = x.view(*groups, x.shape[1])
            sf = None if sf is None else sf.view(*groups, sf.shape[1])
        if sf is not None and isinstance(plan.wire, FP8Block) and plan.wire.sf_layout == "column":
            sf = column_major(sf)
        return x, sf

    def _tie(
        self, plan: _Plan, placed: Placed, x: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Backward of dispatch: the rows' gradients are combined, unweighted, along the same routing."""
        # The graph must not hold the handle, which holds an edge of the graph.
        routing, takes_x = plan.routing, plan.x is not None
        text = f"backward of dispatch {plan.handle._number}"
        shape = None if topk_weights is None else topk_weights.shape

        def backward(grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
            y = as_rows(grads[0], placed.num_rows, self._settings.hidden)
            weights = None
            if shape is not None:
                weights = torch.zeros(shape) if grads[1] is None else grads[1].contiguous()
                weights = weights[: placed.arrivals.num_rows]
            epoch = self._steps.combines.begin()
            receive = self._steps.combine(
                epoch, y, placed, routing, Header.make(epoch, text), BF16(),
                rows="rank" if placed.layout is Layout.COMPACT else "token", weights=weights,
            )  # fmt: skip
            sums = receive()
            return [sums.x if takes_x else None, sums.weights]

        outputs = [x] if topk_weights is None else [x, topk_weights]
        tied, plan.handle._edge = attach(plan.handle._edge, outputs, (plan.x, plan.topk_weights), backward)
        return tied[0], None if topk_weights is None else tied[1]


@lru_cache(maxsize=256)
def _kind(name: str, payload_bytes: int, sf_bytes: int, weighted: bool, distinct: bool) -> str:
    """What all ranks must have in common."""
    return f"{name} rows of {payload_bytes}+{sf_bytes} bytes, weights={weighted}, distinct={distinct}"


# The same few again and again.
_arrangement = lru_cache(maxsize=256)(Arrangement)


def _int32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32))


def _padded(values: np.ndarray, num_rows: int, filler: int) -> torch.Tensor:
    """A copy of `values` [n, K], continued by rows of `filler` up to `num_rows`."""
    if num_rows == len(values):
        return torch.from_numpy(values.copy())
    found = np.full((num_rows, values.shape[1]), filler, values.dtype)
    found[: len(values)] = values
    return torch.from_numpy(found)


class _Later:
    """Makes tensors and lists of routing and counts when they are asked for: what is not read takes no time."""

    def __init__(self, placed: Placed, weighted: bool, on_host: bool, x: torch.Tensor) -> None:
        self._placed, self._weighted, self._on_host, self._x = placed, weighted, on_host, x
        self._compact = placed.layout is Layout.COMPACT

    def topk_idx(self) -> torch.Tensor | None:
        return _padded(self._placed.arrivals.topk_idx, self._placed.num_rows, -1) if self._compact else None

    def topk_weights(self) -> torch.Tensor | None:
        if not self._compact or not self._weighted:
            return None
        return _padded(self._placed.arrivals.weights, self._placed.num_rows, 0)

    def row_source(self) -> torch.Tensor | None:
        if self._compact:
            return None
        return torch.from_numpy(self._placed.row_source()).view(*self._x.shape[:-1], 3)

    def expert_offsets(self) -> torch.Tensor | None:
        return None if self._compact else _int32(self._placed.offsets)

    def num_tokens_per_expert(self) -> torch.Tensor:
        return _int32(self._placed.counts)

    def num_padded_tokens_per_expert(self) -> torch.Tensor:
        return _int32(self._placed.padded_counts)

    def num_tokens_per_rank(self) -> torch.Tensor:
        return torch.tensor(self._placed.arrivals.rows_per_peer, dtype=torch.int32)

    def num_tokens_per_expert_list(self) -> list[int] | None:
        return self._placed.counts.tolist() if self._on_host else None

    def num_padded_tokens_per_expert_list(self) -> list[int] | None:
        return self._placed.padded_counts.tolist() if self._on_host else None

    def num_tokens_per_rank_list(self) -> list[int] | None:
        return list(self._placed.arrivals.rows_per_peer) if self._on_host else None
