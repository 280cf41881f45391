"""Ranks started by mpiexec instead of by the library, so that MPI is measured in the same processes as everything else.

`MpiLauncher.run` is `testing.Processes.run` with one more argument for the function: the communicator.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from expertwire.testing.ranks import RankError

# Open MPI refuses root and more ranks than cores unless told otherwise; MPICH reads none of these.
_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


class MpiLauncher:
    """Starts fresh processes for every call."""

    def __init__(self, mpiexec: str) -> None:
        self._mpiexec = mpiexec

    def run(self, fn: Callable[..., Any], *args: Any, num_ranks: int) -> list[Any]:
        """Results of `fn(group, *args, communicator)` in rank order. If interrupted, it ends what it started."""
        with tempfile.TemporaryDirectory(prefix="expertwire-mpi-") as folder:
            Path(folder, "call").write_bytes(pickle.dumps((fn, args)))
            command = [self._mpiexec, "-n", str(num_ranks), sys.executable, "-m", __name__, folder]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env={**os.environ, **_ENVIRONMENT}, start_new_session=True,
            )  # fmt: skip
            try:
                output, _ = process.communicate()
            except BaseException:
                _end(process)
                raise
            if process.returncode:
                lines = output.strip().splitlines() or [f"{self._mpiexec} ended with {process.returncode}"]
                reason = next((line for line in lines if "Error" in line), lines[-1])
                raise RankError(f"under {self._mpiexec}: {reason} (--no-mpi leaves MPI out)")
            return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(num_ranks)]


def _end(process: subprocess.Popen[str]) -> None:
    """End mpiexec, which ends its ranks: first as Ctrl-C does, so that MPI removes its shared memory."""
    for number, grace_s in ((signal.SIGINT, 3.0), (signal.SIGTERM, 3.0), (signal.SIGKILL, None)):
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=grace_s)
            return


def _serve(folder: str) -> None:
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    communicator = MPI.COMM_WORLD
    rank, num_ranks = communicator.Get_rank(), communicator.Get_size()
    store = dist.FileStore(os.path.join(folder, "store"), num_ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=120))
    fn, args = pickle.loads(Path(folder, "call").read_bytes())
    result = fn(dist.group.WORLD, *args, communicator)
    Path(folder, f"result{rank}").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    _serve(sys.argv[1])
