"""Cases C02, C03, C07, C08, C12 to C15: what arrives where, with exact numbers."""

import pytest
import torch

import expertwire as ew
from expertwire.layouts.window import WindowLayout
from expertwire.testing import payload

COMPACT, EXPERT_MAJOR, EXPERT_SLOTS = ew.Layout.COMPACT, ew.Layout.EXPERT_MAJOR, ew.Layout.EXPERT_SLOTS


def make(group, num_experts, num_topk, capacity, hidden=128, **options):
    options = {"timeout_s": 60.0, "debug_poison": True, **options}
    return ew.Buffer(
        group, num_experts=num_experts, hidden=hidden, num_topk=num_topk, num_max_tokens_per_rank=capacity, **options
    )


def tokens(num_tokens):
    return torch.arange(num_tokens)[:, None]


# -- C02 ---------------------------------------------------------------------------------------------------------


def all_tokens_to_one_rank(group, num_experts, num_tokens):
    with make(group, num_experts, 8, num_tokens) as buf:
        x = payload(buf.rank, num_tokens, 128).requires_grad_()
        ids = torch.arange(8).expand(num_tokens, 8).contiguous()
        sent = buf.dispatch(x, ids)
        back = buf.combine(sent.x, sent.handle)
        assert torch.equal(back.x, x)
        back.x.float().sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))

        major = buf.dispatch(x.detach(), ids, torch.full(ids.shape, 0.125), layout=EXPERT_MAJOR)
        assert torch.equal(buf.combine(major.x, major.handle).x, x)

        # The experts' parameters: one scale per local expert.
        experts = torch.ones(8, 1, requires_grad=True)
        fine = buf.dispatch(x, ids, layout=EXPERT_MAJOR)
        scale = experts.repeat_interleave(fine.num_tokens_per_expert, dim=0).bfloat16()
        buf.combine(fine.x * scale, fine.handle).x.float().sum().backward()
        return sent.num_tokens_per_expert_list, len(sent.x), len(major.x), experts.grad


def test_c02_all_tokens_to_one_rank_with_backward(inproc):
    answers = inproc(8, all_tokens_to_one_rank, 64, 512)
    counts, rows, expanded, grad = answers[0]
    assert (counts, rows, expanded) == ([4096] * 8, 4096, 32768)
    assert grad.isfinite().all()
    for counts, rows, expanded, grad in answers[1:]:
        assert (counts, rows, expanded) == ([0] * 8, 0, 0)
        assert torch.equal(grad, torch.zeros(8, 1))


def test_c02_on_processes(processes):
    answers = processes.run(all_tokens_to_one_rank, 32, 64)
    assert [(sum(counts), rows) for counts, rows, _, _ in answers] == [(2048, 256), (0, 0), (0, 0), (0, 0)]


# -- C03 ---------------------------------------------------------------------------------------------------------


def world_of_one(group):
    ids = torch.tensor([[0, 3], [1, 4], [2, 5], [3, 6], [4, -1]])
    weights = torch.full((5, 2), 0.5)
    with make(group, 8, 2, 5) as buf:
        x = payload(0, 5, 128)
        compact = buf.dispatch(x, ids, weights)
        assert compact.x.shape == (5, 128)
        assert torch.equal(buf.combine(compact.x, compact.handle).x, x)
        sent = buf.dispatch(x, ids, weights, layout=EXPERT_MAJOR)
        assert sent.num_tokens_per_expert_list == [1, 1, 1, 2, 2, 1, 1, 0]
        back = buf.combine(sent.x, sent.handle)
        assert back.x.shape == (5, 128)
        assert torch.equal(back.x[:4], x[:4])
        assert torch.equal(back.x[4], 0.5 * x[4])


def test_c03_world_of_one(anywhere):
    anywhere(1, world_of_one)


# -- C07 ---------------------------------------------------------------------------------------------------------


def repeated_expert(group):
    ids = torch.tensor([[1, 1, 3], [2, 2, 2]])
    weights = torch.tensor([[0.5, 0.25, 0.25]]).expand(2, 3).contiguous()
    with make(group, 4, 3, 2) as buf:
        x = payload(buf.rank, 2, 128)
        compact = buf.dispatch(x, ids, weights)
        sums = buf.combine(compact.x, compact.handle).x
        assert torch.equal(sums, torch.tensor([[2.0], [1.0]]).bfloat16() * x)
        recount = torch.bincount(compact.topk_idx[compact.topk_idx >= 0], minlength=2)
        assert torch.equal(recount.int(), compact.num_tokens_per_expert)
        major = buf.dispatch(x, ids, weights, layout=EXPERT_MAJOR)
        assert torch.equal(buf.combine(major.x, major.handle).x, x)
        assert major.num_tokens_per_expert_list == compact.num_tokens_per_expert_list
        by_rank = buf.dispatch(x, ids, weights, layout=EXPERT_MAJOR)
        assert torch.equal(buf.combine(by_rank.x, by_rank.handle, reduce="rank").x, x)
        with pytest.raises(ew.InvalidArgument, match=rf"rank {buf.rank}: topk_idx\[0, 1\] = 1 repeats"):
            buf.dispatch(x, ids, weights, layout=EXPERT_SLOTS)
        return len(compact.x), compact.num_tokens_per_expert_list, len(major.x)


