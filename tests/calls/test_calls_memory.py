"""Whose memory is whose: views, pools, poison, guards, sizes, statistics."""

import gc

import pytest
import torch
from small_buffer import make

import expertwire as ew
from expertwire.host.pool import Pool
from expertwire.layouts.window import GUARD_BYTES, LINE_BYTES, PURPOSES, WindowLayout
from expertwire.testing import payload, round_robin

COMPACT, EXPERT_MAJOR, EXPERT_SLOTS = ew.Layout


def inputs(buf, num_tokens=6):
    hidden = buf.settings.hidden
    return payload(buf.rank, num_tokens, hidden), round_robin(buf.rank, num_tokens, 2, buf.settings.num_experts)


def round_trip(buf, num_tokens=6):
    x, ids = inputs(buf, num_tokens)
    sent = buf.dispatch(x, ids, layout=EXPERT_MAJOR)
    assert torch.equal(buf.combine(sent.x, sent.handle).x, 2 * x)


def world(num_ranks, fn, *args):
    return ew.World(num_ranks).run(lambda rank: fn(rank, *args))


# -- zero copy -------------------------------------------------------------------------------------------------------


def zero_copy(rank, hidden):
    """Views stay as they are until the handle is finished, whatever else happens, and are recycled afterwards."""
    with make(rank, hidden=hidden, max_in_flight=3, num_max_tokens_per_rank=64) as buf:
        x, ids = inputs(buf, 64)
        owners = torch.tensor(buf.settings.placement.expert_ranks)[ids]
        multiple = 1 + (owners[:, :1] != owners[:, 1:]).int()
        places, kept = set(), []
        for i in range(1, 9):
            view = buf.dispatch(i * x, ids, zero_copy=True)
            before, at = view.x.clone(), view.x.data_ptr()
            places.add(at)
            for _ in range(2):  # the other banks are used meanwhile
                other = buf.dispatch(-x, ids, zero_copy=True)
                assert other.x.data_ptr() != at
                assert torch.equal(view.x, before)
                buf.combine(other.x, other.handle)
                assert other.handle.finished
            back = buf.combine(view.x, view.handle)
            assert torch.equal(back.x, (multiple * i * x.float()).bfloat16())
            kept.append((back.x, back.x.clone()))
            assert all(torch.equal(mine, copy) for mine, copy in kept), "what combine returned is the caller's"
        assert len(places) <= 3, "three banks, three places"


@pytest.mark.parametrize("hidden", [64, 2048])
def test_zero_copy_views_are_recycled_only_after_the_handle_is_finished(hidden):
    world(2, zero_copy, hidden)


def zero_copy_holds_a_bank(rank):
    with make(rank, max_in_flight=1) as buf:
        x, ids = inputs(buf)
        view = buf.dispatch(x, ids, zero_copy=True)
        before = view.x.clone()
        for _ in range(2):
            with pytest.raises(ew.InFlightError, match=f"rank {rank.rank}: .*release"):
                buf.dispatch(x, ids)
        assert torch.equal(view.x, before)
        view.handle.release()
        view.handle.release()
        round_trip(buf)
        back = buf.combine(before, view.handle)  # a finished handle still combines; its views are gone
        assert back.x.shape == x.shape
        with pytest.raises(ew.InvalidArgument, match="zero_copy is not offered together with handle"):
            buf.dispatch(x, handle=view.handle, zero_copy=True)


def test_zero_copy_holds_its_bank():
    world(2, zero_copy_holds_a_bank)


def released_before_it_received(rank):
    """The memory is given back as soon as nobody writes to it, which is when the hook has received."""
    with make(rank) as buf:
        x, ids = inputs(buf)
        for _ in range(5):  # more than there are banks
            sent = buf.dispatch(x, ids, zero_copy=True, defer_receive=True)
            sent.handle.release()
            sent.hook()
            sent.handle.release()
        round_trip(buf)


def test_a_zero_copy_handle_that_is_released_before_it_received():
    world(2, released_before_it_received)


