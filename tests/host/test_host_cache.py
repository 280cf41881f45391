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
