"""The calls that a GPU's Buffer makes, with kernels in the interpreter and one process per rank."""

import importlib.util

import pytest
import torch
from device_checks import (
    CAPACITY,
    COMPACT,
    EXPERTS,
    HIDDEN,
    MAJOR,
    SLOTS,
    TOPK,
    check_rank,
    data,
    output_of_experts,
    same_dispatch,
)
from interpreted_buffer import interpreted_buffer

from expertwire import reference
from expertwire.buffer import Buffer
from expertwire.errors import HandleError, InvalidArgument
from expertwire.formats import BF16, FP8Block, LogFMT10
from expertwire.testing import assert_equal, random_rows, uniform_routing
from expertwire.topology import Placement

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def rank_work(group, layout, wire, options):
    buf = interpreted_buffer(group)
    state = buf._steps.engine.state
    check_rank(buf, layout, wire, steps=2, **options)
    if not options.get("deferred"):
        size = Buffer.size_hint(
            num_ranks=buf.num_ranks, hidden=HIDDEN, num_topk=TOPK, num_max_tokens_per_rank=CAPACITY, device="cuda",
            num_experts=EXPERTS, layout=layout, expert_alignment=options.get("alignment", 1), wire=wire,
            combine_input="apart",
        )  # fmt: skip
        state.inputs(layout, options.get("alignment", 1))
        assert state.total_bytes == size
    torch.distributed.barrier(group)


NUM_PROCESSES = 3


CASES = [
    (SLOTS, FP8Block(), {"zero_copy": True, "counts": "device"}, 3),
    (MAJOR, BF16(), {"alignment": 4, "deferred": True}, 3),
    (COMPACT, FP8Block(scale="ue8m0"), {}, 3),
    (MAJOR, BF16(), {"counts": "device"}, 1),
]


@pytest.mark.parametrize(("layout", "wire", "options", "num_ranks"), CASES)
def test_device_calls(processes, layout, wire, options, num_ranks):
    processes.run(rank_work, layout, wire, options, num_ranks=num_ranks, timeout_s=120)


def one_expert(group, counts):
    """All slots of all tokens name one expert, which gets more rows than a rank has tokens."""
    buf = interpreted_buffer(group)
    xs = [random_rows(r, CAPACITY, HIDDEN) for r in range(buf.num_ranks)]
    ids = [torch.full((CAPACITY, TOPK), EXPERTS - 1) for _ in xs]
    routing = reference.route(ids, placement=buf.settings.placement, layout=MAJOR)
    want = reference.dispatch(xs, routing, BF16())
    sent = buf.dispatch(xs[buf.rank], ids[buf.rank], layout=MAJOR, counts=counts)
    same_dispatch(sent, want[buf.rank], MAJOR, counts)
    y = [random_rows(9 + r, part.x.shape[0], HIDDEN) for r, part in enumerate(want)]
    back = buf.combine(output_of_experts(sent, y[buf.rank]), sent.handle)
    assert_equal(back.x, reference.combine(y, routing)[buf.rank].x)


@pytest.mark.parametrize(("counts", "num_ranks"), [("host", 1), ("device", 2)])
def test_one_expert_gets_all(processes, counts, num_ranks):
    processes.run(one_expert, counts, num_ranks=num_ranks, timeout_s=120)


def layouts_in_turns(group):
    """Where COMPACT and EXPERT_MAJOR push as many rows, they share memory, but not what came with a row."""
    buf = interpreted_buffer(group, Placement.contiguous(2, 2), num_topk=1)
    x, ids = random_rows(buf.rank, 5, HIDDEN), torch.arange(5)[:, None] % 2
    for layout in (COMPACT, MAJOR, COMPACT):
        for wire in (None, LogFMT10()):
            for deferred in (False, True):
                sent = buf.dispatch(x, ids, layout=layout)
                back = buf.combine(sent.x, sent.handle, wire=wire, defer_receive=deferred)
                back = back.hook() if deferred else back
                if wire is None:
                    assert_equal(back.x, x)


def test_layouts_in_turns(processes):
    processes.run(layouts_in_turns, num_ranks=2, timeout_s=120)


def no_experts(group):
    """A rank without experts receives nothing, in as much memory as the others have."""
    buf = interpreted_buffer(group, Placement((0, 0, 0)))
    x, ids = random_rows(buf.rank, 5, HIDDEN), torch.zeros(5, TOPK, dtype=torch.int64)
    for layout in (MAJOR, SLOTS, COMPACT):
        sent = buf.dispatch(x, ids, layout=layout, counts="device")
        if layout is not COMPACT and buf.rank == 1:
            assert (sent.row_source == -1).all()
        buf.combine(torch.zeros(*sent.x.shape[:-1], HIDDEN).bfloat16(), sent.handle)


