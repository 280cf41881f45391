"""float32 values that go along the routing of a dispatch: to the rows, and back from the rows to the tokens.

EXPERT_* has one value a row, that of its (token, slot). COMPACT has K values a row, one for each slot of its token: 0
for slots that the row does not serve. WIDTH is how many. They lie in memory of their own, `value_bases` [R] int64 being
its address on every rank; `where` [T, K] says where each slot's row is.

Orders: `send_values` are plain stores that the rows' own signal, of a later launch, vouches for. `combine_values`
reads what an earlier `combine_send` has waited for; it ends the combine, if it is alone, or leaves that to the gather
of rows.

Bytes moved: 12 * T * K to read places and to read or write values, and 4 for every value at the rows.

Worked example, K = 2, one token with values (0.5, 2.0) and places (0:3, 0:3), rank 0's row 3 serving both: COMPACT has
the row (0.5, 2.0). With places (0:3, 1:1) rank 0's row 3 is (0.5, 0) and rank 1's row 1 is (0, 2.0). Back again, both
give (0.5, 2.0).
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from expertwire.kernels.counts import REFUSED
from expertwire.kernels.routing import WHERE_RANK, WHERE_ROW, end_combine


@triton.jit
def _addresses(value_bases, place, column, WIDTH: tl.constexpr):
    """Of the value at `column` of the rows at `place`; unused where there is no row."""
    base = tl.load(value_bases + (tl.maximum(place, 0) >> WHERE_RANK), mask=place >= 0, other=0)
    return (base + ((place & WHERE_ROW) * WIDTH + column) * 4).to(tl.pointer_type(tl.float32))


@triton.jit(do_not_specialize=["num_values"])
def send_values(values, where, num_values, value_bases, K: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr):
    """values [T, K], num_values = T * K. The rows' bank must have been given back by the peers."""
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES).to(tl.int64)
    slot = entry // WIDTH  # of `where`, whose row is written
    column = entry % WIDTH
    source = slot if WIDTH == 1 else slot // K * K + column
    mask = slot < num_values
    place = tl.load(where + slot, mask=mask, other=-1)
    served = tl.load(where + source, mask=mask, other=-1) == place
    value = tl.load(values + source, mask=mask & served, other=0.0)
    tl.store(_addresses(value_bases, place, column, WIDTH), value, mask=place >= 0)


@triton.jit(do_not_specialize=["num_values", "rank", "timeout_us"])
def combine_values(
    where, out, counts, num_values, timeout_us, value_bases, word_bases, tickets, status, rank,
    R: tl.constexpr, RANKS: tl.constexpr, BANKS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    ENTRIES: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """out [T, K]: the values at the rows, 0 where nothing was sent. num_values = T * K. Nothing, if the combine was
    REFUSED. ALONE: there are no rows to be gathered after it."""
    if R > 1:
        num_values = tl.where(tl.load(counts + REFUSED) == 0, num_values, 0)
    for chunk in range(tl.program_id(0), tl.cdiv(num_values, ENTRIES), tl.num_programs(0)):
        entry = chunk * ENTRIES + tl.arange(0, ENTRIES).to(tl.int64)
        place = tl.load(where + entry, mask=entry < num_values, other=-1)
        column = entry % K if WIDTH > 1 else 0
        value = tl.load(_addresses(value_bases, place, column, WIDTH), mask=place >= 0, other=0.0)
        tl.store(out + entry, value, mask=entry < num_values)
    if R > 1 and ALONE:
        end_combine(
            counts, word_bases, tickets, word_bases, word_bases, rank, status, timeout_us, R, RANKS, BANKS, False
        )  # fmt: skip
