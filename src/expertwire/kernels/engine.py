"""Launches the kernels of one rank. Every method enqueues on the current stream and returns without waiting.

A step runs in one bank of the window; its number lives on the device, so that a captured graph counts on when it is
replayed. Which bank, and when it may be used again on this rank, is the caller's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from expertwire._math import ceil_div
from expertwire.formats import BF16, FP8Block, WireFormat
from expertwire.kernels.combine_recv import combine_gather
from expertwire.kernels.dispatch_recv import await_rows, copy_rows, give_back
from expertwire.kernels.dispatch_send import dispatch_send
from expertwire.kernels.dispatch_slots import dispatch_slots
from expertwire.kernels.place import place_experts, place_ranks
from expertwire.kernels.plan import COMPACT, EXPERT_MAJOR, EXPERT_SLOTS, plan_count
from expertwire.layouts.device_window import DeviceWindow, RowRegion
from expertwire.layouts.receive import Layout, worst_case_rows
from expertwire.topology import Placement
from expertwire.transports.device import DeviceMemory

LAYOUTS = {Layout.COMPACT: COMPACT.value, Layout.EXPERT_MAJOR: EXPERT_MAJOR.value, Layout.EXPERT_SLOTS: EXPERT_SLOTS.value}
FUSED_SELECTIONS = 1 << 16  # TOKENS * SLOTS * SLOTS that one block of `dispatch_slots` may compare


def pow2(value: int) -> int:
    return triton.next_power_of_2(max(value, 1))


@dataclass(frozen=True)
class Rows:
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

    @classmethod
    def of_wire(cls, wire: WireFormat, hidden: int) -> Rows:
        if isinstance(wire, FP8Block):
            ue8m0 = wire.scale == "ue8m0"
            units = wire.sf_bytes(hidden) if ue8m0 else wire.sf_bytes(hidden) // 4
            return cls(hidden, 2, units, 1 if ue8m0 else 4, True, ue8m0, wire.block)
        assert isinstance(wire, BF16)
        return cls(hidden, 2, 0, 4)

    @classmethod
    def opaque(cls, payload_bytes: int, sf_bytes: int) -> Rows:
        unit = next(u for u in (4, 2, 1) if payload_bytes % u == 0)
        sf_unit = 4 if sf_bytes % 4 == 0 else 1
        return cls(payload_bytes // unit, unit, sf_bytes // sf_unit, sf_unit)


@dataclass
class Bank:
    """This bank's addresses on every rank, and the counters that its steps keep on the device."""

    words: torch.Tensor
    counts: torch.Tensor
    epochs: torch.Tensor  # int64 [2]: dispatch, combine
    tickets: torch.Tensor  # int32 [2]


@dataclass
class Places:
    """Memory for rows of one kind, in every bank: what a dispatch with this layout and these rows writes into."""

    layout: Layout
    rows: Rows
    region: RowRegion
    own: list[torch.Tensor]
    bases: list[torch.Tensor]

    def payload(self, bank: int) -> torch.Tensor:
        size = self.region.num_rows * self.region.payload_bytes
        return self.own[bank][:size].view(self.region.num_rows, self.region.payload_bytes)

    def sf(self, bank: int) -> torch.Tensor | None:
        if self.region.sf_bytes == 0:
            return None
        size = self.region.num_rows * self.region.sf_bytes
        return self.own[bank][self.region.sf : self.region.sf + size].view(self.region.num_rows, self.region.sf_bytes)

    def meta(self, bank: int) -> torch.Tensor:
        size = 4 * self.region.num_rows * self.region.meta_words
        words = self.own[bank][self.region.meta : self.region.meta + size].view(torch.int32)
        return words.view(self.region.num_rows, self.region.meta_words)


@dataclass
class Step:
    """What one dispatch left behind: the plan that combine gathers by, and counts of what arrived. Device tensors."""

    bank: int
    layout: Layout
    where: torch.Tensor
    sends_to: torch.Tensor  # [T, min(K, R)] for COMPACT: the places of `where` one after another; else `where` itself
    expert_counts: torch.Tensor
    padded_counts: torch.Tensor
    offsets: torch.Tensor
    rank_counts: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    kept: list[Any] = field(default_factory=list)


