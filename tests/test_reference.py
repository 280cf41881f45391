"""The oracle against cases worked out by hand."""

import pytest
import torch

from expertwire import reference
from expertwire.formats import FP8Block, LogFMT10
from expertwire.layouts.receive import Layout
from expertwire.reference import combine, combine_backward, dispatch, dispatch_backward, route
from expertwire.topology import Placement

nan = float("nan")


def bf16(values):
    return torch.tensor(values, dtype=torch.bfloat16)


def ids(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def no_ids(num_topk):
    return torch.empty(0, num_topk, dtype=torch.int32)


def two_ranks(layout, weights=True, **settings):
    """Experts (0, 1) on rank 0 and (2, 3) on rank 1; rank 0 has three tokens, rank 1 has two. Hidden is 1 or 2.

    token      selects    goes to
    (0, 0)     0, 2       both ranks
    (0, 1)     1, 0       rank 0 twice
    (0, 2)     -, 3       rank 1
    (1, 0)     3, 1       both ranks
    (1, 1)     -, -       nobody
    """
    topk_idx = [ids([0, 2], [1, 0], [-1, 3]), ids([3, 1], [-1, -1])]
    topk_weights = [torch.tensor([[0.5, 0.25], [2.0, 4.0], [9.0, 0.125]]), torch.tensor([[1.0, 8.0], [7.0, 7.0]])]
    placement = Placement.contiguous(4, 2)
    return route(topk_idx, topk_weights if weights else None, placement=placement, layout=layout, **settings)


X = [bf16([[1.0], [2.0], [3.0]]), bf16([[10.0], [20.0]])]


def test_compact_dispatch():
    r0, r1 = dispatch(X, two_ranks(Layout.COMPACT, expert_alignment=4))

    assert r0.x.dtype == torch.bfloat16
    assert r0.x.tolist() == [[1.0], [2.0], [10.0]]
    assert r1.x.tolist() == [[1.0], [3.0], [10.0]]
    assert r0.topk_idx.tolist() == [[0, -1], [1, 0], [-1, 1]]
    assert r1.topk_idx.tolist() == [[-1, 0], [-1, 1], [1, -1]]
    assert r0.topk_weights.tolist() == [[0.5, 0.0], [2.0, 4.0], [0.0, 8.0]]
    assert r1.topk_weights.tolist() == [[0.0, 0.25], [0.0, 0.125], [1.0, 0.0]]
    assert [r.num_tokens_per_expert.tolist() for r in (r0, r1)] == [[2, 2], [1, 2]]
    assert [r.num_padded_tokens_per_expert.tolist() for r in (r0, r1)] == [[4, 4], [4, 4]]
    assert [r.num_tokens_per_rank.tolist() for r in (r0, r1)] == [[2, 1], [2, 1]]
    assert (r0.sf, r0.row_source, r0.expert_offsets) == (None, None, None)
    integers = (r0.topk_idx, r0.num_tokens_per_expert, r0.num_padded_tokens_per_expert, r0.num_tokens_per_rank)
    assert all(t.dtype == torch.int32 for t in integers)
    assert r0.topk_weights.dtype == torch.float32


def test_compact_dispatch_without_weights():
    assert [r.topk_weights for r in dispatch(X, two_ranks(Layout.COMPACT, weights=False))] == [None, None]


def test_expert_major_dispatch():
    r0, r1 = dispatch(X, two_ranks(Layout.EXPERT_MAJOR))
    assert r0.x.tolist() == [[1.0], [2.0], [2.0], [10.0]]
    assert r0.row_source.tolist() == [[0, 0, 0], [0, 1, 1], [0, 1, 0], [1, 0, 1]]
    assert r1.x.tolist() == [[1.0], [3.0], [10.0]]
    assert r1.row_source.tolist() == [[0, 0, 1], [0, 2, 1], [1, 0, 0]]
    assert [r.num_tokens_per_expert.tolist() for r in (r0, r1)] == [[2, 2], [1, 2]]
    assert [r.num_padded_tokens_per_expert.tolist() for r in (r0, r1)] == [[2, 2], [1, 2]]
    assert [r.expert_offsets.tolist() for r in (r0, r1)] == [[0, 2, 4], [0, 1, 3]]
    assert [r.num_tokens_per_rank.tolist() for r in (r0, r1)] == [[2, 1], [2, 1]]
    assert (r0.topk_idx, r0.topk_weights) == (None, None)
    assert r0.row_source.dtype == r0.expert_offsets.dtype == torch.int32


def test_expert_major_pads_each_group_to_the_alignment():
    r0, r1 = dispatch(X, two_ranks(Layout.EXPERT_MAJOR, expert_alignment=3))
    none = [-1, -1, -1]
    assert r0.row_source.tolist() == [[0, 0, 0], [0, 1, 1], none, [0, 1, 0], [1, 0, 1], none]
    assert r1.row_source.tolist() == [[0, 0, 1], none, none, [0, 2, 1], [1, 0, 0], none]
    assert r1.x.tolist() == [[1.0], [0.0], [0.0], [3.0], [10.0], [0.0]]
    assert r1.num_tokens_per_expert.tolist() == [1, 2]
    assert r1.num_padded_tokens_per_expert.tolist() == [3, 3]
    assert r1.expert_offsets.tolist() == [0, 3, 6]


def test_expert_slots_dispatch():
    r0, r1 = dispatch(X, two_ranks(Layout.EXPERT_SLOTS, capacity=2))
    none = [-1, -1, -1]
    assert r0.x.shape == (2, 4, 1)
    assert r0.x[:, :2, 0].tolist() == [[1.0, 2.0], [2.0, 10.0]]
    assert r0.row_source.tolist() == [
        [[0, 0, 0], [0, 1, 1], none, none],
        [[0, 1, 0], [1, 0, 1], none, none],
    ]
    assert r1.row_source[0].tolist() == [[0, 0, 1], none, none, none]
    assert r1.num_tokens_per_expert.tolist() == [1, 2]
    assert r1.num_padded_tokens_per_expert.tolist() == [4, 4]
    assert r1.expert_offsets.tolist() == [0, 4, 8]


def test_wire_formats_and_opaque_rows():
    routing = route([ids([1]), ids([0])], placement=Placement((0, 1)))
    rows = [torch.zeros(1, 130, dtype=torch.bfloat16) for _ in range(2)]
    rows[0][0, :4] = bf16([448.0, -1.0, 0.3, 17.0])
    rows[1][0, 129] = 224.0

    r0, r1 = dispatch(rows, routing, FP8Block())
    assert r1.x.dtype == torch.float8_e4m3fn
    assert r1.x.float()[0, :4].tolist() == [448.0, -1.0, 0.3125, 16.0]
    assert r0.x.float()[0, 129] == 448.0
    assert r0.sf[0, 1] == 0.5
    assert r1.sf[0, 0] == 1.0

    r0, r1 = dispatch(rows, routing, FP8Block(scale="ue8m0"))
    assert r1.sf.dtype == torch.int32
    assert r1.sf[0, 0] & 0xFF == 127
    assert r0.sf[0, 0] >> 8 == 126

    decoded = dispatch(rows, routing, FP8Block(decode=True))
    assert [(r.x.dtype, r.sf) for r in decoded] == [(torch.bfloat16, None)] * 2
    assert decoded[1].x[0, :4].tolist() == [448.0, -1.0, 0.3125, 16.0]

    opaque = [(torch.tensor([[7, 8]], dtype=torch.uint8), torch.tensor([[r, -r]], dtype=torch.int32)) for r in (1, 2)]
    r0, r1 = dispatch(opaque, routing)
    assert r0.x.tolist() == r1.x.tolist() == [[7, 8]]
    assert (r0.sf.tolist(), r1.sf.tolist()) == ([[2, -2]], [[1, -1]])


def test_compact_combine_sums_unweighted():
    back = combine([bf16([[1.0], [2.0], [4.0]]), bf16([[8.0], [16.0], [32.0]])], two_ranks(Layout.COMPACT))
    assert [part.x.tolist() for part in back] == [[[9.0], [2.0], [16.0]], [[36.0], [0.0]]]
    assert back[0].x.dtype == torch.bfloat16
    assert back[0].topk_weights is None


def test_compact_combine_order_is_that_of_the_highest_slot():
    """In float32, 1e8 + 1 - 1e8 is 0, but 1e8 - 1e8 + 1 is 1. (1e8 in bfloat16 is exact enough: 99614720.)"""
    big = 99614720.0
    placement = Placement((0, 1, 2, 0))
    # Rank 0 serves slots 0 and 3, so it comes last although it also serves the first slot.
    routing = route([ids([0, 1, 2, 3]), no_ids(4), no_ids(4)], placement=placement)
    y = {0: bf16([[1.0]]), 1: bf16([[big]]), 2: bf16([[-big]])}
    assert combine([y[0], y[1], y[2]], routing)[0].x.tolist() == [[1.0]]
    # With slot 3 on nobody, rank 0 comes first and its 1 drowns.
    routing = route([ids([0, 1, 2, -1]), no_ids(4), no_ids(4)], placement=placement)
    assert combine([y[0], y[1], y[2]], routing)[0].x.tolist() == [[0.0]]


def test_compact_combine_returns_routed_weights():
    weights = [
        torch.tensor([[1.0, nan], [2.0, 3.0], [nan, 4.0]]),  # the cells that rank 0 does not serve are not looked at
        torch.tensor([[nan, 5.0], [nan, 6.0], [7.0, nan]]),
    ]
    y = [bf16([[0.0]] * 3)] * 2
    back = combine(y, two_ranks(Layout.COMPACT), topk_weights=weights)
    assert back[0].topk_weights.tolist() == [[1.0, 5.0], [2.0, 3.0], [0.0, 6.0]]
    assert back[1].topk_weights.tolist() == [[7.0, 4.0], [0.0, 0.0]]


Y_MAJOR = [bf16([[1.0], [2.0], [nan], [3.0], [4.0], [nan]]), bf16([[5.0], [nan], [nan], [6.0], [7.0], [nan]])]


@pytest.mark.parametrize("reduce", ["token", "rank"])
def test_expert_major_combine_weights_and_skips_padding(reduce):
    routing = two_ranks(Layout.EXPERT_MAJOR, expert_alignment=3)
    back = combine(Y_MAJOR, routing, reduce=reduce)
    # (0, 0): 0.5 * 1 + 0.25 * 5; (0, 1): 2 * 3 + 4 * 2; (0, 2): 0.125 * 6; (1, 0): 1 * 7 + 8 * 4
    assert [part.x.tolist() for part in back] == [[[1.75], [14.0], [0.75]], [[39.0], [0.0]]]


@pytest.mark.parametrize("reduce", ["token", "rank"])
def test_expert_major_combine_without_weights(reduce):
    routing = two_ranks(Layout.EXPERT_MAJOR, weights=False, expert_alignment=3)
    back = combine(Y_MAJOR, routing, reduce=reduce)
    assert [part.x.tolist() for part in back] == [[[6.0], [5.0], [6.0]], [[11.0], [0.0]]]


def test_expert_slots_combine():
    y = [torch.full((2, 4, 1), nan, dtype=torch.bfloat16) for _ in range(2)]
    y[0][:, :2, 0] = bf16([[1.0, 2.0], [3.0, 4.0]])
    y[1][0, 0, 0] = 5.0
    y[1][1, :2, 0] = bf16([6.0, 7.0])
    back = combine(y, two_ranks(Layout.EXPERT_SLOTS, capacity=2))
    assert [part.x.tolist() for part in back] == [[[1.75], [14.0], [0.75]], [[39.0], [0.0]]]


def test_biases_come_first():
    big = 99614720.0
    routing = route([ids([0, 1])], placement=Placement((0, 0)), layout=Layout.EXPERT_MAJOR)
    y = [bf16([[-big], [1.0]])]
    assert combine(y, routing, bias=[[bf16([[big]])]])[0].x.tolist() == [[1.0]]
    # 0 + 1 + big loses the 1, then - big + 1 gives 1; a bias added last would lose both ones.
    assert combine(y, routing, bias=[[bf16([[1.0]])], [bf16([[big]])]])[0].x.tolist() == [[1.0]]
    no_tokens_selected = route([ids([-1, -1])], placement=Placement((0, 0)), layout=Layout.EXPERT_MAJOR)
    assert combine([bf16([]).view(0, 1)], no_tokens_selected, bias=[[bf16([[5.0]])]])[0].x.tolist() == [[5.0]]


def test_sums_start_from_plus_zero():
    routing = route([ids([0])], placement=Placement((0,)))
    assert not combine([bf16([[-0.0]])], routing)[0].x.signbit().any()


def test_one_rounding_at_the_end():
    """1 + 2^-8 + 2^-8 is 1 + 2^-7, a bfloat16; rounding after each sum would leave 1 (ties to even) twice."""
    routing = route([ids([0, 1, 2])], placement=Placement((0, 0, 0)), layout=Layout.EXPERT_MAJOR)
    y = [bf16([[1.0], [2.0**-8], [2.0**-8]])]
    assert combine(y, routing)[0].x.tolist() == [[1.0 + 2.0**-7]]


def test_reduce_rank_rounds_each_ranks_sum():
    """Experts 0 and 1 on rank 0, expert 2 on rank 1: (1 + 2^-8) rounds to 1 on rank 0, and then 1 + 2^-8 does again."""
    routing = route([ids([0, 1, 2]), no_ids(3)], placement=Placement((0, 0, 1)), layout=Layout.EXPERT_MAJOR)
    y = [bf16([[1.0], [2.0**-8]]), bf16([[2.0**-8]])]
    assert combine(y, routing, reduce="token")[0].x.tolist() == [[1.0 + 2.0**-7]]
    assert combine(y, routing, reduce="rank")[0].x.tolist() == [[1.0]]


def test_products_are_rounded_before_they_are_added():
    """(1 + 2^-23) * (1 + 2^-7) is 1 + 2^-7 + 2^-23 + 2^-30 and rounds to 1 + 2^-7 + 2^-23; fused with the sum, the
    2^-30 would survive the subtraction of 1 + 2^-7."""
    routing = route(
        [ids([0, 1])], [torch.tensor([[1.0, 1.0 + 2.0**-23]])], placement=Placement((0, 0)), layout=Layout.EXPERT_MAJOR
    )
    y = [bf16([[-1.0 - 2.0**-7], [1.0 + 2.0**-7]])]
    assert combine(y, routing)[0].x.tolist() == [[2.0**-23]]


def test_logfmt_rows_are_decoded_before_weighting():
    row = torch.full((1, 128), 0.125, dtype=torch.bfloat16)
    row[0, :3] = bf16([0.5, -0.25, 0.1875])
    wire = LogFMT10()
    decoded = wire.decode_float32(*wire.encode(row), 128)
    assert not torch.equal(decoded, row.float())  # 0.1875 is not on the grid
    routing = route([ids([0])], [torch.tensor([[3.0]])], placement=Placement((0,)), layout=Layout.EXPERT_MAJOR)
    (back,) = combine([row], routing, wire=wire)
    assert torch.equal(back.x, (3.0 * decoded).bfloat16())
    (back,) = combine([row], routing, wire=wire, reduce="rank")
    tripled = (3.0 * row.float()).bfloat16()
    assert torch.equal(back.x, wire.decode_float32(*wire.encode(tripled), 128).bfloat16())


def test_a_repeated_expert_means_two_slots():
    """Case C07: R=2, E=4, K=3, tokens (1, 1, 3) and (2, 2, 2) on both ranks, weights 0.5, 0.25, 0.25."""
    topk_idx = [ids([1, 1, 3], [2, 2, 2])] * 2
    weights = [torch.tensor([[0.5, 0.25, 0.25]] * 2)] * 2
    x = [bf16([[1.0], [2.0]]), bf16([[3.0], [4.0]])]
    placement = Placement.contiguous(4, 2)

    routing = route(topk_idx, weights, placement=placement)
    received = dispatch(x, routing)
    assert [r.num_tokens_per_expert.tolist() for r in received] == [[0, 4], [6, 2]]
    assert [r.x.tolist() for r in received] == [[[1.0], [3.0]], [[1.0], [2.0], [3.0], [4.0]]]
    assert received[0].topk_idx.tolist() == [[1, 1, -1]] * 2
    assert received[1].topk_idx.tolist() == [[-1, -1, 1], [0, 0, 0]] * 2
    back = combine([r.x for r in received], routing)
    assert [part.x.tolist() for part in back] == [[[2.0], [2.0]], [[6.0], [4.0]]]

    routing = route(topk_idx, weights, placement=placement, layout=Layout.EXPERT_MAJOR)
    received = dispatch(x, routing)
    assert [r.num_tokens_per_expert.tolist() for r in received] == [[0, 4], [6, 2]]
    assert received[0].row_source.tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]
    assert received[1].row_source[:6].tolist() == [[s, 1, k] for s in range(2) for k in range(3)]
    back = combine([r.x for r in received], routing)
    assert [part.x.tolist() for part in back] == [[[1.0], [2.0]], [[3.0], [4.0]]]


