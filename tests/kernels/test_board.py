"""Ranks that agree on the host who of them has ended, while they end."""

import random
import threading
import time

import numpy as np
import pytest

from expertwire.errors import GroupMismatch, PeerLost, PeerTimeout
from expertwire.kernels.board import PAGE_BYTES
from expertwire.kernels.meeting import MEETING_BYTES, Meeting


class EndedError(Exception):
    """This rank's process is killed here."""


class Threads:
    """A host transport of threads, each of which ends the n-th time that it looks at a peer."""

    def __init__(self, num_ranks, looks):
        self.num_ranks, self.looks = num_ranks, looks
        self.windows = [np.zeros(MEETING_BYTES, np.uint8) for _ in range(num_ranks)]
        self.running = [True] * num_ranks
        self.told_to_end = set()

    def of(self, rank):
        return _Seat(self, rank)

    def run(self, work):
        results = [None] * self.num_ranks

        def body(rank):
            try:
                results[rank] = work(Meeting(self.of(rank)), rank)
            except EndedError:
                pass
            except (PeerTimeout, PeerLost) as error:
                results[rank] = error
            finally:
                self.running[rank] = False

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results


class _Seat:
    def __init__(self, crew, rank):
        self._crew, self.rank, self.num_ranks, self.windows = crew, rank, crew.num_ranks, crew.windows
        self._looks = crew.looks.get(rank, -1)

    def alive(self, peer):
        self.raise_if_aborted()
        self._looks -= 1
        if self._looks == 0:
            raise EndedError
        return self._crew.running[peer]

    def close(self):
        pass

    def end(self, peer):
        self._crew.told_to_end.add(peer)

    def raise_if_aborted(self):
        if self.rank in self._crew.told_to_end:
            raise EndedError


@pytest.mark.parametrize("seed", range(60))
def test_all_that_are_left_mask_the_same_ranks(seed):
    """They end before, while and after others look, and some while others still share something else."""
    chance = random.Random(seed)
    num_ranks = chance.randint(2, 6)
    doomed = chance.sample(range(num_ranks), chance.randint(1, num_ranks - 1))
    crew = Threads(num_ranks, {rank: chance.randint(1, 4 * num_ranks) for rank in doomed})
    delays = [chance.choice((0.0, 0.0, 0.003)) for _ in range(num_ranks)]
    sharing = chance.random() < 0.5

    def work(meeting, rank):
        time.sleep(delays[rank])
        if sharing:
            try:
                values = [meeting.all_gather((rank, number)) for number in range(3)]
                assert values == [[(peer, number) for peer in range(num_ranks)] for number in range(3)]
            except PeerLost:
                pass
        while not meeting.left():  # what a kernel's time-out says
            time.sleep(0.0005)
        newest, stages = meeting.agree((10 * rank, 1), 20.0), 1
        before = None
        while before != meeting.masked:
            before = set(meeting.masked)
            newest, stages = meeting.agree(newest, 20.0), stages + 1
        try:
            values = meeting.all_gather(rank)
        except PeerLost:  # a doomed rank that had not ended before
            values = "lost"
        return sorted(meeting.masked), newest[0], values

    found = crew.run(work)
    left = [result for rank, result in enumerate(found) if rank not in doomed]
    masked, newest, values = left[0]
    assert all(result == left[0] for result in left)
    assert masked
    assert set(masked) <= set(doomed)
    assert values in ("lost", [None if peer in masked else peer for peer in range(num_ranks)])
    assert newest in [10 * rank for rank in range(num_ranks)]


