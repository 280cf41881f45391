"""Where ranks meet on the host: before the first call of a kind, whose kernels are compiled and whose memory is shared.

A rank that refuses the call does not come, and says so: it is not waited for, then or later. Every rank has two words
in host memory that all of them see: how far it has come, and the last call it refused. Calls are numbered in the same
way on all ranks, and the numbers grow.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from expertwire.errors import MissedSignal, PeerLost, PeerTimeout

MEETING_BYTES = 64


class HostWindows(Protocol):
    """A host transport: one small window per rank, and what is known about the peers."""

    rank: int
    num_ranks: int
    windows: list[Any]

    def alive(self, peer: int) -> bool | None: ...

    def raise_if_aborted(self) -> None: ...

    def close(self) -> None: ...


class Meeting:
    """One rank's end of it. A call has two stages: 0 before anything is done, 1 when it is ready to go on."""

    def __init__(self, transport: HostWindows) -> None:
        self._transport = transport
        self._words = [window.view("int64")[:2] for window in transport.windows]  # [2 * call + stage, refused call]

    def refuse(self, call: int) -> None:
        """This rank does not take part in the call. Waits for nobody."""
        self._words[self._transport.rank][1] = call

    def arrive(self, call: int, stage: int, timeout_s: float | None) -> list[int]:
        """Wait until every peer has come to this stage of this call, or refused it; returns those who did."""
        transport, place = self._transport, 2 * call + stage
        self._words[transport.rank][0] = place
        began = time.monotonic()
        while True:
            missing = [
                peer for peer, (come, refused) in enumerate(self._words) if come < place and refused < call
            ]  # fmt: skip
            if not missing:
                break
            transport.raise_if_aborted()
            gone = [peer for peer in missing if transport.alive(peer) is False]
            waited = time.monotonic() - began
            if gone or (timeout_s is not None and waited > timeout_s):
                missed = [MissedSignal(p, call >> 8, 0, 0, transport.alive(p)) for p in gone or missing]
                hint = "This was the first call of its kind, which all ranks prepare together."
                error = PeerLost if gone else PeerTimeout
                raise error(transport.rank, "meeting on the host", missed, waited, hint)
            time.sleep(min(0.001, waited / 8))
        # Nobody leaves stage 0 without this rank, unless the call is void: who is further has refused, or saw who did.
        void = [
            peer for peer, (come, refused) in enumerate(self._words)
            if refused == call or come < place or (stage == 0 and come > place + 1)
        ]  # fmt: skip
        named = [peer for peer in void if self._words[peer][1] == call]
        return named or void

    def alive(self, peer: int) -> bool | None:
        return self._transport.alive(peer)

    def close(self) -> None:
        self._words = []
        self._transport.close()
