"""What dispatch and combine calls share.

A call begins its step before it checks its arguments. If they are illegal the step is refused, which peers learn from
the signal that they wait for anyway; so an error on one rank is an error on all, and nobody hangs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from expertwire._check import Settings
from expertwire.errors import ExpertWireError, HandleError
from expertwire.handle import Combined, Dispatched, Handle
from expertwire.host.engine import HostEngine
from expertwire.steps import LaneSteps, Steps

R = TypeVar("R", Dispatched, Combined)


@dataclass(frozen=True)
class Context:
    """A buffer as its calls see it."""

    owner: object
    settings: Settings
    steps: Steps
    validate: bool
    raise_if_full: Callable[[], None]

    @property
    def engine(self) -> HostEngine:
        return self.steps.engine

    @property
    def rank(self) -> int:
        return self.steps.engine.rank

    def refuse(self, steps: LaneSteps, epoch: int, error: BaseException) -> None:
        """This call ends with `error` before it has sent anything: the step is void on all ranks."""
        if isinstance(error, Exception):
            reason = str(error) if isinstance(error, ExpertWireError) else f"rank {self.rank}: {error!r}"
            self.steps.refuse(steps, epoch, reason)
        else:
            self.steps.failure = error


def check_handle(rank: int, owner: object, handle: Any) -> None:
    """`handle` can be used by a call of the buffer `owner` now."""
    if not isinstance(handle, Handle):
        raise HandleError(
            f"rank {rank}: handle must be the `handle` of an earlier dispatch, got {type(handle).__name__}"
        )
    if handle._owner is not owner:
        raise HandleError(f"rank {rank}: {handle} belongs to another buffer")
    if handle._arrived is None:
        state = "was refused" if handle.finished else "has not received yet: call its hook() first"
        raise HandleError(f"rank {rank}: the dispatch of {handle} {state}")
    if handle._busy:
        raise HandleError(
            f"rank {rank}: {handle} is in use by a combine that has not received yet: call its hook() first"
        )


class _Hook(Generic[R]):
    """Runs a receive half once and fills its record; afterwards it holds on to nothing but the error, if it failed."""

    def __init__(self, made: R, complete: Callable[[], dict[str, Any]]) -> None:
        self._pending: tuple[R, Callable[[], dict[str, Any]]] | None = (made, complete)
        self._made: weakref.ref[R] = weakref.ref(made)
        self._failure: BaseException | None = None

    def __call__(self) -> R:
        if self._pending is not None:
            made, complete = self._pending
            self._pending = None
            try:
                rest = complete()
                if hasattr(rest.get("_later"), "event"):
                    made.__dict__.pop("event", None)  # asked for after the send half: it has another one now
                made.__dict__.update(rest)
            except BaseException as error:
                self._failure = error
                raise
            return made
        if self._failure is not None:
            raise self._failure
        filled = self._made()
        if filled is None:
            raise HandleError("this hook was called before, and the record that it returned is gone")
        return filled


def record(kind: type[R], complete: Callable[[], dict[str, Any]], deferred: bool, **known: Any) -> R:
    """A frozen record: filled in now, or, if `deferred`, by its hook()."""
    made = object.__new__(kind)
    made.__dict__.update(known)
    made.__dict__.update({"hook": _Hook(made, complete)} if deferred else complete())
    return made


def any_requires_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether a gradient is wanted of one of them."""
    return True in [tensor.requires_grad for tensor in tensors if tensor is not None]


def as_rows(grad: torch.Tensor | None, num_rows: int, hidden: int) -> torch.Tensor:
    """A gradient as contiguous bfloat16 [num_rows, hidden]; zeros where autograd has none."""
    if grad is None:
        return torch.zeros((num_rows, hidden), dtype=torch.bfloat16)
    return grad.to(torch.bfloat16).reshape(num_rows, hidden).contiguous()
