"""One token's record in a window: where its payload, scale factors and routing lie.

    dispatch record   payload | sf | topk_idx int32[K] | topk_weights float32[K] | token int32    one per (token, rank)
    combine record    payload | sf | weight float32                                          one per (token, top-k slot)

Every part starts on a 16-byte boundary, so that a part can be moved in 128-bit pieces, and every record on a cache
line. `topk_idx` holds local expert ids of the receiving rank and -1 elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from expertwire._math import ceil_div, round_up

ALIGN = 16
LINE_BYTES = 64


def max_data_bytes(hidden: int) -> int:
    """Room for payload and scale factors of one row in any wire format: BF16 or one byte per value with float scales.

    >>> max_data_bytes(7168), max_data_bytes(8)
    (14336, 32)
    """
    fp8 = round_up(hidden, ALIGN) + round_up(4 * ceil_div(hidden, 128), ALIGN)
    return max(round_up(2 * hidden, ALIGN), fp8)


def max_combine_bytes(hidden: int) -> int:
    """Room for one row on the way back: BF16, or LogFMT with its (amax, amin) of every 128 channels."""
    return round_up(2 * hidden, ALIGN) + round_up(4 * ceil_div(hidden, 128), ALIGN)


@dataclass(frozen=True)
class DispatchRow:
    """Byte offsets inside a dispatch record.

    >>> DispatchRow(payload_bytes=14336, sf_bytes=0, num_topk=8).stride
    14464
    """

    payload_bytes: int
    sf_bytes: int
    num_topk: int

    @cached_property
    def data_bytes(self) -> int:
        return round_up(self.payload_bytes, ALIGN) + round_up(self.sf_bytes, ALIGN)

    @cached_property
    def sf(self) -> int:
        return round_up(self.payload_bytes, ALIGN)

    @cached_property
    def topk_idx(self) -> int:
        return self.data_bytes

    @cached_property
    def topk_weights(self) -> int:
        return self.topk_idx + round_up(4 * self.num_topk, ALIGN)

    @cached_property
    def token(self) -> int:
        return self.topk_weights + round_up(4 * self.num_topk, ALIGN)

    @cached_property
    def stride(self) -> int:
        return round_up(self.token + ALIGN, LINE_BYTES)


@dataclass(frozen=True)
class CombineRow:
    """Byte offsets inside a combine record.

    >>> CombineRow(payload_bytes=14336, sf_bytes=0).stride
    14400
    """

    payload_bytes: int
    sf_bytes: int

    @cached_property
    def sf(self) -> int:
        return round_up(self.payload_bytes, ALIGN)

    @cached_property
    def weight(self) -> int:
        return self.sf + round_up(self.sf_bytes, ALIGN)

    @cached_property
    def stride(self) -> int:
        return round_up(self.weight + ALIGN, LINE_BYTES)
