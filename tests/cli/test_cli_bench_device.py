"""The bench on a GPU: what can be shown without one."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import expertwire as ew
from expertwire.cli import bench_device, bench_device_measure, bench_report
from expertwire.cli.bench_device import DEVICE_SUITES, FORMULA, DeviceCase
from expertwire.cli.bench_measure import Measured
from expertwire.cli.main import run
from expertwire.errors import InvalidArgument
from expertwire.testing import gpu_timing

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
SMALL = DeviceCase(ranks=2, tokens=6, hidden=256, experts=4, topk=2)


@no_gpu
@pytest.mark.parametrize("options", [[], ["--suite", "standard"], ["--processes"], ["--num-sms", "12,24"]], ids=str)
def test_without_a_gpu_one_line_says_so(options, capsys):
    assert run(["bench", "--device", "cuda", *options]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.startswith("error: World: device='cuda' does not work here: torch sees no GPU")
    assert len(out.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "must be cpu or cuda"),
        (["--processes"], "for --device cuda"),
        (["--num-sms", "24"], "for --device cuda"),
        (["--device", "cuda", "--num-sms", "many"], "--num-sms must be a number"),
        (["--device", "cuda", "--num-sms", "2000"], "num-sms must be in"),
        (["--device", "cuda", "--layout", "rows"], "layout must be one of"),
        (["--device", "cuda", "--suite", "all"], "--suite must be one of"),
    ],
)
def test_wrong_options(options, message, capsys):
    assert run(["bench", *options]) == 2
    assert message in capsys.readouterr().err


def test_titles_say_who_shares_what():
    assert replace(SMALL, num_sms=24).title == "2 ranks, 6 x 256, top-2 of 4, compact, bf16, 24 SMs each"
    assert replace(SMALL, processes=True).title == "2 processes, 6 x 256, top-2 of 4, compact, bf16"


def test_bytes_of_a_case():
    case = DeviceCase(tokens=3, hidden=256, experts=8, topk=2, ranks=2, layout="compact", wire="fp8")
    ids = torch.tensor([[0, 1], [0, 7], [4, 6]])  # experts 0 to 3 live on rank 0
    assert case.rows_sent(ids) == 1 + 2 + 1
    assert case.dispatch_bytes(4) == 3 * 512 + 4 * (256 + 2 * 4)
    assert case.combine_bytes(4) == 4 * 512 + 3 * 512
    assert replace(case, layout="expert_major").rows_sent(ids) == 6
    with pytest.raises(InvalidArgument, match="num-sms"):
        replace(case, num_sms=-1)


def test_suites_have_what_the_page_shows():
    assert set(DEVICE_SUITES) == {"standard", "scaling"}
    decode = [c for c in DEVICE_SUITES["standard"] if c.name == "decode"]
    assert [c.tokens for c in decode] == [16, 64, 128, 256]
    assert {c.ranks for c in DEVICE_SUITES["standard"]} == {1, 2, 4, 8}


def fake(samples):
    return [Measured("dispatch", 9_404_416, samples)]


def test_report_of_a_result(capsys):
    samples = {
        "expertwire": [7e-6, 8e-6, 9e-6], "expertwire, eager": [20e-6], "host time of an eager call": [90e-6],
        "plain torch": [80e-6], "floor": [2e-6],
    }  # fmt: skip
    slower = samples | {"expertwire": [10e-6, 10e-6, 10e-6]}
    case = replace(SMALL, num_sms=24)
    rows = bench_report.results(case, [fake(samples), fake(slower)])
    report = bench_report.as_json(rows, FORMULA, {"gpu": "H200"})
    assert report["machine"]["gpu"] == "H200"
    assert report["formula"] == FORMULA
    by_line = {r["line"]: r for r in report["results"]}
    assert by_line["expertwire"]["median_us"] == 10.0
    assert by_line["expertwire"]["fastest_rank_us"] == 8.0
    assert by_line["expertwire"]["gbs"] == pytest.approx(940.442)
    assert by_line["plain torch"]["slower_than_expertwire"] == 8.0
    assert by_line["floor"]["slower_than_expertwire"] == 0.2
    assert by_line["floor"]["case"]["num_sms"] == 24
    json.dumps(report)


def test_lines_take_turns_and_wait_for_all():
    turns = []
    lines = {name: lambda name=name: turns.append(name) or 1e-6 for name in "ab"}
    samples = gpu_timing.take_turns(lines, lambda value: [value], lambda: turns.append("|"), seconds=1e-9)
    assert {name: len(values) for name, values in samples.items()} == {"a": 5, "b": 5}
    assert "".join(turns) == "|a|b" * 6


def test_one_rank_at_a_time(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    busy, seen = [], []

    def work(rank):
        def make():
            busy.append(rank.rank)
            seen.append(len(busy))
            busy.clear()
            return rank.rank

        return gpu_timing.in_turns(rank.rank, 3, rank.barrier, make)

    assert ew.World(3).run(work) == [0, 1, 2]
    assert seen == [1, 1, 1]


@pytest.mark.parametrize("layout", ["compact", "expert_major", "expert_slots"])
@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_the_measurement_itself(monkeypatch, layout, wire):
    """On the CPU's engine, with the clock replaced: every call that is timed is made, and checked with the oracle."""
    calls = []

    def line(fn, times):
        def take():
            calls.append(times)
            fn()
            return 1e-5

        return take

    monkeypatch.setattr(bench_device_measure, "_DEVICE", "cpu")
    for name in ("replay", "eager", "host"):
        monkeypatch.setattr(gpu_timing, name, line)
    monkeypatch.setattr(gpu_timing, "copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="one"))
    case = replace(SMALL, layout=layout, wire=wire)
    of_rank = ew.World(2).run(lambda rank: bench_device_measure.measure(rank, case, 1e-6))
    assert [m.operation for m in of_rank[0]] == ["dispatch", "combine", "round trip"]
    rows = sum(case.rows_sent(case.inputs(rank)[1]) for rank in range(2))
    row_bytes = 512 if wire == "bf16" else 256 + 8
    assert of_rank[0][0].num_bytes == 2 * 6 * 512 + rows * row_bytes  # of both ranks, which share the device
    assert of_rank[0][1].num_bytes == 2 * 6 * 512 + rows * 512
    assert of_rank[0][0].samples["floor"] == [of_rank[0][0].num_bytes / 1e9]
    assert list(of_rank[0][0].samples) == [
        "expertwire", "expertwire, owned tensors", "expertwire, eager", "host time of an eager call", "plain torch",
        "floor",
    ]  # fmt: skip
    assert {10, 40} == set(calls)


def test_a_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(bench_device_measure, "_DEVICE", "cpu")
    monkeypatch.setattr(gpu_timing, "copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    expected = bench_device_measure.oracle(SMALL)
    expected.sums[1][0, 0] += 1
    with pytest.raises(AssertionError, match=r"combine, 2 ranks.*first difference at row 0, column 0"):
        ew.World(2).run(lambda rank: bench_device_measure.measure(rank, SMALL, 1e-6))
    bench_device_measure._oracle.cache_clear()


@no_gpu
def test_the_runner_refuses_before_anything_is_started():
    with pytest.raises(ew.TransportUnavailable, match="torch sees no GPU"):
        bench_device.runner(1.0, None)
