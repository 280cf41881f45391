"""The host runtime: executes protocols with real words and real rows, on windows that this process can address.

Protocol halves are generators of operations (`expertwire.protocols`); `run` carries each operation out. What a put
writes is decided by the caller of the half, `dispatch.py` or `combine.py` of this package.
"""

from __future__ import annotations

import functools
import os
import struct
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from expertwire.errors import (
    BufferClosed,
    GroupMismatch,
    MissedSignal,
    PeerLost,
    PeerRefused,
    PeerTimeout,
    TransportBroken,
)
from expertwire.host.halves import Act, Halves, record
from expertwire.host.kernels import Array, Kernels
from expertwire.host.outputs import Outputs
from expertwire.layouts.window import GUARD_BYTES, HEADER_BYTES, WindowLayout
from expertwire.ordering.operations import Region, Wait, Word
from expertwire.protocols.epoch_signal import REFUSED, pack, unpack
from expertwire.protocols.lane import Lane, ring

_GUARD = 0xA5
_POISON = 0xFF
_FIRST_PATIENCE = (200, 4000, 10)
_CROWDED_PATIENCE = (100, 200, 10)  # more ranks than cores: the awaited rank may need this core
_PATIENCE = (0, 0, 100)
# More than a rank's share of a last-level cache: such rows have left it before anybody reads them.
_STREAM_FROM_BYTES = 4 << 20

_HEADER_PREFIX = struct.Struct("<qH")  # epoch, bytes of text
# Flags, in the first byte of a header. ANNOUNCES: the rows follow when they have a place; DEFERS: the writer gives no
# places itself (`protocols.rendezvous`).
NEEDS_GRAD, ANNOUNCES, DEFERS = 1, 2, 4


ABSENT = -2  # stands for the count of a masked rank
Segments = list[tuple[Array, int]]  # (byte offsets in the reader's window, bytes at each of them)
Put = Callable[[int, Region, int], Segments]


class Header(NamedTuple):
    """What travels in front of the rows of a put: the step's epoch and the settings of the call, packed, which must be
    equal on all ranks; and flags, which need not.

    Backward passes are collective: if one rank needs gradients, all take part.
    """

    settings: bytes
    flags: int

    @staticmethod
    def make(epoch: int, text: str, *, needs_grad: bool = False) -> Header:
        raw = text.encode()[: HEADER_BYTES - 1 - _HEADER_PREFIX.size]
        return Header(_HEADER_PREFIX.pack(epoch, len(raw)) + raw, NEEDS_GRAD if needs_grad else 0)

    @staticmethod
    def unpack(settings: bytes) -> tuple[int, str]:
        """The epoch and text of packed settings."""
        epoch, length = _HEADER_PREFIX.unpack_from(settings)
        return epoch, settings[_HEADER_PREFIX.size : _HEADER_PREFIX.size + length].decode(errors="replace")


class Windows(Protocol):
    """What the engine needs of a transport."""

    rank: int
    num_ranks: int
    windows: list[NDArray[np.uint8]]
    outputs: list[NDArray[np.uint8]]

    def alive(self, peer: int) -> bool | None: ...

    def raise_if_aborted(self) -> None: ...

    def close(self) -> None: ...


