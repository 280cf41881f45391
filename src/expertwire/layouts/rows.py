"""One token's record in a window: where its payload and scale factors lie, and its routing.

    dispatch record   payload | sf                                                              one per (token, rank)
    routing           topk_idx int32[K] | topk_weights float32[K] | token int32                 one per (token, rank)
    combine record    payload | sf | weight float32                                        one per (token, top-k slot)

Every part of a record starts on a 16-byte boundary, so that it can be moved in 128-bit pieces, and every record on a
cache line. The routing of all rows lies side by side, apart from them: it is read before they are, and may come without
them. `topk_idx` holds local expert ids of the receiving rank and -1 elsewhere.
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

    >>> DispatchRow(payload_bytes=7168, sf_bytes=224).stride
    7424
    """

    payload_bytes: int
    sf_bytes: int

    @cached_property
    def data_bytes(self) -> int:
        return round_up(self.payload_bytes, ALIGN) + round_up(self.sf_bytes, ALIGN)

    @cached_property
    def sf(self) -> int:
        return round_up(self.payload_bytes, ALIGN)

    @cached_property
    def stride(self) -> int:
        return round_up(self.data_bytes, LINE_BYTES)


def routing_bytes(num_topk: int) -> int:
    """Bytes of one row's routing.

    >>> routing_bytes(8)
    68
    """
    return 4 * (2 * num_topk + 1)


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
