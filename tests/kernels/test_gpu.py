"""`Buffer` on a GPU, bit for bit against the oracle: virtual ranks of one World, graphs, faults."""

import itertools
import time
from functools import partial

import on_gpu
import pytest
import torch
from device_checks import CAPACITY, COMPACT, EXPERTS, HIDDEN, MAJOR, SLOTS, TOPK, check_guards, check_poison, check_rank

import expertwire as ew
from expertwire import reference
from expertwire.formats import BF16, FP8Block
from expertwire.testing import (
    assert_equal,
    random_rows,
    random_weights,
    run_processes,
    uniform_routing,
    with_holes,
)

pytestmark = on_gpu.MARKS
buffer = partial(on_gpu.buffer, timeout_s=20.0)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", [SLOTS, MAJOR, COMPACT], ids=str)
@pytest.mark.parametrize("wire", [BF16(), FP8Block(), FP8Block(scale="ue8m0")], ids=lambda w: w.name)
def test_layouts_and_wires(num_ranks, layout, wire):
    def rank_work(rank):
        with buffer(rank) as buf:
            check_rank(buf, layout, wire, alignment=4 if layout is MAJOR else 1)

    ew.World(num_ranks, device="cuda").run(rank_work)


@pytest.mark.parametrize("layout", [SLOTS, MAJOR, COMPACT], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"counts": "device"},
        {"counts": "device", "zero_copy": True},
        {"deferred": True},
        {"deferred": True, "zero_copy": True, "counts": "device"},
    ],
    ids=str,
)
def test_kinds_of_calls(layout, options):
    def rank_work(rank):
        with buffer(rank, validate=False) as buf:
            check_rank(buf, layout, FP8Block(), repeats=True, **options)

    ew.World(2, device="cuda").run(rank_work)


@pytest.mark.parametrize("layout", [SLOTS, MAJOR, COMPACT], ids=str)
@pytest.mark.parametrize("wire", [BF16(), FP8Block(), FP8Block(decode=True)], ids=["bf16", "fp8", "decode"])
def test_poison(layout, wire):
    """One rank has it, and then both."""

    def rank_work(rank, whole):
        buf = buffer(rank, debug_poison=whole or rank.rank == 0)
        for zero_copy, counts in itertools.product((False, True), ("host", "device")):
            options = {"zero_copy": zero_copy, "counts": counts, "alignment": 4 if layout is MAJOR else 1}
            if whole:
                check_poison(buf, layout, wire, **options)
            check_rank(buf, layout, wire, **options)
        check_rank(buf, layout, wire, deferred=True, zero_copy=True)
        rank.barrier()
        if whole:
            check_guards(buf)
        buf.close()

    for whole in (False, True):
        ew.World(2, device="cuda").run(partial(rank_work, whole=whole))


def test_poison_in_a_graph():
    """Rows of a batch before are NaN in a replay, too."""

    def rank_work(rank):
        with buffer(rank, max_in_flight=1, debug_poison=True) as buf:
            x = random_rows(rank.rank, 20, HIDDEN).cuda()
            ids = torch.zeros(20, TOPK, dtype=torch.int64, device="cuda")

            def step():
                sent = buf.dispatch(x, ids, layout=SLOTS, counts="device", zero_copy=True)
                rows = sent.x.clone()
                return sent.x, rows, buf.combine(rows, sent.handle).x

            step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                view, rows, out = step()
            for expert in (1, 0, 2):
                ids.fill_(-1)[:, 0] = expert
                graph.replay()
                torch.cuda.current_stream().synchronize()
                assert_equal(out.cpu(), x.cpu())
                assert_equal(rows[expert, :20].cpu(), x.cpu())
                assert rows[expert, 20:].cpu().isnan().all()
                assert rows[:expert].cpu().isnan().all()
                assert view.cpu().isnan().all()

    ew.World(1, device="cuda").run(rank_work)


