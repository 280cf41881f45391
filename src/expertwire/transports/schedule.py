"""Turn-taking for a simulated group: one rank runs at a time, and who runs next is a choice of the schedule.

Ranks are threads that stop wherever they would wait. At each stop the schedule chooses between the ranks that could go
on and the events of the network. Choices come from one seeded generator, and time advances only when nothing else can
happen, so that a run is a function of its seed: it replays exactly.
"""

from __future__ import annotations

import random
import threading
import zlib
from collections import deque
from collections.abc import Callable
from typing import Protocol

TICK_S = 0.25
LOG_LENGTH = 60


class Events(Protocol):
    """The network, as the schedule sees it."""

    def happen(self, choose: random.Random) -> bool:
        """Let one event happen; False if none can."""
        ...


class Turns:
    """The turns of `num_ranks` threads. `patience` is how often ranks go first while events are pending: 0.5 is fair,
    near 1 lets the network lag behind as far as it may."""

    def __init__(self, num_ranks: int, seed: int, events: Events, patience: float) -> None:
        self.random = random.Random(seed)
        self.time_s = 0.0
        self.choices = 0
        self.digest = 0
        self.log: deque[tuple[float, object]] = deque(maxlen=LOG_LENGTH)
        self._events, self._patience = events, patience
        self._ready: dict[int, Callable[[], bool]] = {}
        self._joined = 0
        self._num_ranks = num_ranks
        self._current = -1
        self._changed = threading.Condition()

    def join(self, rank: int) -> None:
        """Called first by each rank's thread: all start together, one at a time."""
        with self._changed:
            self._ready[rank] = lambda: True
            self._joined += 1
            if self._joined == self._num_ranks:
                self._next()
            self._await(rank)

    def leave(self, rank: int) -> None:
        """The rank's function has ended."""
        with self._changed:
            self._ready.pop(rank, None)
            if self._ready:
                self._next()

    def stop(self, rank: int, ready: Callable[[], bool]) -> bool:
        """Give the turn away until `ready()`. False if time advanced instead, since nobody could go on."""
        with self._changed:
            self._ready[rank] = ready
            self._next()
            self._await(rank)
        return ready()

    def _await(self, rank: int) -> None:
        while self._current != rank:
            self._changed.wait()
        del self._ready[rank]

    def _next(self) -> None:
        """Choose who runs next, letting the network make progress in between."""
        while True:
            able = sorted(rank for rank, ready in self._ready.items() if ready())
            if able and self.random.random() < self._patience:
                return self._turn(self.random.choice(able))
            if self._events.happen(self.random):
                self._note(1)
                continue
            if able:
                return self._turn(self.random.choice(able))
            self.time_s += TICK_S
            return self._turn(self.random.choice(sorted(self._ready)))

    def _turn(self, rank: int) -> None:
        if rank != self._current:
            self.log.append((self.time_s, rank))
        self._note(2 + rank)
        self._current = rank
        self._changed.notify_all()

    def _note(self, what: int) -> None:
        self.choices += 1
        self.digest = zlib.crc32(what.to_bytes(4, "little"), self.digest)
