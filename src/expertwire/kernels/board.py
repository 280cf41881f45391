"""Short messages between the ranks of a host, some of which may end at any time.

In every round each rank that is left says something, and all of them get the same answers: a message stays when its
writer has ended, and is looked for once more after the writer is known to have ended. So what a rank makes of the
answers, all make of them.

A rank has two pages, used in turns: a peer may have gone on to the next round, but not to the one after, which it
cannot leave before this rank has come to it.
"""

from __future__ import annotations

import pickle
import time
import zlib
from typing import Any, NamedTuple, Protocol

from expertwire.errors import MissedSignal, PeerTimeout

PAGE_BYTES = 1 << 16  # 72 ranks may offer memory to each other
BOARD_BYTES = 2 * PAGE_BYTES
_HEADER_BYTES = 24  # round, length, checksum of both and the message


class HostWindows(Protocol):
    """A host transport: one small window per rank, and what is known about the peers."""

    rank: int
    num_ranks: int
    windows: list[Any]

    def alive(self, peer: int) -> bool | None: ...

    def raise_if_aborted(self) -> None: ...

    def close(self) -> None: ...


class Answers(NamedTuple):
    """values [R], None of a rank that has ended; and those that ended before they had said anything."""

    values: list[Any]
    ended: set[int]


class Board:
    """One rank's end of it: pages begin at byte `first` of every window."""

    def __init__(self, transport: HostWindows, first: int) -> None:
        self._transport = transport
        self._pages = [window[first : first + BOARD_BYTES].reshape(2, PAGE_BYTES) for window in transport.windows]
        self._round = 0

    def exchange(self, value: object, without: set[int], timeout_s: float | None, phase: str) -> Answers:
        """What everybody says in this round. Nobody waits for ranks that ended, nor for those in `without`. If another
        one does not come, PeerTimeout, which names the `phase`."""
        transport, began = self._transport, time.monotonic()
        self._round += 1
        self._write(pickle.dumps(value))
        values: list[Any] = [None] * transport.num_ranks
        ended: set[int] = set()
        missing = [peer for peer in range(transport.num_ranks) if peer not in without]
        while True:
            for peer in list(missing):
                gone = transport.alive(peer) is False  # asked first: what it has written is there then
                message = self._read(peer)
                if message is not None:
                    values[peer] = pickle.loads(message)
                elif gone:
                    ended.add(peer)
                else:
                    continue
                missing.remove(peer)
            if not missing:
                return Answers(values, ended)
            transport.raise_if_aborted()
            waited = time.monotonic() - began
            if timeout_s is not None and waited > timeout_s:
                missed = [MissedSignal(peer, self._round, 0, 0, transport.alive(peer)) for peer in missing]
                raise PeerTimeout(transport.rank, phase, missed, waited, "All ranks that are left must come to it.")
            time.sleep(min(0.001, waited / 8))

    def _write(self, message: bytes) -> None:
        assert len(message) <= PAGE_BYTES - _HEADER_BYTES, f"a message of {len(message)} bytes"
        page = self._pages[self._transport.rank][self._round % 2]
        page[_HEADER_BYTES : _HEADER_BYTES + len(message)].data[:] = message
        page[:_HEADER_BYTES].view("int64")[:] = self._round, len(message), self._checksum(message)

    def _read(self, peer: int) -> bytes | None:
        page = self._pages[peer][self._round % 2]
        number, length, checksum = page[:_HEADER_BYTES].view("int64").tolist()
        if number != self._round or not 0 <= length <= PAGE_BYTES - _HEADER_BYTES:
            return None
        message: bytes = page[_HEADER_BYTES : _HEADER_BYTES + length].tobytes()
        return message if self._checksum(message) == checksum else None  # else it is still being written

    def _checksum(self, message: bytes) -> int:
        return zlib.crc32(message, self._round)
