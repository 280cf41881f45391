"""The bench: small cases are checked and measured, and the numbers are written down."""

import io
import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from rich.console import Console

from expertwire.cli import bench_report
from expertwire.cli.bench_cases import SUITES, Case
from expertwire.cli.bench_measure import Measured
from expertwire.cli.bench_report import results
from expertwire.cli.main import run
from expertwire.errors import InvalidArgument, PeerTimeout
from expertwire.testing import Processes
from expertwire.testing.timing import interleaved, summarise

SMALL = ["bench", "--no-mpi", "--hidden", "256", "--experts", "4", "--topk", "2", "--seconds", "0.01"]


def test_all_layouts_are_measured_and_written(capsys, tmp_path):
    file = tmp_path / "bench.json"
    options = ["--tokens", "0,8", "--layout", "compact,expert_major,expert_slots", "--wire", "fp8"]
    assert run([*SMALL, *options, "--json", str(file)]) == 0
    assert "memory copy" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert {"command", "commit", "machine", "versions", "formula", "results"} == set(report)
    seen = {(r["case"]["tokens"], r["case"]["layout"], r["operation"], r["line"]) for r in report["results"]}
    for layout in ("compact", "expert_major", "expert_slots"):
        assert (0, layout, "dispatch + combine", "gloo") in seen
        for operation in ("dispatch", "combine"):
            for line in ("expertwire", "gloo", "gloo, kept memory", "memory copy"):
                assert (8, layout, operation, line) in seen
    assert all(r["p10_us"] <= r["median_us"] <= r["p90_us"] for r in report["results"])
    major = [r for r in report["results"] if r["case"]["layout"] == "expert_major" and r["operation"] == "dispatch"]
    assert {r["bytes"] for r in major} == {8 * 2 * (256 + 8)}  # selections per rank on average, FP8 and two scales


def test_other_wires_and_routings_are_measured(capsys):
    options = ["--tokens", "4", "--wire", "bf16,fp8_ue8m0", "--combine-wire", "logfmt10", "--routing", "skewed"]
    assert run([*SMALL, *options]) == 0
    assert "bf16/logfmt10, skewed routing" in capsys.readouterr().out


def test_what_is_not_correct_is_not_timed_and_the_rest_is(monkeypatch, capsys, tmp_path):
    measure, file = Processes.run, tmp_path / "bench.json"

    def wrong(self, fn, case, *args, **options):
        if case.tokens == 3:
            raise AssertionError("combine: first difference at row 0")
        if case.tokens == 5:
            raise PeerTimeout(0, "combine receive", [], 1.0, "")
        return measure(self, fn, case, *args, **options)

    monkeypatch.setattr(Processes, "run", wrong)
    assert run([*SMALL, "--tokens", "3,4,5", "--json", str(file)]) == 1
    said = capsys.readouterr().err
    assert "2 of the cases failed" in said
    assert "not correct, so not timed: 2 ranks, 3 x" in said
    assert "not measured: 2 ranks, 5 x" in said
    assert {r["case"]["tokens"] for r in json.loads(file.read_text())["results"]} == {4}


def test_saved_routing_is_used(tmp_path):
    file = tmp_path / "routing.npz"
    np.savez(file, topk_idx=np.arange(2 * 3 * 5 * 2).reshape(2, 3, 5, 2) % 6, num_experts=6)  # 3 ranks, 2 x 5 tokens
    case = Case(ranks=3, tokens=7, hidden=128, experts=6, topk=2, routing=str(file))
    assert case.inputs(1)[1].tolist()[5:] == [[(40 + 2 * t) % 6, (41 + 2 * t) % 6] for t in range(2)]
    with pytest.raises(InvalidArgument, match="3 ranks, 10 tokens, not 3 and 11"):
        Case(ranks=3, tokens=11, hidden=128, experts=6, routing=str(file))


def test_plot_is_an_svg_of_the_sweep_over_rows():
    samples = {"expertwire": [2e-3], "gloo": [3e-3], "memory copy": [1e-3]}
    rows = [r for case in SUITES["scaling"] for r in results(case, [[Measured("dispatch", 10, samples)]])]
    root = ElementTree.fromstring(bench_report.plot(rows))
    assert root.tag.endswith("svg")
    assert len(root.findall("{*}polyline")) == 2


@pytest.mark.parametrize("width", [80, 112])
def test_no_digit_is_lost_on_a_narrow_terminal(width):
    samples = {"expertwire": [1.2345678], "gloo, kept memory": [2.3456789]}
    rows = results(Case(), [[Measured("dispatch + combine", 10**9, samples)]])
    console = Console(width=width, file=io.StringIO())
    bench_report.show(console, "1 rank", rows)
    shown = console.file.getvalue()
    assert "…" not in shown
    assert "dispatch + combine" in shown
    assert "1,234,567.8" in shown
    assert "2,345,678.9" in shown
    assert ("fastest rank" in shown) == (width == 112)


def test_summary_is_that_of_the_slowest_rank():
    slow, fast = [float(n) for n in range(11)], [1.0] * 5
    summary = summarise([fast, slow])
    assert (summary.median_s, summary.fastest_rank_s, summary.p10_s, summary.p90_s) == (5.0, 1.0, 1.0, 9.0)
    assert summary.rounds == 11


def test_lines_take_turns():
    turns = []
    lines = {name: lambda name=name: turns.append(name) for name in "ab"}
    samples = interleaved(lines, lambda value: [value], lambda: turns.append("|"), seconds=1e-9)
    assert {name: len(values) for name, values in samples.items()} == {"a": 5, "b": 5}
    rounds = "".join(turns).split("|")[-10:]
    assert [set(part) for part in rounds] == [{"a"}, {"b"}] * 5
