"""Combine on a device: check, launch, and build the record. The counterpart of `combine`."""

from __future__ import annotations

from typing import Any

import torch

from expertwire import _check
from expertwire.autograd import Kept
from expertwire.call import record
from expertwire.device_autograd import DeviceGradients
from expertwire.device_steps import (
    Arrived,
    DeviceSteps,
    Later,
    collect_values,
    expose_values,
    plain,
)
from expertwire.errors import (
    GroupMismatch,
    HandleError,
    InvalidArgument,
    PeerRefused,
    TransportUnavailable,
)
from expertwire.formats import BF16, LogFMT10, WireFormat
from expertwire.handle import Combined, Handle
from expertwire.kernels.engine import Step
from expertwire.kernels.masking import num_missing
from expertwire.kernels.runtime import DeviceRuntime
from expertwire.kernels.wire import combine_encoded, encode_rows
from expertwire.layouts.receive import Layout


class DeviceCombiner:
    """Makes the combine calls of one buffer."""

    def __init__(
        self, owner: object, settings: _check.Settings, runtime: DeviceRuntime, steps: DeviceSteps,
        gradients: DeviceGradients,
    ) -> None:  # fmt: skip
        self._owner, self._settings, self._runtime, self._steps = owner, settings, runtime, steps
        self._gradients = gradients
        self._names: dict[tuple[object, ...], int] = {}  # of each kind of call
        self._engine, self._state, self._rank = runtime.engine, runtime.engine.state, runtime.engine.rank

    def inputs(self, handle: Any) -> torch.Tensor:
        """Memory for the experts' output of this handle that combine reads in place. Collective the first time."""
        arrived = self._steps.arrived(self._owner, handle)
        step, state = arrived.step, self._state
        if not state.over_rows:
            memory = state.inputs(step.layout, step.alignment).payload(step.bank)
        elif arrived.held_epoch is None or handle.finished:
            raise HandleError(
                f"rank {self._rank}: {handle} has no combine_input, which this buffer has over the rows of a dispatch "
                "with zero_copy=True, until its first combine"
            )
        else:
            memory = arrived.places.output(step.bank)
        return memory.view(torch.bfloat16)[: arrived.num_rows].view(self._dims(handle))

    def _dims(self, handle: Handle) -> tuple[int, ...]:
        if handle.layout is Layout.EXPERT_SLOTS:
            return (self._state.num_local_experts, self._state.slot_room, self._settings.hidden)
        return (handle._arrived.num_rows, self._settings.hidden)

    def __call__(
        self, x: Any, handle: Any, topk_weights: Any, bias: Any, reduce: Any, wire: Any, defer_receive: bool
    ) -> Combined:
        steps, engine = self._steps, self._engine
        steps.raise_void()
        mine = isinstance(handle, Handle) and handle._owner is self._owner and handle._arrived is not None
        known: Step | None = handle._arrived.step if mine else None
        if known is not None and known.bank in steps.combining:
            raise HandleError(f"rank {self._rank}: another combine in this bank was deferred; call its hook() first")
        epoch, several = steps.combines.begin(), engine.num_ranks > 1
        call = steps.call("combine")
        try:
            arrived = steps.arrived(self._owner, handle)
            biases = self._checked(x, handle, topk_weights, bias, reduce, wire)
            step, compact, y = arrived.step, handle.layout is Layout.COMPACT, plain(x)
            weighted, by_rank = not compact and handle.topk_weights is not None, not compact and reduce == "rank"
            tracked = (x, topk_weights, *biases, handle._edge, handle.topk_weights if weighted else None)
            differentiable = self._gradients.wanted(*tracked)
            values = None if topk_weights is None else plain(topk_weights)
            addends = tuple(map(plain, biases))
            out = self._state.empty(torch.bfloat16, handle.num_tokens, self._settings.hidden)
            # The dispatch that the kernel gives back. With poison its rows are overwritten before: `release` does both.
            held = None if handle.finished or self._state.debug_poison else arrived.held_epoch
            late = defer_receive and several
            encoded = isinstance(wire, LogFMT10)
            pushed = encoded or late or self._state.pushes
            over_rows = self._state.over_rows and arrived.held_epoch is not None and not handle.finished
            if pushed and arrived.borrowed and handle.finished:
                raise HandleError(
                    f"rank {self._rank}: {handle} was dispatched with zero_copy=True, so where its rows came from is "
                    "no longer known, which a further combine needs that is deferred or has LogFMT10 rows: use "
                    "zero_copy=False, or combine bfloat16 rows at once"
                )

            returned: torch.Tensor | None = None

            def send() -> None:
                if values is not None:
                    expose_values(self._runtime, values, step)
                seen_at = None
                if encoded:
                    encode_rows(engine, y, arrived.meta, step, self._state.encoded(step.layout))
                elif pushed:
                    seen_at = self._bring(y, arrived, over_rows=over_rows, own=late)
                if late:
                    engine.combine_ready(y, step, seen_at, tell=not encoded, own=True, receive=False, name=name)
                if not late:
                    gather(seen_at)
                elif engine.launch.compiling:
                    gather()

            def gather(seen_at: torch.Tensor | None = None) -> None:
                nonlocal returned
                engine.combine_ready(y, step, seen_at, tell=not encoded, publish=not late, name=name)
                if values is not None:
                    returned = collect_values(self._runtime, step)
                for finish in (False, True) if engine.launch.compiling else (held is not None,):
                    if encoded:
                        combine_encoded(
                            engine, self._state.encoded(step.layout), step, out, weighted=weighted, biases=addends,
                            finish=finish,
                        )  # fmt: skip
                        continue
                    engine.gather(
                        y, step, out, weighted=weighted,
                        returned=self._state.returned_if_taken(step.layout) if pushed else None, biases=addends,
                        finish=finish, by_rank=by_rank,
                    )  # fmt: skip

            biased = len(biases) if self._runtime.sharing else 0
            others_push = over_rows and self._state.returned_if_taken(step.layout) is not None
            kind = (
                "combine", step.layout, weighted, by_rank, encoded, biased, late, pushed, over_rows, others_push,
                values is not None, differentiable,
            )  # fmt: skip
            first = not self._runtime.knows(kind)
            if kind not in self._names:
                what = _what(handle, wire, values is not None, by_rank=by_rank, weighted=weighted)
                self._names[kind] = self._runtime.names.name(what)
            name = self._names[kind]
        except BaseException as error:
            steps.combines.end(epoch)
            steps.refuse(call, error, lambda said: engine.refuse_combine(known, said))
            raise
        if first:
            if several and not arrived.exact and not self._state.capturing:
                try:  # nobody meets for the combine of a void dispatch
                    void = steps.counts(step)[-1]
                    steps.raise_void()
                    if void:
                        raise steps.void(step.bank)
                except (PeerRefused, GroupMismatch):
                    steps.combines.end(epoch)
                    steps.take_back()
                    raise
            try:
                local = f"deferred={late}, {biased} biases, gradients={differentiable}"
                steps.meet(kind, call, f"{self._runtime.names.text(name)}, {local}", send)
            except BaseException as error:
                steps.combines.end(epoch)
                steps.refuse(call, error, lambda said: engine.refuse_combine(known, said))
                raise
        else:
            self._runtime.pass_by(call)
        kept = None
        if differentiable and weighted:
            kept = Kept("combine's input x", y.clone() if self._state.owns(y) else y)
        if late:
            steps.combining.add(step.bank)
        handle._busy = defer_receive
        send()

        def complete() -> dict[str, Any]:
            steps.raise_if_closed("combine")
            if late:
                steps.raise_if_outdated(arrived.restarts)
                gather()
                steps.combining.discard(step.bank)
            steps.combines.end(epoch)
            handle._busy = False
            if held is not None and handle._on_finish is not None:
                handle._on_finish = lambda: steps.dispatches.end(held)  # the kernel has told the peers
            handle.release()
            fields = (out, returned)
            if differentiable:
                fields = self._gradients.tie_combine(handle, x, topk_weights, biases, out, returned, kept)
            made: dict[str, Any] = {"x": fields[0], "topk_weights": fields[1]}
            if arrived.masked:
                return made | {"_later": _LaterOfCombine(steps, step, arrived.masked, by_rank=by_rank)}
            return made | {"_later": Later(self._state.device), "num_missing": 0}

        later = Later(self._state.device) if defer_receive else None
        return record(Combined, complete, defer_receive, _later=later)

    def _bring(self, y: torch.Tensor, arrived: Arrived, *, over_rows: bool, own: bool) -> torch.Tensor:
        """Bring rows to where peers read them, unless they lie there; returns where peers see this rank's."""
        engine, step, places = self._engine, arrived.step, arrived.places
        seen_at = self._state.seen_at(y, step, places)
        if seen_at is None or engine.launch.compiling:
            if over_rows:
                engine.copy_rows(
                    ("output", places), step, (y.view(-1, self._settings.hidden), places.output(step.bank))
                )
            else:
                engine.push(y, arrived.meta, step, self._state.returned(step.layout), own=own)
        if seen_at is None:
            seen_at = places.seen_at[step.bank] if over_rows else self._state.nowhere
        return seen_at

    def _checked(
        self, x: Any, handle: Handle, topk_weights: Any, bias: Any, reduce: Any, wire: Any
    ) -> tuple[torch.Tensor, ...]:
        """The biases."""
        rank, settings = self._rank, self._settings
        _check.choice("reduce", reduce, ("token", "rank"), rank)
        wire = _check.combine_wire(rank, wire, settings.hidden)
        if not isinstance(wire, (BF16, LogFMT10)):
            raise TransportUnavailable(
                f"rank {rank}: on a device the rows of combine travel as bfloat16 or LogFMT10, not {wire.name}"
            )
        if isinstance(wire, LogFMT10) and reduce == "rank" and handle.layout is not Layout.COMPACT:
            raise TransportUnavailable(
                f"rank {rank}: on a device LogFMT10 rows are summed at the token's rank: use reduce='token'"
            )
        dims = self._dims(handle)
        meaning = "{}, as the dispatch of this handle returned"
        _check.tensor(rank, "x", x, (torch.bfloat16,), dims, meaning, self._state.device)
        _check.aligned(rank, "x", x)
        if topk_weights is not None:
            if handle.layout is not Layout.COMPACT:
                raise InvalidArgument(
                    f"rank {rank}: topk_weights can be returned for COMPACT only, not {handle.layout}"
                )
            dims = (handle._arrived.num_rows, settings.num_topk)
            _check.tensor(rank, "topk_weights", topk_weights, (torch.float32,), dims, device=self._state.device)
            _check.aligned(rank, "topk_weights", topk_weights)
        biases = () if bias is None else tuple(bias) if isinstance(bias, (tuple, list)) else (bias,)
        if len(biases) > 2:
            raise InvalidArgument(f"rank {rank}: bias must be one or two tensors, got {len(biases)}")
        for one in biases:
            dims = (handle.num_tokens, settings.hidden)
            _check.tensor(rank, "bias", one, (torch.bfloat16,), dims, device=self._state.device)
            _check.aligned(rank, "bias", one)
        return biases


def _what(handle: Handle, wire: WireFormat | None, returns: bool, *, by_rank: bool, weighted: bool) -> str:
    """What all ranks must have in common."""
    rows = "rank" if by_rank or handle.layout is Layout.COMPACT else "token"
    name, layout = (wire or BF16()).name, handle.layout.value
    return f"{name}, a row per {rows}, layout={layout}, weighted={weighted}, weights={returns}"


class _LaterOfCombine(Later):
    def __init__(self, steps: DeviceSteps, step: Step, masked: tuple[int, ...], *, by_rank: bool) -> None:
        super().__init__(steps.engine.state.device)
        self._steps, self._step, self._masked, self._by_rank = steps, step, masked, by_rank

    def num_missing(self) -> int:
        number = num_missing(self._steps.engine.state, self._step, self._masked, by_rank=self._by_rank)
        return self._steps.read(number.to(torch.int32).repeat(2))[0]  # two, for which the kernel is there
