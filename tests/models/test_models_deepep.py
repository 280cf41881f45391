"""DeepEP's low-latency protocol and ours, side by side: which of its assumptions the epoch protocol does not need."""

import pytest
from broken import Lane, deferred, dispatch, lane

from expertwire.cli import models
from expertwire.ordering import deepep, profiles
from expertwire.ordering.explore import Verdict, explore
from expertwire.ordering.operations import Load


def dispatch_dispatch_combine_combine():
    """Two dispatches, then their two combines, twice. Rows of a dispatch are kept until its combine has been sent."""
    there, back = Lane("dispatch", 2), Lane("combine", 2)

    def protocol(rank, num_ranks):
        for first in (1, 3):
            for epoch in (first, first + 1):
                yield from lane.send(there, rank, epoch, models.counts(rank, num_ranks, epoch))
                yield from lane.receive(there, rank, epoch, num_ranks)
            for epoch in (first, first + 1):
                for peer in range(num_ranks):
                    if models.rows_sent(peer, rank, epoch):
                        yield Load(there.rows(epoch, peer), models.rows_sent(peer, rank, epoch))
                yield from lane.send(back, rank, epoch, models.counts(rank, num_ranks, epoch))
                yield from lane.finish(there, rank, epoch, num_ranks)
                yield from lane.receive(back, rank, epoch, num_ranks)
                yield from lane.finish(back, rank, epoch, num_ranks)

    return models.Model("dispatch, dispatch, combine, combine", "", protocol)


# DeepEP's case -> our protocol in the same situation
OURS = {
    "D3": dispatch(steps=4, one=Lane("dispatch", 2)),  # nothing is cleaned
    "D4": deferred(lane.send),  # send 2 before receive 1
    "D6": dispatch(steps=4),  # one bank
    "D7": dispatch(steps=4),  # counts of zero occur
    "D8": dispatch(steps=5),  # words are used again without a clean
    "D9": models.get("masked"),  # timeouts and late words
    "D19": models.get("masked"),  # any rank may mask any other at any wait
    "D22": dispatch_dispatch_combine_combine(),
}


@pytest.mark.parametrize("case", OURS)
@pytest.mark.parametrize("profile", ["rc.spec", "rc.ooo"])
def test_an_assumption_that_the_epoch_protocol_does_not_need(case, profile):
    used = profiles.get(profile)
    fault = next(s for s in deepep.SCENARIOS[case] if s.verdict == "A")
    assert explore(fault.build(), used).verdict is Verdict.FAILS
    assert models.check(OURS[case], "atomic", used).verdict is Verdict.HOLDS


def test_the_argument_for_two_buffers_is_right_in_stream_order():
    for scenario in deepep.SCENARIOS["D5"]:
        for name in scenario.profiles:
            assert explore(scenario.build(), profiles.get(name)).verdict is Verdict.HOLDS


def test_late_flags_are_decoded_as_rows_after_an_unmask():
    fault = deepep.SCENARIOS["D9"][0]
    result = explore(fault.build(), profiles.get("rc.spec"))
    assert "gives up" in result.trace.timeline()
    assert result.trace.violation.kind in ("wrong count", "bank reused too early", "stale read")


def test_a_missed_clean_adds_the_counts_of_two_operations():
    result = explore(deepep.SCENARIOS["D8"][0].build(), profiles.get("rc.hw"))
    assert result.trace.violation.kind == "wrong count"
