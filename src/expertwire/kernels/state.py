"""What a rank keeps on its device: the window with its words and counts, memory for rows, and the record of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from expertwire._math import round_up
from expertwire.errors import GroupMismatch, TransportUnavailable
from expertwire.formats import BF16, FP8Block, LogFMT10
from expertwire.kernels.part import Part
from expertwire.kernels.poison import GUARD_BYTES, guard, poison
from expertwire.layouts.device_window import DeviceWindow, RowRegion, num_places, row_region
from expertwire.layouts.receive import Layout
from expertwire.layouts.step_counts import NUM_ROWS, REFUSED, REPEATED, VOID, StepCounts
from expertwire.topology import Placement


class DeviceMemory(Protocol):
    """What a transport between devices provides: memory that the kernels of all ranks can address."""

    name: str
    any_address: bool  # every address of one rank is good on all
    needs_all: bool  # memory can be taken with all ranks only, not when some have ended
    rank: int
    num_ranks: int
    device: torch.device

    def allocate(self, num_bytes: int) -> tuple[torch.Tensor, list[int]]:
        """Zeroed uint8 memory of this rank, and the address at which this process sees every rank's, 0 for ranks that
        have ended. Collective."""
        ...

    def gather_by(self, all_gather: Callable[[object], list[Any]]) -> None:
        """From now on values travel by this, which answers None for ranks that have ended."""
        ...

    def all_gather(self, value: object) -> list[Any]: ...

    def close(self) -> None: ...


class Rows(NamedTuple):
    """How rows travel: `width` units of `unit_bytes`, or, with `fp8`, bfloat16 that becomes e4m3 on the way."""

    width: int
    unit_bytes: int
    sf_units: int
    sf_unit_bytes: int
    fp8: bool = False
    ue8m0: bool = False
    block: int = 128

    @property
    def payload_bytes(self) -> int:
        return self.width if self.fp8 else self.width * self.unit_bytes

    @property
    def sf_bytes(self) -> int:
        return self.sf_units * self.sf_unit_bytes

    @staticmethod
    def of_wire(wire: BF16 | FP8Block, hidden: int) -> Rows:
        if isinstance(wire, FP8Block):
            ue8m0 = wire.scale == "ue8m0"
            units = wire.sf_bytes(hidden) if ue8m0 else wire.sf_bytes(hidden) // 4
            return Rows(hidden, 2, units, 1 if ue8m0 else 4, True, ue8m0, wire.block)
        return Rows(hidden, 2, 0, 4)

    @classmethod
    def opaque(cls, payload_bytes: int, sf_bytes: int) -> Rows:
        unit = next(u for u in (4, 2, 1) if payload_bytes % u == 0)
        sf_unit = 4 if sf_bytes % 4 == 0 else 1
        return cls(payload_bytes // unit, unit, sf_bytes // sf_unit, sf_unit)


@dataclass(frozen=True)
class Bank:
    """This bank's addresses on every rank [R], and the counters that its dispatches keep on the device."""

    words: torch.Tensor  # [R + 1]: the last is the address of this bank's `news`
    counts: torch.Tensor
    epoch: torch.Tensor  # int64 [1]
    ticket: torch.Tensor  # int32 [1]


