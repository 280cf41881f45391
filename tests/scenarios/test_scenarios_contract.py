"""Cases C06, C17, C18, C21: illegal input, broken contracts, tiny capacities, wrong handles."""

import pytest
import torch

import expertwire as ew
from expertwire.testing import payload, round_robin

COMPACT, EXPERT_MAJOR = ew.Layout.COMPACT, ew.Layout.EXPERT_MAJOR


def make(group, num_experts, num_topk, capacity, hidden=128, **options):
    options = {"timeout_s": 60.0, "debug_poison": True, **options}
    return ew.Buffer(
        group, num_experts=num_experts, hidden=hidden, num_topk=num_topk, num_max_tokens_per_rank=capacity, **options
    )


def check_round_trip(buf, x, ids):
    sent = buf.dispatch(x, ids)
    owners = torch.tensor(buf.settings.placement.expert_ranks)[ids]
    multiple = torch.tensor([len(set(row)) for row in owners.tolist()])[:, None]
    assert torch.equal(buf.combine(sent.x, sent.handle).x, multiple * x)
    return sent


# -- C06 ---------------------------------------------------------------------------------------------------------


def put(ids, value):
    ids = ids.clone()
    ids[5, 1] = value
    return ids


BAD_INPUTS = {
    "id 32": (lambda x, ids, w: (x, put(ids, 32), w), r"topk_idx\[5, 1\] = 32 .*\[0, 32\)"),
    "id -2": (lambda x, ids, w: (x, put(ids, -2), w), r"topk_idx\[5, 1\] = -2 .*-1 for no selection"),
    "id 2^31": (lambda x, ids, w: (x, put(ids, 1 << 31), w), r"topk_idx\[5, 1\] = 2147483648 "),
    "id -2^63": (lambda x, ids, w: (x, put(ids, -(1 << 63)), w), r"topk_idx\[5, 1\] = -9223372036854775808 "),
    "float ids": (lambda x, ids, w: (x, ids.float(), w), r"topk_idx must have dtype int32 or int64, got float32"),
    "int16 ids": (lambda x, ids, w: (x, ids.short(), w), r"topk_idx must have dtype int32 or int64, got int16"),
    "bfloat16 weights": (lambda x, ids, w: (x, ids, w.bfloat16()), r"topk_weights must have dtype float32, got bfloat"),
    "float16 x": (lambda x, ids, w: (x.half(), ids, w), r"x must have dtype bfloat16, got float16"),
    "float32 x": (lambda x, ids, w: (x.float(), ids, w), r"x must have dtype bfloat16, got float32"),
    "strided x": (lambda x, ids, w: (x.repeat(1, 2)[:, ::2], ids, w), r"x must be contiguous, got strides \(256, 2\)"),
    "transposed ids": (lambda x, ids, w: (x, ids.t().contiguous().t(), w), r"topk_idx must be contiguous"),
    "fewer ids": (lambda x, ids, w: (x, ids[:7], w), r"topk_idx must have shape \[8, 2\], got \[7, 2\]"),
    "fewer weights": (lambda x, ids, w: (x, ids, w[:7]), r"topk_weights must have shape \[8, 2\], got \[7, 2\]"),
    "wider ids": (lambda x, ids, w: (x, ids.repeat(1, 2), w), r"topk_idx must have shape \[8, 2\], got \[8, 4\]"),
    "narrow x": (lambda x, ids, w: (x[:, :120].contiguous(), ids, w), r"x must have shape .*got \[8, 120\]"),
    "flat x": (lambda x, ids, w: (x.flatten(), ids, w), r"x must be a tensor \[num_tokens, 128\].*got \[1024\]"),
    "list x": (lambda x, ids, w: (x.tolist(), ids, w), r"x must be a tensor .*got list"),
    "no ids": (lambda x, ids, w: (x, None, w), r"topk_idx is missing"),
    "sparse x": (lambda x, ids, w: (x.to_sparse(), ids, w), r"x must be"),
    "sparse ids": (lambda x, ids, w: (x, ids.to_sparse(), w), r"topk_idx must be"),
    "sparse weights": (lambda x, ids, w: (x, ids, w.to_sparse()), r"topk_weights must be"),
    "meta x": (lambda x, ids, w: (x.to("meta"), ids, w), r"x must be on the buffer's device 'cpu', got 'meta'"),
    "half a pair": (lambda x, ids, w: ((x,), ids, w), r"x must be a tensor or a pair .*got 1 parts"),
    "ragged pair": (lambda x, ids, w: ((x, w[:7]), ids, w), r"x\[1\] must have shape .*got \[7, 2\]"),
    "too wide pair": (lambda x, ids, w: ((x.repeat(1, 2), w), ids, w), r"a row of 512 payload and 8 .*room for 256"),
}  # fmt: skip


