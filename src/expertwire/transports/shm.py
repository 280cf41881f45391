"""Ranks as processes of one host: windows and outputs are anonymous memory files that the peers map.

The files have no name: peers open them through the owner's /proc/<pid>/fd while the owner still holds them open. When
all have mapped them the descriptors are closed, so a crash at any moment leaves nothing behind, and the size of the
shared-memory file system (64 MB in many containers) does not matter.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import sys
import weakref
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertwire.errors import TransportUnavailable
from expertwire.transports.base import Bootstrap, Transport, require_memory

_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True)
class _Offer:
    """What a rank tells its peers: where its window and its outputs are, or why it has none."""

    host: str
    pid: int
    descriptors: tuple[int, ...]
    error: str = ""


def _host_identity() -> str:
    """Equal on two ranks exactly when they can see each other's /proc entries."""
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        return f"{boot_id.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def _create(num_bytes: int) -> int:
    descriptor = os.memfd_create("expertwire")
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def _map(descriptor: int, num_bytes: int) -> NDArray[np.uint8]:
    if num_bytes == 0:
        return np.empty(0, np.uint8)
    memory = mmap.mmap(descriptor, num_bytes)
    if num_bytes >= 4 * _HUGE_PAGE_BYTES:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()


class Shm(Transport):
    name = "shm"
    mechanism = "stores to shared memory, then a release store of the word; acquire load"
    profile = "host"

    def __init__(self, bootstrap: Bootstrap, window_bytes: int, output_bytes: int) -> None:
        require_memory(window_bytes)
        self.rank, self.num_ranks = bootstrap.rank, bootstrap.num_ranks
        self.windows, self.outputs = [], []
        sizes = (window_bytes, output_bytes)
        own: list[int] = []
        opened: list[int] = []
        self._processes: list[int] = []
        self._release = weakref.finalize(self, _close_all, self._processes)
        try:
            try:
                own.extend(_create(num_bytes) for num_bytes in sizes)
                offer = _Offer(_host_identity(), os.getpid(), tuple(own))
            except OSError as error:
                offer = _Offer("", os.getpid(), (), f"cannot create memory of {sizes} bytes: {error}")
            offers: list[_Offer] = bootstrap.all_gather(offer)
            problem = self._attach(offers, opened, sizes, own)
            problems = bootstrap.all_gather(problem)
        finally:
            for descriptor in [*opened, *own]:
                os.close(descriptor)
        failed = {rank: reason for rank, reason in enumerate(problems) if reason}
        if failed:
            self.close()
            raise TransportUnavailable(f"shm transport: {'; '.join(f'rank {r}: {why}' for r, why in failed.items())}")

    def _attach(self, offers: list[_Offer], opened: list[int], sizes: tuple[int, int], own: list[int]) -> str:
        """Map every peer's memory; returns what went wrong, or an empty string."""
        hosts = {offer.host for offer in offers if not offer.error}
        if offers[self.rank].error:
            return offers[self.rank].error
        if len(hosts) > 1:
            return "the ranks do not share one host and pid namespace; shm needs both"
        for peer, offer in enumerate(offers):
            if offer.error:
                return f"rank {peer} has no window"
            try:
                for mapped, number, num_bytes in zip(
                    (self.windows, self.outputs), offer.descriptors, sizes, strict=True
                ):
                    descriptor = number
                    if peer != self.rank:
                        descriptor = os.open(f"/proc/{offer.pid}/fd/{number}", os.O_RDWR)
                        opened.append(descriptor)
                    mapped.append(_map(descriptor, num_bytes))
                self._processes.append(os.pidfd_open(offer.pid))
            except (OSError, ValueError) as error:
                return f"cannot map the memory of rank {peer} (pid {offer.pid}, {sizes} bytes): {error}"
        return ""

    @classmethod
    def unavailable(cls) -> str | None:
        if not sys.platform.startswith("linux"):
            return "needs Linux (memfd and pidfd); use ew.World for ranks in one process"
        if not hasattr(os, "pidfd_open"):
            return "this Python was built without os.pidfd_open; use a build for Linux 5.3 or newer"
        return None

    def alive(self, peer: int) -> bool | None:
        ended = select.poll()
        ended.register(self._processes[peer], select.POLLIN)
        return not ended.poll(0)

    def end(self, peer: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._processes[peer], signal.SIGKILL)

    def close(self) -> None:
        super().close()
        self._release()
