"""Every broken variant is caught, by a trace that names the culprit; without the mistake the same model holds."""

import broken
import pytest

from expertwire.cli import models
from expertwire.ordering import profiles
from expertwire.ordering.explore import Verdict


@pytest.mark.parametrize("name", broken.VARIANTS)
def test_mistake_is_caught(name):
    model, mechanism, profile, mistakes, kinds, culprit = broken.VARIANTS[name]
    result = models.check(model, mechanism, profiles.get(profile), **mistakes)
    assert result.verdict is Verdict.FAILS
    assert result.trace.violation.kind in kinds.split(", ")
    assert culprit in result.trace.timeline()


@pytest.mark.parametrize(
    ("model", "mechanism", "profile"),
    [
        (broken.dispatch(), "atomic", "rc.spec"),
        (broken.deferred(broken.lane.send), "atomic", "rc.spec"),
        (broken.finished_out_of_order(broken.Lane("dispatch", 2)), "atomic", "rc.spec"),
        (models.get("dispatch"), "release", "ptx"),
        (models.get("dispatch"), "atomic", "rc.hw"),
        (models.get("masked"), "atomic", "rc.spec"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_same_without_mistake_holds(model, mechanism, profile):
    assert models.check(model, mechanism, profiles.get(profile)).verdict is Verdict.HOLDS


def test_a_barrier_with_a_word_per_parity_holds_where_one_word_does_not():
    """Two words per pair are enough: barrier e + 2 starts after all have left e + 1, hence after all have seen e."""

    def protocol(rank, num_ranks):
        for epoch in range(1, 4):
            for peer in broken.ring(rank, num_ranks):
                yield broken.Signal(peer, broken.Word("barrier", rank, epoch % 2), epoch)
            for peer in broken.ring(rank, num_ranks):
                yield broken.Wait(broken.Word("barrier", peer, epoch % 2), epoch)

    banked = models.Model("barrier on two words", "", protocol)
    for mechanism, profile in (("put_signal", "shmem"), ("write", "rc.spec"), ("put_signal", "gin.weak")):
        assert models.check(banked, mechanism, profiles.get(profile)).verdict is Verdict.HOLDS
        one_word = models.check(models.get("barrier"), mechanism, profiles.get(profile))
        assert one_word.trace.violation.kind == "lost signal"


@pytest.mark.parametrize("profile", profiles.PROFILES)
def test_a_rank_that_refuses_must_wait_for_the_rows_of_that_step(profile):
    """Without that wait, rows of the void step may land on those of a later one, unless writes stay in order."""
    one = broken.Lane("dispatch", 2)

    def waits_for_nobody(rank, num_ranks):
        for epoch in range(1, 4):
            counts = [models.rows_unless_refused(rank, peer, epoch) for peer in range(num_ranks)]
            yield from broken.lane.send(one, rank, epoch, counts)
            if (rank, epoch) != (1, 1):
                yield from broken.lane.receive(one, rank, epoch, num_ranks)
            yield from broken.lane.finish(one, rank, epoch, num_ranks)

    hasty = models.Model("refused, without the wait", "", waits_for_nobody, sent=models.rows_unless_refused)
    in_order = profile in ("rc.hw", "host", "ptx")
    for mechanism in models.CLAIMS[profile]:
        assert models.check(models.get("refused"), mechanism, profiles.get(profile)).verdict is Verdict.HOLDS
        found = models.check(hasty, mechanism, profiles.get(profile)).verdict
        assert (found is Verdict.HOLDS) == (in_order or mechanism == "fence")
