"""The errors that expertwire raises, and what each one means.

ExpertWireError
 +-- InvalidArgument        you passed something illegal; nothing was sent          (also a ValueError)
 +-- GroupMismatch          the ranks of one group disagree                         (also a ValueError)
 +-- PeerError              another rank is the cause                               (also a RuntimeError)
 |    +-- PeerRefused       it rejected its own arguments; this call is void on all ranks
 |    +-- PeerMasked        it did not come, and is masked if it has left; what was in flight is void on all ranks
 |    +-- TransportBroken   its signal came before its data, which no transport may allow
 |    +-- PeerTimeout       it did not signal in time                               (also a TimeoutError)
 |         +-- PeerLost     its process has ended, or it closed its buffer
 +-- HandleError            a handle used where it does not belong
 |    +-- InFlightError     more calls unfinished than `max_in_flight` allows
 +-- BufferClosed           the buffer was closed on this rank
 +-- TransportUnavailable   what was asked for does not work on this machine
 +-- WorldAborted           another rank of this World failed first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ExpertWireError(Exception):
    """Base of everything that expertwire raises on purpose."""


class InvalidArgument(ExpertWireError, ValueError):
    """An argument breaks a rule. The message names the rank, the argument, the rule and the value seen."""


class GroupMismatch(ExpertWireError, ValueError):
    """Ranks of one group were created with different settings, or make different calls. The message names what differs
    and every value. A call is then void on all ranks, and the next one works."""


class PeerError(ExpertWireError, RuntimeError):
    """Another rank is the cause of this failure; `peers` lists the ranks."""

    def __init__(self, message: str, peers: Sequence[int]) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class PeerRefused(PeerError):
    """A peer rejected its own arguments for this call, so the call is void on every rank. The next call works."""


class PeerMasked(PeerError):
    """A rank did not come in time (`on_timeout="mask"` or "end" on a GPU). `peers` have left, and are masked from now
    on; there are none if the rank was late, but came. Every dispatch and combine that was in flight on any rank is
    void; the next call works."""


class TransportBroken(PeerError):
    """A signal arrived before the data that it vouches for, which the transport's contract forbids."""


@dataclass(frozen=True, slots=True)
class MissedSignal:
    """One signal that did not arrive.

    `expected_epoch` is the step waited for; `seen_epoch` and `seen_count` are decoded from the word that is there
    (`seen_epoch` 0: nothing ever arrived). `alive` is None where the peer's process cannot be observed; `closed`: it
    closed its buffer, which a process that lives may do as well.
    """

    peer: int
    expected_epoch: int
    seen_epoch: int
    seen_count: int
    alive: bool | None
    closed: bool = False

    def __str__(self) -> str:
        seen = f"epoch {self.seen_epoch} (count {self.seen_count})" if self.seen_epoch else "nothing yet"
        state = {True: "process alive", False: "process gone", None: "process state unknown"}[self.alive]
        state = f"closed its buffer, {state}" if self.closed else state
        return f"rank {self.peer}: expected epoch {self.expected_epoch}, seen {seen}, {state}"


class PeerTimeout(PeerError, TimeoutError):
    """Peers did not signal within `timeout_s`. `missed` holds one record per signal that did not arrive."""

    def __init__(self, rank: int, phase: str, missed: Sequence[MissedSignal], waited_s: float, hint: str) -> None:
        self.rank, self.phase, self.missed, self.waited_s = rank, phase, tuple(missed), waited_s
        details = "; ".join(str(m) for m in missed)
        super().__init__(
            f"rank {rank} waited {waited_s:.1f} s in phase '{phase}' for rank(s) {[m.peer for m in missed]}: "
            f"{details}. {hint}",
            [m.peer for m in missed],
        )


class PeerLost(PeerTimeout):
    """A peer can no longer signal: its process has ended or it closed its buffer. Raised without waiting longer."""


class HandleError(ExpertWireError, RuntimeError):
    """A handle was used with another buffer, twice at once, or after its buffer was closed."""


class InFlightError(HandleError):
    """More dispatches are unfinished than `max_in_flight` allows."""


class BufferClosed(ExpertWireError, RuntimeError):
    """The buffer was closed on this rank."""


class TransportUnavailable(ExpertWireError, RuntimeError):
    """The requested transport, device or engine does not work here; the message says why and what to do."""


class WorldAborted(ExpertWireError, RuntimeError):
    """Another rank of this World raised first; `World.run` raises that first error."""
