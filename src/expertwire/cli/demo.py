"""`expertwire demo`: train a small Mixture-of-Experts model across processes, then once more in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expertwire.errors import InvalidArgument

if TYPE_CHECKING:
    from expertwire.cli.demo_screen import Screen
    from expertwire.cli.demo_train import Plan, Trained

WIRES = ("bf16", "fp8")
MAX_RANKS = 64
_TIMEOUT_S = 24 * 3600.0


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

    from expertwire.cli.demo_screen import Screen, say

    console = Console()
    text = _text()
    say(
        console,
        f"A byte-level language model with 2 layers of {experts} experts, top-{topk}, learns {len(text):,} bytes of "
        f"Python documentation: {ranks} processes share batches and experts, and exchange {wire} rows.",
    )
    with Screen(console) as screen:
        plan, together, alone = _run(screen, ranks, steps, experts, topk, wire, seed, text)
    if save_routing is not None:
        _save_routing(save_routing, plan, together)
        say(console, f"routing of the last steps: {save_routing}")
    difference = first_difference(together, alone)
    if difference is not None:
        say(console, f"DIFFERENT: {difference}", "bold red")
        raise typer.Exit(1)
    say(
        console,
        f"identical: bit for bit the same {steps} losses on each of {ranks} ranks, and the same weights at the end, in "
        f"{ranks} processes and in one",
        "bold green",
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


def _run(
    screen: Screen, ranks: int, steps: int, experts: int, topk: int, wire: str, seed: int, text: bytes
) -> tuple[Plan, list[Trained], list[Trained]]:
    """The run across processes and the run in one. Torch is loaded here, when the screen shows something already."""
    screen.begin(f"starting {ranks} processes, compiling kernels")

    from expertwire.cli.demo_model import ModelShape
    from expertwire.cli.demo_reports import Inbox
    from expertwire.cli.demo_screen import Progression
    from expertwire.cli.demo_train import Plan, train_alone, train_ranks, warm_up
    from expertwire.testing.ranks import Processes

    plan = Plan(ModelShape(experts, topk), ranks, steps, wire, seed, text)
    with Processes(ranks) as processes:

        def follow(title: str, run: Callable[..., Any], num_processes: int) -> list[Any]:
            screen.begin(title, Progression(num_processes, ranks, steps, plan.tokens_per_rank))
            with Inbox(screen.on_record) as path:
                return processes.run(run, plan, path, num_ranks=num_processes, timeout_s=_TIMEOUT_S)

        processes.run(warm_up, plan, num_ranks=1)
        together = follow(f"{ranks} processes", train_ranks, ranks)
        (alone,) = follow("one process, for comparison", train_alone, 1)
    return plan, together, alone


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