def zero_copy_and_gradients(rank):
    """Recycled views never reach a backward pass."""
    with make(rank, max_in_flight=1) as buf:
        x, ids = inputs(buf)
        weights = torch.full((6, 2), 0.5, requires_grad=True)
        with pytest.raises(
            ew.InvalidArgument, match=f"rank {rank.rank}: zero_copy rows are overwritten before a backward"
        ):
            buf.dispatch(x, ids, weights, layout=EXPERT_MAJOR, zero_copy=True)
        with torch.no_grad():
            sent = buf.dispatch(x, ids, weights, layout=EXPERT_MAJOR, zero_copy=True)
            buf.combine(sent.x, sent.handle)

        expert = torch.ones(64, requires_grad=True)  # the input needs no gradient, the expert does
        for recycled in (False, True):
            sent = buf.dispatch(x, ids, layout=EXPERT_MAJOR, zero_copy=True)
            y = sent.x * expert.bfloat16()
            if recycled:
                buf.combine(y.detach(), sent.handle)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    y.float().sum().backward()
            else:
                y.float().sum().backward()
                assert torch.equal(expert.grad, sent.x.float().sum(dim=0))
                sent.handle.release()


def test_zero_copy_and_gradients():
    world(2, zero_copy_and_gradients)


# -- ordinary tensors ------------------------------------------------------------------------------------------------


def returned_tensors(rank):
    """What was returned stays, through any number of calls, whatever part of it is still looked at."""
    with make(rank, hidden=256, num_max_tokens_per_rank=256) as buf:
        kept = []
        for i in range(12):
            x, ids = inputs(buf, 256)
            sent = buf.dispatch((i + 1) * x, ids, layout=EXPERT_MAJOR, wire=ew.FP8Block(decode=True) if i % 3 else None)
            back = buf.combine(sent.x, sent.handle)
            looks = [
                sent.x,
                sent.x[3:],
                sent.x.view(torch.int16),
                sent.x.detach(),
                back.x.t(),
            ]
            look = looks[i % len(looks)]
            kept.append((look, look.clone()))
            del sent, back, x, look, looks
            assert all(torch.equal(tensor, copy) for tensor, copy in kept), i
    gc.collect()
    assert all(torch.equal(tensor, copy) for tensor, copy in kept), "and after close"


def test_returned_tensors_are_never_touched_again():
    world(2, returned_tensors)


def test_the_pool_lends_memory_only_when_nobody_looks():
    pool, size = Pool(), (1 << 16, 4)
    first = pool.empty(size, torch.uint8).fill_(1)
    address = first.data_ptr()
    second = pool.empty(size, torch.uint8).fill_(2)
    assert second.data_ptr() != address
    array, row = first.numpy(), first[7]
    del first
    gc.collect()
    third = pool.empty(size, torch.uint8).fill_(3)
    assert third.data_ptr() != address
    del array
    gc.collect()
    fourth = pool.empty(size, torch.uint8).fill_(4)
    assert fourth.data_ptr() != address
    assert row.tolist() == [1, 1, 1, 1]
    del row
    gc.collect()
    assert pool.empty(size, torch.uint8).data_ptr() == address
    assert pool.empty((0, 4), torch.float32).shape == (0, 4)
    bits = pool.empty((1 << 15, 2), torch.bfloat16)
    assert bits.dtype == torch.bfloat16
    assert bits.is_contiguous()


def test_the_pool_forgets_what_is_too_much():
    pool = Pool()
    for _ in range(3):
        blocks = [pool.empty((1 << 16,), torch.uint8) for _ in range(40)]
        del blocks
        gc.collect()
        assert len(pool._idle) <= 16
        assert not pool._lent


# -- poison and guards ------------------------------------------------------------------------------------------------


def poison(rank, layout, wire):
    """Windows and tails are NaN, and it shows nowhere, in any order of calls."""
    with make(rank, debug_poison=True, max_in_flight=2) as buf:
        for num_tokens in (8, 0, 3, 1, 8):
            x, ids = inputs(buf, num_tokens)
            ids[::3, 0] = -1
            weights = torch.ones(num_tokens, 2)
            sent = buf.dispatch(x, ids, weights, layout=layout, counts="device", wire=wire)
            valid = (sent.topk_idx >= 0).any(1) if layout is COMPACT else sent.row_source[..., 0] >= 0
            rows = sent.x.float()
            assert rows[valid].isfinite().all()
            if sent.x[~valid].numel():
                assert rows[~valid].isnan().all(), "the tails are poisoned"
            y = sent.x if sent.x.dtype == torch.bfloat16 else rows.bfloat16()
            for reduce in ("token", "rank"):
                back = buf.combine(y, sent.handle, reduce=reduce)
                assert back.x.isfinite().all()
            if layout is COMPACT:
                back = buf.combine(y, sent.handle, topk_weights=sent.topk_weights)
                assert torch.equal(back.topk_weights, torch.where(ids >= 0, weights, 0))
        assert buf._engine.runtime.broken_guards() == []


