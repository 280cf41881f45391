"""Routing, moving, placing and reducing rows: hand examples and a second definition, on both engines."""

import numpy as np
import pytest
import torch
from host_calls import ENGINES, HIDDENS, addresses, assert_same, mixed, normal, reduce_rows, routed, write_routing

from expertwire.host import kernels


@pytest.fixture(params=ENGINES)
def engine(request):
    return kernels.load(request.param)


def ids(rows):
    return np.array(rows, np.int64)


def route(engine, topk_idx, expert_rank=(0, 0, 1, 1), expert_local=(0, 1, 0, 1), num_ranks=2, distinct=False):
    as_int32 = [np.array(table, np.int32) for table in (expert_rank, expert_local)]
    parts = routed(engine, ids(topk_idx), *as_int32, num_ranks, distinct)
    return [part.tolist() if isinstance(part, np.ndarray) else part for part in (*parts[0], *parts[1:3], *parts[4:])]


def test_route_docstring_example(engine):
    slot_rank, slot_local, is_last, offsets, tokens, repeats, illegal = route(engine, [[0, 2], [1, 0], [-1, 3]])
    assert slot_rank == [[0, 1], [0, 0], [-1, 1]]
    assert slot_local == [[0, 0], [1, 0], [-1, 1]]
    assert is_last == [[1, 1], [0, 1], [0, 1]]
    assert (offsets, tokens, repeats, illegal) == ([0, 2, 4], [0, 1, 0, 2], 0, 0)


def test_route_with_repeats_and_a_rank_without_experts(engine):
    topk_idx = [[2, 2, 0], [0, -1, 0], [-1, -1, -1]]
    slot_rank, slot_local, is_last, offsets, tokens, repeats, illegal = route(engine, topk_idx, (0, 0, 2), (0, 1, 0), 3)
    assert slot_rank == [[2, 2, 0], [0, -1, 0], [-1, -1, -1]]
    assert is_last == [[0, 1, 1], [0, 0, 1], [0] * 3]
    assert (offsets, tokens, repeats, illegal) == ([0, 2, 2, 3], [0, 1, 0], 0, 0)
    slot_rank, slot_local, is_last, offsets, tokens, repeats, illegal = route(
        engine, topk_idx, (0, 0, 2), (0, 1, 0), 3, True
    )
    assert slot_rank == [[2, -1, 0], [0, -1, -1], [-1, -1, -1]]
    assert slot_local == [[0, -1, 0], [0, -1, -1], [-1, -1, -1]]
    assert is_last == [[1, 0, 1], [1, 0, 0], [0] * 3]
    assert (offsets, tokens, repeats, illegal) == ([0, 2, 2, 3], [0, 1, 0], 2, 0)


def test_route_of_no_tokens(engine):
    slots, offsets, tokens, shares, repeats, illegal = routed(
        engine, np.empty((0, 4), np.int64), np.zeros(3, np.int32), np.arange(3, dtype=np.int32), 2, True
    )
    assert (slots.shape, shares.shape) == ((3, 0, 4), (0, 4))
    assert (offsets.tolist(), tokens.tolist(), repeats, illegal) == ([0, 0, 0], [], 0, 0)


def test_a_route_counts_ids_that_are_none(engine):
    slot_rank, _, _, offsets, tokens, repeats, illegal = route(engine, [[0, 4], [-2, -1], [9, 9]], distinct=True)
    assert slot_rank == [[0, -1], [-1, -1], [-1, -1]]
    assert (offsets, tokens, repeats, illegal) == ([0, 1, 1], [0], 0, 4)


def test_types_of_a_route(engine):
    parts = routed(engine, ids([[0, 1]]), np.zeros(2, np.int32), np.arange(2, dtype=np.int32), 1, False)
    assert [p.dtype for p in parts[:4]] == [np.int32, np.int64, np.int32, np.float32]


def test_a_route_copies_the_weights(engine):
    """The caller may overwrite them; without any, all are ones."""
    weights = np.array([[0.5, 2.0]], np.float32)
    tables = np.zeros(2, np.int32), np.arange(2, dtype=np.int32)
    shares = routed(engine, ids([[0, 1]]), *tables, 1, False, weights)[3]
    weights[:] = 7
    assert shares.tolist() == [[0.5, 2.0]]
    assert routed(engine, ids([[0, 1]]), *tables, 1, False)[3].tolist() == [[1.0, 1.0]]


