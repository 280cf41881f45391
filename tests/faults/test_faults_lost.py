"""C25 (b), (c), (d) with real processes: a rank that ends, at any point. Survivors go on, or say who is missing."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from fault_ranks import dispatch, expected, make, num_missing, open_descriptors, round_trip, shared_memory

import expertwire as ew
from expertwire.testing import Processes

VICTIM = 2


def die(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


def die_while_signalling(buf, purpose, how):
    """After the first peer of this step has got its signal, and the others none."""
    runtime, sent = buf._engine.runtime, []
    publish = runtime.publish

    def dying(peer, word, *args):
        if word.purpose == purpose:
            if sent:
                die(how)
            sent.append(peer)
        publish(peer, word, *args)

    runtime.publish = dying


def die_while_writing(buf, how):
    """After the first put of a dispatch, and with half of the second, torn."""
    runtime, headers = buf._engine.runtime, []
    write_header = runtime.write_header

    def dying(peer, offset, *args):
        headers.append(peer)
        segment = write_header(peer, offset, *args)
        if len(headers) == 2:
            window, layout = runtime.transport.windows[peer], runtime.layout
            window[offset + 256 : offset + layout.dispatch_region_bytes // 2] = 0xFF
            die(how)
        return segment

    runtime.write_header = dying


def check_error(error, buf, phase):
    assert isinstance(error, ew.PeerLost)
    assert error.rank == buf.rank
    assert error.peers == (VICTIM,)
    assert error.phase == phase
    (missed,) = error.missed
    assert missed.peer == VICTIM
    assert missed.alive is False
    assert missed.seen_epoch < missed.expected_epoch
    text = str(error)
    for part in (f"rank {buf.rank} waited", f"'{phase}'", f"rank {VICTIM}: expected epoch", "process gone", "mask"):
        assert part in text, (part, text)


def lose_a_rank(group, place, how):
    """The victim ends at `place`. `strict` raises, `lenient` masks."""
    strict, lenient = make(group), make(group, on_timeout="mask")
    for buf in (strict, lenient):
        for _ in range(3):
            round_trip(buf)
    began = time.monotonic()
    if strict.rank == VICTIM:
        if place == "before dispatch":
            die(how)
        if place == "inside dispatch":
            die_while_writing(lenient, how)
        sent = dispatch(lenient)
        dispatch(strict)
        if place == "between":
            die(how)
        if place == "inside combine":
            die_while_signalling(lenient, "combine_ready", how)
        lenient.combine(sent.x, sent.handle)
        raise AssertionError("should be gone")

    # Masking. One peer still gets the victim's last dispatch or combine, the other does not.
    sent = dispatch(lenient)
    got_rows = sent.num_tokens_per_rank_list[VICTIM] > 0
    assert got_rows == (VICTIM not in sent.missing_ranks)
    if place != "inside dispatch":
        assert got_rows == (place != "before dispatch")
    if got_rows and place != "inside dispatch":
        strict_sent = dispatch(strict)
    back = lenient.combine(sent.x, sent.handle)
    complete = place == "inside combine" and back.num_missing == 0
    assert back.num_missing == num_missing(lenient, [] if complete else [VICTIM])
    assert torch.equal(back.x, expected(lenient, [] if complete else [VICTIM]))

    # Raising.
    if place in ("before dispatch", "inside dispatch"):
        with pytest.raises(ew.PeerLost) as caught:
            dispatch(strict)
        check_error(caught.value, strict, "dispatch receive")
    else:
        with pytest.raises(ew.PeerLost) as caught:
            strict.combine(strict_sent.x, strict_sent.handle)
        check_error(caught.value, strict, "combine receive")
    with pytest.raises(ew.BufferClosed, match=r"can no longer be used.*failed in the middle") as caught:
        dispatch(strict)
    assert isinstance(caught.value.__cause__, ew.PeerLost)

    # From now on nobody waits for the victim, and nothing is renormalised.
    for _ in range(3):
        back = round_trip(lenient, [VICTIM])
        assert back.num_missing == num_missing(lenient, [VICTIM])
    assert lenient.masked_ranks == (VICTIM,)
    assert time.monotonic() - began < 20, "a lost process is noticed at once, not after timeout_s"
    for buf in (strict, lenient):
        buf.close()
        buf.close()
    memfds, _, windows = open_descriptors()
    assert (memfds, windows) == (0, 0)
    return complete


@pytest.mark.parametrize(
    ("place", "how"),
    [
        ("before dispatch", "exit"),
        ("inside dispatch", "kill"),
        ("between", "exit"),
        ("inside combine", "kill"),
    ],
)
def test_a_lost_rank(place, how):
    before = shared_memory()
    with Processes(3) as processes:
        outcomes = processes.outcomes(lose_a_rank, place, how)
    for outcome in outcomes[:VICTIM]:
        assert outcome.ok, outcome.error
    assert outcomes[VICTIM].exit_code == (-signal.SIGKILL if how == "kill" else 0)
    if place == "inside combine":
        assert [outcome.value for outcome in outcomes[:VICTIM]] == [True, False]
    assert shared_memory() == before


def lose_two_of_eight(group):
    rank = dist.get_rank(group)
    buf = make(group, on_timeout="mask")
    round_trip(buf)
    if rank == 3:
        die("kill")
    round_trip(buf, [3])
    assert buf.masked_ranks == (3,)
    sent = dispatch(buf)
    if rank == 6:
        die("exit")
    back = buf.combine(sent.x, sent.handle)
    assert torch.equal(back.x, expected(buf, [3, 6]))
    began = time.monotonic()
    for _ in range(2):
        round_trip(buf, [3, 6])
    assert time.monotonic() - began < 10
    assert buf.masked_ranks == (3, 6)
    buf.close()


@pytest.mark.slow
def test_two_of_eight_processes_are_lost():
    with Processes(8) as processes:
        outcomes = processes.outcomes(lose_two_of_eight)
    assert [o.rank for o in outcomes if o.error is not None] == [], [o.error for o in outcomes if o.error]
    assert {o.rank: o.exit_code for o in outcomes if o.exit_code is not None} == {3: -9, 6: 0}
