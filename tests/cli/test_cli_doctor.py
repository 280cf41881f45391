"""The doctor's report."""

import json

from expertwire.cli import doctor
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
    monkeypatch.setattr(doctor, "_version", lambda name: "2.9.1+cpu" if name == "torch" else "99.0")
    report = {f.topic: f for f in doctor.examine()}
    assert report["torch"].state == "warn"
    assert report["numpy"].state == "ok"
