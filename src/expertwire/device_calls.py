"""Dispatch on a device: check, launch, and build the record. The counterpart of `dispatch`.

Nothing here waits for the device but `counts="host"`. Rows arrive in memory that peers write into; tensors that the
caller owns are copies of it, `zero_copy` views of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from expertwire import _check
from expertwire.call import record
from expertwire.device_autograd import DeviceGradients
from expertwire.device_steps import Arrived, DeviceSteps, Later, aligned, plain
from expertwire.errors import InvalidArgument
from expertwire.formats import BF16, FP8Block, WireFormat
from expertwire.formats.fp8 import column_major
from expertwire.handle import Dispatched, Handle
from expertwire.kernels.engine import Copy, DeviceEngine, Places, Rows, Step
from expertwire.kernels.part import Part
from expertwire.kernels.poison import poison
from expertwire.kernels.runtime import DeviceRuntime
from expertwire.layouts.device_window import SOURCE_WORDS
from expertwire.layouts.receive import Layout

Dtypes = tuple[torch.dtype, torch.dtype | None]


class DeviceDispatcher:
    """Makes the dispatch calls of one buffer."""

    def __init__(
        self, owner: object, settings: _check.Settings, runtime: DeviceRuntime, steps: DeviceSteps,
        gradients: DeviceGradients, *, validate: bool, raise_if_full: Callable[[], None],
    ) -> None:  # fmt: skip
        self._owner, self._settings, self._runtime, self._steps = owner, settings, runtime, steps
        self._gradients = gradients
        self._engine, self._state, self._rank = runtime.engine, runtime.engine.state, runtime.engine.rank
        self._validate, self._raise_if_full = validate, raise_if_full
        self._meaning = f"[num_tokens, {settings.hidden}], or a tuple of two tensors (payload, scale factors)"
        self._fits_fused = self._engine.fits_fused()
        self._kinds: dict[tuple[object, ...], tuple[Places, int]] = {}  # of each kind of call, with its name
        self._windows: dict[tuple[Places, int, Dtypes], tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = {}

    def __call__(
        self, x: Any, topk_idx: Any, topk_weights: Any, handle: Any, layout: Any, expert_alignment: Any, wire: Any,
        counts: Any, defer_receive: bool, zero_copy: bool,
    ) -> Dispatched:  # fmt: skip
        steps, engine = self._steps, self._engine
        steps.raise_void()
        epoch, cached, exact = steps.dispatches.begin(), handle is not None, counts == "host"
        masked, restarts = self._runtime.masked_ranks, self._runtime.restarts
        bank, call = steps.dispatches.lane.bank(epoch), steps.call("dispatch")
        try:
            layout = _check.dispatch_options(self._rank, layout, expert_alignment, counts, wire)
            payload, sf, rows, dtypes = self._rows(x, wire)
            source = None if isinstance(x, tuple) else x
            differentiable = self._gradients.wanted(source, topk_weights)
            if differentiable:
                _check.differentiable_rows(self._rank, source, wire, zero_copy)
            if cached:
                arrived = steps.arrived(self._owner, handle)
                _check.repeat(
                    self._rank, payload.shape[0], handle.num_tokens, topk_idx, topk_weights, zero_copy=zero_copy
                )
                step, exact = arrived.step.repeated(bank, 0), arrived.exact
            if exact:
                steps.raise_if_capturing()
            if not cached:
                self._raise_if_full()
                ids, weights = self._routing(topk_idx, topk_weights, payload.shape[0], layout, exact=exact)
                handle = Handle(self._owner, epoch, layout, payload.shape[0], topk_weights)
                step = self._state.step(bank, handle.layout, ids, weights, expert_alignment)
            fused = self._is_fused(step, rows, cached)

            def send(places: Places) -> None:
                if fused:
                    engine.dispatch_fused(payload, step, places)
                else:
                    plan = engine.planner.repeat(step, places) if cached else engine.planner.plan(step)
                    engine.send(payload, sf, plan, step, places, receive=not defer_receive)

            kind = (
                "dispatch", step.layout, rows, dtypes, step.alignment, fused, cached, defer_receive, zero_copy,
                step.topk_idx.dtype, step.topk_weights is None, differentiable,
            )  # fmt: skip
            known = self._kinds.get(kind)
            if known is not None:
                places, step.name = known
                self._runtime.pass_by(call)
            else:
                what = _what(step, "opaque" if source is None else (wire or BF16()).name, rows)

                def prepare() -> None:
                    places = self._places(step, rows)
                    send(places)
                    if defer_receive:
                        engine.await_rows(step)
                    for each in _decoded_or_not(wire):
                        self._take(step, places, 1, dtypes, each, zero_copy=zero_copy, cached=cached)

                local = f"zero_copy={zero_copy}, deferred={defer_receive}, cached={cached}, gradients={differentiable}"
                steps.meet(kind, call, f"{what}, {local}, {step.topk_idx.dtype}", prepare)
                places, step.name = self._places(step, rows), self._runtime.names.name(what)
                self._kinds[kind] = places, step.name
        except BaseException as error:
            (steps.dispatches.cancel if self._state.capturing else steps.dispatches.end)(epoch)
            steps.refuse(call, error, lambda said: engine.refuse_dispatch(bank, said))
            raise
        send(places)

        def complete() -> dict[str, Any]:
            steps.raise_if_closed("dispatch")
            if defer_receive:
                steps.raise_if_outdated(restarts)
                engine.await_rows(step)
            known = steps.counts(step) if exact else None
            if known is not None and engine.num_ranks > 1 and known[-1]:
                self._finish(epoch, bank, places)
                handle.finished = handle.finished or not cached
                raise steps.void(bank)
            num_rows, fields = self._counts(step, places, known)
            try:
                fields["x"], fields["sf"], meta = self._take(
                    step, places, num_rows, dtypes, wire, zero_copy=zero_copy, cached=cached
                )
            except BaseException:  # out of memory, say: the rows are given up, for which peers have made this call
                self._finish(epoch, bank, places)
                handle.finished = handle.finished or not cached
                raise
            if zero_copy and not handle.finished:
                handle._on_finish = lambda: self._finish(epoch, bank, places)
            else:
                self._finish(epoch, bank, places)
            if not cached:
                held, borrowed = None if handle.finished or not zero_copy else epoch, self._borrows(zero_copy)
                handle._arrived = Arrived(step, num_rows, exact, held, meta, places, borrowed, masked, restarts)
            fields["_later"], fields["missing_ranks"] = _LaterOfDispatch(engine, step, handle._arrived), masked
            if differentiable:
                weights = None if cached else fields["_later"].topk_weights()
                fields["x"], weights = self._gradients.tie_dispatch(
                    handle, handle._arrived, source, topk_weights, fields["x"], weights
                )
                if weights is not None:
                    fields["topk_weights"] = weights
            return fields

        later = Later(self._state.device) if defer_receive else None
        return record(Dispatched, complete, defer_receive, handle=handle, _later=later)

    def _finish(self, epoch: int, bank: int, places: Places) -> None:
        """Peers may write this bank again."""
        if self._runtime.closed:
            return
        self._engine.give_back(bank, places)
        self._steps.dispatches.end(epoch)

    def _places(self, step: Step, rows: Rows) -> Places:
        return self._state.places(step.layout, rows, step.alignment)

    def _is_fused(self, step: Step, rows: Rows, cached: bool) -> bool:
        if step.layout is not Layout.EXPERT_SLOTS or cached or not self._fits_fused:
            return False
        return rows.fp8 or (rows.unit_bytes == 2 and rows.width == self._settings.hidden and rows.sf_units == 0)

    # -- checks --------------------------------------------------------------------------------------------------

    def _rows(self, x: Any, wire: BF16 | FP8Block | None) -> tuple[torch.Tensor, torch.Tensor | None, Rows, Dtypes]:
        rank, settings = self._rank, self._settings
        if isinstance(x, tuple):
            if wire is not None or len(x) != 2:
                raise InvalidArgument(f"rank {rank}: rows given as (payload, sf) are a pair and travel with wire=None")
            payload = _check.tensor(rank, "x[0]", x[0], None, (None, None), "[num_tokens, width]", self._state.device)
            sf = _check.tensor(
                rank, "x[1]", x[1], None, (payload.shape[0], None), "[num_tokens, scales]", self._state.device
            )
            rows = Rows.opaque(payload.shape[1] * payload.element_size(), sf.shape[1] * sf.element_size())
            _check.row_fits(rank, rows.payload_bytes, rows.sf_bytes, settings.hidden)
            _check.aligned(rank, "x[0]", payload)
            found = _in_units(payload, rows.width, rows.unit_bytes)
            factors = _in_units(sf, rows.sf_units, rows.sf_unit_bytes)
            dtypes: Dtypes = (payload.dtype, sf.dtype)
        else:
            dims, factors = (None, settings.hidden), None
            found = plain(_check.tensor(rank, "x", x, (torch.bfloat16,), dims, self._meaning, self._state.device))
            _check.aligned(rank, "x", found)
            rows, dtypes = _rows_of(wire, settings.hidden)
        _check.tokens(rank, "x", found.shape[0], settings.num_max_tokens_per_rank)
        return found, factors, rows, dtypes

    def _routing(
        self, topk_idx: Any, topk_weights: Any, num_tokens: int, layout: Layout, *, exact: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rank, settings = self._rank, self._settings
        if topk_idx is None:
            raise InvalidArgument(f"rank {rank}: topk_idx is missing; pass it, or the handle of an earlier dispatch")
        dims = (num_tokens, settings.num_topk)
        _check.tensor(rank, "topk_idx", topk_idx, (torch.int32, torch.int64), dims, device=self._state.device)
        if topk_weights is not None:
            _check.tensor(rank, "topk_weights", topk_weights, (torch.float32,), dims, device=self._state.device)
        ids = aligned(topk_idx)
        if self._validate and exact:  # only where the call waits for the device anyway, and then on every rank
            self._check_ids(ids, distinct=layout is Layout.EXPERT_SLOTS)
        return ids, None if topk_weights is None else aligned(plain(topk_weights))

    def _check_ids(self, ids: torch.Tensor, *, distinct: bool) -> None:
        words = self._steps.read(self._engine.check_ids(ids, distinct=distinct))
        index, expert = torch.tensor(words, dtype=torch.int32).view(torch.int64).tolist()
        if index >= 0:
            token, slot = divmod(index, self._settings.num_topk)
            raise _check.bad_id(self._rank, token, slot, expert, self._settings.num_experts)

    # -- the record ----------------------------------------------------------------------------------------------

    def _counts(
        self, step: Step, places: Places, known: tuple[list[int], list[int], list[int], int, int] | None
    ) -> tuple[int, dict[str, Any]]:
        """How many rows the record shows, and the counts as lists, if they are `known`."""
        fixed = step.layout is Layout.EXPERT_SLOTS
        num_rows, per_expert, padded, per_rank = self._most_rows(step, places), None, None, None
        if known is not None:
            per_expert, padded, per_rank, rows, _ = known
            if fixed:
                padded = [self._state.slot_room] * self._state.num_local_experts
            else:
                num_rows = rows if step.layout is Layout.COMPACT else sum(padded)
        return num_rows, {
            "num_tokens_per_expert_list": per_expert,
            "num_padded_tokens_per_expert_list": padded,
            "num_tokens_per_rank_list": per_rank,
        }

    def _most_rows(self, step: Step, places: Places) -> int:
        """The region is as large as that of the rank with the most experts."""
        if step.layout is Layout.EXPERT_SLOTS:
            return self._state.num_local_experts * self._state.slot_room
        return places.region.num_rows

    def _take(
        self, step: Step, places: Places, num_rows: int, dtypes: Dtypes, wire: WireFormat | None, *, zero_copy: bool,
        cached: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
        """The first `num_rows` rows of the bank with scale factors, in the shape of the layout, and routing: views, or
        copies of the rows in use, all of which one launch makes. The routing of a `cached` dispatch is that of its
        handle."""
        x, sf, meta = self._window(step, places, dtypes)
        fp8, routing = wire if isinstance(wire, FP8Block) else None, None
        if num_rows != meta.shape[0]:
            x, sf, meta = x[:num_rows], None if sf is None else sf[:num_rows], meta[:num_rows]
        if not cached and not self._borrows(zero_copy):  # others may write the bank before the handle is done with
            routing = (meta, torch.empty_like(meta))
            meta = routing[1]
        if not zero_copy or (fp8 and fp8.decode):
            x, sf = self._copied(step, places, x, sf, routing, decode=fp8 is not None and fp8.decode)
        else:
            if routing is not None:
                self._engine.copy_rows((places, "routing"), step, routing)
            x, sf = x.detach(), None if sf is None else sf.detach()  # for each caller his own: he may want gradients
        if sf is not None and fp8 and fp8.sf_layout == "column":
            sf = column_major(sf)
        return x, sf, meta

    def _borrows(self, zero_copy: bool) -> bool:
        """Whether a handle keeps the routing in the window, and not a copy."""
        return zero_copy and not self._state.pushes

    def _window(
        self, step: Step, places: Places, dtypes: Dtypes
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """All rows of a bank with scale factors, in the shape of the layout, and their routing."""
        key = (places, step.bank, dtypes)
        found = self._windows.get(key)
        if found is None:
            most, sf = self._most_rows(step, places), places.sf(step.bank)
            x = _of_dtype(places.payload(step.bank)[:most], dtypes[0])
            factors = None if sf is None or dtypes[1] is None else _of_dtype(sf[:most], dtypes[1])
            if step.layout is Layout.EXPERT_SLOTS:
                groups = (self._state.num_local_experts, self._state.slot_room)
                x = x.view(*groups, x.shape[1])
                factors = None if factors is None else factors.view(*groups, factors.shape[1])
            found = self._windows[key] = x, factors, places.meta(step.bank)[:most]
        return found

    def _copied(
        self, step: Step, places: Places, x: torch.Tensor, sf: torch.Tensor | None, routing: Copy | None, *,
        decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Rows and scale factors, of which these are views, in tensors of their own."""
        payload, factors, scales = places.payload(step.bank), places.sf(step.bank), None
        kind = (places, x.dtype, None if sf is None else sf.dtype, routing is None)
        if decode:
            assert factors is not None
            out = self._own(x, torch.bfloat16)
            self._engine.copy_rows(kind, step, (payload, out), (factors, None), routing, decode=places.rows)
            return out, None
        out = self._own(x, x.dtype)
        if factors is not None and sf is not None:
            scales = (factors, self._own(sf, sf.dtype))
        self._engine.copy_rows(kind, step, (payload, out), scales, routing)
        return out, scales and scales[1]

    def _own(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty_like(like, dtype=dtype)
        if self._state.debug_poison:
            poison(out)
        return out


class _LaterOfDispatch(Later):
    """Those of a dispatch, whose routing is that of the one that `arrived`."""

    def __init__(self, engine: DeviceEngine, step: Step, arrived: Arrived) -> None:
        super().__init__(engine.state.device)
        self._engine, self._step, self._arrived = engine, step, arrived
        self._captured = engine.state.capturing

    def num_tokens_per_expert(self) -> torch.Tensor:
        return self._own(self._step.expert_counts)

    def num_padded_tokens_per_expert(self) -> torch.Tensor:
        return self._own(self._step.padded_counts)

    def num_tokens_per_rank(self) -> torch.Tensor:
        return self._own(self._step.rank_counts)

    def expert_offsets(self) -> torch.Tensor | None:
        return None if self._step.layout is Layout.COMPACT else self._own(self._step.offsets)

    def _own(self, counts: Part) -> torch.Tensor:
        """The caller's: kernels go by the step's own. Those of a graph change when it is replayed: they are the step's.
        Added up, not copied: a copy that waits behind a kernel that waits for a peer may hold up that peer's copies."""
        return counts.tensor() if self._captured else counts.tensor() + 0

    def topk_idx(self) -> torch.Tensor | None:
        if self._step.layout is not Layout.COMPACT:
            return None
        ids = self._arrived.meta[:, SOURCE_WORDS : SOURCE_WORDS + self._engine.num_topk]
        return torch.where(self._used(), ids, -1)

    def topk_weights(self) -> torch.Tensor | None:
        if self._step.layout is not Layout.COMPACT or self._arrived.step.topk_weights is None:
            return None
        weights = self._arrived.meta[:, SOURCE_WORDS + self._engine.num_topk :].view(torch.float32)
        return torch.where(self._used(), weights, 0.0)

    def _used(self) -> torch.Tensor:
        """[rows, 1] of COMPACT: whether a row came."""
        step, meta = self._arrived.step, self._arrived.meta
        return (torch.arange(meta.shape[0], device=meta.device) < step.num_rows.tensor())[:, None]

    def row_source(self) -> torch.Tensor | None:
        step, found = self._arrived.step, self._arrived.meta
        if step.layout is Layout.COMPACT:
            return None
        row, num_groups = torch.arange(found.shape[0], device=found.device), step.expert_counts.numel()
        if not num_groups:  # no rows arrive, but there is as much memory as on the others
            found = torch.where(self._used(), found, -1)
        elif found.shape[0]:
            offsets, counts = step.offsets.tensor(), step.expert_counts.tensor()
            group = torch.searchsorted(offsets, row, right=True) - 1
            known = group.clamp(max=num_groups - 1)
            used = (group == known) & (row - offsets[known] < counts[known])
            found = torch.where(used[:, None], found, -1)
        if step.layout is Layout.EXPERT_SLOTS:
            return found.view(num_groups, self._engine.state.slot_room, 3)
        return found


def _decoded_or_not(wire: WireFormat | None) -> tuple[WireFormat | None, ...]:
    """Both ways in which the receivers of a kind of call may ask for rows: each rank for itself."""
    return (wire, replace(wire, decode=not wire.decode)) if isinstance(wire, FP8Block) else (wire,)


def _what(step: Step, name: str, rows: Rows) -> str:
    """What all ranks must have in common."""
    aligned = f", expert_alignment={step.alignment}" if step.layout is Layout.EXPERT_MAJOR else ""
    rows_of = f"{name} rows of {rows.payload_bytes}+{rows.sf_bytes} bytes, weights={step.topk_weights is not None}"
    return f"{rows_of}, layout={step.layout.value}{aligned}"


def _in_units(part: torch.Tensor, width: int, unit_bytes: int) -> torch.Tensor:
    """Contiguous opaque rows as [T, width] units. torch minds strides of columns that stand alone, and where in its
    storage a tensor begins; kernels mind the address."""
    found = aligned(plain(part).as_strided((part.numel(),), (1,)).view(torch.uint8))
    if found.storage_offset() % unit_bytes:
        found = found.clone()
    return found.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[unit_bytes]).view(part.shape[0], width)


def _of_dtype(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes [rows, bytes], also none, as values of a dtype."""
    return rows.reshape(-1).view(dtype).view(rows.shape[0], rows.shape[1] // dtype.itemsize)


@lru_cache(maxsize=64)
def _rows_of(wire: BF16 | FP8Block | None, hidden: int) -> tuple[Rows, Dtypes]:
    """How rows in this format travel and arrive."""
    wire = wire or BF16()
    return Rows.of_wire(wire, hidden), (wire.payload_dtype, wire.sf_dtype)


def rehearse(device: torch.device) -> None:
    """Run once every torch operation that calls make between launches, so that its kernel is loaded: loading one waits
    for the device, on which another rank's kernel may be waiting for this rank."""
    counts = torch.zeros(8, dtype=torch.int32, device=device) + 0
    meta, row = torch.zeros(8, 4, dtype=torch.int32, device=device).clone(), torch.arange(8, device=device)
    known = (torch.searchsorted(counts, row, right=True) - 1).clamp(max=0)
    used = (known == row) & (row - counts[known] < counts[known])
    torch.where(used[:, None], meta, -1)
    torch.where((row < counts[:1])[:, None], meta.view(torch.float32), 0.0)
    poison(torch.empty_like(meta))
