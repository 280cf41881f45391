"""FP8Block: e4m3fn values with one scale factor per block of channels.

For each row and each block of `block` channels (the last block of a row may be narrower), all in float32:

    amax  = max(|x|, 1e-4)
    scale = amax / 448                       scale="float32"
    scale = 2^ceil(log2(amax / 448))         scale="ue8m0": see `ue8m0.ceil_exponent`
    q     = round(x * (448 / amax))          scale="float32": two roundings to float32, then to e4m3
    q     = round(x * (1 / scale))           scale="ue8m0": exact until the rounding to e4m3
    x'    = q * scale

Divisions are true divisions; 1e-4 is float32(1e-4); rounding is to nearest, ties to even, saturating at 448. The sign
of zero survives. The order is clamp, round the scale up, quantise with the rounded scale.

**NaN and Inf**: if any value of a block is NaN or infinite, every payload byte of the block is 0x7f (e4m3 NaN) and its
scale is NaN: 0x7fc00000, or exponent byte 255. The whole block decodes to NaN; nothing else changes.

**Error**: |x' - x| <= max(2^-4 |x|, 2^-10 scale) * (1 + 2^-20) after `decode_float32`; `decode_bfloat16` rounds once
more (by at most 2^-8 |x'|; not at all with ue8m0). One case overflows: with ue8m0, the eight largest magnitudes of
bfloat16, from 1.9375 * 2^127 on, round up to 2^128 and decode to Inf.

**Worked example**: one block holds 448, -1, 0.3 and 17, the rest is 0.

    float32, ue8m0   amax 448, scale 1:  q = 448, -1, 0.3125, 16 (17 is a tie, 16 is even)
    bytes            0x7e 0xb8 0x2a 0x58                          scale bits 0x3f800000, exponent byte 127

Replace 448 by 450 and the two differ: float32 has scale 450 / 448 and q = 448, ue8m0 has scale 2 and q = 224 (225 is
nearer to 224 than to 240), so 450 comes back as 450 and as 448.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.nn.functional import pad

from expertwire._math import ceil_div, round_up
from expertwire.errors import InvalidArgument
from expertwire.formats import ue8m0
from expertwire.formats.wire import checked_input, checked_part, divide

AMAX_FLOOR = 1e-4
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
BLOCKS = (32, 64, 128)


@dataclass(frozen=True)
class FP8Block:
    """e4m3fn rows, one scale per `block` channels; the module docstring has the arithmetic and the error bound.

    |         | `scale="float32"`                 | `scale="ue8m0"`                           |
    |---------|-----------------------------------|-------------------------------------------|
    | payload | float8_e4m3fn `[T, H]`, H bytes   | the same                                  |
    | sf      | float32 `[T, ceil(H / block)]`    | int32 `[T, ceil(H / (4 * block))]`, packed |

    `sf_layout="row"` gives contiguous scale factors. `"column"` gives stride 1 along rows and a column stride of T
    rounded up to 4 (zeros behind row T), which tensor-memory loads of a grouped GEMM want. It concerns the tensor
    only: on the wire a row's scale factors are contiguous.

    `decode=True` asks the receiver for bfloat16 rows in place of `(x, sf)`; gradients pass straight through.

    >>> FP8Block().sf_bytes(7168), FP8Block(scale="ue8m0").sf_bytes(768)
    (224, 8)
    """

    block: int = 128
    scale: Literal["float32", "ue8m0"] = "float32"
    sf_layout: Literal["row", "column"] = "row"
    decode: bool = False

    payload_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        for field, allowed in (
            ("block", BLOCKS),
            ("scale", ("float32", "ue8m0")),
            ("sf_layout", ("row", "column")),
            ("decode", (False, True)),
        ):
            if getattr(self, field) not in allowed:
                raise InvalidArgument(f"FP8Block: {field} must be one of {allowed}, got {getattr(self, field)!r}")

    @property
    def name(self) -> str:
        """Says what the bytes of a row mean: "fp8_f32" or "fp8_ue8m0", with "_b32" or "_b64" for narrower blocks."""
        suffix = "" if self.block == 128 else f"_b{self.block}"
        return ("fp8_f32" if self.scale == "float32" else "fp8_ue8m0") + suffix

    @property
    def sf_dtype(self) -> torch.dtype:
        return torch.float32 if self.scale == "float32" else torch.int32

    def payload_bytes(self, hidden: int) -> int:
        return hidden

    def sf_bytes(self, hidden: int) -> int:
        return 4 * self.sf_columns(hidden)

    def num_blocks(self, hidden: int) -> int:
        """Blocks of a row, the last of which may be narrower."""
        return ceil_div(hidden, self.block)

    def sf_columns(self, hidden: int) -> int:
        """Width of the sf tensor: one float32 per block, or one int32 per four blocks."""
        return self.num_blocks(hidden) if self.scale == "float32" else ceil_div(hidden, 4 * self.block)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """bfloat16 `[T, H]` -> float8_e4m3fn `[T, H]`, sf `[T, sf_columns(H)]` in `sf_layout`."""
        x = checked_input(self.name, x)
        rows, hidden = x.shape
        blocks = pad(x, (0, -hidden % self.block)).view(rows, self.num_blocks(hidden), self.block).float()
        amax = blocks.abs().amax(dim=2)
        finite = amax.isfinite()
        amax = torch.where(finite, amax.clamp(min=AMAX_FLOOR), 1.0)

        scale = divide(amax, E4M3_MAX, like=amax)
        if self.scale == "float32":
            factor = divide(E4M3_MAX, amax, like=amax)
            sf = torch.where(finite, scale, torch.nan)
        else:
            exponents = ue8m0.ceil_exponent(scale)
            factor = ue8m0.to_float32(2 * 127 - exponents)
            sf = ue8m0.pack(torch.where(finite, exponents, ue8m0.NAN_EXPONENT))

        # Some versions of torch turn what is above 464 into NaN instead of saturating.
        q = (blocks * factor.unsqueeze(2)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        payload = q.view(torch.uint8).masked_fill(~finite.unsqueeze(2), E4M3_NAN).view(torch.float8_e4m3fn)
        return payload.flatten(1)[:, :hidden].contiguous(), sf if self.sf_layout == "row" else column_major(sf)

    def decode_float32(self, payload: torch.Tensor, sf: torch.Tensor | None, hidden: int) -> torch.Tensor:
        """float8_e4m3fn `[T, H]` and its sf in either layout -> float32 `[T, H]`."""
        rows = payload.shape[0]
        payload = checked_part(self.name, "payload", payload, self.payload_dtype, [rows, hidden])
        sf = checked_part(self.name, "sf", sf, self.sf_dtype, [rows, self.sf_columns(hidden)])
        scale = sf if self.scale == "float32" else ue8m0.to_float32(ue8m0.unpack(sf, self.num_blocks(hidden)))
        return payload.float() * scale.repeat_interleave(self.block, dim=1)[:, :hidden]

    def decode_bfloat16(self, payload: torch.Tensor, sf: torch.Tensor | None, hidden: int) -> torch.Tensor:
        """float8_e4m3fn `[T, H]` and its sf in either layout -> bfloat16 `[T, H]`."""
        return self.decode_float32(payload, sf, hidden).bfloat16()


def column_major(sf: torch.Tensor) -> torch.Tensor:
    """The same `[..., T, S]` values with strides (..., 1, T rounded up to 4); the padding holds zeros."""
    *groups, rows, columns = sf.shape
    storage = sf.new_zeros(*groups, columns, round_up(rows, 4))
    storage[..., :rows] = sf.transpose(-2, -1)
    return storage[..., :rows].transpose(-2, -1)
