"""The test kit's processes: results in order, first failure with its rank, nothing left behind."""

import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from expertwire.errors import MissedSignal, PeerTimeout
from expertwire.testing import Processes, RankError, assert_equal, run_processes


def describe(group, factor):
    total = torch.tensor([dist.get_rank(group) + 1])
    dist.all_reduce(total, group=group)
    return dist.get_rank(group) * factor, dist.get_world_size(group), int(total), os.getpid()


def fail_on_one(group):
    if dist.get_rank(group) == 1:
        missed = MissedSignal(peer=0, expected_epoch=3, seen_epoch=2, seen_count=5, alive=True)
        raise PeerTimeout(1, "dispatch receive", [missed], 2.0, "hint")
    threading.Event().wait()  # only killing ends this


def die_on_one(group):
    if dist.get_rank(group) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def hang(group):
    threading.Event().wait()


def announce_and_hang(group):
    os.write(1, f"{os.getpid()}\n".encode())
    threading.Event().wait()


def echo(group, *values):
    return values


def unpicklable(group):
    return threading.Lock()


def wait_for_end(process):
    ended = select.poll()
    ended.register(process, select.POLLIN)
    assert ended.poll(20_000)
    os.close(process)


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture(scope="module")
def processes():
    with Processes(3) as crew:
        yield crew


@pytest.fixture(scope="module")
def pair():
    """For tests that end in a failure, after which processes start anew."""
    with Processes(2) as crew:
        yield crew


def test_results_come_in_rank_order(processes):
    answers = processes.run(describe, 10)
    assert [a[:3] for a in answers] == [(0, 3, 6), (10, 3, 6), (20, 3, 6)]
    assert [a[3] for a in answers] == processes.pids
    assert os.getpid() not in processes.pids


def test_a_call_may_use_the_first_ranks_only(processes):
    assert [a[:3] for a in processes.run(describe, 10, num_ranks=1)] == [(0, 1, 1)]
    for _ in range(2):
        assert [a[:3] for a in processes.run(describe, 10, num_ranks=2)] == [(0, 2, 3), (10, 2, 3)]
    with pytest.raises(ValueError, match=r"1\.\.3, got 4"):
        processes.run(describe, 10, num_ranks=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8])
def test_tensors_travel_by_value(processes, dtype):
    values = torch.arange(12).view(3, 4).to(dtype)
    ((seen, empty),) = processes.run(echo, values.t(), values[:0], num_ranks=1)
    assert_equal(seen, values.t())
    assert_equal(empty, values[:0])


def test_what_cannot_be_carried_over_is_an_error(pair):
    with pytest.raises(RankError, match="cannot be carried over"):
        pair.run(unpicklable)
    assert pair.run(describe, 1)[1][:3] == (1, 2, 3)  # started anew


def test_the_first_failure_is_raised_with_its_rank_and_ends_the_others(pair):
    pair.run(describe, 1)
    pids = pair.pids
    with pytest.raises(PeerTimeout, match=r"rank 1 waited 2\.0 s in phase 'dispatch receive'") as caught:
        pair.run(fail_on_one)
    assert caught.value.peers == (0,)
    assert caught.value.missed[0].expected_epoch == 3
    assert "raised on rank 1 of 2" in caught.value.__notes__
    assert any("fail_on_one" in note for note in caught.value.__notes__)
    assert all(is_gone(pid) for pid in pids)


def test_outcomes_tell_how_each_rank_ended(pair):
    outcomes = pair.outcomes(die_on_one)
    assert [o.rank for o in outcomes] == [0, 1]
    assert [o.ok for o in outcomes] == [True, False]
    assert (outcomes[0].value, outcomes[1].exit_code) == ("alive", -signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1"):
        pair.run(die_on_one)


def test_a_process_that_ended_between_calls_is_noticed(pair):
    pair.run(describe, 1)
    process = os.pidfd_open(pair.pids[0])
    os.kill(pair.pids[0], signal.SIGKILL)
    wait_for_end(process)
    with pytest.raises(RankError, match="rank 0"):
        pair.run(echo, 1)


def test_a_process_that_ends_while_they_start_is_named_at_once():
    began = time.monotonic()
    with Processes(3) as crew:

        def kill_the_second():
            while len(crew.pids) < 3:
                time.sleep(0.01)
            os.kill(crew.pids[1], signal.SIGKILL)

        killer = threading.Thread(target=kill_the_second)
        killer.start()
        with pytest.raises(RankError, match=r"the process of rank 1 did not start: exit code -9"):
            crew.run(echo, 1)
        killer.join()
    assert time.monotonic() - began < 60


def test_a_hang_ends_in_time(pair):
    pair.run(describe, 1)
    pids = pair.pids
    with pytest.raises(RankError, match=r"rank\(s\) \[0, 1\] did not end within 0\.2 s"):
        pair.run(hang, timeout_s=0.2)
    assert all(is_gone(pid) for pid in pids)


def test_run_processes_leaves_nothing():
    ((_, world_size, _, pid),) = run_processes(1, describe, 1)
    assert world_size == 1
    assert is_gone(pid)


def test_processes_end_when_their_parent_is_killed(tmp_path):
    script = "import test_kit_ranks as t; t.Processes(1).run(t.announce_and_hang)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE) as parent:
        process = os.pidfd_open(int(parent.stdout.readline()))
        assert list(tmp_path.glob("expertwire-ranks-*"))
        parent.kill()
    wait_for_end(process)
    assert not list(tmp_path.glob("expertwire-ranks-*"))
