"""The doctor's report."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from expertwire.cli import doctor, doctor_gpu
from expertwire.cli.doctor_gpu import Facts, Gpu, findings
from expertwire.cli.main import run


def test_json_report_names_what_works(capsys):
    assert run(["doctor", "--json"]) == 0
    report = {finding["topic"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {"python", "torch", "engine torch", "transport inproc", "transport shm", "cores", "memory"} <= set(report)
    assert report["transport inproc"]["state"] == "ok"
    assert all(finding["state"] in ("ok", "warn", "no") for finding in report.values())


def test_whatever_is_missing_comes_with_a_remedy(capsys):
    assert run(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert [finding["topic"] for finding in findings if finding["state"] == "no" and not finding["remedy"]] == []


def test_plain_report_has_one_line_per_finding(capsys):
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == len(doctor.examine())


def test_cache_that_cannot_be_written_is_a_warning(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("EXPERTWIRE_CACHE_DIR", str(blocked))
    (finding,) = [f for f in doctor.examine() if f.topic == "kernel cache"]
    assert finding.state == "warn"
    assert "EXPERTWIRE_CACHE_DIR" in finding.remedy


def test_missing_numba_is_said_with_its_remedy(monkeypatch):
    monkeypatch.setattr("expertwire.host.kernels.numba_missing", lambda: "numba is not installed")
    report = {f.topic: f for f in doctor.examine()}
    assert report["engine numba"].state == "no"
    assert report["engine numba"].remedy == "pip install 'expertwire[cpu]'"
    assert report["engine torch"].state == "warn"


def test_a_package_that_is_too_old_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda name: "2.9.1+cpu" if name == "torch" else "99.0")
    report = {f.topic: f for f in doctor.examine()}
    assert report["torch"].state == "warn"
    assert report["numpy"].state == "ok"


# -- GPUs --------------------------------------------------------------------------------------------------------

H200 = Gpu("NVIDIA H200", 150_754_820_096, 132, (9, 0))
NODE = Facts((H200,) * 4, "13.0", "580.159.04", "3.6.0", "/tmp/nvidia-mps", mps_runs=True)


def by_topic(facts):
    found = findings(facts)
    assert [f.topic for f in found if f.state != "ok" and not f.remedy] == []
    return {f.topic: f for f in found}


def test_a_node_of_gpus_is_all_right():
    report = by_topic(NODE)
    assert {f.state for topic, f in report.items() if topic != "transport nvshmem"} == {"ok"}
    assert report["gpu 3"].detail == "NVIDIA H200, 140.4 GiB, 132 SMs, compute capability 9.0"
    assert report["cuda"].detail == "driver 580.159.04, torch built for CUDA 13.0"
    assert report["peer access"].detail == "all 6 pairs of 4 GPUs"


@pytest.mark.parametrize(
    ("changes", "topic", "state", "text"),
    [
        ({"triton": None}, "triton", "no", "not installed"),
        ({"triton": None}, "device cuda", "no", "4 GPU"),
        ({"triton": "3.10.1"}, "triton", "warn", "3.10.1 has not been tried"),
        ({"mps_runs": False}, "mps", "warn", "no control daemon in /tmp/nvidia-mps"),
        ({"gpus": (H200,), "mps_runs": False}, "transport cuda_ipc", "warn", "stores"),
        ({"gpus": (H200,)}, "transport symm_mem", "warn", "for one rank only"),
        ({"unreachable": ((0, 2), (2, 0))}, "peer access", "warn", "none between 0-2"),
        ({"unreachable": ((0, 2),)}, "transport symm_mem", "warn", "see peer access"),
        ({"ipc": "memory cannot be offered"}, "transport cuda_ipc", "no", "cannot be offered"),
        ({"symm_mem": "torch 2.4 has none; install more"}, "transport symm_mem", "no", "torch 2.4 has none"),
        ({"gpus": (Gpu("T4", 1 << 34, 40, (7, 5)),)}, "gpu 0", "warn", "T4, 16.0 GiB, 40 SMs"),
        ({"gpus": ()}, "device cuda", "no", "torch sees no GPU"),
        ({"gpus": (), "torch_cuda": None}, "transport symm_mem", "no", "built without CUDA"),
        ({}, "transport nvshmem", "no", "does not exist yet"),
    ],
)
def test_what_a_machine_lacks(changes, topic, state, text):
    found = by_topic(replace(NODE, **changes))[topic]
    assert (found.state, text in found.detail) == (state, True), found


def test_the_supported_versions_of_triton_are_those_of_the_package():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"triton>={doctor_gpu.TRITON[0]},<{doctor_gpu.TRITON[1]}"' in text


def test_mps_runs_where_its_process_does(tmp_path):
    assert not doctor_gpu._mps_runs(tmp_path)
    pid = tmp_path / "nvidia-cuda-mps-control.pid"
    pid.write_text("no number")
    assert not doctor_gpu._mps_runs(tmp_path)
    pid.write_text(str(os.getpid()))  # some other process has that number now
    assert not doctor_gpu._mps_runs(tmp_path)


def test_look_says_nothing_of_what_is_not_there():
    facts = doctor_gpu.look()
    assert (facts.gpus == ()) is not torch.cuda.is_available()
    assert facts.symm_mem is None
