"""Launches the kernels of one rank: which grid, which tile, how many warps, for which shape.

Every method enqueues on the current stream and returns without waiting. A step runs in one bank of the window; its
number lives on the device, so that a captured graph counts on when it is replayed. Which bank, and when it may be used
again on this rank, is the caller's business.

Grids. At most one block of a launch waits for other ranks: who waits takes little of the device, on which a peer, or
what it waits for, may have to run. So kernels may be of any size. With `strict_sms` every kernel that moves rows takes
one block per SM of the rank's budget, `num_sms`; `dispatch_slots`, of which one block counts, two at least.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import torch

from expertwire._math import ceil_div
from expertwire.kernels.check_ids import check_ids
from expertwire.kernels.combine_push import combine_push
from expertwire.kernels.combine_recv import combine_gather
from expertwire.kernels.combine_send import combine_send
from expertwire.kernels.copy_rows import copy_rows
from expertwire.kernels.dispatch_recv import await_rows, export_values, give_back
from expertwire.kernels.dispatch_send import dispatch_send
from expertwire.kernels.dispatch_slots import dispatch_slots
from expertwire.kernels.launch import Launcher, Rest
from expertwire.kernels.part import Part
from expertwire.kernels.planner import Plan, Planner, dtypes_of
from expertwire.kernels.refuse import refuse_combine, refuse_dispatch
from expertwire.kernels.state import DeviceMemory, DeviceState, Places, Rows, Step
from expertwire.kernels.tiles import (
    MAX_ROWS,
    Tile,
    all_tiles,
    combine_tile,
    copy_tile,
    pow2,
    send_tile,
    slots_tile,
)
from expertwire.layouts.receive import Layout
from expertwire.protocols.epoch_signal import REFUSED
from expertwire.topology import Placement

T = TypeVar("T")
Copy = tuple[torch.Tensor, torch.Tensor | None]  # from, to
_NO_COPY = (None, None)
FUSED_SELECTIONS, FUSED_COMPARISONS = 1 << 11, 1 << 14  # beyond, a plan and a send are faster, as measured


def _units(num_bytes: int) -> int:
    """As how many words of 4 bytes, or bytes, `copy_rows` moves a row."""
    return num_bytes // 4 if num_bytes % 4 == 0 else num_bytes


class DeviceEngine:
    """One rank's kernels."""

    def __init__(
        self, memory: DeviceMemory, placement: Placement, *, capacity: int, hidden: int, num_topk: int, num_banks: int,
        num_sms: int, timeout_us: int, strict_sms: bool = False, over_rows: bool = False, debug_poison: bool = False,
    ) -> None:  # fmt: skip
        self.state = DeviceState(
            memory, placement, capacity=capacity, hidden=hidden, num_topk=num_topk, num_banks=num_banks,
            timeout_us=timeout_us, over_rows=over_rows, debug_poison=debug_poison,
        )  # fmt: skip
        self.rank, self.num_ranks, self.num_experts = memory.rank, memory.num_ranks, placement.num_experts
        self.capacity, self.hidden, self.num_topk = capacity, hidden, num_topk
        self.num_sms, self.strict_sms = num_sms, strict_sms
        self.most_blocks = num_sms if strict_sms else 16 * num_sms  # of a launch that sends rows
        self.launch = Launcher()
        # Left alone, the assembler spares registers for more warps, and has half as many rows in flight: 0.7 to 1 us.
        on_cuda = memory.device.type == "cuda" and torch.version.hip is None
        self.many_registers = {"maxnreg": 128} if on_cuda else {}
        self._ranks, self._slots = pow2(self.num_ranks), pow2(num_topk)
        self._one_warp = {"R": self.num_ranks, "RANKS": self._ranks, "num_warps": 1}
        self._chosen: dict[Hashable, Any] = {}
        self.planner = Planner(self.state, self.launch)
        self._found, self._worst, self._ticket = self.state.int64([-1, 0]), self.state.int32([0]), self.state.int32([0])

    def _tiles(self, kind: Hashable, num_tokens: int, choose: Callable[[int], T]) -> Iterable[T]:
        """What `choose` says for a launch of this kind, found once; while compiling, for all launches to come."""
        if self.launch.compiling:
            return all_tiles(choose, self.capacity)
        key = (kind, num_tokens)
        found: T | None = self._chosen.get(key)
        if found is None:
            found = self._chosen[key] = choose(num_tokens)
        return (found,)

    # -- dispatch --------------------------------------------------------------------------------------------------

    def check_ids(self, topk_idx: torch.Tensor, *, distinct: bool) -> torch.Tensor:
        """int64 [2], as int32 [4]: of the first illegal id or, if they must be `distinct`, else the first repeat, the
        index in topk_idx, -1 = none, and the id. The next call of this overwrites it."""
        num_tokens, together = topk_idx.shape[0], max(1, (1 << 13) // self._slots**2)

        def rest() -> Rest:
            return (self._found, self._worst, self._ticket), {
                "E": self.num_experts, "K": self.num_topk, "SLOTS": self._slots, "TOKENS": together, "num_warps": 8
            }  # fmt: skip

        self.launch(
            check_ids, max(1, ceil_div(num_tokens, together)), (topk_idx.dtype,), (topk_idx, num_tokens, int(distinct)),
            rest,
        )  # fmt: skip
        return self._found.view(torch.int32)

    def fits_fused(self) -> bool:
        """Whether EXPERT_SLOTS is dispatched in one launch: by one rank, for few tokens, each of whose blocks compares
        its selections with all others."""
        selections = pow2(self.capacity) * self._slots
        return self.num_ranks == 1 and selections <= FUSED_SELECTIONS and selections * self._slots <= FUSED_COMPARISONS

    def dispatch_fused(self, x: torch.Tensor, step: Step, places: Places) -> None:
        state, rows, bank, num_tokens = self.state, places.rows, step.bank, x.shape[0]

        def choose(num_tokens: int) -> tuple[Tile, int]:
            """The tile, and the parts of a row."""
            lines = ceil_div(self.hidden, rows.block)
            tile = slots_tile(num_tokens, lines, rows.block, self.num_sms)
            return tile, ceil_div(lines, tile.columns)

        for tile, parts in self._tiles(places, num_tokens, choose):
            grid = 1 + num_tokens * parts
            grid = max(2, min(grid, self.num_sms) if self.strict_sms else grid)

            def rest(tile: Tile = tile, parts: int = parts) -> Rest:
                memory = (places.payload(bank), places.sf(bank), places.meta(bank))
                return (state.tally, *memory, state.home, self.capacity), {
                    "E": self.num_experts, "EXPERTS": max(2, pow2(self.num_experts)), "K": self.num_topk,
                    "SLOTS": self._slots, "TOKENS": pow2(self.capacity), "hidden": self.hidden, "LINES": tile.columns,
                    "BLOCK": rows.block, "PARTS": parts, "FP8": rows.fp8, "UE8M0": rows.ue8m0,
                    "sf_bytes": rows.sf_bytes, "num_warps": tile.warps,
                }  # fmt: skip

            self.launch(
                dispatch_slots, grid, (places, bank, tile, step.topk_idx.dtype),
                (x, step.topk_idx, step.sends_to, step.counts, num_tokens), rest,
            )  # fmt: skip

    def send(
        self, x: torch.Tensor, sf: torch.Tensor | None, plan: Plan, step: Step, places: Places, *, receive: bool
    ) -> None:
        """Rows along a plan. `x` [T, width] bfloat16 or opaque units; `sf` for opaque rows."""
        rows = places.rows

        def choose(num_tokens: int) -> tuple[Tile, bool]:
            """The tile, and whether a block sends several, so that it would find places again and again."""
            lines = max(pow2(ceil_div(rows.width, rows.block)), 4 if rows.fp8 and rows.ue8m0 else 1)
            row_bytes, most_rows = lines * rows.block * rows.unit_bytes, min(MAX_ROWS, plan.tokens)
            tile = send_tile(num_tokens, row_bytes, lines, self.num_sms, most_rows, self.strict_sms, rows.fp8)
            return tile, self.strict_sms and ceil_div(num_tokens, tile.rows) > self.num_sms

        for tile, several in self._tiles((places, plan), x.shape[0], choose):
            placed = self.planner.place(plan, step, places) if plan.unplaced and several else plan
            self._send_tiles(tile, x, sf, placed, step, places, receive=receive)

    def _send_tiles(
        self, tile: Tile, x: torch.Tensor, sf: torch.Tensor | None, plan: Plan, step: Step, places: Places, *,
        receive: bool,
    ) -> None:  # fmt: skip
        routing, num_tokens = step.routing if plan.unplaced else (None, None), x.shape[0]

        def rest() -> Rest:
            state, bank, rows = self.state, self.state.banks[step.bank], places.rows
            tables = self.planner.tables(plan.tokens)[:4] if plan.unplaced else (None,) * 4
            fixed: tuple[torch.Tensor | int | None, ...] = (
                *tables, state.home, self.planner.addresses, places.bases[step.bank], bank.words, bank.epoch,
                bank.ticket, state.status, self.rank, places.region.sf, places.region.meta,
            )  # fmt: skip
            return fixed, {
                "R": self.num_ranks, "RANKS": self._ranks, "E": self.num_experts, "K": self.num_topk,
                "SLOTS": self._slots, "TOKENS": plan.tokens, "KEYS": pow2(plan.tokens * self.num_topk),
                "PLACE": plan.unplaced, "COMPACT": step.layout is Layout.COMPACT, "SENDS": step.sends_to.shape[1],
                "ROWS": tile.rows, "LINES": tile.columns, "BLOCK": rows.block, "width": rows.width,
                "unit_bytes": rows.unit_bytes, "sf_units": rows.sf_units, "SF_UNITS": pow2(rows.sf_units),
                "sf_unit_bytes": rows.sf_unit_bytes, "FP8": rows.fp8, "UE8M0": rows.ue8m0, "RECEIVE": receive,
                "VOID": step.void_at, "num_warps": tile.warps,
            }  # fmt: skip

        self.launch(
            dispatch_send, min(max(1, ceil_div(num_tokens, tile.rows)), self.most_blocks),
            (places, step.bank, tile, plan, receive, step.void_at, *dtypes_of(routing)),
            (x, sf, step.sends_to, *routing, step.counts, num_tokens, step.name, self.state.timeout_us), rest,
        )  # fmt: skip

    def _words(self, words: torch.Tensor, epoch: torch.Tensor) -> Rest:
        """What a kernel of one small block takes that waits."""
        return (words, epoch, self.state.status, self.rank), self._one_warp

    def await_rows(self, step: Step) -> None:
        """The receive half, where it was deferred."""
        if self.num_ranks > 1:
            bank = self.state.banks[step.bank]

            def rest() -> Rest:
                fixed, options = self._words(bank.words, bank.epoch)
                return fixed, options | {"VOID": step.void_at}

            changing = (step.counts, step.name, self.state.timeout_us)
            self.launch(await_rows, 1, (step.bank, step.void_at), changing, rest)

    def export(self, values: torch.Tensor | Part, out: torch.Tensor) -> None:
        """int32 values to pinned host memory."""
        size = values.numel()
        self.launch(
            export_values, 1, (size,), (values, out), lambda: ((), {"size": size, "SIZE": pow2(size), "num_warps": 4})
        )

    def give_back(self, bank: int, places: Places | None = None) -> None:
        """The bank's rows, in `places`, have been read: peers may write there again."""
        if self.state.debug_poison and places is not None:
            places.poison(bank)
        if self.num_ranks > 1:
            found = self.state.banks[bank]
            self.launch(give_back, 1, (bank,), (), lambda: ((found.words, found.epoch, self.rank), self._one_warp))

    def _pieces(self, groups: int, rows: int) -> int:
        """Into how many pieces a group is cut, of which each block of the largest grid gets about two: there may be few
        rows in each of many groups, or all in one. A piece is made of chunks of so many rows."""
        grid = self.most_blocks
        return grid if groups <= 1 else min(ceil_div(2 * grid, groups), ceil_div(self.state.slot_room, rows))

    def copy_rows(
        self, kind: Hashable, step: Step, payload: Copy, sf: Copy | None = None, meta: Copy | None = None, *,
        decode: Rows | None = None,
    ) -> None:  # fmt: skip
        """Copy the rows that a step filled: payload, scale factors and routing, each from [rows, bytes] to a tensor of
        any dtype. To `decode` rows of this kind, to bfloat16, scale factors are read only: (sf, None). `kind` decides
        the dtypes, the sizes of rows, and what is given, of steps of a layout."""
        (lengths, offsets), tensors = self.state.filled(step), (*payload, *(sf or _NO_COPY), *(meta or _NO_COPY))
        groups, key = lengths.numel(), (kind, step.layout, decode)

        def sizes() -> list[int]:
            """Bytes of a row."""
            return [0 if source is None else source.shape[1] * source.element_size() for source in tensors[::2]]

        cut = self._chosen.get(key)
        if cut is None:
            tile = copy_tile(_units(sizes()[0]) if decode is None else self.hidden // 2, self.strict_sms and not decode)
            pieces = self._pieces(groups, tile.rows)
            cut = self._chosen[key] = tile, pieces, max(1, min(self.most_blocks, groups * pieces))
        tile, pieces, grid = cut

        def rest() -> Rest:
            row_bytes, sf_bytes, meta_bytes = sizes()
            columns = tile.columns if decode is None else decode.block * pow2(ceil_div(self.hidden, decode.block))
            return (pieces,), {
                "GROUPS": groups, "ROWS": tile.rows, "UNITS": columns, "row_bytes": row_bytes,
                "SF_UNITS": pow2(_units(sf_bytes)), "sf_bytes": sf_bytes,
                "META_UNITS": pow2(_units(meta_bytes)), "meta_bytes": meta_bytes,
                "BLOCK": decode.block if decode else 0, "UE8M0": bool(decode and decode.ue8m0), "num_warps": tile.warps,
            }  # fmt: skip

        self.launch(copy_rows, grid, key, (*tensors, lengths, offsets), rest)

    # -- combine ---------------------------------------------------------------------------------------------------

    def words_of_combine(self, bank: int) -> tuple[torch.Tensor | int, ...]:
        """What kernels take that gather rows and then leave a combine; `bank` of the dispatch."""
        state, found = self.state, self.state.banks[bank]
        return state.banks[0].words, state.combine_tickets, found.words, found.epoch, state.status, self.rank

    def push(self, y: torch.Tensor, meta: torch.Tensor, step: Step, returned: Places, *, own: bool = False) -> None:
        """Rows y [rows, hidden] with routing `meta` to `returned` of the ranks that they came from; the own ones too,
        or not. Where peers cannot read y."""
        state, (lengths, offsets), num_places = self.state, self.state.filled(step), step.sends_to.shape[1]
        units, groups = self.hidden // 2, lengths.numel()
        tile = copy_tile(units, self.strict_sms)
        grid, chunk = self.most_blocks, 8 * tile.rows
        pieces = self._pieces(groups, chunk)

        def rest() -> Rest:
            targets = state.scratch(f"targets {step.bank}", torch.int64, grid * chunk)
            return (returned.bases[step.bank], self.rank, pieces, targets), {
                "GROUPS": groups, "CHUNK": chunk, "ROWS": tile.rows, "UNITS": tile.columns, "units": units,
                "SENDS": num_places, "META": meta.shape[1], "OWN": own, "num_warps": tile.warps,
            }  # fmt: skip

        self.launch(
            combine_push, max(1, min(grid, groups * pieces)),
            (returned, step.bank, num_places, groups, meta.shape[1], own),
            (y.reshape(-1).view(torch.int32), meta, lengths, offsets, step.counts), rest,
        )  # fmt: skip

    def combine_ready(
        self, y: torch.Tensor | None, step: Step, seen_at: torch.Tensor | None, *, tell: bool = True, own: bool = False,
        publish: bool = True, receive: bool = True, name: int = 0,
    ) -> None:  # fmt: skip
        """`publish` the own rows; to `receive`, wait until all peers have. `tell` peers where they see y: `seen_at`, a
        tensor of `Places.seen_at`, or `nowhere` if rows were pushed (`own`: this rank's too); None: where y is.
        `name` of the call: see `names`."""
        if self.num_ranks == 1:
            return

        def rest() -> Rest:
            state = self.state
            fixed, options = self._words(state.banks[0].words, state.combines)
            return (state.sources, *fixed), options | {
                "BANKS": state.num_banks, "TABLE_BYTES": state.window.sources_bytes, "TELL": tell, "OWN": own,
                "PUBLISH": publish, "RECEIVE": receive,
            }  # fmt: skip

        kind = (seen_at is None, tell, own, publish, receive)
        self.launch(
            combine_send, 1, kind, (y if tell else None, seen_at, step.counts, name, self.state.timeout_us), rest
        )

    def gather(
        self, y: torch.Tensor, step: Step, out: torch.Tensor, *, weighted: bool,
        returned: Places | None = None, biases: tuple[torch.Tensor, ...] = (), finish: bool = False,
        by_rank: bool = False,
    ) -> None:  # fmt: skip
        """Gather and sum the rows that `combine_ready` has waited for, and leave the combine. `returned` is what ranks
        push into, if any does."""
        num_tokens, num_places = step.sends_to.shape
        weights, two = step.topk_weights if weighted else None, (*biases, None, None)[:2]
        rows: torch.Tensor | None = y
        if self.num_ranks > 1:
            rows = None if returned is None else returned.payload(step.bank).view(torch.bfloat16)

        def choose(num_tokens: int) -> tuple[Tile, int]:
            """The tile, and the parts of a row."""
            tile = combine_tile(num_tokens, self.hidden, self.num_sms, self.strict_sms)
            return tile, ceil_div(self.hidden, tile.columns)

        for tile, parts in self._tiles("combine", num_tokens, choose):
            units = max(1, ceil_div(num_tokens, tile.rows) * parts)

            def rest(tile: Tile = tile, parts: int = parts) -> Rest:
                state = self.state
                return (state.told, *self.words_of_combine(step.bank)), {
                    "R": self.num_ranks, "RANKS": self._ranks, "BANKS": state.num_banks,
                    "TABLE_BYTES": state.window.sources_bytes, "SENDS": num_places, "ROWS": tile.rows,
                    "COLUMNS": tile.columns, "PARTS": parts, "hidden": self.hidden, "WEIGHTED": weighted,
                    "NUM_BIASES": len(biases), "FINISH": finish, "BY_RANK": by_rank, "num_warps": tile.warps,
                    "enable_fp_fusion": False, **(self.many_registers if tile.warps <= 16 else {}),
                }  # fmt: skip

            self.launch(
                combine_gather, min(units, self.num_sms) if self.strict_sms else units,
                (step.bank, tile, num_places, rows is None, weighted, len(biases), finish, by_rank),
                (rows, step.sends_to, weights, *two, out, step.counts, num_tokens, self.state.timeout_us), rest,
            )  # fmt: skip

    # -- refusing --------------------------------------------------------------------------------------------------

    def refuse_dispatch(self, bank: int, said: int = REFUSED) -> None:
        """Declare the next dispatch in this bank void. Peers see what is `said` instead of its name."""
        if self.num_ranks > 1:
            found = self.state.banks[bank]
            changing = (said, self.state.timeout_us)
            self.launch(refuse_dispatch, 1, (bank,), changing, lambda: self._words(found.words, found.epoch))

    def refuse_combine(self, step: Step | None, said: int = REFUSED) -> None:
        """The same of the next combine, which is of this step, if it is known."""

        def rest() -> Rest:
            fixed, options = self._words(self.state.banks[0].words, self.state.combines)
            return fixed, options | {"BANKS": self.state.num_banks}

        if self.num_ranks > 1:
            changing = (None if step is None else step.counts, said, self.state.timeout_us)
            self.launch(refuse_combine, 1, (step is None,), changing, rest)


__all__ = ["Copy", "DeviceEngine", "Places", "Rows", "Step"]
