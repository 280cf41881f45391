"""The kernels on a GPU: are they right, and how long do they take?

    python benchmarks/gpu.py check decode virtual prefill models waiting soak --out results.json

check     bit for bit against the oracle, virtual ranks 1, 2, 4, 8
decode    one rank, few tokens, EXPERT_SLOTS: kernel times from the profiler (median of 30), and plain torch
virtual   2, 4, 8 ranks that share the card, one graph: time of a replay
prefill   4096 tokens: COMPACT with 24 SMs per rank, EXPERT_MAJOR on the whole card; copies of the same bytes
models    the shapes of models that people serve, one rank: decode and prefill against a copy of the same bytes
waiting   how long a matrix product takes to come through while another stream's launch waits in so many blocks
soak      many round trips of integer payloads, every sum compared, eager and in a graph
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import threading
import time
from pathlib import Path

import torch
import triton
from gpu_ranks import WIRES, Layout, Ranks, Shape, combined

import expertwire as ew
from expertwire import reference
from expertwire.cli.bench_report import commit
from expertwire.kernels.dispatch_recv import await_rows
from expertwire.layouts.device_window import SOURCE_WORDS
from expertwire.testing import first_mismatch, payload, round_robin
from expertwire.testing.gpu_timing import kernel_times, median, replay
from expertwire.topology import Placement

SLOTS, MAJOR, COMPACT = Layout.EXPERT_SLOTS, Layout.EXPERT_MAJOR, Layout.COMPACT
RESULTS: list[dict] = []


def note(**fields):
    RESULTS.append(fields)
    print(" ".join(f"{k}={v:.2f}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items()), flush=True)


# -- timing ------------------------------------------------------------------------------------------------------------


def total(fn):
    """Time of all kernels of fn, in us."""
    return sum(kernel_times(fn).values())


def graph_time(fn, inner=10, repeats=20):
    """Median time of fn inside a graph that holds it `inner` times, in us."""
    fn()
    torch.cuda.synchronize()
    return 1e6 * median(replay(fn, inner), repeats)


def copy_time(num_bytes):
    """A device copy of so many bytes (read once, written once), in us."""
    source = torch.randint(0, 100, (num_bytes // 4,), dtype=torch.int32, device="cuda")
    out = torch.empty_like(source)
    return total(lambda: out.copy_(source))


# -- check -------------------------------------------------------------------------------------------------------------


def check_case(shape, layout, wire, *, fused=False, alignment=1, deferred=False, steps=3):
    """What differs from the oracle in a few steps of dispatch and combine."""
    ranks = Ranks(shape)
    places = ranks.places(layout, wire, alignment)
    ids, weights = [i.cpu() for i in ranks.ids], [w.cpu() for w in ranks.weights]
    routing = reference.route(
        ids, weights, placement=ranks.placement, layout=layout, expert_alignment=alignment, capacity=shape.num_tokens
    )
    want = reference.dispatch([x.cpu() for x in ranks.xs], routing, WIRES[wire])
    ys = [torch.randn(w.x.numel() // shape.hidden, shape.hidden, device="cuda").bfloat16() for w in want]
    summed = reference.combine([y.cpu() for y in ys], routing)
    wrong = []
    for number in range(steps):
        made = ranks.steps(layout, number % 2, alignment)
        outs = [torch.empty_like(x) for x in ranks.xs]

        def dispatch(r, made=made):
            engine, step = ranks.engines[r], made[r]
            if fused:
                engine.dispatch_fused(ranks.xs[r], step, places[r])
            else:
                plan = engine.planner.plan(step)
                engine.send(ranks.xs[r], None, plan, step, places[r], receive=not deferred)
            if deferred:
                engine.await_rows(step)

        def combine(r, made=made, outs=outs):
            combined(ranks.engines[r], ys[r], made[r], outs[r], weighted=layout is not COMPACT, finish=True)

        if number == 0:
            ranks.compile(dispatch, combine)
        ranks.each(dispatch)
        ranks.each(combine)
        if ranks.failures():
            return [f"gave up: {ranks.failures()}"]
        for r, mine in enumerate(want):
            bank = number % 2
            wrong += differences(
                f"step {number} rank {r}", shape, layout, places[r], bank, made[r], mine, outs[r], summed[r]
            )
    return wrong


def differences(where, shape, layout, places, bank, step, mine, out, summed):
    rows = mine.x.numel() // shape.hidden
    meta = places.meta(bank)[:rows].cpu()
    used = torch.ones(rows, dtype=torch.bool)
    pairs = {
        "tokens": (step.expert_counts.tensor().cpu(), mine.num_tokens_per_expert),
        "per rank": (step.rank_counts.tensor().cpu(), mine.num_tokens_per_rank),
        "sums": (out.cpu(), summed.x),
    }
    if layout is COMPACT:
        pairs["topk_idx"] = (meta[:, SOURCE_WORDS : SOURCE_WORDS + shape.num_topk], mine.topk_idx)
    else:
        source = mine.row_source.view(rows, 3)
        used = source[:, 0] >= 0
        pairs["row_source"] = (meta[used], source[used])
    got = places.payload(bank)[:rows][used.cuda()].cpu()
    pairs["rows"] = (got, mine.x.reshape(rows, -1).view(torch.uint8)[used])
    sf = places.sf(bank)
    if sf is not None:
        pairs["sf"] = (sf[:rows][used.cuda()].cpu(), mine.sf.reshape(rows, -1).view(torch.uint8)[used])
    found = {name: first_mismatch(a.contiguous(), b.contiguous()) for name, (a, b) in pairs.items()}
    return [f"{where} {name}: {difference}" for name, difference in found.items() if difference is not None]


CASES = [
    (Shape(1, 32, 64), SLOTS, "fp8", {"fused": True}),
    (Shape(1, 33, 60), SLOTS, "ue8m0", {"fused": True}),
    (Shape(2, 32, 64), SLOTS, "fp8", {}),
    (Shape(8, 16, 64, hidden=1024), SLOTS, "fp8", {"deferred": True}),
    (Shape(4, 16, 62, hidden=1032), SLOTS, "bf16", {}),
    (Shape(1, 200, 64), COMPACT, "fp8", {}),
    (Shape(2, 300, 64), COMPACT, "bf16", {}),
    (Shape(4, 130, 256, hidden=2048), COMPACT, "fp8", {"deferred": True}),
    (Shape(8, 65, 256, hidden=1024), COMPACT, "ue8m0", {}),
    (Shape(2, 1000, 256, hidden=1024, num_sms=24), COMPACT, "fp8", {}),
    (Shape(1, 150, 64), MAJOR, "fp8", {"alignment": 128}),
    (Shape(4, 100, 64, hidden=2048), MAJOR, "bf16", {"alignment": 8}),
    (Shape(2, 40, 64, hidden=2048), SLOTS, "fp8", {}),
    (Shape(2, 40, 4096, hidden=512, num_topk=32), MAJOR, "bf16", {}),
]


def check():
    for shape, layout, wire, options in CASES:
        try:
            wrong = check_case(shape, layout, wire, **options)
        except Exception as error:  # noqa: BLE001  # reported, and the other cases still run
            wrong = [repr(error)[:600]]
        note(
            check=str(layout), wire=wire, ranks=shape.num_ranks, hidden=shape.hidden, num_topk=shape.num_topk,
            experts=shape.num_experts, ok=not wrong, wrong=str(wrong[:2]), **options,
        )  # fmt: skip
        torch.cuda.empty_cache()


# -- decode ------------------------------------------------------------------------------------------------------------


def plain_torch(x, ids, weights, num_experts):
    """What one writes without a library: sort by expert, gather; scatter-add of weighted rows back."""
    order = ids.flatten().argsort(stable=True)
    token = order // ids.shape[1]
    counts = torch.bincount(ids.flatten(), minlength=num_experts)

    def dispatch():
        rows = x.index_select(0, token)
        return rows.view(rows.shape[0], -1, 128).float().abs().amax(2), counts

    def combine(y):
        scaled = y.float() * weights.flatten()[order][:, None]
        return torch.zeros(x.shape, device=x.device).index_add_(0, token, scaled).bfloat16()

    return dispatch, combine


def decode_case(tokens, experts):
    ranks = Ranks(Shape(1, tokens, experts), num_banks=1)
    engine, x = ranks.engines[0], ranks.xs[0]
    places = ranks.places(SLOTS, "fp8")[0]
    step = ranks.steps(SLOTS)[0]
    y = torch.randn(experts * tokens, 7168, device="cuda").bfloat16()
    out = torch.empty_like(x)
    dispatch = total(lambda: engine.dispatch_fused(x, step, places))
    combine = total(lambda: engine.gather(y, step, out, weighted=True))
    owned = [(part, torch.empty_like(part)) for part in (places.payload(0), places.sf(0), places.meta(0))]

    def dispatch_owned():
        engine.dispatch_fused(x, step, places)
        engine.copy_rows(places, step, *owned)

    torch_dispatch, torch_combine = plain_torch(x, ranks.ids[0], ranks.weights[0], experts)
    rows = torch.randn(8 * tokens, 7168, device="cuda").bfloat16()
    note(
        decode=tokens, experts=experts, dispatch_us=dispatch, combine_us=combine,
        dispatch_owned_us=total(dispatch_owned), torch_dispatch_us=total(torch_dispatch),
        torch_combine_us=total(lambda: torch_combine(rows)),
        copy_of_dispatched_us=copy_time(8 * tokens * 7392),
    )  # fmt: skip


def decode():
    for tokens, experts in ((128, 256), (128, 32), (16, 256), (64, 256), (256, 256)):
        decode_case(tokens, experts)
        torch.cuda.empty_cache()


# -- virtual ranks -----------------------------------------------------------------------------------------------------


def virtual_case(num_ranks):
    ranks = Ranks(Shape(num_ranks, 128, 256), num_banks=1)
    places, made = ranks.places(SLOTS, "fp8"), ranks.steps(SLOTS)
    ys = [torch.randn(256 * 128, 7168, device="cuda").bfloat16() for _ in range(num_ranks)]
    outs = [torch.empty_like(x) for x in ranks.xs]

    def dispatch(r):
        plan = ranks.engines[r].planner.plan(made[r])
        ranks.engines[r].send(ranks.xs[r], None, plan, made[r], places[r], receive=True)

    def give_back(r):
        ranks.engines[r].give_back(0)

    def combine(r, finish=False):
        combined(ranks.engines[r], ys[r], made[r], outs[r], weighted=True, finish=finish)

    def round_trip(r):
        dispatch(r)
        combine(r, True)

    ranks.compile(round_trip, give_back, combine)
    ranks.each(round_trip)
    times = {
        "round_trip_us": graph_time(lambda: ranks.each(round_trip)),
        "dispatch_and_give_back_us": graph_time(lambda: ranks.each(lambda r: (dispatch(r), give_back(r)))),
        "combine_us": graph_time(lambda: ranks.each(combine)),
        "give_back_us": graph_time(lambda: ranks.each(give_back)),
    }
    note(virtual=num_ranks, num_sms=ranks.num_sms, **times, failures=len(ranks.failures()))


def virtual():
    for num_ranks in (2, 4, 8):
        virtual_case(num_ranks)
        torch.cuda.empty_cache()


# -- prefill -----------------------------------------------------------------------------------------------------------


def compact_case(num_ranks, wire):
    ranks = Ranks(Shape(num_ranks, 4096, 256, num_sms=24), num_banks=1)
    places, made = ranks.places(COMPACT, wire), ranks.steps(COMPACT)

    def dispatch(r):
        engine = ranks.engines[r]
        plan = engine.planner.plan(made[r])
        engine.send(ranks.xs[r], None, plan, made[r], places[r], receive=True)
        engine.give_back(0)

    ranks.compile(dispatch)
    us = graph_time(lambda: ranks.each(dispatch), inner=2)
    parts = kernel_times(lambda: dispatch(0)) if num_ranks == 1 else {}
    note(prefill="compact dispatch", ranks=num_ranks, wire=wire, num_sms=24, us=us, **parts)
    if wire == "bf16":
        ys = [torch.randn(p.region.num_rows, 7168, device="cuda").bfloat16() for p in places]
        outs = [torch.empty_like(x) for x in ranks.xs]

        def combine(r):
            combined(ranks.engines[r], ys[r], made[r], outs[r], weighted=False)

        ranks.compile(combine)
        us = graph_time(lambda: ranks.each(combine), inner=2)
        note(prefill="compact combine", ranks=num_ranks, num_sms=24, us=us, failures=len(ranks.failures()))


def expert_major_case(wire):
    ranks = Ranks(Shape(1, 4096, 256), num_banks=1)
    places, step = ranks.places(MAJOR, wire)[0], ranks.steps(MAJOR)[0]
    engine, x = ranks.engines[0], ranks.xs[0]
    row_bytes = 14336 if wire == "bf16" else 7392

    def dispatch():
        plan = engine.planner.plan(step)
        engine.send(x, None, plan, step, places, receive=True)

    parts = kernel_times(dispatch)
    floor = copy_time((4096 * 14336 + 32768 * row_bytes) // 2)
    us = sum(parts.values())
    note(prefill="expert_major dispatch", wire=wire, us=us, copy_us=floor, share_of_copy=floor / us, **parts)
    if wire == "bf16":
        y, out = torch.randn(32768, 7168, device="cuda").bfloat16(), torch.empty_like(x)
        floor = copy_time((4096 + 32768) * 14336 // 2)
        us = total(lambda: engine.gather(y, step, out, weighted=True))
        note(prefill="expert_major combine", us=us, copy_us=floor, share_of_copy=floor / us)


def prefill():
    for case in ((1, "fp8"), (1, "bf16"), (2, "fp8"), (2, "bf16")):
        compact_case(*case)
        torch.cuda.empty_cache()
    for wire in ("fp8", "bf16"):
        expert_major_case(wire)
        torch.cuda.empty_cache()


# -- models -----------------------------------------------------------------------------------------------------------


MODELS = {  # hidden, experts, top-k
    "deepseek-v3": (7168, 256, 8), "kimi-k2": (7168, 384, 8), "qwen3-235b": (4096, 128, 8), "qwen3-30b": (2048, 128, 8),
    "qwen3-next": (2048, 512, 10), "glm-4.5": (5120, 160, 8), "minimax-m2": (3072, 256, 8),
    "gpt-oss-120b": (2880, 128, 4), "mixtral-8x7b": (4096, 8, 2),
    "llama4-maverick": (5120, 128, 1), "deepseek-v2-lite": (2048, 64, 6),
}  # fmt: skip


def model_case(name, tokens, layout):
    hidden, experts, topk = MODELS[name]
    wire = "bf16" if hidden % 128 else "fp8"
    ranks = Ranks(Shape(1, tokens, experts, hidden=hidden, num_topk=topk), num_banks=1)
    engine, x, places, step = ranks.engines[0], ranks.xs[0], ranks.places(layout, wire)[0], ranks.steps(layout)[0]
    y = torch.randn(places.region.num_rows, hidden, device="cuda").bfloat16()
    out = torch.empty_like(x)

    def dispatch():
        if layout is SLOTS and engine.fits_fused():
            engine.dispatch_fused(x, step, places)
        else:
            engine.send(x, None, engine.planner.plan(step), step, places, receive=True)

    rows = tokens if layout is COMPACT else tokens * topk  # one rank: COMPACT sends a token once
    sent = hidden * 2 if wire == "bf16" else hidden + hidden // 32
    times = {
        "dispatch": (total(dispatch), copy_time((tokens * hidden * 2 + rows * sent) // 2)),
        "combine": (
            total(lambda: engine.gather(y, step, out, weighted=layout is not COMPACT)),
            copy_time((rows + tokens) * hidden),
        ),
    }
    fields = {
        f"{what}{unit}": us for what, pair in times.items() for unit, us in zip(("_us", "_copy_us"), pair, strict=True)
    }
    note(model=name, layout=str(layout), tokens=tokens, hidden=hidden, experts=experts, topk=topk, wire=wire, **fields)


def models():
    for name in MODELS:
        for tokens, layout in ((1, SLOTS), (128, SLOTS), (512, SLOTS), (4096, MAJOR), (4096, COMPACT)):
            model_case(name, tokens, layout)
            torch.cuda.empty_cache()


# -- waiting -----------------------------------------------------------------------------------------------------------


def waiting(seconds=0.5):
    """Why no kernel waits in many blocks: they keep away from every SM whatever needs most of its shared memory."""
    engine = Ranks(Shape(2, 128, 256, hidden=1024), num_banks=1).engines[0]
    words, streams = engine.state.banks[0].words, [torch.cuda.Stream() for _ in range(2)]
    never, counts = engine.state.int64([1 << 30]), engine.state.int32([0] * engine.state.parts.size)
    a = torch.randn(4096, 4096, device="cuda").bfloat16()
    a @ a
    for blocks in (1, 66, 131, 132, 264, 528):
        records = engine.state.int64([0] * 12)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[0]):
            engine.launch(
                await_rows, blocks, ("waiting", blocks), (counts, 0, int(1e6 * seconds)),
                lambda records=records: (
                    (words, never, records[4:], 0), {"R": 2, "RANKS": 2, "VOID": 1, "num_warps": 4}
                ),
            )  # fmt: skip
        time.sleep(0.05)
        began = time.perf_counter()
        with torch.cuda.stream(streams[1]):
            a @ a
            streams[1].synchronize()
        note(waiting_blocks=blocks, product_ms=1e3 * (time.perf_counter() - began))


# -- Buffer ------------------------------------------------------------------------------------------------------------


def soak(trips=10_000):
    """Integers whose sums are exact, other ones at every trip, eager and from a graph by turns; every element of every
    sum compared on the device; and how long a hundred trips took at most, since a wait that should not be there ends
    with its time-out. Three shapes, one for each layout."""
    shapes = ((SLOTS, 64, 512, 32, 4), (MAJOR, 33, 7168, 62, 8), (COMPACT, 128, 2056, 256, 6))
    one_at_a_time = threading.Lock()

    def work(rank, shape, trips, captured):
        layout, num_tokens, hidden, experts, topk = shape
        me, num_ranks, wrong = rank.rank, rank.num_ranks, torch.zeros((), dtype=torch.int64, device="cuda")
        options = {"num_experts": experts, "hidden": hidden, "num_topk": topk, "num_max_tokens_per_rank": num_tokens}
        with ew.Buffer(rank, device="cuda", validate=False, max_in_flight=1, **options) as buf:
            xs = [payload(me + v * num_ranks, num_tokens, hidden).cuda() for v in range(5)]
            routing = round_robin(me, num_tokens, topk, experts)
            owner = Placement.contiguous(experts, num_ranks).expert_ranks
            served = [len({owner[e] for e in row}) if layout is COMPACT else topk for row in routing.tolist()]
            times, ids, x = torch.tensor(served).cuda()[:, None], routing.cuda(), xs[0].clone()
            wants = [(x.float() * times).bfloat16() for x in xs]

            def trip():
                sent = buf.dispatch(x, ids, layout=layout, counts="device", zero_copy=True)
                return buf.combine(sent.x, sent.handle).x

            for _ in range(2):
                trip()
            torch.cuda.synchronize()
            with one_at_a_time:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                    replayed = trip()
            captured.wait()  # a capture waits for the device, on which a rank that went on would wait for this one
            longest, began = 0.0, time.perf_counter()
            for number in range(trips):
                if number and number % 100 == 0:
                    torch.cuda.current_stream().synchronize()
                    longest, began = max(longest, time.perf_counter() - began), time.perf_counter()
                v = number % len(xs)
                x.copy_(xs[v])
                if number % 2:
                    graph.replay()
                    wrong += (replayed != wants[v]).sum()
                else:
                    wrong += (trip() != wants[v]).sum()
            buf.synchronize()
            return int(wrong), longest

    for num_ranks, count in ((1, trips), (4, trips // 3)):
        for shape in shapes:
            started = time.perf_counter()
            captured = threading.Barrier(num_ranks)
            found = ew.World(num_ranks, device="cuda").run(
                lambda rank, s=shape, n=count, captured=captured: work(rank, s, n, captured)
            )
            note(
                soak=count, ranks=num_ranks, layout=str(shape[0]), shape=shape[1:],
                wrong_elements=sum(wrong for wrong, _ in found), longest_hundred_s=max(longest for _, longest in found),
                seconds=time.perf_counter() - started,
            )  # fmt: skip


PARTS = {part.__name__: part for part in (check, decode, virtual, prefill, models, waiting, soak)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default=None, help="where git is missing: the commit that is measured")
    args = parser.parse_args()
    started = time.time()
    facts = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "cuda": torch.version.cuda, "python": platform.python_version(), "command": " ".join(sys.argv),
        "commit": args.commit or commit() or "unknown",
    }  # fmt: skip
    for part in args.parts:
        try:
            PARTS[part]()
        except Exception as error:  # noqa: BLE001  # the other parts still run
            note(failed=part, error=repr(error)[:500])
        if args.out:
            seconds = round(time.time() - started)
            args.out.write_text(json.dumps({"machine": facts | {"seconds": seconds}, "results": RESULTS}, indent=1))
    print(facts)


if __name__ == "__main__":
    main()
