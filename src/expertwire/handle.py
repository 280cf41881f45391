"""What dispatch and combine return, and the handle that ties them together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from expertwire.errors import HandleError
from expertwire.layouts.receive import Layout


class Handle:
    """The routing of one dispatch: combine takes its destinations and weights from here, never from the caller.

    In flight from its dispatch until its first combine has finished (or `release()`); at most `max_in_flight` handles
    of a buffer may be. Afterwards it still serves for cached dispatches and further combines.
    """

    def __init__(
        self, owner: object, number: int, layout: Layout, num_tokens: int, topk_weights: torch.Tensor | None
    ) -> None:
        self.layout = layout
        self.num_tokens = num_tokens
        self.topk_weights = topk_weights
        self.finished = False
        self._owner = owner
        self._number = number  # of its dispatch, the same on all ranks
        self._busy = False
        self._routing: Any = None
        self._arrangement: Any = None
        self._arrived: Any = None
        self._on_finish: Callable[[], None] | None = None
        self._edge: torch.Tensor | None = None

    def release(self) -> None:
        """Declare the handle finished without a combine. Zero-copy views of its dispatch become invalid. HandleError
        while a deferred combine, which finishes it, has not received yet."""
        if self._busy:
            raise HandleError(f"{self} is in use by a combine that has not received yet: call its hook() first")
        self._finish()

    def _finish(self) -> None:
        if not self.finished:
            self.finished = True
            if self._on_finish is not None:
                self._on_finish()
                self._on_finish = None

    def __repr__(self) -> str:
        state = "finished" if self.finished else "in flight"
        return f"Handle({self.layout.value}, {self.num_tokens} tokens, {state})"


class _Record:
    """Some fields are made when they are asked for, by a function of `_later` that is called like them; of a deferred
    record most are not there yet."""

    def __getattr__(self, name: str) -> Any:
        make = None if name.startswith("_") else getattr(self.__dict__.get("_later"), name, None)
        if make is None:
            raise _not_yet(self, name)
        self.__dict__[name] = make()
        return self.__dict__[name]

    def __repr__(self) -> str:
        x, handle = self.__dict__.get("x"), self.__dict__.get("handle")
        rows = "deferred" if x is None else f"x {list(x.shape)} {x.dtype}"
        return f"{type(self).__name__}({f'{handle.layout.value}, ' if handle else ''}{rows})"


@dataclass(frozen=True, eq=False, repr=False)
class Dispatched(_Record):
    """What one rank received. R ranks, L local experts, K top-k slots, H hidden.

    x                           COMPACT, EXPERT_MAJOR: [rows, H]; EXPERT_SLOTS: [L, R * capacity, H]. bfloat16, or the
                                payload of the wire format, or of the pre-quantised input
    sf                          scale factors of x ([rows, S], EXPERT_SLOTS [L, R * capacity, S]), None for bfloat16
    topk_idx                    COMPACT: [rows, K] int32 local expert ids, -1 for experts elsewhere and unused rows
    topk_weights                COMPACT: [rows, K] float32, 0 where topk_idx is -1; None if dispatch was given none
    row_source                  EXPERT_*: [rows, 3] (EXPERT_SLOTS [L, R * capacity, 3]) int32: source rank, token, slot;
                                -1 for padding and unused rows
    num_tokens_per_expert       [L] int32: selections per local expert
    num_padded_tokens_per_expert [L] int32: the same rounded up to `expert_alignment` (EXPERT_SLOTS: R * capacity)
    expert_offsets              [L + 1] int32: first row of each expert's group; None for COMPACT
    num_tokens_per_rank         [R] int32: rows received from each source rank (one per token)
    num_..._list                the same as host lists; None with counts="device"
    handle                      for combine and cached dispatch
    event                       on a GPU, a torch.cuda.Event that is complete when this call's work is, for other
                                streams to wait for: recorded on the call's stream when it is first asked for. None on
                                the CPU, where work is done at return
    hook                        with `defer_receive`: call it to receive; it completes this record and returns it
    missing_ranks               masked ranks, whose rows are not here

    Of a deferred record only `handle`, `event` (of the send half) and `hook` can be used before `hook()` has filled in
    the rest.
    """

    x: torch.Tensor
    sf: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    row_source: torch.Tensor | None
    num_tokens_per_expert: torch.Tensor
    num_padded_tokens_per_expert: torch.Tensor
    expert_offsets: torch.Tensor | None
    num_tokens_per_rank: torch.Tensor
    num_tokens_per_expert_list: list[int] | None
    num_padded_tokens_per_expert_list: list[int] | None
    num_tokens_per_rank_list: list[int] | None
    handle: Handle
    event: torch.cuda.Event | None
    hook: Callable[[], Dispatched] | None = None
    missing_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class Combined(_Record):
    """What one rank got back for its T tokens.

    x               [T, H] bfloat16
    topk_weights    [T, K] float32, if combine was given `topk_weights` (COMPACT); 0 where nothing was selected
    num_missing     contributions that masked ranks did not deliver: rows for reduce="token", else (token, rank) pairs
                    (on a GPU, where ranks are masked, asking for it waits for the device)
    event, hook     as in `Dispatched`
    """

    x: torch.Tensor
    topk_weights: torch.Tensor | None
    event: torch.cuda.Event | None
    num_missing: int
    hook: Callable[[], Combined] | None = None


def _not_yet(record: object, name: str) -> AttributeError:
    """Dataclass fields are missing only while the receive half has not run."""
    kind = type(record).__name__
    if name in {field.name for field in fields(type(record))}:  # type: ignore[arg-type]
        return AttributeError(f"this {kind} was deferred and has no {name} yet: call its hook() first")
    return AttributeError(f"{kind} has no attribute {name!r}")
