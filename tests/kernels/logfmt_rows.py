"""Rows for LogFMT10 in which chunks are cast and chunks are not."""

import torch


def mixed_rows(num_rows, hidden, seed=0):
    """Magnitudes from 2^-70 to above 1, zeros, groups of one magnitude, NaN, Inf, subnormals, edges of codes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, hidden, generator=generator)
    x *= 2.0 ** torch.randint(-70, 0, (num_rows, 1), generator=generator)
    x[::5] = x[::5].abs() ** 0.25
    x = x.bfloat16()
    x[1::7, 3] = 0.0
    x[2::7, 5] = -0.0
    x[3::7] = 0.125
    x[4::7, -1] = float("nan")
    x[5::7, 0] = -float("inf")
    x[6::7, 1:4] = torch.tensor([1e-40, -1e-38, 0.99609375]).bfloat16()
    return x
