"""Combine: gather each token's rows where the experts left them, on whichever rank, and sum.

Tell every peer where the own rows are and that they are ready, wait for the peers' signals, gather, signal "I have read
yours", wait for the same from the peers: when the launch is over, the expert output may be overwritten. With one rank
no word is written.

Orders: the expert output was written by earlier launches of the stream; block 0 publishes it with `exchange_release`
(sys); every block acquires the peers' words before it reads. DONE is sent by the last block out (ticket, acq_rel).
Blocks wait for other ranks' block 0: the caller bounds the grid so that all ranks' launches fit on the device.

Bytes moved: 2 * hidden for every row gathered, every bias row, and every output row. Arithmetic and worked example:
`combine_sum`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.combine_send import publish_rows
from expertwire.kernels.combine_sum import sum_ranks, sum_rows
from expertwire.kernels.memory import ticket_acq_rel
from expertwire.kernels.profile import combine_gather_bytes
from expertwire.kernels.routing import COMBINE_READY, DONE, await_peers, end_combine, signal


@triton.jit(do_not_specialize=["rank", "num_tokens", "spin_limit"], launch_metadata=combine_gather_bytes)
def combine_gather(
    y, source_bases, where, topk_weights, bias0, bias1, out, void, word_bases, epochs, tickets, dispatch_epochs, status,
    rank, num_tokens, spin_limit,
    R: tl.constexpr, RANKS: tl.constexpr, SENDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, hidden: tl.constexpr, WEIGHTED: tl.constexpr, NUM_BIASES: tl.constexpr, EXCHANGE: tl.constexpr,
    PUBLISH: tl.constexpr, FINISH: tl.constexpr, BY_RANK: tl.constexpr,
):  # fmt: skip
    """`where` [T, SENDS] names a token's rows, -1 = none (SENDS = K; COMPACT: `sends_to` of the plan); topk_weights
    [T, SENDS] if WEIGHTED; out [T, hidden] bfloat16. y and source_bases as in `combine_send`; with PUBLISH that half
    is done here.

    PARTS blocks of COLUMNS columns make a row; a unit of work is ROWS tokens and one part. With FINISH the last block
    also signals that the views of the dispatch have been given back. BY_RANK is reduce="rank": same rows, same bytes,
    the sums of each rank rounded first. If the dispatch was `void` there is no combine: a rank that knows so already
    does not call it. If a peer refuses this step, no rows are read. Either is left in `void` [2] for `combine_values`.
    """
    block = tl.program_id(0)
    if R > 1:
        epoch = tl.load(epochs) + 1
        refused = tl.load(void)
        taken = refused == 0
        if taken:
            if PUBLISH:
                if block == 0:
                    publish_rows(y, source_bases, word_bases, epoch, rank, R, RANKS, EXCHANGE)
            refused = await_peers(word_bases, COMBINE_READY, epoch, rank, status, spin_limit, R, RANKS)
        num_tokens = tl.where(refused > 0, 0, num_tokens)
    row_bases = source_bases
    if EXCHANGE:
        row_bases = tl.load(source_bases + rank).to(tl.pointer_type(tl.int64))
    for unit in range(block, tl.cdiv(num_tokens, ROWS) * PARTS, tl.num_programs(0)):
        tokens = unit // PARTS * ROWS + tl.arange(0, ROWS).to(tl.int64)
        columns = unit % PARTS * COLUMNS + tl.arange(0, COLUMNS)
        if BY_RANK:
            sum_ranks(
                y, row_bases, where, topk_weights, bias0, bias1, out, tokens, columns, num_tokens,
                R, SENDS, ROWS, COLUMNS, hidden, WEIGHTED, NUM_BIASES,
            )  # fmt: skip
        else:
            sum_rows(
                y, row_bases, where, topk_weights, bias0, bias1, out, tokens, columns, num_tokens,
                R, SENDS, ROWS, COLUMNS, hidden, WEIGHTED, NUM_BIASES,
            )  # fmt: skip
    if R > 1:
        if ticket_acq_rel(tickets) == tl.num_programs(0) - 1:
            tl.store(tickets, 0)
            tl.store(void + 1, refused)
            if FINISH:
                signal(word_bases, DONE, tl.load(dispatch_epochs), 0, rank, R, RANKS)
            if taken:
                end_combine(word_bases, epochs, epoch, rank, status, spin_limit, R, RANKS)