class DeviceEngine:
    """One rank's kernels. `num_sms` bounds every launch, so that the launches of ranks that share a device all fit."""

    def __init__(
        self, memory: DeviceMemory, placement: Placement, *, capacity: int, hidden: int, num_topk: int, num_banks: int,
        num_sms: int, spin_limit: int,
    ) -> None:  # fmt: skip
        self.memory, self.device = memory, memory.device
        self.rank, self.num_ranks = memory.rank, memory.num_ranks
        self.capacity, self.hidden, self.num_topk, self.num_banks = capacity, hidden, num_topk, num_banks
        self.num_sms, self.spin_limit = num_sms, spin_limit
        self.num_experts = placement.num_experts
        self.num_local_experts = len(placement.local_experts(self.rank))
        most = max(len(placement.local_experts(rank)) for rank in range(self.num_ranks))
        self._local = pow2(most)  # the same on all ranks, so that they compile the same kernels
        self.window = DeviceWindow(self.num_ranks, self.num_experts, num_banks)
        self._own, addresses = memory.allocate(self.window.total_bytes)
        self.banks = [
            Bank(
                self._int64([a + self.window.words(bank) for a in addresses]),
                self._int64([a + self.window.counts(bank) for a in addresses]),
                self._int64([0, 0]),
                torch.zeros(2, dtype=torch.int32, device=self.device),
            )
            for bank in range(num_banks)
        ]
        owners, local = placement.expert_ranks, placement.local_ids()
        self.home = torch.tensor([r << 16 | i for r, i in zip(owners, local, strict=True)], dtype=torch.int32).to(self.device)
        self.own_experts = self._int32(list(placement.local_experts(self.rank)) or [0])
        by_owner = sorted(range(self.num_experts), key=lambda e: (owners[e], local[e]))
        start = {rank: by_owner.index(next(e for e in by_owner if owners[e] == rank)) for rank in set(owners)}
        self.by_owner = self._int32(by_owner)
        self.owner_start = self._int32([start[owners[e]] for e in by_owner])
        self.status = torch.zeros(self.num_ranks, 4, dtype=torch.int64, device=self.device)
        self._places: dict[tuple[Layout, Rows, int], Places] = {}
        self._scratch: dict[str, torch.Tensor] = {}
        self._nothing = self._int64([0])
        self.compiling = False  # launches compile and load only: ranks must not compile while another rank waits

    def _int64(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)

    def _int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.device)

    def _empty(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _reuse(self, name: str, dtype: torch.dtype, size: int) -> torch.Tensor:
        """Scratch memory that launches of one stream may share."""
        found = self._scratch.get(name)
        if found is None or found.numel() < size:
            found = self._scratch[name] = torch.empty(size, dtype=dtype, device=self.device)
        return found

    def _launch(self, kernel: Any, grid: int, *args: Any, **options: Any) -> None:
        if self.compiling:
            kernel.warmup(*args, grid=(grid,), **options)._init_handles()  # compiles, and loads the module
        else:
            kernel[(grid,)](*args, **options)

    def _resident(self, warps: int) -> int:
        """Blocks of so many warps that surely fit into this rank's share of the device at once: 16 warps per SM do,
        since none of the kernels that wait uses more than 128 registers."""
        return self.num_sms * max(1, 16 // warps)

    # -- places ----------------------------------------------------------------------------------------------------

    def places(self, layout: Layout, rows: Rows, alignment: int = 1) -> Places:
        """Memory for received rows of this kind. Collective when it is first asked for."""
        key = (layout, rows, alignment if layout is Layout.EXPERT_MAJOR else 1)
        if key not in self._places:
            local = ceil_div(self.num_experts, self.num_ranks) if layout is Layout.EXPERT_SLOTS else self.num_local_experts
            local = max(local, self.num_local_experts)
            num_rows = worst_case_rows(layout, self.num_ranks, self.capacity, self.num_topk, local, alignment)
            meta = 1 + 2 * self.num_topk if layout is Layout.COMPACT else 3
            region = RowRegion(num_rows, rows.payload_bytes, rows.sf_bytes, meta)
            # Offsets inside a region must be the same on all ranks, also where experts are spread unevenly.
            region = max(self.memory.all_gather(region), key=lambda r: r.num_rows)
            own, bases = [], []
            for _ in range(self.num_banks):
                memory, addresses = self.memory.allocate(region.total_bytes)
                own.append(memory)
                bases.append(self._int64(addresses))
            self._places[key] = Places(layout, rows, region, own, bases)
        return self._places[key]

    # -- dispatch --------------------------------------------------------------------------------------------------

    @property
    def _ranks(self) -> int:
        return pow2(self.num_ranks)

    def step(self, bank: int, layout: Layout, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None) -> Step:
        """The tensors that one dispatch fills, in one allocation."""
        num_local, ranks = self.num_local_experts, self.num_ranks
        where = self._empty(torch.int64, topk_idx.shape[0], self.num_topk)
        counts = torch.zeros(3 * num_local + 1 + ranks, dtype=torch.int32, device=self.device)
        parts = counts.split([num_local, num_local, num_local + 1, ranks])
        sends_to = where
        if layout is Layout.COMPACT:
            sends_to = self._empty(torch.int64, topk_idx.shape[0], min(ranks, self.num_topk))
        return Step(bank, layout, where, sends_to, *parts, topk_idx, topk_weights)

    def fits_fused(self) -> bool:
        slots = pow2(self.num_topk)
        return pow2(self.capacity) * slots * slots <= FUSED_SELECTIONS and self.num_ranks <= 256

    def dispatch_fused(
        self, x: torch.Tensor, step: Step, places: Places, *, receive: bool, lines: int | None = None,
        warps: int | None = None,
    ) -> None:  # fmt: skip
        """EXPERT_SLOTS in one launch."""
        bank, rows, num_tokens = self.banks[step.bank], places.rows, x.shape[0]
        total = ceil_div(self.hidden, rows.block)
        if lines is None:
            lines = pow2(total)
            while lines > 8 and num_tokens * ceil_div(total, lines // 2) <= self.num_sms:
                lines //= 2
        lines = max(lines, 4)
        warps = warps or max(2, min(8, lines * rows.block // 512))
        parts = ceil_div(total, lines)
        grid = num_tokens * parts + self.num_ranks
        if self.num_ranks > 1:
            grid = min(grid, self._resident(warps))
        self._launch(
            dispatch_slots, max(grid, self.num_ranks + 1),
            x, step.topk_idx, step.where, step.expert_counts, step.rank_counts,
            bank.words, bank.counts, places.bases[step.bank], self.home, self.own_experts,
            bank.epochs, bank.tickets, self.status,
            self.rank, num_tokens, self.num_ranks * self.capacity, self.num_local_experts, self.spin_limit,
            R=self.num_ranks, RANKS=self._ranks, E=self.num_experts, BINS=pow2(self.num_experts + 1),
            LOCAL=self._local, K=self.num_topk, SLOTS=pow2(self.num_topk),
            TOKENS=pow2(self.capacity), hidden=self.hidden, LINES=lines, BLOCK=rows.block, PARTS=parts,
            FP8=rows.fp8, UE8M0=rows.ue8m0, sf_bytes=rows.sf_bytes, sf_at=places.region.sf, meta_at=places.region.meta,
            RECEIVE=receive, num_warps=warps,
        )  # fmt: skip

    def plan(self, step: Step, places: Places, alignment: int = 1) -> torch.Tensor:
        """Counts, exchange, the row of every selection, and its routing at the destination.

        Returns the addresses [T, SENDS] that `send` writes to.
        """
        bank, num_tokens = self.banks[step.bank], step.topk_idx.shape[0]
        slots, layout, weights = pow2(self.num_topk), LAYOUTS[step.layout], step.topk_weights
        compact = step.layout is Layout.COMPACT
        per_token = slots * max(slots, self._ranks if compact else 0)
        tokens = max(1, min(64, 8192 // per_token))
        while ceil_div(self.capacity, tokens) > 256 and tokens * per_token < 1 << 15:
            tokens *= 2
        num_blocks = max(1, ceil_div(num_tokens, tokens))
        width = self.num_experts + self.num_ranks
        blocks = pow2(ceil_div(self.capacity, tokens))
        experts = pow2(self.num_experts)
        sends = step.sends_to.shape[1]
        keys = self._reuse("keys", torch.int32, self.capacity * self.num_topk)
        addresses = self._reuse("addresses", torch.int64, self.capacity * self.num_topk)[: num_tokens * sends]
        block_counts = self._reuse("block_counts", torch.int32, ceil_div(self.capacity, tokens) * width)
        first_rows = self._reuse("first_rows", torch.int32, width)
        self._launch(
            plan_count, num_blocks,
            step.topk_idx, keys, block_counts, self._reuse("totals", torch.int32, width), first_rows,
            self._reuse("scratch", torch.int32, experts),
            step.expert_counts, step.padded_counts, step.offsets, step.rank_counts,
            bank.words, bank.counts, self.home, self.by_owner, self.owner_start, bank.epochs, bank.tickets, self.status,
            self.rank, num_tokens, num_blocks, self.num_ranks * self.capacity, alignment, self.spin_limit,
            R=self.num_ranks, RANKS=self._ranks, E=self.num_experts, EXPERTS=experts,
            EXPERT_BINS=pow2(self.num_experts + 1), RANK_BINS=pow2(self.num_ranks + 1), K=self.num_topk, SLOTS=slots,
            TOKENS=tokens, BLOCKS=blocks, COLUMNS=min(pow2(width), max(16, 32768 // blocks)), LAYOUT=layout, num_warps=16,
        )  # fmt: skip
        bases, payload_bytes, meta = places.bases[step.bank], places.rows.payload_bytes, places.region.meta
        if compact:
            self._launch(
                place_ranks, num_blocks,
                step.topk_idx, weights, keys, block_counts, first_rows, self.home, bases, step.where, step.sends_to,
                addresses, num_tokens, meta,
                R=self.num_ranks, RANKS=self._ranks, E=self.num_experts, K=self.num_topk, SLOTS=slots, TOKENS=tokens,
                SENDS=sends, WEIGHTED=weights is not None, payload_bytes=payload_bytes, num_warps=8,
            )  # fmt: skip
            return addresses
        parts = 2 if tokens % 2 == 0 else 1
        entries = pow2(tokens // parts * self.num_topk)
        self._launch(
            place_experts, num_blocks * parts,
            keys, block_counts, first_rows, self.home, bases, step.where, addresses, num_tokens, self.rank, meta,
            R=self.num_ranks, E=self.num_experts, K=self.num_topk, TOKENS=tokens, PARTS=parts, ENTRIES=entries,
            CHUNK=max(8, min(32, 8192 // entries)), payload_bytes=payload_bytes, num_warps=8,
        )  # fmt: skip
        return addresses

    def send(
        self, x: torch.Tensor, sf: torch.Tensor | None, addresses: torch.Tensor, step: Step, places: Places, *, receive: bool,
        rows_per_block: int | None = None, warps: int | None = None,
    ) -> None:  # fmt: skip
        """Rows along a plan. `x` [T, width] bfloat16 or opaque units; `sf` for opaque rows."""
        bank, rows, num_tokens = self.banks[step.bank], places.rows, x.shape[0]
        lines = pow2(ceil_div(rows.width, rows.block))
        if rows.fp8 and rows.ue8m0:
            lines = max(lines, 4)
        tile = lines * rows.block * rows.unit_bytes
        many = rows_per_block or max(1, min(4, (1 << 16) // tile, pow2(ceil_div(num_tokens, self.num_sms))))
        grid = min(max(1, ceil_div(num_tokens, many)), self.num_sms)
        self._launch(
            dispatch_send, grid,
            x, sf, addresses, step.sends_to, places.bases[step.bank], bank.words, bank.epochs, bank.tickets, self.status,
            self.rank, num_tokens, places.region.sf, self.spin_limit,
            R=self.num_ranks, RANKS=self._ranks, SENDS=step.sends_to.shape[1], ROWS=many, LINES=lines, BLOCK=rows.block,
            width=rows.width, unit_bytes=rows.unit_bytes, sf_units=rows.sf_units, SF_UNITS=pow2(rows.sf_units),
            sf_unit_bytes=rows.sf_unit_bytes, FP8=rows.fp8, UE8M0=rows.ue8m0, RECEIVE=receive,
            num_warps=warps or max(4, min(32, many * tile // 2048)),
        )  # fmt: skip

    def await_rows(self, step: Step, *, total: bool) -> None:
        """The receive half, where it was deferred."""
        if self.num_ranks == 1:
            return
        bank = self.banks[step.bank]
        self._launch(
            await_rows, 1,
            bank.words, bank.counts, self.own_experts, step.expert_counts, step.rank_counts, bank.epochs, self.status,
            self.rank, self.num_local_experts, self.spin_limit, R=self.num_ranks, RANKS=self._ranks, E=self.num_experts,
            LOCAL=self._local, TOTAL=total, num_warps=4,
        )  # fmt: skip

    def give_back(self, bank: int) -> None:
        """The bank's rows have been read: peers may write there again."""
        if self.num_ranks > 1:
            self._launch(
                give_back, 1, self.banks[bank].words, self.banks[bank].epochs, self.rank, R=self.num_ranks,
                RANKS=self._ranks, num_warps=1,
            )  # fmt: skip

    def copy_rows(
        self, source: torch.Tensor, out: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor, group_rows: int
    ) -> None:
        """Copy the rows in use: source, out [rows, bytes] uint8, whole 4-byte units."""
        unit = torch.int32 if source.shape[1] % 4 == 0 else torch.uint8
        source, out = source.view(unit), out.view(unit)
        units = source.shape[1]
        many = max(1, min(8, 16384 // pow2(units)))
        groups = counts.numel()
        grid = min(self.num_sms, groups * ceil_div(group_rows, many))
        bank = self.banks[0]
        self._launch(
            copy_rows, max(grid, 1),
            source, out, counts, offsets, bank.words, bank.epochs, bank.tickets, self.rank, group_rows,
            R=self.num_ranks, RANKS=self._ranks, GROUPS=groups, ROWS=many, UNITS=pow2(units), units=units, FINISH=False,
            num_warps=max(4, min(32, many * units // 512)),
        )  # fmt: skip

    # -- combine ---------------------------------------------------------------------------------------------------

    def combine(
        self, row_bases: torch.Tensor, step: Step, out: torch.Tensor, *, weighted: bool, biases: torch.Tensor | None = None,
        finish: bool = False, rows_per_block: int | None = None, columns: int | None = None, warps: int | None = None,
        grid: int | None = None,
    ) -> None:  # fmt: skip
        """Gather and sum: row_bases [R] are the addresses of every rank's expert output."""
        bank, num_tokens = self.banks[step.bank], step.where.shape[0]
        whole = pow2(self.hidden)
        if columns is None:
            columns = min(whole, 1024 if num_tokens <= 512 else 2048)
            warps = max(1, columns // (256 if num_tokens * ceil_div(self.hidden, columns) <= 1024 else 512))
        parts = ceil_div(self.hidden, columns)
        many = rows_per_block or 1
        warps = warps or max(1, min(32, many * columns // 512))
        units = max(1, ceil_div(num_tokens, many) * parts)
        grid = min(units, grid or (units if self.num_ranks == 1 else self._resident(warps)))
        self._launch(
            combine_gather, grid,
            row_bases, step.where if weighted else step.sends_to, step.topk_weights if weighted else None,
            self._nothing if biases is None else biases, out,
            bank.words, bank.epochs[1:], bank.tickets[1:], bank.epochs, self.status,
            self.rank, num_tokens, self.spin_limit,
            R=self.num_ranks, RANKS=self._ranks, SENDS=self.num_topk if weighted else step.sends_to.shape[1], ROWS=many,
            COLUMNS=columns, PARTS=parts, hidden=self.hidden, WEIGHTED=weighted, NUM_BIASES=0 if biases is None else biases.numel(),
            FINISH=finish, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip


__all__ = ["DeviceEngine", "Places", "Rows", "Step"]
