"""The lines that expertwire is compared with: an all-to-all and the index work around it, as a user would write it.

Two ways, as existing libraries have them: for the EXPERT_* layouts a row per (token, slot), sorted by expert, sent, and
sorted again by the receiver; for COMPACT a row per (token, rank).

Large fresh tensors cost page faults, so each line comes twice: with new tensors, as most code has it, and with `Kept`
memory for rows, as careful code has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

Tensor = torch.Tensor
_BLOCK = 128


class Kept:
    """Memory for rows that is used again by the next call; `empty` of the same name returns the same bytes."""

    def __init__(self) -> None:
        self._blocks: dict[str, Tensor] = {}

    def empty(self, name: str, num_rows: int, like: Tensor) -> Tensor:
        """[num_rows, width of `like`] in the dtype of `like`."""
        num_bytes = num_rows * like.shape[1] * like.element_size()
        block = self._blocks.get(name)
        if block is None or block.numel() < num_bytes:
            block = self._blocks[name] = torch.zeros(num_bytes, dtype=torch.uint8, device=like.device)
        return block[:num_bytes].view(like.dtype).view(num_rows, like.shape[1])


class Fresh(Kept):
    """A new tensor each time."""

    def empty(self, name: str, num_rows: int, like: Tensor) -> Tensor:
        return torch.empty((num_rows, like.shape[1]), dtype=like.dtype, device=like.device)


class AllToAll(Protocol):
    """Rows for rank r are `sends[r]` consecutive ones."""

    num_ranks: int
    memory: Kept

    def counts(self, sends: Tensor) -> Tensor:
        """[R, n] int64, row r for rank r -> the rows that all ranks had for this one."""
        ...

    def rows(self, name: str, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor: ...


class TorchGroup:
    """torch.distributed.all_to_all_single: gloo on the CPU, NCCL on GPUs."""

    def __init__(self, group: Any, memory: Kept) -> None:
        self._group, self.num_ranks, self.memory = group, dist.get_world_size(group), memory

    def counts(self, sends: Tensor) -> Tensor:
        received = torch.empty_like(sends)
        dist.all_to_all_single(received, sends, group=self._group)
        return received

    def rows(self, name: str, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        received = self.memory.empty(name, sum(receives), rows)
        dist.all_to_all_single(received, rows, receives, sends, group=self._group)
        return received


class Mpi:
    """MPI Alltoall for counts, Alltoallv for rows."""

    def __init__(self, communicator: Any, memory: Kept) -> None:
        self._communicator, self.num_ranks, self.memory = communicator, communicator.Get_size(), memory

    def counts(self, sends: Tensor) -> Tensor:
        received = torch.empty_like(sends)
        self._communicator.Alltoall(sends.numpy(), received.numpy())
        return received

    def rows(self, name: str, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        from mpi4py import MPI

        received = self.memory.empty(name, sum(receives), rows)
        width = rows.shape[1] * rows.element_size()
        messages = [
            [t.reshape(-1).view(torch.uint8).numpy(), (np.array(split) * width, _starts(split) * width), MPI.BYTE]
            for t, split in ((rows, sends), (received, receives))
        ]
        self._communicator.Alltoallv(*messages)
        return received


def _starts(counts: list[int]) -> Any:
    return np.cumsum([0, *counts])[:-1]


@dataclass(frozen=True)
class Sent:
    """Rows received, and what the way back needs."""

    x: Tensor
    sf: Tensor | None
    topk_idx: Tensor | None
    sends: list[int]
    receives: list[int]
    order: Tensor
    arranged: Tensor | None
    topk_weights: Tensor


def dispatch(
    ranks: AllToAll,
    x: Tensor,
    sf: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    *,
    compact: bool,
) -> Sent:
    """`x` as it travels, with scale factors `sf`. COMPACT: the experts and weights of every row travel too."""
    num_local = num_experts // ranks.num_ranks
    if compact:
        return _dispatch_compact(ranks, x, sf, topk_idx, topk_weights, num_local)
    num_topk = topk_idx.shape[1]
    experts = topk_idx.flatten()
    order = experts.argsort(stable=True)
    tokens = order // num_topk
    sends = torch.bincount(experts, minlength=num_experts).view(ranks.num_ranks, num_local)
    receives = ranks.counts(sends)
    split, received = sends.sum(1).tolist(), receives.sum(1).tolist()
    arranged = _by_expert(receives)

    def send(name: str, rows: Tensor) -> Tensor:
        by_rank = ranks.rows(f"{name} received", _gather(ranks, f"{name} sent", rows, tokens), split, received)
        return _gather(ranks, f"{name} by expert", by_rank, arranged)

    rows, factors = send("x", x), None if sf is None else send("sf", sf)
    return Sent(rows, factors, None, split, received, order, arranged, topk_weights)


def _gather(ranks: AllToAll, name: str, rows: Tensor, index: Tensor) -> Tensor:
    return torch.index_select(rows, 0, index, out=ranks.memory.empty(name, len(index), rows))


def _by_expert(receives: Tensor) -> Tensor:
    """receives [R, L]: rows came by source rank, then expert; the index that puts them by expert, then source rank."""
    starts = (receives.flatten().cumsum(0) - receives.flatten()).view_as(receives)
    counts, starts = receives.t().flatten(), starts.t().flatten()
    ends = counts.cumsum(0)
    return torch.arange(int(counts.sum()), device=counts.device) + (starts - (ends - counts)).repeat_interleave(counts)


def _dispatch_compact(
    ranks: AllToAll, x: Tensor, sf: Tensor | None, topk_idx: Tensor, topk_weights: Tensor, num_local: int
) -> Sent:
    owner = topk_idx // num_local
    wanted = torch.zeros((ranks.num_ranks, len(x)), dtype=torch.bool, device=x.device)
    wanted[owner.t(), torch.arange(len(x), device=x.device)] = True
    target, tokens = wanted.nonzero(as_tuple=True)
    sends = wanted.sum(1)
    split, received = sends.tolist(), ranks.counts(sends.unsqueeze(1)).flatten().tolist()
    here = owner.index_select(0, tokens) == target.unsqueeze(1)
    idx = torch.where(here, topk_idx.index_select(0, tokens) % num_local, -1)
    weights = torch.where(here, topk_weights.index_select(0, tokens), 0.0)

    def send(name: str, rows: Tensor) -> Tensor:
        return ranks.rows(f"{name} received", _gather(ranks, f"{name} sent", rows, tokens), split, received)

    rows, factors = send("x", x), None if sf is None else send("sf", sf)
    idx = ranks.rows("idx", idx, split, received)
    weights = ranks.rows("weights", weights, split, received)
    return Sent(rows, factors, idx, split, received, tokens, None, weights)


def combine(ranks: AllToAll, y: Tensor, sent: Sent, num_tokens: int) -> Tensor:
    """y [rows, H] bfloat16 -> [T, H] bfloat16: weighted sums for EXPERT_*, plain sums for COMPACT."""
    hidden = y.shape[1]
    if sent.arranged is None:
        back = ranks.rows("back", y, sent.receives, sent.sends)
        total = torch.zeros((num_tokens, hidden), device=y.device).index_add_(0, sent.order, back.float())
        return total.bfloat16()
    disarranged = ranks.memory.empty("y by rank", len(y), y).index_copy_(0, sent.arranged, y)
    back = ranks.rows("back", disarranged, sent.receives, sent.sends)
    by_slot = ranks.memory.empty("by slot", len(back), back).index_copy_(0, sent.order, back)
    num_topk = sent.topk_weights.shape[1]
    return weighted_sum(by_slot.view(num_tokens, num_topk, hidden), sent.topk_weights)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 with a float32 scale per 128 channels, as torch code writes it; bytes, since gloo knows no FP8."""
    blocks = x.float().view(len(x), x.shape[1] // _BLOCK, _BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True).clamp(1e-4)
    q = (blocks * (torch.full_like(amax, 448.0) / amax)).to(torch.float8_e4m3fn)
    return q.view(x.shape).view(torch.uint8), (amax / 448.0).squeeze(-1)


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """rows [T, K, H], weights [T, K] -> bfloat16 [T, H]."""
    return torch.bmm(weights.unsqueeze(1), rows.float()).squeeze(1).bfloat16()