def test_uneven_placement():
    def rank_work(rank):
        with buffer(rank, placement=ew.Placement((2, 0, 0, 2) * 4)) as buf:
            for layout in (SLOTS, MAJOR, COMPACT):
                check_rank(buf, layout, BF16())

    ew.World(4, device="cuda").run(rank_work)


def test_opaque_rows():
    def rank_work(rank):
        payload = torch.arange(10 * 48, dtype=torch.uint8, device="cuda").view(10, 48) + rank.rank
        sf = torch.arange(10 * 3, dtype=torch.uint8, device="cuda").view(10, 3)
        ids = torch.full((10, TOPK), -1, device="cuda")
        ids[:, 0] = 8 * (1 - rank.rank)
        with buffer(rank) as buf:
            for layout in (COMPACT, SLOTS):
                sent = buf.dispatch((payload, sf), ids, layout=layout)
                x, factors = sent.x.view(-1, 48)[:10], sent.sf.view(-1, 3)[:10]
                assert (x == payload - rank.rank + (1 - rank.rank)).all()
                assert (factors == sf).all()
                sent.handle.release()

    ew.World(2, device="cuda").run(rank_work)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e4m3fn])
def test_opaque_rows_of_any_dtype(dtype):
    def rank_work(rank):
        payload = torch.arange(10 * 48, dtype=torch.uint8, device="cuda").view(10, 48).view(dtype)
        sf = torch.arange(10 * 8, dtype=torch.uint8, device="cuda").view(10, 8).view(dtype)
        ids = torch.arange(TOPK, device="cuda").expand(10, TOPK).contiguous()
        with buffer(rank) as buf:
            for zero_copy in (False, True):
                sent = buf.dispatch((payload, sf), ids, zero_copy=zero_copy)
                assert (sent.x.dtype, sent.sf.dtype) == (dtype, dtype)
                assert (sent.x.view(torch.uint8) == payload.view(torch.uint8)).all()
                assert (sent.sf.view(torch.uint8) == sf.view(torch.uint8)).all()
                empty = buf.dispatch((payload[:, :0].contiguous(), sf), ids, zero_copy=zero_copy)
                assert (empty.x.shape, empty.x.dtype) == ((10, 0), dtype)
                assert (empty.sf.view(torch.uint8) == sf.view(torch.uint8)).all()
                sent.handle.release()
                empty.handle.release()

    ew.World(1, device="cuda").run(rank_work)