def invalid_inputs(group):
    with make(group, 32, 2, 8) as buf:
        x, ids = payload(buf.rank, 8, 128), round_robin(buf.rank, 8, 2, 32)
        weights = torch.full((8, 2), 0.5)
        for name, (spoil, message) in BAD_INPUTS.items():
            if buf.rank == 2:
                with pytest.raises(ew.InvalidArgument, match=f"rank 2: {message}"):
                    buf.dispatch(*spoil(x, ids, weights))
            else:
                with pytest.raises(ew.PeerRefused, match="rank 2") as caught:
                    buf.dispatch(x, ids, weights)
                assert caught.value.peers == (2,), name
                assert "The next call works" in str(caught.value)
            check_round_trip(buf, x, ids)
        int64 = buf.dispatch(x, ids, weights)
        int32 = buf.dispatch(x, ids.int(), weights)
        for field in ("x", "topk_idx", "topk_weights", "num_tokens_per_expert", "num_tokens_per_rank"):
            assert torch.equal(getattr(int64, field), getattr(int32, field)), field
        assert torch.equal(buf.combine(int64.x, int64.handle).x, buf.combine(int32.x, int32.handle).x)


def test_c06_invalid_input_is_refused_on_all_ranks(anywhere):
    anywhere(4, invalid_inputs)


def illegal_ids_without_validation(group, engine):
    """Not validated, an illegal id counts as -1; it never reads or writes out of bounds, and it shows."""
    with make(group, 32, 2, 8, validate=False, engine=engine) as buf:
        x = payload(buf.rank, 8, 128)
        ids = torch.tensor([32, -2, 1 << 31, -(1 << 63), (1 << 63) - 1, 33, 1 << 32, -3])[:, None].repeat(1, 2)
        ids[:, 1] = round_robin(buf.rank, 8, 1, 32)[:, 0]
        sent = buf.dispatch(x, ids)
        assert torch.equal(buf.combine(sent.x, sent.handle).x, x)
        assert buf.statistics().dropped_selections == 8
        twice = torch.tensor([[99, 99]]).repeat(8, 1)
        slots = buf.dispatch(x, twice, layout=ew.Layout.EXPERT_SLOTS)
        assert torch.equal(buf.combine(slots.x, slots.handle).x, torch.zeros_like(x))
        assert buf.statistics().dropped_selections == 8 + 16


@pytest.mark.parametrize("engine", ["numba", "torch"])
def test_c06_without_validation_illegal_ids_count_as_no_selection(inproc, engine):
    inproc(4, illegal_ids_without_validation, engine)


# -- C17 ---------------------------------------------------------------------------------------------------------


def capacities_differ(group):
    rank = group.rank if hasattr(group, "crew") else torch.distributed.get_rank(group)
    with pytest.raises(ew.GroupMismatch, match=r"256 on rank\(s\) \[0\]; 64 on rank\(s\) \[1, 2, 3\]") as caught:
        make(group, 8, 2, 256 if rank == 0 else 64)
    assert "num_max_tokens_per_rank" in str(caught.value)
    with make(group, 8, 2, 64) as buf:
        check_round_trip(buf, payload(rank, 64, 128), round_robin(rank, 64, 2, 8))


