"""Virtual ranks on one GPU for the benchmarks: an engine, a stream and inputs per rank, driven from one thread."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import expertwire as ew
from expertwire.formats import BF16, FP8Block
from expertwire.kernels.engine import DeviceEngine, Rows
from expertwire.layouts.receive import Layout
from expertwire.testing import random_rows, random_weights, uniform_routing
from expertwire.topology import Placement
from expertwire.transports.device import InprocDevice

TIMEOUT_US = 1_000_000
WIRES = {"bf16": BF16(), "fp8": FP8Block(), "ue8m0": FP8Block(scale="ue8m0")}


@dataclass
class Shape:
    num_ranks: int
    num_tokens: int
    num_experts: int
    hidden: int = 7168
    num_topk: int = 8
    num_sms: int = 0
    capacity: int = 0


def combined(engine: DeviceEngine, y, step, out, **options):
    """A whole combine of rows that peers read where they are."""
    engine.combine_ready(y, step, None)
    engine.gather(y, step, out, **options)


class Ranks:
    """All ranks of a shape. `each(fn)` calls fn(rank index) on that rank's stream."""

    def __init__(self, shape: Shape, num_banks: int = 2):
        self.shape = shape
        self.device = torch.device("cuda")
        self.placement = Placement.contiguous(shape.num_experts, shape.num_ranks)
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.num_sms = shape.num_sms or sms // shape.num_ranks
        self.engines = ew.World(shape.num_ranks).run(
            lambda rank: DeviceEngine(
                InprocDevice(rank, self.device),
                self.placement,
                capacity=shape.capacity or shape.num_tokens,
                hidden=shape.hidden,
                num_topk=shape.num_topk,
                num_banks=num_banks,
                num_sms=self.num_sms,
                timeout_us=TIMEOUT_US,
                strict_sms=shape.num_sms > 0,
            )
        )
        self.streams = [torch.cuda.Stream() for _ in self.engines]
        self.xs, self.ids, self.weights = [], [], []
        for rank in range(shape.num_ranks):
            self.xs.append(random_rows(rank, shape.num_tokens, shape.hidden).cuda())
            self.ids.append(uniform_routing(50 + rank, shape.num_tokens, shape.num_topk, shape.num_experts).cuda())
            self.weights.append(random_weights(rank, shape.num_tokens, shape.num_topk).cuda())

    def places(self, layout, wire, alignment=1):
        rows = Rows.of_wire(WIRES[wire], self.shape.hidden)
        return ew.World(self.shape.num_ranks).run(
            lambda rank: _with_group(self.engines[rank.rank], rank).state.places(layout, rows, alignment)
        )

    def steps(self, layout, bank=0, alignment=1):
        return [
            e.state.step(bank, layout, i, w, alignment)
            for e, i, w in zip(self.engines, self.ids, self.weights, strict=True)
        ]

    def each(self, fn):
        """Fork from the current stream, run fn(rank) on every rank's stream, join."""
        current = torch.cuda.current_stream()
        for rank, stream in enumerate(self.streams):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                fn(rank)
        for stream in self.streams:
            current.wait_stream(stream)

    def compile(self, *fns):
        """Compile and load what fns launch, before any launch that waits for another rank."""
        for engine in self.engines:
            engine.launch.compiling = True
        for fn in fns:
            self.each(fn)
        for engine in self.engines:
            engine.launch.compiling = False

    def failures(self):
        torch.cuda.synchronize()
        return [e.state.status.tolist() for e in self.engines if e.state.status.any()]


def _with_group(engine, rank):
    engine.state.memory._group = rank
    return engine


__all__ = ["WIRES", "Layout", "Ranks", "Shape"]
