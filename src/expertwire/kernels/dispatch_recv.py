"""Receive half of dispatch: wait for the peers' rows, which already lie at their final places. When they have been
read, or copied (`copy_rows`), `give_back` tells the peers that the window may be written again.

Orders: `load_acquire` (sys) of the peers' words, then plain loads by later launches of the stream.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.routing import DONE, receive_rows, signal


@triton.jit(do_not_specialize=["rank", "timeout_us", "name"])
def await_rows(
    counts, name, timeout_us, word_bases, epochs, status, rank, R: tl.constexpr, RANKS: tl.constexpr, VOID: tl.constexpr
):  # fmt: skip
    """One block: wait for the rows of the step that was sent last in this bank; number VOID of `counts` is written."""
    receive_rows(counts, VOID, name, word_bases, tl.load(epochs), rank, status, timeout_us, R, RANKS)


@triton.jit(do_not_specialize=["rank"])
def give_back(word_bases, epochs, rank, R: tl.constexpr, RANKS: tl.constexpr):
    """Tell the peers that the rows of the bank's last step have been read."""
    signal(word_bases, DONE, tl.load(epochs), 0, rank, R, RANKS)


@triton.jit
def export_values(values, out, size: tl.constexpr, SIZE: tl.constexpr):
    """values [size] int32 to pinned host memory. A kernel, not a copy: a copy that waits behind a kernel that waits for
    a peer may hold up the copies of that peer, where both are in one process."""
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(values + at, mask=at < size, other=0), mask=at < size)