def test_first_illegal_and_first_repeat(engine):
    assert engine.first_illegal(ids([[0, 3], [-1, 2]]), 4) == (-1, -1)
    assert engine.first_illegal(ids([[0, 3], [-1, 4], [-2, 0]]), 4) == (1, 1)
    assert engine.first_illegal(ids([[0, 3], [-2, 0]]), 4) == (1, 0)
    assert engine.first_illegal(np.empty((0, 2), np.int64), 4) == (-1, -1)
    assert engine.first_repeat(ids([[0, 1, -1, -1], [1, 0, 2, -1]])) == (-1, -1)
    assert engine.first_repeat(ids([[0, 1, -1], [2, -1, 2], [1, 1, 1]])) == (1, 2)
    assert engine.first_repeat(np.empty((0, 2), np.int64)) == (-1, -1)


def test_gather_rows_docstring_example(engine):
    """Rows 3 and 5 to a record each; what is between the records stays."""
    rows = torch.arange(6 * 96, dtype=torch.int32).to(torch.uint8).view(6, 96)
    for stream in (False, True):
        out = torch.full((2, 128), 7, dtype=torch.uint8)
        engine.gather_rows(rows.data_ptr(), np.array([3, 5], np.int32), out.data_ptr(), 128, 96, stream)
        assert torch.equal(out[:, :96], rows[[3, 5]])
        assert (out[:, 96:] == 7).all()


def test_overlay_rows_docstring_example(engine):
    table = np.array([[1, 2], [3, 4]])
    engine.overlay_rows(table, np.array([0, 1], np.int32), np.array([[8, 8], [0, 9]]), 1, 2)
    assert table.tolist() == [[1, 2], [3, 9]]


def test_arrange_docstring_example(engine):
    topk_idx = np.array([[0, 1], [1, -1], [0, 0]], np.int32)
    for compact, expected in ((False, [[0, 4], [5, -1], [1, 2]]), (True, [[-1, 0], [1, -1], [-1, 2]])):
        rows, groups = engine.arrange(topk_idx, 2, 4, 0, compact)
        assert (rows.tolist(), rows.dtype) == (expected, np.int64)
        assert (groups.tolist(), groups.dtype) == ([[3, 2, 0], [4, 4, 0], [0, 4, 8]], np.int64)


def test_arrange_with_room_for_every_expert(engine):
    rows, groups = engine.arrange(np.array([[2, 0], [2, -1]], np.int32), 3, 1, 10, False)
    assert rows.tolist() == [[20, 0], [21, -1]]
    assert groups.tolist() == [[1, 0, 2, 0], [10, 10, 10, 0], [0, 10, 20, 30]]


