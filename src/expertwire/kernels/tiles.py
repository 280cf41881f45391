"""Which tile a kernel works on and with how many warps, from numbers alone.

A tile is a constant of a compiled kernel, and no rank must compile while another rank waits for it. So a kernel is
compiled at first for all tiles that a number of tokens up to the capacity may get: there are few.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeVar

from expertwire._math import ceil_div

T = TypeVar("T")
MAX_ROWS = 4  # tokens that a block of `dispatch_send` takes at a time


class Tile(NamedTuple):
    """`rows` tokens, `columns` of each: values or, in dispatch, lines of a quantisation block."""

    rows: int
    columns: int
    warps: int


def pow2(value: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (value - 1).bit_length() if value > 1 else 1


def all_tiles(choose: Callable[[int], T], capacity: int) -> set[T]:
    return {choose(num_tokens) for num_tokens in range(capacity + 1)}


def slots_tile(num_tokens: int, lines: int, block: int, num_sms: int) -> Tile:
    """`dispatch_slots`: about one block per SM, with a row of `lines` lines of `block` values or a part of one."""
    part = pow2(lines)
    while part > 8 and num_tokens * ceil_div(lines, part // 2) <= num_sms:
        part //= 2
    part = max(part, 4)
    return Tile(1, part, max(2, min(8, part * block // 512)))


def send_tile(
    num_tokens: int, row_bytes: int, lines: int, num_sms: int, most_rows: int, strict: bool, fp8: bool
) -> Tile:
    """`dispatch_send`: one row in many small blocks; or, on a strict budget, up to `most_rows` rows of 14336 bytes in
    one block per SM, since few SMs need many loads in flight. `row_bytes` are those of `lines` lines."""
    rows, most_warps = 1, 4
    if strict:
        rows = max(1, min(most_rows, (1 << 16) // row_bytes, pow2(ceil_div(num_tokens, num_sms))))
        most_warps = 32 if fp8 else 16
    return Tile(rows, lines, max(4, min(most_warps, rows * row_bytes // 2048)))


@lru_cache(maxsize=256)
def copy_tile(units: int, strict: bool) -> Tile:
    """Rows of so many units of 4 bytes that are moved as they are: one row in many small blocks, or, on a strict
    budget, several in one block per SM."""
    rows = max(1, min(8, 16384 // pow2(units))) if strict else 1
    return Tile(rows, pow2(units), max(4, min(32, pow2(rows * units // 512))))


def combine_tile(num_tokens: int, hidden: int, num_sms: int, strict: bool) -> Tile:
    """`combine_gather`. Few tokens: many small blocks. A strict budget: one block per SM with four rows in 32 warps."""
    whole = pow2(hidden)
    if strict and num_tokens >= 4 * num_sms:
        if num_sms > 64:
            return Tile(1, whole, 16)
        return Tile(max(1, min(4, 32768 // whole)), whole, 32)
    columns = min(whole, 1024 if num_tokens <= 512 else 2048)
    few = num_tokens * ceil_div(hidden, columns) <= 1024
    return Tile(1, columns, max(1, columns // (256 if few else 512)))
