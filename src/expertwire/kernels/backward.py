"""Launches of the kernels that only backward passes and routed weights need, beside `engine`."""

from __future__ import annotations

import torch

from expertwire._math import ceil_div
from expertwire.kernels import gradients, values
from expertwire.kernels.engine import DeviceEngine, Places, Step
from expertwire.kernels.launch import Rest
from expertwire.kernels.tiles import pow2
from expertwire.layouts.receive import Layout

ENTRIES = 1024


def width_of(engine: DeviceEngine, layout: Layout) -> int:
    """How many float32 values go with a row: one for each slot that it may serve."""
    return engine.num_topk if layout is Layout.COMPACT else 1


def send_values(engine: DeviceEngine, found: torch.Tensor, step: Step, memory: Places) -> None:
    """found [T, K] float32 to the rows of the step, in `memory` of their ranks. Rows that follow vouch for them."""
    width, size = width_of(engine, step.layout), found.numel()
    engine.launch(
        values.send_values, max(1, ceil_div(size * width, ENTRIES)),
        (memory, step.bank), (found, engine.planner.rows_of_slots(step), size),
        lambda: (
            (memory.bases[step.bank],), {"K": engine.num_topk, "WIDTH": width, "ENTRIES": ENTRIES, "num_warps": 4}
        ),
    )  # fmt: skip


def combine_values(engine: DeviceEngine, memory: Places, step: Step, out: torch.Tensor, *, alone: bool) -> None:
    """out [T, K] float32: the values that the ranks of the rows have put into `memory`, once `combine_ready` has waited
    for them. `alone`: no rows are gathered after it."""
    state, size = engine.state, out.numel()

    def rest() -> Rest:
        fixed = (
            memory.bases[step.bank], state.banks[0].words, state.combine_tickets, state.status, engine.rank
        )  # fmt: skip
        return fixed, {
            "R": engine.num_ranks, "RANKS": pow2(engine.num_ranks), "BANKS": state.num_banks, "K": engine.num_topk,
            "WIDTH": width_of(engine, step.layout), "ENTRIES": ENTRIES, "ALONE": alone, "num_warps": 4,
        }  # fmt: skip

    engine.launch(
        values.combine_values, max(1, ceil_div(size, ENTRIES)),
        (memory, step.bank, alone),
        (engine.planner.rows_of_slots(step), out, step.counts, size, state.timeout_us), rest,
    )  # fmt: skip


def gradient_rows(
    engine: DeviceEngine, arrived: torch.Tensor, y: torch.Tensor | None, weights: torch.Tensor | None,
    out: torch.Tensor, dots: torch.Tensor | None, step: Step,
) -> None:  # fmt: skip
    """From arrived [rows, hidden] the gradient of y [rows, hidden] and, with weights, `dots`, that of the weights."""
    lengths, offsets = engine.state.filled(step)
    groups, columns = lengths.numel(), min(pow2(engine.hidden), 2048)
    chunks = max(1, ceil_div(out.shape[0], 2))
    engine.launch(
        gradients.gradient_rows, min(chunks, engine.num_sms * (1 if engine.strict_sms else 8)),
        (groups, y is None, weights is None), (arrived, y, weights, out, dots, lengths, offsets, out.shape[0]),
        lambda: ((), {
            "GROUPS": groups, "GROUP_BINS": pow2(groups), "ROWS": 2, "COLUMNS": columns, "hidden": engine.hidden,
            "WEIGHTED": weights is not None, "num_warps": 8, "enable_fp_fusion": False,
        }),
    )  # fmt: skip
