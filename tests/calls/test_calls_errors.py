"""What a wrong call says, and that the next one works."""

import re
import weakref

import pytest
import torch
from small_buffer import make

import expertwire as ew
from expertwire.testing import payload, round_robin

COMPACT, EXPERT_MAJOR, EXPERT_SLOTS = ew.Layout


def inputs(buf):
    return payload(buf.rank, 6, 64), round_robin(buf.rank, 6, 2, 8)


def round_trip(buf):
    x, ids = inputs(buf)
    sent = buf.dispatch(x, ids, layout=EXPERT_MAJOR)
    assert torch.equal(buf.combine(sent.x, sent.handle).x, 2 * x)


def world(num_ranks, fn, *args):
    return ew.World(num_ranks).run(lambda rank: fn(rank, *args))


# -- every message names rank, argument, rule and value -----------------------------------------------------------

OPTIONS = {
    "layout": ("sorted", "must be one of .*'compact'.*'expert_major'.*got 'sorted'"),
    "counts": ("both", "must be one of 'host', 'device', got 'both'"),
    "expert_alignment": (0, r"must be in \[1, 1048576\], got 0"),
    "expert_alignment ": (1.5, "must be an int, got 1.5"),
    "wire": (ew.LogFMT10(), "must be .*FP8Block.*got LogFMT10"),
    "wire ": ("fp8", "must be .*FP8Block.*got 'fp8'"),
}


def wrong_dispatch_options(rank):
    with make(rank) as buf:
        x, ids = inputs(buf)
        for name, (value, message) in OPTIONS.items():
            wrong = {name.strip(): value} if rank.rank == 1 else {}
            expected = ew.InvalidArgument if rank.rank == 1 else ew.PeerRefused
            with pytest.raises(expected, match=f"rank 1: {name.strip()} {message}"):
                buf.dispatch(x, ids, **wrong)
        round_trip(buf)


def test_dispatch_options():
    world(2, wrong_dispatch_options)


def wrong_combine_arguments(rank):
    with make(rank) as buf:
        x, ids = inputs(buf)
        compact, major = buf.dispatch(x, ids), buf.dispatch(x, ids, layout=EXPERT_MAJOR)
        rows, y = len(major.x), major.x
        bias = torch.zeros(6, 64).bfloat16()
        weights = torch.zeros(len(compact.x), 2)
        cases = [
            ({"x": y[1:]}, rf"x must have shape \[{rows}, 64\], as the dispatch .* got \[{rows - 1}, 64\]"),
            ({"x": y.float()}, "x must have dtype bfloat16, got float32"),
            ({"x": y.t().contiguous().t()}, "x must be contiguous"),
            ({"x": None}, "x must be a tensor .*got NoneType"),
            ({"reduce": "expert"}, "reduce must be one of 'token', 'rank', got 'expert'"),
            ({"wire": "logfmt"}, "wire must be None or a wire format.*got 'logfmt'"),
            ({"bias": bias[1:]}, r"bias must have shape \[6, 64\], got \[5, 64\]"),
            ({"bias": bias.float()}, "bias must have dtype bfloat16, got float32"),
            ({"bias": (bias, bias, bias)}, "bias must be one or two tensors, got 3"),
            ({"topk_weights": weights}, "topk_weights can be returned for COMPACT only, not"),
            ({"handle": None}, "handle must be the `handle` of an earlier dispatch, got NoneType"),
            ({"handle": major}, "handle must be the `handle` of an earlier dispatch, got Dispatched"),
            ({"x": compact.x, "handle": compact.handle, "topk_weights": weights[1:]}, "topk_weights must have shape"),
            ({"x": compact.x, "handle": compact.handle, "topk_weights": weights.int()}, "topk_weights must have dtype"),
        ]
        for wrong, message in cases:
            arguments = {"x": y, "handle": major.handle, **(wrong if rank.rank == 0 else {})}
            expected = (ew.InvalidArgument, ew.HandleError) if rank.rank == 0 else ew.PeerRefused
            with pytest.raises(expected, match=f"rank 0: {message}"):
                buf.combine(arguments.pop("x"), arguments.pop("handle"), **arguments)
        assert torch.equal(buf.combine(y, major.handle).x, 2 * x)
        buf.combine(compact.x, compact.handle)


def test_combine_arguments():
    world(2, wrong_combine_arguments)


@pytest.mark.parametrize("group", [None, 0, "gloo", object()])
def test_what_is_no_group(group):
    with pytest.raises(ew.InvalidArgument, match=rf"group must be .* got {type(group).__name__}\."):
        make(group)