def test_expert_slots_drop_later_repeats():
    topk_idx = [ids([1, 1, 3], [2, 2, 2])]
    weights = [torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.125]])]
    routing = route(topk_idx, weights, placement=Placement((0,) * 4), layout=Layout.EXPERT_SLOTS, capacity=2)
    (received,) = dispatch([bf16([[8.0], [16.0]])], routing)
    assert received.num_tokens_per_expert.tolist() == [0, 1, 1, 1]
    assert received.row_source[:, 0].tolist() == [[-1, -1, -1], [0, 0, 0], [0, 1, 0], [0, 0, 2]]
    (back,) = combine([received.x], routing)
    assert back.x.tolist() == [[6.0], [8.0]]


@pytest.mark.parametrize("layout", list(Layout))
def test_no_tokens_anywhere(layout):
    topk_idx = [no_ids(2)] * 2
    routing = route(topk_idx, placement=Placement.contiguous(3, 2), layout=layout, expert_alignment=4, capacity=0)
    received = dispatch([torch.empty(0, 8, dtype=torch.bfloat16)] * 2, routing)
    assert [r.x.numel() for r in received] == [0, 0]
    assert [r.num_tokens_per_expert.tolist() for r in received] == [[0, 0], [0]]
    assert [r.num_tokens_per_rank.tolist() for r in received] == [[0, 0], [0, 0]]
    back = combine([r.x for r in received], routing, wire=LogFMT10())
    assert [part.x.shape for part in back] == [(0, 8), (0, 8)]
    gradients = combine_backward([part.x for part in back], [r.x for r in received], routing)
    assert [part.y.shape for part in gradients] == [r.x.shape for r in received]


