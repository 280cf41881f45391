"""The demo's model: a byte-level language model with attention and Mixture-of-Experts layers.

A `Replica` is what one rank holds: its copy of the shared weights, and its share of the experts. `forward` runs the
layers of one replica, or of several one after another, and leaves the way to the experts and back to an `Exchange`. So
the distributed run and the single-process run execute the same code on the same shapes.

Letters: B sequences, C context, T = B * C tokens of one rank, W width, E experts, K top-k slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from expertwire.topology import Placement

Tensor = torch.Tensor


@dataclass(frozen=True)
class ModelShape:
    experts: int
    topk: int
    width: int = 128
    layers: int = 2
    heads: int = 4
    context: int = 64
    expert_width: int = 256


@dataclass(frozen=True)
class Routed:
    """What leaves for the experts: x [T, W] bfloat16, topk_idx [T, K], topk_weights [T, K] float32.

    `balance` is about 1 where all experts are used alike, and larger where they are not.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    balance: Tensor


class Exchange(Protocol):
    """The way to the experts and back, for one replica or for those of all ranks."""

    def dispatch(self, routed: Sequence[Routed]) -> list[tuple[Tensor, list[int]]]:
        """Per replica: rows [n, W] bfloat16 grouped by local expert, and how many each local expert got."""
        ...

    def combine(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Per replica: weighted sums [T, W] bfloat16 of what its tokens' experts returned."""
        ...


class Parameters:
    """Named weights in one flat tensor, so that gradients are summed and weights updated in one piece. Adam."""

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._parts: list[Tensor] = []
        self._step = 0

    def add(self, name: str, *shape: int, seed: int, scale: float) -> None:
        """Normally distributed; `scale` 0 gives ones. The values depend on the seed and the name only."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + sum(name.encode()) * 8191 + len(self._parts))
        part = torch.ones(shape) if scale == 0 else scale * torch.randn(shape, generator=generator)
        self._shapes[name] = shape
        self._parts.append(part.flatten())

    def freeze(self) -> None:
        """All weights were added."""
        self.flat = torch.cat(self._parts).requires_grad_() if self._parts else torch.zeros(0, requires_grad=True)
        self._parts.clear()
        self._first, self._second = torch.zeros_like(self.flat), torch.zeros_like(self.flat)

    def named(self) -> dict[str, Tensor]:
        """The weights as views of the flat tensor, in the autograd graph."""
        parts = torch.split(self.flat, [math.prod(shape) for shape in self._shapes.values()]) if self._shapes else ()
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def take_gradient(self) -> Tensor:
        gradient, self.flat.grad = self.flat.grad, None
        return torch.zeros_like(self.flat) if gradient is None else gradient

    def adam(self, gradient: Tensor, rate: float) -> None:
        self._step += 1
        beta1, beta2 = 0.9, 0.98
        self._first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        self._second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = (self._second / (1 - beta2**self._step)).sqrt_().add_(1e-9)
        with torch.no_grad():
            self.flat.addcdiv_(self._first, size, value=-rate / (1 - beta1**self._step))


class Replica:
    """One rank's weights, and the stages of its forward pass."""

    def __init__(self, shape: ModelShape, placement: Placement, rank: int, seed: int) -> None:
        self.shape, self.rank = shape, rank
        self.local_experts = placement.local_experts(rank)
        w, narrow = shape.width, shape.width**-0.5
        self.shared, self.expert = Parameters(), Parameters()
        self.shared.add("bytes", 256, w, seed=seed, scale=0.5)
        self.shared.add("places", shape.context, w, seed=seed, scale=0.1)
        for layer in range(shape.layers):
            self.shared.add(f"attention_norm{layer}", w, seed=seed, scale=0)
            self.shared.add(f"qkv{layer}", w, 3 * w, seed=seed, scale=narrow)
            self.shared.add(f"attention_out{layer}", w, w, seed=seed, scale=narrow / 2)
            self.shared.add(f"expert_norm{layer}", w, seed=seed, scale=0)
            self.shared.add(f"router{layer}", w, shape.experts, seed=seed, scale=narrow)
            for expert in self.local_experts:
                own = seed + 1 + expert
                self.expert.add(f"up{layer}.{expert}", w, shape.expert_width, seed=own, scale=narrow)
                self.expert.add(
                    f"down{layer}.{expert}", shape.expert_width, w, seed=own, scale=shape.expert_width**-0.5
                )
        self.shared.add("head_norm", w, seed=seed, scale=0)
        self.shared.add("head", w, 256, seed=seed, scale=narrow)
        self.shared.freeze()
        self.expert.freeze()

    def begin(self, text: Tensor) -> Tensor:
        """text [B, C + 1] bytes -> hidden state [B, C, W]."""
        self._weights = {**self.shared.named(), **self.expert.named()}
        return self._weights["bytes"][text[:, :-1]] + self._weights["places"]

    def attend(self, layer: int, h: Tensor) -> Tensor:
        """h [B, C, W] -> the same, after causal attention."""
        b, c, w = h.shape
        x = _norm(h, self._weights[f"attention_norm{layer}"]).view(b * c, w)
        qkv = (x @ self._weights[f"qkv{layer}"]).view(b, c, 3, self.shape.heads, w // self.shape.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(b * c, w)
        return h + (mixed @ self._weights[f"attention_out{layer}"]).view(b, c, w)

    def route(self, layer: int, h: Tensor) -> Routed:
        x = _norm(h, self._weights[f"expert_norm{layer}"]).view(-1, self.shape.width)
        odds = (x @ self._weights[f"router{layer}"]).softmax(-1)
        top, idx = odds.topk(self.shape.topk, dim=-1)
        share = torch.bincount(idx.flatten(), minlength=self.shape.experts).float() / idx.numel()
        balance = self.shape.experts * (share * odds.mean(0)).sum()
        return Routed(x.bfloat16(), idx, top / top.sum(-1, keepdim=True), balance)

    def run_experts(self, layer: int, rows: Tensor, counts: list[int]) -> Tensor:
        """rows [n, W] grouped by local expert -> what the experts make of them, bfloat16."""
        groups = torch.split(rows.float(), counts)
        made = [
            functional.silu(x @ self._weights[f"up{layer}.{expert}"]) @ self._weights[f"down{layer}.{expert}"]
            for expert, x in zip(self.local_experts, groups, strict=True)
        ]
        return torch.cat(made).bfloat16() if made else rows

    def loss(self, h: Tensor, text: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte."""
        x = _norm(h, self._weights["head_norm"]).view(-1, self.shape.width)
        return functional.cross_entropy(x @ self._weights["head"], text[:, 1:].flatten().long())


def forward(
    replicas: Sequence[Replica], texts: Sequence[Tensor], exchange: Exchange
) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    """Per replica: the loss, the loss with the balance of the experts, and the topk_idx of every layer."""
    states = [replica.begin(text) for replica, text in zip(replicas, texts, strict=True)]
    balances = [torch.zeros(()) for _ in replicas]
    choices: list[list[Tensor]] = [[] for _ in replicas]
    for layer in range(replicas[0].shape.layers):
        states = [replica.attend(layer, h) for replica, h in zip(replicas, states, strict=True)]
        routed = [replica.route(layer, h) for replica, h in zip(replicas, states, strict=True)]
        rows = exchange.dispatch(routed)
        made = [replica.run_experts(layer, *part) for replica, part in zip(replicas, rows, strict=True)]
        back = exchange.combine(made)
        states = [h + sums.float().view(h.shape) for h, sums in zip(states, back, strict=True)]
        balances = [total + part.balance for total, part in zip(balances, routed, strict=True)]
        for chosen, part in zip(choices, routed, strict=True):
            chosen.append(part.topk_idx)
    losses = [replica.loss(h, text) for replica, h, text in zip(replicas, states, texts, strict=True)]
    return losses, [loss + 0.02 * balance for loss, balance in zip(losses, balances, strict=True)], choices


def _norm(h: Tensor, gain: Tensor) -> Tensor:
    return functional.layer_norm(h, gain.shape, gain)
