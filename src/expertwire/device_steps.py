"""What dispatch and combine calls on a device share: which steps are open, and what a handle keeps of its dispatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from expertwire.errors import HandleError
from expertwire.handle import Handle
from expertwire.kernels.engine import DeviceEngine, Step
from expertwire.kernels.runtime import DeviceRuntime
from expertwire.layouts.receive import Layout
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
    counts, offsets = step.expert_counts, step.offsets
    if step.layout is Layout.COMPACT:
        counts, offsets = step.num_rows, engine.state.slot_offsets[:1]
    engine.copy_rows(source, out, counts, offsets, engine.num_ranks * engine.capacity)
