"""What one rank does in `multi_gpu.py`: pairs, conformance, soak, and the lines that are timed."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

import expertwire as ew
from expertwire.cli import bench_lines
from expertwire.formats import BF16, FP8Block
from expertwire.layouts.receive import Layout
from expertwire.testing import gpu_timing, uniform_routing
from expertwire.topology import Placement

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))

SLOTS, MAJOR, COMPACT = Layout.EXPERT_SLOTS, Layout.EXPERT_MAJOR, Layout.COMPACT
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Setup:
    """The model that is timed, and where ranks sit: rank r on GPU r, or, `virtual`, all on GPU 0."""

    virtual: bool = False
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    device: str = "cuda"

    def buffer(self, group, transport, **options):
        options = {"num_experts": self.experts, "hidden": self.hidden, "num_topk": self.topk} | options
        options |= {"device": self.device, "transport": transport, "timeout_s": TIMEOUT_S, "validate": False}
        return ew.Buffer(group, **options)

    def sit(self, group):
        if self.device == "cuda":
            torch.cuda.set_device(0 if self.virtual else dist.get_rank(group))


def exact_rows(rank, step, num_tokens, hidden):
    """bfloat16 [T, H] of integers -7..7, a 7 in each block of 128: exact in FP8 with float32 scales, as are sums."""
    t = torch.arange(num_tokens)[:, None]
    return ((5 * rank + 3 * t + 7 * step + torch.arange(hidden)) % 15 - 7).bfloat16()


def rows_per_token(ids, num_ranks, num_experts, layout):
    """[T, 1]: as how many rows a token travels: one per slot, COMPACT one per rank. Its sum is that times its row."""
    owner = Placement.contiguous(num_experts, num_ranks).expert_ranks
    of_expert = torch.tensor(owner)
    if layout is not COMPACT:
        return torch.full((len(ids), 1), ids.shape[1])
    return 1 + (of_expert[ids].sort(dim=1).values.diff(dim=1) != 0).sum(1, keepdim=True)


def rows_to_peers(ids, rank, num_ranks, num_experts, layout):
    """Rows that leave this rank's GPU."""
    home = torch.tensor(Placement.contiguous(num_experts, num_ranks).expert_ranks)[ids]
    if layout is not COMPACT:
        return int((home != rank).sum())
    return sum(len(set(ranks) - {rank}) for ranks in home.tolist())