def test_graph_with_changing_inputs():
    def rank_work(rank):
        with buffer(rank, max_in_flight=1) as buf:
            x = torch.zeros(CAPACITY, HIDDEN, dtype=torch.bfloat16, device="cuda")
            ids = torch.zeros(CAPACITY, TOPK, dtype=torch.int64, device="cuda")
            weights = torch.zeros(CAPACITY, TOPK, device="cuda")

            def step():
                sent = buf.dispatch(x, ids, weights, layout=SLOTS, counts="device", zero_copy=True)
                return buf.combine(2 * sent.x, sent.handle).x

            step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = step()
            for number in range(20):
                x.copy_(random_rows(number, CAPACITY, HIDDEN))
                ids.copy_(with_holes(uniform_routing(number, CAPACITY, TOPK, EXPERTS), number))
                weights.copy_(random_weights(number, CAPACITY, TOPK))
                graph.replay()
                routing = reference.route(
                    [ids.cpu()], [weights.cpu()], placement=buf.settings.placement, layout=SLOTS, capacity=CAPACITY
                )
                rows = reference.dispatch([x.cpu()], routing)[0].x
                assert_equal(out.cpu(), reference.combine([2 * rows], routing)[0].x)

    ew.World(1, device="cuda").run(rank_work)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_capture_before_the_first_call_is_refused():
    def rank_work(rank):
        with buffer(rank) as buf:
            x = torch.zeros(4, HIDDEN, dtype=torch.bfloat16, device="cuda")
            ids = torch.zeros(4, TOPK, dtype=torch.int64, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with pytest.raises(ew.TransportUnavailable, match="outside of the capture"), torch.cuda.graph(graph):
                buf.dispatch(x, ids, layout=SLOTS, counts="device")

    ew.World(1, device="cuda").run(rank_work)


def test_after_warmup_the_first_call_can_be_captured():
    call = {"layout": SLOTS, "wire": FP8Block(decode=True), "counts": "device", "zero_copy": True}

    def rank_work(rank):
        with buffer(rank, max_in_flight=1) as buf:
            buf.warmup(call)
            x = random_rows(3, CAPACITY, HIDDEN).cuda()
            ids = uniform_routing(4, CAPACITY, TOPK, EXPERTS).cuda()
            weights = torch.ones(CAPACITY, TOPK, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                sent = buf.dispatch(x, ids, weights, **call)
                out = buf.combine(sent.x, sent.handle).x
            graph.replay()
            rows = FP8Block().decode_bfloat16(*FP8Block().encode(x.cpu()), HIDDEN)
            assert_equal(out.cpu(), (rows.float() * TOPK).bfloat16())

    ew.World(1, device="cuda").run(rank_work)


def test_another_stream_waits_for_the_event_of_a_call():
    def rank_work(rank):
        with buffer(rank) as buf:
            x = random_rows(5, CAPACITY, HIDDEN).cuda()
            ids = torch.zeros(CAPACITY, TOPK, dtype=torch.int64, device="cuda")
            ids[:, 1:] = -1
            side = torch.cuda.Stream()
            for _ in range(20):
                sent = buf.dispatch(x, ids, layout=COMPACT, counts="device", defer_receive=True)
                assert isinstance(sent.event, torch.cuda.Event)
                sent = sent.hook()
                side.wait_event(sent.event)
                with torch.cuda.stream(side):
                    copy = sent.x.clone()
                back = buf.combine(sent.x, sent.handle)
                side.wait_event(back.event)
                with torch.cuda.stream(side):
                    total = back.x.clone()
                side.synchronize()
                assert_equal(copy[:CAPACITY].cpu(), x.cpu())
                assert_equal(total.cpu(), x.cpu())
                sent.x.zero_()

    ew.World(1, device="cuda").run(rank_work)


@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_a_rank_that_never_comes_is_named(call):
    """For combine in a bank where no peer has said yet where its rows are."""

    def alone(buf, x, ids, sent):
        if call == "dispatch":
            buf.dispatch(x, ids, layout=COMPACT)
        else:
            buf.combine(sent.x, sent.handle)
            buf.synchronize()

    def rank_work(rank):
        buf = buffer(rank, timeout_s=0.5)
        x = torch.zeros(4, HIDDEN, dtype=torch.bfloat16, device="cuda")
        ids = torch.full((4, TOPK), -1, device="cuda")
        ids[:, 0] = 15
        for _ in range(2 if call == "dispatch" else 1):
            sent = buf.dispatch(x, ids, layout=COMPACT)
            buf.combine(sent.x, sent.handle)
        if call == "combine":
            sent = buf.dispatch(x, ids, layout=COMPACT)
        torch.cuda.synchronize()
        rank.barrier()
        if rank.rank == 1:
            rank.barrier()
            return
        started = time.monotonic()
        with pytest.raises(ew.PeerTimeout, match=f"{call} (send|receive)") as caught:
            alone(buf, x, ids, sent)
        assert caught.value.peers == (1,)
        torch.cuda.synchronize()
        assert time.monotonic() - started < 10
        with pytest.raises(ew.BufferClosed):
            buf.dispatch(x, ids, layout=COMPACT)
        rank.barrier()

    ew.World(2, device="cuda").run(rank_work)


def test_who_waits_leaves_room_for_any_kernel():
    """A matrix product wants most of the shared memory of an SM, which it does not get beside other kernels. A rank
    that needs one before it sends must get it while its peer's kernel, on the same GPU, waits for that rank."""

    def rank_work(rank):
        with buffer(rank, hidden=1024, num_max_tokens_per_rank=512, timeout_s=30.0) as buf:
            x = torch.ones(512, 1024, dtype=torch.bfloat16, device="cuda")
            ids = (torch.arange(512 * TOPK, device="cuda") % EXPERTS).view(512, TOPK)
            a = torch.randn(4096, 4096, device="cuda").bfloat16()
            for layout in (SLOTS, COMPACT):
                for warm in (True, False):
                    for call in ("dispatch", "combine"):
                        torch.cuda.current_stream().synchronize()
                        rank.barrier()
                        if rank.rank == 1:
                            time.sleep(0.0 if warm else 0.3)
                            began = time.monotonic()
                            a @ a
                            torch.cuda.current_stream().synchronize()
                            assert warm or time.monotonic() - began < 5
                        if call == "dispatch":
                            sent = buf.dispatch(x, ids, layout=layout, counts="device", zero_copy=True)
                        else:
                            back = buf.combine(sent.x, sent.handle)
                buf.synchronize()
                assert_equal(back.x.cpu(), x.cpu() * (TOPK if layout is SLOTS else 1))  # one rank has all of a token

    ew.World(2, device="cuda").run(rank_work)


def processes_work(group):
    torch.cuda.set_device(0)
    with buffer(group, timeout_s=60.0) as buf:
        for layout, wire in itertools.product((COMPACT, MAJOR, SLOTS), (BF16(), FP8Block(), FP8Block(scale="ue8m0"))):
            check_rank(buf, layout, wire, steps=1)
        check_rank(buf, SLOTS, FP8Block(), steps=2, counts="device", zero_copy=True, deferred=True)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_processes_share_a_gpu(num_ranks):
    run_processes(num_ranks, processes_work)


def test_what_is_not_offered_says_so():
    def rank_work(rank):
        for options in (
            {"transport": "symm_mem"},
            {"transport": "nvshmem"},
        ):
            with pytest.raises(ew.TransportUnavailable):
                buffer(rank, **options)
        with buffer(rank) as buf:
            x = torch.zeros(4, HIDDEN, dtype=torch.bfloat16, device="cuda")
            sent = buf.dispatch(x, torch.zeros(4, TOPK, dtype=torch.int64, device="cuda"))
            with pytest.raises(ew.TransportUnavailable, match="not fp8"):
                buf.combine(sent.x, sent.handle, wire=ew.FP8Block())

    ew.World(1, device="cuda").run(rank_work)


def test_a_profiler_is_told_how_many_bytes_move():
    from triton import knobs

    told = {}

    def listen(metadata):
        told.update({metadata.get()["name"]: metadata.get().get("bytes")})

    def rank_work(rank):
        with buffer(rank) as buf:
            check_rank(buf, SLOTS, FP8Block(), steps=1)
            check_rank(buf, COMPACT, BF16(), steps=1)

    knobs.runtime.launch_enter_hook.add(listen)
    try:
        ew.World(1, device="cuda").run(rank_work)
    finally:
        knobs.runtime.launch_enter_hook.remove(listen)
    row = HIDDEN + 4 * (HIDDEN // 128)
    assert told["dispatch_slots"] == CAPACITY * (2 * HIDDEN + TOPK * row)
    assert told["dispatch_send"] == CAPACITY * (2 * HIDDEN + 2 * HIDDEN)  # COMPACT on one rank: a place for each token
    assert told["combine_gather"] is not None


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_no_buffer_is_created_in_a_capture():
    def rank_work(rank):
        with (
            pytest.raises(ew.TransportUnavailable, match="cannot be created while a graph is captured"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            buffer(rank)

    ew.World(1, device="cuda").run(rank_work)
