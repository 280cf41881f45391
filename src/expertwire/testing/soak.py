"""Soak: many steps of the real engine on a simulated fabric, every row compared, with ranks that sleep, die and return.

A run is a function of its `Soak` record: a failing one replays exactly, and `shrink` looks for a smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from expertwire.buffer import Buffer
from expertwire.errors import ExpertWireError
from expertwire.handle import Combined, Dispatched
from expertwire.layouts.receive import Layout
from expertwire.transports.inproc import Rank
from expertwire.world import World

STEPS_PER_WORLD = 50
HIDDEN = 32
NUM_TOPK = 2


@dataclass(frozen=True)
class Soak:
    """What to run. With `faults`, some ranks sleep past the time-out or leave, and their peers mask them."""

    profile: str
    signal: str
    ranks: int = 4
    tokens: int = 16
    steps: int = 1000
    seed: int = 0
    schedule: str = "adversary"
    faults: bool = False


@dataclass(frozen=True)
class Finding:
    """A wrong result or an error that the protocol should have made impossible; `trace` is what the fabric did last."""

    soak: Soak
    step: int
    text: str
    trace: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """Some steps of a soak that went well. `digest` is equal for equal runs."""

    steps: int
    choices: int
    masked: int
    digest: int


class WrongRow(ExpertWireError):
    """A row that is not what was sent."""


def run(soak: Soak) -> Iterator[Part | Finding]:
    """Run in parts of STEPS_PER_WORLD steps; ends with the first finding."""
    for first in range(0, soak.steps, STEPS_PER_WORLD):
        result = _part(replace(soak, steps=min(STEPS_PER_WORLD, soak.steps - first), seed=soak.seed + first))
        yield result
        if isinstance(result, Finding):
            return


def shrink(finding: Finding) -> Finding:
    """The smallest run found that still fails: fewer steps, tokens, ranks."""
    smallest = finding
    candidates: list[Callable[[Soak], Soak]] = [
        lambda s: replace(s, steps=smallest.step + 1),
        lambda s: replace(s, tokens=max(1, s.tokens // 2)),
        lambda s: replace(s, ranks=max(2, s.ranks - 1)),
        lambda s: replace(s, faults=False),
    ]
    progress = True
    while progress:
        progress = False
        for change in candidates:
            smaller = change(smallest.soak)
            result = _part(smaller) if smaller != smallest.soak else None
            if isinstance(result, Finding):
                smallest, progress = result, True
    return smallest


def _part(soak: Soak) -> Part | Finding:
    world = World(soak.ranks, fabric=soak.profile, signal=soak.signal, seed=soak.seed, schedule=soak.schedule)
    steps_done = [0] * soak.ranks
    masked: set[int] = set()
    fabrics: list[Any] = []

    def body(rank: Rank) -> None:
        fabrics[:] = [rank.crew.fabric]
        with Buffer(
            rank, num_experts=2 * soak.ranks, hidden=HIDDEN, num_topk=NUM_TOPK, num_max_tokens_per_rank=soak.tokens,
            timeout_s=5.0, on_timeout="mask",
        ) as buf:  # fmt: skip
            for step in range(soak.steps):
                if soak.faults and _misbehaves(soak, rank, step, fabrics[0].turns):
                    return
                _step(soak, rank.rank, step, buf)
                steps_done[rank.rank] = step + 1
            masked.update(buf.masked_ranks)

    try:
        world.run(body)
    except (ExpertWireError, AssertionError) as error:
        return Finding(soak, min(steps_done), f"{type(error).__name__}: {error}", tuple(fabrics[0].history()))
    turns = fabrics[0].turns
    return Part(soak.steps, turns.choices, len(masked), turns.digest)


def _misbehaves(soak: Soak, rank: Rank, step: int, turns: Any) -> bool:
    """One rank, not the same in every part, sleeps for longer than the time-out; another leaves in the middle."""
    sleeper, leaver = soak.seed % soak.ranks, (soak.seed // 7 + 1) % soak.ranks
    if rank.rank == sleeper and step == soak.steps // 3:
        until = turns.time_s + 8.0
        while turns.time_s < until:
            turns.stop(rank.rank, lambda: turns.time_s >= until)
    return rank.rank == leaver and rank.rank != sleeper and step == 2 * soak.steps // 3


def _payload(rank: int, step: int, tokens: torch.Tensor) -> torch.Tensor:
    """[n, HIDDEN] small integers, exact in bfloat16, that name rank, step and token."""
    columns = torch.arange(HIDDEN)
    return ((5 * rank + 3 * tokens[:, None] + columns + 7 * step) % 17 - 8).to(torch.bfloat16)


def _step(soak: Soak, rank: int, step: int, buf: Buffer) -> None:
    """Dispatch and combine with identity experts; every received row and every sum is known."""
    choose = torch.Generator().manual_seed(1000 * soak.seed + step)
    num_tokens = torch.randint(0, soak.tokens + 1, (soak.ranks,), generator=choose)
    layout = (Layout.COMPACT, Layout.EXPERT_MAJOR, Layout.EXPERT_SLOTS)[step % 3]
    deferred = step % 4 == 3
    own = torch.Generator().manual_seed(1000 * soak.seed + step + 7919 * (rank + 1))
    tokens = torch.arange(int(num_tokens[rank]))
    idx = torch.rand(len(tokens), 2 * soak.ranks, generator=own).topk(NUM_TOPK).indices
    idx[torch.rand(idx.shape, generator=own) < 0.1] = -1
    x = _payload(rank, step, tokens)
    sent = buf.dispatch(x, idx, layout=layout, defer_receive=deferred)
    if deferred:
        sent.hook()  # type: ignore[misc]
    _check_rows(layout, step, sent, num_tokens)
    back = buf.combine(sent.x, sent.handle, defer_receive=deferred)
    if deferred:
        back.hook()  # type: ignore[misc]
    served = idx // 2
    if layout is Layout.COMPACT:
        expected = torch.tensor([len(set(row) - {-1}) for row in served.tolist()], dtype=torch.float32)
    else:
        expected = (idx >= 0).sum(dim=1).float()
    _check_sums(step, x, expected, back)


def _check_rows(layout: Layout, step: int, sent: Dispatched, num_tokens: torch.Tensor) -> None:
    if layout is Layout.COMPACT:
        counts = sent.num_tokens_per_rank.tolist()
        if any(count > limit for count, limit in zip(counts, num_tokens.tolist(), strict=True)):
            raise WrongRow(f"step {step}: {counts} rows came from ranks that have {num_tokens.tolist()} tokens")
        return
    assert sent.row_source is not None
    source = sent.row_source.view(-1, 3).long()
    filled = source[:, 0] >= 0
    seen = sent.x.view(-1, HIDDEN)[filled].float()
    for rank in range(len(num_tokens)):
        mine = source[filled][:, 0] == rank
        want = _payload(rank, step, source[filled][mine, 1]).float()
        if not torch.equal(seen[mine], want):
            wrong = int((seen[mine] != want).any(dim=1).nonzero()[0])
            raise WrongRow(f"step {step}: token {source[filled][mine, 1][wrong].item()} of rank {rank} arrived changed")


def _check_sums(step: int, x: torch.Tensor, expected: torch.Tensor, back: Combined) -> None:
    """Every sum is m times x with m <= expected, and what lacks is what `num_missing` says."""
    lacking = 0
    for token in range(len(x)):
        for times in range(int(expected[token]), -1, -1):
            if torch.equal(back.x[token].float(), times * x[token].float()):
                lacking += int(expected[token]) - times
                break
        else:
            raise WrongRow(f"step {step}: the sum of token {token} is no multiple of it that routing allows")
    if lacking != back.num_missing:
        raise WrongRow(f"step {step}: {lacking} contributions are missing, but num_missing says {back.num_missing}")