def test_a_rank_that_does_not_come_is_named():
    crew = Threads(3, {})

    def work(meeting, rank):
        if rank == 1:
            time.sleep(0.5)
            return None
        return meeting.agree((0,), 0.1)

    first, _, last = crew.run(work)
    assert isinstance(first, PeerTimeout)
    assert first.peers == last.peers == (1,)
    assert "in phase 'agreeing which ranks have left' for rank(s) [1]" in str(first)
    assert "on_timeout='end' ends the process" in str(first)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_do_not_come_are_ended(seed):
    """Others may be late, and come before that or are ended too; who is left says the same."""
    chance = random.Random(seed)
    num_ranks = chance.randint(2, 6)
    hanging = chance.sample(range(num_ranks), chance.randint(1, num_ranks - 1))
    delays = [chance.choice((0.0, 0.01, 0.05, 0.1)) for _ in range(num_ranks)]
    crew = Threads(num_ranks, {})

    def work(meeting, rank):
        time.sleep(delays[rank])
        while rank in hanging:
            crew.of(rank).raise_if_aborted()
            time.sleep(0.001)
        newest, before = (rank,), None
        while before != meeting.masked:
            before = set(meeting.masked)
            newest = meeting.agree(newest, 0.05, end_late=True)
            crew.of(rank).raise_if_aborted()
        return sorted(meeting.masked), newest

    found = [result for result in crew.run(work) if result is not None]
    assert found
    assert all(result == found[0] for result in found)
    assert set(hanging) <= set(found[0][0])


def test_who_closes_has_left():
    """Without having ended: it is masked, and not waited for."""
    crew = Threads(3, {})

    def work(meeting, rank):
        if rank == 1:
            meeting.close()
            time.sleep(1.0)
            return None
        while not meeting.left():
            time.sleep(0.001)
        with pytest.raises(PeerLost, match=r"rank 1: .* closed its buffer, process alive"):
            meeting.arrive(1 << 8, 0, 20.0)
        began = time.monotonic()
        meeting.agree((0,), 20.0)
        return sorted(meeting.masked), time.monotonic() - began < 0.9

    assert crew.run(work) == [([1], True), None, ([1], True)]


def test_who_shares_something_is_summoned():
    crew = Threads(2, {})

    def work(meeting, rank):
        if rank == 0:
            return meeting.agree((7,), 20.0), sorted(meeting.masked)
        with pytest.raises(PeerTimeout, match="have given up waiting for another call"):
            meeting.all_gather("memory")
        assert meeting.summoned()
        return meeting.agree((5,), 20.0), sorted(meeting.masked)

    assert crew.run(work) == [((7,), []), ((7,), [])]
    other = Threads(2, {})

    def late(meeting, rank):
        if rank == 0:
            return meeting.agree((7,), 20.0)
        while not meeting.summoned():
            time.sleep(0.001)
        return meeting.agree((9,), 20.0)

    assert other.run(late) == [(9,), (9,)]


def test_a_message_that_is_too_long():
    with pytest.raises(AssertionError, match=r"a message of 655\d\d bytes"):
        Meeting(Threads(1, {}).of(0)).all_gather(b"x" * PAGE_BYTES)


def test_a_late_rank_names_who_refused_and_not_who_saw_it():
    """Rank 0 has refused the next calls too by now, and waits with rank 2 at the one after."""
    crew = Threads(3, {})
    refuses, late, saw = (Meeting(crew.of(rank)) for rank in range(3))
    for call in (256, 512, 768):
        refuses.refuse(call)
    saw._words[2][0] = 2 * 1024
    assert late.arrive(256, 0, 1.0) == [0]
    refuses._words[0][0] = 2 * 1024
    for call in (256, 512, 768):
        assert late.arrive(call, 0, 1.0) == [0]


def test_who_passes_by_is_not_waited_for():
    crew = Threads(3, {})
    passes, new, comes = (Meeting(crew.of(rank)) for rank in range(3))
    passes.pass_by(256)
    comes._words[2][0] = 2 * 256
    with pytest.raises(GroupMismatch, match=r"rank 1: .* first call of its kind here, .* rank\(s\) 0 make one"):
        new.arrive(256, 0, 1.0)
    with pytest.raises(PeerTimeout, match=r"rank\(s\) \[0, 2\]"):  # what was passed by is an earlier call
        new.arrive(512, 0, 0.05)
