"""The entry point: help without torch, errors on one line, exit codes."""

import subprocess
import sys

import pytest

import expertwire
from expertwire.cli.main import run

WRONG = [
    (["demo", "--wire", "fp9"], "--wire must be one of bf16, fp8, got 'fp9'"),
    (["demo", "--ranks", "0"], "--ranks must be in [1, 64], got 0"),
    (["demo", "--ranks", "1000"], "--ranks must be in [1, 64], got 1000"),
    (["demo", "--topk", "17"], "--topk must be in [1, 16], got 17"),
    (["demo", "--save-routing", "/nowhere/at/all/r.npz"], "--save-routing: there is no folder /nowhere/at/all"),
    (["demo", "--steps", "many"], "--steps"),
    (["bench", "--wire", "fp9"], "wire must be one of bf16, fp8, fp8_ue8m0, got 'fp9'"),
    (["bench", "--layout", "round"], "layout must be one of compact, expert_major, expert_slots, got 'round'"),
    (["bench", "--ranks", "3"], "256 experts do not divide by 3 ranks"),
    (["bench", "--tokens", "1,x"], "--tokens must be a number, or several with commas between, got '1,x'"),
    (["bench", "--suite", "all"], "--suite must be one of standard, scaling, got 'all'"),
    (["bench", "--routing", "/nowhere/r.npz"], "is no routing that `expertwire demo --save-routing` wrote"),
    (["bench", "--json", "/nowhere/at/all/b.json"], "--json: there is no folder /nowhere/at/all"),
    (["bench", "--plot", "rows.svg"], "--plot needs the sweep over rows: use --suite scaling"),
    (["bench", "--plot", "rows.svg", "--suite", "standard"], "--plot needs the sweep over rows"),
    (["bench", "--seconds", "0"], "--seconds must be in (0, 600], got 0.0"),
    (["fly"], "No such command 'fly'"),
    (["demo", "--fly"], "No such option: --fly"),
]


@pytest.mark.parametrize(
    ("arguments", "expected"), WRONG, ids=lambda value: " ".join(value) if type(value) is list else ""
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments, expected, capsys):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert expected in captured.err


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"expertwire {expertwire.__version__}\n"


@pytest.mark.parametrize("command", ["demo", "bench", "doctor"])
def test_every_command_explains_itself(command, capsys):
    assert run([command, "--help"]) == 0
    assert command in capsys.readouterr().out


def test_no_command_shows_the_help(capsys):
    assert run([]) == 2
    assert "doctor" in capsys.readouterr().out


def test_help_loads_no_torch():
    code = (
        "import sys; from expertwire.cli.main import run; run(['--help']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numba', 'triton', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "doctor" in done.stdout
