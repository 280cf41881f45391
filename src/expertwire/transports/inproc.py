"""Ranks as threads of one process: windows are plain memory that all of them see."""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from expertwire.errors import MissedSignal, PeerLost, TransportUnavailable, WorldAborted
from expertwire.transports.base import Bootstrap, Transport, require_memory

_NORESERVE = 0x4000 if sys.platform.startswith("linux") else 0  # pages count when touched; not in Python's mmap


class Turns(Protocol):
    """What a simulated network needs of the ranks' threads: one runs at a time (`transports.schedule`)."""

    def join(self, rank: int) -> None: ...

    def leave(self, rank: int) -> None: ...

    def stop(self, rank: int, ready: Callable[[], bool]) -> bool: ...


class SimulatedNetwork(Protocol):
    @property
    def turns(self) -> Turns: ...


class Crew:
    """The shared state of the ranks of one `World.run`."""

    def __init__(self, num_ranks: int, fabric: SimulatedNetwork | None = None) -> None:
        self.num_ranks = num_ranks
        self.fabric = fabric
        self.running = [True] * num_ranks
        self.failure: tuple[int, BaseException] | None = None
        self._changed = threading.Condition()
        self._slots: list[Any] = [None] * num_ranks
        self._arrived = 0
        self._round = 0
        self._result: list[Any] = []

    def leave(self, rank: int, error: BaseException | None = None) -> None:
        """The function of `rank` has ended; -1 is the caller of `World.run`. The first error ends all ranks."""
        with self._changed:
            if rank >= 0:
                self.running[rank] = False
            if error is not None and self.failure is None:
                self.failure = (rank, error)
            self._changed.notify_all()

    def raise_if_aborted(self, rank: int) -> None:
        if self.failure is not None and self.failure[0] != rank:
            raise WorldAborted(f"rank {rank} stops because rank {self.failure[0]} raised {self.failure[1]!r}")

    def all_gather(self, rank: int, value: object) -> list[Any]:
        with self._changed:
            self._slots[rank] = value
            self._arrived += 1
            mine = self._round
            if self._arrived == self.num_ranks:
                self._result, self._slots = self._slots, [None] * self.num_ranks
                self._arrived, self._round = 0, mine + 1
                self._changed.notify_all()
        while self._round == mine:
            self.raise_if_aborted(rank)
            gone = [r for r, running in enumerate(self.running) if not running]
            if gone and self._round == mine:  # looked at last: who completes the round may return at once
                missed = [MissedSignal(peer, mine + 1, 0, 0, False) for peer in gone]
                raise PeerLost(rank, "all_gather", missed, 0.0, f"Rank(s) {gone} of this World have already returned.")
            self._pause(rank, mine)
        return list(self._result)

    def _pause(self, rank: int, round_: int) -> None:
        """Wait until the round is over, or something else has changed."""
        if self.fabric is not None:
            self.fabric.turns.stop(rank, lambda: self._round != round_ or self.failure is not None)
            return
        with self._changed:
            if self._round == round_:
                self._changed.wait(timeout=1.0)


class Rank:
    """One rank of a World: what `World.run` hands to your function, accepted wherever a group is."""

    def __init__(self, crew: Crew, rank: int) -> None:
        self.crew = crew
        self.rank = rank
        self.num_ranks = crew.num_ranks

    def all_gather(self, value: object) -> list[Any]:
        """Every rank's value, in rank order. Collective."""
        return self.crew.all_gather(self.rank, value)

    def barrier(self) -> None:
        """Wait until every rank of the World is here."""
        self.all_gather(None)

    def __repr__(self) -> str:
        return f"Rank({self.rank} of {self.num_ranks})"


class Inproc(Transport):
    name = "inproc"
    mechanism = "stores, then a release store of the word; acquire load"
    profile = "host"

    def __init__(self, bootstrap: Bootstrap, window_bytes: int, output_bytes: int) -> None:
        assert isinstance(bootstrap, Rank)
        self.rank, self.num_ranks = bootstrap.rank, bootstrap.num_ranks
        self._crew = bootstrap.crew
        require_memory(window_bytes)
        # np.zeros maps fresh pages that cost nothing until they are touched.
        memory = bootstrap.all_gather((np.zeros(window_bytes, np.uint8), _pages(output_bytes)))
        self.windows, self.outputs = [window for window, _ in memory], [output for _, output in memory]

    @classmethod
    def unavailable(cls) -> str | None:
        return None

    def alive(self, peer: int) -> bool | None:
        return self._crew.running[peer]

    def raise_if_aborted(self) -> None:
        self._crew.raise_if_aborted(self.rank)


def _pages(num_bytes: int) -> NDArray[np.uint8]:
    if num_bytes == 0:
        return np.empty(0, np.uint8)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except OSError as error:
        raise TransportUnavailable(f"cannot map outputs of {num_bytes} bytes: {error}") from error
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