def test_a_rank_without_experts(processes):
    processes.run(no_experts, num_ranks=2, timeout_s=120)


def further_combines(group):
    """Of a zero-copy dispatch that is finished, when others have written to its bank."""
    buf = interpreted_buffer(group)
    x, ids = random_rows(buf.rank, 5, HIDDEN), uniform_routing(buf.rank, 5, TOPK, EXPERTS)
    sent = buf.dispatch(x, ids, layout=SLOTS, zero_copy=True)
    y = sent.x.clone()
    first = buf.combine(y, sent.handle).x
    for seed in range(2):
        buf.dispatch(x, uniform_routing(7 + seed, 5, TOPK, EXPERTS), layout=SLOTS, zero_copy=True).handle.release()
    if buf.num_ranks > 1:
        assert_equal(buf.combine(y, sent.handle, defer_receive=True).hook().x, first)
        return
    assert_equal(buf.combine(y, sent.handle).x, first)
    with pytest.raises(HandleError, match="zero_copy=False"):
        buf.combine(y, sent.handle, wire=LogFMT10())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_further_combines_of_a_zero_copy_dispatch(processes, num_ranks):
    processes.run(further_combines, num_ranks=num_ranks, timeout_s=120)


def output_over_rows(group, wire):
    """The experts' output is written where the rows were, and read there by peers."""
    buf = interpreted_buffer(group, over_rows=True)
    for step in range(3):
        xs, ids, weights = data(buf.num_ranks, step)
        routing = reference.route(ids, weights, placement=buf.settings.placement, layout=SLOTS, capacity=CAPACITY)
        want = reference.dispatch(xs, routing, wire)
        rank = buf.rank
        sent = buf.dispatch(xs[rank], ids[rank], weights[rank], layout=SLOTS, wire=wire, zero_copy=True)
        same_dispatch(sent, want[rank], SLOTS, step)
        source, y = (
            sent.row_source.clone(),
            [random_rows(9 + r, p.x.numel() // HIDDEN, HIDDEN) for r, p in enumerate(want)],
        )
        given = output_of_experts(sent, y[rank])
        if (step + rank) % 2:
            memory = buf.combine_input(sent.handle)
            assert memory.data_ptr() == sent.x.data_ptr()
            given = memory.copy_(given.view(memory.shape))
        assert torch.equal(sent.row_source, source)
        deferred = step == 2
        back = buf.combine(given, sent.handle, defer_receive=deferred)
        if deferred:
            back.hook()
        assert_equal(back.x, reference.combine(y, routing)[rank].x)
        with pytest.raises(HandleError, match="zero_copy=True, until its first combine"):
            buf.combine_input(sent.handle)
    size = Buffer.size_hint(
        num_ranks=buf.num_ranks, hidden=HIDDEN, num_topk=TOPK, num_max_tokens_per_rank=CAPACITY, device="cuda",
        num_experts=EXPERTS, layout=SLOTS, wire=wire, combine_input="over_rows",
    )  # fmt: skip
    assert buf._steps.engine.state.total_bytes == size
    torch.distributed.barrier(group)
    again = buf.combine(output_of_experts(sent, y[rank]), sent.handle)  # the rows are others' now
    assert_equal(again.x, reference.combine(y, routing)[rank].x)
    assert buf._steps.engine.state.total_bytes > size
    sent = buf.dispatch(xs[rank], ids[rank], weights[rank], layout=SLOTS, wire=wire, zero_copy=True)
    assert_equal(buf.combine(output_of_experts(sent, y[rank]), sent.handle).x, again.x)
    torch.distributed.barrier(group)


@pytest.mark.parametrize("wire", [BF16(), FP8Block()])
def test_output_over_rows(processes, wire):
    processes.run(output_over_rows, wire, num_ranks=3, timeout_s=120)


def zero_copy_tensors(group, layout, counts):
    """Rows of one bank are the same memory every time, but nobody's tensor is another's."""
    buf, seen = interpreted_buffer(group), []
    x, ids = random_rows(1, 5, HIDDEN), uniform_routing(1, 5, TOPK, EXPERTS)
    for _ in range(3):
        sent = buf.dispatch(x, ids, layout=layout, counts=counts, zero_copy=True)
        assert not sent.x.requires_grad
        seen.append(sent.x.requires_grad_())
        sent.handle.release()
    assert seen[0].data_ptr() == seen[2].data_ptr()
    assert not hasattr(sent, "_engine")
    wires = FP8Block(), FP8Block(decode=True)
    coded, decoded = (buf.dispatch(x, ids, layout=layout, counts=counts, zero_copy=True, wire=w) for w in wires)
    rows = wires[0].decode_bfloat16(coded.x.flatten(0, -2), coded.sf.flatten(0, -2), HIDDEN)
    used = torch.zeros(len(rows), dtype=torch.bool)
    for first, count in zip(coded.expert_offsets.tolist(), coded.num_tokens_per_expert.tolist(), strict=False):
        used[first : first + count] = True
    assert used.sum() == 5 * TOPK
    assert_equal(decoded.x.flatten(0, -2)[used], rows[used])
    assert decoded.x.shape == coded.x.shape
    assert decoded.sf is None


@pytest.mark.parametrize(("layout", "counts"), [(SLOTS, "device"), (MAJOR, "device"), (MAJOR, "host")])
def test_zero_copy_tensors_are_the_callers_own(processes, layout, counts):
    processes.run(zero_copy_tensors, layout, counts, num_ranks=1, timeout_s=120)


def values_of_one_row(group):
    """What torch calls contiguous may have any stride where there is one row."""
    buf = interpreted_buffer(group, num_topk=1)
    sent = buf.dispatch(random_rows(1, 1, HIDDEN), torch.tensor([[3]]))
    weights = torch.full((1, 1), 7.0).expand(5, 1)[:1]
    assert weights.is_contiguous()
    assert weights.stride() == (0, 1)
    assert buf.combine(sent.x, sent.handle, topk_weights=weights).topk_weights.tolist() == [[7.0]]


def test_values_of_one_row(processes):
    processes.run(values_of_one_row, num_ranks=1, timeout_s=120)


def endless(group):
    """As long as kernels can count."""
    buf = interpreted_buffer(group)
    x, ids = random_rows(buf.rank, 5, HIDDEN), uniform_routing(buf.rank, 5, TOPK, EXPERTS)
    for seconds in (float("inf"), 1e6, None):
        buf.timeout_s = seconds
        assert buf.timeout_s == seconds
        assert buf._steps.engine.state.timeout_us == (1 << 31) - 1
        buf.dispatch(x, ids).handle.release()
    buf.timeout_s = 1e-9
    assert buf._steps.engine.state.timeout_us == 1


def test_a_time_out_that_never_comes(processes):
    processes.run(endless, num_ranks=2, timeout_s=120)


def budget(group, num_sms):
    """Blocks of a launch that moves rows. In EXPERT_SLOTS one of them counts, so that there are two at least."""
    buf = interpreted_buffer(group, num_sms=num_sms, strict_sms=True)
    launch, grids = buf._steps.engine.launch, {}
    interpret = launch._interpret

    def note(kernel, grid, *rest):
        grids.setdefault(kernel.fn.__name__, set()).add(grid)
        interpret(kernel, grid, *rest)

    launch._interpret = note
    check_rank(buf, SLOTS, FP8Block(), steps=1)
    assert grids["dispatch_slots"] == {max(2, num_sms)}
    assert grids["copy_rows"] == grids["combine_gather"] == {num_sms}


@pytest.mark.parametrize("num_sms", [1, 3])
def test_a_strict_budget(processes, num_sms):
    processes.run(budget, num_sms, num_ranks=1, timeout_s=120)


def misaligned(group):
    """Refused with what helps."""
    buf = interpreted_buffer(group)

    def shifted(t):
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)

    x, ids = random_rows(1, 5, HIDDEN), uniform_routing(1, 5, TOPK, EXPERTS)
    hint = r"{0} must begin at a multiple of 16 bytes; pass {0}\.clone\(\)"
    with pytest.raises(InvalidArgument, match=hint.format("x")):
        buf.dispatch(shifted(x), ids)
    sent = buf.dispatch(shifted(x).clone(), ids)
    with pytest.raises(InvalidArgument, match=hint.format("x")):
        buf.combine(shifted(sent.x), sent.handle)
    with pytest.raises(InvalidArgument, match=hint.format("topk_weights")):
        buf.combine(sent.x, sent.handle, topk_weights=shifted(torch.zeros(len(sent.x), TOPK)))
    with pytest.raises(InvalidArgument, match=hint.format("bias")):
        buf.combine(sent.x, sent.handle, bias=(x, shifted(x)))
    assert_equal(buf.combine(sent.x, sent.handle).x, x)


def test_misaligned_rows(processes):
    processes.run(misaligned, num_ranks=1, timeout_s=120)
