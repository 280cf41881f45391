"""The Triton kernels on CPU memory: what runs inside the rank processes of the interpreter tests.

The interpreter truncates where hardware rounds, so its cast is replaced by torch's.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass

import torch

from expertwire import reference
from expertwire.formats import BF16, FP8Block
from expertwire.layouts.device_window import SOURCE_WORDS
from expertwire.layouts.receive import Layout
from expertwire.testing import (
    first_mismatch,
    random_rows,
    random_weights,
    repeated_routing,
    uniform_routing,
    with_holes,
)
from expertwire.topology import Placement


@dataclass(frozen=True)
class Case:
    layout: Layout = Layout.COMPACT
    wire: str = "bf16"
    num_ranks: int = 2
    num_experts: int = 6
    num_tokens: tuple[int, ...] = (3, 5, 0, 4)
    capacity: int = 5
    num_topk: int = 3
    hidden: int = 256
    alignment: int = 1
    fused: bool = False
    deferred: bool = False
    routing: str = "holes"
    steps: int = 2
    strict: bool = False
    together: int | None = None  # tokens that a block of the plan counts; None: what the planner says

    def __str__(self):
        kind = "fused" if self.fused else "planned"
        kind += ("-strict" if self.strict else "") + (f"-by{self.together}" if self.together else "")
        return f"{self.layout.value}-{self.wire}-{self.num_ranks}ranks-{kind}-h{self.hidden}-k{self.num_topk}"


WIRES = {"bf16": BF16(), "fp8": FP8Block(), "ue8m0": FP8Block(scale="ue8m0"), "fp8_b32": FP8Block(block=32)}


def use_interpreter():
    """Call before anything imports triton's language."""
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import triton.runtime.interpreter as interpreter

    original = interpreter._convert_float
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8e4nv": torch.float8_e4m3fn}

    def convert(value, source, target, rounding):
        if str(source) not in dtypes or str(target) not in dtypes:
            return original(value, source, target, rounding)
        raw = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
        cast = raw.view(dtypes[str(source)]).to(dtypes[str(target)]).view(torch.uint8).numpy()
        return np.frombuffer(cast.tobytes(), f"uint{target.primitive_bitwidth}").reshape(value.shape)

    if original.__name__ != "convert":
        interpreter._convert_float = convert
        _yield_while_waiting(interpreter.InterpreterBuilder)


def _yield_while_waiting(builder):
    """A waiting kernel looks at its words by atomics: let the process that it waits for have the core meanwhile."""
    atomic = builder.create_atomic_rmw

    def create_atomic_rmw(*args):
        time.sleep(0.0002)
        return atomic(*args)

    builder.create_atomic_rmw = create_atomic_rmw


class SharedFiles:
    """`DeviceMemory` of processes of one host: files that all of them map."""

    name, any_address, needs_all, device = "files", False, False, torch.device("cpu")

    def __init__(self, group):
        import torch.distributed as dist

        self.group, self.rank, self.num_ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.kept = []

    def gather_by(self, all_gather):
        self.all_gather = all_gather

    def all_gather(self, value):
        import torch.distributed as dist

        values = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.group)
        return values

    def allocate(self, num_bytes):
        with tempfile.NamedTemporaryFile() as file:
            file.truncate(num_bytes)
            paths = self.all_gather(file.name)
            maps = [p and torch.from_file(p, shared=True, size=num_bytes, dtype=torch.uint8) for p in paths]
            self.all_gather(None)
        self.kept.append(maps)
        return maps[self.rank], [0 if m is None else m.data_ptr() for m in maps]

    def close(self):
        self.kept = []


def data(case, step):
    """x, ids and weights of every rank."""
    make = repeated_routing if case.routing == "repeats" else uniform_routing
    xs, ids, weights = [], [], []
    for rank in range(case.num_ranks):
        seed, tokens = 100 * step + rank, case.num_tokens[rank]
        x = random_rows(seed, tokens, case.hidden, scale=3.0)
        if case.routing == "special" and tokens > 1:
            x[0, 1], x[1, -1] = float("nan"), float("inf")
        xs.append(x)
        ids.append(with_holes(make(seed + 50, tokens, case.num_topk, case.num_experts), seed))
        weights.append(random_weights(seed, tokens, case.num_topk))
    return xs, ids, weights


def device_engine(memory, case, num_banks=2):
    from expertwire.kernels.engine import DeviceEngine

    engine = DeviceEngine(
        memory, Placement.contiguous(case.num_experts, case.num_ranks), capacity=case.capacity, hidden=case.hidden,
        num_topk=case.num_topk, num_banks=num_banks, num_sms=1 if case.strict else 3, timeout_us=60_000_000,
        strict_sms=case.strict,
    )  # fmt: skip
    if case.together is not None:
        engine.planner._counted = dict.fromkeys((False, True), case.together)
    return engine


