"""A lane: one stream of steps in which every rank sends rows to every rank. Dispatch is one lane, combine another.

The writer signals READY when its rows are there, the reader signals DONE when it has read them. A lane has
`num_banks` copies of its rows, and bank `epoch % num_banks` may be written again only after the reader's DONE word says
`epoch - num_banks`: reuse is an edge in the program, not a hope about timing. Both words exist once per bank. With one
READY word the count of step e would be overwritten by step e + 1, which its writer may send before e is read; with one
DONE word, steps finished out of order would free a bank that is still in use.

DONE is a word of its own, sent when the receive half ends. It cannot ride on a later message, since with deferred
receives there may be none: after (send, send, receive, receive) the third send would wait for a word that rides on the
third send of its peer.

In dispatch, rows are one per (token, destination rank), in token order. In combine, rows go back to where the tokens
came from; a row's place there is (token, top-k position), so that ascending places are the order of summation.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from expertwire.ordering.operations import Load, Operation, PutSignal, Region, Signal, Wait, Word

Step = Generator[Operation, int | None, None]


# The same few regions and words again and again.
_region = lru_cache(maxsize=4096)(Region)


@lru_cache(maxsize=4096)
def _word(lane: str, purpose: str, writer: int, bank: int) -> Word:
    return Word(f"{lane}_{purpose}", writer, bank)


@dataclass(frozen=True, slots=True)
class Lane:
    """`name` names the rows and is the prefix of the two signal purposes."""

    name: str
    num_banks: int

    def bank(self, epoch: int) -> int:
        return epoch % self.num_banks

    def rows(self, epoch: int, writer: int) -> Region:
        return _region(self.name, epoch % self.num_banks, writer)

    def ready(self, epoch: int, writer: int) -> Word:
        return _word(self.name, "ready", writer, epoch % self.num_banks)

    def done(self, epoch: int, reader: int) -> Word:
        return _word(self.name, "done", reader, epoch % self.num_banks)


@lru_cache(maxsize=1024)
def ring(rank: int, num_ranks: int) -> tuple[int, ...]:
    """All ranks, beginning with the next one, so that ranks do not all write to the same peer at once.

    >>> ring(1, 4)
    (2, 3, 0, 1)
    """
    return tuple((rank + 1 + i) % num_ranks for i in range(num_ranks))


def send(lane: Lane, rank: int, epoch: int, counts: Sequence[int]) -> Step:
    """Send half: put `counts[peer]` rows into every peer's window (also the own one) and signal READY."""
    rows, ready = lane.rows(epoch, rank), lane.ready(epoch, rank)
    for peer in ring(rank, len(counts)):
        if epoch > lane.num_banks:
            yield Wait(lane.done(epoch, peer), epoch - lane.num_banks)
        yield PutSignal(peer, rows, counts[peer], ready, epoch)


def receive(lane: Lane, rank: int, epoch: int, num_ranks: int) -> Step:
    """Receive half: wait for every peer, then read its rows. All counts are known before the first row is read, so
    that every row has its final place. A masked peer (answer None) has no rows."""
    counts = {}
    for peer in ring(rank, num_ranks):
        counts[peer] = yield Wait(lane.ready(epoch, peer), epoch)
    for peer in range(num_ranks):
        count = counts[peer]
        if count is not None and count > 0:
            yield Load(lane.rows(epoch, peer), count)


def finish(lane: Lane, rank: int, epoch: int, num_ranks: int) -> Step:
    """Tell every writer that its rows of this step were read, or that their views were given back."""
    done = lane.done(epoch, rank)
    for peer in ring(rank, num_ranks):
        yield Signal(peer, done, epoch)
