"""The benchmark of several GPUs without one: plan, clock, bytes, table, and what its ranks do, on the CPU."""

import doctest
import json
import sys
from pathlib import Path

import pytest
import torch

import expertwire as ew
from expertwire.formats import FP8Block
from expertwire.layouts.receive import Layout
from expertwire.testing import Processes, RankError, assert_equal
from expertwire.testing.ranks import Outcome

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import multi_gpu
import multi_gpu_ranks
from multi_gpu import Clock, Report, Section, Timed, beside, nccl_cases, plan, run, table, timed
from multi_gpu_ranks import Setup, exact_rows, row_bytes, rows_per_token, rows_to_peers

COMPACT, MAJOR, SLOTS = Layout.COMPACT, Layout.EXPERT_MAJOR, Layout.EXPERT_SLOTS


# -- payloads and bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", range(7))
def test_integers_survive_fp8(step):
    x = exact_rows(3, step, 40, 256)
    payload, sf = FP8Block().encode(x)
    assert (sf == 1 / 64).all()
    assert_equal((payload.float().view(40, 2, 128) * sf[..., None]).view(40, 256).bfloat16(), x)
    assert not torch.equal(x, exact_rows(3, step + 1, 40, 256))


def test_rows_of_a_token():
    ids = torch.tensor([[0, 1, 5], [4, 6, 7]])  # 8 experts, 4 ranks: two each
    assert rows_per_token(ids, 4, 8, COMPACT).tolist() == [[2], [2]]
    assert rows_per_token(ids, 4, 8, MAJOR).tolist() == [[3], [3]]
    assert rows_to_peers(ids, 0, 4, 8, MAJOR) == 1 + 3
    assert rows_to_peers(ids, 0, 4, 8, COMPACT) == 1 + 2
    assert rows_to_peers(ids, 2, 4, 8, COMPACT) == 1 + 1
    assert rows_to_peers(ids, 0, 1, 8, MAJOR) == 0
    assert (row_bytes("fp8", 7168), row_bytes("bf16", 7168)) == (7392, 14336)


# -- plan and clock ----------------------------------------------------------------------------------------------


def test_the_plan_begins_with_what_tells_most():
    sections = plan(("symm_mem", "cuda_ipc"), 4096, 2000)
    names = [s.name for s in sections]
    assert names[:3] == ["pairs", "conformance symm_mem", "soak"]
    assert names[3:6] == ["prefill 24", "prefill all", "prefill 12"]
    assert names[-4:] == ["nccl", "floor", "conformance cuda_ipc", "masks"]
    assert all(hasattr(multi_gpu_ranks, s.fn) for s in sections)
    some = [s.name for s in plan(("symm_mem", "cuda_ipc"), 512, 20, only=["decode 1", "floor"])]
    assert some == ["conformance symm_mem", "decode 16", "decode 128", "floor"]
    assert {case[0] for case in nccl_cases(4096)} == {4096, 16, 64, 128, 256, 512}


def test_a_section_gets_what_is_left_or_nothing():
    now = [0.0]
    clock = Clock(100, now=lambda: now[0])
    assert clock.budget(60) == 60
    now[0] = 55.0
    assert clock.budget(60) == 45
    now[0] = 71.0
    assert clock.budget(60) is None
    assert clock.budget(20) == 20


