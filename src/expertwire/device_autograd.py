"""Backward passes of dispatch and combine on a device: a combine, and a cached dispatch.

Whether a call is differentiable, every rank decides by itself, since a GPU's ranks exchange nothing that the host waits
for: grad mode is on, and one of the call's own tensors requires gradients or, for combine, its dispatch was
differentiable. So ranks must agree; a rank whose peers take no part in its backward pass gets PeerTimeout.

In a World, autograd runs the backward passes of all ranks in one thread per device. So a backward pass never waits on
the host: what must be compiled and shared for it is rehearsed in the forward pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch

from expertwire._check import Settings
from expertwire.autograd import Gradients, Kept, attach
from expertwire.call import any_requires_grad
from expertwire.device_steps import Arrived, DeviceSteps, aligned, collect_values, expose_values
from expertwire.errors import BufferClosed, HandleError, TransportUnavailable
from expertwire.formats import BF16
from expertwire.handle import Handle
from expertwire.kernels.backward import gradient_rows, send_values, width_of
from expertwire.kernels.engine import Rows, Step
from expertwire.kernels.runtime import DeviceRuntime


class DeviceGradients:
    """The backward passes of one buffer's calls."""

    def __init__(self, settings: Settings, runtime: DeviceRuntime, steps: DeviceSteps) -> None:
        self._settings, self._runtime, self._steps = settings, runtime, steps
        self._engine, self._state = runtime.engine, runtime.engine.state
        self._rehearsed: set[Hashable] = set()

    def wanted(self, *inputs: torch.Tensor | None) -> bool:
        """Whether a call with these inputs is differentiable."""
        needed = torch.is_grad_enabled() and any_requires_grad(*inputs)
        if needed and self._state.capturing:
            raise TransportUnavailable(
                f"rank {self._engine.rank}: calls that need gradients cannot be captured; use no_grad(), or detach"
            )
        return needed

    # -- dispatch ------------------------------------------------------------------------------------------------

    def tie_dispatch(
        self, handle: Handle, arrived: Arrived, x: torch.Tensor | None, topk_weights: torch.Tensor | None,
        received: torch.Tensor, received_weights: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """x, topk_weights: the inputs, x None for opaque rows; received...: the outputs, which come back tied."""
        weighted = received_weights is not None

        def backward(grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
            self._raise_if_unusable(arrived)
            rows = self._as_rows(grads[0] if x is not None else None, arrived.num_rows)
            values = None
            if weighted:
                values = self._as_values(grads[1], arrived.num_rows, self._settings.num_topk)
            sums, weights = self._combine(rows, values, arrived)
            return [sums if x is not None else None, weights]

        self._rehearse(arrived.step, ("dispatch", weighted), backward)
        outputs = [received] if received_weights is None else [received, received_weights]
        tied, handle._edge = attach(handle._edge, outputs, (x, topk_weights), backward)
        return tied[0], tied[1] if weighted else None

    def _combine(
        self, y: torch.Tensor, values: torch.Tensor | None, arrived: Arrived
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sums of rows [rows, hidden], and values [T, K] from those at the rows."""
        step, returned, seen_at, weights = arrived.step, None, None, None
        out = self._state.empty(torch.bfloat16, step.sends_to.shape[0], self._settings.hidden)
        if self._state.pushes:
            returned, seen_at = self._state.returned(step.layout), self._state.nowhere
        if values is not None:
            expose_values(self._runtime, values, step)
        name = self._runtime.names.name(f"backward of dispatch, weights={values is not None}")

        def send() -> None:
            if returned is not None:
                self._engine.push(y, arrived.meta, step, returned)
            self._engine.combine_ready(y, step, seen_at, name=name)

        def gather() -> None:
            self._engine.gather(y, step, out, weighted=False, returned=returned)

        with self._combining():
            self._runtime.launch(("backward of dispatch, sent", step.layout), send)
            if values is not None:
                weights = collect_values(self._runtime, step)
            self._runtime.launch(("backward of dispatch", step.layout), gather)
        return out, weights

    @contextmanager
    def _combining(self) -> Iterator[None]:
        """A combine by itself, in its turn."""
        epoch = 0 if self._runtime.rehearsing else self._steps.combines.begin()
        yield
        if not self._runtime.rehearsing:
            self._steps.combines.end(epoch)

    # -- combine -------------------------------------------------------------------------------------------------

    def tie_combine(
        self, handle: Handle, y: torch.Tensor, topk_weights: torch.Tensor | None, biases: Sequence[torch.Tensor],
        summed: torch.Tensor, returned: torch.Tensor | None, kept: Kept | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """y, topk_weights, biases: the inputs; summed, returned: the outputs, which come back tied. `kept` is y as the
        backward pass may read it, if rows are weighted."""
        arrived: Arrived = handle._arrived
        shape, num_biases, returns = y.shape, len(biases), returned is not None
        weights = None
        if kept is not None and handle.topk_weights is not None:
            weights = Kept("topk_weights of combine's dispatch", handle.topk_weights)
        needed = [k for k in (kept, weights) if k is not None]

        def backward(grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
            self._raise_if_unusable(arrived, needed)
            num_tokens, num_topk = arrived.step.topk_idx.shape
            grad_sums = self._as_rows(grads[0], num_tokens)
            values = None if weights is None else aligned(weights.tensor)
            if returns:
                values = self._as_values(grads[1], num_tokens, num_topk)
            rows = None if kept is None else kept.tensor
            grad_rows, grad_values = self._spread(grad_sums, values, rows, arrived)
            grad_weights = None if kept is None else self._collect(arrived.step)
            return [grad_rows.view(shape), grad_values, grad_weights, *[grad_sums] * num_biases]

        self._rehearse(arrived.step, ("combine", kept is not None, returns), backward)
        outputs = [summed] if returned is None else [summed, returned]
        inputs = (y, topk_weights, handle.topk_weights if kept is not None else None, *biases)
        tied, _ = attach(handle._edge, outputs, inputs, backward)
        return tied[0], tied[1] if returns else None

    def _collect(self, step: Step) -> torch.Tensor:
        """[T, K] values that are exposed already."""
        name = self._runtime.names.name("backward of combine, weights")

        def send() -> None:
            self._engine.combine_ready(None, step, None, tell=False, name=name)

        with self._combining():
            self._runtime.launch(("backward of combine, weights", step.layout), send)
            return collect_values(self._runtime, step, alone=True)

    def _spread(
        self, rows: torch.Tensor, values: torch.Tensor | None, y: torch.Tensor | None, arrived: Arrived
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A cached dispatch of rows [T, hidden] and values [T, K], returned as the gradients of the combined rows and,
        if y is None, the values that came; else these are weights, whose gradients are exposed to be collected."""
        engine, state, hidden = self._engine, self._state, self._settings.hidden
        rehearsing = self._runtime.rehearsing
        epoch = 0 if rehearsing else self._steps.dispatches.begin()
        name = self._runtime.names.name(f"backward of combine, values={values is not None}")
        step = arrived.step.repeated(self._steps.dispatches.lane.bank(epoch), name)
        places = state.places(step.layout, Rows.of_wire(BF16(), hidden), step.alignment)
        width = width_of(engine, step.layout)
        sent = None if values is None else state.values("dispatch", step.layout, step.alignment, width)
        back = None if y is None else state.values("combine", step.layout, step.alignment, width)
        out = state.empty(torch.bfloat16, arrived.num_rows, hidden)

        def launches() -> None:
            addresses = engine.planner.repeat(step, places)
            if values is not None and sent is not None:
                send_values(engine, values, step, sent)
            engine.send(rows, None, addresses, step, places, receive=True)
            gradient_rows(
                engine, places.payload(step.bank).view(torch.bfloat16), y,
                None if y is None or sent is None else sent.payload(step.bank).view(torch.float32), out,
                None if back is None else back.payload(arrived.step.bank).view(torch.float32), step,
            )  # fmt: skip

        self._runtime.launch(("backward of combine", step.layout, values is None, y is None), launches)
        came = None
        if sent is not None and y is None:
            found = sent.payload(step.bank).view(torch.float32)[: arrived.num_rows]
            came = torch.where(
                torch.arange(len(found), device=found.device)[:, None] < step.num_rows.tensor(), found, 0.0
            )
        if not rehearsing:
            engine.give_back(step.bank, places)
            self._steps.dispatches.end(epoch)
        return out, came

    # -- both ----------------------------------------------------------------------------------------------------

    def _rehearse(self, step: Step, kind: tuple[object, ...], backward: Gradients) -> None:
        """Everything that a backward pass of this kind does, short of starting its kernels. Collective at first."""
        key = (step.layout, step.alignment, *kind)
        if key not in self._rehearsed:
            with self._runtime.rehearsal():
                backward([None, None])
            self._rehearsed.add(key)

    def _raise_if_unusable(self, arrived: Arrived, needed: Sequence[Kept] = ()) -> None:
        rank, failure = self._engine.rank, self._steps.failure
        if self._runtime.closed:
            raise BufferClosed(f"rank {rank}: a backward pass needs its buffer, which is closed")
        if failure is not None:
            raise BufferClosed(
                f"rank {rank}: no backward pass, since a call failed in the middle: {failure}"
            ) from failure
        self._steps.raise_if_outdated(arrived.restarts)
        if self._runtime.rehearsing:
            return
        if arrived.step.bank in self._steps.combining:
            raise HandleError(
                f"rank {rank}: a backward pass needs the bank of a combine that was deferred; call its hook() first"
            )
        for kept in needed:
            kept.raise_if_modified()

    def _as_rows(self, grad: torch.Tensor | None, num_rows: int) -> torch.Tensor:
        if grad is None:
            made = self._state.empty(torch.bfloat16, num_rows, self._settings.hidden)
            return made if self._runtime.rehearsing else made.zero_()
        return aligned(grad.to(torch.bfloat16).reshape(num_rows, self._settings.hidden))

    def _as_values(self, grad: torch.Tensor | None, num_rows: int, width: int) -> torch.Tensor:
        if grad is None:
            return self._state.empty(torch.float32, num_rows, width).zero_()
        return aligned(grad)
