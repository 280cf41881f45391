"""Combine on a device: check, launch, and build the record. The counterpart of `combine`."""

from __future__ import annotations

from typing import Any

import torch

from expertwire import _check
from expertwire.call import record
from expertwire.device_steps import Arrived, DeviceSteps, check_handle, copy_used_rows
from expertwire.errors import HandleError, InvalidArgument, TransportUnavailable
from expertwire.formats import BF16
from expertwire.handle import Combined, Handle
from expertwire.kernels.engine import Step
from expertwire.kernels.runtime import DeviceRuntime
from expertwire.layouts.receive import Layout


class DeviceCombiner:
    """Makes the combine calls of one buffer."""

    def __init__(self, owner: object, settings: _check.Settings, runtime: DeviceRuntime, steps: DeviceSteps) -> None:
        self._owner, self._settings, self._runtime, self._steps = owner, settings, runtime, steps
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
            y, biases = self._checked(x, handle, topk_weights, bias, reduce, wire)
        except BaseException as error:
            if self._engine.num_ranks > 1:
                self._steps.fail(error)  # the ranks are out of step
            raise
        arrived: Arrived = handle._arrived
        step, engine = arrived.step, self._engine
        if step.bank in self._steps.combining:
            raise HandleError(f"rank {self._rank}: another combine in this bank was deferred; call its hook() first")
        compact = handle.layout is Layout.COMPACT
        weighted, by_rank = not compact and step.topk_weights is not None, not compact and reduce == "rank"
        out = self._state.empty(torch.bfloat16, handle.num_tokens, self._settings.hidden)
        several = engine.num_ranks > 1
        inputs = None
        if several and (defer_receive or not self._runtime.memory.any_address):
            inputs = self._state.inputs(step.layout, step.alignment)
        held = arrived.held_epoch if not handle.finished else None
        staged = y
        if inputs is not None:
            staged = inputs.payload(step.bank).view(torch.bfloat16)
        late = defer_receive and several

        def send() -> None:
            if inputs is not None and y.data_ptr() != staged.data_ptr():
                self._stage(y, staged, step)
            if late:
                engine.publish(staged, inputs, step)
            if not late or engine.launch.compiling:
                gather()

        def gather() -> None:
            engine.combine(
                staged, inputs, step, out, weighted=weighted, biases=biases, publish=not late, finish=held is not None,
                by_rank=by_rank,
            )  # fmt: skip

        kind = ("combine", step.layout, weighted, by_rank, len(biases), late, inputs is not None, held is not None)
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
            handle.release()
            return {"x": out, "topk_weights": None, "num_missing": 0}

        return record(Combined, complete, defer_receive)

    def _stage(self, y: torch.Tensor, staged: torch.Tensor, step: Step) -> None:
        source = y.view(-1, self._settings.hidden).view(torch.uint8)
        if source.shape[0]:
            copy_used_rows(self._engine, source, staged.view(torch.uint8), step)

    def _checked(
        self, x: Any, handle: Handle, topk_weights: Any, bias: Any, reduce: Any, wire: Any
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        rank, settings = self._rank, self._settings
        _check.choice(f"rank {rank}: reduce", reduce, ("token", "rank"))
        if not isinstance(_check.combine_wire(rank, wire, settings.hidden), BF16):
            raise TransportUnavailable(
                f"rank {rank}: on a device combine reads rows where they are, as bfloat16: wire=None"
            )
        if topk_weights is not None:
            raise TransportUnavailable(f"rank {rank}: combine(topk_weights=...) is not offered on a device yet")
        dims = self._dims(handle)
        _check.tensor(rank, "x", x, (torch.bfloat16,), dims, str(list(dims)), settings.device)
        biases = () if bias is None else tuple(bias) if isinstance(bias, (tuple, list)) else (bias,)
        if len(biases) > 2:
            raise InvalidArgument(f"rank {rank}: bias must be one or two tensors, got {len(biases)}")
        for one in biases:
            dims = (handle.num_tokens, settings.hidden)
            _check.tensor(rank, "bias", one, (torch.bfloat16,), dims, str(list(dims)), settings.device)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *biases)):
            raise TransportUnavailable(f"rank {rank}: gradients are not offered on a device yet; detach x and bias")
        if any(t.data_ptr() % 16 for t in (x, *biases) if t.numel()):
            raise InvalidArgument(f"rank {rank}: x and bias must begin at multiples of 16 bytes")
        return x.detach(), tuple(b.detach() for b in biases)
