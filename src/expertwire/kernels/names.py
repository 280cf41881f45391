"""The name of a call, which every word of it carries, so that ranks which make different calls find out.

A word's count field is free on a device, where counts travel in a table: 23 bits of it say which call this is.

    14 bits   a hash of what must be alike on all ranks: layout, rows, weights
     9 bits   whose routing: the low bits of the number of the dispatch that made it, which kernels add

Two texts have the same hash once in 2^14 times; routings are told apart unless a multiple of 2^9 dispatches lies
between them.

>>> names = CallNames()
>>> name = names.name("rows of 16 bytes")
>>> name % (1 << NUMBER_BITS), names.text(name | 5), names.text(UNKNOWN)
(0, 'rows of 16 bytes', 'the first call of a kind that others do not prepare')
"""

from __future__ import annotations

import zlib

NUMBER_BITS = 9
_TEXTS = (1 << 14) - 1
UNKNOWN = (1 << 23) - 1  # no text has this hash


class CallNames:
    """Those that this rank has given, to know them again when a peer says them."""

    def __init__(self) -> None:
        self._texts = {UNKNOWN >> NUMBER_BITS: "the first call of a kind that others do not prepare"}

    def name(self, text: str) -> int:
        """The name of a call with this text, as kernels take it."""
        found = zlib.crc32(text.encode()) % _TEXTS
        self._texts[found] = text
        return found << NUMBER_BITS

    def text(self, said: int) -> str:
        """What the count field of a word says."""
        return self._texts.get(said >> NUMBER_BITS, "a call that was never made here")

    def differ(self, own: int, theirs: int) -> str:
        """How the call of a peer is another than the own one."""
        text = self.text(theirs)
        return f"{text}, routing of another dispatch" if text == self.text(own) else text
