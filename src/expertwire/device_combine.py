"""Combine on a device: check, launch, and build the record. The counterpart of `combine`."""

from __future__ import annotations

from typing import Any

import torch

from expertwire import _check
from expertwire.call import record
from expertwire.device_autograd import DeviceGradients
from expertwire.device_steps import (
    Arrived,
    DeviceSteps,
    check_handle,
    collect_values,
    copy_used_rows,
    expose_values,
)
from expertwire.errors import HandleError, InvalidArgument, TransportUnavailable
from expertwire.formats import BF16, LogFMT10
from expertwire.handle import Combined, Handle
from expertwire.kernels.engine import Step
from expertwire.kernels.runtime import DeviceRuntime
from expertwire.kernels.wire import combine_encoded, encode_rows
from expertwire.layouts.receive import Layout


class DeviceCombiner:
    """Makes the combine calls of one buffer."""

    def __init__(
        self, owner: object, settings: _check.Settings, runtime: DeviceRuntime, steps: DeviceSteps,
        gradients: DeviceGradients,
    ) -> None:  # fmt: skip
        self._owner, self._settings, self._runtime, self._steps = owner, settings, runtime, steps
        self._gradients = gradients
        self._engine, self._state, self._rank = runtime.engine, runtime.engine.state, runtime.engine.rank

    def inputs(self, handle: Any) -> torch.Tensor:
        """Memory for the experts' output of this handle that combine reads in place. Collective the first time."""
        check_handle(self._rank, self._owner, handle)
        arrived: Arrived = handle._arrived
        memory = self._state.inputs(arrived.step.layout, arrived.step.alignment).payload(arrived.step.bank)
        return memory.view(torch.bfloat16)[: arrived.num_rows].view(self._dims(handle))

    def _dims(self, handle: Handle) -> tuple[int, ...]:
        if handle.layout is Layout.EXPERT_SLOTS:
            return (
                self._state.num_local_experts, self._engine.num_ranks * self._engine.capacity, self._settings.hidden
            )  # fmt: skip
        return (handle._arrived.num_rows, self._settings.hidden)

    def __call__(
        self, x: Any, handle: Any, topk_weights: Any, bias: Any, reduce: Any, wire: Any, defer_receive: bool
    ) -> Combined:
        try:
            check_handle(self._rank, self._owner, handle)
            biases = self._checked(x, handle, topk_weights, bias, reduce, wire)
            compact = handle.layout is Layout.COMPACT
            weighted = not compact and handle.topk_weights is not None
            tracked = (x, topk_weights, *biases, handle._edge, handle.topk_weights if weighted else None)
            differentiable = self._gradients.wanted(*tracked)
        except BaseException as error:
            if self._engine.num_ranks > 1:
                self._steps.fail(error)  # the ranks are out of step
            raise
        arrived: Arrived = handle._arrived
        step, engine, y = arrived.step, self._engine, x.detach()
        if step.bank in self._steps.combining:
            raise HandleError(f"rank {self._rank}: another combine in this bank was deferred; call its hook() first")
        by_rank = not compact and reduce == "rank"
        addends = tuple(b.detach() for b in biases)
        out = self._state.empty(torch.bfloat16, handle.num_tokens, self._settings.hidden)
        several = engine.num_ranks > 1
        encoded = self._state.encoded(step.layout, step.alignment) if isinstance(wire, LogFMT10) else None
        inputs = encoded
        if encoded is None and several and (defer_receive or not self._runtime.memory.any_address):
            inputs = self._state.inputs(step.layout, step.alignment)
        held = arrived.held_epoch if not handle.finished else None
        staged = y
        if inputs is not None:
            staged = inputs.payload(step.bank).view(torch.bfloat16)
        copied = inputs is not None and y.data_ptr() != staged.data_ptr()
        late = defer_receive and several
        kept = None
        if differentiable and weighted:
            kept = y.clone() if self._state.owns(y) else y
        if topk_weights is not None:
            expose_values(self._runtime, topk_weights.detach(), step)

        def send() -> None:
            if encoded is not None:
                encode_rows(engine, y, encoded, step)
            elif copied or (inputs is not None and engine.launch.compiling):
                self._stage(y, staged, step)
            if late:
                engine.publish(staged, inputs, step)
            if not late or engine.launch.compiling:
                gather()

        def gather() -> None:
            for finish in (False, True) if engine.launch.compiling else (held is not None,):
                if encoded is not None:
                    combine_encoded(
                        engine, encoded, step, out, weighted=weighted, biases=addends, publish=not late, finish=finish
                    )
                    continue
                engine.combine(
                    staged, inputs, step, out, weighted=weighted, biases=addends, publish=not late, finish=finish,
                    by_rank=by_rank,
                )  # fmt: skip

        kind = (
            "combine", step.layout, weighted, by_rank, encoded is not None, len(biases), late, inputs is not None
        )  # fmt: skip
        if late:
            self._steps.combining.add(step.bank)
        handle._busy = defer_receive
        self._runtime.launch(kind, send)

        def complete() -> dict[str, Any]:
            if late:
                gather()
                self._steps.combining.discard(step.bank)
            handle._busy = False
            if held is not None and handle._on_finish is not None:
                handle._on_finish = lambda: self._steps.dispatches.end(held)  # the kernel has told the peers
            returned = None if topk_weights is None else collect_values(self._runtime, step)
            handle.release()
            fields = (out, returned)
            if differentiable:
                fields = self._gradients.tie_combine(handle, x, topk_weights, biases, out, returned, kept)
            return {"x": fields[0], "topk_weights": fields[1], "num_missing": 0}

        return record(Combined, complete, defer_receive)

    def _stage(self, y: torch.Tensor, staged: torch.Tensor, step: Step) -> None:
        source = y.view(-1, self._settings.hidden).view(torch.uint8)
        if source.shape[0]:
            copy_used_rows(self._engine, source, staged.view(torch.uint8), step)

    def _checked(
        self, x: Any, handle: Handle, topk_weights: Any, bias: Any, reduce: Any, wire: Any
    ) -> tuple[torch.Tensor, ...]:
        """The biases."""
        rank, settings = self._rank, self._settings
        _check.choice(f"rank {rank}: reduce", reduce, ("token", "rank"))
        wire = _check.combine_wire(rank, wire, settings.hidden)
        if not isinstance(wire, (BF16, LogFMT10)):
            raise TransportUnavailable(
                f"rank {rank}: on a device the rows of combine travel as bfloat16 or LogFMT10, not {wire.name}"
            )
        if isinstance(wire, LogFMT10) and reduce == "rank" and handle.layout is not Layout.COMPACT:
            raise TransportUnavailable(
                f"rank {rank}: on a device LogFMT10 rows are summed at the token's rank: use reduce='token'"
            )
        dims = self._dims(handle)
        _check.tensor(rank, "x", x, (torch.bfloat16,), dims, str(list(dims)), settings.device)
        if topk_weights is not None:
            if handle.layout is not Layout.COMPACT:
                raise InvalidArgument(
                    f"rank {rank}: topk_weights can be returned for COMPACT only, not {handle.layout}"
                )
            dims = (handle._arrived.num_rows, settings.num_topk)
            _check.tensor(rank, "topk_weights", topk_weights, (torch.float32,), dims, str(list(dims)), settings.device)
        biases = () if bias is None else tuple(bias) if isinstance(bias, (tuple, list)) else (bias,)
        if len(biases) > 2:
            raise InvalidArgument(f"rank {rank}: bias must be one or two tensors, got {len(biases)}")
        for one in biases:
            dims = (handle.num_tokens, settings.hidden)
            _check.tensor(rank, "bias", one, (torch.bfloat16,), dims, str(list(dims)), settings.device)
        if any(t.data_ptr() % 16 for t in (x, topk_weights, *biases) if t is not None and t.numel()):
            raise InvalidArgument(f"rank {rank}: x, topk_weights and bias must begin at multiples of 16 bytes")
        return biases
