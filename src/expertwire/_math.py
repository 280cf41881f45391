"""Integer arithmetic used across the package."""

from __future__ import annotations


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple
