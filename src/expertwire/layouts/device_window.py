"""A rank's window on a device: the words and counts that peers write into, and the regions that rows land in.

    words    [bank][purpose][writer]              8-byte signal words, one cache line each
    counts   [bank][writer][num_experts + num_ranks]   int32: the writer's selections per expert, its rows per rank
    sources  [bank][writer]                       8-byte address at which combine reads the writer's expert output, 0 if
                                                  the writer has pushed it
    rows     [bank]                               one `RowRegion`: rows at their final places, as the caller sees them
    returned [bank]                               rows that were pushed for combine, one for each place of a token

Counts travel before rows, so a writer knows the final place of each of its rows and puts it there: nothing is copied
at the receiver. This differs from `layouts.window`, where rows wait in a region per writer until the receiver places
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from expertwire._math import ceil_div, round_up
from expertwire.layouts.receive import Layout, worst_case_rows

LINE_BYTES = 64
REGION_ALIGN = 256
SOURCE_WORDS = 3  # of a row's routing: source rank, token, which of its places
PURPOSES = ("counts", "ready", "done", "combine_ready", "combine_done")


@dataclass(frozen=True)
class DeviceWindow:
    """Offsets of words, counts and sources.

    >>> DeviceWindow(num_ranks=8, num_experts=256, num_banks=2).total_bytes
    22528
    """

    num_ranks: int
    num_experts: int
    num_banks: int

    @property
    def words_bytes(self) -> int:
        """Words of one bank."""
        return len(PURPOSES) * self.num_ranks * LINE_BYTES

    @property
    def counts_row(self) -> int:
        """Counts of one writer: how many int32."""
        return self.num_experts + self.num_ranks

    @property
    def counts_bytes(self) -> int:
        """Counts of one bank."""
        return round_up(4 * self.num_ranks * self.counts_row, REGION_ALIGN)

    def words(self, bank: int) -> int:
        assert 0 <= bank < self.num_banks
        return bank * self.words_bytes

    def word(self, purpose: str, writer: int, bank: int) -> int:
        """Byte offset of the word that `writer` writes for `purpose` in `bank`."""
        assert 0 <= writer < self.num_ranks
        return self.words(bank) + (PURPOSES.index(purpose) * self.num_ranks + writer) * LINE_BYTES

    def counts(self, bank: int) -> int:
        return round_up(self.num_banks * self.words_bytes, REGION_ALIGN) + bank * self.counts_bytes

    @property
    def sources_bytes(self) -> int:
        """Sources of one bank."""
        return round_up(8 * self.num_ranks, REGION_ALIGN)

    def sources(self, bank: int) -> int:
        return self.counts(self.num_banks - 1) + self.counts_bytes + bank * self.sources_bytes

    @property
    def total_bytes(self) -> int:
        return self.sources(self.num_banks)


@dataclass(frozen=True)
class RowRegion:
    """Rows at their final places: payload [num_rows, payload_bytes], then scale factors, then `meta_words` int32 a row.
    With `output_bytes`, what is before the routing has room for as many rows of the experts' output, of that size each.

    >>> region = RowRegion(num_rows=1024, payload_bytes=7168, sf_bytes=224, meta_words=3)
    >>> region.sf, region.meta, region.total_bytes
    (7340032, 7569408, 7581696)
    >>> RowRegion(num_rows=1024, payload_bytes=7168, sf_bytes=224, meta_words=3, output_bytes=14336).meta
    14680064
    """

    num_rows: int
    payload_bytes: int
    sf_bytes: int
    meta_words: int
    output_bytes: int = 0

    @cached_property
    def sf(self) -> int:
        return round_up(self.num_rows * self.payload_bytes, REGION_ALIGN)

    @cached_property
    def meta(self) -> int:
        end = self.sf + round_up(self.num_rows * self.sf_bytes, REGION_ALIGN)
        return max(end, round_up(self.num_rows * self.output_bytes, REGION_ALIGN))

    @property
    def total_bytes(self) -> int:
        return self.meta + round_up(4 * self.num_rows * self.meta_words, REGION_ALIGN)


@lru_cache(maxsize=256)
def row_region(
    layout: Layout, num_ranks: int, capacity: int, num_topk: int, most_local_experts: int, alignment: int,
    payload_bytes: int, sf_bytes: int, output_bytes: int = 0,
) -> RowRegion:  # fmt: skip
    """Memory for rows of one kind in one bank, the same on all ranks, also where experts are spread unevenly."""
    num_rows = worst_case_rows(layout, num_ranks, capacity, num_topk, most_local_experts, alignment)
    routing = SOURCE_WORDS + (2 * num_topk if layout is Layout.COMPACT else 0)
    return RowRegion(num_rows, payload_bytes, sf_bytes, routing, output_bytes)


def num_places(layout: Layout, num_ranks: int, num_topk: int) -> int:
    """To how many rows at most a token is sent: one for each slot; of COMPACT, one for each rank."""
    return min(num_ranks, num_topk) if layout is Layout.COMPACT else num_topk


def device_bytes(
    *, num_ranks: int, num_experts: int, capacity: int, num_topk: int, num_banks: int, layout: Layout, alignment: int,
    payload_bytes: int, sf_bytes: int, returned_bytes: int = 0, output_bytes: int = 0, over_rows: bool = False,
) -> int:  # fmt: skip
    """What a buffer on a device shares with its peers once it has dispatched rows of this kind and combined: window,
    rows, and with several ranks a row of `returned_bytes` for each place of a token. With `output_bytes` also as many
    rows of the experts' output, of that size each; or else `over_rows`, which then are not returned.

    >>> device_bytes(
    ...     num_ranks=8, num_experts=256, capacity=128, num_topk=8, num_banks=1, layout=Layout.EXPERT_SLOTS,
    ...     alignment=1, payload_bytes=7168, sf_bytes=224,
    ... )
    242625536
    """
    local = ceil_div(num_experts, num_ranks)
    within, apart = (output_bytes, 0) if over_rows else (0, output_bytes)
    rows = row_region(layout, num_ranks, capacity, num_topk, local, alignment, payload_bytes, sf_bytes, within)
    outputs = RowRegion(rows.num_rows, apart, 0, 0)
    returned = RowRegion(capacity * num_places(layout, num_ranks, num_topk), returned_bytes, 0, 0)
    per_bank = rows.total_bytes + outputs.total_bytes + (0 if over_rows or num_ranks == 1 else returned.total_bytes)
    return DeviceWindow(num_ranks, num_experts, num_banks).total_bytes + num_banks * per_bank