@pytest.mark.parametrize("layout", list(Layout))
def test_uneven_placement_and_a_rank_without_experts(layout):
    """Experts 0 and 3 on rank 2, experts 1 and 2 on rank 0, none on rank 1."""
    placement = Placement((2, 0, 0, 2))
    topk_idx = [ids([3, 1]), ids([0, -1]), ids([2, 3])]
    weights = [torch.tensor([[1.0, 0.5]]), torch.tensor([[2.0, 0.0]]), torch.tensor([[0.25, 0.5]])]
    routing = route(topk_idx, weights, placement=placement, layout=layout, capacity=1)
    r0, r1, r2 = received = dispatch([bf16([[4.0]]), bf16([[8.0]]), bf16([[16.0]])], routing)
    assert [r.num_tokens_per_expert.tolist() for r in received] == [[1, 1], [], [1, 2]]
    assert [r.num_tokens_per_rank.tolist() for r in received] == [[1, 0, 1], [0, 0, 0], [1, 1, 1]]
    assert r1.x.numel() == 0
    if layout is Layout.COMPACT:
        assert r0.topk_idx.tolist() == [[-1, 0], [1, -1]]
        assert r2.topk_idx.tolist() == [[1, -1], [0, -1], [-1, 1]]
    if layout is Layout.EXPERT_MAJOR:
        assert r2.row_source.tolist() == [[1, 0, 0], [0, 0, 0], [2, 0, 1]]
        assert r1.expert_offsets.tolist() == [0]
    if layout is Layout.EXPERT_SLOTS:
        assert r1.x.shape == (0, 3, 1)
        assert r2.row_source[1].tolist() == [[0, 0, 0], [2, 0, 1], [-1, -1, -1]]
    back = combine([r.x for r in received], routing)
    expected = [[[8.0]], [[8.0]], [[32.0]]] if layout is Layout.COMPACT else [[[6.0]], [[16.0]], [[12.0]]]
    assert [part.x.tolist() for part in back] == expected


