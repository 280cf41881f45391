"""Combine: gather each token's rows where the experts left them, on whichever rank, or where they were pushed; and sum.

With several ranks `combine_send` comes first, which waits for the peers' rows. Then, by the last block: signal "I have
read yours", and wait for the same from the peers: when the launch is over, the expert output may be overwritten. With
one rank no word is written.

Orders: the peers' words were acquired by an earlier launch of the stream. DONE is sent by the last block out (ticket,
acq_rel).

Bytes moved: 2 * hidden for every row gathered, every bias row, and every output row. Arithmetic and worked example:
`combine_sum`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.combine_sum import sum_ranks, sum_rows
from expertwire.kernels.counts import REFUSED, combine_number
from expertwire.kernels.profile import combine_gather_bytes
from expertwire.kernels.routing import end_combine


@triton.jit(do_not_specialize=["rank", "num_tokens", "timeout_us"], launch_metadata=combine_gather_bytes)
def combine_gather(
    y, where, topk_weights, bias0, bias1, out, counts, num_tokens, timeout_us,
    told, word_bases, tickets, dispatch_words, dispatch_epochs, status, rank,
    R: tl.constexpr, RANKS: tl.constexpr, BANKS: tl.constexpr, TABLE_BYTES: tl.constexpr, SENDS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, hidden: tl.constexpr, WEIGHTED: tl.constexpr,
    NUM_BIASES: tl.constexpr, FINISH: tl.constexpr, BY_RANK: tl.constexpr,
):  # fmt: skip
    """`where` [T, SENDS] names a token's rows, -1 = none: `sends_to` of the plan; topk_weights [T, SENDS] if WEIGHTED;
    out [T, hidden] bfloat16. y: with one rank the rows, else what peers push into, or None; told [R], of TABLE_BYTES a
    bank: what they have told of theirs. Of a step that is REFUSED in `counts` no rows are read.

    PARTS blocks of COLUMNS columns make a row; a unit of work is ROWS tokens and one part. With FINISH the last block
    also signals that the views of the dispatch have been given back. BY_RANK is reduce="rank": same rows, same bytes,
    the sums of each rank rounded first.
    """
    row_bases = told
    if R > 1:
        refused = tl.load(counts + REFUSED) > 0
        row_bases += tl.where(refused, 0, tl.load(combine_number(counts)) % BANKS) * (TABLE_BYTES // 8)
        num_tokens = tl.where(refused, 0, num_tokens)
    for unit in range(tl.program_id(0), tl.cdiv(num_tokens, ROWS) * PARTS, tl.num_programs(0)):
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
        end_combine(
            counts, word_bases, tickets, dispatch_words, dispatch_epochs, rank, status, timeout_us, R, RANKS, BANKS,
            FINISH,
        )  # fmt: skip
