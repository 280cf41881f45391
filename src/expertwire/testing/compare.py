"""Bitwise comparison that says where the first difference is."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mismatch:
    """`index` is (row, column) for a matrix; `count` of `total` values differ."""

    index: tuple[int, ...]
    expected: float | int
    seen: float | int
    count: int
    total: int

    def __str__(self) -> str:
        names = {1: ("row",), 2: ("row", "column"), 3: ("group", "row", "column")}.get(len(self.index))
        place = (
            ", ".join(f"{name} {i}" for name, i in zip(names, self.index, strict=True)) if names else str(self.index)
        )
        return (
            f"first difference at {place}: expected {self.expected!r}, seen {self.seen!r}; {self.count} of {self.total}"
        )


def first_mismatch(seen: torch.Tensor, expected: torch.Tensor) -> Mismatch | None:
    """None if shape, dtype and every bit agree; -0.0 differs from 0.0, and any NaN equals any NaN.

    Raises AssertionError if the shapes or dtypes differ.
    """
    seen, expected = seen.detach().cpu(), expected.detach().cpu()
    if seen.dtype != expected.dtype or seen.shape != expected.shape:
        raise AssertionError(f"expected {expected.dtype} {list(expected.shape)}, seen {seen.dtype} {list(seen.shape)}")
    differs = _bits(seen) != _bits(expected)
    if seen.is_floating_point() and differs.any():
        differs &= ~(seen.float().isnan() & expected.float().isnan())
    if not differs.any():
        return None
    index = tuple(int(i) for i in differs.nonzero()[0])
    return Mismatch(index, expected[index].item(), seen[index].item(), int(differs.sum()), differs.numel())


def assert_equal(seen: torch.Tensor | None, expected: torch.Tensor | None, name: str = "tensor") -> None:
    """Raise AssertionError with `name` and the first mismatch, unless both are None or equal bit for bit."""
    if seen is None or expected is None:
        if seen is not expected:
            kinds = ["None" if t is None else f"{t.dtype} {list(t.shape)}" for t in (expected, seen)]
            raise AssertionError(f"{name}: expected {kinds[0]}, seen {kinds[1]}")
        return
    try:
        mismatch = first_mismatch(seen, expected)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None
    if mismatch is not None:
        raise AssertionError(f"{name}: {mismatch}")


def _bits(t: torch.Tensor) -> torch.Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return t.contiguous().view(integer)
