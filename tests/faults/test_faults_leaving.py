"""C25 (e): leaving in every order, often, and without saying so; exit codes; nothing stays behind."""

import gc
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from fault_ranks import dispatch, expected, gather, make, open_descriptors, resident_bytes, round_trip, shared_memory

import expertwire as ew
from expertwire.testing import Processes


@pytest.fixture(scope="module")
def processes():
    with Processes(4) as crew:
        yield crew


# -- exit codes --------------------------------------------------------------------------------------------------

SCRIPT = """
    import os, signal, sys
    from datetime import timedelta
    import torch.distributed as dist
    from fault_ranks import dispatch, make, round_trip
    import expertwire as ew

    rank, how, store = int(sys.argv[1]), sys.argv[2], dist.FileStore(sys.argv[3], 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    buf = make(dist.group.WORLD, on_timeout="mask" if how == "masked" else "raise")
    round_trip(buf)
    if how == "without close":
        held = dispatch(buf, zero_copy=True), dispatch(buf, defer_receive=True)
        dist.destroy_process_group()  # gloo aborts now and then at exit without this
        sys.exit(0)
    if how == "in flight":
        with buf:
            held = dispatch(buf), dispatch(buf, defer_receive=True)
    if rank == 1:
        os._exit(0)
    if how == "peer left":
        try:
            dispatch(buf)
            raise SystemExit("a dispatch with a rank that is gone?")
        except ew.PeerLost as error:
            assert "rank(s) [1]" in str(error), error
    if how == "masked":
        dispatch(buf)
        assert buf.masked_ranks == (1,)
    buf.close()
    buf.close()
    assert "closed" in repr(buf)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["without close", "in flight", "peer left", "masked"])
def test_c25e_exit_codes_are_zero(tmp_path, how):
    before = shared_memory()
    script = tmp_path / "leave.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error::ResourceWarning", str(script), str(rank), how, str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        answers = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], answers
    assert "Traceback" not in "".join(answers)
    assert "expertwire" not in "".join(answers)
    assert shared_memory() == before


# -- again and again ---------------------------------------------------------------------------------------------


def create_and_close(group, cycles):
    """Descriptors, mappings and memory are the same after many buffers as after a few."""

    def cycle():
        with make(group, debug_poison=False) as buf:
            round_trip(buf)
            held = dispatch(buf)
        buf.close()
        assert torch.equal(held.x, held.x.clone()), "what was returned outlives the buffer"

    for _ in range(5):
        cycle()
    gc.collect()
    before, memory = open_descriptors(), resident_bytes()
    assert before[2] == 0, "windows are unmapped by close()"
    for _ in range(cycles):
        cycle()
    assert open_descriptors() == before
    gc.collect()
    return resident_bytes() - memory


def test_c25e_fifty_create_close_cycles(processes):
    growth = processes.run(create_and_close, 50, num_ranks=2)
    assert max(growth) < 8 << 20


def create_and_drop(group, cycles):
    """Without close(), the garbage collector gives everything back, and says nothing to anybody."""
    for _ in range(2):
        round_trip(make(group))
    gc.collect()
    gather(group, None)
    before = open_descriptors()
    for _ in range(cycles):
        round_trip(make(group))
        gather(group, None)
    gc.collect()
    assert open_descriptors() == before


def test_buffers_dropped_without_close(processes):
    processes.run(create_and_drop, 10, num_ranks=2)


def closed_but_kept(group):
    """close() unmaps the windows although the buffer object lives on."""
    buf = make(group)
    round_trip(buf)
    assert open_descriptors()[2] > 0
    gather(group, None)
    buf.close()
    assert open_descriptors()[2] == 0
    for call in (lambda: dispatch(buf), lambda: buf.combine(torch.empty(0, 64), None)):
        with pytest.raises(ew.BufferClosed, match=f"rank {buf.rank}: this buffer is closed"):
            call()
    assert buf.statistics().rows_sent[buf.rank] > 0
    assert buf.masked_ranks == ()


def test_close_unmaps_the_windows(processes):
    processes.run(closed_but_kept, num_ranks=2)


def creation_fails(group):
    """A window that cannot be had is an error on all ranks, says how much was wanted, and leaks nothing."""
    before, _, _ = open_descriptors()
    for _ in range(3):
        with pytest.raises(ew.TransportUnavailable, match=r"\d{12,} bytes"):
            ew.Buffer(group, num_experts=4, hidden=1 << 20, num_topk=64, num_max_tokens_per_rank=1 << 17)
    memfds, _, windows = open_descriptors()
    assert (memfds, windows) == (before, 0)
    with make(group) as buf:
        round_trip(buf)


def test_a_window_that_does_not_fit(processes):
    processes.run(creation_fails, num_ranks=2)


def test_a_window_that_does_not_fit_in_one_process():
    ew.World(2).run(creation_fails)


# -- side by side ------------------------------------------------------------------------------------------------


def two_groups(group):
    """Two groups with two buffers each on one host, at the same time, do not mix."""
    me = dist.get_rank(group)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    crossed = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, other = halves[me // 2], crossed[me % 2]
    buffers = [make(mine), make(other), make(group), make(mine, on_timeout="mask")]
    for repeat in range(6):
        sent = [dispatch(buf, defer_receive=True) for buf in buffers]
        for s in sent if repeat % 2 else sent[::-1]:
            s.hook()
        order = [*zip(buffers, sent, strict=True)]
        for buf, s in order[repeat % 4 :] + order[: repeat % 4]:
            assert torch.equal(buf.combine(s.x, s.handle).x, expected(buf))
    if me == 3:  # leaves two of its groups; the rest goes on
        buffers[0].close()
        buffers[3].close()
    for buf in buffers[1:3] if me >= 2 else buffers:
        round_trip(buf)
    gather(group, None)
    for buf in buffers:
        buf.close()


def test_two_groups_and_many_buffers_on_one_host(processes):
    processes.run(two_groups)
