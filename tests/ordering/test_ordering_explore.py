"""The explorer: verdicts, modes, replay, shrinking, and the parts it stands on."""

import json
import re

import pytest

from expertwire.errors import InvalidArgument
from expertwire.ordering import profiles, report
from expertwire.ordering.explore import Verdict, explore
from expertwire.ordering.litmus_text import parse_program, parse_query
from expertwire.ordering.program import Program, Thread
from expertwire.ordering.trace import replay
from expertwire.ordering.verbs import Await, Claim, LoadWord, Loc, Queue, Sometimes, StoreWord, Write
from expertwire.ordering.weakest import needs, weakest_of

X, F = Loc("B", "x"), Loc("B", "f")
SPEC = profiles.get("rc.spec")


def program(*bodies, goals=()):
    threads = tuple(Thread(name, name, body) for name, body in zip("AB", bodies, strict=False))
    return Program("test", threads, goals)


def writer():
    yield Write(Queue(), (X,), (1,))
    yield Write(Queue(), (F,), (1,))


def reader():
    yield Await(F)
    yield LoadWord(X, expect=1)


def test_holds_is_exhaustive_and_fails_has_a_trace():
    assert explore(program(writer, reader), profiles.get("rc.hw")).verdict is Verdict.HOLDS
    result = explore(program(writer, reader), SPEC)
    assert result.verdict is Verdict.FAILS
    assert result.trace.violation.kind == "stale read"


def test_deadlock_names_who_waits_for_what():
    def waits():
        yield Await(F, note="the flag that nobody sets")

    result = explore(program(waits), SPEC)
    assert result.trace.violation.kind == "deadlock"
    assert "the flag that nobody sets" in result.trace.blocked[0]


def test_a_goal_that_is_never_reached_is_reported():
    def body():
        seen = yield LoadWord(X)
        if seen:
            yield Sometimes("saw it")

    result = explore(program(body, goals=("saw it",)), SPEC)
    assert result.verdict is Verdict.HOLDS
    assert result.missing == ("saw it",)
    summary = report.cell("dispatch", "atomic", SPEC, result)
    assert not summary.holds
    assert "saw it" in summary.violation


def test_claims_and_overwritten_rows():
    def claims():
        yield Claim(True, "wrong count")
        yield Claim(False, "wrong count", "two of three")

    assert explore(program(claims), SPEC).trace.violation.text == "two of three"

    def overwrites():
        yield StoreWord(X, 2)

    def expects_one():
        yield LoadWord(X, expect=1)

    kinds = set()
    for start in (0, 2):
        single = program(expects_one) if start == 0 else program(overwrites, expects_one)
        result = explore(single, SPEC)
        kinds.add(result.trace.violation.kind)
    assert "stale read" in kinds


@pytest.mark.parametrize("mode", ["exhaustive", "random", "pct", "adversary"])
def test_all_modes_find_a_depth_one_bug(mode):
    result = explore(program(writer, reader), SPEC, mode, seed=1)
    assert result.verdict is Verdict.FAILS
    assert replay(program(writer, reader), SPEC, result.trace.id) == result.trace


def test_sampling_never_says_holds():
    hw = profiles.get("rc.hw")
    for mode in ("random", "pct", "adversary"):
        assert explore(program(writer, reader), hw, mode, runs=20).verdict is Verdict.BOUND


def test_random_is_a_function_of_its_seed():
    one, two = (explore(program(writer, reader), SPEC, "random", seed=5).trace for _ in range(2))
    assert one == two


def test_unknown_names_list_the_valid_ones():
    with pytest.raises(InvalidArgument, match="unknown mode 'deep'; valid: exhaustive, random, pct, adversary"):
        explore(program(writer, reader), SPEC, "deep")
    with pytest.raises(InvalidArgument, match="unknown knob 'wires'; valid: amo_order"):
        profiles.get("rc.spec+wires=any")
    with pytest.raises(InvalidArgument, match="no fence between puts"):
        explore(parse_program("p", {"A": "put q x=1; fence; put q f=1"}), SPEC)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ("wire=banana", "knob wire must be one of fifo, any, got 'banana'; separate knobs with commas"),
        ("wire=any+amo_waits=none", "knob wire must be one of fifo, any, got 'any+amo_waits=none'; separate knobs"),
        ("amo_waits", "knob amo_waits must be one of placed, accepted, none, got ''"),
        ("amo_waits=", "knob amo_waits must be one of placed, accepted, none, got ''"),
        ("in_message=3", "knob in_message must be one of any, block, ascending, got '3'"),
        ("amo_order=banana", "knob amo_order must be one of False, True, got 'banana'"),
        ("amo_order=false", "knob amo_order must be one of False, True, got 'false'"),
        ("single_copy=7", "knob single_copy must be one of 8, 16, 32, 64, 128, got '7'"),
        ("wire=any,wire=fifo", "knob wire is turned twice"),
        ("name=x", "unknown knob 'name'; valid: amo_order"),
        ("", "unknown knob ''; valid: amo_order"),
    ],
)
def test_a_knob_has_the_values_of_its_field(knobs, said):
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        profiles.get(f"rc.spec+{knobs}")


