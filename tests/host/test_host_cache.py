"""Compiled kernels are kept in EXPERTWIRE_CACHE_DIR: a second process compiles nothing, and nothing warns."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from expertwire.host import kernels

SCRIPT = """
import numpy as np
from expertwire.host import compiled
memory = np.zeros(4, np.int64)
compiled.publish(memory.ctypes.data, 1)
compiled.move_rows(memory.ctypes.data + 8 * np.arange(2), memory.ctypes.data + 8 * np.arange(2, 4), 8, False)
assert memory.tolist() == [1, 0, 1, 0]
used = [compiled.publish, compiled.move_rows]
print(sum(sum(f.stats.cache_hits.values()) for f in used), sum(sum(f.stats.cache_misses.values()) for f in used))
"""


@pytest.mark.skipif(kernels.numba_missing() is not None, reason=kernels.numba_missing() or "")
def test_a_second_process_compiles_nothing(tmp_path):
    source = str(Path(kernels.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": source, "EXPERTWIRE_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    seen = [subprocess.run(command, env=environment, capture_output=True, text=True, check=False) for _ in range(2)]
    assert [(run.returncode, run.stdout.split(), run.stderr) for run in seen] == [
        (0, ["0", "2"], ""),
        (0, ["2", "0"], ""),
    ]
    assert list((tmp_path / "numba").rglob("*.nbi"))


UNKEPT = """
import expertwire as ew
from expertwire.host import compiled
ew.World(1).run(lambda rank: ew.Buffer(rank, num_experts=2, hidden=8, num_topk=1, num_max_tokens_per_rank=1).close())
print(sum(compiled.publish.stats.cache_hits.values()), compiled.publish.stats.cache_path)
"""


@pytest.mark.skipif(kernels.numba_missing() is not None, reason=kernels.numba_missing() or "")
@pytest.mark.parametrize("folder", ["/proc/nope", "/etc/hostname/x"])
def test_where_nothing_can_be_kept_a_process_compiles_for_itself(folder):
    """Also nothing lands where numba would look by itself: beside the sources."""
    environment = {**os.environ, "PYTHONPATH": str(Path(kernels.__file__).parents[2]), "EXPERTWIRE_CACHE_DIR": folder}
    command = [sys.executable, "-W", "error", "-c", UNKEPT]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.split(), run.stderr) == (0, ["0", "None"], "")
