"""The host runtime over a transport that cannot store into its peers' memory: puts are handed over as segments."""

from __future__ import annotations

from typing import Protocol, cast

from expertwire.host.runtime import HostRuntime, Segments, Windows
from expertwire.ordering.operations import Word
from expertwire.protocols.epoch_signal import pack


class RemoteWindows(Windows, Protocol):
    """`windows[peer]` is a staging copy of the peer's window, from which `put_signal` sends."""

    def put_signal(self, peer: int, segments: Segments, word: int, value: int) -> None:
        """Send segments, and a signal that sets the word at byte offset `word` once they are there."""
        ...

    def wait(self, word: int, wanted: int) -> int:
        """The own window's word (acquire), once it is >= `wanted` or the transport's patience runs out."""
        ...

    def clock(self) -> float: ...


class RemoteRuntime(HostRuntime):
    """Words and rows for the own rank are local stores, as in every engine; the rest goes through the transport."""

    hands_over = True

    @property
    def _remote(self) -> RemoteWindows:
        return cast("RemoteWindows", self.transport)

    def publish(self, peer: int, word: Word, epoch: int, count: int = 0) -> None:
        self.deliver(peer, [], word, epoch, count)

    def deliver(self, peer: int, segments: Segments, word: Word, epoch: int, count: int) -> None:
        if peer == self.rank:
            super().publish(peer, word, epoch, count)
        else:
            place = self.layout.word(word.purpose, word.writer, word.bank)
            self._remote.put_signal(peer, segments, place, pack(epoch, count))

    def watch(self, word: Word, wanted: int, patience: tuple[int, int, int]) -> int:
        return self._remote.wait(self.layout.word(word.purpose, word.writer, word.bank), wanted)

    def clock(self) -> float:
        return self._remote.clock()
