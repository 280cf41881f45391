"""A step that this rank cannot take part in, since its arguments are illegal: void on all ranks, but it has happened.

The words of the step are sent as always, with REFUSED in the count field where peers wait, or what else is `said`
instead of the name of a call. A peer that sees it sends and reads no rows, and signals on as usual, so that all ranks
stay in step and the bank is free again.

Orders: those of `routing.signal` and `await_peers`. Bytes moved: 8 a word and peer. One block.
Worked example, 2 ranks, step 1, refused by rank 1: its words COUNTS and READY on rank 0 are 0x1000000, its DONE is
0x1000001; rank 0 finds `void` 1 and no rows.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.counts import VOID
from expertwire.kernels.routing import COMBINE_READY, COUNTS, DONE, READY, await_peers, leave_combine, signal


@triton.jit(do_not_specialize=["rank", "timeout_us", "said"])
def refuse_dispatch(said, timeout_us, word_bases, epochs, status, rank, R: tl.constexpr, RANKS: tl.constexpr):
    """`protocols.counted.refuse`: waits for the bank as everybody does, but not for the peers."""
    epoch = tl.load(epochs) + 1
    await_peers(word_bases, DONE, epoch - 1, 0, rank, status, timeout_us, R, RANKS)
    tl.store(epochs, epoch)
    signal(word_bases, COUNTS, epoch, said, rank, R, RANKS)
    signal(word_bases, READY, epoch, said, rank, R, RANKS)
    signal(word_bases, DONE, epoch, 0, rank, R, RANKS)


@triton.jit(do_not_specialize=["rank", "timeout_us", "said"])
def refuse_combine(
    counts, said, timeout_us, word_bases, numbers, status, rank, R: tl.constexpr, RANKS: tl.constexpr,
    BANKS: tl.constexpr,
):  # fmt: skip
    """Ends as combine does, when all peers are through with this step. There is none if the dispatch is VOID in
    `counts`, which is None if it is not known."""
    number = tl.load(numbers) + 1
    void = 0
    if counts is not None:
        void = tl.load(counts + VOID)
    if void == 0:
        bank = number % BANKS
        signal(word_bases, COMBINE_READY, number, said, rank, R, RANKS, bank)
        tl.store(numbers, number)
        leave_combine(word_bases, number, rank, status, timeout_us, R, RANKS, bank)
