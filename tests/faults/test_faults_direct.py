"""A rank that ends while its peers' rows have a place in each other's outputs; and tensors that outlive it all."""

import gc
import os
import signal
import time

import pytest
import torch
from fault_ranks import dispatch, expected, gather, make, open_descriptors, round_trip

import expertwire as ew
from expertwire.testing import Processes

VICTIM = 2


def direct(group, **options):
    buf = make(group, **options)
    buf._engine.announce_from_bytes = 0
    return buf


def die_at(buf, place):
    """When the first peer has got its place, or its rows, and the others nothing; or with torn rows."""
    runtime, seen = buf._engine.runtime, []
    publish, gather_rows = runtime.publish, runtime.kernels.gather_rows

    def dying(peer, word, *args):
        if word.purpose == {"places": "dispatch_place_ready", "landing": "dispatch_landing_ready"}.get(place):
            if seen:
                os.kill(os.getpid(), signal.SIGKILL)
            seen.append(peer)
        publish(peer, word, *args)

    class Torn:
        def __getattr__(self, name):
            return getattr(kernels, name)

        def gather_rows(self, source, tokens, out, stride, num_bytes, stream):
            gather_rows(source, tokens[:1], out, stride, num_bytes // 2, stream)
            os.kill(os.getpid(), signal.SIGKILL)

    runtime.publish = dying
    if place == "rows":
        kernels, runtime.kernels = runtime.kernels, Torn()


def lose(group, place):
    buf = direct(group)
    for _ in range(3):
        round_trip(buf)
    gather(group, None)
    if buf.rank == VICTIM:
        die_at(buf, place)
        dispatch(buf)
        raise AssertionError("should be gone")
    began, first = time.monotonic(), None
    try:
        sent = dispatch(buf)
    except ew.PeerLost as error:
        first = error
    if first is None:  # this rank had all it needed, and learns it in the next call
        with pytest.raises(ew.PeerLost) as caught:
            buf.combine(sent.x, sent.handle)
        first = caught.value
    assert time.monotonic() - began < 10, "noticed at once, not after timeout_s"
    assert VICTIM in first.peers
    assert buf.rank not in first.peers
    with pytest.raises(ew.BufferClosed, match="can no longer be used"):
        dispatch(buf)
    buf.close()


def lose_a_rank(group, place):
    lose(group, place)
    gc.collect()
    return open_descriptors()[::2]


@pytest.mark.parametrize("place", ["places", "rows", "landing"])
def test_a_lost_rank(place):
    with Processes(3) as processes:
        outcomes = processes.outcomes(lose_a_rank, place)
    for outcome in outcomes[:VICTIM]:
        assert outcome.ok, outcome.error
        assert outcome.value == (0, 0)
    assert outcomes[VICTIM].exit_code == -signal.SIGKILL


def outlive(group):
    """Received rows stay after close(), also of the peers that wrote them, and their memory goes when they go."""
    kept = []
    for _ in range(3):
        with direct(group) as buf:
            sent = dispatch(buf)
            assert torch.equal(buf.combine(sent.x, sent.handle).x, expected(buf))
            kept.append((sent.x, sent.x.clone()))
    gather(group, None)
    assert all(torch.equal(seen, copy) for seen, copy in kept)
    descriptors, _, mapped = open_descriptors()
    assert descriptors == mapped == len(kept), "only the own outputs are still mapped"
    for seen, _ in kept:
        seen.fill_(1)  # nobody else has it
    del kept, seen, sent, buf
    gc.collect()
    assert open_descriptors()[::2] == (0, 0)


def test_rows_outlive_their_buffer():
    with Processes(2) as processes:
        processes.run(outlive)


def out_of_memory(group):
    """Pages that cannot be had are no SIGBUS: rows take the window."""
    buf = direct(group, debug_poison=False)
    outputs = buf._engine.runtime.outputs
    outputs._first, first = 0, outputs._first  # nothing is mapped there: ENOMEM
    for _ in range(3):
        sent = dispatch(buf)
        assert torch.equal(buf.combine(sent.x, sent.handle).x, expected(buf))
    assert outputs._touched == 0
    assert not outputs._taken
    outputs._first = first
    round_trip(buf)
    assert outputs._touched > 0
    buf.close()


def test_pages_that_cannot_be_had():
    with Processes(2) as processes:
        processes.run(out_of_memory)
