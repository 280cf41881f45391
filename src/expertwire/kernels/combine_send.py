"""Send half of combine: say where this rank's expert output is, and that it is ready. No row moves; peers read them.

Orders: the expert output was written by earlier launches of the stream; `exchange_release` (sys) publishes it.
Bytes moved: 16 a peer. Worked example, rank 1 of 2: writes its address to entry 1 of the table of ranks 0 and 1, then
its word COMBINE_READY on both.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.routing import COMBINE_READY, signal


@triton.jit
def publish_rows(
    y, source_bases, word_bases, epoch, rank, R: tl.constexpr, RANKS: tl.constexpr, EXCHANGE: tl.constexpr
):
    """y: this rank's rows [rows, hidden].

    With EXCHANGE, where any address of one rank is good on all, the address of y is written into the table that every
    peer has at source_bases [R]. Without, source_bases are known addresses of every rank's rows.
    """
    if EXCHANGE:
        peers = tl.arange(0, RANKS)
        tables = tl.load(source_bases + peers, mask=peers < R, other=0).to(tl.pointer_type(tl.int64))
        tl.store(tables + rank, tl.zeros([RANKS], tl.int64) + y.to(tl.int64), mask=peers < R)
    signal(word_bases, COMBINE_READY, epoch, 0, rank, R, RANKS)


@triton.jit(do_not_specialize=["rank"])
def combine_send(
    y, source_bases, word_bases, epochs, void, rank, R: tl.constexpr, RANKS: tl.constexpr, EXCHANGE: tl.constexpr
):
    """The send half by itself, where the receive half was deferred. One block. Nothing, if the dispatch was `void`."""
    if tl.load(void) == 0:
        publish_rows(y, source_bases, word_bases, tl.load(epochs) + 1, rank, R, RANKS, EXCHANGE)
