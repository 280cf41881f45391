"""The demo's training runs: `train_ranks` in the process of every rank, `train_alone` in one process for all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from expertwire.buffer import Buffer
from expertwire.cli.demo_exchange import BufferExchange, OracleExchange
from expertwire.cli.demo_model import Exchange, ModelShape, Replica, Tensor, forward
from expertwire.cli.demo_reports import Reporter
from expertwire.formats import BF16, FP8Block, WireFormat
from expertwire.topology import Placement

SEQUENCES = 4
LEARNING_RATE = 4e-3
SAVED_STEPS = 16
WIRES: dict[str, WireFormat] = {"bf16": BF16(), "fp8": FP8Block(decode=True)}


@dataclass(frozen=True)
class Plan:
    """A training run. `text` is what every rank draws its batches from."""

    model: ModelShape
    num_ranks: int
    steps: int
    wire: str
    seed: int
    text: bytes

    @property
    def placement(self) -> Placement:
        return Placement.contiguous(self.model.experts, self.num_ranks)

    @property
    def tokens_per_rank(self) -> int:
        return SEQUENCES * self.model.context

    def batch(self, step: int, rank: int) -> Tensor:
        """[SEQUENCES, context + 1] bytes, the same in every run."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 1009 + rank)
        starts = torch.randint(len(self.text) - self.model.context - 1, (SEQUENCES, 1), generator=generator)
        text = torch.frombuffer(bytearray(self.text), dtype=torch.uint8)
        return text[starts + torch.arange(self.model.context + 1)].int()


@dataclass(frozen=True)
class Trained:
    """How training went on one rank: the loss of every step, hashes of the weights at the end, and what was routed.

    `routing` is [steps, layers, T, K], of the last steps.
    """

    losses: list[float]
    shared_hash: str
    expert_hash: str
    routing: Tensor


def warm_up(group: Any, plan: Plan) -> None:
    """Compile the kernels once, into the cache, before many processes would do so at the same time."""
    train_ranks(group, replace(plan, num_ranks=1, steps=1), None)


def train_ranks(group: Any, plan: Plan, socket_path: str | None) -> Trained:
    """The run of one rank: its own batches, its own experts, everything else agreed with the others."""
    rank, num_ranks = dist.get_rank(group), plan.num_ranks
    replica = Replica(plan.model, plan.placement, rank, plan.seed)

    def all_gradients(mine: Sequence[Tensor]) -> list[Tensor]:
        parts = [torch.empty_like(mine[0]) for _ in range(num_ranks)]
        dist.all_gather(parts, mine[0], group=group)
        return parts

    with Reporter(socket_path) as reporter, Buffer(
        group,
        num_experts=plan.model.experts,
        hidden=plan.model.width,
        num_topk=plan.model.topk,
        num_max_tokens_per_rank=plan.tokens_per_rank,
    ) as buffer:  # fmt: skip
        exchange = BufferExchange(buffer, WIRES[plan.wire])

        def report(step: int, losses: list[float], choices: list[list[Tensor]]) -> None:
            done = buffer.statistics()
            reporter.send(
                rank=rank,
                step=step,
                loss=losses[0],
                load=[torch.bincount(c.flatten(), minlength=plan.model.experts).tolist() for c in choices[0]],
                rows=sum(done.rows_sent),
                num_bytes=sum(done.bytes_sent or ()),
                wait_s=sum(done.wait_s or ()),
                dispatch_s=exchange.dispatch_s,
                combine_s=exchange.combine_s,
            )

        return _train(plan, [replica], exchange, all_gradients, report)[0]


def train_alone(group: Any, plan: Plan, socket_path: str | None) -> list[Trained]:
    """The same model in one process, rank after rank: no Buffer, and `expertwire.reference` moves the rows."""
    replicas = [Replica(plan.model, plan.placement, rank, plan.seed) for rank in range(plan.num_ranks)]
    with Reporter(socket_path) as reporter:

        def report(step: int, losses: list[float], choices: list[list[Tensor]]) -> None:
            reporter.send(rank=0, step=step, loss=sum(losses) / len(losses))

        return _train(plan, replicas, OracleExchange(plan.placement, WIRES[plan.wire]), list, report)


def _train(
    plan: Plan,
    replicas: Sequence[Replica],
    exchange: Exchange,
    all_gradients: Callable[[Sequence[Tensor]], list[Tensor]],
    report: Callable[[int, list[float], list[list[Tensor]]], None],
) -> list[Trained]:
    history: list[list[float]] = [[] for _ in replicas]
    routing: list[list[Tensor]] = [[] for _ in replicas]
    for step in range(plan.steps):
        texts = [plan.batch(step, replica.rank) for replica in replicas]
        losses, objectives, choices = forward(replicas, texts, exchange)
        torch.autograd.backward(objectives)
        total = _sum_in_order(all_gradients([replica.shared.take_gradient() for replica in replicas]))
        for replica in replicas:
            rate = LEARNING_RATE * min(1.0, (step + 1) / 20)
            replica.shared.adam(total / plan.num_ranks, rate)
            replica.expert.adam(replica.expert.take_gradient() / plan.num_ranks, rate)
        values = [loss.item() for loss in losses]
        for i, value in enumerate(values):
            history[i].append(value)
            if step >= plan.steps - SAVED_STEPS:
                routing[i].append(torch.stack(choices[i]))
        report(step, values, choices)
    return [
        Trained(history[i], _hash(r.shared.flat), _hash(r.expert.flat), torch.stack(routing[i]))
        for i, r in enumerate(replicas)
    ]


def _sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Rank order, whatever order they came in: float sums depend on it."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _hash(t: Tensor) -> str:
    return hashlib.sha256(t.detach().numpy().tobytes()).hexdigest()
