"""What every wire format offers, and the checks that all of them share."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from expertwire.errors import InvalidArgument


@runtime_checkable
class WireFormat(Protocol):
    """How one bfloat16 row of `hidden` values travels: a payload and, in most formats, scale factors (sf).

    | method                                 | result                                                            |
    |----------------------------------------|-------------------------------------------------------------------|
    | `payload_bytes(hidden)`                | bytes of payload per row (the most, where rows differ)            |
    | `sf_bytes(hidden)`                     | bytes of scale factors per row, 0 if the format has none          |
    | `encode(x)`                            | bfloat16 `[T, hidden]` -> `(payload, sf)`, one row each per token |
    | `decode_float32(payload, sf, hidden)`  | float32 `[T, hidden]`: what a sum over rows adds up               |
    | `decode_bfloat16(payload, sf, hidden)` | the same, rounded once to bfloat16                                |

    Formats are values: frozen, hashable, equal when their settings are equal. Encoding a row never looks at another
    row, is a function of the row's bits alone, and leaves no autograd edge. A NaN decodes to some NaN: its sign and
    payload bits are not part of any format but BF16.
    """

    @property
    def name(self) -> str: ...

    @property
    def payload_dtype(self) -> torch.dtype: ...

    @property
    def sf_dtype(self) -> torch.dtype | None: ...

    def payload_bytes(self, hidden: int) -> int: ...

    def sf_bytes(self, hidden: int) -> int: ...

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def decode_float32(self, payload: torch.Tensor, sf: torch.Tensor | None, hidden: int) -> torch.Tensor: ...

    def decode_bfloat16(self, payload: torch.Tensor, sf: torch.Tensor | None, hidden: int) -> torch.Tensor: ...


def checked_input(name: str, x: torch.Tensor) -> torch.Tensor:
    """`x` without its autograd edge, or InvalidArgument unless it is bfloat16 `[T, hidden]` with hidden >= 1."""
    if x.dtype != torch.bfloat16:
        raise InvalidArgument(f"{name}.encode: x must be bfloat16, got {x.dtype}")
    if x.ndim != 2 or x.shape[1] == 0:
        raise InvalidArgument(f"{name}.encode: x must be [num_tokens, hidden >= 1], got shape {list(x.shape)}")
    return x.detach()


def checked_part(name: str, part: str, t: torch.Tensor | None, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """`t`, or InvalidArgument unless it has the dtype and shape that `encode` gave it."""
    if t is None or t.dtype != dtype or list(t.shape) != shape:
        seen = "None" if t is None else f"{t.dtype} {list(t.shape)}"
        raise InvalidArgument(f"{name}.decode: {part} must be {dtype} {shape}, got {seen}")
    return t.detach()


def divide(a: torch.Tensor | float, b: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    """a / b as one correctly rounded float32 division per element.

    Both sides are made tensors because torch turns `number / t`, and on some devices `t / number`, into a product
    with a reciprocal, which rounds twice.
    """
    left = a if isinstance(a, torch.Tensor) else torch.full_like(like, a)
    right = b if isinstance(b, torch.Tensor) else torch.full_like(like, b)
    return left / right
