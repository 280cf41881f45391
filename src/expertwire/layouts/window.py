"""A rank's window: the memory that peers write into. The same object describes it on every rank and in every engine.

    words      [bank][purpose][writer]        8-byte signal words, one cache line each
    dispatch   [bank][writer]                 header, the routing of `capacity` rows side by side, the rows
    combine    [bank]                         one header per writer, then [capacity][num_topk] combine records, shared
                                              by all writers, or, with `writers_apart`, [writer][capacity][num_topk]

Regions are separated by guards that nobody writes. All addresses depend on what was fixed at creation, never on a call:
a call with shorter rows packs them more densely inside the region, but no region moves.

Beside its window a rank shares its outputs with its peers: memory for received rows, which peers write directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from expertwire._math import round_up
from expertwire.layouts.rows import (
    LINE_BYTES,
    CombineRow,
    DispatchRow,
    max_combine_bytes,
    max_data_bytes,
    routing_bytes,
)

HEADER_BYTES = 256
GUARD_BYTES = 64
PAGE_BYTES = 4096
PURPOSES = (
    "barrier",
    "leaving",  # the writer has closed its buffer
    "excluded",  # the writer has masked this rank
    "dispatch_ready",
    "dispatch_done",
    "dispatch_place_ready",  # the writer, as a reader of dispatch, says where rows go; the record is behind the word
    "dispatch_landing_ready",
    "combine_ready",
    "combine_done",
)


@dataclass(frozen=True)
class WindowLayout:
    """`capacity` is num_max_tokens_per_rank, `num_banks` is max_in_flight.

    `writers_apart` gives every writer combine records of its own: where a peer may be masked and go on without it, that
    peer may wake up in the middle of a write, and nothing but its own records must be hit.
    """

    num_ranks: int
    capacity: int
    hidden: int
    num_topk: int
    num_banks: int
    writers_apart: bool = False

    @cached_property
    def dispatch_region_bytes(self) -> int:
        """One writer's share of one bank: header, routing, rows."""
        return HEADER_BYTES + self._routing_bytes + self.capacity * DispatchRow(max_data_bytes(self.hidden), 0).stride

    @cached_property
    def _routing_bytes(self) -> int:
        return round_up(self.capacity * routing_bytes(self.num_topk), LINE_BYTES)

    @cached_property
    def dispatch_apart(self) -> int:
        """Bytes from one writer's region to that of the next."""
        return self.dispatch_region_bytes + GUARD_BYTES

    @cached_property
    def _combine_records_bytes(self) -> int:
        return self.capacity * self.num_topk * CombineRow(max_combine_bytes(self.hidden), 0).stride

    @cached_property
    def combine_bank_bytes(self) -> int:
        copies = self.num_ranks if self.writers_apart else 1
        return round_up(self.num_ranks * HEADER_BYTES + copies * self._combine_records_bytes, LINE_BYTES)

    @cached_property
    def words_bytes(self) -> int:
        return self.num_banks * len(PURPOSES) * self.num_ranks * LINE_BYTES

    def word(self, purpose: str, writer: int, bank: int = 0) -> int:
        """Byte offset of the signal word that `writer` writes for `purpose` in `bank`."""
        assert 0 <= writer < self.num_ranks
        assert 0 <= bank < self.num_banks
        index = (bank * len(PURPOSES) + PURPOSES.index(purpose)) * self.num_ranks + writer
        return index * LINE_BYTES

    def place_record(self, bank: int, reader: int) -> int:
        """Byte offset of two int64 from `reader`: where in its outputs payload and scale factors go, -1 = nowhere."""
        return self.word("dispatch_place_ready", reader, bank) + 8

    @cached_property
    def _dispatch(self) -> int:
        return self.words_bytes + GUARD_BYTES

    @cached_property
    def _combine(self) -> int:
        regions = self.num_banks * self.num_ranks
        return self._dispatch + regions * self.dispatch_apart

    def dispatch_header(self, bank: int, writer: int) -> int:
        assert 0 <= bank < self.num_banks
        assert 0 <= writer < self.num_ranks
        return self._dispatch + (bank * self.num_ranks + writer) * self.dispatch_apart

    def dispatch_routing(self, bank: int, writer: int) -> int:
        """Byte offset of the routing of the first row; that of the others follows, `routing_bytes` each."""
        return self.dispatch_header(bank, writer) + HEADER_BYTES

    def dispatch_rows(self, bank: int, writer: int) -> int:
        """Byte offset of the first record; the others follow at the stride of the call's `DispatchRow`."""
        return self.dispatch_routing(bank, writer) + self._routing_bytes

    def combine_header(self, bank: int, writer: int) -> int:
        assert 0 <= bank < self.num_banks
        assert 0 <= writer < self.num_ranks
        return self._combine + bank * (self.combine_bank_bytes + GUARD_BYTES) + writer * HEADER_BYTES

    def combine_rows(self, bank: int, writer: int) -> int:
        """Byte offset of record (token 0, slot 0); record (t, k) is `(t * num_topk + k) * stride` further."""
        return self.combine_header(bank, self.num_ranks - 1) + HEADER_BYTES + writer * self.combine_apart

    def header(self, lane: str, bank: int, writer: int) -> int:
        """Byte offset of the header in front of the rows of a region of "dispatch" or "combine"."""
        return {"dispatch": self.dispatch_header, "combine": self.combine_header}[lane](bank, writer)

    def rows(self, lane: str, bank: int, writer: int) -> int:
        """Byte offset of the first record of such a region."""
        return {"dispatch": self.dispatch_rows, "combine": self.combine_rows}[lane](bank, writer)

    @cached_property
    def combine_apart(self) -> int:
        """Bytes from one writer's combine records to those of the next: none where all share them."""
        return self._combine_records_bytes if self.writers_apart else 0

    @cached_property
    def total_bytes(self) -> int:
        return self._combine + self.num_banks * (self.combine_bank_bytes + GUARD_BYTES)

    @cached_property
    def output_bytes(self) -> int:
        """Memory for received rows beside the window: every dispatch in flight and one that the caller still holds, all
        COMPACT and as large as they can be. None where peers may be masked: one that wakes up must not write there."""
        if self.num_ranks == 1 or self.writers_apart:
            return 0
        largest = self.num_ranks * self.capacity * max_data_bytes(self.hidden)
        return (self.num_banks + 1) * (round_up(largest, PAGE_BYTES) + PAGE_BYTES)

    def guards(self) -> Iterator[int]:
        """Byte offsets of the `GUARD_BYTES` long guards, one after every region."""
        yield self.words_bytes
        for bank in range(self.num_banks):
            for writer in range(self.num_ranks):
                yield self.dispatch_header(bank, writer) + self.dispatch_region_bytes
        for bank in range(self.num_banks):
            yield self.combine_header(bank, 0) + self.combine_bank_bytes