def test_c07_repeated_expert_in_one_token(anywhere):
    assert anywhere(2, repeated_expert) == [(2, [0, 4], 4), (4, [6, 2], 8)]


def repeated_expert_without_validation(group):
    """EXPERT_SLOTS has room for distinct experts: the later slot counts as -1, and it shows."""
    with make(group, 4, 3, 2, validate=False) as buf:
        x = payload(buf.rank, 2, 128)
        ids = torch.tensor([[1, 1, 3], [2, 2, 2]])
        sent = buf.dispatch(x, ids, torch.tensor([[0.5, 0.25, 0.25]]).expand(2, 3).contiguous(), layout=EXPERT_SLOTS)
        back = buf.combine(sent.x, sent.handle)
        assert torch.equal(back.x, torch.tensor([[0.75], [0.5]]).bfloat16() * x)
        assert buf.statistics().dropped_selections == 3
        return sent.num_tokens_per_expert_list


def test_c07_repeats_in_expert_slots_are_counted_when_dropped(inproc):
    assert inproc(2, repeated_expert_without_validation) == [[0, 2], [2, 2]]


# -- C08 ---------------------------------------------------------------------------------------------------------


def several_experts_on_one_rank(group):
    with make(group, 32, 4, 16) as buf:
        home = (buf.rank + tokens(16)) % 4
        ids = torch.cat([8 * home, 8 * home + 1, 8 * home + 2, 8 * ((home + 1) % 4)], dim=1)
        x = payload(buf.rank, 16, 128)
        sent = buf.dispatch(x, ids)
        assert len(sent.x) == 32
        assert sent.num_tokens_per_expert_list == [32, 16, 16, 0, 0, 0, 0, 0]
        local = sent.topk_idx[sent.topk_idx >= 0]
        assert torch.equal(torch.bincount(local, minlength=8).int(), sent.num_tokens_per_expert)
        assert (sent.topk_idx >= -1).all()
        assert ((sent.topk_idx >= 0).sum(dim=1) > 0).all()
        assert torch.equal(buf.combine(sent.x, sent.handle).x, 2 * x)


def test_c08_several_experts_on_one_rank(anywhere):
    anywhere(4, several_experts_on_one_rank)


# -- C12 ---------------------------------------------------------------------------------------------------------


def wide_expert_ids(group):
    with make(group, 896, 16, 1) as buf:
        talks = buf.rank % 8 == 0
        ids = 56 * torch.arange(16)[None] + buf.rank if talks else torch.full((1, 16), -1)
        x = payload(buf.rank, 1, 128)
        sent = buf.dispatch(x, ids)
        assert torch.equal(buf.combine(sent.x, sent.handle).x, (16 if talks else 0) * x)
        used = sent.num_tokens_per_expert.nonzero().flatten() + 28 * buf.rank
        return len(sent.x), int(sent.num_tokens_per_expert.sum()), used.tolist()


def test_c12a_wide_expert_ids(inproc):
    answers = inproc(32, wide_expert_ids)
    assert [rows for rows, _, _ in answers] == [4, 0] * 16
    assert sum(routes for _, routes, _ in answers) == 64
    assert sum(expert >= 512 for _, _, used in answers for expert in used) == 27


def many_ranks(group):
    with make(group, 512, 16, 1, hidden=16, max_in_flight=1, debug_poison=False) as buf:
        x = payload(buf.rank, 1, 16)
        sent = buf.dispatch(x, (2 * buf.rank + 32 * torch.arange(16)[None]) % 512)
        assert len(sent.x) == 16
        sources = sorted((buf.rank - 16 * j) % 256 for j in range(16))
        assert [rank for rank, n in enumerate(sent.num_tokens_per_rank_list) for _ in range(n)] == sources
        prefix = sent.num_tokens_per_rank.cumsum(0)
        assert (len(prefix), prefix[-1]) == (256, 16)
        assert sent.num_tokens_per_expert_list == [16, 0]
        assert torch.equal(buf.combine(sent.x, sent.handle).x, 16 * x)


@pytest.mark.slow
def test_c12b_many_ranks(inproc):
    inproc(256, many_ranks)


def test_c12c_offsets_past_32_bits():
    layout = WindowLayout(num_ranks=8, capacity=65536, hidden=7168, num_topk=8, num_banks=2)
    rows, row_bytes = 8 * 65536, 2 * 7168
    assert (rows - 1) * row_bytes == 7516178432
    last = layout.dispatch_rows(1, 7)
    assert last > 7516178432
    assert layout.dispatch_header(1, 7) - layout.dispatch_header(0, 7) == 8 * (layout.dispatch_region_bytes + 64)
    assert layout.dispatch_region_bytes >= 65536 * row_bytes
    size = ew.Buffer.size_hint(num_ranks=8, hidden=7168, num_topk=8, num_max_tokens_per_rank=65536)
    assert size == layout.total_bytes + layout.output_bytes
    assert size > 2 * rows * row_bytes + 2 * 65536 * 8 * row_bytes
    assert isinstance(size, int)


