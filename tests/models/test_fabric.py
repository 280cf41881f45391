"""The real engine on the simulated fabric: right where the protocol is right, caught where a mechanism is wrong."""

import pytest
import torch

import expertwire as ew
from expertwire.testing.soak import Finding, Part, Soak, run, shrink
from expertwire.transports.fabric import usable_signals

RIGHT = [
    ("rc.spec", "atomic"),
    ("rc.spec", "imm"),
    ("rc.spec", "counted"),
    ("rc.hw", "write"),
    ("rc.ro", "atomic"),
    ("rc.ro_pcieatomic", "imm"),
    ("rc.ooo", "atomic"),
    ("rc.ooo", "imm"),
    ("srd", "counted"),
    ("srd", "flush"),
    ("shmem", "put_signal"),
    ("shmem", "fence"),
    ("gin.weak", "put_signal"),
    ("gin.strong", "strong"),
    ("ucx", "fence"),
]
WRONG = [
    ("rc.spec", "write"),
    ("rc.ro", "write"),
    ("rc.ro_pcieatomic", "atomic"),
    ("rc.ooo", "write"),
    ("srd", "imm"),
    ("srd", "atomic"),
    ("shmem", "weak"),
    ("gin.weak", "strong"),
    ("ucx", "atomic"),
]


@pytest.mark.parametrize(("profile", "signal"), RIGHT)
@pytest.mark.parametrize("schedule", ["adversary", "random"])
def test_every_row_is_right(profile, signal, schedule):
    (part,) = run(Soak(profile, signal, ranks=3, tokens=4, steps=8, seed=3, schedule=schedule))
    assert isinstance(part, Part), part


@pytest.mark.parametrize(("profile", "signal"), WRONG)
def test_a_wrong_mechanism_is_found_out(profile, signal):
    *_, last = run(Soak(profile, signal, ranks=2, tokens=4, steps=20, seed=1))
    assert isinstance(last, Finding), "the fabric never let the signal overtake the rows"
    symptoms = "overtake", "arrived changed", "no multiple", "contributions are missing"  # of headers, rows, routing
    assert any(symptom in last.text for symptom in symptoms), last.text
    assert any("PLACED" in line for line in last.trace)


def test_a_run_is_a_function_of_its_seed():
    soak = Soak("rc.ooo", "atomic", ranks=3, tokens=3, steps=5, seed=11)
    (first,), (again,) = run(soak), run(soak)
    (other,) = run(Soak("rc.ooo", "atomic", ranks=3, tokens=3, steps=5, seed=12))
    assert first == again
    assert first.digest != other.digest


def test_a_failing_run_replays_and_shrinks():
    *_, found = run(Soak("rc.spec", "write", ranks=3, tokens=8, steps=20, seed=5))
    *_, again = run(found.soak)
    assert isinstance(again, Finding)
    assert (again.step, again.text, again.trace) == (found.step, found.text, found.trace)
    small = shrink(found)
    assert small.soak.ranks == 2
    assert small.soak.tokens == 1


@pytest.mark.parametrize(("profile", "signal"), [("rc.ooo", "atomic"), ("srd", "counted"), ("shmem", "put_signal")])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sleeping_and_leaving_ranks_are_masked_and_nothing_else_changes(profile, signal, seed):
    (part,) = run(Soak(profile, signal, ranks=4, tokens=4, steps=12, seed=seed, faults=True))
    assert isinstance(part, Part), part
    assert part.masked > 0


def test_what_cannot_run_is_refused_with_what_can():
    with pytest.raises(ew.InvalidArgument, match=r"'imm' cannot run on fabric 'shmem'; usable: .*put_signal"):
        ew.World(2, fabric="shmem", signal="imm")
    with pytest.raises(ew.InvalidArgument, match=r"unknown profile 'rc\.fast'; valid: rc\.spec"):
        ew.World(2, fabric="rc.fast")
    with pytest.raises(ew.InvalidArgument, match="'ptx' is no network"):
        usable_signals("ptx")


def test_timeouts_count_simulated_seconds():
    def body(rank):
        with ew.Buffer(rank, num_experts=2, hidden=8, num_topk=1, num_max_tokens_per_rank=1, timeout_s=3600.0) as buf:
            if rank.rank == 0:
                turns = rank.crew.fabric.turns
                turns.stop(0, lambda: turns.time_s > 4000)
                while turns.time_s < 4000:
                    turns.stop(0, lambda: turns.time_s > 4000)
                return None
            with pytest.raises(
                ew.PeerTimeout, match=r"waited 360[01]\.\d s in phase 'dispatch receive' for rank\(s\) \[0\]"
            ):
                buf.dispatch(torch.zeros(1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64))
        return True

    assert ew.World(2, fabric="srd", signal="counted").run(body) == [None, True]