class FakeProcesses:
    """Answers as ranks would; `bad` sections raise."""

    def __init__(self, bad=()):
        self.bad, self.calls = bad, []

    def outcomes(self, fn, setup, *args, timeout_s):
        answers = self.run(fn, setup, *args, timeout_s=timeout_s)
        return [Outcome(0, answers[0]), Outcome(1, exit_code=-9)]

    def run(self, fn, setup, *args, timeout_s):
        self.calls.append((fn.__name__, args, timeout_s))
        if (fn.__name__, *args)[:2] in self.bad or fn.__name__ in self.bad:
            raise RankError("the process of rank 1 ended (-9)")
        return [
            {
                "pairs": {"machine": {"gpus": ["H200"] * 2}, "pairs": {}} if rank == 0 else {},
                "conformance": ["compact bf16"],
                "soak": {"trips": 2000, "wrong_elements": 0},
                "prefill": {("compact", "fp8", "dispatch"): ([2e-4 + rank * 1e-4], 1000 + rank)},
                "decode": {"dispatch": ([1e-5], 10), "round trip": ([3e-5], 30), "round trip, host": ([9e-5], 30)},
                "nccl": {
                    (4096, "compact", "fp8", "dispatch"): [9e-4], (16, "expert_major", "fp8", "dispatch"): [5e-5],
                    (16, "expert_major", "bf16", "combine"): [7e-5],
                },
                "masks": ["compact bf16 without rank 1"],
                "floor": {1001: [1e-4], 10: [1e-6], 30: [3e-6]},
            }[fn.__name__]
            for rank in range(2)
        ]  # fmt: skip


def go(tmp_path, processes, limit_s=520.0):
    report = Report({"ranks": 2}, tmp_path / "out.json")
    run(processes, Setup(), plan(("symm_mem", "cuda_ipc"), 4096, 2000), Clock(limit_s), report)
    return report


def test_a_run(tmp_path, capsys):
    processes = FakeProcesses()
    report = go(tmp_path, processes)
    report.end()
    first = report.rows[0]
    assert (first.seconds, first.fastest_s, first.peer_bytes) == (pytest.approx(3e-4), 2e-4, 1001)
    assert (first.nccl_s, first.floor_s) == (9e-4, 1e-4)
    trip = next(r for r in report.rows if r.operation == "round trip" and r.tokens == 16)
    assert (trip.nccl_s, trip.floor_s) == (pytest.approx(12e-5), 3e-6)
    host = next(r for r in report.rows if r.operation == "round trip, host" and r.tokens == 16)
    assert (host.nccl_s, host.floor_s) == (None, None)
    assert ("floor", ("symm_mem", [10, 30, 1001]), 30) in processes.calls
    out = capsys.readouterr().out
    assert out.rstrip().splitlines()[-1].endswith("-")
    assert "NOT DONE" not in out
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["machine"] == {"ranks": 2, "gpus": ["H200"] * 2}
    assert len(written["rows"]) == len(report.rows) == 3 + 5 * 3


def test_a_transport_that_fails_is_replaced_by_the_next(tmp_path, capsys):
    processes = FakeProcesses(bad={("conformance", "symm_mem")})
    go(tmp_path, processes).end()
    asked = [(name, args[0] if args else "") for name, args, _ in processes.calls]
    assert asked[:4] == [("pairs", ""), ("conformance", "symm_mem"), ("conformance", "cuda_ipc"), ("soak", "cuda_ipc")]
    assert ("conformance", "cuda_ipc") not in asked[4:]
    assert "NOT DONE conformance symm_mem RankError" in capsys.readouterr().out


def test_without_a_transport_nothing_is_timed(tmp_path):
    report = go(tmp_path, FakeProcesses(bad={"conformance"}))
    assert report.rows == []
    why = {s["section"]: s.get("skipped") for s in report.sections}
    assert why["prefill 24"] == "no transport has passed its checks"


def test_a_failed_section_costs_only_itself(tmp_path, capsys):
    report = go(tmp_path, FakeProcesses(bad={"nccl"}))
    report.end()
    assert report.rows[0].nccl_s is None
    assert report.rows[0].floor_s == 1e-4
    assert "NOT DONE nccl" in capsys.readouterr().out


def test_late_sections_are_skipped_and_say_so(tmp_path, capsys):
    report = go(tmp_path, FakeProcesses(), limit_s=10.0)
    assert {s["skipped"][:8] for s in report.sections} == {"too late"}