def test_c17a_capacities_differ_at_creation(anywhere):
    anywhere(4, capacities_differ)


def too_many_tokens(group):
    with make(group, 8, 2, 128) as buf:
        num_tokens = 129 if buf.rank == 2 else 128
        x, ids = payload(buf.rank, num_tokens, 128), round_robin(buf.rank, num_tokens, 2, 8)
        expected = ew.InvalidArgument if buf.rank == 2 else ew.PeerRefused
        with pytest.raises(expected, match=r"rank 2: x has 129 tokens, .*num_max_tokens_per_rank=128"):
            buf.dispatch(x, ids)
        assert buf.statistics().rows_received == (0, 0, 0, 0)
        if buf.rank == 2:
            assert buf.statistics().rows_sent == (0, 0, 0, 0)
        check_round_trip(buf, x[:128], ids[:128])


def test_c17b_one_rank_exceeds_the_capacity(anywhere):
    anywhere(4, too_many_tokens)


DIFFERENCES = {
    "num_experts": 16,
    "num_topk": 3,
    "hidden": 256,
    "max_in_flight": 3,
    "on_timeout": "mask",
    "placement": ew.Placement((0, 1, 2, 3, 0, 1, 2, 3)),
}


def settings_differ(group):
    rank = group.rank if hasattr(group, "crew") else torch.distributed.get_rank(group)
    shape = {"num_experts": 8, "num_topk": 2, "hidden": 128, "num_max_tokens_per_rank": 8}
    for name, value in DIFFERENCES.items():
        with pytest.raises(ew.GroupMismatch) as caught:
            ew.Buffer(group, **{**shape, **({name: value} if rank == 1 else {})})
        assert "on rank(s) [1]" in str(caught.value)
        assert "on rank(s) [0, 2, 3]" in str(caught.value)
        if name != "num_experts":  # which changes the default placement as well
            assert name in str(caught.value)
    expected = ew.InvalidArgument if rank == 1 else ew.PeerRefused
    with pytest.raises(expected, match=r"rank 1.*hidden must be"):
        ew.Buffer(group, **{**shape, "hidden": 129 if rank == 1 else 128})
    with ew.Buffer(group, **shape) as buf:
        check_round_trip(buf, payload(rank, 8, 128), round_robin(rank, 8, 2, 8))


def test_c17c_settings_differ_at_creation(anywhere):
    anywhere(4, settings_differ)


def wires_differ(group):
    """The dtype on the link is chosen per call; a difference is found before a row is read."""
    with make(group, 8, 2, 8) as buf:
        x, ids = payload(buf.rank, 8, 128), round_robin(buf.rank, 8, 2, 8)
        for _ in range(3):
            with pytest.raises(ew.GroupMismatch, match=r"ranks call dispatch differently.*fp8") as caught:
                buf.dispatch(x, ids, wire=ew.FP8Block() if buf.rank == 1 else None)
            assert f"rank {buf.rank}: " in str(caught.value)
        with pytest.raises(ew.GroupMismatch, match="weights"):
            buf.dispatch(x, ids, torch.ones(8, 2) if buf.rank == 3 else None)
        sent = buf.dispatch(x, ids, layout=EXPERT_MAJOR)
        with pytest.raises(ew.GroupMismatch, match="ranks call combine differently"):
            buf.combine(sent.x, sent.handle, reduce="rank" if buf.rank == 0 else "token")
        with pytest.raises(ew.GroupMismatch, match=r"(?i)ranks call combine differently.*logfmt"):
            buf.combine(sent.x, sent.handle, wire=ew.LogFMT10() if buf.rank == 2 else None)
        assert torch.equal(buf.combine(sent.x, sent.handle).x, 2 * x)
        check_round_trip(buf, x, ids)