class Places:
    """Memory for rows of one kind, in every bank: what a dispatch with this layout and these rows writes into."""

    def __init__(
        self, rows: Rows, region: RowRegion, own: list[torch.Tensor], bases: list[torch.Tensor],
        seen_at: list[torch.Tensor],
    ) -> None:  # fmt: skip
        """Per bank: this rank's memory; where it sees every rank's [R]; and where every rank sees this one's [R]."""
        self.rows, self.region, self.bases, self.seen_at = rows, region, bases, seen_at
        self._own = own
        self._payloads = [self._part(bank, 0, region.payload_bytes) for bank in own]
        self._sfs = [self._part(bank, region.sf, region.sf_bytes) for bank in own]
        self._metas = [self._part(bank.view(torch.int32), region.meta // 4, region.meta_words) for bank in own]

    def _part(self, memory: torch.Tensor, first: int, width: int) -> torch.Tensor:
        return memory[first : first + self.region.num_rows * width].view(self.region.num_rows, width)

    def payload(self, bank: int) -> torch.Tensor:
        """Rows of one bank, uint8 [num_rows, payload_bytes]."""
        return self._payloads[bank]

    def sf(self, bank: int) -> torch.Tensor | None:
        """Their scale factors, uint8 [num_rows, sf_bytes]."""
        return self._sfs[bank] if self.region.sf_bytes else None

    def meta(self, bank: int) -> torch.Tensor:
        """Their routing, int32 [num_rows, meta_words]."""
        return self._metas[bank]

    def output(self, bank: int) -> torch.Tensor:
        """Room for the experts' output, uint8 [num_rows, output_bytes], over the rows."""
        return self._part(self._own[bank], 0, self.region.output_bytes)

    def poison(self, bank: int) -> None:
        """Overwrite the rows of one bank with NaN. Their routing stays, which kernels follow."""
        poison(self._own[bank][: self.region.meta])


@dataclass
class Step:
    """What one dispatch left behind: the plan that combine gathers by, and counts of what arrived."""

    bank: int
    layout: Layout
    alignment: int
    sends_to: Part  # int64 [T, K] where each slot's row is; COMPACT [T, min(K, R)]: each place once, by highest slot
    owners: Part | None  # int32 [T, K], COMPACT: the rank that serves each slot, -1 = none
    counts: Part  # int32, whose parts are named by `parts`
    parts: StepCounts
    fixed: tuple[Part, Part] | None  # EXPERT_SLOTS: padded counts and offsets of every step
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    name: int = 0  # of the call, see `names`
    void_at: int = VOID  # which of `counts` says that the dispatch is void

    def repeated(self, bank: int, name: int) -> Step:
        """A dispatch with this plan in another bank."""
        return replace(self, bank=bank, name=name, void_at=REPEATED)

    @property
    def routing(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """topk_idx and topk_weights, if rows take them along, as those of COMPACT do."""
        return (self.topk_idx, self.topk_weights) if self.layout is Layout.COMPACT else (None, None)

    @property
    def expert_counts(self) -> Part:
        return self.counts[self.parts.per_expert]

    @property
    def padded_counts(self) -> Part:
        return self.counts[self.parts.padded] if self.fixed is None else self.fixed[0]

    @property
    def offsets(self) -> Part:
        return self.counts[self.parts.offsets] if self.fixed is None else self.fixed[1]

    @property
    def rank_counts(self) -> Part:
        return self.counts[self.parts.per_rank]

    @property
    def num_rows(self) -> Part:
        """[1] rows that arrived, one per (token, rank)."""
        return self.counts[NUM_ROWS : NUM_ROWS + 1]

    @property
    def void(self) -> Part:
        """[1]"""
        return self.counts[self.void_at : self.void_at + 1]

    @property
    def refused(self) -> Part:
        """[1]"""
        return self.counts[REFUSED : REFUSED + 1]


class DeviceState:
    """Tables and memory of one rank. Creation is collective."""

    def __init__(
        self, memory: DeviceMemory, placement: Placement, *, capacity: int, hidden: int, num_topk: int, num_banks: int,
        timeout_us: int, over_rows: bool = False, debug_poison: bool = False,
    ) -> None:  # fmt: skip
        """`over_rows`: memory for received rows has room for the experts' output, which peers read there.
        `debug_poison`, which is each rank's own choice: see `poison`."""
        self.memory, self.device, self.over_rows = memory, memory.device, over_rows
        self.debug_poison = debug_poison
        self.pieces: list[torch.Tensor] = []  # of memory, with their guards
        self.rank, self.num_ranks = memory.rank, memory.num_ranks
        self.pushes = memory.num_ranks > 1 and not memory.any_address  # rows of combine, which peers may not read
        self.capacity, self.hidden, self.num_topk, self.num_banks = capacity, hidden, num_topk, num_banks
        self.num_experts, self.timeout_us = placement.num_experts, timeout_us
        per_rank = [len(placement.local_experts(rank)) for rank in range(self.num_ranks)]
        self.num_local_experts, self.most_local_experts = per_rank[self.rank], max(per_rank)
        self.parts = StepCounts(self.num_ranks, self.num_local_experts)
        self.window = DeviceWindow(self.num_ranks, self.num_experts, num_banks)
        self.own, addresses = self._allocate(self.window.total_bytes)
        on_cuda = self.device.type == "cuda"
        # [bank, lane (dispatch, combine), peer]: what the peer said in the last step of the bank that was void since
        # somebody refused it or made another call, as kernels tell.
        self.news = torch.zeros(num_banks, 2, self.num_ranks, dtype=torch.int64, pin_memory=on_cuda)
        self.banks = [
            Bank(
                self.int64([a + self.window.words(bank) for a in addresses] + [self.news[bank].data_ptr()]),
                self.int64([a + self.window.counts(bank) for a in addresses]),
                self.int64([0]),
                self.int32([0]),
            )
            for bank in range(num_banks)
        ]
        # Combines take turns in the banks, in the order in which they are published.
        self.combines = self.int64([0])
        self.combine_tickets = self.int32([0] * num_banks)
        self.sources = self.int64([a + self.window.sources(0) for a in addresses])  # of bank 0
        self.told = self.own[self.window.sources(0) :].view(torch.int64)  # the own table there: where peers' rows are
        owners, local = placement.expert_ranks, placement.local_ids()
        self.home = self.int32([r << 16 | i for r, i in zip(owners, local, strict=True)])
        by_owner = sorted(range(self.num_experts), key=lambda e: (owners[e], local[e]))
        start = {owners[e]: position for position, e in reversed(list(enumerate(by_owner)))}
        self.by_owner = self.int32(by_owner)
        self.first_own = start.get(self.rank, 0)
        self.owner_start = self.int32([start[owners[e]] for e in by_owner])
        self.slot_room = room = self.num_ranks * capacity  # rows of an expert in EXPERT_SLOTS
        offsets = Part.whole(self.int32([i * room for i in range(self.num_local_experts + 1)]))
        self._first_row = offsets[0:1]
        self._fixed = Part.whole(self.int32([room] * self.num_local_experts)), offsets
        self.nowhere = self.int64([0] * self.num_ranks)  # `seen_at` of rows that are pushed
        self.tally = self.int64([0] * (2 * self.num_ranks + 1))
        self._output_rows = Rows.of_wire(BF16(), hidden)
        self._places: dict[tuple[object, ...], Places] = {}
        self.masked: set[int] = set()  # ranks that have ended, see `masking`
        self._scratch: dict[tuple[str, int], torch.Tensor] = {}
        # One record per peer of the wait that gave up; in front of them the address of their mirror in host memory.
        self.mirror = torch.zeros(self.num_ranks, 4, dtype=torch.int64, pin_memory=on_cuda)
        records = self.int64([self.mirror.data_ptr(), 0, 0, 0] + [0] * 4 * self.num_ranks)
        self._records, self.status = records, records[4:]

    def int64(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)

    def int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.device)

    def empty(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def scratch(self, name: str, dtype: torch.dtype, size: int) -> torch.Tensor:
        """Memory that launches of one stream may share: always the same for the same name and size."""
        if (name, size) not in self._scratch:
            self._scratch[name, size] = self.empty(dtype, size)
        return self._scratch[name, size]

    def _allocate(self, num_bytes: int, num_row_bytes: int = 0) -> tuple[torch.Tensor, list[int]]:
        """`DeviceMemory.allocate`; with debug_poison rows, whose bytes come first, are NaN, and a guard follows."""
        if not self.debug_poison:
            return self.memory.allocate(num_bytes)
        own, addresses = self.memory.allocate(num_bytes + GUARD_BYTES)
        poison(own[:num_row_bytes])
        guard(own)
        self.pieces.append(own)
        if self.device.type == "cuda":  # peers write here as soon as all have met
            torch.cuda.current_stream(self.device).synchronize()
        return own[:num_bytes], addresses

    def region(self, layout: Layout, rows: Rows, alignment: int) -> RowRegion:
        """The same on all ranks, also where experts are spread unevenly."""
        return row_region(
            layout, self.num_ranks, self.capacity, self.num_topk, self.most_local_experts, alignment,
            rows.payload_bytes, rows.sf_bytes, 2 * self.hidden if self.over_rows else 0,
        )  # fmt: skip

    def places(self, layout: Layout, rows: Rows, alignment: int = 1) -> Places:
        """Memory for received rows of this kind. Collective when it is first asked for."""
        alignment = alignment if layout is Layout.EXPERT_MAJOR else 1
        return self._memory_for((layout, rows, alignment), rows, lambda: self.region(layout, rows, alignment))

    def inputs(self, layout: Layout, alignment: int = 1) -> Places:
        """Memory for the experts' output, where peers read it: bfloat16 rows. Collective when it is first asked for."""
        return self._beside(("inputs", self._output_rows, self._most_rows(layout, alignment)))

    def seen_at(self, y: torch.Tensor, step: Step, places: Places) -> torch.Tensor | None:
        """Where peers see y, if it is memory that they read: of `inputs`, or over the rows in `places`."""
        inputs = self._places.get(("inputs", self._output_rows, self._most_rows(step.layout, step.alignment)))
        for found in (inputs, places):
            if found is not None and found.payload(step.bank).data_ptr() == y.data_ptr():
                return found.seen_at[step.bank]
        return None

    def returned(self, layout: Layout) -> Places:
        """Memory that peers push rows of combine into: one for each place of a token. Collective at first."""
        return self._beside(self._key_for_tokens("returned", self._output_rows, layout))

    def returned_if_taken(self, layout: Layout) -> Places | None:
        """The same, None if no rank has ever pushed."""
        return self._places.get(self._key_for_tokens("returned", self._output_rows, layout))

    def encoded(self, layout: Layout) -> Places:
        """The same for rows as LogFMT10."""
        wire = LogFMT10()
        rows = Rows.opaque(wire.payload_bytes(self.hidden), wire.sf_bytes(self.hidden))
        return self._beside(self._key_for_tokens("encoded", rows, layout))

    def _key_for_tokens(self, name: str, rows: Rows, layout: Layout) -> tuple[str, Rows, int]:
        return name, rows, self.capacity * num_places(layout, self.num_ranks, self.num_topk)

    def values(self, lane: str, layout: Layout, alignment: int, width: int) -> Places:
        """Memory for `width` float32 of every row, to be sent ("dispatch") or read ("combine") by peers. Collective
        when it is first asked for."""
        return self._beside((f"{lane} values", Rows.opaque(4 * width, 0), self._most_rows(layout, alignment)))

    def _most_rows(self, layout: Layout, alignment: int) -> int:
        """How many rows a rank may receive."""
        return self.region(layout, self._output_rows, alignment).num_rows

    def _beside(self, key: tuple[str, Rows, int]) -> Places:
        """Memory for so many rows of this kind, without routing."""
        _, rows, num_rows = key
        return self._memory_for(key, rows, lambda: RowRegion(num_rows, rows.payload_bytes, rows.sf_bytes, 0))

    def filled(self, step: Step) -> tuple[Part, Part]:
        """How many rows of each group of rows a step filled, and where the groups begin. COMPACT is one group."""
        if step.layout is Layout.COMPACT:
            return step.num_rows, self._first_row
        return step.expert_counts, step.offsets

    def owns(self, t: torch.Tensor) -> bool:
        """Whether t lies in memory that later calls write to."""
        memory = t.untyped_storage().data_ptr()
        return any(memory == own.untyped_storage().data_ptr() for p in self._places.values() for own in p._own)

    def meet(self, action: str, what: str) -> None:
        """All ranks, or GroupMismatch on all: they `action` differently. Collective."""
        found = self.memory.all_gather((action, what))
        others = [
            f"on rank {peer} ({theirs[1] if theirs[0] == action else ': '.join(theirs)})"
            for peer, theirs in enumerate(found) if theirs not in ((action, what), None)
        ]  # fmt: skip
        if others:
            raise GroupMismatch(
                f"rank {self.rank}: ranks {action} differently: here ({what}), {', '.join(others)}. The first call of "
                "a kind is prepared by all ranks together, and all must pass the same settings."
            )

    @property
    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _memory_for(self, key: tuple[object, ...], rows: Rows, make_region: Callable[[], RowRegion]) -> Places:
        if key not in self._places:
            if self.capturing:
                raise TransportUnavailable(
                    f"rank {self.rank}: this kind of call cannot be captured before it has run once, since its memory "
                    "must be shared and its kernels compiled: call it once outside of the capture"
                )
            if self.masked and self.memory.needs_all:
                raise TransportUnavailable(
                    f"rank {self.rank}: this kind of call needs memory of a kind that was not taken before rank(s) "
                    f"{sorted(self.masked)} ended, and transport {self.memory.name!r} takes memory on all ranks "
                    "together: prepare every kind of call with warmup"
                )
            self.meet("take memory", str(key[0]))
            region = make_region()
            made = [self._allocate(region.total_bytes, region.meta) for _ in range(self.num_banks)]
            from_all = self.memory.all_gather([addresses for _, addresses in made])
            self._places[key] = Places(
                rows, region, [own for own, _ in made], [self.int64(addresses) for _, addresses in made],
                [
                    self.int64([0 if theirs is None else theirs[bank][self.rank] for theirs in from_all])
                    for bank in range(self.num_banks)
                ],
            )  # fmt: skip
        return self._places[key]

    @property
    def total_bytes(self) -> int:
        """Bytes of this rank that peers can address, so far, without guards."""
        regions = sum(places.region.total_bytes * self.num_banks for places in self._places.values())
        return self.window.total_bytes + regions

    def known(self, values: list[int], void_at: int) -> tuple[list[int], list[int], list[int], int, int]:
        """Of a step's `counts`: per expert, padded, per rank, rows, and, unless 0, that the step is void."""
        parts = self.parts
        return values[parts.per_expert], values[parts.padded], values[parts.per_rank], values[NUM_ROWS], values[void_at]

    def step(
        self, bank: int, layout: Layout, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, alignment: int = 1,
        name: int = 0,
    ) -> Step:  # fmt: skip
        """What one dispatch fills."""
        num_tokens, num_topk, size = topk_idx.shape[0], self.num_topk, self.parts.size
        places, compact = num_places(layout, self.num_ranks, num_topk), layout is Layout.COMPACT
        sends_to = round_up(size, 4)  # parts begin at multiples of 16 bytes
        owners = sends_to + round_up(2 * num_tokens * places, 4)
        memory = self.empty(torch.int32, owners + (num_tokens * num_topk if compact else 0))
        return Step(
            bank, layout, alignment, Part(memory, sends_to, (num_tokens, places), torch.int64),
            Part(memory, owners, (num_tokens, num_topk)) if compact else None, Part(memory, 0, (size,)),
            self.parts, self._fixed if layout is Layout.EXPERT_SLOTS else None, topk_idx, topk_weights, name,
        )  # fmt: skip