def route(case, ids, weights):
    return reference.route(
        ids, weights, placement=Placement.contiguous(case.num_experts, case.num_ranks), layout=case.layout,
        expert_alignment=case.alignment, capacity=case.capacity,
    )  # fmt: skip


def run(group, case):
    """One rank of a case: dispatches and combines, compared with the oracle. Returns what differs."""
    use_interpreter()
    from expertwire.kernels.engine import Rows

    memory = SharedFiles(group)
    rank, wire, engine = memory.rank, WIRES[case.wire], device_engine(memory, case)
    places = engine.state.places(case.layout, Rows.of_wire(wire, case.hidden), case.alignment)
    inputs, returned = engine.state.inputs(case.layout, case.alignment), engine.state.returned(case.layout)
    wrong = []

    def compare(name, got, want):
        difference = first_mismatch(got.contiguous(), want.contiguous())
        if difference is not None:
            wrong.append(f"step {number}, rank {rank}, {name}: {difference}")

    for number in range(1, case.steps + 1):
        xs, ids, weights = data(case, number)
        routing = route(case, ids, weights)
        want = reference.dispatch(xs, routing, wire)
        mine, bank = want[rank], number % 2
        for part in places._own:
            part[:] = 0xFF if number == 1 else part
        step = engine.state.step(bank, case.layout, ids[rank], weights[rank], case.alignment)
        if case.fused:
            engine.dispatch_fused(xs[rank], step, places)
        else:
            plan = engine.planner.plan(step)
            engine.send(xs[rank], None, plan, step, places, receive=not case.deferred)
        if case.deferred:
            engine.await_rows(step)

        compare("tokens per expert", step.expert_counts.tensor(), mine.num_tokens_per_expert)
        compare("tokens per rank", step.rank_counts.tensor(), mine.num_tokens_per_rank)
        num_rows = mine.x.numel() // case.hidden
        payload, sf, meta = places.payload(bank)[:num_rows], places.sf(bank), places.meta(bank)[:num_rows]
        if case.layout is Layout.COMPACT:
            used = torch.ones(num_rows, dtype=torch.bool)
            _, local_ids, values = meta.split([SOURCE_WORDS, case.num_topk, case.num_topk], dim=1)
            compare("topk_idx", local_ids, mine.topk_idx)
            compare("weights", values.contiguous().view(torch.float32), mine.topk_weights)
        else:
            source = mine.row_source.view(num_rows, 3)
            used = source[:, 0] >= 0
            compare("row_source", meta[used], source[used])
            if not case.fused:
                compare("offsets", step.offsets.tensor(), mine.expert_offsets)
                compare("padded", step.padded_counts.tensor(), mine.num_padded_tokens_per_expert)
        compare("rows", payload[used], mine.x.reshape(num_rows, -1).view(torch.uint8)[used])
        if sf is not None:
            compare("sf", sf[:num_rows][used], mine.sf.reshape(num_rows, -1).view(torch.uint8)[used])
        if number == 1:  # nothing else was written
            untouched = places.payload(bank)[num_rows:]
            compare("rows behind", untouched, torch.full_like(untouched, 0xFF))
            compare("unused rows", payload[~used], torch.full_like(payload[~used], 0xFF))

        y = [random_rows(1000 + number + r, part.x.numel() // case.hidden, case.hidden) for r, part in enumerate(want)]
        biases = [random_rows(2000 + r, n, case.hidden) for r, n in enumerate(case.num_tokens[: case.num_ranks])]
        by_rank = number % 2 == 0 and case.layout is not Layout.COMPACT
        summed = reference.combine(y, routing, bias=[biases], reduce="rank" if by_rank else "token")[rank].x
        in_place = (number + rank) % 2 == 0  # rows of one rank are read where they are, those of the next are pushed
        mine_y = inputs.payload(bank).view(torch.bfloat16)[:num_rows] if in_place else y[rank].view(num_rows, -1)
        told = inputs.seen_at[bank] if in_place else engine.state.nowhere
        if in_place:
            mine_y.copy_(y[rank].view(num_rows, -1))
        else:
            engine.push(mine_y, places.meta(bank), step, returned, own=case.deferred)
        out = torch.empty(xs[rank].shape, dtype=torch.bfloat16)
        if case.deferred:
            engine.combine_ready(mine_y, step, told, own=True, receive=False)
        engine.combine_ready(mine_y, step, told, publish=not case.deferred)
        engine.gather(
            mine_y, step, out, weighted=case.layout is not Layout.COMPACT, returned=returned, biases=(biases[rank],),
            finish=True, by_rank=by_rank,
        )  # fmt: skip
        compare("sums", out, summed)
    if engine.state.status.any():
        wrong.append(f"rank {rank}: a wait gave up: {engine.state.status.tolist()}")
    return wrong
