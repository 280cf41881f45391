"""A rank's side of the conformance suite: run cases on one buffer, report every tensor that came out."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from conformance_cases import BACK_WIRES, WIRES, Case, Setup, inputs

import expertwire as ew

Report = dict[str, Any]
DISPATCHED = (
    "x",
    "sf",
    "topk_idx",
    "topk_weights",
    "row_source",
    "num_tokens_per_expert",
    "num_padded_tokens_per_expert",
    "expert_offsets",
    "num_tokens_per_rank",
    "num_tokens_per_expert_list",
    "num_padded_tokens_per_expert_list",
    "num_tokens_per_rank_list",
    "missing_ranks",
)


def run_rank(group: object, setup: Setup, cases: list[Case]) -> list[Report]:
    """All cases on one buffer; the reports of this rank."""
    reports: list[Report] = []
    with setup.buffer(group) as buf:
        size = 2 if setup.interleaved else 1
        for first in range(0, len(cases), size):
            reports += _alternate([_round_trip(buf, setup, case) for case in cases[first : first + size]])
    return reports


def _alternate(runs: list[Generator[None, None, Report]]) -> list[Report]:
    """Advance all runs by one phase, then, in the opposite order, by the next; their reports."""
    reports: list[Report | None] = [None] * len(runs)
    order = list(range(len(runs)))
    while None in reports:
        for i in order:
            try:
                next(runs[i])
            except StopIteration as end:
                reports[i] = end.value
        order.reverse()
    return reports


def _round_trip(buf: ew.Buffer, setup: Setup, case: Case) -> Generator[None, None, Report]:
    """Dispatch, perhaps again with the same routing, combine, backward; yields between phases."""
    try:
        return (yield from _phases(buf, setup, case))
    except Exception as error:
        error.add_note(f"rank {buf.rank}, {setup}, {case}")
        raise


def _phases(buf: ew.Buffer, setup: Setup, case: Case) -> Generator[None, None, Report]:
    mine = inputs(setup, case, buf.rank)
    grad = case.needs_grad(buf.rank)
    x, topk_weights = mine.x, mine.topk_weights
    if grad and case.chained:
        x.requires_grad_()
    if grad and topk_weights is not None:
        topk_weights.requires_grad_()
    biases = tuple(bias.requires_grad_(grad) for bias in mine.biases)

    sent = buf.dispatch(
        x, mine.topk_idx, topk_weights, layout=ew.Layout(case.layout), expert_alignment=case.alignment,
        wire=WIRES[case.wire], counts=case.counts,
        defer_receive=case.mode == "deferred", zero_copy=case.mode == "zero_copy",
    )  # fmt: skip
    if case.mode == "deferred" and not grad:
        _scribble(x)
    yield
    if sent.hook is not None:
        assert sent.hook() is sent
    report = {f"sent.{name}": _copy(getattr(sent, name)) for name in DISPATCHED}
    report["column"] = None if sent.sf is None else sent.sf.stride()
    if case.cached:
        again = buf.dispatch(mine.again, handle=sent.handle, wire=WIRES[case.wire])
        report |= {f"again.{name}": _copy(getattr(again, name)) for name in DISPATCHED}
    yield

    y = _expert_rows(sent, case, setup, buf.rank)
    report["y"] = y.detach().clone()
    rows_weights = None
    if case.return_weights and case.layout == ew.Layout.COMPACT:
        rows_weights = torch.rand(sent.topk_idx.shape, generator=torch.Generator().manual_seed(buf.rank))
        if sent.topk_weights is not None:
            rows_weights = 2 * sent.topk_weights
        elif grad:
            rows_weights.requires_grad_()
        report["rows_weights"] = rows_weights.detach().clone()
    back = buf.combine(
        y, sent.handle, topk_weights=rows_weights, bias=biases[0] if len(biases) == 1 else biases or None,
        reduce=case.reduce, wire=BACK_WIRES[case.back_wire], defer_receive=case.mode == "deferred",
    )  # fmt: skip
    if case.mode == "deferred" and case.gradients == "none":
        _scribble(y)
    yield
    if back.hook is not None:
        assert back.hook() is back
    report |= {"back.x": _copy(back.x), "back.topk_weights": _copy(back.topk_weights), "missing": back.num_missing}
    if case.gradients != "none":
        outputs = [(back.x, mine.grad_out), (back.topk_weights, mine.grad_weights)]
        outputs = [(out, g) for out, g in outputs if out is not None]
        torch.autograd.backward([out for out, _ in outputs], [g for _, g in outputs])
        leaves = {"x": x if case.chained else None, "topk_weights": topk_weights, "y": y, "rows_weights": rows_weights}
        leaves |= {f"bias{i}": bias for i, bias in enumerate(biases)}
        report |= {f"grad.{name}": t.grad for name, t in leaves.items() if t is not None and t.is_leaf}
    return report


def _expert_rows(sent: ew.Dispatched, case: Case, setup: Setup, rank: int) -> torch.Tensor:
    """What the experts make: twice the received rows, or random rows with NaN where nobody may look."""
    if case.chained:
        return 2 * sent.x
    shape = (*sent.x.shape[:-1], setup.hidden)
    y = (0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(rank))).bfloat16()
    unused = (sent.topk_idx < 0).all(dim=-1) if sent.row_source is None else sent.row_source[..., 0] < 0
    y.view(-1, setup.hidden)[3::7, :2] = torch.tensor([float("inf"), -0.0])
    y[unused] = float("nan")
    return y.requires_grad_(case.needs_grad(rank))


def _scribble(t: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
    """The send half is over, so the caller may reuse its memory."""
    for part in t if isinstance(t, tuple) else (t,):
        part.zero_()


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
