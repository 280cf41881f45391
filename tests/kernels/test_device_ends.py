"""What a GPU's Buffer does when calls end otherwise than usual: released early, closed, without memory, in a capture.
Kernels in the interpreter and one process per rank."""

import importlib.util

import pytest
import torch
from device_checks import EXPERTS, HIDDEN, MAJOR, SLOTS, TOPK
from interpreted_buffer import interpreted_buffer

from expertwire.errors import BufferClosed, HandleError, PeerLost, TransportUnavailable
from expertwire.testing import assert_equal, random_rows, uniform_routing

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
NUM_PROCESSES = 2


def inputs(buf, number=0, tokens=5):
    seed = 10 * number + buf.rank
    return random_rows(seed, tokens, HIDDEN), uniform_routing(seed, tokens, TOPK, EXPERTS)


def released_early(group, over_rows):
    """Between the halves of a combine, and of a dispatch."""
    buf = interpreted_buffer(group, over_rows=over_rows)
    x, ids = inputs(buf)
    sent = buf.dispatch(x, ids, layout=MAJOR, zero_copy=True)
    back = buf.combine(sent.x * 2, sent.handle, defer_receive=True)
    with pytest.raises(HandleError, match=r"call its hook\(\) first"):
        sent.handle.release()
    buf.dispatch(x, ids, layout=MAJOR, zero_copy=True).handle.release()
    torch.distributed.barrier(group)
    assert_equal(back.hook().x, (2 * TOPK * x.float()).bfloat16())
    sent = buf.dispatch(x, ids, zero_copy=True, defer_receive=True)
    sent.handle.release()
    sent.hook()
    for _ in range(4):  # all banks can be used
        buf.dispatch(x, ids, zero_copy=True).handle.release()
    buf.synchronize()


@pytest.mark.parametrize("over_rows", [False, True])
def test_release_before_the_hook(processes, over_rows):
    processes.run(released_early, over_rows, num_ranks=2, timeout_s=120)


def after_close(group):
    buf = interpreted_buffer(group)
    x, ids = inputs(buf)
    held = buf.dispatch(x, ids, layout=SLOTS, zero_copy=True)
    late = buf.dispatch(x, ids, layout=MAJOR, defer_receive=True)
    torch.distributed.barrier(group)
    buf.close()
    torch.distributed.barrier(group)
    held.handle.release()  # nobody is told: peers' windows may be gone
    with pytest.raises(BufferClosed, match="not received before its buffer was closed"):
        late.hook()


def test_after_close_nothing_is_launched(processes):
    processes.run(after_close, num_ranks=2, timeout_s=120)


def a_peer_has_closed(group, layout):
    """It is named as closed, by the kernel that waits for it or, for a first call, on the host."""
    buf = interpreted_buffer(group)
    x, ids = inputs(buf)
    buf.dispatch(x, ids, layout=MAJOR).handle.release()
    torch.distributed.barrier(group)
    if buf.rank == 1:
        buf.close()
    torch.distributed.barrier(group)
    if buf.rank == 0:
        buf.timeout_s = 1.0
        with pytest.raises(PeerLost, match=r"rank 1: .*, closed its buffer, process alive") as caught:
            buf.dispatch(x, ids, layout=layout)
        assert caught.value.peers == (1,)
    torch.distributed.barrier(group)


@pytest.mark.parametrize("layout", [MAJOR, SLOTS])
def test_a_peer_that_closed_its_buffer_is_named_so(processes, layout):
    processes.run(a_peer_has_closed, layout, num_ranks=2, timeout_s=120)


def counts_of_the_caller(group):
    buf = interpreted_buffer(group)
    x, ids = inputs(buf)
    for layout, times in ((SLOTS, TOPK), (MAJOR, TOPK)):
        for counts in ("host", "device"):
            sent = buf.dispatch(x, ids, layout=layout, counts=counts)
            want = [t.clone() for t in (sent.expert_offsets, sent.num_padded_tokens_per_expert)]
            for mine in (sent.num_tokens_per_expert, sent.num_tokens_per_rank, sent.expert_offsets):
                mine.fill_(1 << 20)
            sent.num_padded_tokens_per_expert.zero_()
            assert_equal(buf.combine(sent.x, sent.handle).x, (times * x.float()).bfloat16())
            again = buf.dispatch(x, handle=sent.handle)
            assert_equal(again.expert_offsets, want[0])
            assert_equal(again.num_padded_tokens_per_expert, want[1])


def test_counts_are_the_callers_own(processes):
    processes.run(counts_of_the_caller, num_ranks=2, timeout_s=120)


def out_of_memory(group):
    buf = interpreted_buffer(group)
    x, ids = inputs(buf)
    buf.dispatch(x, ids).handle.release()
    take = buf._dispatch._take

    def fail(*call, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    for _ in range(3):
        buf._dispatch._take = fail
        with pytest.raises(torch.OutOfMemoryError):
            buf.dispatch(x, ids)
    buf._dispatch._take = take
    for _ in range(3):
        sent = buf.dispatch(x, ids)
        buf.combine(sent.x, sent.handle)
    buf.synchronize()


def test_a_call_without_memory_gives_its_bank_back(processes):
    processes.run(out_of_memory, num_ranks=2, timeout_s=120)


def waits_in_a_capture(group):
    buf = interpreted_buffer(group)
    x, ids = inputs(buf)
    sent = buf.dispatch(x, ids)
    buf.combine(sent.x, sent.handle)
    state = type(buf._steps.engine.state)
    capturing = state.capturing
    try:
        state.capturing = property(lambda self: True)
        for call in (lambda: buf.dispatch(x, ids), lambda: buf.dispatch(x, handle=sent.handle), buf.synchronize):
            with pytest.raises(TransportUnavailable, match="a graph cannot capture: use counts='device'"):
                call()
    finally:
        state.capturing = capturing
    sent = buf.dispatch(x, ids)
    owners = torch.tensor(buf.settings.placement.expert_ranks)[ids]
    served = torch.tensor([len(set(row)) for row in owners.tolist()])[:, None]
    assert_equal(buf.combine(sent.x, sent.handle).x, (served * x.float()).bfloat16())


def test_what_waits_for_the_device_cannot_be_captured(processes):
    processes.run(waits_in_a_capture, num_ranks=2, timeout_s=120)
