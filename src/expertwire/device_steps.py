"""What dispatch and combine calls on a device share: which steps are open, and what a handle keeps of its dispatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from expertwire.call import check_handle
from expertwire.errors import (
    BufferClosed,
    GroupMismatch,
    HandleError,
    PeerMasked,
    PeerRefused,
    PeerTimeout,
    TransportUnavailable,
)
from expertwire.handle import Handle
from expertwire.kernels.backward import combine_values, width_of
from expertwire.kernels.engine import Places, Step
from expertwire.kernels.masking import forget
from expertwire.kernels.names import UNKNOWN
from expertwire.kernels.part import Part
from expertwire.kernels.runtime import DeviceRuntime, Said, refusal
from expertwire.protocols.epoch_signal import REFUSED
from expertwire.protocols.lane import Lane
from expertwire.steps import LaneSteps


@dataclass
class Arrived:
    """What a handle keeps of its dispatch: its step, the shape of the rows that combine will be given, and where they
    came from; and which ranks were masked then, after how many restarts."""

    step: Step
    num_rows: int
    exact: bool
    held_epoch: int | None  # of a zero-copy dispatch, whose bank is busy until the handle is finished
    meta: torch.Tensor  # what came with the rows
    places: Places  # where they are, if `held_epoch`
    borrowed: bool  # `meta` is the window's, which later dispatches write to once the handle is finished
    masked: tuple[int, ...]
    restarts: int


class Later:
    """Makes fields of a record when they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: int | None = None
        if device.type != "cpu":
            self._stream = torch._C._cuda_getCurrentRawStream(device.index)

    def event(self) -> torch.cuda.Event | None:
        """Of what has been launched on the current stream so far."""
        if self._stream is None:
            return None
        stream = torch.cuda.ExternalStream(self._stream, device=self._device)  # type: ignore[no-untyped-call]
        made: torch.cuda.Event = stream.record_event()
        return made


