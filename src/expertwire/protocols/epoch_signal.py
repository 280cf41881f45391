"""The epoch signal: one growing 8-byte word per (writer, reader, purpose).

    word = epoch << 24 | (count + 1)        40 bits of epoch, 24 bits of count + 1

A reader waits for `epoch >= e`, so a word is never cleaned, a late word of an older step satisfies nobody, and a count
of zero is an ordinary message. The count field 0 is left for REFUSED: "this rank rejected its own arguments for this
step; the step is void, but it has happened", which keeps the epochs of all ranks in step after an error.
"""

from __future__ import annotations

EPOCH_BITS = 40
COUNT_BITS = 24
MAX_COUNT = (1 << COUNT_BITS) - 2
REFUSED = -1


def pack(epoch: int, count: int) -> int:
    """The signal word.

    >>> hex(pack(epoch=3, count=0)), hex(pack(epoch=3, count=REFUSED))
    ('0x3000001', '0x3000000')
    """
    assert 0 < epoch < 1 << EPOCH_BITS, epoch
    assert REFUSED <= count <= MAX_COUNT, count
    return epoch << COUNT_BITS | (count + 1)


def unpack(word: int) -> tuple[int, int]:
    """(epoch, count) of a word; (0, -1) for a word that was never written."""
    return word >> COUNT_BITS, (word & (1 << COUNT_BITS) - 1) - 1
