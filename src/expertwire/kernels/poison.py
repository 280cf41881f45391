"""For `debug_poison`: rows that hold nothing are NaN, and guards behind memory show that somebody wrote too far."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from expertwire.layouts.device_window import REGION_ALIGN

GUARD_BYTES = REGION_ALIGN
_GUARD = 0xA5
_POISON = 0xFF  # bytes of NaN in bfloat16, float32, e4m3 and e8m0


def poison(rows: torch.Tensor) -> None:
    """Overwrite rows of any dtype with NaN, in stream order."""
    rows.view(torch.uint8).fill_(_POISON)


def guard(piece: torch.Tensor) -> None:
    """Make the last bytes of a piece of memory, uint8, a guard."""
    piece[-GUARD_BYTES:].fill_(_GUARD)


def broken_guards(pieces: Iterable[torch.Tensor]) -> list[int]:
    """Byte offsets of guards that somebody wrote to, as if the pieces lay one behind the other."""
    found, end = [], 0
    for piece in pieces:
        end += piece.numel()
        if (piece[-GUARD_BYTES:].cpu() != _GUARD).any():  # compared on the host: no kernel has to be loaded
            found.append(end - GUARD_BYTES)
    return found
