"""Measuring one case on the ranks of GPUs: first correctness against the oracle, then time, then correctness again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from expertwire import reference
from expertwire.buffer import Buffer
from expertwire.cli import bench_lines
from expertwire.cli.bench_cases import WIRES
from expertwire.cli.bench_device import DeviceCase
from expertwire.cli.bench_measure import Measured
from expertwire.handle import Dispatched
from expertwire.layouts.receive import Layout
from expertwire.testing import gpu_timing
from expertwire.testing.compare import assert_equal
from expertwire.testing.data import random_rows
from expertwire.testing.gpu_timing import Line
from expertwire.topology import Placement
from expertwire.world import bootstrap

Tensor = torch.Tensor
_TIMEOUT_S = 30.0
_DEVICE = "cuda"


@dataclass(frozen=True)
class Oracle:
    """What every rank must get: inputs, received rows (of EXPERT_SLOTS those in use), experts' outputs, sums."""

    inputs: list[tuple[Tensor, Tensor, Tensor]]
    received: list[reference.Received]
    y: list[Tensor]
    sums: list[Tensor]


def oracle(case: DeviceCase) -> Oracle:
    """Of all ranks; seconds for thousands of tokens, and kept for the next case with the same inputs."""
    return _oracle(replace(case, num_sms=0, processes=False, name=""))


@lru_cache(maxsize=1)
def _oracle(case: DeviceCase) -> Oracle:
    inputs = [case.inputs(rank) for rank in range(case.ranks)]
    routing = reference.route(
        [idx for _, idx, _ in inputs], [weights for _, _, weights in inputs],
        placement=Placement.contiguous(case.experts, case.ranks),
        layout=Layout.COMPACT if case.layout == Layout.COMPACT else Layout.EXPERT_MAJOR,
    )  # fmt: skip
    received = reference.dispatch([x for x, _, _ in inputs], routing, WIRES[case.wire]())
    y = [random_rows(4000 + rank, len(place), case.hidden) for rank, place in enumerate(routing.places)]
    return Oracle(inputs, received, y, [back.x for back in reference.combine(y, routing)])


def measure(group: Any, case: DeviceCase, seconds: float) -> list[Measured]:
    """All lines of dispatch, combine and both. Collective; leaves nothing behind."""
    ranks = bootstrap(group)
    if case.processes:
        torch.cuda.set_device(ranks.rank % torch.cuda.device_count())
    bench = _DeviceBench(group, case)
    with Buffer(
        group, num_experts=case.experts, hidden=case.hidden, num_topk=case.topk,
        num_max_tokens_per_rank=max(1, case.tokens), max_in_flight=1, timeout_s=_TIMEOUT_S, validate=False,
        device=_DEVICE, num_sms=case.num_sms or None,
    ) as buffer:  # fmt: skip
        return bench.run(buffer, seconds)