def test_c17c_wire_formats_differ_in_one_call(anywhere):
    anywhere(4, wires_differ)


# -- C18 ---------------------------------------------------------------------------------------------------------


def full_buffer(group, capacity, max_in_flight):
    with make(group, 64, 8, capacity, max_in_flight=max_in_flight) as buf:
        ids = 8 * torch.arange(8)[None] + torch.arange(capacity)[:, None] % 8
        x = payload(buf.rank, capacity, 128)
        used = min(capacity, 8)
        for layout in ew.Layout:
            for counts in ("host", "device"):
                sent = buf.dispatch(x, ids, layout=layout, counts=counts)
                expected = torch.tensor([capacity] * used + [0] * (8 - used)) if capacity < 8 else None
                per_expert = sent.num_tokens_per_expert
                assert torch.equal(per_expert, expected * 8 if expected is not None else torch.full((8,), capacity))
                if layout is COMPACT:
                    assert len(sent.x) == 8 * capacity
                back = buf.combine(sent.x, sent.handle)
                assert torch.equal(back.x, 8 * x)
        assert buf._engine.runtime.broken_guards() == []


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("capacity", [1, 32, 64])
def test_c18_tiny_capacity_and_full_buffer(inproc, capacity, max_in_flight):
    inproc(8, full_buffer, capacity, max_in_flight)


def overwrite_a_guard(group):
    buf = make(group, 8, 2, 4)
    guards = list(buf._engine.runtime.layout.guards())
    if buf.rank == 1:
        buf._engine.runtime.own[guards[3] + 7] ^= 1
        with pytest.raises(ew.ExpertWireError, match=rf"rank 1: window guards at byte offsets \[{guards[3]}\]"):
            buf.close()
    buf.close()


def test_c18_a_broken_guard_is_reported(inproc):
    inproc(2, overwrite_a_guard)


# -- C21 ---------------------------------------------------------------------------------------------------------


def wrong_routing(group):
    first = ([0, 1, 2, 3], [2, 0, 3, 1])
    with make(group, 4, 2, 4) as buf, make(group, 4, 2, 4) as other:
        ids = torch.full((4, 2), -1)
        ids[:, 0] = torch.tensor(first[buf.rank])
        x = payload(buf.rank, 4, 128)
        sent = buf.dispatch(x, ids)
        assert sent.x.shape == (4, 128)
        assert sent.topk_idx.shape == ids.shape
        assert torch.equal(buf.combine(sent.x, sent.handle).x, x)
        with pytest.raises(TypeError):  # (ii) there is no way to pass ids
            buf.combine(sent.x, sent.handle, topk_idx=sent.topk_idx)
        with pytest.raises(ew.HandleError, match=f"rank {buf.rank}: handle must be .*got Tensor"):
            buf.combine(sent.x, sent.topk_idx)

        foreign = other.dispatch(x, ids)
        with pytest.raises(ew.HandleError, match=f"rank {buf.rank}: .*belongs to another buffer"):
            buf.combine(sent.x, foreign.handle)
        assert torch.equal(buf.combine(sent.x, sent.handle).x, x)

        # The handle of another dispatch on one rank alone: the shapes fit, the sums would be wrong.
        swapped = buf.dispatch(x, ids.flip(0).contiguous())
        with pytest.raises(ew.GroupMismatch, match="ranks call combine differently"):
            buf.combine(sent.x, swapped.handle if buf.rank == 0 else sent.handle)
        with pytest.raises(ew.GroupMismatch, match="ranks call dispatch differently"):
            buf.dispatch(x, handle=swapped.handle if buf.rank == 0 else sent.handle)
        assert torch.equal(buf.combine(swapped.x, swapped.handle).x, x)
        assert torch.equal(buf.combine(sent.x, sent.handle).x, x)


def test_c21_combine_cannot_be_given_the_wrong_routing(anywhere):
    anywhere(2, wrong_routing)