def row_bytes(wire, hidden):
    return hidden + 4 * (hidden // 128) if wire == "fp8" else 2 * hidden


# -- is it right? ------------------------------------------------------------------------------------------------------


def pairs(group, setup):
    """Rank 0: the machine, and of every pair of GPUs peer access, a copy there and back, and its GB/s. Others: {}."""
    setup.sit(group)
    if dist.get_rank(group):
        return {}
    count = 1 if setup.virtual else dist.get_world_size(group)
    found = {}
    for a, b in itertools.permutations(range(count), 2):
        x = torch.arange(64 << 20, dtype=torch.int32, device=f"cuda:{a}")
        there = torch.empty_like(x, device=f"cuda:{b}")
        there.copy_(x)
        same = bool((there.to(x.device) == x).all())
        with torch.cuda.device(a):
            seconds = gpu_timing.median(gpu_timing.eager(lambda x=x, there=there: there.copy_(x), 2), 3)
        reach = torch.cuda.can_device_access_peer(a, b)
        found[f"{a}-{b}"] = {"peer_access": reach, "copy_is_right": same, "gbs": round(4e-9 * x.numel() / seconds, 1)}
    torch.cuda.empty_cache()
    return {"machine": _machine(), "pairs": found}


def _machine():
    """Of the rank, not of the parent: whoever asks CUDA keeps a context on the GPU."""
    import triton

    from expertwire.cli.doctor_gpu import look

    seen = look()
    return {
        "gpus": [gpu.name for gpu in seen.gpus], "driver": seen.driver, "cuda": seen.torch_cuda,
        "torch": torch.__version__, "triton": triton.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }  # fmt: skip


def conformance(group, setup, transport):
    """Small cases against the oracle, bit for bit. Returns the names of what was checked, and what is not offered."""
    from device_checks import CAPACITY, EXPERTS, HIDDEN, TOPK, check_rank

    setup.sit(group)
    small = {"num_experts": EXPERTS, "hidden": HIDDEN, "num_topk": TOPK, "num_max_tokens_per_rank": CAPACITY}
    done = []
    with setup.buffer(group, transport, **small) as buf:
        for layout in (SLOTS, MAJOR, COMPACT):
            for wire in (BF16(), FP8Block(), FP8Block(scale="ue8m0")):
                check_rank(buf, layout, wire, alignment=4 if layout is MAJOR else 1, steps=2)
                done.append(f"{layout} {wire.name}")
            for options in ({"counts": "device", "zero_copy": True}, {"deferred": True}):
                check_rank(buf, layout, FP8Block(), steps=2, repeats=True, **options)
                done.append(f"{layout} {' '.join(options)}")
    uneven = ew.Placement(
        (0,) * (EXPERTS - dist.get_world_size(group) + 1) + tuple(range(1, dist.get_world_size(group)))
    )
    with setup.buffer(group, transport, placement=uneven, **small) as buf:
        check_rank(buf, COMPACT, BF16(), steps=1)
        done.append("uneven placement, second buffer")
    with setup.buffer(group, transport, on_timeout="mask", **small) as buf:
        check_rank(buf, MAJOR, BF16(), steps=1)
        done.append("on_timeout=mask, nobody late")
    return done


def masks(group, setup, transport):
    """The last rank is killed between dispatch and combine: what the others do without it, against the oracle."""
    from device_checks import CAPACITY, EXPERTS, HIDDEN, TOPK
    from masks import check_step, lose

    setup.sit(group)
    small = {"num_experts": EXPERTS, "hidden": HIDDEN, "num_topk": TOPK, "num_max_tokens_per_rank": CAPACITY}
    kinds = list(itertools.product((SLOTS, MAJOR, COMPACT), (BF16(), FP8Block())))
    with setup.buffer(group, transport, on_timeout="mask", **small) as buf:
        for layout, wire in kinds:
            check_step(buf, 1, layout, wire)
        lose(buf, (dist.get_world_size(group) - 1,), "combine", 5.0)
        for layout, wire in kinds:
            check_step(buf, 2, layout, wire)
        return [f"{layout} {wire.name} without rank {buf.masked_ranks[0]}" for layout, wire in kinds]


def soak(group, setup, transport, trips):
    """`trips` round trips of integers that change at every step; how many elements of sums were wrong.

    A quarter for each layout, eager, in BF16 and FP8 by turns; a quarter as replays of a graph.
    """
    setup.sit(group)
    rank, num_ranks, num_tokens, hidden, variants = dist.get_rank(group), dist.get_world_size(group), 64, 1024, 7
    device = setup.device
    sizes = {"hidden": hidden, "num_max_tokens_per_rank": num_tokens}
    ids = [uniform_routing(100 * v + rank, num_tokens, setup.topk, setup.experts) for v in range(variants)]
    xs = [exact_rows(rank, v, num_tokens, hidden).to(device) for v in range(variants)]
    on_device = [i.to(device) for i in ids]
    wrong, done = torch.zeros((), dtype=torch.int64, device=device), 0
    with setup.buffer(group, transport, **sizes) as buf:
        for layout in (SLOTS, MAJOR, COMPACT):
            times = [rows_per_token(i, num_ranks, setup.experts, layout).to(device) for i in ids]
            wants = [(x.float() * n).bfloat16() for x, n in zip(xs, times, strict=True)]
            for trip in range(trips // 4):
                v, wire = trip % variants, (BF16(), FP8Block(decode=True))[trip % 2]
                sent = buf.dispatch(xs[v], on_device[v], layout=layout, wire=wire, counts="device", zero_copy=True)
                wrong += (buf.combine(sent.x, sent.handle).x != wants[v]).sum()
                done += 1
    if device == "cuda":
        wrong += _soak_graph(group, setup, transport, trips - done, sizes, xs, on_device)
    return {"trips": trips if device == "cuda" else done, "wrong_elements": int(wrong)}


def _soak_graph(group, setup, transport, trips, sizes, xs, ids):
    """EXPERT_SLOTS: two round trips to a graph, whose inputs change between replays."""
    wrong, variants = torch.zeros((), dtype=torch.int64, device="cuda"), len(xs)
    with setup.buffer(group, transport, max_in_flight=1, **sizes) as buf:
        x, routing = xs[0].clone(), ids[0].clone()

        def trip():
            sent = buf.dispatch(x, routing, layout=SLOTS, counts="device", zero_copy=True)
            return buf.combine(sent.x, sent.handle).x

        for _ in range(2):
            trip()
        torch.cuda.synchronize()
        dist.barrier(group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [trip(), trip()]
        for number in range(trips // 2):
            x.copy_(xs[number % variants])
            routing.copy_(ids[number % variants])
            graph.replay()
            want = (x.float() * setup.topk).bfloat16()
            for out in outs:
                wrong += (out != want).sum()
    return wrong


# -- how fast? ---------------------------------------------------------------------------------------------------------


class _Rank:
    """One rank's inputs and calls, checked by their exact sums before they are timed."""

    def __init__(self, group, setup, buf, num_tokens):
        self.setup, self.buf, self.group = setup, buf, group
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.ids = uniform_routing(50 + self.rank, num_tokens, setup.topk, setup.experts)
        self.x = exact_rows(self.rank, 0, num_tokens, setup.hidden).to(setup.device)
        self.on_device = self.ids.to(setup.device)
        self.weights = torch.ones(num_tokens, setup.topk, device=setup.device)

    def dispatch(self, layout, wire, **options):
        return self.buf.dispatch(
            self.x, self.on_device, self.weights, layout=layout, wire=wire, counts="device", **options
        )

    def dispatch_only(self, layout, wire):
        self.dispatch(layout, wire, zero_copy=True).handle.release()

    def round_trip(self, layout, wire):
        handle = self.dispatch(layout, wire, zero_copy=True).handle
        return self.buf.combine(self.buf.combine_input(handle), handle).x

    def checked(self, layout, wire):
        """A handle whose experts' output, in memory that peers read, is what arrived; sums are exact or this raises."""
        sent = self.dispatch(layout, wire)
        y = self.buf.combine_input(sent.handle)
        y.copy_(sent.x)
        out = self.buf.combine(y, sent.handle).x
        times = rows_per_token(self.ids, self.num_ranks, self.setup.experts, layout).to(self.x.device)
        wrong = int((out != (self.x.float() * times).bfloat16()).sum())
        if wrong:
            raise AssertionError(f"rank {self.rank}: {wrong} elements of {layout} {wire.name} sums are wrong")
        return y, sent.handle

    def peer_bytes(self, layout, wire):
        to_peers = rows_to_peers(self.ids, self.rank, self.num_ranks, self.setup.experts, layout)
        return to_peers * row_bytes(wire, self.setup.hidden)

    def take(self, lines, seconds):
        """Samples of every line, all ranks at once."""
        return gpu_timing.take_turns(lines, _all_gather(self.group), lambda: dist.barrier(self.group), seconds)

    def captured(self, calls, fns):
        """A graph of each of `fns`, after three calls of it on all ranks."""
        for fn in fns.values():
            for _ in range(3):
                fn()
        torch.cuda.synchronize()
        dist.barrier(self.group)
        return {name: gpu_timing.replay(fn, calls) for name, fn in fns.items()}


def prefill(group, setup, transport, num_tokens, num_sms, seconds):
    """FP8 and BF16 dispatch, BF16 combine from the window.

    Returns {(layout, wire, operation): (samples in s, bytes to peers)}.
    """
    setup.sit(group)
    found = {}
    for layout in (COMPACT, MAJOR):
        found |= _prefill(group, setup, transport, num_tokens, num_sms, seconds, layout)
        torch.cuda.empty_cache()
    return found


def _prefill(group, setup, transport, num_tokens, num_sms, seconds, layout):
    options = {"num_max_tokens_per_rank": num_tokens, "max_in_flight": 1, "num_sms": num_sms}
    with setup.buffer(group, transport, **options) as buf:
        rank = _Rank(group, setup, buf, num_tokens)
        rank.checked(layout, FP8Block(decode=True))
        y, handle = rank.checked(layout, BF16())
        fns = {
            ("fp8", "dispatch"): lambda: rank.dispatch_only(layout, FP8Block()),
            ("bf16", "dispatch"): lambda: rank.dispatch_only(layout, BF16()),
            ("bf16", "combine"): lambda: buf.combine(y, handle),
        }
        samples = rank.take(rank.captured(4, fns), seconds)
        rank.checked(layout, BF16())
    return {
        (str(layout), wire, operation): (seen, rank.peer_bytes(layout, wire))
        for (wire, operation), seen in samples.items()
    }


def decode(group, setup, transport, num_tokens, seconds):
    """The same for few tokens, EXPERT_SLOTS, FP8 dispatch: graphs of each half and of both, and eager round trips."""
    setup.sit(group)
    with setup.buffer(group, transport, num_max_tokens_per_rank=num_tokens, max_in_flight=1) as buf:
        rank = _Rank(group, setup, buf, num_tokens)
        y, handle = rank.checked(SLOTS, FP8Block(decode=True))
        wire = FP8Block()
        fns = {
            "dispatch": lambda: rank.dispatch_only(SLOTS, wire),
            "combine": lambda: buf.combine(y, handle),
            "round trip": lambda: rank.round_trip(SLOTS, wire),
        }
        lines = rank.captured(10, fns)
        lines["round trip, eager"] = gpu_timing.eager(fns["round trip"], 10)
        lines["round trip, host"] = gpu_timing.host(fns["round trip"], 40)
        samples = rank.take(lines, seconds)
        rank.checked(SLOTS, FP8Block(decode=True))
    there, back = rank.peer_bytes(SLOTS, "fp8"), rank.peer_bytes(SLOTS, "bf16")
    num_bytes = {"dispatch": there, "combine": back}
    return {name: (seen, num_bytes.get(name, there + back)) for name, seen in samples.items()}


@cache
def _nccl_group(virtual):
    """NCCL refuses ranks that share a GPU: in a dry run each rank has a group of its own."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if not virtual:
        return dist.new_group(range(num_ranks), backend="nccl")
    return [dist.new_group([r], backend="nccl") for r in range(num_ranks)][rank]


def nccl(group, setup, cases, seconds):
    """all_to_all_single with torch index work, eager, rows in kept memory; `cases` are (tokens, layout, wires).

    Returns {(tokens, layout, wire, operation): samples in s}.
    """
    setup.sit(group)
    ranks = bench_lines.TorchGroup(_nccl_group(setup.virtual), bench_lines.Kept())
    me, found = dist.get_rank(group), {}
    for num_tokens, layout, wires in cases:
        x = exact_rows(me, 0, num_tokens, setup.hidden).to(setup.device)
        ids = uniform_routing(50 + me, num_tokens, setup.topk, setup.experts)
        on_device, weights = ids.to(setup.device), torch.ones(num_tokens, setup.topk, device=setup.device)

        def dispatch(wire, x=x, on_device=on_device, weights=weights, layout=layout):
            rows, sf = bench_lines.quantise(x) if wire == "fp8" else (x, None)
            compact = layout == COMPACT
            return bench_lines.dispatch(ranks, rows, sf, on_device, weights, setup.experts, compact=compact)

        lines = {("fp8", "dispatch"): gpu_timing.eager(lambda d=dispatch: d("fp8"), 2)} if "fp8" in wires else {}
        if "bf16" in wires:
            lines["bf16", "dispatch"] = gpu_timing.eager(lambda d=dispatch: d("bf16"), 2)
        sent = dispatch("bf16")
        y = sent.x.clone()  # kept memory is used again by the next call
        out = bench_lines.combine(ranks, y, sent, num_tokens)
        times = rows_per_token(ids, ranks.num_ranks, setup.experts, Layout(layout)).to(setup.device)
        if not torch.equal(out, (x.float() * times).bfloat16()):
            raise AssertionError(f"rank {me}: the baseline's sums are wrong, {layout}, {num_tokens} tokens")
        lines["bf16", "combine"] = gpu_timing.eager(
            lambda y=y, s=sent, n=num_tokens: bench_lines.combine(ranks, y, s, n), 2
        )
        samples = gpu_timing.take_turns(lines, _all_gather(group), lambda: dist.barrier(group), seconds)
        found |= {(num_tokens, str(layout), *name): seen for name, seen in samples.items()}
    return found


def floor(group, setup, transport, sizes):
    """Seconds in which every rank copies so many bytes to its neighbour's GPU, all at once: {bytes: samples}."""
    from expertwire.engines import device_memory
    from expertwire.transports.gpus import seat
    from expertwire.world import bootstrap

    setup.sit(group)
    ranks = bootstrap(group)
    device = torch.device("cuda", torch.cuda.current_device())
    memory = device_memory(ranks, transport, device, ranks.all_gather(seat(device)))
    most, neighbour = max(sizes), (ranks.rank + 1) % ranks.num_ranks
    own, _ = memory.allocate(most)
    kept = memory._kept[-1]
    there = kept[neighbour] if transport == "cuda_ipc" else kept[1].get_buffer(neighbour, (most,), torch.uint8)
    source = torch.arange(most, device="cuda").add_(ranks.rank).to(torch.uint8)
    there.copy_(source)
    torch.cuda.synchronize()
    dist.barrier(group)
    sender = (ranks.rank - 1) % ranks.num_ranks
    if not torch.equal(own, source + (sender - ranks.rank) % 256):
        raise AssertionError(f"rank {ranks.rank}: what rank {sender} copied here is not what it sent")
    lines = {n: gpu_timing.eager(lambda n=n: there[:n].copy_(source[:n]), 4) for n in sizes if n}
    samples = gpu_timing.take_turns(lines, ranks.all_gather, lambda: dist.barrier(group), 0.2)
    dist.barrier(group)
    memory.close()
    return samples


def _all_gather(group):
    def all_gather(value):
        values = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values

    return all_gather