def test_the_table():
    assert doctest.testmod(multi_gpu) == (0, 2)
    rows = timed(
        Section("decode 16", "decode", ("TRANSPORT", 16, 1.0), 30),
        [{"dispatch": ([7e-6, 8e-6, 9e-6], 100)}, {"dispatch": ([5e-6], 120)}],
    )
    assert rows == [Timed("decode 16", 16, "all", "expert_slots", "fp8", "dispatch", 8e-6, 5e-6, 120)]
    beside(rows, {(16, "expert_major", "fp8", "dispatch"): 4e-5}, {120: 2e-6})
    assert table(rows)[1].split() == [
        "16",
        "all",
        "expert_slots",
        "fp8",
        "dispatch",
        "8.0",
        "5.0",
        "40.0",
        "5.0",
        "2.0",
        "25",
        "%",
    ]


# -- what ranks do, on the CPU's transport -----------------------------------------------------------------------


CPU = Setup(device="cpu")


def test_soak_and_conformance_run(processes):
    checked = processes.run(multi_gpu_ranks.conformance, CPU, "shm", timeout_s=200)
    assert "on_timeout=mask, nobody late" in checked[0]
    assert len(checked[0]) == 3 * 5 + 2
    for answer in processes.run(multi_gpu_ranks.soak, CPU, "shm", 80, timeout_s=200):
        assert answer == {"trips": 60, "wrong_elements": 0}


def test_a_wrong_element_is_counted(monkeypatch):
    """The soak on one rank of a World whose combine adds one to an element."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.num_ranks)
    original = ew.Buffer.combine

    def combine(self, x, handle):
        back = original(self, x, handle)
        back.x[3, 5] += 1
        return back

    monkeypatch.setattr(ew.Buffer, "combine", combine)
    (answer,) = ew.World(1).run(lambda rank: multi_gpu_ranks.soak(rank, CPU, "inproc", 16))
    assert answer == {"trips": 12, "wrong_elements": 12}


def on_cpu(group, fn, *args):
    """A function of the ranks with the clock replaced, and memory for the experts' output that only GPUs have."""
    timing = multi_gpu_ranks.gpu_timing
    for name in ("replay", "eager", "host"):
        setattr(timing, name, lambda fn, calls: lambda: (fn(), 1e-3)[1])
    torch.cuda.synchronize = lambda: None
    multi_gpu_ranks._nccl_group = lambda virtual: group
    dispatch = ew.Buffer.dispatch

    def dispatched(self, *args, **options):
        sent = dispatch(self, *args, **options)
        sent.handle.memory = torch.zeros(*sent.x.shape[:-1], self.settings.hidden, dtype=torch.bfloat16)
        return sent

    ew.Buffer.dispatch, ew.Buffer.combine_input = dispatched, lambda self, handle: handle.memory
    try:
        return getattr(multi_gpu_ranks, fn)(group, Setup(device="cpu", hidden=256, topk=2, experts=8), *args)
    finally:
        ew.Buffer.dispatch = dispatch


def test_what_is_timed_is_exact():
    """Prefill, decode and the baseline check their sums before and after, or raise."""
    with Processes(2) as crew:
        for answer in crew.run(on_cpu, "prefill", "shm", 12, None, 1e-6, timeout_s=120):
            kinds = (("fp8", "dispatch"), ("bf16", "dispatch"), ("bf16", "combine"))
            assert set(answer) == {(layout, *kind) for layout in ("compact", "expert_major") for kind in kinds}
            assert answer["expert_major", "bf16", "combine"][1] > answer["expert_major", "fp8", "dispatch"][1] > 0
        for answer in crew.run(on_cpu, "decode", "shm", 6, 1e-6, timeout_s=120):
            assert set(answer) == {"dispatch", "combine", "round trip", "round trip, eager", "round trip, host"}
            assert answer["round trip"][1] == answer["dispatch"][1] + answer["combine"][1]
        cases = [(12, "compact", ("fp8", "bf16")), (6, "expert_major", ("fp8",))]
        for answer in crew.run(on_cpu, "nccl", cases, 1e-6, timeout_s=120):
            assert set(answer) == {
                (12, "compact", "fp8", "dispatch"), (12, "compact", "bf16", "dispatch"),
                (12, "compact", "bf16", "combine"), (6, "expert_major", "fp8", "dispatch"),
                (6, "expert_major", "bf16", "combine"),
            }  # fmt: skip