class _DeviceBench:
    def __init__(self, group: Any, case: DeviceCase) -> None:
        self._case, self._layout = case, Layout(case.layout)
        self._ranks = bootstrap(group)
        self._rank = self._ranks.rank
        self._oracle = oracle(case)
        self._x, self._idx, self._weights = (t.to(_DEVICE) for t in self._oracle.inputs[self._rank])
        self._bandwidth = gpu_timing.in_turns(self._rank, case.ranks, self._barrier, gpu_timing.copy_bandwidth)

    def run(self, buffer: Buffer, seconds: float) -> list[Measured]:
        sent = self._check(buffer)
        rows = self._y_as(sent)
        there, back, both = self._calls(buffer, sent, rows)
        num_rows = self._case.rows_sent(self._oracle.inputs[self._rank][1])
        dispatched, summed = self._case.dispatch_bytes(num_rows), self._case.combine_bytes(num_rows)
        plain_there, plain_back = self._plain()
        owned: dict[str, Callable[[], object]] = {
            "expertwire, owned tensors": lambda: self._dispatch(buffer, counts="device").handle.release()
        }
        ordinary: dict[str, Callable[[], object]] = {}
        if self._case.processes:  # rows that lie where peers can read them cost one copy less
            memory = buffer.combine_input(sent.handle)
            memory.copy_(rows)
            there, back, both = self._calls(buffer, sent, memory)
            ordinary = {"expertwire, ordinary tensor": lambda: buffer.combine(rows, sent.handle)}
        measured = [
            self._measured("dispatch", dispatched, there, owned, plain_there, seconds),
            self._measured("combine", summed, back, ordinary, plain_back, seconds),
            self._measured("round trip", dispatched + summed, both, {}, None, seconds),
        ]
        self._check(buffer)
        return measured

    # -- lines ---------------------------------------------------------------------------------------------------

    def _dispatch(self, buffer: Buffer, **options: Any) -> Dispatched:
        wire = WIRES[self._case.wire]()
        return buffer.dispatch(self._x, self._idx, self._weights, layout=self._layout, wire=wire, **options)

    def _calls(self, buffer: Buffer, sent: Dispatched, y: Tensor) -> list[Callable[[], object]]:
        """Dispatch, combine, and both, with shapes that a graph can hold. y is of the worst-case shape for the last."""
        worst = torch.empty(self._worst_shape(buffer), dtype=torch.bfloat16, device=_DEVICE)

        def dispatch() -> None:
            self._dispatch(buffer, counts="device", zero_copy=True).handle.release()

        def round_trip() -> None:
            handle = self._dispatch(buffer, counts="device", zero_copy=True).handle
            buffer.combine(buffer.combine_input(handle) if self._case.processes else worst, handle)

        return [dispatch, lambda: buffer.combine(y, sent.handle), round_trip]

    def _worst_shape(self, buffer: Buffer) -> torch.Size:
        sent = self._dispatch(buffer, counts="device", zero_copy=True)
        sent.handle.release()
        return torch.Size((*sent.x.shape[:-1], self._case.hidden))

    def _plain(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """Dispatch and combine of one rank alone, as torch code writes them."""
        case, x, idx = self._case, self._x, self._idx
        weights: Tensor | None = None
        if self._layout is Layout.COMPACT:
            owner = idx // (case.experts // case.ranks)
            wanted = torch.zeros(case.ranks, case.tokens, dtype=torch.bool, device=_DEVICE)
            wanted[owner.t(), torch.arange(case.tokens, device=_DEVICE)] = True
            tokens = wanted.nonzero(as_tuple=True)[1]
        else:
            order = idx.flatten().argsort(stable=True)
            tokens, weights = order // case.topk, self._weights.flatten()[order][:, None]
        y = torch.randn(len(tokens), case.hidden, device=_DEVICE).bfloat16()

        def dispatch() -> object:
            if case.wire == "bf16":
                return x.index_select(0, tokens)
            return [part.index_select(0, tokens) for part in bench_lines.quantise(x)]

        def combine() -> object:
            rows = y.float() if weights is None else y.float() * weights
            return torch.zeros(x.shape, device=_DEVICE).index_add_(0, tokens, rows).bfloat16()

        return dispatch, combine

    def _measured(
        self, operation: str, num_bytes: int, ours: Callable[[], object], others: dict[str, Callable[[], object]],
        plain: Callable[[], object] | None, seconds: float,
    ) -> Measured:  # fmt: skip
        calls = 10 if self._case.tokens <= 512 else 4
        captured = {"expertwire": ours} | others | ({} if plain is None else {"plain torch": plain})
        for fn in captured.values():
            for _ in range(3):
                fn()
        lines: dict[str, Line] = {
            name: gpu_timing.in_turns(
                self._rank, self._case.ranks, self._barrier, lambda fn=fn: gpu_timing.replay(fn, calls)  # type: ignore[misc]
            )
            for name, fn in captured.items()
        }  # fmt: skip
        lines["expertwire, eager"] = gpu_timing.eager(ours, calls)
        lines["host time of an eager call"] = gpu_timing.host(ours, 4 * calls)
        samples = gpu_timing.take_turns(lines, self._ranks.all_gather, self._barrier, seconds * len(lines))
        order = ("expertwire", *others, "expertwire, eager", "host time of an eager call", "plain torch")
        samples = {name: samples[name] for name in order if name in samples}
        facts = torch.cuda.get_device_properties(torch.cuda.current_device())
        everyone = self._ranks.all_gather((str(facts.uuid), num_bytes))
        on_this_gpu = sum(theirs for uuid, theirs in everyone if uuid == str(facts.uuid))
        return Measured(operation, on_this_gpu, samples | {"floor": [on_this_gpu / self._bandwidth]})

    def _barrier(self) -> None:
        self._ranks.all_gather(None)

    # -- correctness ---------------------------------------------------------------------------------------------

    def _check(self, buffer: Buffer) -> Dispatched:
        """A dispatch and a combine, compared with the oracle."""
        case, expected = self._case, self._oracle.received[self._rank]
        sent = self._dispatch(buffer)
        torch.cuda.current_stream().synchronize()
        x, sf = sent.x.flatten(0, -2), None if sent.sf is None else sent.sf.flatten(0, -2)
        used = self._used(sent)
        x, sf = x.view(torch.uint8)[used].view(x.dtype), None if sf is None else sf[used]
        assert_equal(x.cpu(), expected.x, f"dispatch, {case.title}")
        assert_equal(None if sf is None else sf.cpu(), expected.sf, f"scale factors, {case.title}")
        back = buffer.combine(self._y_as(sent), sent.handle).x
        buffer.synchronize()
        assert_equal(back.cpu(), self._oracle.sums[self._rank], f"combine, {case.title}")
        return sent

    def _used(self, sent: Dispatched) -> Tensor:
        """Indices of the rows in use."""
        if self._layout is not Layout.EXPERT_SLOTS:
            return torch.arange(sent.x.shape[0], device=_DEVICE)
        assert sent.row_source is not None
        return (sent.row_source.flatten(0, -2)[:, 0] >= 0).nonzero().squeeze(1)

    def _y_as(self, sent: Dispatched) -> Tensor:
        """The experts' output in the shape of what was received."""
        y = torch.zeros((*sent.x.shape[:-1], self._case.hidden), dtype=torch.bfloat16, device=_DEVICE)
        y.flatten(0, -2)[self._used(sent)] = self._oracle.y[self._rank].to(_DEVICE)
        return y
