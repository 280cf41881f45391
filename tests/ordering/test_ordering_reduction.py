"""The reduction loses nothing: on random programs, reduced and full exploration reach the same final states."""

import random

import pytest

from expertwire.ordering import profiles
from expertwire.ordering.explore import Verdict, explore
from expertwire.ordering.litmus_text import parse_program
from expertwire.ordering.ptx_text import parse_ptx

NETWORKS = [name for name, profile in profiles.PROFILES.items() if profile.machine == "network"]
EXTRA = ["rc.hw+gdr_order=none", "rc.spec+place_ww=fifo_qp", "rc.ooo+in_message=ascending"]


def network_lines(rng):
    """Two or three threads of two or three actions on few words."""
    words = ["x", "f"]

    def post():
        queue = rng.choice(["q1", "q1", "q2@n2"])
        return rng.choice(
            [
                f"put {queue} {rng.choice(words)}={rng.randint(1, 2)}",
                f"put {queue} [x,f]=(1,1)",
                f"amo {queue} {rng.choice(words)}+{rng.randint(1, 2)}",
                f"imm {queue} x=1 => f+1",
                f"get {queue} A.s=x",
                f"put {queue} x=A.s",
                f"A.s={rng.randint(1, 2)}",
                f"cqe {queue}",
            ]
        )

    def local(register):
        return rng.choice(
            [f"wait {rng.choice(words)}!=0", f"{register}={rng.choice(words)}", f"{rng.choice(words)}=3", "try f==1"]
        )

    lines = {"A": "; ".join(post() for _ in range(rng.randint(2, 3)))}
    lines["B" + rng.choice(["", "(gpu_owner)"])] = "; ".join(local(f"r{i}") for i in range(2))
    if rng.random() < 0.5:
        lines[rng.choice(["C", "D@B"])] = rng.choice([post(), local("t")])
    return lines


def ptx_lines(rng):
    """Two or three threads of two or three instructions."""
    scopes = ["cta", "gpu", "sys"]

    def action(register):
        word, scope = rng.choice("xf"), rng.choice(scopes)
        return rng.choice(
            [
                f"st.w {word}=1",
                f"st.rel.{scope} {word}={rng.randint(1, 2)}",
                f"st.rlx.{scope} {word}=2",
                f"{register}=ld.w {word}",
                f"{register}=ld.acq.{scope} {word}",
                f"ld.acq.{scope} {word}>=1",
                f"{register}=atom.acq_rel.{scope} {word}+1",
                f"red.rlx.{scope} {word}+1",
                f"fence.{rng.choice(['acq_rel', 'sc'])}.{scope}",
                f"tma {word}=3; commit; wait_group 0",
                f"tma x={word}; commit; wait_group.read 0",
                "fence.proxy.async",
                "bar 0",
            ]
        )

    places = rng.sample(["0.0.0", "0.0.1", "0.1.0", "1.0.0"], rng.choice([2, 2, 3]))
    return {p: "; ".join(action(f"r{i}{j}") for j in range(rng.randint(2, 3))) for i, p in enumerate(places)}


def compare(program, profile):
    never = {"query": lambda *_: False, "collect": True, "max_states": 8_000}
    results = [explore(program, profile, reduce=reduce, **never) for reduce in (True, False)]
    if results[1].verdict is Verdict.BOUND:
        return 0
    assert results[0].verdict == results[1].verdict
    if results[0].verdict is Verdict.HOLDS:
        assert results[0].outcomes == results[1].outcomes
    return 1


@pytest.mark.parametrize("seed", range(25))
def test_network(seed):
    rng = random.Random(seed)
    profile = profiles.get(rng.choice(NETWORKS + EXTRA))
    compare(parse_program(f"random {seed}", network_lines(rng)), profile)


@pytest.mark.parametrize("seed", range(25))
def test_ptx(seed):
    rng = random.Random(seed)
    profile = profiles.get(rng.choice(["ptx", "ptx", "ptx+proxy_fence=own", "ptx+proxy_fence=path"]))
    compare(parse_ptx(f"random {seed}", ptx_lines(rng), profile), profile)
