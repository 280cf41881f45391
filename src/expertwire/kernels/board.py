"""Short messages between the ranks of a host, some of which may leave at any time: end, or close their buffer.

In every round each rank that is left says something, and all of them get the same answers: a message stays when its
writer has left, and is looked for once more after the writer is known to have left. So what a rank makes of the
answers, all make of them. A process that does not come can be ended, which changes nothing of this.

A rank has two pages, used in turns: a peer may have gone on to the next round, but not to the one after, which it
cannot leave before this rank has come to it.
"""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from expertwire.errors import MissedSignal, PeerTimeout

PAGE_BYTES = 1 << 16  # 72 ranks may offer memory to each other
BOARD_BYTES = 2 * PAGE_BYTES
_ENDING_S = 10.0  # until a process that was told to end is gone
_HEADER_BYTES = 24  # round, length, checksum of both and the message


class HostWindows(Protocol):
    """A host transport: one small window per rank, and what is known about the peers."""

    rank: int
    num_ranks: int
    windows: list[Any]

    def alive(self, peer: int) -> bool | None: ...

    def end(self, peer: int) -> None:
        """End the process of a peer."""
        ...

    def raise_if_aborted(self) -> None: ...

    def close(self) -> None: ...


class Answers(NamedTuple):
    """values [R], None of a rank that has left; and those that left before they had said anything."""

    values: list[Any]
    left: set[int]


class Board:
    """One rank's end of it: pages begin at byte `first` of every window."""

    def __init__(self, transport: HostWindows, first: int, has_left: Callable[[int], bool]) -> None:
        self._transport, self._has_left = transport, has_left
        self._pages = [window[first : first + BOARD_BYTES].reshape(2, PAGE_BYTES) for window in transport.windows]
        self._round = 0

    def exchange(
        self, value: object, without: set[int], timeout_s: float | None, phase: str, hint: str, *,
        end_late: bool = False,
    ) -> Answers:  # fmt: skip
        """What everybody says in this round. Nobody waits for ranks that left, nor for those in `without`. If another
        one does not come in time its process is ended, if `end_late`; else PeerTimeout with `phase` and `hint`."""
        transport, began = self._transport, time.monotonic()
        self._round += 1
        self._write(pickle.dumps(value))
        values: list[Any] = [None] * transport.num_ranks
        left: set[int] = set()
        missing = [peer for peer in range(transport.num_ranks) if peer not in without]
        while True:
            for peer in list(missing):
                gone = self._has_left(peer)  # asked first: what it has written is there then
                message = self._read(peer, self._round)
                if message is not None:
                    values[peer] = pickle.loads(message)
                elif gone:
                    left.add(peer)
                else:
                    continue
                missing.remove(peer)
            if not missing:
                return Answers(values, left)
            transport.raise_if_aborted()
            waited = time.monotonic() - began
            if timeout_s is not None and waited > timeout_s:
                if end_late:
                    for peer in missing:
                        transport.end(peer)
                    end_late, timeout_s = False, timeout_s + _ENDING_S
                    continue
                missed = [MissedSignal(peer, self._round, 0, 0, transport.alive(peer)) for peer in missing]
                raise PeerTimeout(transport.rank, phase, missed, waited, hint)
            time.sleep(min(0.001, waited / 8))

    def next_of(self, peer: int) -> object:
        """What a peer has said in the round to come, None if it has not come to it."""
        message = self._read(peer, self._round + 1)
        return None if message is None else pickle.loads(message)

    def _write(self, message: bytes) -> None:
        assert len(message) <= PAGE_BYTES - _HEADER_BYTES, f"a message of {len(message)} bytes"
        page = self._pages[self._transport.rank][self._round % 2]
        page[_HEADER_BYTES : _HEADER_BYTES + len(message)].data[:] = message
        page[:_HEADER_BYTES].view("int64")[:] = self._round, len(message), _checksum(message, self._round)

    def _read(self, peer: int, round_: int) -> bytes | None:
        page = self._pages[peer][round_ % 2]
        number, length, checksum = page[:_HEADER_BYTES].view("int64").tolist()
        if number != round_ or not 0 <= length <= PAGE_BYTES - _HEADER_BYTES:
            return None
        message: bytes = page[_HEADER_BYTES : _HEADER_BYTES + length].tobytes()
        return message if _checksum(message, round_) == checksum else None  # else it is still being written


def _checksum(message: bytes, round_: int) -> int:
    return zlib.crc32(message, round_)
