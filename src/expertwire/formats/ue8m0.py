"""UE8M0: scale factors that are powers of two, one exponent byte each, four bytes to an int32 word.

Byte e stands for 2^(e - 127): the biased exponent of a float32. 255 stands for NaN, 0 for 2^-127.

    scale 0.75 -> 2^ceil(log2 0.75) = 1 -> byte 127        scale 1 -> byte 127        scale 1 + 2^-23 -> byte 128

A row of S exponents is ceil(S / 4) words: the lowest block in the lowest byte, unused bytes 0.

    exponents 127 128 129 130 120 -> words 0x8281807f 0x00000078
"""

from __future__ import annotations

import torch

from expertwire._math import ceil_div

NAN_EXPONENT = 255


def ceil_exponent(scale: torch.Tensor) -> torch.Tensor:
    """Biased exponent of the smallest power of two >= scale; `scale` is positive, normal float32. int32, same shape.

    Adding all mantissa bits carries into the exponent unless the mantissa is zero: a ceiling without a logarithm.
    """
    return (scale.contiguous().view(torch.int32) + 0x007FFFFF) >> 23


def to_float32(exponents: torch.Tensor) -> torch.Tensor:
    """2^(e - 127) as float32, exactly, for integers 0..255; NaN (0x7fc00000) for 255."""
    e = exponents.to(torch.int32)
    bits = e << 23
    bits = torch.where(e == 0, torch.full_like(bits, 0x00400000), bits)
    return torch.where(e == NAN_EXPONENT, torch.full_like(bits, 0x7FC00000), bits).view(torch.float32)


def pack(exponents: torch.Tensor) -> torch.Tensor:
    """Integers 0..255 `[T, S]` -> int32 `[T, ceil(S / 4)]`."""
    rows, count = exponents.shape
    padded = torch.zeros(rows, 4 * ceil_div(count, 4), dtype=torch.int32, device=exponents.device)
    padded[:, :count] = exponents
    b = padded.view(rows, ceil_div(count, 4), 4)
    return b[:, :, 0] | b[:, :, 1] << 8 | b[:, :, 2] << 16 | b[:, :, 3] << 24


def unpack(words: torch.Tensor, count: int) -> torch.Tensor:
    """int32 `[T, W]` -> the first `count` exponents of each row, int32 `[T, count]`."""
    exponents = torch.stack([words >> shift & 0xFF for shift in (0, 8, 16, 24)], dim=-1)
    return exponents.flatten(1)[:, :count]
