"""What a transport provides: windows, and what can be known about the other side."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from expertwire.errors import TransportUnavailable


class Bootstrap(Protocol):
    """How ranks find each other before there are windows."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def all_gather(self, value: object) -> list[Any]:
        """Every rank's value, in rank order. Collective."""
        ...


def require_memory(window_bytes: int) -> None:
    """Raise if a window exceeds the memory of this machine: the kernel would hand it out, and fail at its use."""
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if window_bytes > machine_bytes:
        raise TransportUnavailable(
            f"a window of {window_bytes} bytes per rank does not fit: this machine has {machine_bytes} of memory. "
            "Lower num_max_tokens_per_rank or max_in_flight; Buffer.size_hint tells the size"
        )


class Transport(ABC):
    """One mapped window per rank: `windows[r]` is rank r's memory, `windows[rank]` the own one, zero at the start.

    `outputs[r]` is rank r's memory for received rows, page-aligned; no pages are taken before they are touched.
    `mechanism` says how put_signal keeps its promise here, `profile` under which rules that was model-checked.
    """

    name: ClassVar[str]
    mechanism: ClassVar[str]
    profile: ClassVar[str]

    rank: int
    num_ranks: int
    windows: list[NDArray[np.uint8]]
    outputs: list[NDArray[np.uint8]]

    @classmethod
    @abstractmethod
    def unavailable(cls) -> str | None:
        """None if this transport works on this machine, else the reason and the remedy."""

    @abstractmethod
    def alive(self, peer: int) -> bool | None:
        """False once the peer can no longer act; None where that cannot be known."""

    def end(self, peer: int) -> None:
        """End the process of a peer. Returns before it has ended, which `alive` tells."""
        raise TransportUnavailable(f"ranks of transport {self.name!r} have no process that could be ended")

    def raise_if_aborted(self) -> None:
        """Raise if something outside the group's own protocol has ended this group."""
        return

    def close(self) -> None:
        """Forget the windows. Memory stays mapped while a tensor still looks at it. Never communicates."""
        self.windows, self.outputs = [], []
