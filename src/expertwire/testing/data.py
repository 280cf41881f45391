"""Payloads and routings whose results are known or reproducible. T tokens, H hidden, K slots, E experts."""

from __future__ import annotations

import torch


def payload(rank: int, num_tokens: int, hidden: int) -> torch.Tensor:
    """bfloat16 `[T, H]`: element h of token t is ((5 * rank + 3 * t + h) mod 17) - 8.

    Integers -8..8 are exact in bfloat16 and e4m3, and short sums of them are exact in bfloat16.
    """
    t = torch.arange(num_tokens)[:, None]
    return ((5 * rank + 3 * t + torch.arange(hidden)) % 17 - 8).bfloat16()


def random_rows(seed: int, num_tokens: int, hidden: int, scale: float = 1.0) -> torch.Tensor:
    """bfloat16 `[T, H]`, normally distributed."""
    return (scale * torch.randn(num_tokens, hidden, generator=_generator(seed))).bfloat16()


def random_weights(seed: int, num_tokens: int, num_topk: int) -> torch.Tensor:
    """float32 `[T, K]` in (0, 1], each row with sum about 1."""
    weights = torch.rand(num_tokens, num_topk, generator=_generator(seed)) + 1e-3
    return weights / weights.sum(dim=1, keepdim=True)


def uniform_routing(seed: int, num_tokens: int, num_topk: int, num_experts: int) -> torch.Tensor:
    """int64 `[T, K]`: K different experts per token, all equally likely."""
    scores = torch.rand(num_tokens, num_experts, generator=_generator(seed))
    return scores.topk(num_topk, dim=1).indices


def skewed_routing(seed: int, num_tokens: int, num_topk: int, num_experts: int) -> torch.Tensor:
    """int64 `[T, K]`: K different experts per token, expert e with odds about 1 / (e + 1)."""
    gumbel = -(-torch.rand(num_tokens, num_experts, generator=_generator(seed)).clamp(min=1e-9).log()).log()
    scores = gumbel - torch.arange(1, num_experts + 1).log()
    return scores.topk(num_topk, dim=1).indices


def repeated_routing(seed: int, num_tokens: int, num_topk: int, num_experts: int) -> torch.Tensor:
    """int64 `[T, K]`: every slot drawn by itself, so that a token may name an expert several times."""
    return torch.randint(num_experts, (num_tokens, num_topk), generator=_generator(seed))


def round_robin(rank: int, num_tokens: int, num_topk: int, num_experts: int) -> torch.Tensor:
    """int64 `[T, K]`: (rank + t + j) mod E."""
    return (rank + torch.arange(num_tokens)[:, None] + torch.arange(num_topk)) % num_experts


def with_holes(topk_idx: torch.Tensor, seed: int, share: float = 0.25) -> torch.Tensor:
    """The same ids with about `share` of them replaced by -1, and every fifth token without any selection."""
    hole = torch.rand(topk_idx.shape, generator=_generator(seed)) < share
    hole[4::5] = True
    return topk_idx.masked_fill(hole, -1)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
