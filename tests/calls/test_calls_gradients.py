"""Backward passes of repeated and of deferred calls."""

import pytest
import torch
from small_buffer import make

import expertwire as ew
from expertwire.testing import payload, round_robin

COMPACT, EXPERT_MAJOR, EXPERT_SLOTS = ew.Layout


def inputs(buf):
    return payload(buf.rank, 6, 64), round_robin(buf.rank, 6, 2, 8)


def world(num_ranks, fn, *args):
    return ew.World(num_ranks).run(lambda rank: fn(rank, *args))


# -- repeated dispatches ---------------------------------------------------------------------------------------------


def repeated(rank, layout):
    """The repeat has a gradient of rows alone: the weights belong to the first dispatch."""
    with make(rank) as buf:
        x, ids = inputs(buf)
        weights = torch.rand(6, 2).requires_grad_()
        first, again = x.clone().requires_grad_(), x.clone().requires_grad_()
        sent = buf.dispatch(first, ids, weights, layout=layout)
        repeat = buf.dispatch(again, handle=sent.handle)
        if layout is COMPACT:
            assert torch.equal(repeat.topk_weights, sent.topk_weights.detach())
            assert not repeat.topk_weights.requires_grad
        repeat.x.float().sum().backward()
        copies = 2 if layout is EXPERT_MAJOR else (1 + (ids[:, :1] // 4 != ids[:, 1:] // 4).int())
        assert torch.equal(again.grad, (copies * torch.ones_like(x)).bfloat16())
        assert first.grad is None or not first.grad.any()
        assert weights.grad is None or not weights.grad.any()


@pytest.mark.parametrize("layout", [COMPACT, EXPERT_MAJOR])
def test_a_repeat_of_a_dispatch_with_weights(layout):
    world(2, repeated, layout)


# -- deferred combines -----------------------------------------------------------------------------------------------


def overwritten(rank, when):
    """The weights' gradients need combine's x as it was sent; what came back is right at any rate."""
    with make(rank) as buf:
        x, ids = inputs(buf)
        weights = torch.full((6, 2), 0.5, requires_grad=True)
        sent = buf.dispatch(x, ids, weights, layout=EXPERT_MAJOR)
        y = sent.x.detach().clone()
        pending = buf.combine(y, sent.handle, defer_receive=True)
        if when == "before the hook":
            y.zero_()
        back = pending.hook()
        if when == "after the hook":
            y.zero_()
        assert torch.equal(back.x, x)
        if when == "never":
            back.x.float().sum().backward()
            torch.testing.assert_close(weights.grad, x.float().sum(dim=1, keepdim=True).expand(6, 2))
        else:
            with pytest.raises(RuntimeError, match=r"x, needed for gradient .* modified by an inplace operation"):
                back.x.float().sum().backward()
        with torch.no_grad():
            sent = buf.dispatch(x, ids, weights, layout=EXPERT_MAJOR)
            assert torch.equal(buf.combine(sent.x, sent.handle).x, x)


@pytest.mark.parametrize("when", ["never", "before the hook", "after the hook"])
def test_rows_that_are_overwritten_before_a_backward_pass(when):
    world(2, overwritten, when)


def inference_mode(rank):
    with make(rank) as buf, torch.inference_mode():
        x, ids = inputs(buf)
        sent = buf.dispatch(x, ids, torch.full((6, 2), 0.5), layout=EXPERT_MAJOR)
        assert sent.x.is_inference()
        assert torch.equal(buf.combine(sent.x, sent.handle).x, x)


def test_tensors_of_inference_mode():
    world(2, inference_mode)
