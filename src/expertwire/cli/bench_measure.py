"""Measuring one case inside the processes of its ranks: first correctness against the oracle, then time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from expertwire import reference
from expertwire.buffer import Buffer
from expertwire.cli import bench_lines
from expertwire.cli.bench_cases import COMBINE_WIRES, WIRES, Case
from expertwire.cli.bench_lines import AllToAll, Fresh, Kept, Mpi, TorchGroup
from expertwire.handle import Dispatched
from expertwire.layouts.receive import Layout
from expertwire.testing.compare import assert_equal
from expertwire.testing.data import random_rows
from expertwire.testing.timing import interleaved
from expertwire.topology import Placement

Tensor = torch.Tensor


@dataclass(frozen=True)
class Measured:
    """What one rank measured of one operation: seconds per call of every line, and the bytes of its result.

    Bytes: rows in the result of dispatch, or rows summed by combine, times bytes per row as it travels.
    """

    operation: str
    num_bytes: int
    samples: dict[str, list[float]]


def measure(group: Any, case: Case, seconds: float, communicator: Any = None) -> list[Measured]:
    """All lines of dispatch and of combine. Collective. `communicator` adds a line for MPI."""
    with Buffer(
        group,
        num_experts=case.experts,
        hidden=case.hidden,
        num_topk=case.topk,
        num_max_tokens_per_rank=max(1, case.tokens),
    ) as buffer:
        return _Bench(group, case, buffer, communicator).run(seconds)


class _Bench:
    def __init__(self, group: Any, case: Case, buffer: Buffer, communicator: Any) -> None:
        self._group, self._case, self._buffer = group, case, buffer
        self._rank = buffer.rank
        self._inputs = [case.inputs(rank) for rank in range(case.ranks)]
        self._others: dict[str, AllToAll] = {}
        for name, memory in (("", Fresh), (", kept memory", Kept)):
            self._others[f"gloo{name}"] = TorchGroup(group, memory())
            if communicator is not None:
                self._others[f"mpi{name}"] = Mpi(communicator, memory())

    def run(self, seconds: float) -> list[Measured]:
        sent = self._dispatch()
        y_of_rank, y = self._check_dispatch(sent)
        self._check_combine(sent, y_of_rank, y)
        if self._case.tokens == 0:
            return [Measured("dispatch + combine", 0, self._interleaved(self._round_trips(y), seconds))]
        case = self._case
        wire, combine_wire = WIRES[case.wire](), COMBINE_WIRES[case.combine_wire]()
        dispatched, row_bytes = (w.payload_bytes(case.hidden) + w.sf_bytes(case.hidden) for w in (wire, combine_wire))
        num_rows, num_summed = len(y_of_rank[self._rank]), case.rows_sent(self._inputs[self._rank][1])
        there, back = num_rows * dispatched, num_summed * row_bytes
        return [
            Measured("dispatch", there, self._interleaved(self._dispatches(there), seconds)),
            Measured("combine", back, self._interleaved(self._combines(sent, y_of_rank, y, back), seconds)),
        ]

    # -- lines ---------------------------------------------------------------------------------------------------

    def _dispatch(self) -> Dispatched:
        case, (x, idx, weights) = self._case, self._inputs[self._rank]
        return self._buffer.dispatch(x, idx, weights, layout=Layout(case.layout), wire=WIRES[case.wire]())

    def _combine(self, y: Tensor, sent: Dispatched) -> Tensor:
        return self._buffer.combine(y, sent.handle, wire=COMBINE_WIRES[self._case.combine_wire]()).x

    def _dispatch_by(self, other: AllToAll) -> bench_lines.Sent:
        case, (x, idx, weights) = self._case, self._inputs[self._rank]
        sf = None
        if case.wire == "fp8":
            x, sf = bench_lines.quantise(x)
        elif case.wire != "bf16":
            x, sf = WIRES[case.wire]().encode(x)
        return bench_lines.dispatch(
            other, x.view(torch.uint8) if sf is not None else x, sf, idx, weights, case.experts,
            compact=case.layout == Layout.COMPACT,
        )  # fmt: skip

    def _dispatches(self, num_bytes: int) -> dict[str, Callable[[], object]]:
        lines: dict[str, Callable[[], object]] = {"expertwire": lambda: self._dispatch().handle.release()}
        for name, other in self._others.items():
            lines[name] = lambda other=other: self._dispatch_by(other)  # type: ignore[misc]
        return {**lines, "memory copy": _copy(num_bytes)}

    def _combines(
        self, sent: Dispatched, y_of_rank: list[Tensor], y: Tensor, num_bytes: int
    ) -> dict[str, Callable[[], object]]:
        lines: dict[str, Callable[[], object]] = {"expertwire": lambda: self._combine(y, sent)}
        plain = y_of_rank[self._rank]
        for name, other in self._others.items():
            theirs = self._dispatch_by(other)
            lines[name] = lambda other=other, theirs=theirs: bench_lines.combine(  # type: ignore[misc]
                other, plain, theirs, self._case.tokens
            )
        return {**lines, "memory copy": _copy(num_bytes)}

    def _round_trips(self, y: Tensor) -> dict[str, Callable[[], object]]:
        rows = torch.empty((0, self._case.hidden), dtype=torch.bfloat16)
        lines: dict[str, Callable[[], object]] = {"expertwire": lambda: self._combine(y, self._dispatch())}
        for name, other in self._others.items():
            lines[name] = lambda other=other: bench_lines.combine(other, rows, self._dispatch_by(other), 0)  # type: ignore[misc]
        return lines

    def _interleaved(self, lines: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
        return interleaved(lines, self._all_gather, lambda: dist.barrier(self._group), seconds)

    def _all_gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self._case.ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    # -- correctness ---------------------------------------------------------------------------------------------

    def _routing(self, layout: Layout) -> reference.Routing:
        return reference.route(
            [idx for _, idx, _ in self._inputs],
            [weights for _, _, weights in self._inputs],
            placement=Placement.contiguous(self._case.experts, self._case.ranks),
            layout=layout,
        )

    @property
    def _plain_layout(self) -> Layout:
        """EXPERT_SLOTS has the rows of EXPERT_MAJOR in roomier places."""
        return Layout.COMPACT if self._case.layout == Layout.COMPACT else Layout.EXPERT_MAJOR

    def _check_dispatch(self, sent: Dispatched) -> tuple[list[Tensor], Tensor]:
        """Compare with oracle and other lines. Returns rows for combine: of all ranks, and as `sent` has them."""
        case = self._case
        routing = self._routing(self._plain_layout)
        expected = reference.dispatch([x for x, _, _ in self._inputs], routing, WIRES[case.wire]())[self._rank]
        x, sf, used = sent.x, sent.sf, None
        if case.layout == Layout.EXPERT_SLOTS:
            assert sent.row_source is not None
            used = sent.row_source[..., 0] >= 0
            x, sf = x.view(torch.uint8)[used].view(x.dtype), None if sf is None else sf[used]
        assert_equal(x, expected.x, f"dispatch, {case.title}")
        assert_equal(sf, expected.sf, f"scale factors, {case.title}")
        for name, other in self._others.items():
            theirs = self._dispatch_by(other)
            assert_equal(theirs.x.view(torch.uint8), x.view(torch.uint8), f"dispatch by {name}")
            assert_equal(theirs.sf, sf, f"scale factors by {name}")
        y_of_rank = [random_rows(4000 + rank, len(place), case.hidden) for rank, place in enumerate(routing.places)]
        y = y_of_rank[self._rank]
        if used is not None:
            y = torch.empty(sent.x.shape, dtype=torch.bfloat16)
            y[used] = y_of_rank[self._rank]
        return y_of_rank, y

    def _check_combine(self, sent: Dispatched, y_of_rank: list[Tensor], y: Tensor) -> None:
        case = self._case
        wire = COMBINE_WIRES[case.combine_wire]()
        expected = reference.combine(y_of_rank, self._routing(self._plain_layout), wire=wire)[self._rank].x
        assert_equal(self._combine(y, sent), expected, f"combine, {case.title}")
        for name, other in self._others.items():
            theirs = bench_lines.combine(other, y_of_rank[self._rank], self._dispatch_by(other), case.tokens)
            if case.combine_wire == "bf16":
                torch.testing.assert_close(theirs, expected, rtol=2e-2, atol=2e-2, msg=f"combine by {name} is wrong")


def measure_row_work(_group: Any, seconds: float) -> list[Measured]:
    """FP8 quantisation, and the weighted sum of combine, of 128 tokens with 7168 channels: numba against torch."""
    import numpy as np

    from expertwire.host import kernels

    work = kernels.load("auto")
    tokens, topk, hidden = 128, 8, 7168
    x, weights = random_rows(1, tokens, hidden), torch.rand(tokens, topk)
    payload, sf = torch.empty((tokens, hidden), dtype=torch.uint8), torch.empty(tokens, hidden // 128)
    rows, out = random_rows(2, tokens * topk, hidden), torch.empty((tokens, hidden), dtype=torch.bfloat16)
    operands = rows.data_ptr() + 2 * hidden * np.arange(tokens * topk).reshape(tokens, topk)
    no_bias = np.empty(0, np.int64)

    def quantise() -> None:
        work.encode_fp8(x.data_ptr(), tokens, hidden, 128, False, payload.data_ptr(), sf.data_ptr(), 4 * sf.shape[1])

    def reduce() -> None:
        work.reduce_rows(operands, False, weights.numpy(), True, no_bias, out.data_ptr(), hidden, False)

    quantise()
    reduce()
    assert_equal(payload, bench_lines.quantise(x)[0], "quantise")
    by_slot = rows.view(tokens, topk, hidden)
    torch.testing.assert_close(out, bench_lines.weighted_sum(by_slot, weights), rtol=2e-2, atol=2e-2)
    pairs: list[tuple[str, int, dict[str, Callable[[], object]]]] = [
        ("quantise", 3 * x.numel(), {"expertwire": quantise, "torch": lambda: bench_lines.quantise(x)}),
        (
            "weighted sum", 2 * (rows.numel() + out.numel()),
            {"expertwire": reduce, "torch": lambda: bench_lines.weighted_sum(by_slot, weights)},
        ),
    ]  # fmt: skip
    return [
        Measured(name, num_bytes, interleaved(lines, lambda value: [value], lambda: None, seconds))
        for name, num_bytes, lines in pairs
    ]


def _copy(num_bytes: int) -> Callable[[], object]:
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    return lambda: target.copy_(source)