def test_world_of_one():
    """Case C03: E=8, K=2, ids (t, t + 3) and at last (4, -1), weights 0.5."""
    topk_idx = [ids(*[[t, t + 3] for t in range(4)], [4, -1])]
    weights = [torch.full((5, 2), 0.5)]
    x = [bf16([[1.0, 2.0]] * 4 + [[6.0, 8.0]])]
    for layout in Layout:
        routing = route(topk_idx, weights, placement=Placement((0,) * 8), layout=layout, capacity=5)
        (received,) = dispatch(x, routing)
        assert received.num_tokens_per_expert.tolist() == [1, 1, 1, 2, 2, 1, 1, 0]
        assert received.num_tokens_per_rank.tolist() == [5]
        if layout is not Layout.COMPACT:
            (back,) = combine([received.x], routing)
            assert back.x.tolist() == [[1.0, 2.0]] * 4 + [[3.0, 4.0]]


def test_backward_of_compact_dispatch():
    routing = two_ranks(Layout.COMPACT)
    grads = dispatch_backward(
        [bf16([[1.0], [2.0], [4.0]]), bf16([[8.0], [16.0], [32.0]])],
        routing,
        [torch.tensor([[1.0, nan], [2.0, 3.0], [nan, 4.0]]), torch.tensor([[nan, 5.0], [nan, 6.0], [7.0, nan]])],
    )
    assert [part.x.tolist() for part in grads] == [[[9.0], [2.0], [16.0]], [[36.0], [0.0]]]
    assert grads[0].topk_weights.tolist() == [[1.0, 5.0], [2.0, 3.0], [0.0, 6.0]]
    assert grads[1].topk_weights.tolist() == [[7.0, 4.0], [0.0, 0.0]]


