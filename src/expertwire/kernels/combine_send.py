"""Where ranks meet for combine: say where this rank's expert output is and that it is ready, and wait for the peers'.

No row moves here: `combine_gather`, a later launch, reads them where they are, or `combine_push`, an earlier one, has
brought them. The waiting is done here, in one block, so that it takes little of a GPU on which others compute: waiting
blocks all over it would keep away every kernel that needs more of an SM than they leave, which may be one that a peer
waits for.

Orders: the expert output was written by earlier launches of the stream; `exchange_release` (sys) publishes it;
`load_acquire` (sys) of the peers' words, then plain loads by later launches of the stream.
Bytes moved: 16 a peer. Worked example, rank 1 of 2: writes its address to entry 1 of the table of ranks 0 and 1, then
its word COMBINE_READY on both, and waits for that of rank 0.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.counts import NUMBER, REFUSED, VOID, combine_number
from expertwire.kernels.routing import COMBINE_READY, await_peers, say, signal


@triton.jit(do_not_specialize=["rank", "timeout_us", "name"])
def combine_send(
    y, seen_at, counts, name, timeout_us, tables, word_bases, numbers, status, rank,
    R: tl.constexpr, RANKS: tl.constexpr, BANKS: tl.constexpr, TABLE_BYTES: tl.constexpr, TELL: tl.constexpr,
    OWN: tl.constexpr, PUBLISH: tl.constexpr, RECEIVE: tl.constexpr,
):  # fmt: skip
    """One block. y: this rank's rows [rows, hidden]. PUBLISH: the send half; RECEIVE: wait for everybody's.

    Combines are numbered on the device, as they are published, and take turns in the banks of their words and tables.

    TELL every peer, in the table that it has at `tables` [R], of TABLE_BYTES a bank, where it sees y: at seen_at [R], 0
    if the rows that it needs were pushed to it; without seen_at at the address of y. This rank itself reads y, unless
    its OWN rows were pushed too.

    If the dispatch is VOID in `counts`, there is no combine. REFUSED is written: whether there are no rows to be read,
    because of that or since a peer refuses this step or makes another call.
    """
    number = tl.load(numbers) + 1 if PUBLISH else tl.load(combine_number(counts))
    said = say(name, tl.load(counts + NUMBER))
    refusals = tl.load(counts + VOID)
    if refusals == 0:
        bank = number % BANKS
        if PUBLISH:
            if TELL:
                peers = tl.arange(0, RANKS)
                bases = tl.load(tables + peers, mask=peers < R, other=0)
                address = tl.zeros([RANKS], tl.int64) + y.to(tl.int64)
                if seen_at is not None:
                    seen = tl.load(seen_at + peers, mask=peers < R, other=0)
                    address = seen if OWN else tl.where(peers == rank, address, seen)
                tl.store((bases + bank * TABLE_BYTES).to(tl.pointer_type(tl.int64)) + rank, address, mask=bases != 0)
            signal(word_bases, COMBINE_READY, number, said, rank, R, RANKS, bank)
            tl.store(numbers, number)  # not earlier: with `signal` a block waits until all its warps have read it
            tl.store(combine_number(counts), number)
        if RECEIVE:
            refusals = await_peers(word_bases, COMBINE_READY, number, said, rank, status, timeout_us, R, RANKS, bank)
    if RECEIVE:
        tl.store(counts + REFUSED, refusals)
