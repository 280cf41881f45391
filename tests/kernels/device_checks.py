"""One rank's calls on a device, compared with the oracle; `buf` is a Buffer, or looks like one."""

import pytest
import torch

import expertwire as ew
from expertwire import reference
from expertwire.testing import (
    assert_equal,
    random_rows,
    random_weights,
    repeated_routing,
    uniform_routing,
    with_holes,
)

CAPACITY, HIDDEN, TOPK, EXPERTS = 24, 512, 4, 16
TOKENS = (24, 7, 0, 16, 24, 1, 24, 13)
SLOTS, MAJOR, COMPACT = ew.Layout.EXPERT_SLOTS, ew.Layout.EXPERT_MAJOR, ew.Layout.COMPACT


def data(num_ranks, step, repeats=False):
    make = repeated_routing if repeats else uniform_routing
    tokens = TOKENS[:num_ranks]
    xs = [random_rows(100 * step + r, n, HIDDEN, scale=3.0) for r, n in enumerate(tokens)]
    ids = [with_holes(make(100 * step + r, n, TOPK, EXPERTS), r) for r, n in enumerate(tokens)]
    return xs, ids, [random_weights(100 * step + r, n, TOPK) for r, n in enumerate(tokens)]


def check_rank(
    buf,
    layout,
    wire,
    *,
    counts="host",
    zero_copy=False,
    deferred=False,
    alignment=1,
    steps=3,
    repeats=False,
    back_wire=None,
):
    """A few steps of one rank, each with a combine and a cached dispatch."""
    num_ranks, rank, placement = buf.num_ranks, buf.rank, buf.settings.placement
    device = buf.settings.device
    for step in range(steps):
        xs, ids, weights = data(num_ranks, step, repeats)
        routing = reference.route(
            ids, weights, placement=placement, layout=layout, expert_alignment=alignment, capacity=CAPACITY
        )
        want = reference.dispatch(xs, routing, wire)
        scale = 1.0 if back_wire is None else 0.2  # most chunks of LogFMT10 are cast
        y = [random_rows(500 + step + r, part.x.numel() // HIDDEN, HIDDEN, scale=scale) for r, part in enumerate(want)]
        bias = [random_rows(900 + r, len(x), HIDDEN) for r, x in enumerate(xs)]
        reduce = ("token", "rank")[step % 2] if back_wire is None else "token"
        summed = reference.combine(y, routing, bias=[bias], reduce=reduce, wire=back_wire)[rank].x
        mine = want[rank]
        sent = buf.dispatch(
            xs[rank].to(device), ids[rank].to(device), weights[rank].to(device), layout=layout, wire=wire,
            counts=counts, zero_copy=zero_copy, defer_receive=deferred, expert_alignment=alignment,
        )  # fmt: skip
        if deferred:
            sent = sent.hook()
        arrive(device)
        same_dispatch(sent, mine, layout, step)
        given = output_of_experts(sent, y[rank])
        back = buf.combine(
            given, sent.handle, bias=bias[rank].to(device), reduce=reduce, wire=back_wire, defer_receive=deferred
        )
        if deferred:
            given.fill_(float("nan"))
            back = back.hook()
        arrive(device)
        assert_equal(back.x.cpu(), summed)
        again = buf.dispatch(xs[rank].to(device), handle=sent.handle, wire=wire)
        arrive(device)
        same_dispatch(again, mine, layout, step)


def check_poison(buf, layout, wire, *, counts, zero_copy, alignment=1):
    """Of a buffer with debug_poison: rows that hold nothing are NaN, and so is all that was given back."""
    device = buf.settings.device
    for step, finish in enumerate((lambda sent: buf.combine(y, sent.handle), lambda sent: sent.handle.release())):
        x, ids, weights = (part[buf.rank].to(device) for part in data(buf.num_ranks, step))
        sent = buf.dispatch(
            x, ids, weights, layout=layout, wire=wire, counts=counts, zero_copy=zero_copy, expert_alignment=alignment
        )  # fmt: skip
        y = torch.zeros(*sent.x.shape[:-1], HIDDEN, dtype=torch.bfloat16, device=device)
        arrive(device)
        used = (sent.topk_idx >= 0).any(1) if layout is COMPACT else (sent.row_source[..., 0] >= 0).flatten()
        arrive(device)
        used = used.cpu()
        assert (~used).any() or (counts == "host" and layout is not SLOTS)
        bad = sent.x.cpu().flatten(0, -2).float().isnan()
        assert not bad[used].any()
        assert bad[~used].all()
        if sent.sf is not None:
            bad = (sent.sf.cpu().flatten(0, -2).view(torch.uint8) == 0xFF).all(1)
            assert not bad[used].any()
            assert bad[~used].all()
        finish(sent)
        arrive(device)
        views = zero_copy and sent.x.data_ptr() in [p.payload(b).data_ptr() for p, b in memory_of(buf)]
        assert views == (zero_copy and not getattr(wire, "decode", False))
        assert sent.x.cpu().flatten(0, -2).float()[used].isnan().all() == views
    arrive(device)


def check_guards(buf):
    """A write behind a region is found at close. Closes the buffer."""
    runtime = buf._engine.runtime
    assert runtime.broken_guards() == []
    places, bank = memory_of(buf)[-1]
    own = places._own[bank]
    own.as_strided((1,), (1,), own.numel()).zero_()
    with pytest.raises(ew.ExpertWireError, match=rf"rank {buf.rank}: window guards at byte offsets \[\d+\]"):
        buf.close()


def memory_of(buf):
    """(places, bank) in the order in which memory was taken."""
    return [(p, bank) for p in buf._steps.engine.state._places.values() for bank in range(buf.settings.max_in_flight)]


def output_of_experts(sent, y):
    """y as combine wants it: in the shape of what was received, and NaN where no rows are."""
    given = torch.full((*sent.x.shape[:-1], y.shape[-1]), float("nan"), dtype=torch.bfloat16)
    given.view(-1, y.shape[-1])[: len(y)] = y
    return given.to(sent.x.device)


def arrive(device):
    """A copy to the host that waits behind a kernel may hold up the copies of the rank that the kernel waits for."""
    if device != "cpu":
        torch.cuda.current_stream().synchronize()


def same_dispatch(sent, mine, layout, step):
    num_rows = mine.x.numel() // mine.x.shape[-1]
    source = None
    if layout is COMPACT:
        used = torch.ones(num_rows, dtype=torch.bool)
        assert_equal(sent.topk_idx[:num_rows].cpu(), mine.topk_idx)
        assert_equal(sent.topk_weights[:num_rows].cpu(), mine.topk_weights)
        assert (sent.topk_idx[num_rows:] == -1).all()
    else:
        source = sent.row_source.cpu().view(-1, 3)
        assert_equal(source[:num_rows], mine.row_source.view(-1, 3))
        assert (source[num_rows:] == -1).all()
        used = mine.row_source.view(-1, 3)[:, 0] >= 0
        assert_equal(sent.expert_offsets.cpu(), mine.expert_offsets)
        assert_equal(sent.num_padded_tokens_per_expert.cpu(), mine.num_padded_tokens_per_expert)
    assert_equal(sent.num_tokens_per_expert.cpu(), mine.num_tokens_per_expert)
    assert_equal(sent.num_tokens_per_rank.cpu(), mine.num_tokens_per_rank)
    got = sent.x.reshape(-1, sent.x.shape[-1])[:num_rows].view(torch.uint8).cpu()
    assert_equal(got[used], mine.x.reshape(num_rows, mine.x.shape[-1]).view(torch.uint8)[used])
    if mine.sf is not None:
        got = sent.sf.reshape(-1, sent.sf.shape[-1])[:num_rows].cpu()
        assert_equal(got[used], mine.sf.reshape(num_rows, mine.sf.shape[-1])[used])