# -- C13 ---------------------------------------------------------------------------------------------------------


def topk_sweep(group, num_topk):
    with make(group, 64, num_topk, 64, hidden=16) as buf:
        ids = (tokens(64) + torch.arange(num_topk)) % 64
        x = payload(buf.rank, 64, 16)
        sent = buf.dispatch(x, ids, torch.full(ids.shape, 0.25), layout=EXPERT_MAJOR)
        assert sent.num_tokens_per_expert_list == [4 * num_topk] * 16
        assert torch.equal(buf.combine(sent.x, sent.handle).x, (num_topk / 4 * x.float()).bfloat16())


@pytest.mark.parametrize("num_topk", [1, 2, 6, 8, 9, 10, 14, 16, 22, 32, 33, 64])
def test_c13_topk_sweep(inproc, num_topk):
    inproc(4, topk_sweep, num_topk)


def topk_too_large(group):
    with pytest.raises(ew.InvalidArgument, match=r"num_topk must be in \[1, 64\], got 65"):
        make(group, 64, 65, 64)


def test_c13_unsupported_topk_is_refused_at_creation(inproc):
    inproc(4, topk_too_large)


# -- C14 ---------------------------------------------------------------------------------------------------------

HIDDENS = [8, 24, 128, 768, 1536, 2048, 2560, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192]


def hidden_sweep(group, hidden):
    ids = torch.tensor([[0, 4], [1, 5], [2, 6], [3, 7], [4, 0], [5, -1], [-1, -1]])
    factor = torch.tensor([2, 2, 2, 2, 2, 1, 0])[:, None]
    with make(group, 8, 2, 7, hidden=hidden) as buf:
        x = payload(buf.rank, 7, hidden)
        for layout in ew.Layout:
            sent = buf.dispatch(x, ids, layout=layout)
            assert torch.equal(buf.combine(sent.x, sent.handle).x, factor * x)
        for scale, sf_columns in (("float32", -(-hidden // 128)), ("ue8m0", -(-hidden // 512))):
            wire = ew.FP8Block(scale=scale)
            sent = buf.dispatch(x, ids, wire=wire)
            assert sent.x.dtype == torch.float8_e4m3fn
            assert sent.sf.shape == (len(sent.x), sf_columns)
            if scale == "ue8m0":
                octets = sent.sf.contiguous().view(torch.uint8).view(len(sent.x), 4 * sf_columns)
                assert (octets[:, -(-hidden // 128) :] == 0).all()
            rows = wire.decode_bfloat16(sent.x, sent.sf, hidden)
            back = buf.combine(rows, sent.handle).x
            assert torch.equal(back, (factor * wire.decode_bfloat16(*wire.encode(x), hidden).float()).bfloat16())


@pytest.mark.parametrize("hidden", HIDDENS)
def test_c14_hidden_sweep(inproc, hidden):
    inproc(2, hidden_sweep, hidden)


def hidden_refused(group):
    with pytest.raises(ew.InvalidArgument, match=r"multiple of 8.*got 2887, the nearest legal is 2880 and 2888"):
        make(group, 8, 2, 7, hidden=2887)


def test_c14_odd_hidden_is_refused_with_the_nearest_legal_value(anywhere):
    anywhere(2, hidden_refused)


# -- C15 ---------------------------------------------------------------------------------------------------------


def ragged(group, num_tokens):
    with make(group, 16, 2, 67) as buf:
        mine = num_tokens[buf.rank]
        start = buf.rank + tokens(mine)
        ids = torch.cat([start % 16, (start + 5) % 16], dim=1)
        x = payload(buf.rank, mine, 128)
        sent = buf.dispatch(x, ids)
        back = buf.combine(sent.x, sent.handle)
        assert back.x.shape == (mine, 128)
        num_ranks_of_token = 1 + (ids[:, :1] * buf.num_ranks // 16 != ids[:, 1:] * buf.num_ranks // 16).int()
        assert torch.equal(back.x, num_ranks_of_token * x)
        if buf.num_ranks == 4:
            assert (num_ranks_of_token == 2).all()
        return len(sent.x), sent.num_tokens_per_rank_list, sent.num_tokens_per_expert_list


def test_c15_ragged_token_counts(anywhere):
    answers = anywhere(4, ragged, (5, 6, 0, 67))
    assert [rows for rows, _, _ in answers] == [40, 43, 41, 32]
    sources = [list(column) for column in zip(*(per_rank for _, per_rank, _ in answers), strict=True)]
    assert sources == [[4, 4, 2, 0], [3, 5, 4, 0], [0, 0, 0, 0], [33, 34, 35, 32]]
    experts = [n for _, _, counts in answers for n in counts]
    assert experts == [9, 10, 10, 11, 11, 11, 11, 10, 11, 11, 10, 9, 8, 8, 8, 8]
    assert sum(experts) == 156


@pytest.mark.parametrize("num_tokens", [(5, 5), (6, 6), (1, 0), (0, 0), (67, 1)])
def test_c15_odd_counts(inproc, num_tokens):
    inproc(2, ragged, num_tokens)
