"""`expertwire check` and `expertwire litmus`: what is printed, exit codes, JSON, and names that do not exist."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from expertwire.cli import check, jobs, litmus, models
from expertwire.cli.main import run
from expertwire.ordering import litmus as rows
from expertwire.ordering import profiles, signals
from expertwire.ordering.report import Cell


def test_the_seed_question(capsys):
    assert run(["check", "dispatch", "--signal", "write", "--profile", "rc.spec"]) == 1
    out = capsys.readouterr().out
    assert "fails" in out
    assert "STALE READ" in out
    assert "what happens" in out


@pytest.mark.parametrize(("signal", "words"), [("atomic", "states"), ("imm", "completion entries 0 at the writer, 1")])
def test_a_sound_signal_holds_and_shows_its_cost(capsys, signal, words):
    assert run(["check", "dispatch", "--signal", signal, "--profile", "rc.spec"]) == 0
    out = capsys.readouterr().out
    assert "holds" in out
    assert words in out


def test_one_step_is_singular(capsys):
    assert run(["soak", "--ranks", "2", "--tokens", "1", "--steps", "1"]) == 0
    assert "right: 1 step on 2 ranks" in capsys.readouterr().out


def test_pcie_atomics_break_the_atomic(capsys):
    assert run(["check", "dispatch", "--signal", "atomic", "--profile", "rc.ro_pcieatomic", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "fails"
    assert data["trace"]["violation"]["kind"] == "stale read"
    again = ["check", "dispatch", "--signal", "atomic", "--profile", "rc.ro_pcieatomic", "--trace", data["trace"]["id"]]
    assert run([*again, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == data["trace"]


def test_other_modes_do_not_claim_a_proof(capsys):
    arguments = ["check", "barrier", "--signal", "atomic", "--profile", "rc.spec", "--mode", "pct"]
    assert run(arguments) == 0
    assert "bound reached" in capsys.readouterr().out


def test_matrix_of_one_protocol(capsys):
    assert run(["check", "barrier", "--profile", "shmem"]) == 0
    out = capsys.readouterr().out
    assert "holds*" in out
    assert "lost" in out


def test_a_broken_claim_fails_the_matrix(capsys, monkeypatch):
    monkeypatch.setitem(models.CLAIMS, "rc.spec", ("write",))
    assert run(["check", "dispatch", "--profile", "rc.spec"]) == 1
    assert "CLAIM BROKEN: dispatch with signal write on rc.spec: stale read" in capsys.readouterr().out


@pytest.mark.parametrize(("width", "tables"), [(80, 3), (160, 1)])
def test_the_matrix_breaks_into_tables_that_fit(width, tables):
    found = [Cell(m, s, p, "holds", "", 1, 0.0, "", "") for m, s, p in models.cells([*profiles.PROFILES.values()])]
    cells = [c for c in found if c.model == "dispatch"]
    console = Console(width=width, file=io.StringIO())
    check._show(console, cells, 1.0)
    lines = console.file.getvalue().splitlines()
    heads = [line.strip("┃ ").split() for line in lines if line.startswith("┃")]
    assert max(map(len, lines)) <= width
    assert len(heads) == tables
    assert [name for head in heads for name in head if name not in ("┃", "profile")] == list(signals.MECHANISMS)
    assert sum(line.count("holds") for line in lines if line.startswith("│")) == len(cells)


@pytest.mark.parametrize(
    ("options", "why"), [(["--max-states", "100"], "within 100 states"), (["--mode", "pct"], "by mode pct")]
)
def test_a_claim_that_is_not_decided_is_not_broken(capsys, options, why):
    assert run(["check", "barrier", "--profile", "gin.strong", *options]) == 0
    out = capsys.readouterr().out
    assert f"not decided {why}: barrier with signal strong on gin.strong" in out
    assert "bound = not decided" in out
    assert "BROKEN" not in out


def test_a_goal_that_is_never_reached_is_a_failure(capsys, monkeypatch):
    unreachable = replace(models.get("barrier"), goals=("the moon",))
    monkeypatch.setitem(models.MODELS, "barrier", unreachable)
    assert run(["check", "barrier", "--profile", "gin.strong", "--signal", "strong"]) == 1
    assert "never reached: the moon" in capsys.readouterr().out


def test_weakest(capsys):
    assert run(["check", "--weakest", "dispatch", "--signal", "atomic", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"signal": "atomic", "profile": "rc.ooo", "needs": {"amo_waits": "placed"}}
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "gather"], "unknown protocol 'gather'; valid: dispatch, "),
        (["check", "dispatch", "--signal", "smoke"], "unknown signal 'smoke'; valid: write, "),
        (["check", "dispatch", "--profile", "ib"], "unknown profile 'ib'; valid: rc.spec, "),
        (["check", "dispatch", "--mode", "deep"], "unknown mode 'deep'; valid: exhaustive, "),
        (["check", "dispatch", "--signal", "imm", "--profile", "shmem"], "does not exist on shmem; valid: write, "),
        (["check"], "name a protocol"),
        (["check", "--weakest", "nope"], "unknown protocol 'nope'; valid: dispatch, "),
        (["check", "--weakest", "dispatch", "--signal", "smoke"], "unknown signal 'smoke'; valid: write, "),
        (["check", "dispatch", "--trace", "0001"], "--trace replays one check: name a protocol, --signal and"),
        (["check", "--all", "--trace", "0001"], "--trace replays one check"),
        (["check", "dispatch", "--max-states", "0"], "--max-states"),
        (["litmus", "--profile", "ptx", "--id", "R2"], "no case of these litmus rows is on ptx; valid: rc.spec, "),
        (["litmus", "--id", "R99"], "unknown litmus row 'R99'; valid: R1, "),
    ],
)
def test_wrong_use_lists_what_is_valid(capsys, arguments, message):
    assert run(arguments) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert message in said.err


def test_litmus_row_shows_program_and_schedule(capsys):
    assert run(["litmus", "--id", "R2p"]) == 0
    out = capsys.readouterr().out
    assert "put q x=1; amo q f+1" in out
    assert "PLACED B.f" in out


def test_litmus_disagreement_is_an_exit_code(capsys, monkeypatch):
    text = "X1 | rc.spec | F | hi | nobody\n  A: put q x=1; put q f=1\n  B: wait f==1; r=x\n  ? r==0"
    monkeypatch.setattr(litmus.rows, "run", lambda ids, profile: [rows.run_row(row) for row in rows.parse_table(text)])
    assert run(["litmus"]) == 1
    out = capsys.readouterr().out
    assert "DISAGREES" in out
    assert "X1 on rc.spec: allowed, expected forbidden" in out
    assert "1 row run" in out
    assert "1 disagreement X1" in out


def test_litmus_shows_the_expectation_of_what_was_run(capsys):
    assert run(["litmus", "--profile", "rc.spec", "--id", "U1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["expected"], row["found"], row["agrees"]) == ("F", "F", True)


def test_litmus_json(capsys):
    assert run(["litmus", "--profile", "ucx", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {row["id"] for row in data} == {"U1", "U2", "U3"}
    assert all(row["agrees"] for row in data)


def test_interrupt_returns_what_is_done():
    cells = [jobs.Job("barrier", "atomic", "rc.spec"), jobs.Job("dispatch", "atomic", "rc.spec", num_ranks=3)]

    def interrupt(done, states):
        if done:
            raise KeyboardInterrupt

    assert [c.model for c in jobs.run_jobs(cells, interrupt, num_workers=1)] == ["barrier"]
