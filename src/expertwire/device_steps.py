"""What dispatch and combine calls on a device share: which steps are open, and what a handle keeps of its dispatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from expertwire.errors import HandleError
from expertwire.handle import Handle
from expertwire.kernels.backward import combine_values, width_of
from expertwire.kernels.engine import DeviceEngine, Step
from expertwire.kernels.runtime import DeviceRuntime
from expertwire.protocols.lane import Lane
from expertwire.steps import LaneSteps


@dataclass
class Arrived:
    """What a handle keeps of its dispatch: its step, and the shape of the rows that combine will be given."""

    step: Step
    num_rows: int
    exact: bool
    held_epoch: int | None  # of a zero-copy dispatch, whose bank is busy until the handle is finished
    routing: dict[str, Callable[[], Any]]  # makes topk_idx, topk_weights and row_source


class DeviceSteps:
    """Which bank a call runs in, and what went wrong."""

    def __init__(self, engine: DeviceEngine) -> None:
        self.engine = engine
        self.dispatches = LaneSteps(Lane("dispatch", engine.state.num_banks), engine.rank)
        self.combining: set[int] = set()  # banks with a deferred combine
        self._failure: BaseException | None = None
        self.runtime: DeviceRuntime | None = None

    @property
    def failure(self) -> BaseException | None:
        """What makes the buffer unusable."""
        if self._failure is None and self.runtime is not None:
            try:
                self.runtime.raise_if_failed()
            except BaseException as error:  # noqa: BLE001  # reported by the next call
                self._failure = error
        return self._failure

    def fail(self, error: BaseException) -> None:
        self._failure = error


def check_handle(rank: int, owner: object, handle: Any) -> None:
    """As `call.Context.check_handle`."""
    if not isinstance(handle, Handle):
        raise HandleError(
            f"rank {rank}: handle must be the `handle` of an earlier dispatch, got {type(handle).__name__}"
        )
    if handle._owner is not owner:
        raise HandleError(f"rank {rank}: {handle} belongs to another buffer")
    if handle._arrived is None:
        raise HandleError(f"rank {rank}: the dispatch of {handle} has not received yet: call its hook() first")
    if handle._busy:
        raise HandleError(
            f"rank {rank}: {handle} is in use by a combine that has not received yet: call its hook() first"
        )


def copy_used_rows(engine: DeviceEngine, source: torch.Tensor, out: torch.Tensor, step: Step) -> None:
    """Copy the rows that a step filled: source, out [rows, bytes] uint8."""
    engine.copy_rows(source, out, *engine.state.filled(step), engine.num_ranks * engine.capacity)


def expose_values(runtime: DeviceRuntime, values: torch.Tensor, step: Step) -> None:
    """Put values [rows, width] float32 where peers can read them."""
    engine = runtime.engine
    memory = engine.state.values("combine", step.layout, step.alignment, values.shape[1]).payload(step.bank)
    runtime.launch(("values", step.layout), lambda: copy_used_rows(engine, values.view(torch.uint8), memory, step))


def collect_values(runtime: DeviceRuntime, step: Step) -> torch.Tensor:
    """[T, K] float32: what the ranks of the rows have exposed for each slot, 0 where nothing was selected."""
    engine, state = runtime.engine, runtime.engine.state
    memory = state.values("combine", step.layout, step.alignment, width_of(engine, step.layout))
    out = state.empty(torch.float32, *step.where.shape)
    runtime.launch(("combine values", step.layout), lambda: combine_values(engine, memory, step, out))
    return out


def aligned(t: torch.Tensor) -> torch.Tensor:
    """Contiguous, from a multiple of 16 bytes on: kernels are compiled for that."""
    t = t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t