@pytest.mark.parametrize("layout", list(ew.Layout))
@pytest.mark.parametrize("wire", [None, ew.FP8Block(), ew.FP8Block(decode=True)], ids=["bf16", "fp8", "decode"])
def test_poison_never_leaks(layout, wire):
    world(2, poison, layout, wire)


# -- sizes ------------------------------------------------------------------------------------------------------------


def regions(layout):
    """(first byte, bytes) of everything in a window, guards included."""
    yield 0, layout.words_bytes
    for bank in range(layout.num_banks):
        for writer in range(layout.num_ranks):
            yield layout.dispatch_header(bank, writer), layout.dispatch_region_bytes
        yield layout.combine_header(bank, 0), layout.combine_bank_bytes
    for guard in layout.guards():
        yield guard, GUARD_BYTES


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 8, 1, 1),
        (3, 5, 24, 7, 2),
        (8, 65536, 7168, 8, 2),
        (256, 1 << 17, 1 << 20, 64, 64),
        (5, 1, 1 << 20, 64, 3),
    ],
)
def test_a_window_is_tiled_without_gap_or_overlap_also_past_32_bits(shape):
    layout, end = WindowLayout(*shape), 0
    for first, num_bytes in sorted(regions(layout)):
        assert first == end, "regions follow each other"
        assert first % 16 == 0
        end = first + num_bytes
    assert end == layout.total_bytes
    assert isinstance(layout.total_bytes, int)
    words = [
        layout.word(purpose, writer, bank)
        for purpose in PURPOSES
        for writer in range(layout.num_ranks)
        for bank in range(layout.num_banks)
    ]
    assert len(set(words)) == len(words)
    assert max(words) + LINE_BYTES == layout.words_bytes
    assert all(at % LINE_BYTES == 0 for at in words)


def test_size_hint_is_exact_and_checked():
    shape = {"num_ranks": 2, "hidden": 64, "num_topk": 2, "num_max_tokens_per_rank": 8}

    def window_bytes(rank):
        with make(rank) as buf:
            transport = buf._engine.runtime.transport
            return transport.windows[rank.rank].nbytes + transport.outputs[rank.rank].nbytes

    assert world(2, window_bytes) == [ew.Buffer.size_hint(**shape)] * 2
    large = ew.Buffer.size_hint(num_ranks=512, hidden=16384, num_topk=64, num_max_tokens_per_rank=1 << 17)
    assert large > 1 << 42
    for wrong in (
        {"hidden": 7},
        {"num_topk": 0},
        {"num_ranks": 0},
        {"num_max_tokens_per_rank": 1 << 24},
        {"hidden": "64"},
    ):
        with pytest.raises(ew.InvalidArgument, match=next(iter(wrong))):
            ew.Buffer.size_hint(**{**shape, **wrong})


# -- statistics -------------------------------------------------------------------------------------------------------


def statistics(rank):
    with make(rank, num_experts=9) as buf:  # three experts on every rank
        empty = buf.statistics()
        assert empty == ew.Statistics((0,) * 3, (0,) * 3, (0,) * 3, (0.0,) * 3, 0) or sum(empty.wait_s) > 0
        num_tokens = rank.rank + 2
        x = payload(rank.rank, num_tokens, 64)
        ids = torch.tensor([[0, 1]]).repeat(num_tokens, 1)  # all on rank 0
        for _ in range(4):
            sent = buf.dispatch(x, ids)
            buf.combine(sent.x, sent.handle)
        seen = buf.statistics()
        assert seen.rows_sent == (4 * num_tokens, 0, 0)
        assert seen.rows_received == ((8, 12, 16) if rank.rank == 0 else (0, 0, 0))
        assert seen.dropped_selections == 0
        assert seen.bytes_sent[0] >= 4 * num_tokens * 128
        assert (seen.bytes_sent[1] > 0) == (rank.rank == 0), "combine rows go back"
        assert all(isinstance(s, float) and s >= 0 for s in seen.wait_s)
        with pytest.raises(AttributeError):
            seen.rows_sent = ()


def test_statistics_count_rows_and_bytes_per_peer():
    world(3, statistics)