def creation(rank, name, value):
    with pytest.raises(ew.InvalidArgument if rank.rank == 1 else ew.PeerRefused, match=rf"rank 1: .*{name}") as caught:
        make(rank, **({name: value} if rank.rank == 1 else {}))
    text = str(caught.value)
    assert re.search(r"must be|placement has|placement names", text)
    assert repr(value) in text or "Placement" in repr(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_experts", 0),
        ("num_topk", 65),
        ("hidden", 65),
        ("hidden", 4),
        ("num_max_tokens_per_rank", -3),
        ("max_in_flight", 1000),
        ("timeout_s", -1.5),
        ("on_timeout", "retry"),
        ("on_timeout", "end"),  # which is for GPUs
        ("combine_input", "over_rows"),
        ("engine", "opencl"),
        ("transport", "udp"),
        ("placement", ew.Placement((0, 1, 0))),
        ("placement", ew.Placement((0, 1, 2, 3, 4, 5, 6, 7))),
    ],
)
def test_messages_at_creation(name, value):
    world(2, creation, name, value)


def explicit_transport_is_met_or_raises(rank):
    with pytest.raises(ew.TransportUnavailable, match=rf"rank {rank.rank}: transport='shm' does not fit .* use 'auto'"):
        make(rank, transport="shm")
    with make(rank, transport="inproc") as buf:
        assert buf.settings.transport == "inproc"


def test_an_explicit_transport_is_met_or_raises():
    world(2, explicit_transport_is_met_or_raises)


def test_placements_that_cannot_be():
    for wrong, message in [
        (lambda: ew.Placement(()), "at least one expert"),
        (lambda: ew.Placement((0, -1)), "ranks must be >= 0, got -1"),
        (lambda: ew.Placement.from_counts([2, -1]), r"counts must be >= 0, got \[2, -1\]"),
    ]:
        with pytest.raises(ew.InvalidArgument, match=message):
            wrong()


# -- errors of any other kind ---------------------------------------------------------------------------------------


def surprises(rank, phase):
    """An unexpected error while a call is prepared, such as no memory, does not leave the ranks out of step."""
    with make(rank) as buf:
        x, ids = inputs(buf)
        sent = buf.dispatch(x, ids, layout=EXPERT_MAJOR)
        call = {"dispatch": buf._dispatch, "combine": buf._combine}[phase]
        plan = call._plan

        def no_memory(*args):
            raise MemoryError("no memory left")

        if rank.rank == 1:
            call._plan = no_memory
        with pytest.raises(MemoryError if rank.rank == 1 else ew.PeerRefused, match="no memory left"):
            buf.dispatch(x, ids) if phase == "dispatch" else buf.combine(sent.x, sent.handle)
        call._plan = plan
        assert torch.equal(buf.combine(sent.x, sent.handle).x, 2 * x)
        for _ in range(4):
            round_trip(buf)


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_an_error_of_any_kind_voids_the_call_on_all_ranks(phase):
    world(3, surprises, phase)


# -- layouts by name -------------------------------------------------------------------------------------------------


