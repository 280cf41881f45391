"""C25 (a) and what follows: a rank that stops and wakes up again after the others have given it up."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from fault_ranks import (
    dispatch,
    expected,
    gather,
    make,
    num_missing,
    open_descriptors,
    round_trip,
    tokens,
    wait_until_stopped,
)

import expertwire as ew
from expertwire import engines
from expertwire.testing import Processes

TIMEOUT_S = 1.0
LATE = 2


@pytest.fixture(scope="module")
def processes():
    with Processes(3) as crew:
        yield crew


def world(num_ranks, fn, *args):
    return ew.World(num_ranks).run(lambda rank: fn(rank, *args))


# -- stopped processes -------------------------------------------------------------------------------------------


def stop_before_combine(group, mode):
    buf = make(group, on_timeout=mode)
    survivors, pids = dist.new_group([0, 1]), gather(group, os.getpid())
    round_trip(buf)
    sent = dispatch(buf)
    gather(group, None)  # all are here: what is measured below is one time-out
    buf.timeout_s = TIMEOUT_S
    if buf.rank == LATE:
        os.kill(os.getpid(), signal.SIGSTOP)
        return wake_up(buf, sent, mode, group)
    wait_until_stopped(pids[LATE])
    began = time.monotonic()
    if mode == "mask":
        back = buf.combine(sent.x, sent.handle)
        assert TIMEOUT_S <= time.monotonic() - began < TIMEOUT_S + 5
        assert back.num_missing == num_missing(buf, [LATE])
        assert torch.equal(back.x, expected(buf, [LATE]))
        assert buf.masked_ranks == (LATE,)
    else:
        with pytest.raises(ew.PeerTimeout) as caught:
            buf.combine(sent.x, sent.handle)
        assert TIMEOUT_S <= time.monotonic() - began < TIMEOUT_S + 5
        assert not isinstance(caught.value, ew.PeerLost)
        (missed,) = caught.value.missed
        assert (missed.peer, missed.alive, missed.expected_epoch) == (LATE, True, 2)
        assert (caught.value.rank, caught.value.phase, caught.value.peers) == (buf.rank, "combine receive", (LATE,))
        assert caught.value.waited_s >= TIMEOUT_S
        for part in ("process alive", "timeout_s", f"rank {buf.rank} waited"):
            assert part in str(caught.value)
        buf.close()
    began = time.monotonic()
    if mode == "mask":
        for _ in range(3):  # nobody waits for it again
            round_trip(buf, [LATE])
        assert time.monotonic() - began < TIMEOUT_S
    gather(survivors, None)
    if buf.rank == 0:
        os.kill(pids[LATE], signal.SIGCONT)
    if mode == "mask":  # it is awake now and does whatever it does: these results stay exact
        for _ in range(50):
            round_trip(buf, [LATE])
    gather(group, None)
    buf.close()
    return open_descriptors()[2]


def wake_up(buf, sent, mode, group):
    """The late rank finds out that it was given up."""
    if mode == "mask":
        back = buf.combine(sent.x, sent.handle)
        assert buf.masked_ranks == (0, 1)
        assert back.num_missing == num_missing(buf, [0, 1])
        assert torch.equal(back.x, expected(buf, [0, 1]))
        for _ in range(5):  # it goes on alone
            round_trip(buf, [0, 1])
    else:
        back = buf.combine(sent.x, sent.handle)  # what they sent before they gave up is still there
        assert torch.equal(back.x, expected(buf))
        late = rf"rank {LATE} waited .* for rank\(s\) \[.*closed its buffer, process alive.* given up on this one"
        with pytest.raises(ew.PeerLost, match=late):
            dispatch(buf)
    gather(group, None)
    buf.close()
    return open_descriptors()[2]


@pytest.mark.parametrize("mode", ["mask", "raise"])
def test_a_stopped_process_wakes_up(processes, mode):
    assert processes.run(stop_before_combine, mode) == [0, 0, 0]


def stop_at_creation(group):
    """The time-out covers the creation barrier as well."""
    survivors, pids = dist.new_group([0, 1]), gather(group, os.getpid())
    real = engines.HostRuntime.run
    if pids[LATE] == os.getpid():

        def stopping(self, phase, *args):
            os.kill(os.getpid(), signal.SIGSTOP)
            return real(self, phase, *args)

        engines.HostRuntime.run = stopping
    before = open_descriptors()
    error = None
    try:
        make(group, timeout_s=TIMEOUT_S).close()
    except ew.PeerTimeout as caught:
        error = str(caught)
    finally:
        engines.HostRuntime.run = real
    if pids[LATE] == os.getpid():
        gather(group, None)
        return error
    assert "rank(s) [2]" in error
    assert "'creation barrier'" in error
    assert "process alive" in error
    assert open_descriptors() == before
    wait_until_stopped(pids[LATE])
    gather(survivors, None)
    if pids[0] == os.getpid():
        os.kill(pids[LATE], signal.SIGCONT)
    gather(group, None)
    return error


def test_a_process_stops_during_creation(processes):
    processes.run(stop_at_creation)


# -- in one process: late ranks under control --------------------------------------------------------------------


class Late:
    """Lets the late rank go on once `beats` looks at the clock have passed in a waiting rank."""

    def __init__(self):
        self.go = threading.Event()

    def after_beats(self, buf, beats):
        transport, seen = buf._engine.runtime.transport, []
        look = transport.raise_if_aborted

        def counting():
            seen.append(None)
            if len(seen) == beats:
                self.go.set()
            look()

        transport.raise_if_aborted = counting


def late_but_in_time(rank, late, timeout_s):
    """C25 (a): waiting is not failing."""
    buf = make(rank, timeout_s=timeout_s, on_timeout="mask")
    if buf.rank == 0:
        late.after_beats(buf, 20)
    if buf.rank == 3:
        assert late.go.wait(60)
    round_trip(buf)
    assert buf.masked_ranks == ()
    wait_s = buf.statistics().wait_s
    buf.close()
    return wait_s


@pytest.mark.parametrize("timeout_s", [60.0, None])
def test_c25a_a_rank_that_is_late_but_in_time(timeout_s):
    waits = world(8, late_but_in_time, Late(), timeout_s)
    assert waits[0][3] > 0.02
    assert max(waits[0]) == waits[0][3], "time is charged to the rank that was late"


def mask_without_waiting(rank, gone):
    """Rank 3 leaves before its dispatch; the numbers of C25."""
    buf = make(rank, on_timeout="mask")
    round_trip(buf)
    if buf.rank == gone:
        return None
    back = round_trip(buf, [gone])
    home = (buf.rank + torch.arange(16)) % 8
    single = ((home == gone) | (home == gone - 1))[:, None]
    assert torch.equal(back.x, torch.where(single, 1, 2) * tokens(buf))
    assert back.num_missing == 4
    began = time.monotonic()
    for _ in range(2):
        assert round_trip(buf, [gone]).num_missing == 4
    assert buf.masked_ranks == (gone,)
    buf.close()
    return time.monotonic() - began


def test_c25bd_the_numbers_for_eight_ranks():
    world(8, mask_without_waiting, 3)


def left_by_close(rank, mode):
    """A peer that closed its buffer is gone, though its thread lives."""
    buf = make(rank, on_timeout=mode)
    round_trip(buf)
    if buf.rank == 1:
        buf.close()
        rank.barrier()
        return
    if mode == "mask":
        round_trip(buf, [1])
        assert buf.masked_ranks == (1,)
    else:
        with pytest.raises(ew.PeerLost, match=r"rank\(s\) \[1\]: rank 1: .*closed its buffer") as caught:
            dispatch(buf)
        (missed,) = caught.value.missed
        assert (missed.alive, missed.closed) == (True, True)
    buf.close()
    rank.barrier()


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_c25e_a_peer_left_by_close(mode):
    world(3, left_by_close, mode)


def change_the_timeout(rank, gate):
    buf = make(rank, timeout_s=None)
    assert buf.timeout_s is None
    for wrong in (0, -1, "5", True, float("nan")):
        with pytest.raises(ew.InvalidArgument, match="timeout_s must be"):
            buf.timeout_s = wrong
    round_trip(buf)
    if buf.rank == 1:
        assert gate.wait(60)
        return
    buf.timeout_s = 0.05
    assert buf.timeout_s == 0.05
    with pytest.raises(ew.PeerTimeout, match=r"waited 0\.\d s in phase 'dispatch receive' for rank\(s\) \[1\]"):
        dispatch(buf)
    gate.set()


def test_c25e_the_timeout_is_changed_after_creation():
    world(2, change_the_timeout, threading.Event())


def deferred_receive_times_out(rank, gate):
    """The receive half has the same limits as the whole, and a failed hook stays failed."""
    buf = make(rank, timeout_s=0.05)
    if buf.rank == 1:
        assert gate.wait(60)
        return
    sent = dispatch(buf, defer_receive=True)
    with pytest.raises(ew.PeerTimeout, match="dispatch receive"):
        sent.hook()
    with pytest.raises(ew.PeerTimeout, match="dispatch receive"):
        sent.hook()
    with pytest.raises(ew.BufferClosed, match="can no longer be used"):
        dispatch(buf)
    gate.set()


def test_a_deferred_receive_times_out():
    world(2, deferred_receive_times_out, threading.Event())


def everybody_is_late(rank, gate):
    """All that are missing are named, not only the first."""
    buf = make(rank, timeout_s=0.05)
    if buf.rank != 1:
        assert gate.wait(60)
        return
    with pytest.raises(ew.PeerTimeout) as caught:
        dispatch(buf)
    assert caught.value.peers == (0, 2, 3)
    assert all(m.seen_epoch == 0 and "nothing yet" in str(m) for m in caught.value.missed)
    gate.set()


def test_every_missing_rank_is_named():
    world(4, everybody_is_late, threading.Event())


# -- a masked rank that is in the middle of a write --------------------------------------------------------------


def write_late(rank, stalled, given_up, sent_by_2, resume, written):
    """Rank 1 stalls in its combine put to rank 0, is masked, and writes when rank 2's rows lie in the same places."""
    buf = make(rank, timeout_s=0.2, on_timeout="mask", debug_poison=False, max_in_flight=1)
    runtime, x = buf._engine.runtime, tokens(buf)
    to_rank_1, to_rank_2 = torch.full((16, 2), -1), torch.full((16, 2), -1)
    to_rank_1[:, 0], to_rank_2[:, 0] = 8, 16
    sent = buf.dispatch(x, to_rank_1)
    if buf.rank == 1:
        write_header, publish = runtime.write_header, runtime.publish

        def late_header(peer, *args):
            if peer == 0:
                stalled.set()
                assert resume.wait(60)
            return write_header(peer, *args)

        def watched_publish(peer, word, *args):
            publish(peer, word, *args)
            if peer == 0 and word.purpose == "combine_ready":
                written.set()

        runtime.write_header, runtime.publish = late_header, watched_publish
        buf.combine(sent.x, sent.handle)
        return None
    assert stalled.wait(60)
    back = buf.combine(sent.x, sent.handle)
    assert back.num_missing == (16 if buf.rank == 0 else 0)
    if buf.rank == 0:
        given_up.set()
    assert given_up.wait(60)
    sent = buf.dispatch(x, to_rank_2)
    assert buf.masked_ranks == (1,)
    if buf.rank == 2:
        buf.combine(sent.x + 1, sent.handle, defer_receive=True)
        sent_by_2.set()
        return None
    back = buf.combine(sent.x, sent.handle, defer_receive=True)
    assert sent_by_2.wait(60)
    resume.set()
    assert written.wait(60)
    return torch.equal(back.hook().x, x + 1)