def test_backward_of_expert_major_dispatch_is_unweighted():
    grads = dispatch_backward(Y_MAJOR, two_ranks(Layout.EXPERT_MAJOR, expert_alignment=3))
    assert [part.x.tolist() for part in grads] == [[[6.0], [5.0], [6.0]], [[11.0], [0.0]]]
    assert [part.topk_weights for part in grads] == [None, None]


G = [bf16([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), bf16([[7.0, 8.0], [9.0, 9.0]])]


def test_backward_of_compact_combine():
    routing = two_ranks(Layout.COMPACT)
    grad_weights = [torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([[7.0, 8.0], [9.0, 9.0]])]
    y = [bf16([[0.0, 0.0]] * 3)] * 2
    g0, g1 = combine_backward(G, y, routing, grad_weights)
    assert g0.y.tolist() == [[1.0, 2.0], [3.0, 4.0], [7.0, 8.0]]
    assert g1.y.tolist() == [[1.0, 2.0], [5.0, 6.0], [7.0, 8.0]]
    assert g0.topk_weights.tolist() == [[1.0, 0.0], [3.0, 4.0], [0.0, 8.0]]
    assert g1.topk_weights.tolist() == [[0.0, 2.0], [0.0, 6.0], [7.0, 0.0]]
    assert g0.bias is G[0]
    assert combine_backward(G, y, routing)[0].topk_weights is None


def test_backward_of_expert_major_combine():
    none = [nan, nan]
    y = [
        bf16([[1.0, 0.0], [2.0, 0.0], none, [3.0, 0.0], [4.0, 1.0], none]),
        bf16([[5.0, 0.0], none, none, [6.0, 1.0], [7.0, 0.0], none]),
    ]
    g0, g1 = combine_backward(G, y, two_ranks(Layout.EXPERT_MAJOR, expert_alignment=3))
    zero = [0.0, 0.0]
    # rows of rank 0: (0, 0, 0) weight 0.5, (0, 1, 1) weight 4; (0, 1, 0) weight 2, (1, 0, 1) weight 8
    assert g0.y.tolist() == [[0.5, 1.0], [12.0, 16.0], zero, [6.0, 8.0], [56.0, 64.0], zero]
    # rows of rank 1: (0, 0, 1) weight 0.25; (0, 2, 1) weight 0.125, (1, 0, 0) weight 1
    assert g1.y.tolist() == [[0.25, 0.5], zero, zero, [0.625, 0.75], [7.0, 8.0], zero]
    # sum(g * y): 1*1 and 1*5; 3*3 and 3*2; nothing and 5*6 + 6*1
    assert g0.topk_weights.tolist() == [[1.0, 5.0], [9.0, 6.0], [0.0, 36.0]]
    # 7*7 and 7*4 + 8*1
    assert g1.topk_weights.tolist() == [[49.0, 36.0], [0.0, 0.0]]
    assert g0.topk_weights.dtype == torch.float32


def test_backward_of_combine_without_weights():
    y = [bf16([[0.0, 0.0]] * 6)] * 2
    g0, g1 = combine_backward(G, y, two_ranks(Layout.EXPERT_MAJOR, weights=False, expert_alignment=3))
    assert g0.y.tolist() == [[1.0, 2.0], [3.0, 4.0], [0.0, 0.0], [3.0, 4.0], [7.0, 8.0], [0.0, 0.0]]
    assert (g0.topk_weights, g1.topk_weights) == (None, None)


def test_backward_of_expert_slots_combine_keeps_the_shape():
    routing = two_ranks(Layout.EXPERT_SLOTS, capacity=2)
    y = [torch.ones(2, 4, 2, dtype=torch.bfloat16)] * 2
    g0, g1 = combine_backward(G, y, routing)
    assert g0.y.shape == (2, 4, 2)
    assert g0.y[:, :2].tolist() == [[[0.5, 1.0], [12.0, 16.0]], [[6.0, 8.0], [56.0, 64.0]]]
    assert not g0.y[:, 2:].any()
    assert g1.topk_weights.tolist() == [[15.0, 15.0], [0.0, 0.0]]


@pytest.mark.parametrize("layout", [Layout.COMPACT, Layout.EXPERT_MAJOR])
def test_gradients_agree_with_autograd_through_plain_indexing(layout):
    """Integers, so that every sum is exact and the order does not matter: a second, independent derivation."""
    generator = torch.Generator().manual_seed(1)
    num_ranks, num_experts, num_topk, hidden, tokens = 3, 6, 3, 4, [5, 0, 7]
    topk_idx = [torch.randint(-1, num_experts, (t, num_topk), generator=generator) for t in tokens]
    weights = [torch.randint(1, 4, (t, num_topk), generator=generator).float() for t in tokens]
    x = [torch.randint(-2, 3, (t, hidden), generator=generator).bfloat16() for t in tokens]
    grad_out = [torch.randint(-2, 3, (t, hidden), generator=generator).bfloat16() for t in tokens]
    placement = Placement.contiguous(num_experts, num_ranks)
    routing = route(topk_idx, weights, placement=placement, layout=layout)

    # Experts double their rows. By plain torch: out[t] = sum over slots (or ranks) of w * 2 * x[t].
    leaf = torch.cat(x).float().requires_grad_()
    leaf_weights = torch.cat(weights).requires_grad_()
    flat = torch.cat(topk_idx)
    if layout is Layout.COMPACT:
        factor = sum(((flat >= 0) & (flat // 2 == r)).any(dim=1).float() for r in range(num_ranks))
    else:
        factor = (leaf_weights * (flat >= 0)).sum(dim=1)
    out = factor[:, None] * 2 * leaf
    out.backward(torch.cat(grad_out).float())

    received = dispatch(x, routing)
    y = [2 * r.x for r in received]
    assert torch.equal(torch.cat([part.x for part in combine(y, routing)]), out.bfloat16())
    through_combine = combine_backward(grad_out, y, routing)
    through_dispatch = dispatch_backward([2 * part.y for part in through_combine], routing)
    assert torch.equal(torch.cat([part.x for part in through_dispatch]), leaf.grad.bfloat16())
    if layout is Layout.EXPERT_MAJOR:
        assert torch.equal(torch.cat([part.topk_weights for part in through_combine]), leaf_weights.grad)


def test_the_oracle_stands_low_in_the_tree():
    with open(reference.__file__) as source:
        imports = [line for line in source if line.startswith("from expertwire")]
    allowed = ("errors", "_math", "topology", "layouts", "formats")
    assert all(line.split()[1].split(".")[1] in allowed for line in imports)


@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.EXPERT_SLOTS])
def test_no_tokens_at_all(layout):
    """Unused rows have no source, also where there is none to have."""
    routing = route([no_ids(2), no_ids(2)], placement=Placement.contiguous(4, 2), layout=layout, capacity=3)
    received = dispatch([bf16([]).view(0, 1)] * 2, routing)
    assert all((part.row_source == -1).all() for part in received)
    assert [part.num_tokens_per_expert.tolist() for part in received] == [[0, 0], [0, 0]]
    assert [back.x.shape for back in combine([part.x for part in received], routing)] == [(0, 1), (0, 1)]
