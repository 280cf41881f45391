"""Our protocols, as they are, on every profile with every mechanism that exists there."""

import pytest

from expertwire.cli import models
from expertwire.ordering import profiles, signals
from expertwire.ordering.explore import MODES, Verdict, explore
from expertwire.ordering.trace import replay

# The mechanisms that the contract of each profile allows: rows before word, for any number of rows.
SOUND = {
    "rc.spec": {"atomic", "add", "imm", "counted", "read", "tagged"},
    "rc.hw": {"write", "atomic", "add", "imm", "counted", "flush", "read", "tagged"},
    "rc.ro": {"atomic", "add", "imm", "counted", "read", "tagged"},
    "rc.ro_pcieatomic": {"imm", "counted", "read", "tagged"},
    "rc.ooo": {"atomic", "add", "imm", "counted", "read", "tagged"},
    "srd": {"counted", "flush", "read", "tagged"},
    "srd.transmit": {"counted", "tagged"},
    "shmem": {"put_signal", "fence", "flush", "tagged"},
    "gin.weak": {"put_signal", "tagged"},
    "gin.strong": {"put_signal", "strong", "tagged"},
    "ucx": {"fence", "flush", "tagged"},
    "host": {"fence", "release"},
    "ptx": {"release"},
}
# A barrier sets its one word again before the earlier signal must have landed: it needs signals that stay in order.
SOUND_BARRIER = {
    "rc.spec": {"atomic", "imm", "counted"},
    "rc.hw": {"write", "atomic", "imm", "counted", "flush", "read", "tagged"},
    "rc.ro": {"atomic", "imm", "counted"},
    "rc.ro_pcieatomic": {"atomic", "imm", "counted"},
    "rc.ooo": {"atomic", "imm", "counted"},
    "srd": {"atomic", "imm", "counted", "flush", "read"},
    "srd.transmit": {"atomic", "imm", "counted"},
    "shmem": {"atomic", "fence", "flush"},
    "gin.weak": {"atomic"},
    "gin.strong": {"atomic", "strong"},
    "ucx": {"atomic", "fence", "flush"},
    "host": {"write", "fence", "release"},
    "ptx": {"release"},
}
# Tags vouch for rows that are read, and a rank that refuses a step reads none of its rows.
SOUND_REFUSED = {name: sound - ({"tagged"} if name != "rc.hw" else set()) for name, sound in SOUND.items()}
CELLS = list(models.cells(list(profiles.PROFILES.values())))


@pytest.mark.parametrize("profile", profiles.PROFILES)
@pytest.mark.parametrize("model", models.MODELS)
def test_all_interleavings_of_two_ranks(model, profile):
    sound = {"barrier": SOUND_BARRIER, "refused": SOUND_REFUSED}.get(model, SOUND).get(profile, set())
    for name, mechanism, on in CELLS:
        if (name, on) == (model, profile):
            result = models.check(models.get(name), mechanism, profiles.get(on))
            assert (result.verdict is Verdict.HOLDS) == (mechanism in sound), (mechanism, result)
            assert result.verdict is Verdict.FAILS or not result.missing, mechanism


def test_every_profile_has_a_sound_mechanism():
    assert set(SOUND) == set(SOUND_BARRIER) == set(profiles.PROFILES)


@pytest.mark.parametrize(
    ("model", "mechanism", "profile"),
    [("dispatch", "release", "host"), ("dispatch", "release", "ptx"), ("barrier", "imm", "rc.spec")],
)
def test_three_ranks(model, mechanism, profile):
    result = models.check(models.get(model), mechanism, profiles.get(profile), num_ranks=3, max_states=30_000)
    assert result.verdict is not Verdict.FAILS
    assert result.trace is None


@pytest.mark.parametrize(
    ("mechanism", "profile"),
    [("imm", "rc.spec"), ("put_signal", "shmem"), ("release", "ptx"), ("weak", "gin.weak")],
)
def test_reduction_agrees_on_a_protocol(mechanism, profile):
    one = models.Model("one step", "", lambda rank, n: models.dispatch(rank, n, steps=1, banks=1))
    used = profiles.get(profile)
    program = models.program(one, used, models.settings(one, mechanism))
    reduced, full = explore(program, used), explore(program, used, reduce=False)
    assert reduced.verdict == full.verdict != Verdict.BOUND
    assert reduced.states < full.states


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_finds_the_seed_question(mode):
    result = models.check(models.get("dispatch"), "write", profiles.get("rc.spec"), mode=mode, seed=3)
    assert result.verdict is Verdict.FAILS
    assert result.trace.violation.kind == "stale read"


def test_bound_is_a_verdict_of_its_own():
    result = models.check(models.get("combine"), "atomic", profiles.get("rc.hw"), max_states=100)
    assert result.verdict is Verdict.BOUND
    assert result.trace is None


def test_traces_replay_exactly():
    model, profile = models.get("dispatch"), profiles.get("rc.ooo")
    trace = models.check(model, "write", profile).trace
    program = models.program(model, profile, models.settings(model, "write"))
    assert replay(program, profile, trace.id) == trace


def test_a_trace_is_minimal():
    model, profile = models.get("dispatch"), profiles.get("rc.spec")
    trace = models.check(model, "write", profile).trace
    text = trace.timeline()
    assert len(trace.lines) <= 14, text
    assert "r0→r1" in text or "r1→r0" in text
    assert trace.to_json()["violation"]["kind"] == "stale read"


def test_readmitting_a_masked_rank_needs_more_than_epochs():
    """A rank that gave up on DONE and comes back writes into a bank that is still being read: so we never readmit."""
    result = models.check(models.get("masked"), "atomic", profiles.get("rc.spec"), readmit="by epoch")
    assert result.verdict is Verdict.FAILS
    assert "gives up" in result.trace.timeline()


def test_costs_name_what_each_mechanism_pays():
    spec, ooo = profiles.get("rc.spec"), profiles.get("rc.ooo")
    assert signals.cost(signals.get("write"), spec).round_trips == 0
    assert signals.cost(signals.get("atomic"), spec).round_trips == 0
    assert signals.cost(signals.get("atomic"), ooo).round_trips == 1
    assert signals.cost(signals.get("flush"), spec).round_trips == 1
    assert signals.cost(signals.get("imm"), spec).completions == (0, 1)
    assert signals.cost(signals.get("imm"), spec).packets == 0
    assert signals.cost(signals.get("counted"), spec).completions == (0, 3)