def layouts_by_name(rank):
    with make(rank) as buf:
        x, ids = inputs(buf)
        for layout in ew.Layout:
            by_name, by_member = buf.dispatch(x, ids, layout=layout.value), buf.dispatch(x, ids, layout=layout)
            assert by_name.x.shape == by_member.x.shape
            assert by_name.handle.layout is layout
            assert (by_name.topk_idx is None) == (by_member.topk_idx is None)
            factor = torch.tensor([[len({e // (8 // buf.num_ranks) for e in row})] for row in ids.tolist()])
            back = buf.combine(by_name.x, by_name.handle)
            assert torch.equal(back.x, (factor if layout is COMPACT else 2) * x)
            buf.combine(by_member.x, by_member.handle)


def test_a_layout_may_be_given_by_its_name():
    world(2, layouts_by_name)


# -- handles ---------------------------------------------------------------------------------------------------------


def handles(rank):
    buf, other = make(rank), make(rank)
    x, ids = inputs(buf)
    me = f"rank {rank.rank}: "
    first, second = buf.dispatch(x, ids), buf.dispatch(x, ids)
    with pytest.raises(ew.InFlightError, match=f"{me}2 handles are in flight.*max_in_flight=2.*release"):
        buf.dispatch(x, ids)
    with pytest.raises(ew.HandleError, match=f"{me}.*belongs to another buffer"):
        other.combine(first.x, first.handle)
    with pytest.raises(ew.HandleError, match=f"{me}.*belongs to another buffer"):
        other.dispatch(x, handle=first.handle)
    round_trip(other)

    deferred = buf.combine(first.x, first.handle, defer_receive=True)
    with pytest.raises(AttributeError, match=r"this Combined was deferred and has no x yet: call its hook\(\) first"):
        _ = deferred.x
    for again in (lambda: buf.combine(first.x, first.handle), lambda: buf.dispatch(x, handle=first.handle)):
        with pytest.raises(ew.HandleError, match=f"{me}.*is in use by a combine .*hook"):
            again()
    assert deferred.hook() is deferred
    assert deferred.hook() is deferred, "a hook may be called again"
    assert first.handle.finished
    buf.combine(second.x, second.handle)

    sent = buf.dispatch(x, ids, defer_receive=True)
    for name in ("x", "num_tokens_per_expert"):
        with pytest.raises(AttributeError, match=f"this Dispatched was deferred and has no {name} yet"):
            getattr(sent, name)
    with pytest.raises(AttributeError, match="Dispatched has no attribute 'nothing'"):
        _ = sent.nothing
    for early in (lambda: buf.combine(first.x, sent.handle), lambda: buf.dispatch(x, handle=sent.handle)):
        with pytest.raises(ew.HandleError, match=rf"{me}the dispatch of .*has not received yet: call its hook\(\)"):
            early()
    buf.combine(sent.hook().x, sent.handle)

    for both in ({"topk_idx": ids}, {"topk_weights": torch.ones(6, 2)}):
        with pytest.raises(ew.InvalidArgument, match=f"{me}pass either handle or"):
            buf.dispatch(x, handle=first.handle, **both)
    with pytest.raises(ew.InvalidArgument, match=f"{me}x has 5 tokens, its handle 6"):
        buf.dispatch(x[:5], handle=first.handle)
    again = buf.dispatch(3 * x, handle=first.handle)
    assert torch.equal(again.x, 3 * first.x)
    assert torch.equal(buf.combine(again.x, first.handle).x, buf.combine(3 * first.x, first.handle).x)
    round_trip(buf)
    buf.close()
    other.close()
    for late in (lambda: buf.combine(first.x, first.handle), lambda: buf.dispatch(x, ids)):
        with pytest.raises(ew.BufferClosed, match=f"{me}this buffer is closed"):
            late()


def test_handles_are_used_where_they_belong():
    world(2, handles)


def too_many_on_one_rank(rank):
    """One rank forgot to combine: an error there and on its peers, and not a hang."""
    with make(rank, max_in_flight=1) as buf:
        x, ids = inputs(buf)
        forgotten = buf.dispatch(x, ids)
        if rank.rank != 1:
            forgotten.handle.release()
        with pytest.raises(
            ew.InFlightError if rank.rank == 1 else ew.PeerRefused, match="rank 1: 1 handles are in flight"
        ):
            buf.dispatch(x, ids)
        forgotten.handle.release()
        for _ in range(3):
            round_trip(buf)


def test_too_many_handles_on_one_rank_only():
    world(3, too_many_on_one_rank)


def failed_hooks(rank):
    """A hook that raised raises the same again; it never hands out the rows of a later step."""
    with make(rank) as buf:
        x, ids = inputs(buf)
        sent = buf.dispatch(x, ids)
        if rank.rank == 0:
            with pytest.raises(ew.InvalidArgument):
                buf.dispatch(x.float(), ids, defer_receive=True)
            with pytest.raises(ew.InvalidArgument):
                buf.combine(sent.x.float(), sent.handle, defer_receive=True)
            records = []
        else:
            records = [buf.dispatch(x, ids, defer_receive=True)]
            records.append(buf.combine(sent.x, sent.handle, defer_receive=True))
        refused = pytest.raises(ew.PeerRefused, match="rank 0: x must have dtype")
        for made in records:
            with refused:
                made.hook()
        buf.combine(sent.x, sent.handle)
        for _ in range(3):  # the banks are in use again
            round_trip(buf)
        for made in records:
            with refused:
                made.hook()
        never_received = records[0].handle if records else None
        with pytest.raises(ew.HandleError, match=r"the dispatch of .* was refused|handle must be"):
            buf.combine(x, never_received)
        round_trip(buf)


def test_a_failed_hook_stays_failed():
    world(3, failed_hooks)


def refused_repeats(rank, zero_copy):
    """Only the repeat is void: the handle that it names is as it was, on all ranks."""
    with make(rank, max_in_flight=3) as buf:
        x, ids = inputs(buf)
        sent = buf.dispatch(x, ids, layout=EXPERT_MAJOR, zero_copy=zero_copy)
        wrong = x[:5] if rank.rank == 0 else x
        with pytest.raises(ew.InvalidArgument if rank.rank == 0 else ew.PeerRefused, match="rank 0: x has 5 tokens"):
            buf.dispatch(wrong, handle=sent.handle)
        assert not sent.handle.finished
        assert torch.equal(buf.dispatch(x, handle=sent.handle).x, sent.x)
        assert torch.equal(buf.combine(sent.x, sent.handle).x, 2 * x)
        assert sent.handle.finished
        for _ in range(4):  # all banks are in use again
            round_trip(buf)


@pytest.mark.parametrize("zero_copy", [False, True])
def test_a_refused_repeat_leaves_its_handle_as_it_was(zero_copy):
    world(3, refused_repeats, zero_copy)


def after_close(rank):
    """Everything that is left of a closed buffer raises, or does nothing; no window is touched."""
    buf = make(rank, max_in_flight=4)
    x, ids = inputs(buf)
    x.requires_grad_()
    sent = buf.dispatch(x, ids)
    back = buf.combine(sent.x, sent.handle)
    pending = buf.combine(sent.x, sent.handle, defer_receive=True)
    view = buf.dispatch(x.detach(), ids, zero_copy=True)
    deferred = buf.dispatch(x, ids, defer_receive=True)
    rank.barrier()
    buf.close()
    for late in (deferred.hook, pending.hook, lambda: back.x.float().sum().backward()):
        with pytest.raises(ew.BufferClosed, match="this buffer is closed"):
            late()
    view.handle.release()
    view.handle.release()
    assert buf.statistics().dropped_selections == 0
    assert "closed" in repr(buf)
    with pytest.raises(ew.BufferClosed), buf:
        round_trip(buf)


def test_after_close():
    world(2, after_close)


def dropped_handles(rank):
    """A handle that nobody holds is not in flight, also not when it carries gradients."""
    with make(rank, max_in_flight=1) as buf:
        x, ids = inputs(buf)
        for requires_grad in (False, True):
            for layout in (COMPACT, EXPERT_MAJOR):
                for _ in range(3):
                    weights = torch.ones(6, 2, requires_grad=requires_grad)
                    sent = buf.dispatch(x.detach().requires_grad_(requires_grad), ids, weights, layout=layout)
                    gone = weakref.ref(sent.handle)
                    del sent, weights
                    assert gone() is None
                sent = buf.dispatch(x.detach().requires_grad_(requires_grad), ids, layout=layout)
                back = buf.combine(sent.x, sent.handle)
                if requires_grad:
                    back.x.float().sum().backward()
                gone = weakref.ref(sent.handle)
                del sent, back
                assert gone() is None


def test_a_dropped_handle_is_not_in_flight():
    world(2, dropped_handles)


def records_in_short(rank):
    with make(rank) as buf:
        x, ids = inputs(buf)
        sent = buf.dispatch(x, ids, layout=EXPERT_MAJOR, defer_receive=True)
        assert repr(sent) == "Dispatched(expert_major, deferred)"
        done = sent.hook()
        assert repr(done) == f"Dispatched(expert_major, x {list(done.x.shape)} torch.bfloat16)"
        back = buf.combine(done.x, done.handle, defer_receive=True)
        assert repr(back) == "Combined(deferred)"
        assert repr(back.hook()) == "Combined(x [6, 64] torch.bfloat16)"
        other = buf.dispatch(x, ids)
        assert repr(other) == f"Dispatched(compact, x {list(other.x.shape)} torch.bfloat16)"
        assert (done == done, done == other, len({done, other, back})) == (True, False, 3)


def test_records_are_printed_in_short_and_compared_by_identity():
    world(2, records_in_short)


@pytest.mark.parametrize("table", [8, [0, "1"], "01", (0, 1.5), None])
def test_a_placement_is_a_table_of_ranks(table):
    with pytest.raises(ew.InvalidArgument, match="a table has the rank of every expert"):
        ew.Placement(table)


def test_what_is_no_setting_of_size_hint():
    sizes = {"num_ranks": 2, "hidden": 64, "num_topk": 2, "num_max_tokens_per_rank": 8}
    for wrong in ({"device": "tpu"}, {"on_timeout": "never"}, {"layout": "rows", "device": "cuda"}):
        with pytest.raises(ew.InvalidArgument, match=f"{next(iter(wrong))} must be one of"):
            ew.Buffer.size_hint(**sizes, **wrong)
    with pytest.raises(ew.InvalidArgument, match="at least one rank is needed, got 0"):
        ew.Placement.contiguous(8, 0)


def test_warmup_takes_arguments_of_dispatch():
    def work(rank):
        with ew.Buffer(rank, num_experts=8, hidden=64, num_topk=2, num_max_tokens_per_rank=8) as buf:
            with pytest.raises(ew.InvalidArgument, match=r"keyword arguments of dispatch.*got 'expert_major'"):
                buf.warmup("expert_major")
            buf.warmup({"layout": "expert_major"})

    ew.World(1).run(work)