@pytest.mark.parametrize("compact", [False, True])
def test_arrange_no_rows(engine, compact):
    rows, groups = engine.arrange(np.empty((0, 8), np.int32), 2, 4, 0, compact)
    assert rows.shape == (0, 8)
    assert groups.tolist() == [[0, 0, 0]] * 3
    assert engine.arrange(np.full((2, 2), -1, np.int32), 1, 4, 0, compact)[0].tolist() == [[-1, -1], [-1, -1]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_bytes", [1, 4, 63, 64, 200, 14336])
@pytest.mark.parametrize("offset", [0, 5])
def test_move_rows_touches_its_bytes_only(engine, num_bytes, offset, stream):
    source = torch.randint(0, 255, (5, num_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    room = torch.full((7, num_bytes + 128), 255, dtype=torch.uint8)
    places = (addresses(room) + 63 & ~63) + offset
    engine.move_rows(addresses(source)[[4, 0, 2]], places[[1, 3, 6]], num_bytes, stream)
    expected = torch.full_like(room, 255)
    for row, place in ((4, 1), (0, 3), (2, 6)):
        at = int(places[place] - addresses(room)[place])
        expected[place, at : at + num_bytes] = source[row]
    assert torch.equal(room, expected)
    engine.move_rows(np.empty(0, np.int64), np.empty(0, np.int64), num_bytes, stream)


def test_routing_docstring_example(engine):
    slots = np.full((3, 6, 2), -1, np.int32)
    slots[:2, 5] = [1, 0], [3, 4]
    weights = np.full((6, 2), [0.5, 2.0], np.float32)
    words = write_routing(engine, 1, np.array([5], np.int32), 1, slots, weights)[0]
    assert words[[0, 1, 4]].tolist() == [3, -1, 5]
    assert words[2:4].view(torch.float32).tolist() == [0.5, 0.0]


def test_routing_of_two_ranks(engine):
    """Two rows of rank 0 and one of rank 1, whose routing begins 100 bytes further."""
    ranks, experts = [[1, 0, 1], [0, 0, 0], [-1, 1, 0]], [[5, 6, 7], [1, 2, 3], [-1, 4, 0]]
    slots = np.array([ranks, experts, np.zeros((3, 3))], np.int32)
    weights = np.array([[0.5, 0.25, 2.0], [1.0, 1.0, 1.0], [3.0, 4.0, 5.0]], np.float32)
    memory = torch.full((50,), 7, dtype=torch.int32)
    for first, tokens in ((0, [2, 0]), (25, [0])):
        at = memory[first:].data_ptr()
        engine.write_routing(at, np.array(tokens, np.int32), 1, slots, weights)
    assert (memory[14:25] == 7).all()
    assert (memory[32:] == 7).all()
    topk_idx, shares, tokens = engine.read_routing(memory.data_ptr(), 100, ids([0, 2, 3]), 3)
    assert (topk_idx.tolist(), topk_idx.dtype) == ([[-1, 4, -1], [5, -1, 7], [5, -1, 7]], np.int32)
    assert (shares.tolist(), shares.dtype) == ([[0.0, 4.0, 0.0], [0.5, 0.0, 2.0], [0.5, 0.0, 2.0]], np.float32)
    assert (tokens.tolist(), tokens.dtype) == ([2, 0, 0], np.int32)
    nothing = engine.read_routing(memory.data_ptr(), 100, ids([0, 0, 0]), 3)
    assert [part.shape for part in nothing] == [(0, 3), (0, 3), (0,)]


@pytest.mark.parametrize("stream", [False, True])
def test_place_rows_docstring_example(engine, stream):
    """Two arrivals from rank 0, `stride` apart; one from the own rank 1, row 7 of its input; rank 2 is missing."""
    window = torch.full((300,), 99, dtype=torch.uint8)
    window[5:70], window[105:170] = 10, 11
    own = torch.full((8, 65), 99, dtype=torch.uint8)
    own[7] = 12
    out = torch.full((5, 65), 7, dtype=torch.uint8)
    first = ids([window.data_ptr() + 5, own.data_ptr(), 0])
    tokens, rows = np.array([0, 1, 7, 2], np.int32), ids([[0, 2], [1, -1], [-1, 3], [4, -1]])
    engine.place_rows(first, 100, ids([0, 2, 3, 4]), 1, tokens, rows, out.data_ptr(), 65, stream)
    assert torch.equal(out, torch.tensor([10, 11, 10, 12, 7], dtype=torch.uint8).view(5, 1).expand(5, 65))
    engine.place_rows(first, 100, ids([0, 0, 0, 0]), 1, tokens[:0], rows[:0], out.data_ptr(), 65, stream)
    deferred = ids([window.data_ptr() + 5, window.data_ptr() + 105, 0])  # no rank is the own one
    engine.place_rows(deferred, 100, ids([0, 1, 2, 2]), -1, tokens[:2], rows[:2], out.data_ptr(), 65, stream)
    assert out[:, 0].tolist() == [10, 11, 10, 12, 7]


@pytest.mark.parametrize("stream", [False, True])
def test_scatter_rows_docstring_example(engine, stream):
    """K = 2: row (token 3, slot 1) is record 7, row (token 0, slot 0) is record 0; a record is wider than its row."""
    rows = torch.tensor([[10] * 64, [11] * 64], dtype=torch.uint8)
    first, second = addresses(rows)
    records = torch.full((8, 72), 7, dtype=torch.uint8)
    tokens = np.array([3, 0], np.int32)
    engine.scatter_rows(ids([[0, first], [second, 0]]), tokens, records.data_ptr(), 72, 64, stream)
    expected = torch.full((8, 72), 7, dtype=torch.uint8)
    expected[7, :64], expected[0, :64] = 10, 11
    assert torch.equal(records, expected)
    engine.scatter_rows(ids([[]]).reshape(0, 2), tokens[:0], records.data_ptr(), 72, 64, stream)


def test_outgoing_rows(engine):
    """Two arrivals came from rank 0, none from rank 1, one from rank 2."""
    table, counts = engine.outgoing_rows(ids([[0, 2], [1, -1], [-1, 3]]), 1000, 16, ids([0, 2, 2, 3]))
    assert table.tolist() == [[1000, 1032], [1016, 0], [0, 1048]]
    assert (counts.tolist(), table.dtype, counts.dtype) == ([3, 0, 1], np.int64, np.int64)


@pytest.mark.parametrize(
    ("per_token", "table", "brought"),
    [(True, [[1000, 1010], [0, 1030]], [2, -1, 1]), (False, [[0, 1010], [0, 1030]], [1, -1, 1])],
)
def test_expected_rows(engine, per_token, table, brought):
    """Records of 10 bytes from 1000 on; rank 1 is masked. Token 0 names rank 0 twice, token 1 ranks 1 and 2."""
    slots = np.array([[[0, 0], [1, 2]], [[0, 1], [0, 0]], [[0, 1], [1, 1]]], np.int32)
    seen = engine.expected_rows(slots, per_token, ids(brought), 1000, 0, 10)
    assert (seen[0].tolist(), seen[1], seen[2]) == (table, 1, True)
    for wrong in ([3, -1, 1], [0, -1, 1], [brought[0], -1, 0]):
        assert engine.expected_rows(slots, per_token, ids(wrong), 1000, 0, 10)[2] is False
    slots = np.array([[[-1, -1]], [[-1, -1]], [[0, 0]]], np.int32)
    nothing = engine.expected_rows(slots, per_token, ids([0, -1, 0]), 1000, 0, 10)
    assert nothing[1:] == (0, True)


def by_definition(rows, weights, biases, present):
    """One row after the other, one float32 operation after the other."""
    total = torch.zeros(rows.shape[0], rows.shape[2])
    for bias in biases:
        total = total + bias.float()
    for k in range(rows.shape[1]):
        term = rows[:, k].float()
        if weights is not None:
            term = term * weights[:, k : k + 1]
        total = torch.where(present[:, k : k + 1], total + term, total)
    return total.bfloat16()


def test_reduce_docstring_example(engine):
    rows = torch.tensor([[[1.0], [3.0]]], dtype=torch.bfloat16)
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    assert reduce_rows(engine, rows, torch.tensor([[0.5, 2.0]]), [one]).tolist() == [[7.5]]


@pytest.mark.parametrize("hidden", HIDDENS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weighted", [False, True])
def test_reduce_by_definition(engine, hidden, dtype, weighted):
    count, topk = (70, 3) if hidden < 500 else (9, 15)
    generator = torch.Generator().manual_seed(hidden)
    rows = mixed(count * topk, hidden, hidden).to(dtype).view(count, topk, hidden)
    if dtype == torch.float32:
        rows = rows * torch.rand(rows.shape, generator=generator)
    weights = torch.rand(count, topk, generator=generator) * 2 - 1 if weighted else None
    present = torch.rand(count, topk, generator=generator) < 0.7
    present[0] = False
    biases = [normal(count, hidden, 1), normal(count, hidden, 2)][: hidden % 3]
    for stream in (False, True):
        seen = reduce_rows(engine, rows, weights, biases, present, stream)
        assert_same(seen, by_definition(rows, weights, biases, present))
        assert (seen[seen.isnan()].view(torch.int16) == 0x7FC0).all()


def test_products_and_sums_are_not_fused(engine):
    """1 + 2^-7 times 1 + 2^-23 rounds to 1 + 2^-7 + 2^-23; a fused product would keep 2^-30 more and that shows."""
    weight, value = 1 + 2.0**-23, 1 + 2.0**-7
    product = float(np.float32(weight) * np.float32(value))
    rows = torch.tensor([[[-product], [value]]], dtype=torch.float32)
    seen = reduce_rows(engine, rows, torch.tensor([[1.0, weight]], dtype=torch.float32))
    assert seen.item() == 0.0
    assert weight * value != product


def test_absent_rows_add_no_positive_zero(engine):
    """The sum starts from +0, so -0 alone gives +0; no row gives +0 as well."""
    rows = torch.full((2, 2, 8), -0.0, dtype=torch.bfloat16)
    seen = reduce_rows(engine, rows, None, [], torch.tensor([[True, False], [False, False]]))
    assert (seen.view(torch.int16) == 0).all()


def test_rounding_to_bfloat16(engine):
    """Ties go to even, and what rounds past the largest bfloat16 becomes Inf."""
    values = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 3.4e38, -3.4e38, 2.0**-133 * 1.5])
    rows = values.view(1, 1, 6).contiguous()
    seen = reduce_rows(engine, rows)
    assert_same(seen, values.bfloat16().view(1, 6))
    assert seen[0, 3:5].tolist() == [torch.inf, -torch.inf]
