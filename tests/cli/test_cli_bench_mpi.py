"""Ranks under mpiexec: what is left of them after Ctrl-C."""

import importlib.util
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from expertwire.cli.bench_mpi import MpiLauncher
from expertwire.cli.doctor import mpiexec

NO_MPI = not mpiexec() or importlib.util.find_spec("mpi4py") is None
SHARED = Path("/dev/shm")


def announce_and_hang(group, folder, communicator):
    communicator.Barrier()
    Path(folder, f"{communicator.Get_rank()}").touch()
    threading.Event().wait()


@pytest.mark.skipif(NO_MPI, reason="mpiexec or mpi4py is not installed")
def test_an_interrupt_leaves_no_shared_memory_of_mpi(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    before = set(SHARED.glob("mpich_shm_*"))

    def interrupt():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        MpiLauncher(mpiexec()).run(announce_and_hang, str(tmp_path), num_ranks=2)
    assert set(SHARED.glob("mpich_shm_*")) <= before
