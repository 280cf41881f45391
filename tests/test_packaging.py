"""The wheel: what is in it, and that it works without the source tree."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = """
import expertwire as ew, torch
def step(rank):
    with ew.Buffer(rank, num_experts=2, hidden=8, num_topk=1, num_max_tokens_per_rank=4) as buf:
        x = torch.full((3, 8), rank.rank + 1.0, dtype=torch.bfloat16)
        sent = buf.dispatch(x, torch.tensor([[0], [1], [1]]))
        return torch.equal(buf.combine(sent.x, sent.handle).x, x)
assert ew.World(2).run(step) == [True, True]
print(ew.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (found,) = folder.glob("expertwire-*.whl")
    return found


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"expertwire/__init__.py", "expertwire/py.typed", "expertwire/host/rows.py"} <= set(names)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"expertwire"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_works_without_the_source_tree(wheel, tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "-q", "--target", tmp_path / "site", wheel]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    environment = {"PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()).is_relative_to(tmp_path)
