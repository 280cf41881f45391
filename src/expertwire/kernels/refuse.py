"""A step that this rank cannot take part in, since its arguments are illegal: void on all ranks, but it has happened.

The words of the step are sent as always, with REFUSED in the count field where peers wait. A peer that sees it sends
and reads no rows, and signals on as usual, so that all ranks stay in step and the bank is free again.

Orders: those of `routing.signal` and `await_peers`. Bytes moved: 8 a word and peer. One block.
Worked example, 2 ranks, step 1, refused by rank 1: its words COUNTS and READY on rank 0 are 0x1000000, its DONE is
0x1000001; rank 0 finds `void` 1 and no rows.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.routing import COMBINE_READY, COUNTS, DONE, READY, await_peers, leave_combine, signal


@triton.jit(do_not_specialize=["rank", "timeout_us"])
def refuse_dispatch(timeout_us, word_bases, epochs, status, rank, R: tl.constexpr, RANKS: tl.constexpr):
    """`protocols.counted.refuse`: waits for the bank as everybody does, but not for the peers."""
    epoch = tl.load(epochs) + 1
    await_peers(word_bases, DONE, epoch - 1, rank, status, timeout_us, R, RANKS)
    tl.store(epochs, epoch)
    signal(word_bases, COUNTS, epoch, -1, rank, R, RANKS)
    signal(word_bases, READY, epoch, -1, rank, R, RANKS)
    signal(word_bases, DONE, epoch, 0, rank, R, RANKS)


@triton.jit(do_not_specialize=["rank", "timeout_us"])
def refuse_combine(timeout_us, word_bases, epochs, status, rank, R: tl.constexpr, RANKS: tl.constexpr):
    """Ends as combine does, when all peers are through with this step."""
    epoch = tl.load(epochs) + 1
    signal(word_bases, COMBINE_READY, epoch, -1, rank, R, RANKS)
    leave_combine(word_bases, epochs, epoch, rank, status, timeout_us, R, RANKS)
