"""Launches the kernels of a plan: where every row goes, and what arrives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from expertwire._math import ceil_div
from expertwire.kernels.launch import Launcher, Rest
from expertwire.kernels.part import Part
from expertwire.kernels.place import address_rows, place_rows, rows_of_slots
from expertwire.kernels.plan import COMPACT, EXPERT_MAJOR, EXPERT_SLOTS, plan_count
from expertwire.kernels.state import DeviceState, Places, Step
from expertwire.kernels.tiles import MAX_ROWS, pow2
from expertwire.layouts.receive import Layout

LAYOUTS = {
    Layout.COMPACT: COMPACT.value,
    Layout.EXPERT_MAJOR: EXPERT_MAJOR.value,
    Layout.EXPERT_SLOTS: EXPERT_SLOTS.value,
}


def dtypes_of(tensors: Iterable[torch.Tensor | None]) -> list[torch.dtype | None]:
    """What of them belongs to the kind of a launch."""
    return [None if tensor is None else tensor.dtype for tensor in tensors]


class Plan(NamedTuple):
    """What `send` has to know of a plan: how many tokens were counted together, and whether it finds their places."""

    tokens: int = MAX_ROWS
    unplaced: bool = False


class Planner:
    """Makes the plans of one rank. They lie in memory that the next plan overwrites."""

    def __init__(self, state: DeviceState, launch: Launcher) -> None:
        self.state, self.launch = state, launch
        self._ranks, self._slots = pow2(state.num_ranks), pow2(state.num_topk)
        self._counted = {compact: self._counted_together(compact) for compact in (False, True)}

    def _counted_together(self, compact: bool) -> int:
        """How many tokens a block of `plan_count` counts: adding up many blocks takes the last one time, comparing many
        selections with each other takes registers, here and, of EXPERT_*, in `place_experts`."""
        capacity, per_token = self.state.capacity, self._slots * max(self._slots, self._ranks if compact else 0)
        tokens = max(1, min(128 if compact else 64, (1 << 14) // per_token))
        most = (1 << 15) // per_token if compact else min((1 << 15) // per_token, (1 << 10) // self._slots)
        while ceil_div(capacity, tokens) > 64 and 2 * tokens <= most:
            tokens *= 2
        return tokens

    def tables(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Between the kernels of a plan: keys, indexes, counts of blocks, first rows; and, within the first of them,
        sums of the counts."""
        state = self.state
        width, blocks = state.num_experts + state.num_ranks, ceil_div(state.capacity, tokens)
        sizes = dict.fromkeys(("keys", "indexes"), state.capacity * state.num_topk)
        sizes |= {"block_counts": blocks * width, "first_rows": width, "totals": width}
        return tuple(state.scratch(name, torch.int32, size) for name, size in sizes.items())

    def plan(self, step: Step) -> Plan:
        """Counts, their exchange, and first rows; `send` finds the places."""
        state, bank, ids = self.state, self.state.banks[step.bank], step.topk_idx
        tokens, num_tokens = self._counted[step.layout is Layout.COMPACT], ids.shape[0]
        num_blocks = max(1, ceil_div(num_tokens, tokens))

        def rest_of_count() -> Rest:
            blocks, experts = pow2(ceil_div(state.capacity, tokens)), max(2, pow2(state.num_experts))
            fixed: tuple[torch.Tensor | int, ...] = (
                *self.tables(tokens), state.tally, bank.words, bank.counts, state.home, state.by_owner,
                state.owner_start, bank.epoch, bank.ticket, state.status, state.rank, state.slot_room, state.first_own,
                state.num_local_experts, step.bank, state.num_banks,
            )  # fmt: skip
            return fixed, {
                "R": state.num_ranks, "RANKS": self._ranks, "E": state.num_experts, "EXPERTS": experts,
                "RANK_BINS": max(2, self._ranks), "K": state.num_topk, "SLOTS": self._slots, "TOKENS": tokens,
                "BLOCKS": blocks, "COLUMNS": min(experts, max(16, 32768 // blocks)), "LAYOUT": LAYOUTS[step.layout],
                "num_warps": 16,
            }  # fmt: skip

        self.launch(
            plan_count, num_blocks, (step.bank, step.layout, ids.dtype),
            (ids, step.owners, step.counts, num_tokens, num_blocks, step.alignment, step.name, state.timeout_us),
            rest_of_count,
        )  # fmt: skip
        return Plan(tokens, unplaced=True)

    def place(self, plan: Plan, step: Step, places: Places) -> Plan:
        """Find the places of an unplaced plan in a launch of its own."""
        state, (tokens, _), routing = self.state, plan, step.routing
        compact, keys_at_once = step.layout is Layout.COMPACT, pow2(tokens * state.num_topk)
        at_once = 2048 // self._slots**2 if compact else 32768 // (self._slots * keys_at_once)
        rows, num_tokens = max(1, min(tokens, at_once)), step.topk_idx.shape[0]

        def rest() -> Rest:
            fixed: tuple[torch.Tensor | int, ...] = (
                *self.tables(tokens)[:4], state.home, places.bases[step.bank], self.addresses, state.rank,
                places.region.meta,
            )  # fmt: skip
            return fixed, {
                "R": state.num_ranks, "E": state.num_experts, "K": state.num_topk, "SLOTS": self._slots,
                "SENDS": step.sends_to.shape[1], "TOKENS": tokens, "ROWS": rows, "KEYS": keys_at_once,
                "COMPACT": compact, "payload_bytes": places.rows.payload_bytes, "num_warps": 8,
            }  # fmt: skip

        self.launch(
            place_rows, max(1, ceil_div(num_tokens, rows)), (places, step.bank, *dtypes_of(routing)),
            (*routing, step.sends_to, num_tokens), rest,
        )  # fmt: skip
        return Plan()

    @property
    def addresses(self) -> torch.Tensor:
        """Of every place of a token: int64 [T, SENDS], 0 = none."""
        return self.state.scratch("addresses", torch.int64, self.state.capacity * self.state.num_topk)

    def rows_of_slots(self, step: Step) -> torch.Tensor | Part:
        """[T, K] where each slot's row is; of COMPACT in memory that the next call of this overwrites."""
        if step.owners is None:
            return step.sends_to
        state, num_slots, num_places = self.state, step.owners.numel(), step.sends_to.shape[1]
        where = state.scratch("rows_of_slots", torch.int64, state.capacity * state.num_topk)
        self.launch(
            rows_of_slots, max(1, ceil_div(num_slots, 1024)), (), (step.owners, step.sends_to, num_slots),
            lambda: ((where,), {"K": state.num_topk, "SENDS": num_places, "ENTRIES": 1024, "num_warps": 8}),
        )  # fmt: skip
        return where[:num_slots]

    def repeat(self, step: Step, places: Places) -> Plan:
        """An earlier plan, in the bank of this step."""
        state, bank, num_places = self.state, self.state.banks[step.bank], step.sends_to.numel()

        def rest() -> Rest:
            fixed = (
                places.bases[step.bank], self.addresses, state.tally, bank.words, bank.epoch, bank.ticket,
                state.status, state.rank,
            )  # fmt: skip
            return fixed, {
                "R": state.num_ranks, "RANKS": self._ranks, "PLACES": 4096, "payload_bytes": places.rows.payload_bytes,
                "num_warps": 8,
            }  # fmt: skip

        self.launch(
            address_rows, max(1, ceil_div(num_places, 4096)), (places, step.bank),
            (step.sends_to, step.counts, num_places, step.name, state.timeout_us), rest,
        )  # fmt: skip
        return Plan()