def test_knobs_are_turned_to_every_value():
    for knob in profiles.KNOBS:
        for value in profiles.values_of(knob):
            turned = SPEC.but(**{knob: value})
            assert profiles.get(turned.name) == turned
            assert getattr(turned, knob) is value
        assert set(profiles.STRENGTH.get(knob, ())) <= set(profiles.values_of(knob))
    assert profiles.get("rc.spec+wire=any").but(amo_waits="none") == profiles.get("rc.spec+wire=any,amo_waits=none")
    with pytest.raises(InvalidArgument, match="knob wire must be one of fifo, any, got 3"):
        SPEC.but(wire=3)


def test_a_trace_of_another_program_is_refused():
    with pytest.raises(InvalidArgument, match="trace"):
        replay(program(writer, reader), SPEC, "zzzz")
    with pytest.raises(InvalidArgument, match="not a trace id"):
        replay(program(writer, reader), SPEC, "%%")


def test_traces_export_as_json():
    trace = explore(program(writer, reader), SPEC).trace
    data = json.loads(trace.dumps())
    assert data["violation"]["kind"] == "stale read"
    assert {step["rank"] for step in data["steps"]} == {"A", "B"}
    assert any(step["from"] == "A" and step["rank"] == "B" for step in data["steps"])


def test_every_knob_and_profile_has_a_source():
    fields = set(profiles.Profile.__dataclass_fields__) - {"name", "source", "machine"}
    assert fields == set(profiles.KNOBS)
    assert all(p.source for p in profiles.PROFILES.values())


def test_every_knob_changes_a_verdict():
    """A knob that changes nothing would be decoration."""
    cases = {
        "wire": ("rc.hw", "any", "put q x=1; put q f=1", "wait f==1; r=x"),
        "place_ww": ("rc.hw", "any", "put q x=1; put q f=1", "wait f==1; r=x"),
        "in_message": ("rc.spec", "ascending", "put q [x,f]=(1,1)", "wait f==1; r=x"),
        "amo_waits": ("rc.spec", "accepted", "put q x=1; amo q f+1", "wait f==1; r=x"),
        "read_waits": ("rc.spec", "none", "put q x=1; get q s=x; cqe; put q f=1", "wait f==1; r=x"),
        "cqe_after": ("rc.spec", "placed", "put q x=1; cqe; put q f=1", "wait f==1; r=x"),
        "rcqe_after": ("rc.spec", "own_placed", "put q x=1; imm q y=1", "rcqe; r=x"),
        "quiet": ("shmem", "cqe", "put q x=1; quiet; put q f=1", "wait f==1; r=x"),
        "covers": ("gin.weak", "earlier", "put q x=1; sig q f=1", "wait f==1; r=x"),
        "covers_all": ("host", False, "put q1 x=1; sig q2 f=1", "wait f==1; r=x"),
        "aw_waits": ("rc.spec", "placed", "put q x=1; aw q f=1", "wait f==1; r=x"),
    }
    for knob, (name, value, a, b) in cases.items():
        base = profiles.get(name)
        turned = base.but(**{knob: value, **({"cqe_after": "accept"} if knob == "quiet" else {})})
        verdicts = {
            explore(parse_program(knob, {"A": a, "B": b}), p, query=parse_query("r==0")).verdict for p in (base, turned)
        }
        assert verdicts == {Verdict.HOLDS, Verdict.FAILS}, knob


def test_weakest():
    def holds(profile):
        return explore(program(writer, reader), profile).verdict is Verdict.HOLDS

    assert needs(profiles.get("rc.hw"), holds).needed == {"place_ww": "fifo_qp"}
    assert [p.name for p in weakest_of([profiles.get("rc.hw"), profiles.get("rc.ooo")])] == ["rc.ooo"]


def test_stamp_table_is_the_ordering_table_of_the_contract():
    spec, srd = report.stamp_table(SPEC), report.stamp_table(profiles.get("srd"))
    assert spec["WRITE", "ATOMIC"]
    assert spec["WRITE", "READ"]
    assert not spec["WRITE", "WRITE"]
    assert report.stamp_table(profiles.get("rc.hw"))["WRITE", "WRITE"]
    assert not spec["READ", "WRITE"]
    assert not any(srd.values())
