"""BF16: the row travels as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from expertwire.errors import InvalidArgument
from expertwire.formats.wire import checked_input, checked_part


@dataclass(frozen=True)
class BF16:
    """bfloat16 rows, unchanged: 2 * hidden bytes, no scale factors, every bit kept (NaN payloads too). Error: none.

    >>> BF16().payload_bytes(7168), BF16().sf_bytes(7168)
    (14336, 0)
    """

    name: ClassVar[str] = "bf16"
    payload_dtype: ClassVar[torch.dtype] = torch.bfloat16
    sf_dtype: ClassVar[torch.dtype | None] = None

    def payload_bytes(self, hidden: int) -> int:
        return 2 * hidden

    def sf_bytes(self, hidden: int) -> int:
        return 0

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The payload is `x` itself where it is contiguous, so it shares memory with it."""
        return checked_input(self.name, x).contiguous(), None

    def decode_float32(self, payload: torch.Tensor, sf: torch.Tensor | None, hidden: int) -> torch.Tensor:
        return self.decode_bfloat16(payload, sf, hidden).float()

    def decode_bfloat16(self, payload: torch.Tensor, sf: torch.Tensor | None, hidden: int) -> torch.Tensor:
        """`payload` itself, sharing its memory."""
        if sf is not None:
            raise InvalidArgument(f"{self.name}.decode: this format has no scale factors, got sf of {list(sf.shape)}")
        return checked_part(self.name, "payload", payload, self.payload_dtype, [payload.shape[0], hidden])