class HostRuntime:
    """One rank's end of a group. Not thread-safe: one rank, one thread at a time."""

    hands_over = False  # whether puts are handed to a transport, which then needs to know their segments

    def __init__(
        self,
        layout: WindowLayout,
        transport: Windows,
        kernels: Kernels,
        *,
        timeout_s: float | None,
        mask_peers: bool,
        debug_poison: bool,
    ) -> None:
        self.kernels = kernels
        self.layout = layout
        self.transport = transport
        self.rank, self.num_ranks = transport.rank, transport.num_ranks
        *self._peers, _ = ring(self.rank, self.num_ranks)
        self.timeout_s = timeout_s
        self.mask_peers = mask_peers
        self.debug_poison = debug_poison
        self.masked: set[int] = set()
        self.base = base = [window.ctypes.data for window in transport.windows]
        # Where words, and the headers, routing and rows of regions, lie: the same few again and again.
        self._address = functools.cache(lambda owner, word: base[owner] + layout.word(*word))
        self.header_at = functools.cache(lambda region: layout.header(*region))
        self.routing_at = functools.cache(lambda region: layout.dispatch_routing(region.bank, region.writer))
        self.rows_at = functools.cache(lambda region: layout.rows(*region))
        crowded = self.num_ranks > len(os.sched_getaffinity(0))
        self._first_patience = _CROWDED_PATIENCE if crowded else _FIRST_PATIENCE
        self.closed = False
        self.wait_s = [0.0] * self.num_ranks
        self._told_itself: dict[Word, tuple[int, int]] = {}  # epoch and count of words of this rank to itself
        self._halves: dict[str, list[Halves]] = {}
        self._excluded = [layout.word("excluded", peer) // 8 for peer in range(self.num_ranks)]
        self.bytes_of = [memoryview(window) for window in transport.windows]  # type: ignore[arg-type]
        self.own = transport.windows[self.rank]
        self._words = self.bytes_of[self.rank][: layout.words_bytes].cast("q")  # to look at without an order
        self.output_base = [output.ctypes.data for output in transport.outputs]
        self.outputs = Outputs(transport.outputs[self.rank])
        if debug_poison:
            self._poison_window()

    def move(self, source: Array, destination: Array, num_bytes: int) -> None:
        """Copy `num_bytes` from every address in `source` to the one in `destination`."""
        self.kernels.move_rows(source, destination, num_bytes, self.streams(source.size, num_bytes))

    def scatter(
        self, peer: int, table: Array, tokens: Array, first: int, stride: int, num_bytes: int, num_rows: int
    ) -> Segments:
        """Copy the rows at the addresses in `table` [n, K] (0 = none) to their (token, slot) records in the window of
        `peer`, which begin at byte `first`."""
        stream = self.streams(num_rows, num_bytes)
        self.kernels.scatter_rows(table, tokens, self.base[peer] + first, stride, num_bytes, stream)
        if not self.hands_over:
            return []
        row, slot = np.nonzero(table)
        return [(first + stride * (tokens[row].astype(np.int64) * table.shape[1] + slot), num_bytes)]

    def streams(self, num_rows: int, num_bytes: int) -> bool:
        """Whether so many rows of so many bytes had better bypass the caches."""
        return num_rows * num_bytes >= _STREAM_FROM_BYTES

    # -- words ---------------------------------------------------------------------------------------------------

    def publish(self, peer: int, word: Word, epoch: int, count: int = 0) -> None:
        """Set a word in the window of `peer` (release)."""
        if peer == self.rank:
            self._told_itself[word] = epoch, count
        else:
            self.kernels.publish(self._address(peer, word), pack(epoch, count))

    def deliver(self, peer: int, segments: Segments, word: Word, epoch: int, count: int) -> None:
        """The rows of a put are written: set the word that vouches for them. Where `base[peer]` is the peer's window
        itself, the segments are there already."""
        self.publish(peer, word, epoch, count)

    def peek(self, word: Word) -> int:
        """The value of the own window's word now (acquire)."""
        return self.kernels.read_word(self._address(self.rank, word))

    def watch(self, word: Word, wanted: int, patience: tuple[int, int, int]) -> int:
        """The value of the own window's word (acquire), once it is >= `wanted` or patience runs out."""
        return self.kernels.wait_word(self._address(self.rank, word), wanted, *patience)

    def clock(self) -> float:
        """Seconds, for time-outs."""
        return time.perf_counter()

    def has_left(self, peer: int) -> bool:
        """The peer will signal no more: it closed its buffer, goes on without this rank, or its process is gone."""
        if self.peek(Word("leaving", peer)) or self.peek(Word("excluded", peer)):
            return True
        return self.transport.alive(peer) is False

    def mask(self, peer: int) -> None:
        """Skip this peer from now on, and let it know, so that it does not write here any more."""
        self.masked.add(peer)
        self.publish(peer, Word("excluded", self.rank), 1)

    @property
    def masked_ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.masked)) if self.masked else ()

    def _usable(self, peer: int) -> bool:
        if self._words[self._excluded[peer]] and peer not in self.masked:
            if not self.mask_peers:
                raise PeerLost(
                    self.rank, "send", [], 0.0, f"Rank {peer} timed out waiting for this rank and goes on without it."
                )
            self.mask(peer)
        return peer not in self.masked

    # -- protocol steps ------------------------------------------------------------------------------------------

    def halves(self, lane: Lane, epoch: int) -> Halves:
        """What step `epoch` of a lane does."""
        recorded = self._halves.get(lane.name)
        if recorded is None:
            recorded = self._halves[lane.name] = record(lane, self.rank, self.num_ranks)
        return recorded[epoch % lane.num_banks]

    def run(
        self,
        phase: str,
        half: Iterable[Act],
        put: Put | None = None,
        *,
        epoch: int = 0,
        counts: Sequence[int] | None = None,
        since: float | None = None,
        asked: Collection[int] | None = None,
    ) -> list[int]:
        """Carry out one half of a protocol; returns the last count that each rank signalled, ABSENT where it waited for
        none or the rank is masked.

        `put(peer, region, count)` writes rows into a peer's memory before their signal, and says where. A half of
        `halves` needs its `epoch` and, to put anything, its `counts`. Time-outs count from `since` on the clock, by
        default from the first wait that blocks, and name the late ones of the `asked` peers, all by default.
        """
        if self.closed:
            raise BufferClosed(f"rank {self.rank}: this buffer is closed; there is nothing left to send or receive")
        heard, own, masked = [ABSENT] * self.num_ranks, self.rank, self.masked
        for kind, peer, word, region, count, when in half:
            if peer in masked:
                continue
            when += epoch
            if kind is Wait:
                seen, signalled = self._told_itself[word] if peer == own else unpack(self.peek(word))
                if seen < when:
                    since = self.clock() if since is None else since
                    seen, signalled = unpack(self._wait(phase, word, when, since, asked))
                    if not seen:
                        continue
                heard[peer] = signalled
            elif region is None:
                self.publish(peer, word, when, count)
            elif peer == own or self._usable(peer):
                assert put is not None
                if counts is not None:
                    count = counts[count]
                self.deliver(peer, put(peer, region, count), word, when, count)
        return heard

    def _wait(self, phase: str, word: Word, epoch: int, since: float, asked: Collection[int] | None) -> int:
        """The word once it has reached `epoch`; 0 if its writer had to be masked."""
        peer, wanted, began = word.writer, pack(epoch, REFUSED), self.clock()
        assert peer != self.rank, f"{word} would be waited for before it is signalled"
        patience = self._first_patience
        self.transport.raise_if_aborted()  # also where all peers go on, and no wait would take long
        while self.watch(word, wanted, patience) < wanted:
            patience = _PATIENCE
            self.transport.raise_if_aborted()
            lost = self.has_left(peer)
            if lost and self.peek(word) >= wanted:  # it may have signalled just before it left
                break
            waited = self.clock() - since
            if lost or (self.timeout_s is not None and waited > self.timeout_s):
                if not self.mask_peers:
                    self._give_up(phase, word, epoch, waited, lost, asked)
                self.mask(peer)
                return 0
        self.wait_s[peer] += self.clock() - began
        return self.peek(word)

    def _give_up(
        self, phase: str, word: Word, epoch: int, waited: float, lost: bool, asked: Collection[int] | None
    ) -> None:
        """Raise with every peer that has not signalled, not only the one that was waited for."""
        missed = []
        for peer in range(self.num_ranks) if asked is None else asked:
            if peer == self.rank:
                continue
            seen = self.peek(Word(word.purpose, peer, word.bank))
            if seen < pack(epoch, REFUSED) and peer not in self.masked and (not lost or self.has_left(peer)):
                alive, closed = self.transport.alive(peer), bool(self.peek(Word("leaving", peer)))
                missed.append(MissedSignal(peer, epoch, *unpack(seen), alive, closed))
        if lost:
            late = "A rank that closed its buffer may have given up on this one: see what it raised. "
            hint = late if any(m.closed for m in missed) else ""
            hint += "Create the buffer with on_timeout='mask' to go on without such ranks, or restart the group."
            raise PeerLost(self.rank, phase, missed, waited, hint)
        hint = "If the ranks are only slow (compiling, loading), raise buf.timeout_s; on_timeout='mask' skips them."
        raise PeerTimeout(self.rank, phase, missed, waited, hint)

    # -- headers -------------------------------------------------------------------------------------------------

    def write_header(self, peer: int, offset: int, settings: bytes, flags: int) -> Segments:
        """Describe a put in front of its rows: how the writer understood this call, or why it refused it."""
        if peer == self.rank:  # a rank understands itself
            return []
        window, end = self.bytes_of[peer], offset + 1 + len(settings)
        window[offset] = flags
        window[offset + 1 : end] = settings
        return [(np.array([offset]), end - offset)] if self.hands_over else []

    def check_headers(
        self, phase: str, epoch: int, counts: list[int], first: int, apart: int, header: Header
    ) -> tuple[int, dict[int, int]]:
        """Raise if a peer refused this step, or called it with other settings. Otherwise the flags that any rank set,
        and those of each peer. A peer's header lies at byte first + peer * apart."""
        own, any_flags, flags = self.bytes_of[self.rank], header.flags, {}
        length = 1 + len(header.settings)
        for peer in self._peers:
            if counts[peer] != ABSENT:
                at = first + peer * apart
                seen = own[at : at + length].tobytes()
                if not seen.endswith(header.settings):
                    self._raise_for_headers(phase, epoch, counts, first, apart, header.settings)
                flags[peer] = seen[0]
                any_flags |= seen[0]
        return any_flags, flags

    def _raise_for_headers(
        self, phase: str, epoch: int, counts: list[int], first: int, apart: int, settings: bytes
    ) -> None:
        texts, (_, expected) = {}, Header.unpack(settings)
        for peer in self._peers:
            if counts[peer] == ABSENT:
                continue
            at = first + peer * apart
            seen, texts[peer] = Header.unpack(self.own[at + 1 : at + HEADER_BYTES].tobytes())
            if seen != epoch:
                there = f"of {phase} {seen}" if seen else "from before the first call"
                raise TransportBroken(
                    f"rank {self.rank}: rank {peer} has signalled {phase} {epoch}, but the header of its rows is "
                    f"{there}: this transport lets a signal overtake its data",
                    [peer],
                )
        refused = [peer for peer in texts if counts[peer] == REFUSED]
        if refused:
            reasons = "; ".join(texts[peer] for peer in refused)
            raise PeerRefused(
                f"rank {self.rank}: this {phase} is void, since a peer refused its arguments ({reasons}). "
                "The next call works as usual.",
                refused,
            )
        for peer, text in texts.items():
            if text != expected:
                raise GroupMismatch(
                    f"rank {self.rank}: ranks call {phase} differently: here ({expected}), "
                    f"on rank {peer} ({text}). All ranks must pass the same settings."
                )

    # -- debugging -----------------------------------------------------------------------------------------------

    def _poison_window(self) -> None:
        self.own[self.layout.words_bytes :] = _POISON
        for offset in self.layout.guards():
            self.own[offset : offset + GUARD_BYTES] = _GUARD

    def broken_guards(self) -> list[int]:
        """Byte offsets of guards that somebody wrote to (with debug_poison only)."""
        guards = self.layout.guards() if self.debug_poison else ()
        return [at for at in guards if (self.own[at : at + GUARD_BYTES] != _GUARD).any()]

    def poison(self, offset: int, num_bytes: int) -> None:
        """Overwrite consumed rows with NaN, so that nobody reads them again unnoticed (with debug_poison only)."""
        assert self.debug_poison
        self.own[offset : offset + num_bytes] = _POISON

    # -- leaving -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Tell the peers, forget the windows. Does not wait for anybody."""
        for peer in range(self.num_ranks):
            self.publish(peer, Word("leaving", self.rank), 1)
        self.closed = True
        self.bytes_of, self.own, self.output_base = [], np.empty(0, np.uint8), []
        self.base.clear()
        self._address.cache_clear()
        self._words = memoryview(b"")
        self.outputs.close()
        self.transport.close()