def test_a_masked_rank_that_wakes_up_in_a_put_corrupts_nobody():
    answers = world(3, write_late, *(threading.Event() for _ in range(5)))
    assert answers[0] is True


# -- a slow writer after a refusal -------------------------------------------------------------------------------


def refused_and_slow(rank, stalled, sent_by_2, resume, depth):
    """Rank 0 refuses a combine that rank 1 is still writing to it, while rank 2 writes the next one already."""
    buf = make(rank, max_in_flight=depth)
    runtime, x = buf._engine.runtime, tokens(buf)
    to_rank_1, to_rank_2 = torch.full((16, 2), -1), torch.full((16, 2), -1)
    to_rank_1[:, 0], to_rank_2[:, 0] = 8, 16
    first = buf.dispatch(x, to_rank_1)
    buf.combine(first.x, first.handle)
    second = buf.dispatch(x, to_rank_2)
    buf.combine(second.x, second.handle)
    rank.barrier()
    if buf.rank == 0:
        with pytest.raises(ew.InvalidArgument, match="float32"):
            buf.combine(first.x.float(), first.handle)
    else:
        write_header = runtime.write_header

        def late_header(peer, *args):
            if buf.rank == 1 and peer == 0 and not stalled.is_set():
                stalled.set()
                assert resume.wait(60)
            return write_header(peer, *args)

        runtime.write_header = late_header
        if buf.rank == 2:
            assert stalled.wait(60)
        with pytest.raises(ew.PeerRefused, match="rank 0"):
            buf.combine(first.x, first.handle)
    # Everybody goes on to combines along the other routing.
    if buf.rank == 2:
        publish = runtime.publish

        def watched_publish(peer, word, *args):
            publish(peer, word, *args)
            if peer == 0 and word.purpose == "combine_ready":
                sent_by_2.set()

        runtime.publish = watched_publish
    if buf.rank == 0:
        # Rank 2's rows are either here before rank 1 writes, or wait until it has written.
        sent_by_2.wait(0.3)
        resume.set()
    results = [buf.combine(second.x + i, second.handle).x for i in (1, 2, 3)]
    return all(torch.equal(result, x + i) for i, result in enumerate(results, start=1))


def test_a_slow_writer_after_a_refusal_corrupts_nobody():
    answers = world(3, refused_and_slow, *(threading.Event() for _ in range(3)), 1)
    assert answers == [True, True, True]
