"""What the bench measures: cases, named suites of them, and the inputs of a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from expertwire.errors import InvalidArgument
from expertwire.formats import BF16, FP8Block, LogFMT10, WireFormat
from expertwire.layouts.receive import Layout
from expertwire.testing.data import random_rows, random_weights, skewed_routing, uniform_routing

WIRES: dict[str, Callable[[], WireFormat]] = {
    "bf16": BF16,
    "fp8": FP8Block,
    "fp8_ue8m0": lambda: FP8Block(scale="ue8m0"),
}
COMBINE_WIRES: dict[str, Callable[[], WireFormat]] = {"bf16": BF16, "logfmt10": LogFMT10}
ROUTINGS = ("uniform", "skewed")
LAYOUTS = tuple(layout.value for layout in Layout)


@dataclass(frozen=True)
class Case:
    """One dispatch and one combine. `tokens` per rank; `routing` is uniform, skewed, or a file saved by the demo."""

    ranks: int = 2
    tokens: int = 1024
    hidden: int = 7168
    experts: int = 256
    topk: int = 1
    layout: str = "compact"
    wire: str = "bf16"
    combine_wire: str = "bf16"
    routing: str = "uniform"
    name: str = ""

    def __post_init__(self) -> None:
        for label, value, least in (("ranks", self.ranks, 1), ("tokens", self.tokens, 0), ("topk", self.topk, 1)):
            if value < least:
                raise InvalidArgument(f"{label} must be at least {least}, got {value}")
        for label, choice, allowed in (
            ("layout", self.layout, LAYOUTS),
            ("wire", self.wire, tuple(WIRES)),
            ("combine wire", self.combine_wire, tuple(COMBINE_WIRES)),
        ):
            if choice not in allowed:
                raise InvalidArgument(f"{label} must be one of {', '.join(allowed)}, got {choice!r}")
        if self.topk > self.experts:
            raise InvalidArgument(f"topk is {self.topk}, but there are only {self.experts} experts")
        if self.experts % self.ranks:
            raise InvalidArgument(
                f"other lines need equal shares: {self.experts} experts do not divide by {self.ranks} ranks"
            )
        if self.hidden < 128 or self.hidden % 128:
            raise InvalidArgument(f"hidden must be a multiple of 128, got {self.hidden}")
        if self.routing not in ROUTINGS:
            num_ranks, num_tokens, _ = saved_routing(self.routing)[0].shape
            if self.ranks > num_ranks or self.tokens > num_tokens:
                raise InvalidArgument(
                    f"{self.routing} has {num_ranks} ranks, {num_tokens} tokens, not {self.ranks} and {self.tokens}"
                )

    @property
    def world(self) -> str:
        return "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"

    @property
    def title(self) -> str:
        wires = self.wire if self.combine_wire == "bf16" else f"{self.wire}/{self.combine_wire}"
        shape = f"{self.tokens} x {self.hidden}, top-{self.topk} of {self.experts}"
        kind = self.routing if self.routing in ROUTINGS else "saved"
        routing = "" if kind == "uniform" else f", {kind} routing"
        return f"{self.world}, {shape}, {self.layout}, {wires}{routing}"

    def inputs(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, H], topk_idx [T, K], topk_weights [T, K] of one rank; every rank can make those of all."""
        x = random_rows(rank, self.tokens, self.hidden)
        weights = random_weights(1000 + rank, self.tokens, self.topk)
        if self.routing == "uniform":
            return x, uniform_routing(2000 + rank, self.tokens, self.topk, self.experts), weights
        if self.routing == "skewed":
            return x, skewed_routing(2000 + rank, self.tokens, self.topk, self.experts), weights
        return x, saved_routing(self.routing)[0][rank, : self.tokens].long(), weights

    def rows_sent(self, topk_idx: torch.Tensor) -> int:
        """Rows of one rank, [T, K] ids: one per (token, slot), for COMPACT one per (token, rank)."""
        if self.layout != Layout.COMPACT:
            return topk_idx.numel()
        owner = (topk_idx // (self.experts // self.ranks)).sort(dim=1).values
        return len(owner) + int((owner.diff(dim=1) != 0).sum())


def saved_routing(path: str) -> tuple[torch.Tensor, int]:
    """What `demo --save-routing` wrote: topk_idx [ranks, tokens, K], of several steps and layers, and num_experts."""
    try:
        with np.load(path) as file:
            saved, experts = torch.from_numpy(file["topk_idx"]), int(file["num_experts"])
    except (OSError, ValueError, KeyError) as error:
        raise InvalidArgument(f"{path} is no routing that `expertwire demo --save-routing` wrote: {error}") from None
    return saved.transpose(0, 1).flatten(1, 2), experts


PREFILL = Case(name="prefill")
DECODE = Case(tokens=128, topk=8, layout="expert_major", wire="fp8", name="decode")

SUITES: dict[str, list[Case]] = {
    "standard": [
        PREFILL,
        replace(PREFILL, ranks=4),
        replace(PREFILL, topk=8, name="prefill, top-8"),
        replace(PREFILL, tokens=512, topk=8, layout="expert_major", name="training, top-8"),
        DECODE,
        replace(DECODE, layout="expert_slots"),
        replace(DECODE, routing="skewed"),
        replace(DECODE, tokens=0, name="empty"),
        replace(PREFILL, tokens=0, name="empty"),
    ],
    "scaling": [
        *(replace(PREFILL, tokens=4**n, hidden=1024, name="rows") for n in range(9)),
        *(
            replace(PREFILL, tokens=1024, hidden=1024, topk=8, experts=n, layout="expert_major", name="experts")
            for n in (8, 64, 512, 4096)
        ),
        *(replace(PREFILL, ranks=n, tokens=2048 // n, hidden=1024, name="ranks") for n in (1, 2, 4, 8)),
    ],
}
