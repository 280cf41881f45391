"""Gradients and routed weights of a GPU's calls, with kernels in the interpreter and one process per rank."""

import importlib.util

import pytest
import torch
from device_checks import COMPACT, EXPERTS, HIDDEN, MAJOR, SLOTS, TOPK
from gradient_checks import check_gradients
from interpreted_buffer import interpreted_buffer

from expertwire.errors import HandleError, InvalidArgument
from expertwire.formats import FP8Block
from expertwire.testing import random_rows, random_weights, uniform_routing
from expertwire.topology import Placement

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

UNEVEN = Placement((2, 0, 0, 2) * 4)  # rank 1 has no experts


def rank_work(group, layout, options, placement):
    check_gradients(interpreted_buffer(group, placement), layout, **options)
    torch.distributed.barrier(group)


NUM_PROCESSES = 3


CASES = [
    (COMPACT, {}, 3, None),
    (COMPACT, {"weighted": False, "chained": False, "counts": "device"}, 2, None),
    (COMPACT, {"wire": FP8Block(decode=True), "repeats": True, "exact": False}, 1, None),
    (MAJOR, {"alignment": 4, "deferred": True}, 3, None),
    (MAJOR, {"chained": False, "repeats": True, "exact": False, "steps": 1}, 3, UNEVEN),
    (MAJOR, {"weighted": False, "counts": "device", "alignment": 4}, 1, None),
    (SLOTS, {"counts": "device"}, 2, None),
    (SLOTS, {"chained": False, "exact": False, "steps": 1}, 3, UNEVEN),
]


@pytest.mark.parametrize(("layout", "options", "num_ranks", "placement"), CASES, ids=str)
def test_gradients(processes, layout, options, num_ranks, placement):
    processes.run(rank_work, layout, options, placement, num_ranks=num_ranks, timeout_s=120)


def batch():
    return random_rows(1, 5, HIDDEN), uniform_routing(1, 5, TOPK, EXPERTS), random_weights(1, 5, TOPK)


def illegal_calls(group):
    buf = interpreted_buffer(group)
    x, ids, weights = batch()
    x.requires_grad_()
    with pytest.raises(InvalidArgument, match="decode=True"):
        buf.dispatch(x, ids, wire=FP8Block())
    with pytest.raises(InvalidArgument, match="zero_copy"):
        buf.dispatch(x, ids, zero_copy=True)
    sent = buf.dispatch(x, ids, weights, layout=MAJOR)
    with pytest.raises(InvalidArgument, match="COMPACT only"):
        buf.combine(sent.x, sent.handle, topk_weights=weights)
    y = sent.x.detach().clone().requires_grad_()
    back = buf.combine(y, sent.handle)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        back.x.sum().backward()
    with torch.no_grad():
        assert not buf.dispatch(x, ids).x.requires_grad
    assert not buf.dispatch(x.detach(), ids, weights, layout=MAJOR).x.requires_grad


def test_what_is_illegal_says_so(processes):
    processes.run(illegal_calls, num_ranks=1)


def rows_in_memory_of_the_buffer(group):
    """What combine read in place is overwritten before the backward pass, which has a copy."""
    buf = interpreted_buffer(group)
    x, ids, weights = batch()
    grads = []
    for in_place in (True, False):
        sent = buf.dispatch(x, ids, weights, layout=MAJOR, zero_copy=True)
        y = sent.x.clone()
        if in_place:
            y = buf.combine_input(sent.handle)
            y.copy_(sent.x)
        y = y.detach().requires_grad_()
        bias = torch.zeros_like(x).requires_grad_()
        sent.handle.topk_weights = weights.clone().requires_grad_()
        back = buf.combine(y, sent.handle, bias=bias)
        if in_place:
            buf.combine_input(sent.handle).fill_(7)
        back.x.backward(x)
        grads.append((y.grad, sent.handle.topk_weights.grad, bias.grad))
    for seen, wanted in zip(*grads, strict=True):
        assert torch.equal(seen, wanted)


def test_rows_in_memory_of_the_buffer(processes):
    processes.run(rows_in_memory_of_the_buffer, num_ranks=1)


def rows_overwritten_before_the_hook(group):
    """The weights' gradients need combine's x as it was sent; what came back is right at any rate."""
    buf = interpreted_buffer(group)
    x, ids, weights = batch()
    for overwritten in (True, False):
        weights = weights.detach().clone().requires_grad_()
        sent = buf.dispatch(x, ids, weights, layout=MAJOR)
        y = sent.x.detach().clone()
        pending = buf.combine(y, sent.handle, defer_receive=True)
        if overwritten:
            y.zero_()
        back = pending.hook().x
        if overwritten:
            wanted = back.detach().clone()
            with pytest.raises(RuntimeError, match=r"x, needed for gradient .* modified by an inplace operation"):
                back.float().sum().backward()
        else:
            assert torch.equal(back, wanted)
            back.float().sum().backward()
            torch.testing.assert_close(weights.grad, x.float().sum(dim=1, keepdim=True).expand(5, TOPK))
    torch.distributed.barrier(group)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rows_overwritten_before_the_hook(processes, num_ranks):
    processes.run(rows_overwritten_before_the_hook, num_ranks=num_ranks)


def a_deferred_combine_in_the_way(group):
    buf = interpreted_buffer(group)
    x, ids, _ = batch()
    sent = buf.dispatch(x.requires_grad_(), ids)
    late = buf.combine(sent.x.detach(), sent.handle, defer_receive=True)
    with pytest.raises(HandleError, match="hook"):
        sent.x.sum().backward(retain_graph=True)
    assert late.hook().x.requires_grad
    sent.x.float().sum().backward()
    num_copies = torch.stack([(ids // (EXPERTS // 2) == rank).any(dim=1) for rank in range(2)]).sum(dim=0)
    assert torch.equal(x.grad, num_copies[:, None].expand_as(x).bfloat16())
    torch.distributed.barrier(group)


def test_a_deferred_combine_in_the_way(processes):
    processes.run(a_deferred_combine_in_the_way, num_ranks=2)