class DeviceSteps:
    """Which bank a call runs in, and what went wrong.

    A rank whose arguments are illegal makes the step void on all ranks (`kernels.refuse`), and so do ranks that make
    different calls (`kernels.names`). Peers learn of it in that call if it waits for the device, and else at a later
    one, which is then not made. Not all of them make the combine of a void dispatch, therefore: on the device it does
    nothing, and is not counted there. Combines are counted here to see which of them hold memory of this rank.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self.runtime, self.engine, self.rank = runtime, runtime.engine, runtime.engine.rank
        num_banks = self.engine.state.num_banks
        self.dispatches = LaneSteps(Lane("dispatch", num_banks), self.rank)
        self.combines = LaneSteps(Lane("combine", num_banks), self.rank)
        self.combining: set[int] = set()  # banks of dispatches with a deferred combine
        self.handles: Iterable[Handle] = ()  # of dispatches that may be in flight
        self._failure: BaseException | None = None
        self._combines = (0, 0)  # since this dispatch, so many

    @property
    def failure(self) -> BaseException | None:
        """What makes the buffer unusable. Raises it when it is first noticed."""
        if self._failure is None and self.runtime.has_failed():
            with self.fatal():
                self.runtime.raise_if_failed()
        return self._failure

    @contextmanager
    def fatal(self) -> Iterator[None]:
        """Errors in here leave the ranks out of step, unless they can agree to restart."""
        try:
            with self.masking():
                yield
        except PeerMasked:
            raise
        except BaseException as error:
            self._failure = error
            raise

    # -- ranks that do not come ----------------------------------------------------------------------------------

    @contextmanager
    def masking(self) -> Iterator[None]:
        """In here, a rank that does not come is masked, if it may be: PeerMasked in place of PeerTimeout."""
        try:
            yield
        except PeerTimeout as error:
            self.mask_lost(error)
            raise

    def mask_lost(self, cause: PeerTimeout | None = None) -> None:
        """PeerMasked if ranks can be masked, and one did not come (`cause`), has left, or wants to agree: all ranks
        that come restart, without those that have left."""
        if self.engine.state.capturing or not (self.runtime.must_agree() or (cause and self.runtime.masks)):
            return
        try:
            peers, epoch = self.runtime.mask(self.dispatches.epoch)
        except PeerTimeout as error:  # one that is there does not come to agree
            self._failure = error
            raise
        self.dispatches.restart(epoch)
        self.combines.restart(self.combines.epoch)
        self.combining.clear()
        self._combines = (0, 0)
        for handle in self.handles:
            handle.finished, handle._busy, handle._on_finish = True, False, None
            if handle._arrived is not None:
                forget(handle._arrived.step, handle._arrived.meta, set(peers))
        what = "a rank was late, but has come: nobody is masked"
        if peers:
            what = f"rank(s) {', '.join(map(str, peers))} have left and are masked from now on"
        raise PeerMasked(
            f"rank {self.rank}: {what}. What was in flight is void on all ranks, that is, all since synchronize() last "
            "returned: dispatch again.", peers,
        ) from cause  # fmt: skip

    def meet(self, kind: tuple[object, ...], call: int, what: str, prepare: Callable[[], None]) -> None:
        """`DeviceRuntime.meet`, if this is the first call of a kind."""
        if self.runtime.knows(kind):
            self.runtime.pass_by(call)
            return
        with self.masking():
            self.runtime.meet(kind, call, what, prepare)

    def arrived(self, owner: object, handle: Any) -> Arrived:
        """What a handle keeps, which a call of the buffer `owner` can use now."""
        check_handle(self.rank, owner, handle)
        found: Arrived = handle._arrived
        self.raise_if_outdated(found.restarts)
        return found

    def raise_if_closed(self, lane: str) -> None:
        """Before a call of the lane receives."""
        if self.runtime.closed:
            raise BufferClosed(f"rank {self.rank}: this {lane} was not received before its buffer was closed")

    def raise_if_outdated(self, restarts: int) -> None:
        """`restarts`: how many there had been when this handle was made."""
        if restarts != self.runtime.restarts:
            raise HandleError(
                f"rank {self.rank}: this dispatch is void, since PeerMasked was raised after it: a rank that took part "
                "in it had not come in time; dispatch again"
            )

    # -- void steps ----------------------------------------------------------------------------------------------

    def call(self, lane: str) -> int:
        """The number of a call that begins, for `Meeting`: combines are counted from the last dispatch on, since not
        every rank makes those of a void one."""
        epoch = self.dispatches.epoch
        if lane == "dispatch":
            return epoch << 8
        number = min(self._combines[1] + 1 if self._combines[0] == epoch else 1, 255)
        self._combines = (epoch, number)
        return epoch << 8 | number

    def take_back(self) -> None:
        """The combine that `call` has just numbered is not made."""
        epoch, number = self._combines
        self._combines = (epoch, number - 1)

    def refuse(self, call: int, error: BaseException, refuse: Callable[[int], None]) -> None:
        """This rank does not make this call: `refuse` declares the step void on all ranks, and what is said in it. Not
        in a capture, where it does not happen."""
        if self.engine.num_ranks == 1 or self.engine.state.capturing:
            return
        if isinstance(error, PeerMasked):
            return
        if isinstance(error, PeerTimeout) or not isinstance(error, Exception):
            self._failure = error
            return
        if self.runtime.meeting is not None and not isinstance(error, PeerRefused):
            self.runtime.meeting.refuse(call)
        refuse(UNKNOWN if isinstance(error, GroupMismatch) else REFUSED)

    def void(self, bank: int) -> PeerRefused | GroupMismatch:
        """The error of the dispatch in this bank, which the device found void."""
        self.mask_lost()
        return self._why_void(self.runtime.said(bank, "dispatch"), "this dispatch", "The next call works as usual.")

    def raise_void(self, hint: str = "The call that raises this was not made: make it again.") -> None:
        """PeerRefused or GroupMismatch, once, for earlier steps of which only the device knew. Void dispatches are
        finished."""
        if not self.runtime.has_news() or self.engine.state.capturing:
            return
        self.mask_lost()
        news = self.runtime.news()
        if not news:
            return
        banks = {said.bank for said in news if said.lane == "dispatch"}
        for handle in [h for h in self.handles if not h.finished and h._arrived is not None]:
            if handle._arrived.step.bank in banks and self.counts(handle._arrived.step)[-1]:
                handle._finish()
        raise self._why_void(news, " and ".join(sorted({f"an earlier {said.lane}" for said in news})), hint)

    def _why_void(self, news: Sequence[Said], what: str, hint: str) -> PeerRefused | GroupMismatch:
        """A refusal goes first: what a rank says in its place is no call."""
        refused = sorted({said.peer for said in news if said.theirs == REFUSED})
        if refused:
            return PeerRefused(f"{refusal(self.rank, refused, what)} {hint}", refused)
        names, first = self.runtime.names, news[0]
        others = ", ".join(
            f"on rank {said.peer} ({names.differ(said.own, said.theirs)})"
            for said in news if (said.lane, said.bank) == (first.lane, first.bank)
        )  # fmt: skip
        return GroupMismatch(
            f"rank {self.rank}: {what} is void: ranks call {first.lane} differently: here ({names.text(first.own)}), "
            f"{others}. All ranks must pass the same settings. {hint}"
        )

    def raise_if_capturing(self) -> None:
        """Before a call that waits for the device."""
        if self.engine.state.capturing:
            raise TransportUnavailable(
                f"rank {self.rank}: this waits for the device, which a graph cannot capture: use counts='device', and "
                "synchronize() after the capture"
            )

    def counts(self, step: Step) -> tuple[list[int], list[int], list[int], int, int]:
        """`DeviceState.known` of what the step has counted; waits for the device."""
        return self.engine.state.known(self.read(step.counts), step.void_at)

    def read(self, values: torch.Tensor | Part) -> list[int]:
        """int32 values of the device; waits for it."""
        self.raise_if_capturing()
        with self.fatal():
            return self.runtime.read(values)

    def synchronize(self) -> None:
        """Wait for the device, and raise what calls have met there."""
        self.raise_if_capturing()
        with self.fatal():
            self.runtime.synchronize()
        self.raise_void("The next call works as usual.")


def expose_values(runtime: DeviceRuntime, values: torch.Tensor, step: Step) -> None:
    """Put values [rows, width] float32 where peers can read them, after the next `combine_ready`."""
    engine = runtime.engine
    memory = engine.state.values("combine", step.layout, step.alignment, values.shape[1])
    copy = (values, memory.payload(step.bank))
    runtime.launch(("values", step.layout), lambda: engine.copy_rows(("values", memory), step, copy))


def collect_values(runtime: DeviceRuntime, step: Step, *, alone: bool = False) -> torch.Tensor:
    """[T, K] float32: what the ranks of the rows have exposed for each slot, 0 where nothing was selected. Between
    `combine_ready` and the gather of rows, unless `alone`."""
    engine, state = runtime.engine, runtime.engine.state
    memory = state.values("combine", step.layout, step.alignment, width_of(engine, step.layout))
    out = state.empty(torch.float32, *step.topk_idx.shape)
    kind = ("combine values", step.layout, alone)
    runtime.launch(kind, lambda: combine_values(engine, memory, step, out, alone=alone))
    return out


def plain(t: torch.Tensor) -> torch.Tensor:
    """Without a history that autograd goes back through."""
    return t.detach() if t.requires_grad else t


def aligned(t: torch.Tensor) -> torch.Tensor:
    """Contiguous, from a multiple of 16 bytes on: kernels are compiled for that."""
    t = t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t
