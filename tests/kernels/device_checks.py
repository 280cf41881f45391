"""One rank's calls on a device, compared with the oracle; `buf` is a Buffer, or looks like one."""

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
