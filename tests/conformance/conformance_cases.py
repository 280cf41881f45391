"""What varies in the conformance suite, and the inputs of every case.

A `Setup` is one buffer; a `Case` is one round trip on it. Cases are a covering set: every pair of values of any two
dimensions occurs, in another combination for every setup.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, fields

import torch

import expertwire as ew
from expertwire import testing
from expertwire._math import ceil_div
from expertwire.reference import Routing, route

NUM_TOPK = 4
CAPACITY = 10
NUM_TOKENS = (10, 0, 3, 7, 1, 5, 10, 2)

WIRES = {
    "bf16": None,
    "fp8": ew.FP8Block(),
    "fp8_b32": ew.FP8Block(block=32),
    "fp8_ue8m0": ew.FP8Block(scale="ue8m0"),
    "fp8_column": ew.FP8Block(scale="ue8m0", block=32, sf_layout="column"),
    "fp8_decode": ew.FP8Block(decode=True),
    "opaque": None,
}
BACK_WIRES = {"bf16": None, "explicit": ew.BF16(), "logfmt10": ew.LogFMT10()}


@dataclass(frozen=True)
class Setup:
    """One buffer. With `interleaved`, two cases are in flight at any time, else one. `direct` puts rows straight into
    the peers' outputs, as only large dispatches do otherwise."""

    transport: str
    num_ranks: int
    engine: str
    placement: str = "contiguous"
    hidden: int = 144
    interleaved: bool = False
    direct: bool = False

    @property
    def num_experts(self) -> int:
        return max(2 * self.num_ranks + 1, 5)

    @property
    def table(self) -> ew.Placement:
        if self.placement == "contiguous":
            return ew.Placement.contiguous(self.num_experts, self.num_ranks)
        owners = max(self.num_ranks - 1, 1)  # the last rank has no experts
        return ew.Placement(tuple((3 * e + e * e) % owners for e in range(self.num_experts)))

    def buffer(self, group: object) -> ew.Buffer:
        """`interleaved` buffers validate, poison and have guards; the others check nothing.

        Five in flight: two cases with a dispatch, a cached one, and the backward of one while the other is open.
        """
        buf = ew.Buffer(
            group,
            num_experts=self.num_experts,
            hidden=self.hidden,
            num_topk=NUM_TOPK,
            num_max_tokens_per_rank=CAPACITY,
            transport=self.transport,
            placement=None if self.placement == "contiguous" else self.table,
            max_in_flight=5 if self.interleaved else 2,
            timeout_s=30.0,
            validate=self.interleaved,
            debug_poison=self.interleaved,
            engine=self.engine,
        )
        if self.direct:
            buf._engine.announce_from_bytes = 0
        return buf

    def __str__(self) -> str:
        flags = "-interleaved" * self.interleaved + "-direct" * self.direct
        return f"{self.transport}{self.num_ranks}-{self.engine}-{self.placement}-h{self.hidden}{flags}"


@dataclass(frozen=True)
class Case:
    """One round trip. `gradients`: which ranks have inputs that need them."""

    layout: str = field(metadata={"values": list(ew.Layout)})
    wire: str = field(metadata={"values": list(WIRES)})
    routing: str = field(metadata={"values": ["uniform", "skewed", "repeats", "holes", "crowd", "nobody"]})
    back_wire: str = field(metadata={"values": list(BACK_WIRES)})
    counts: str = field(metadata={"values": ["host", "device"]})
    mode: str = field(metadata={"values": ["plain", "deferred", "zero_copy"]})
    gradients: str = field(metadata={"values": ["none", "all", "one"]})
    reduce: str = field(metadata={"values": ["token", "rank"]})
    alignment: int = field(metadata={"values": [1, 4]})
    num_biases: int = field(metadata={"values": [0, 1, 2]})
    weighted: bool = field(metadata={"values": [True, False]})
    cached: bool = field(metadata={"values": [True, False]})
    return_weights: bool = field(metadata={"values": [True, False]})
    ids: str = field(metadata={"values": ["int32", "int64"]})

    @property
    def chained(self) -> bool:
        """The rows that go back are made of the rows that came, so that gradients flow through both."""
        return self.gradients != "none" and self.wire in ("bf16", "fp8_decode")

    def needs_grad(self, rank: int) -> bool:
        return self.gradients == "all" or (self.gradients == "one" and rank == 0)

    def __str__(self) -> str:
        values = (getattr(self, f.name) for f in fields(self))
        return "-".join(
            f.name if v is True else f"{f.name}={v}" for f, v in zip(fields(self), values, strict=True) if v
        )


