"""Numbered steps on the two lanes of a buffer: the send half at once, the receive half when it is asked for.

Every rank makes the same steps in the same order, forward and backward passes alike; the number of a step is its epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from expertwire.errors import GroupMismatch, InFlightError, PeerRefused
from expertwire.formats import WireFormat
from expertwire.host.combine import Rows
from expertwire.host.dispatch import Routing, WireRows, refuse
from expertwire.host.engine import Dtypes, HostEngine, Received
from expertwire.host.placed import Arrangement, Placed
from expertwire.host.runtime import Header
from expertwire.protocols.lane import Lane


@dataclass(slots=True)
class Sums:
    """What combine brought: x [T, hidden], routed weights [T, K] or None, rows that masked ranks did not send."""

    x: torch.Tensor
    weights: torch.Tensor | None
    num_missing: int
    needs_grad: bool


class LaneSteps:
    """Epochs of one lane, and which of them this rank has not finished."""

    def __init__(self, lane: Lane, rank: int) -> None:
        self.lane = lane
        self._rank = rank
        self.epoch = 0
        self._open: set[int] = set()
        self.void: list[int] = []  # refused here; peers may still be writing their rows

    def begin(self) -> int:
        """The next epoch. Raises InFlightError if this rank itself still holds the bank that it needs."""
        epoch = self.epoch + 1
        name, held = self.lane.name, epoch - self.lane.num_banks
        if held in self._open:
            raise InFlightError(
                f"rank {self._rank}: {name} {held} is unfinished, and with max_in_flight={self.lane.num_banks} {name} "
                f"{epoch} needs its memory. Call its hook(), or combine or release() its zero-copy handle first, or "
                "create the buffer with a larger max_in_flight."
            )
        self.epoch = epoch
        self._open.add(epoch)
        return epoch

    def end(self, epoch: int) -> None:
        self._open.discard(epoch)

    def restart(self, epoch: int) -> None:
        """Nothing is open, and this was the last epoch."""
        self.epoch = epoch
        self._open.clear()

    def cancel(self, epoch: int) -> None:
        """The step that began last has not happened, on any rank."""
        self.end(epoch)
        self.epoch = epoch - 1


class _Fatal:
    """A context in which any error leaves the ranks out of step: it is remembered as the `failure` of the steps."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._steps.failure = error


class Steps:
    """The collective steps of one buffer. After an error in the middle of a step, `failure` says which."""

    def __init__(self, engine: HostEngine) -> None:
        self.engine = engine
        self.dispatches = LaneSteps(engine.dispatch_lane, engine.rank)
        self.combines = LaneSteps(engine.combine_lane, engine.rank)
        self.failure: BaseException | None = None
        self._fatal = _Fatal(self)

    def synchronize(self) -> None:
        """Calls are done when they return."""

    def refuse(self, steps: LaneSteps, epoch: int, reason: str) -> None:
        """This rank's arguments are illegal: declare the step void on all ranks."""
        self._settle(steps)
        with self._fatal:
            refuse(self.engine.runtime, steps.lane, epoch, reason)
        steps.end(epoch)
        steps.void.append(epoch)

    def _settle(self, steps: LaneSteps) -> None:
        """Give the windows of void steps back, once every peer has written its rows of them: before that, a slow peer's
        rows could land on those of a later step. Not done in `refuse`, which waits for nobody."""
        while steps.void:
            epoch, runtime = steps.void.pop(), self.engine.runtime
            with self._fatal:
                runtime.run(f"{steps.lane.name} receive", runtime.halves(steps.lane, epoch).receive, epoch=epoch)
            (self.end_dispatch if steps is self.dispatches else self.end_combine)(epoch)

    def end_dispatch(self, epoch: int) -> None:
        """The windows of this step may be reused; after close() there are none."""
        if self.engine.runtime.closed:
            return
        with self._fatal:
            self.engine.finish_dispatch(epoch)
        self.dispatches.end(epoch)

    def end_combine(self, epoch: int) -> None:
        with self._fatal:
            self.engine.finish_combine(epoch)
        self.combines.end(epoch)

    def dispatch(
        self,
        epoch: int,
        routing: Routing,
        rows: WireRows,
        header: Header,
        arrangement: Arrangement,
        *,
        known: Placed | None = None,
        send_routing: bool = True,
        defers: bool = False,
        dtypes: Dtypes = (torch.bfloat16, None),
        zero_unused: bool = False,
        hold_bank: bool = False,
    ) -> Callable[[], Received]:
        """Send rows along `routing`; the result receives them as tensors of `dtypes`, at once unless the caller
        `defers` that. `hold_bank` leaves the step open (zero-copy views)."""
        if self.dispatches.void:
            self._settle(self.dispatches)
        row = self.engine.dispatch_row(rows.payload_bytes, rows.sf_bytes)
        with self._fatal:
            sent = self.engine.send_dispatch(
                epoch, routing, rows, row, header, arrangement.layout, cached=not send_routing, defers=defers
            )

        def receive() -> Received:
            try:
                received = self.engine.receive_dispatch(
                    epoch,
                    row,
                    header,
                    arrangement,
                    known=known,
                    send_routing=send_routing,
                    sent=None if defers else sent,
                    dtypes=dtypes,
                    zero_unused=zero_unused,
                    reuse_bank=hold_bank,
                )
            except (PeerRefused, GroupMismatch):
                self.end_dispatch(epoch)
                raise
            except BaseException as error:
                self.failure = error
                raise
            if not hold_bank:
                self.end_dispatch(epoch)
            return received

        return receive

    def combine(
        self,
        epoch: int,
        y: torch.Tensor,
        placed: Placed,
        routing: Routing,
        header: Header,
        wire: WireFormat,
        *,
        rows: Rows,
        weighted: bool = False,
        weights: torch.Tensor | None = None,
        biases: Sequence[torch.Tensor] = (),
        keep_own: bool = True,
    ) -> Callable[[], Sums]:
        """Send y back along `placed`; the result receives and sums. `weighted` by the weights of `routing`."""
        if self.combines.void:
            self._settle(self.combines)
        with self._fatal:
            outgoing, keep = self.engine.send_combine(
                epoch, y, placed, header, wire, rows=rows, weighted=weighted, weights=weights, keep_own=keep_own
            )

        def receive() -> Sums:
            nonlocal keep
            try:
                x, returned, num_missing, needs_grad = self.engine.receive_combine(
                    epoch,
                    routing,
                    header,
                    wire,
                    rows=rows,
                    weighted=weighted and rows == "token",
                    biases=biases,
                    return_weights=weights is not None,
                    own=(placed.arrivals, outgoing) if keep_own else None,
                )
            except (PeerRefused, GroupMismatch):
                self.end_combine(epoch)
                raise
            except BaseException as error:
                self.failure = error
                raise
            keep = None
            self.end_combine(epoch)
            return Sums(x, returned, num_missing, needs_grad)

        return receive
