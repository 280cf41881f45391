"""Holds what the ranks reported against the oracle, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from conformance_cases import BACK_WIRES, CAPACITY, NUM_TOPK, WIRES, Case, Inputs, Setup, inputs, routing
from conformance_run import Report

import expertwire as ew
from expertwire import reference
from expertwire.layouts.receive import worst_case_rows
from expertwire.reference import Received, Routing
from expertwire.testing import assert_equal


def check(setup: Setup, case: Case, reports: list[Report]) -> None:
    route = routing(setup, case)
    ranks = [inputs(setup, case, rank) for rank in range(setup.num_ranks)]
    received = reference.dispatch([r.x for r in ranks], route, WIRES[case.wire])
    again = reference.dispatch([r.again for r in ranks], route, WIRES[case.wire])
    for rank, report in enumerate(reports):
        check_received(report, "sent", received[rank], rank, setup, case)
        if case.cached:
            check_received(report, "again", again[rank], rank, setup, case)
    check_returned(reports, received, ranks, route, case)
    if case.gradients != "none":
        check_gradients(reports, received, ranks, route, case)


def check_received(report: Report, stage: str, expected: Received, rank: int, setup: Setup, case: Case) -> None:
    """Rows that nobody fills are marked -1, and hold anything."""

    def equal(seen: Any, wanted: Any, name: str) -> None:
        assert_equal(seen, wanted, f"rank {rank}, {stage}.{name}")

    seen = {name.removeprefix(f"{stage}."): value for name, value in report.items() if name.startswith(stage)}
    num_rows = len(expected.x)
    if case.counts == "device" and case.layout != ew.Layout.EXPERT_SLOTS:
        num_local_experts = len(expected.num_tokens_per_expert)
        fixed = worst_case_rows(
            ew.Layout(case.layout), setup.num_ranks, CAPACITY, NUM_TOPK, num_local_experts, case.alignment
        )
        assert len(seen["x"]) == fixed
        assert fixed >= num_rows
        for name, rest in (("topk_idx", -1), ("topk_weights", 0), ("row_source", -1), ("x", None), ("sf", None)):
            if seen[name] is not None:
                assert rest is None or (seen[name][num_rows:] == rest).all(), name
                seen[name] = seen[name][:num_rows]
    used = slice(None) if expected.row_source is None else expected.row_source[..., 0] >= 0
    for name in ("topk_idx", "topk_weights", "row_source", "num_tokens_per_expert", "num_padded_tokens_per_expert",
                 "expert_offsets", "num_tokens_per_rank"):  # fmt: skip
        equal(seen[name], getattr(expected, name), name)
    assert seen["x"].shape == expected.x.shape
    equal(seen["x"][used], expected.x[used], "x")
    equal(None if seen["sf"] is None else seen["sf"][used], None if expected.sf is None else expected.sf[used], "sf")
    for name in ("num_tokens_per_expert", "num_padded_tokens_per_expert", "num_tokens_per_rank"):
        assert seen[f"{name}_list"] == (getattr(expected, name).tolist() if case.counts == "host" else None), name
    assert seen["missing_ranks"] == ()
    if case.wire == "fp8_column" and expected.x.numel():
        assert report["column"][-2] == 1
        assert report["column"][-1] % 4 == 0


def check_returned(
    reports: list[Report], received: list[Received], ranks: list[Inputs], route: Routing, case: Case
) -> None:
    returned = reference.combine(
        _exact(reports, received, "y"),
        route,
        reduce=case.reduce,
        wire=BACK_WIRES[case.back_wire],
        bias=[[r.biases[i] for r in ranks] for i in range(case.num_biases)],
        topk_weights=_exact(reports, received, "rows_weights"),
    )
    for rank, (report, expected) in enumerate(zip(reports, returned, strict=True)):
        assert_equal(report["back.x"], expected.x, f"rank {rank}, back.x")
        assert_equal(report["back.topk_weights"], expected.topk_weights, f"rank {rank}, back.topk_weights")
        assert report["missing"] == 0


def check_gradients(
    reports: list[Report], received: list[Received], ranks: list[Inputs], route: Routing, case: Case
) -> None:
    """Leaves of ranks that need none have no gradient; all others must have one, also where nothing was received."""
    returns_weights = "rows_weights" in reports[0]
    combined = reference.combine_backward(
        [r.grad_out for r in ranks],
        _exact(reports, received, "y"),
        route,
        [r.grad_weights for r in ranks] if returns_weights else None,
    )
    expected: list[dict[str, torch.Tensor | None]] = [
        {f"bias{i}": part.bias for i in range(case.num_biases)} for part in combined
    ]
    compact = case.layout == ew.Layout.COMPACT
    for rank, part in enumerate(combined):
        expected[rank]["y"] = part.y
        expected[rank]["rows_weights" if compact else "topk_weights"] = part.topk_weights
    through_dispatch = reference.dispatch_backward(
        [2 * part.y for part in combined] if case.chained else [torch.zeros_like(part.y) for part in combined],
        route,
        [2 * part.topk_weights for part in combined] if compact and returns_weights and case.weighted else None,
    )
    for rank, part in enumerate(through_dispatch):
        expected[rank]["x"] = part.x
        if compact:
            expected[rank]["topk_weights"] = part.topk_weights

    for rank, report in enumerate(reports):
        for name in [name for name in report if name.startswith("grad.")]:
            seen, wanted = report[name], expected[rank][name.removeprefix("grad.")]
            if not case.needs_grad(rank):
                assert seen is None, name
                continue
            if wanted is not None and seen is not None and seen.shape != wanted.shape:  # counts="device"
                assert not seen[len(wanted) :].any(), name
                seen = seen[: len(wanted)]
            if wanted is None and seen is not None:
                wanted = torch.zeros_like(seen)
            assert_equal(seen, wanted, f"rank {rank}, {name}")


def _exact(reports: list[Report], received: list[Received], name: str) -> list[torch.Tensor] | None:
    """What the ranks gave to combine, without the rows that only counts="device" has."""
    if name not in reports[0]:
        return None
    return [report[name][: len(part.x)] for report, part in zip(reports, received, strict=True)]
