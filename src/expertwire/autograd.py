"""The autograd edges of dispatch and combine.

A backward pass is a collective like a forward pass: the backward of dispatch is a combine, the backward of combine a
cached dispatch. So every rank must take part in it, also one that received no rows, or whose inputs need no gradient
while a peer's do. Two things see to that: whether there is an edge is agreed by all ranks (the flag travels in front of
the rows), and the edge hangs on an anchor of the library's own, passed from dispatch to combine in the handle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Gradients = Callable[[list[torch.Tensor | None]], Sequence[torch.Tensor | None]]


class Kept:
    """A tensor that a backward pass needs as it is now, when a call reads it."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self._name, self._version = name, _version(tensor)

    def raise_if_modified(self) -> None:
        if _version(self.tensor) != self._version:
            raise RuntimeError(
                f"{self._name}, needed for gradient computation, has been modified by an inplace operation"
            )


def _version(tensor: torch.Tensor) -> int:
    """Tensors of torch.inference_mode have none."""
    return 0 if tensor.is_inference() else tensor._version


class _Edge(torch.autograd.Function):
    """Outputs that were computed already, tied to the inputs that their gradients belong to."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, outputs: list[torch.Tensor], backward: Gradients, *inputs: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        ctx.gradients = backward
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point() or t.element_size() == 1))
        return (*outputs, anchor.new_zeros(0))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        found = ctx.gradients(list(grads[:-1]))
        return (torch.zeros(0), None, None, *found)


def attach(
    anchor: torch.Tensor | None,
    outputs: list[torch.Tensor],
    inputs: Sequence[torch.Tensor | None],
    backward: Gradients,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Tie `outputs` to `inputs`; returns them and a new anchor, which ties a later call to this one.

    `backward` maps the gradients of the outputs to those of the inputs. It runs on every rank.
    """
    if anchor is None:
        anchor = torch.zeros(0, requires_grad=True)
    *tied, edge = _Edge.apply(  # type: ignore[no-untyped-call]
        anchor, outputs, backward, *inputs
    )
    return tied, edge
