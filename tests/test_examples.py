"""Every example runs and says ok, and is short."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def _run(*command: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=EXAMPLES.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_examples_are_the_ones_that_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "01_one_process.py",
        "02_torchrun.py",
        "03_decode_two_batches.py",
        "04_moe_layer.py",
    }


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_is_short(path):
    assert len(path.read_text().splitlines()) < 60


@pytest.mark.parametrize("name", ["01_one_process", "03_decode_two_batches", "04_moe_layer"])
def test_example_runs(name):
    assert _run(sys.executable, f"examples/{name}.py").endswith("ok\n")


def test_torchrun_example_runs():
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = _run(sys.executable, *launcher, "examples/02_torchrun.py")
    assert output.count(": ok") == 2


def test_torchrun_example_says_how_to_start_it():
    done = subprocess.run([sys.executable, EXAMPLES / "02_torchrun.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "torchrun --nproc-per-node" in done.stderr


def test_the_program_of_the_readme_runs(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(), re.DOTALL)
    alone = program.replace(
        'dist.init_process_group("gloo")',
        f'dist.init_process_group("gloo", init_method="file://{tmp_path}/meet", rank=0, world_size=1)',
    )
    assert alone != program
    check = "\nassert back.x.shape == (512, 1024)\ndist.destroy_process_group()\n"
    _run(sys.executable, "-W", "error", "-c", alone + check)
