"""Launches the kernels of one rank: which grid, which tile, how many warps, for which shape.

Every method enqueues on the current stream and returns without waiting. A step runs in one bank of the window; its
number lives on the device, so that a captured graph counts on when it is replayed. Which bank, and when it may be used
again on this rank, is the caller's business.

Grids. At most one block of a launch waits for other ranks: who waits takes little of the device, on which a peer, or
what it waits for, may have to run. So kernels may be of any size. With `strict_sms` every kernel that moves rows takes
one block per SM of the rank's budget, `num_sms`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from expertwire._math import ceil_div
from expertwire.kernels.combine_recv import combine_gather
from expertwire.kernels.combine_send import combine_send
from expertwire.kernels.dispatch_recv import await_rows, copy_rows, export_values, give_back
from expertwire.kernels.dispatch_send import dispatch_send
from expertwire.kernels.dispatch_slots import dispatch_slots
from expertwire.kernels.launch import Launcher
from expertwire.kernels.place import address_rows, place_ranks, rows_of_slots
from expertwire.kernels.plan import COMPACT, EXPERT_MAJOR, EXPERT_SLOTS, plan_count
from expertwire.kernels.refuse import refuse_combine, refuse_dispatch
from expertwire.kernels.state import DeviceMemory, DeviceState, Places, Rows, Step
from expertwire.kernels.tiles import MAX_ROWS, Tile, all_tiles, combine_tile, pow2, send_tile, slots_tile
from expertwire.layouts.receive import Layout
from expertwire.topology import Placement

LAYOUTS = {
    Layout.COMPACT: COMPACT.value,
    Layout.EXPERT_MAJOR: EXPERT_MAJOR.value,
    Layout.EXPERT_SLOTS: EXPERT_SLOTS.value,
}
COUNTED_TOKENS = 64
FUSED_COMPARISONS = 1 << 16  # TOKENS * SLOTS * SLOTS that one block of `dispatch_slots` may make


@dataclass(frozen=True)
class Plan:
    """Where rows go: `addresses` [T, SENDS]. With `keys`, `send` finds them: what it needs of `plan_count`, which
    counted `tokens` tokens at a time."""

    addresses: torch.Tensor
    tokens: int = MAX_ROWS
    keys: torch.Tensor | None = None
    block_counts: torch.Tensor | None = None
    first_rows: torch.Tensor | None = None


class DeviceEngine:
    """One rank's kernels."""

    def __init__(
        self, memory: DeviceMemory, placement: Placement, *, capacity: int, hidden: int, num_topk: int, num_banks: int,
        num_sms: int, timeout_us: int, strict_sms: bool = False,
    ) -> None:  # fmt: skip
        self.state = DeviceState(
            memory, placement, capacity=capacity, hidden=hidden, num_topk=num_topk, num_banks=num_banks
        )
        self.rank, self.num_ranks, self.num_experts = memory.rank, memory.num_ranks, placement.num_experts
        self.capacity, self.hidden, self.num_topk = capacity, hidden, num_topk
        self.num_sms, self.strict_sms, self.timeout_us = num_sms, strict_sms, timeout_us
        self.launch = Launcher()
        # Left alone, the assembler spares registers for more warps, and has half as many rows in flight: 0.7 to 1 us.
        on_cuda = memory.device.type == "cuda" and torch.version.hip is None
        self.many_registers = {"maxnreg": 128} if on_cuda else {}
        self._ranks, self._slots = pow2(self.num_ranks), pow2(num_topk)

    def _tiles(self, choose: Callable[[int], Tile], num_tokens: int) -> Iterable[Tile]:
        """The tile for a launch; while compiling, those of all launches to come."""
        return all_tiles(choose, self.capacity) if self.launch.compiling else (choose(num_tokens),)

    # -- dispatch --------------------------------------------------------------------------------------------------

    def fits_fused(self) -> bool:
        """Whether EXPERT_SLOTS may be dispatched in one launch: by one rank, for few tokens."""
        return self.num_ranks == 1 and pow2(self.capacity) * self._slots * self._slots <= FUSED_COMPARISONS

    def dispatch_fused(self, x: torch.Tensor, step: Step, places: Places) -> None:
        state, rows, num_tokens = self.state, places.rows, x.shape[0]
        lines = ceil_div(self.hidden, rows.block)
        for tile in self._tiles(lambda tokens: slots_tile(tokens, lines, rows.block, self.num_sms), num_tokens):
            parts = ceil_div(lines, tile.columns)
            self.launch(
                dispatch_slots, max(2, 1 + num_tokens * parts),
                x, step.topk_idx, step.sends_to, step.expert_counts, step.rank_counts, step.sent, state.tally,
                places.payload(step.bank), places.sf(step.bank), places.meta(step.bank), state.home, num_tokens,
                self.capacity,
                E=self.num_experts, BINS=pow2(self.num_experts + 1), K=self.num_topk, SLOTS=self._slots,
                TOKENS=pow2(self.capacity), hidden=self.hidden, LINES=tile.columns, BLOCK=rows.block, PARTS=parts,
                FP8=rows.fp8, UE8M0=rows.ue8m0, sf_bytes=rows.sf_bytes, num_warps=tile.warps,
            )  # fmt: skip

    def plan(self, step: Step, places: Places) -> Plan:
        """Counts and their exchange; for COMPACT also every selection's row and its routing at the destination."""
        state, bank, num_tokens = self.state, self.state.banks[step.bank], step.topk_idx.shape[0]
        slots, layout, weights = self._slots, LAYOUTS[step.layout], step.topk_weights
        compact = step.layout is Layout.COMPACT
        per_token = slots * max(slots, self._ranks if compact else 0)
        tokens = max(1, min(128 if compact else COUNTED_TOKENS, 8192 // per_token))
        while ceil_div(self.capacity, tokens) > 256 and tokens * per_token < 1 << 15:
            tokens *= 2
        num_blocks = max(1, ceil_div(num_tokens, tokens))
        width = self.num_experts + self.num_ranks
        blocks, experts = pow2(ceil_div(self.capacity, tokens)), pow2(self.num_experts)
        keys = state.scratch("keys", torch.int32, self.capacity * self.num_topk)
        block_counts = state.scratch("block_counts", torch.int32, ceil_div(self.capacity, tokens) * width)
        first_rows = state.scratch("first_rows", torch.int32, width)
        self.launch(
            plan_count, num_blocks,
            step.topk_idx, keys, step.owners, block_counts, state.scratch("totals", torch.int32, width), first_rows,
            step.expert_counts, step.padded_counts, step.offsets, step.rank_counts, step.sent, state.tally,
            bank.words, bank.counts, state.home, state.by_owner, state.owner_start, bank.epoch, bank.ticket,
            state.status,
            self.rank, num_tokens, num_blocks, self.num_ranks * self.capacity, step.alignment,
            state.first_own, state.num_local_experts, self.timeout_us,
            R=self.num_ranks, RANKS=self._ranks, E=self.num_experts, EXPERTS=experts,
            EXPERT_BINS=pow2(self.num_experts + 1), RANK_BINS=pow2(self.num_ranks + 1), K=self.num_topk, SLOTS=slots,
            TOKENS=tokens, BLOCKS=blocks, COLUMNS=min(experts, max(16, 32768 // blocks)), LAYOUT=layout,
            num_warps=16,
        )  # fmt: skip
        addresses = self._addresses(step)
        if not compact:
            return Plan(addresses, tokens, keys, block_counts, first_rows)
        self.launch(
            place_ranks, num_blocks,
            step.topk_idx, weights, keys, block_counts, first_rows, state.home, places.bases[step.bank],
            step.sends_to, addresses, num_tokens, places.region.meta,
            R=self.num_ranks, RANKS=self._ranks, E=self.num_experts, K=self.num_topk, SLOTS=slots, TOKENS=tokens,
            SENDS=step.sends_to.shape[1], WEIGHTED=weights is not None, payload_bytes=places.rows.payload_bytes,
            num_warps=8,
        )  # fmt: skip
        return Plan(addresses)

    def _addresses(self, step: Step) -> torch.Tensor:
        return self.state.scratch("addresses", torch.int64, self.capacity * self.num_topk)[: step.sends_to.numel()]

    def rows_of_slots(self, step: Step) -> torch.Tensor:
        """[T, K] where each slot's row is; of COMPACT in memory that the next call of this overwrites."""
        if step.owners is None:
            return step.sends_to
        num_slots = step.owners.numel()
        where = self.state.scratch("rows_of_slots", torch.int64, self.capacity * self.num_topk)[:num_slots]
        self.launch(
            rows_of_slots, max(1, ceil_div(num_slots, 1024)), step.owners, step.sends_to, where, num_slots,
            K=self.num_topk, SENDS=step.sends_to.shape[1], ENTRIES=1024, num_warps=8,
        )  # fmt: skip
        return where

    def repeat_plan(self, step: Step, places: Places) -> Plan:
        """An earlier plan, in the bank of this step."""
        bank, count, addresses = self.state.banks[step.bank], step.sends_to.numel(), self._addresses(step)
        self.launch(
            address_rows, max(1, ceil_div(count, 4096)),
            step.sends_to, places.bases[step.bank], addresses, step.sent, step.rank_counts, self.state.tally,
            bank.words, bank.epoch, bank.ticket, self.state.status, count, self.rank, self.timeout_us,
            R=self.num_ranks, RANKS=self._ranks, PLACES=4096, payload_bytes=places.rows.payload_bytes, num_warps=8,
        )  # fmt: skip
        return Plan(addresses)

    def send(
        self, x: torch.Tensor, sf: torch.Tensor | None, plan: Plan, step: Step, places: Places, *,
        receive: bool,
    ) -> None:  # fmt: skip
        """Rows along a plan. `x` [T, width] bfloat16 or opaque units; `sf` for opaque rows."""
        bank, rows, num_tokens = self.state.banks[step.bank], places.rows, x.shape[0]
        lines = max(pow2(ceil_div(rows.width, rows.block)), 4 if rows.fp8 and rows.ue8m0 else 1)
        row_bytes, most_rows = lines * rows.block * rows.unit_bytes, min(MAX_ROWS, plan.tokens)
        for tile in self._tiles(
            lambda tokens: send_tile(tokens, row_bytes, lines, self.num_sms, most_rows, self.strict_sms, rows.fp8),
            num_tokens,
        ):
            blocks = self.num_sms if self.strict_sms else 16 * self.num_sms
            self.launch(
                dispatch_send, min(max(1, ceil_div(num_tokens, tile.rows)), blocks),
                x, sf, plan.keys, plan.block_counts, plan.first_rows,
                self.state.home if plan.keys is not None else None,
                plan.addresses, step.sends_to, step.void, places.bases[step.bank], bank.words, bank.epoch,
                bank.ticket,
                self.state.status, self.rank, num_tokens, places.region.sf, places.region.meta, self.timeout_us,
                R=self.num_ranks, RANKS=self._ranks, E=self.num_experts, SLOTS=self._slots, TOKENS=plan.tokens,
                KEYS=pow2(plan.tokens * self.num_topk), PLACE=plan.keys is not None,
                SENDS=step.sends_to.shape[1], ROWS=tile.rows, LINES=tile.columns, BLOCK=rows.block,
                width=rows.width, unit_bytes=rows.unit_bytes, sf_units=rows.sf_units, SF_UNITS=pow2(rows.sf_units),
                sf_unit_bytes=rows.sf_unit_bytes, FP8=rows.fp8, UE8M0=rows.ue8m0, RECEIVE=receive,
                num_warps=tile.warps,
            )  # fmt: skip

    def await_rows(self, step: Step) -> None:
        """The receive half, where it was deferred."""
        if self.num_ranks > 1:
            bank = self.state.banks[step.bank]
            self.launch(
                await_rows, 1, bank.words, step.void, bank.epoch, self.state.status, self.rank, self.timeout_us,
                R=self.num_ranks, RANKS=self._ranks, num_warps=1,
            )  # fmt: skip

    def export(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """int32 values to pinned host memory."""
        size = values.numel()
        self.launch(export_values, 1, values, out, size=size, SIZE=pow2(size), num_warps=4)

    def give_back(self, bank: int) -> None:
        """The bank's rows have been read: peers may write there again."""
        if self.num_ranks > 1:
            words, epoch = self.state.banks[bank].words, self.state.banks[bank].epoch
            self.launch(give_back, 1, words, epoch, self.rank, R=self.num_ranks, RANKS=self._ranks, num_warps=1)

    def copy_rows(
        self, source: torch.Tensor, out: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor, group_rows: int
    ) -> None:
        """Copy the rows in use: source, out [rows, bytes] uint8; counts, offsets int32 [groups]."""
        unit = torch.int32 if source.shape[1] % 4 == 0 else torch.uint8
        source, out = source.view(unit), out.view(unit)
        units, groups = source.shape[1], counts.numel()
        many = max(1, min(8, 16384 // pow2(units)))
        grid = min(self.num_sms, groups * ceil_div(group_rows, many))
        self.launch(
            copy_rows, max(grid, 1), source, out, counts, offsets, group_rows,
            GROUPS=groups, ROWS=many, UNITS=pow2(units), units=units,
            num_warps=max(4, min(32, pow2(many * units // 512))),
        )  # fmt: skip

    # -- combine ---------------------------------------------------------------------------------------------------

    def combine_ready(
        self, y: torch.Tensor, inputs: Places | None, step: Step, *, publish: bool = True, receive: bool = True,
        again: bool = False,
    ) -> None:  # fmt: skip
        """`publish` the own rows; to `receive`, wait until all peers have. `inputs` is the shared memory that y lies
        in, None if peers can read y anywhere. `again`: the second combine of a call, which is void if the first was."""
        if self.num_ranks > 1:
            bank = self.state.banks[step.bank]
            self.launch(
                combine_send, 1, y, bank.sources if inputs is None else inputs.bases[step.bank],
                step.refused if again else step.void, None if again else step.refused, bank.words, bank.combine_epoch,
                self.state.status, self.rank, self.timeout_us,
                R=self.num_ranks, RANKS=self._ranks, EXCHANGE=inputs is None, PUBLISH=publish, RECEIVE=receive,
                num_warps=1,
            )  # fmt: skip

    def combine(
        self, y: torch.Tensor, inputs: Places | None, step: Step, out: torch.Tensor, *, weighted: bool,
        biases: tuple[torch.Tensor, ...] = (), publish: bool = True, finish: bool = False, by_rank: bool = False,
    ) -> None:  # fmt: skip
        """Wait for the peers' rows, gather and sum; before that `publish`, unless that was done."""
        self.combine_ready(y, inputs, step, publish=publish)
        bank, num_tokens, sends = self.state.banks[step.bank], step.sends_to.shape[0], step.sends_to
        two = (*biases, None, None)[:2]
        for tile in self._tiles(
            lambda tokens: combine_tile(tokens, self.hidden, self.num_sms, self.strict_sms), num_tokens
        ):
            parts = ceil_div(self.hidden, tile.columns)
            units = max(1, ceil_div(num_tokens, tile.rows) * parts)
            self.launch(
                combine_gather, min(units, self.num_sms) if self.strict_sms else units,
                y, bank.sources if inputs is None else inputs.bases[step.bank],
                sends, step.topk_weights if weighted else None, *two, out,
                step.void, step.refused, bank.words, bank.combine_epoch, bank.combine_ticket, bank.epoch,
                self.state.status, self.rank, num_tokens, self.timeout_us,
                R=self.num_ranks, RANKS=self._ranks, SENDS=sends.shape[1], ROWS=tile.rows, COLUMNS=tile.columns,
                PARTS=parts, hidden=self.hidden, WEIGHTED=weighted, NUM_BIASES=len(biases),
                EXCHANGE=inputs is None and self.num_ranks > 1, FINISH=finish, BY_RANK=by_rank,
                num_warps=tile.warps, enable_fp_fusion=False, **(self.many_registers if tile.warps <= 16 else {}),
            )  # fmt: skip

    # -- refusing --------------------------------------------------------------------------------------------------

    def refuse(self, lane: str, bank: int) -> None:
        """Declare the next step of a lane ("dispatch", "combine") in this bank void."""
        if self.num_ranks > 1:
            found = self.state.banks[bank]
            kernel, epoch = (
                (refuse_dispatch, found.epoch) if lane == "dispatch" else (refuse_combine, found.combine_epoch)
            )
            self.launch(
                kernel, 1, found.words, epoch, self.state.status, self.rank, self.timeout_us,
                R=self.num_ranks, RANKS=self._ranks, num_warps=1,
            )  # fmt: skip


__all__ = ["DeviceEngine", "Places", "Rows", "Step"]
