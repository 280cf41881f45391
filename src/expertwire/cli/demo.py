"""`expertwire demo`: train a small Mixture-of-Experts model across processes, then once more in one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expertwire.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console

    from expertwire.cli.train import Plan, Trained

WIRES = ("bf16", "fp8")
MAX_RANKS = 64


def demo(
    ranks: Annotated[int, typer.Option(help="Processes that share the experts.")] = 4,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 150,
    experts: Annotated[int, typer.Option(help="Experts in each of the two layers.")] = 16,
    topk: Annotated[int, typer.Option(help="Experts per token.")] = 2,
    wire: Annotated[str, typer.Option(help="How rows travel to the experts: bf16 or fp8.")] = "bf16",
    save_routing: Annotated[
        Path | None,
        typer.Option(help="Write the routing of the last steps here, for `bench --routing`.", metavar="FILE"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
) -> None:
    """Train a byte-level MoE model across processes, and show that one process gets the same bits."""
    _check(ranks, steps, experts, topk, wire, seed)
    if save_routing is not None and not save_routing.absolute().parent.is_dir():
        raise InvalidArgument(f"--save-routing: there is no folder {save_routing.absolute().parent}")
    from rich.console import Console

    from expertwire.cli.model import ModelShape
    from expertwire.cli.train import Plan

    console = Console()
    plan = Plan(ModelShape(experts, topk), ranks, steps, wire, seed, _text())
    console.print(
        f"A byte-level language model with 2 layers of {experts} experts, top-{topk}, on {len(plan.text):,} bytes of "
        f"Python documentation: {ranks} processes with {plan.tokens_per_rank} tokens per step each, {wire} rows.",
        highlight=False,
        soft_wrap=True,
    )
    together, alone = _run(console, plan)
    if save_routing is not None:
        _save_routing(save_routing, plan, together)
        console.print(f"routing of the last steps: {save_routing}", highlight=False, soft_wrap=True)
    difference = first_difference(together, alone)
    if difference is not None:
        console.print(f"DIFFERENT: {difference}", style="bold red", highlight=False, soft_wrap=True)
        raise typer.Exit(1)
    console.print(
        f"identical: {ranks} processes and one process have the same {steps} losses on each of {ranks} ranks and the "
        "same weights at the end, bit for bit",
        style="bold green",
        highlight=False,
        soft_wrap=True,
    )


def _check(ranks: int, steps: int, experts: int, topk: int, wire: str, seed: int) -> None:
    for name, value, low, high in (
        ("--ranks", ranks, 1, MAX_RANKS),
        ("--steps", steps, 1, 100_000),
        ("--experts", experts, 1, 1024),
        ("--topk", topk, 1, min(experts, 64)),
        ("--seed", seed, 0, 1 << 31),
    ):
        if not low <= value <= high:
            raise InvalidArgument(f"{name} must be in [{low}, {high}], got {value}")
    if wire not in WIRES:
        raise InvalidArgument(f"--wire must be one of {', '.join(WIRES)}, got {wire!r}")


def _text() -> bytes:
    """Real text that every Python carries: the topics of its interactive help."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def _run(console: Console, plan: Plan) -> tuple[list[Trained], list[Trained]]:
    """The run across processes and the run in one."""
    from expertwire.cli.reports import Inbox
    from expertwire.cli.screen import Progression, Screen
    from expertwire.cli.train import train_alone, train_ranks, warm_up
    from expertwire.testing.ranks import Processes

    ranks, experts = plan.num_ranks, plan.model.experts
    with Screen(console) as screen, Inbox(screen.on_record) as path, Processes(ranks) as processes:
        screen.begin(f"starting {ranks} processes, compiling kernels")
        processes.run(warm_up, plan, num_ranks=1)
        screen.begin(f"{ranks} processes", Progression(ranks, ranks, experts, plan.steps, plan.tokens_per_rank))
        together: list[Trained] = processes.run(train_ranks, plan, path, timeout_s=3600)
        screen.begin("one process, for comparison", Progression(1, ranks, experts, plan.steps, plan.tokens_per_rank))
        (alone,) = processes.run(train_alone, plan, path, num_ranks=1, timeout_s=3600)
    return together, alone


def first_difference(together: list[Trained], alone: list[Trained]) -> str | None:
    """The earliest step, then the lowest rank, whose loss differs; or a rank whose final weights do."""
    for step, losses in enumerate(zip(*(run.losses for run in together), strict=True)):
        for rank, seen in enumerate(losses):
            expected = alone[rank].losses[step]
            if seen != expected:
                return f"first difference in step {step} on rank {rank}: loss {seen!r}, and {expected!r} in one process"
    for rank, (run, other) in enumerate(zip(together, alone, strict=True)):
        for name in ("shared_hash", "expert_hash"):
            if getattr(run, name) != getattr(other, name):
                return f"all losses agree, but the final {name.removesuffix('_hash')} weights of rank {rank} differ"
    return None


def _save_routing(path: Path, plan: Plan, runs: list[Trained]) -> None:
    """topk_idx [steps * layers, ranks, T, K] as .npz, with num_experts."""
    import numpy as np
    import torch

    routing = torch.stack([run.routing for run in runs], dim=2).flatten(0, 1)
    with path.open("wb") as file:
        np.savez_compressed(file, topk_idx=routing.to(torch.int16).numpy(), num_experts=plan.model.experts)
