"""Gradients and routed weights of one rank's calls on a device, against the oracle; `buf` as in `device_checks`."""

import torch
from device_checks import CAPACITY, COMPACT, HIDDEN, TOPK, arrive, data

from expertwire import reference
from expertwire.testing import assert_equal, random_rows, random_weights


def integers(seed, rows):
    """Rows whose products and sums are exact in float32, so that the order of sums does not matter."""
    return torch.randint(-4, 5, (rows, HIDDEN), generator=torch.Generator().manual_seed(seed)).bfloat16()


def check_gradients(
    buf, layout, *, wire=None, counts="host", alignment=1, deferred=False, chained=True, weighted=True, repeats=False,
    exact=True, steps=2,
):  # fmt: skip
    """Round trips with a cached dispatch, and their backward pass.

    `chained`: the experts double their rows; else their output is a leaf, with NaN where nobody may look, and the
    backward pass of dispatch hangs on the library's own edge. `exact`: sums over hidden are.
    """
    num_ranks, rank, device = buf.num_ranks, buf.rank, buf.settings.device
    for step in range(steps):
        xs, ids, weights = data(num_ranks, step, repeats)
        if exact:
            xs = [integers(step + r, len(x)) for r, x in enumerate(xs)]
        weights = weights if weighted else None
        routing = reference.route(
            ids, weights, placement=buf.settings.placement, layout=layout, expert_alignment=alignment, capacity=CAPACITY
        )
        want = reference.dispatch(xs, routing, wire)
        reduce, back_weights = ("token", "rank")[step % 2], layout is COMPACT
        x, again = (xs[rank].clone().to(device).requires_grad_() for _ in range(2))
        topk_weights = None if weights is None else weights[rank].to(device).requires_grad_()
        sent = buf.dispatch(
            x, ids[rank].to(device), topk_weights, layout=layout, wire=wire, counts=counts, defer_receive=deferred,
            expert_alignment=alignment,
        )  # fmt: skip
        sent = sent.hook() if deferred else sent
        repeated = buf.dispatch(again, handle=sent.handle, wire=wire)
        arrive(device)
        ys = [2 * part.x for part in want]
        num_rows = sent.x.shape[:-1].numel()
        if chained:
            y = 2 * sent.x
        else:
            y = torch.full((num_rows, HIDDEN), float("nan"), dtype=torch.bfloat16)
            used = filled(want[rank], layout)
            y[: len(used)][used] = ys[rank].view(-1, HIDDEN)[used]
            y = y.to(device).view(sent.x.shape).requires_grad_()
        row_weights = [None if layout is not COMPACT else random_weights(40 + r, len(p.x), TOPK) for r, p in
                       enumerate(want)]  # fmt: skip
        given = None
        if back_weights:
            given = torch.full((num_rows, TOPK), float("nan"))
            given[: len(row_weights[rank])] = row_weights[rank]
            given = given.to(device)
            if weighted:  # chained, too
                used = torch.arange(num_rows, device=device)[:, None] < len(row_weights[rank])
                given = torch.where(used, given, 0.0) * 0 + 2 * sent.topk_weights
                row_weights = [2 * part.topk_weights for part in want]
            else:
                given.requires_grad_()
        bias = integers(900 + rank, len(x)).to(device).requires_grad_()
        back = buf.combine(
            y, sent.handle, topk_weights=given, bias=bias, reduce=reduce, defer_receive=deferred
        )  # fmt: skip
        back = back.hook() if deferred else back
        arrive(device)
        biases = [integers(900 + r, len(part)) for r, part in enumerate(xs)]
        returned = reference.combine(
            ys, routing, reduce=reduce, bias=[biases], topk_weights=row_weights if back_weights else None
        )
        assert_equal(back.x.detach().cpu(), returned[rank].x)
        if back_weights:
            assert_equal(back.topk_weights.detach().cpu(), returned[rank].topk_weights)
        # backward
        make = integers if exact else random_rows_of
        grads = [make(300 + step + r, len(part)) for r, part in enumerate(xs)]
        grad_weights = [random_weights(600 + r, len(part), TOPK) for r, part in enumerate(xs)] if back_weights else None
        grad_again = [make(700 + step + r, part.x.numel() // HIDDEN).view(part.x.shape) for r, part in enumerate(want)]
        fed = torch.full((num_rows, HIDDEN), float("nan"), dtype=torch.bfloat16)
        fed[: len(want[rank].x.view(-1, HIDDEN))] = grad_again[rank].view(-1, HIDDEN)
        outputs, fed = [back.x, repeated.x], [grads[rank].to(device), fed.to(device).view(repeated.x.shape)]
        if back_weights:
            outputs, fed = [*outputs, back.topk_weights], [*fed, grad_weights[rank].to(device)]
        torch.autograd.backward(outputs, fed)
        arrive(device)
        combined = reference.combine_backward(grads, ys, routing, grad_weights)
        through = reference.dispatch_backward(
            [2 * part.y if chained else torch.zeros_like(part.y) for part in combined],
            routing,
            [2 * part.topk_weights for part in combined] if back_weights and weighted else None,
        )
        assert_equal(x.grad.cpu(), through[rank].x)
        assert_equal(again.grad.cpu(), reference.dispatch_backward(grad_again, routing)[rank].x)
        assert_equal(bias.grad.cpu(), grads[rank])
        if not chained:
            seen, wanted = y.grad.cpu().view(-1, HIDDEN), combined[rank].y.view(-1, HIDDEN)
            assert_equal(seen[: len(wanted)], wanted)
            assert not seen[len(wanted) :].any()
        if topk_weights is not None:
            wanted = (through if layout is COMPACT else combined)[rank].topk_weights
            if exact or layout is COMPACT:
                assert_equal(topk_weights.grad.cpu(), wanted)
            else:
                torch.testing.assert_close(topk_weights.grad.cpu(), wanted, rtol=1e-5, atol=1e-3)
        elif back_weights:
            assert_equal(given.grad.cpu()[: len(want[rank].x)], combined[rank].topk_weights)
            assert not given.grad[len(want[rank].x) :].any()


def random_rows_of(seed, rows):
    return random_rows(seed, rows, HIDDEN)


def filled(part, layout):
    rows = part.x.numel() // HIDDEN
    return torch.ones(rows, dtype=torch.bool) if layout is COMPACT else part.row_source.view(-1, 3)[:, 0] >= 0
