"""World: the first exception ends all ranks, wherever they are."""

import _thread
import threading

import pytest
import torch
from fault_ranks import dispatch, make, round_trip

import expertwire as ew
from expertwire.host import kernels
from expertwire.transports.inproc import Crew


def rank_threads():
    return [t for t in threading.enumerate() if t.name.startswith("expertwire-rank")]


def all_ended():
    for thread in rank_threads():
        thread.join(timeout=20)
    return not rank_threads()


WAITS = {
    "dispatch": lambda rank, buf: dispatch(buf),
    "hook": lambda rank, buf: dispatch(buf, defer_receive=True).hook(),
    "barrier": lambda rank, buf: rank.barrier(),
    "creation": lambda rank, buf: make(rank),
}


@pytest.mark.parametrize("mode", ["raise", "mask"])
@pytest.mark.parametrize("place", WAITS)
def test_the_first_exception_ends_all_ranks(place, mode):
    ended = {}

    def fn(rank):
        buf = make(rank, timeout_s=None, on_timeout=mode)
        round_trip(buf)
        if rank.rank == 1:
            raise ZeroDivisionError("the first")
        try:
            for _ in range(3):
                WAITS[place](rank, buf)
        except BaseException as error:
            ended[rank.rank] = error
            raise

    with pytest.raises(ZeroDivisionError, match="the first") as caught:
        ew.World(4).run(fn)
    assert "raised on rank 1 of 4" in caught.value.__notes__
    assert all_ended()
    assert sorted(ended) == [0, 2, 3]
    for rank, error in ended.items():
        assert isinstance(error, (ew.WorldAborted, ew.PeerLost))
        if isinstance(error, ew.WorldAborted):
            assert f"rank {rank} stops because rank 1 raised ZeroDivisionError" in str(error)


def test_keyboard_interrupt_ends_all_ranks():
    def fn(rank):
        buf = make(rank, timeout_s=None)
        round_trip(buf)
        if rank.rank == 0:
            _thread.interrupt_main()
            return
        dispatch(buf)

    with pytest.raises(KeyboardInterrupt):
        ew.World(3).run(fn)
    assert all_ended()


def test_an_interrupt_is_raised_when_the_ranks_have_ended():
    """A thread that is still inside torch when Python exits would abort the process."""
    ended = []

    def fn(rank):
        try:
            with make(rank, timeout_s=None) as buf:
                if rank.rank == 0:
                    _thread.interrupt_main()
                while True:
                    round_trip(buf)
        finally:
            ended.append(rank.rank)

    with pytest.raises(KeyboardInterrupt):
        ew.World(3, fabric="rc.ooo").run(fn)
    assert sorted(ended) == [0, 1, 2]


def test_a_rank_that_raises_system_exit_ends_all_ranks():
    def fn(rank):
        if rank.rank == 0:
            raise SystemExit(3)
        rank.barrier()

    with pytest.raises(SystemExit):
        ew.World(2).run(fn)
    assert all_ended()


def test_a_rank_that_returns_too_early_is_noticed():
    def fn(rank):
        if rank.rank == 1:
            return
        rank.barrier()

    with pytest.raises(ew.PeerLost, match=r"for rank\(s\) \[1\]: .*Rank\(s\) \[1\] of this World have") as caught:
        ew.World(3).run(fn)
    assert caught.value.peers == (1,)


def test_a_rank_that_returns_right_after_a_barrier_is_not_missed_there():
    class Running(list):
        """The other rank completes the round and returns while this one looks who still runs."""

        def __iter__(self):
            if self[1]:
                crew.all_gather(1, "one")
                crew.leave(1)
            return super().__iter__()

    crew = Crew(2)
    crew.running = Running(crew.running)
    assert crew.all_gather(0, "zero") == ["zero", "one"]


def test_results_and_ranks():
    assert ew.World(3).run(lambda rank: (rank.rank, rank.num_ranks)) == [(0, 3), (1, 3), (2, 3)]
    world = ew.World(2)
    assert world.run(lambda rank: rank.all_gather(rank.rank * 10)) == [[0, 10]] * 2
    assert world.run(lambda rank: repr(rank)) == ["Rank(0 of 2)", "Rank(1 of 2)"], "a World can be used again"


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "2", True, None])
def test_an_illegal_number_of_ranks(wrong):
    with pytest.raises(ew.InvalidArgument, match="num_ranks must be"):
        ew.World(wrong)


@pytest.mark.parametrize("device", ["tpu", "meta", "xpu:0", "", None])
def test_devices_that_are_not_offered(device):
    with pytest.raises(
        ew.TransportUnavailable, match=f"device={device!r} does not work here: devices are 'cpu' and 'cuda'"
    ):
        ew.World(1, device=device)


def test_many_buffers_in_one_world():
    def fn(rank):
        for _ in range(25):
            with make(rank) as one, make(rank, max_in_flight=1) as two:
                sent = dispatch(one)
                round_trip(two)
                assert torch.equal(one.combine(sent.x, sent.handle).x[0], one.combine(sent.x, sent.handle).x[0])
        return threading.active_count()

    before = threading.active_count()
    ew.World(2).run(fn)
    assert threading.active_count() == before


@pytest.mark.parametrize("problem", ["missing", "broken"])
def test_a_rank_whose_engine_does_not_work_tells_its_peers(monkeypatch, problem):
    """Before anybody waits for its window; afterwards all can try again."""
    failing = "expertwire-rank-1"

    def missing():
        return "numba is not installed" if threading.current_thread().name == failing else None

    def broken():
        if threading.current_thread().name == failing:
            raise OSError("no space left")

    def fn(rank):
        error = ew.TransportUnavailable if rank.rank == 1 else ew.PeerRefused
        with pytest.raises(error, match=r"rank 1: engine='numba'.*(not installed|no space left)") as caught:
            make(rank, engine="numba")
        if rank.rank != 1:
            assert caught.value.peers == (1,)
        rank.barrier()
        with make(rank, engine="torch") as buf:
            round_trip(buf)
            rank.barrier()

    if problem == "missing":
        monkeypatch.setattr(kernels, "numba_missing", missing)
    else:
        monkeypatch.setattr(kernels.load("numba"), "warm_up", broken)
    ew.World(3).run(fn)
