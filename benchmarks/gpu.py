"""The kernels on a GPU: are they right, and how long do they take?

    python benchmarks/gpu.py check decode virtual prefill --out results.json

check     bit for bit against the oracle, virtual ranks 1, 2, 4, 8; a rank that never comes; a soak of integer payloads
decode    one rank, few tokens, EXPERT_SLOTS: kernel times from the profiler (median of 30)
virtual   2, 4, 8 ranks that share the card, one graph: time of a replay
prefill   4096 tokens: COMPACT with 24 SMs per rank, EXPERT_MAJOR on the whole card; copies of the same bytes
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import triton
from gpu_ranks import WIRES, Layout, Ranks, Shape

from expertwire import reference
from expertwire.formats import FP8Block
from expertwire.testing import first_mismatch

RESULTS: list[dict] = []


def note(**fields):
    RESULTS.append(fields)
    print(" ".join(f"{k}={v:.2f}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items()), flush=True)


# -- timing ------------------------------------------------------------------------------------------------------------


def kernel_times(fn, repeats=30, warmups=5):
    """Median time of each kernel that fn launches, by name, from the profiler, in us."""
    for _ in range(warmups):
        fn()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            fn()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(event.name, []).append(event.device_time)
    return {name: statistics.median(times) for name, times in found.items()}


def graph_time(fn, inner=10, repeats=20):
    """Time of fn inside a graph that holds it `inner` times, in us: (median, smallest)."""
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            fn()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / inner)
    return statistics.median(times), min(times)


def copy_time(num_bytes):
    """A device copy of so many bytes (read once, written once), in us."""
    source = torch.randint(0, 100, (num_bytes // 4,), dtype=torch.int32, device="cuda")
    out = torch.empty_like(source)
    return sum(kernel_times(lambda: out.copy_(source)).values())


# -- check -------------------------------------------------------------------------------------------------------------


def check_case(shape, layout, wire, *, fused=False, alignment=1, deferred=False, steps=3):
    ranks = Ranks(shape)
    places = ranks.places(layout, wire, alignment)
    format_, placement = WIRES[wire], ranks.placement
    capacity = shape.capacity or shape.num_tokens
    ids, weights = [i.cpu() for i in ranks.ids], [w.cpu() for w in ranks.weights]
    routing = reference.route(ids, weights, placement=placement, layout=layout, expert_alignment=alignment, capacity=capacity)
    want = reference.dispatch([x.cpu() for x in ranks.xs], routing, format_)
    ys = [torch.randn(w.x.numel() // shape.hidden, shape.hidden, device="cuda").bfloat16() for w in want]
    summed = reference.combine([y.cpu() for y in ys], routing)
    wrong = []
    for number in range(steps):
        made = ranks.steps(layout, number % 2, alignment)
        outs = [torch.empty_like(x) for x in ranks.xs]

        def dispatch(r, made=made):
            engine, step = ranks.engines[r], made[r]
            if fused:
                engine.dispatch_fused(ranks.xs[r], step, places[r], receive=not deferred)
            else:
                addresses = engine.plan(step, places[r])
                engine.send(ranks.xs[r], None, addresses, step, places[r], receive=not deferred)
            if deferred:
                engine.await_rows(step, total=fused)

        def combine(r, made=made, outs=outs):
            ranks.engines[r].combine(ys[r], None, made[r], outs[r], weighted=layout is not Layout.COMPACT, finish=True)

        if number == 0:
            ranks.compile(dispatch, combine)
        ranks.each(dispatch)
        ranks.each(combine)
        if ranks.failures():
            return [f"gave up: {ranks.failures()}"]
        for r, mine in enumerate(want):
            rows = mine.x.numel() // shape.hidden
            meta = places[r].meta(number % 2)[:rows].cpu()
            used = torch.ones(rows, dtype=torch.bool)
            pairs = [("tokens", made[r].expert_counts.cpu(), mine.num_tokens_per_expert)]
            pairs.append(("per rank", made[r].rank_counts.cpu(), mine.num_tokens_per_rank))
            if layout is not Layout.COMPACT:
                source = mine.row_source.view(rows, 3)
                used = source[:, 0] >= 0
                pairs.append(("row_source", meta[used], source[used]))
            else:
                pairs.append(("topk_idx", meta[:, 1 : 1 + shape.num_topk], mine.topk_idx))
            payload = places[r].payload(number % 2)[:rows][used.cuda()].cpu()
            pairs.append(("rows", payload, mine.x.reshape(rows, -1).view(torch.uint8)[used]))
            sf = places[r].sf(number % 2)
            if sf is not None:
                pairs.append(("sf", sf[:rows][used.cuda()].cpu(), mine.sf.reshape(rows, -1).view(torch.uint8)[used]))
            pairs.append(("sums", outs[r].cpu(), summed[r].x))
            for name, got, expected in pairs:
                difference = first_mismatch(got.contiguous(), expected.contiguous())
                if difference is not None:
                    wrong.append(f"step {number} rank {r} {name}: {difference}")
    return wrong


def check():
    slots, major, compact = Layout.EXPERT_SLOTS, Layout.EXPERT_MAJOR, Layout.COMPACT
    cases = [
        (Shape(1, 32, 64), slots, "fp8", {"fused": True}),
        (Shape(1, 33, 60, capacity=64), slots, "ue8m0", {"fused": True}),
        (Shape(2, 32, 64), slots, "fp8", {"fused": True}),
        (Shape(8, 16, 64, hidden=1024), slots, "fp8", {"fused": True, "deferred": True}),
        (Shape(4, 16, 62, hidden=1032), slots, "bf16", {"fused": True}),
        (Shape(1, 200, 64), compact, "fp8", {}),
        (Shape(2, 300, 64), compact, "bf16", {}),
        (Shape(4, 130, 256, hidden=2048), compact, "fp8", {"deferred": True}),
        (Shape(8, 65, 256, hidden=1024), compact, "ue8m0", {}),
        (Shape(1, 150, 64), major, "fp8", {"alignment": 128}),
        (Shape(4, 100, 64, hidden=2048), major, "bf16", {"alignment": 8}),
        (Shape(2, 40, 64, hidden=2048), slots, "fp8", {}),
        (Shape(2, 40, 4096, hidden=512, num_topk=32), major, "bf16", {}),
    ]
    for shape, layout, wire, options in cases:
        try:
            wrong = check_case(shape, layout, wire, **options)
        except Exception as error:  # noqa: BLE001
            wrong = [repr(error)[:600]]
        note(check=str(layout), wire=wire, ranks=shape.num_ranks, hidden=shape.hidden, ok=not wrong, wrong=str(wrong[:2]), **options)
        torch.cuda.empty_cache()


# -- decode ------------------------------------------------------------------------------------------------------------


def decode(sweep=False):
    for tokens, experts in ((128, 256), (128, 32), (16, 256), (64, 256), (256, 256)):
        ranks = Ranks(Shape(1, tokens, experts), num_banks=1)
        engine, x = ranks.engines[0], ranks.xs[0]
        places = ranks.places(Layout.EXPERT_SLOTS, "fp8")[0]
        step = ranks.steps(Layout.EXPERT_SLOTS)[0]
        y = torch.randn(experts * tokens, 7168, device="cuda").bfloat16()
        out = torch.empty_like(x)
        tries = [(None, None)]
        if sweep and (tokens, experts) in ((128, 256), (256, 256), (64, 256)):
            tries += [(64, 8), (64, 16), (64, 4), (32, 4), (32, 8), (16, 4), (16, 8), (16, 2), (8, 2)]
        for lines, warps in tries:
            times = kernel_times(lambda: engine.dispatch_fused(x, step, places, receive=True, lines=lines, warps=warps))
            note(decode="dispatch", tokens=tokens, experts=experts, lines=lines, warps=warps, us=sum(times.values()))
        tries = [(None, None)]
        if sweep and (tokens, experts) in ((128, 256), (16, 256), (256, 256)):
            tries += [(8192, 8), (8192, 16), (4096, 4), (4096, 8), (2048, 2), (2048, 4), (2048, 8), (1024, 2), (1024, 4)]
        for columns, warps in tries:
            times = kernel_times(
                lambda: engine.combine(y, None, step, out, weighted=True, columns=columns, warps=warps)
            )
            note(decode="combine", tokens=tokens, experts=experts, columns=columns, warps=warps, us=sum(times.values()))
        del ranks, places, y
        torch.cuda.empty_cache()


# -- virtual ranks -----------------------------------------------------------------------------------------------------


def virtual(sweep=False):
    for num_ranks in (2, 4, 8):
        tries = [(None, None)] if not sweep else [(None, None), (64, 8), (32, 4), (64, 4)]
        budget = 0
        for lines, warps in tries:
            ranks = Ranks(Shape(num_ranks, 128, 256, num_sms=budget), num_banks=1)
            places = ranks.places(Layout.EXPERT_SLOTS, "fp8")
            made = ranks.steps(Layout.EXPERT_SLOTS)
            slots = 256 // num_ranks * num_ranks * 128
            ys = [torch.randn(slots, 7168, device="cuda").bfloat16() for _ in range(num_ranks)]
            outs = [torch.empty_like(x) for x in ranks.xs]

            def dispatch(r):
                ranks.engines[r].dispatch_fused(ranks.xs[r], made[r], places[r], receive=True, lines=lines, warps=warps)

            def give_back(r):
                ranks.engines[r].give_back(0)

            def combine(r, finish=False):
                ranks.engines[r].combine(ys[r], None, made[r], outs[r], weighted=True, finish=finish)

            try:
                ranks.compile(dispatch, give_back, combine, lambda r: combine(r, True))
                ranks.each(dispatch)
                ranks.each(give_back)
                ranks.each(combine)
                ranks.each(dispatch)
                ranks.each(lambda r: combine(r, True))
                assert not ranks.failures(), ranks.failures()
                both, least = graph_time(lambda: (ranks.each(dispatch), ranks.each(lambda r: combine(r, True))))
                only, _ = graph_time(lambda: ranks.each(combine))
                fork, _ = graph_time(lambda: ranks.each(give_back))
                note(virtual=num_ranks, lines=lines, warps=warps, round_trip_us=both, least_us=least, combine_us=only,
                     dispatch_us=both - only, fork_join_us=fork, failures=len(ranks.failures()))
            except Exception as error:  # noqa: BLE001
                note(virtual=num_ranks, lines=lines, warps=warps, error=repr(error)[:300])
            del ranks, places, ys
            torch.cuda.empty_cache()


# -- prefill -----------------------------------------------------------------------------------------------------------


def prefill(sweep=False):
    for num_ranks, wire in ((1, "fp8"), (1, "bf16"), (2, "fp8"), (2, "bf16")):
        ranks = Ranks(Shape(num_ranks, 4096, 256, num_sms=24), num_banks=1)
        places = ranks.places(Layout.COMPACT, wire)
        made = ranks.steps(Layout.COMPACT)
        tries = [(None, None)] + ([(2, 16), (2, 32), (4, 16)] if sweep else [])
        for many, warps in tries:
            def step(r, many=many, warps=warps):
                engine = ranks.engines[r]
                addresses = engine.plan(made[r], places[r])
                engine.send(ranks.xs[r], None, addresses, made[r], places[r], receive=True, rows_per_block=many, warps=warps)
                engine.give_back(0)
            try:
                ranks.compile(step)
                us, least = graph_time(lambda: ranks.each(step), inner=2)
                parts = kernel_times(lambda: step(0)) if num_ranks == 1 else {}
                note(prefill="dispatch", ranks=num_ranks, wire=wire, rows=many, warps=warps, us=us, least_us=least,
                     parts={k: round(v, 1) for k, v in parts.items()}, failures=len(ranks.failures()))
            except Exception as error:  # noqa: BLE001
                note(prefill="dispatch", rows=many, warps=warps, error=repr(error)[:200])
        if wire == "bf16":
            ys = [torch.randn(p.region.num_rows, 7168, device="cuda").bfloat16() for p in places]
            outs = [torch.empty_like(x) for x in ranks.xs]
            tries = [(None, None, None)]
            if sweep:
                tries += [(2, 8192, 16), (4, 8192, 16)]
            for many, columns, warps in tries:
                def gather(r, many=many, columns=columns, warps=warps):
                    ranks.engines[r].combine(
                        ys[r], None, made[r], outs[r], weighted=False, rows_per_block=many, columns=columns, warps=warps
                    )
                ranks.compile(gather)
                us, least = graph_time(lambda: ranks.each(gather), inner=2)
                note(prefill="combine", ranks=num_ranks, rows=many, warps=warps, us=us, least_us=least)
        del ranks, places
        torch.cuda.empty_cache()
    ranks = Ranks(Shape(1, 4096, 256, num_sms=132), num_banks=1)
    for wire in ("fp8", "bf16"):
        places = ranks.places(Layout.EXPERT_MAJOR, wire)[0]
        step = ranks.steps(Layout.EXPERT_MAJOR)[0]
        engine, x = ranks.engines[0], ranks.xs[0]
        floor = copy_time((4096 * 14336 + 32768 * (14336 if wire == "bf16" else 7392)) // 2)
        for many, warps in ((None, None), (1, 8), (1, 16), (2, 16), (2, 32), (4, 32)) if sweep else ((None, None),):
            for sms in (132, 264, 528) if sweep else (132,):
                engine.num_sms = sms
                def run(many=many, warps=warps):
                    addresses = engine.plan(step, places)
                    engine.send(x, None, addresses, step, places, receive=True, rows_per_block=many, warps=warps)
                try:
                    parts = kernel_times(run)
                    note(prefill="expert_major", wire=wire, rows=many, warps=warps, sms=sms, us=sum(parts.values()), floor_us=floor,
                         parts={k: round(v, 1) for k, v in parts.items()})
                except Exception as error:  # noqa: BLE001
                    note(prefill="expert_major", rows=many, warps=warps, error=repr(error)[:200])
    y = torch.randn(32768, 7168, device="cuda").bfloat16()
    out = torch.empty_like(x)
    floor = copy_time((4096 + 32768) * 14336 // 2)
    for _ in range(2):
        for columns, warps in ((None, None), (2048, 4), (1024, 2), (8192, 16)):
            parts = kernel_times(lambda: engine.combine(y, None, step, out, weighted=True, columns=columns, warps=warps))
            note(prefill="expert_major combine", columns=columns, warps=warps, us=sum(parts.values()), floor_us=floor)


def commit():
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["check", "decode", "virtual", "prefill"])
    parser.add_argument("--sweep", action="store_true", help="also try other block shapes")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default=None)
    args = parser.parse_args()
    started = time.time()
    for part in args.parts:
        if part == "check":
            check()
        else:
            {"decode": decode, "virtual": virtual, "prefill": prefill}[part](args.sweep)
    facts = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "command": " ".join(sys.argv), "commit": args.commit or commit(),
        "seconds": round(time.time() - started),
    }
    if args.out:
        args.out.write_text(json.dumps({"machine": facts, "results": RESULTS}, indent=1))
    print(facts)


if __name__ == "__main__":
    assert FP8Block
    main()