@dataclass(frozen=True)
class Inputs:
    """What one rank puts in. `x`, `again`: bfloat16 rows or opaque pairs; `again` is for the cached dispatch."""

    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    again: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    biases: tuple[torch.Tensor, ...]
    grad_out: torch.Tensor
    grad_weights: torch.Tensor


def inputs(setup: Setup, case: Case, rank: int) -> Inputs:
    num_tokens, hidden = NUM_TOKENS[rank], setup.hidden

    def rows(seed: int) -> torch.Tensor:
        values = testing.random_rows(100 * seed + rank, num_tokens, hidden, scale=0.2)
        values[2:3, :6] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40, 3e38, -448.0])
        return values

    def opaque(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * seed + rank)
        sf = torch.randint(-(2**31), 2**31, (num_tokens, ceil_div(hidden, 128)), generator=generator, dtype=torch.int32)
        return torch.randint(256, (num_tokens, hidden), generator=generator, dtype=torch.uint8), sf

    make = opaque if case.wire == "opaque" else rows
    weights = testing.random_weights(rank, num_tokens, NUM_TOPK) - 0.125
    return Inputs(
        make(1),
        make(2),
        _topk_idx(setup, case, rank).to(getattr(torch, case.ids)),
        weights if case.weighted else None,
        tuple(rows(3 + i) for i in range(case.num_biases)),
        rows(5),
        testing.random_weights(100 + rank, num_tokens, NUM_TOPK),
    )


def _topk_idx(setup: Setup, case: Case, rank: int) -> torch.Tensor:
    num_tokens, num_experts = NUM_TOKENS[rank], setup.num_experts
    match case.routing:
        case "uniform":
            return testing.uniform_routing(rank, num_tokens, NUM_TOPK, num_experts)
        case "skewed":
            return testing.skewed_routing(rank, num_tokens, NUM_TOPK, num_experts)
        case "holes":
            return testing.with_holes(testing.uniform_routing(rank, num_tokens, NUM_TOPK, num_experts), rank)
        case "crowd":
            return torch.arange(NUM_TOPK).expand(num_tokens, NUM_TOPK).contiguous()
        case "nobody":
            return torch.full((num_tokens, NUM_TOPK), -1)
        case _:
            return testing.repeated_routing(rank, num_tokens, NUM_TOPK, num_experts)


def routing(setup: Setup, case: Case) -> Routing:
    """The oracle's routing of a case."""
    ranks = [inputs(setup, case, rank) for rank in range(setup.num_ranks)]
    return route(
        [r.topk_idx for r in ranks],
        [r.topk_weights for r in ranks if r.topk_weights is not None] or None,
        placement=setup.table,
        layout=ew.Layout(case.layout),
        expert_alignment=case.alignment,
        capacity=CAPACITY,
    )


def covering_cases(seed: int) -> list[Case]:
    """A set of cases in which every pair of values of two dimensions occurs. Greedy, reproducible."""
    generator = random.Random(seed)
    dimensions = {f.name: f.metadata["values"] for f in fields(Case)}
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(dimensions, 2)
        for x, y in itertools.product(dimensions[a], dimensions[b])
    }
    cases = []
    while missing:
        anchor = dict(min(missing, key=repr))
        candidates = [
            {name: generator.choice(values) for name, values in dimensions.items()} | anchor for _ in range(16)
        ]
        best = max(candidates, key=lambda c: len(missing & set(itertools.combinations(c.items(), 2))))
        missing -= set(itertools.combinations(best.items(), 2))
        cases.append(Case(**best))
    return cases


def legal(setup: Setup, case: Case) -> bool:
    """A buffer that validates refuses repeats where there is no room for them, and any buffer refuses gradients of
    views that are overwritten before the backward pass."""
    repeats = setup.interleaved and case.layout == ew.Layout.EXPERT_SLOTS and case.routing == "repeats"
    overwritten = case.mode == "zero_copy" and case.gradients != "none"
    return not (repeats or overwritten)
