"""The litmus table: every verdict is computed, the reduction changes none, and no forbidden verdict is vacuous."""

import pytest

from expertwire.errors import InvalidArgument
from expertwire.ordering import litmus, profiles
from expertwire.ordering.explore import Verdict, explore
from expertwire.ordering.litmus_text import parse_program, parse_query

ROWS = list(litmus.table().values())
CASES = [(row, case) for row in ROWS for case in row.cases if case.build is None]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_machine_agrees_with_the_source(row):
    result = litmus.run_row(row)
    assert result.agrees, [(f.profile, f.expected, f.found) for f in result.findings]
    assert result.expected == result.found == row.verdict


@pytest.mark.parametrize(("row", "case"), CASES, ids=lambda value: getattr(value, "id", None))
def test_reduction_changes_no_outcome(row, case):
    for name in case.profiles[:1] if row.id == "D13" else case.profiles:  # large without the reduction
        profile = profiles.get(name)
        program = litmus.program_of(row, case, profile)
        results = [explore(program, profile, query=lambda *_: False, collect=True, reduce=r) for r in (True, False)]
        assert results[0].verdict == results[1].verdict
        if results[0].verdict is Verdict.HOLDS:
            assert results[0].outcomes == results[1].outcomes


@pytest.mark.parametrize(("row", "case"), CASES, ids=lambda value: getattr(value, "id", None))
def test_forbidden_is_not_vacuous(row, case):
    """Some execution runs to the end of all threads, so a forbidden final state could have been seen."""
    if case.verdict != "F":
        return
    for name in case.profiles:
        profile = profiles.get(name)
        program = litmus.program_of(row, case, profile)
        assert explore(program, profile, query=lambda _, finished: finished).verdict is Verdict.FAILS


# What holds on every network, however weak: an operation's own data before its own completion, and program order.
_ALWAYS = "R9c R21 T1 T3 T5 R14 R15s E3 E4 E5 E6 E7c E7d E11 E13 G2 G3f D10 D20"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_forbidden_rests_on_a_promise(row):
    """On a network that promises nothing the forbidden state is reachable: the profile's edges are what forbids it."""
    nothing = profiles.get("srd.transmit").but(fence="none", read_waits="none", gdr_order="none")
    for case in row.cases:
        ordered = any(word in text for text in case.threads.values() for word in ("fence", "quiet", "strong", "flush"))
        base = profiles.get(case.profiles[0])
        if case.verdict != "F" or not case.query or base.machine == "ptx" or ordered:
            continue
        if row.id in _ALWAYS.split() or "#" in str(case.threads):
            continue
        program = litmus.program_of(row, case, nothing)
        assert explore(program, nothing, query=parse_query(case.query)).verdict is Verdict.FAILS


def test_number_of_rows():
    run = [row for row in ROWS if row.cases]
    assert len(run) == len(ROWS) == 174


def test_contested_rows_have_readings_that_differ():
    contested = [row for row in ROWS if row.verdict == "?"]
    assert len(contested) >= 4
    for row in contested:
        assert len({case.verdict for case in row.cases}) == 2


def test_a_wrong_expectation_is_a_disagreement():
    text = "X1 | rc.spec | F | hi | nobody\n  A: put q x=1; put q f=1\n  B: wait f==1; r=x\n  ? r==0"
    (row,) = litmus.parse_table(text)
    result = litmus.run_row(row)
    assert not result.agrees
    assert result.found == "A"


@pytest.mark.parametrize(
    ("row", "profile", "verdict"),
    [
        ("U1", "rc.spec", "F"),
        ("D1", "rc.hw", "F"),
        ("U2", "rc.ro", "A"),
        ("R15s", "rc.ro_pcieatomic", "A"),
        ("D14", "gin.strong", "F"),
        ("D14", "gin.weak", "A"),
        ("P25", "ptx+single_copy=128", "F"),
    ],
)
def test_a_filtered_row_is_compared_with_the_cases_that_ran(row, profile, verdict):
    (result,) = litmus.run([row], profile)
    assert result.agrees
    assert (result.expected, result.found) == (verdict, verdict)


def test_no_case_on_a_profile_is_an_error():
    with pytest.raises(InvalidArgument, match=r"no case of these litmus rows is on ptx; valid: rc\.spec, "):
        litmus.run(["R2"], "ptx")
    with pytest.raises(InvalidArgument, match=r"is on rc\.spec\+wire=any; valid: "):
        litmus.run(profile="rc.spec+wire=any")


def test_unknown_row_lists_the_valid_ones():
    with pytest.raises(InvalidArgument, match=r"unknown litmus row 'R99'; valid: R1, "):
        litmus.run(["R99"])
    with pytest.raises(InvalidArgument, match=r"unknown profile 'ib'; valid: rc\.spec, "):
        litmus.run(profile="ib")


@pytest.mark.parametrize("text", ["jump q x=1", "put q x", "wait f", "A.x"])
def test_bad_actions_are_named(text):
    with pytest.raises((InvalidArgument, KeyError, IndexError)):
        parse_program("bad", {"A": text})
