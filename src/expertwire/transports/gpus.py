"""Which GPU every rank has, and why a transport between processes cannot join them."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch


@dataclass(frozen=True)
class Seat:
    """Where a rank sits. `unreachable`: uuids of GPUs that its process sees and its GPU has no peer access to."""

    host: str
    uuid: str
    index: int
    name: str
    num_sms: int
    unreachable: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"cuda:{self.index} of {self.host} ({self.name})"


def seat(device: torch.device) -> Seat:
    """This rank's seat."""
    facts = torch.cuda.get_device_properties(device)
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    unreachable = [i for i in others if not torch.cuda.can_device_access_peer(device.index, i)]
    uuids = tuple(str(torch.cuda.get_device_properties(i).uuid) for i in unreachable)
    return Seat(
        socket.gethostname(), str(facts.uuid), device.index, facts.name, facts.multi_processor_count, uuids
    )  # fmt: skip


def symm_mem_unavailable() -> str | None:
    """None if this process can use torch's symmetric memory with its backend "CUDA", else the reason and the remedy."""
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return f"torch {torch.__version__} has no symmetric memory; install torch >= 2.10, or use 'cuda_ipc'"
    from torch.distributed import _symmetric_memory

    if _symmetric_memory.get_backend(torch.device("cuda")) == "CUDA":
        return None
    try:
        _symmetric_memory.set_backend("CUDA")
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        return f"this process cannot use torch's backend 'CUDA' for it ({why}); unset TORCH_SYMMMEM, or use 'cuda_ipc'"
    return None


def cuda_ipc_problem(seats: Sequence[Seat]) -> str | None:
    """None if CUDA IPC joins these ranks, else the reason and the remedy. The same on all ranks."""
    for (a, first), (b, second) in _pairs(seats):
        if first.host != second.host:
            return (
                f"cuda_ipc joins processes of one host, but rank {a} is on {first.host} and rank {b} on {second.host}; "
                "use 'symm_mem' if their GPUs are in one NVLink domain"
            )
    return _no_peer_access(seats)


def symm_mem_problem(seats: Sequence[Seat]) -> str | None:
    """None if symmetric memory joins these ranks, else the reason and the remedy. The same on all ranks."""
    for (a, first), (b, second) in _pairs(seats):
        if first.uuid == second.uuid:
            return (
                f"symm_mem needs a GPU for each rank, but ranks {a} and {b} share {first}; give each rank a GPU of its "
                "own (torch.cuda.set_device), or use 'cuda_ipc'"
            )
        if (first.host, first.index) == (second.host, second.index):
            return (
                f"torch tells GPUs apart by index, and ranks {a} and {b} both call theirs cuda:{first.index}; make all "
                "GPUs visible to every rank (CUDA_VISIBLE_DEVICES), or use 'cuda_ipc'"
            )
    return _no_peer_access(seats)


def _no_peer_access(seats: Sequence[Seat]) -> str | None:
    for (a, first), (b, second) in _pairs(seats):
        if second.uuid in first.unreachable or first.uuid in second.unreachable:
            return (
                f"rank {a} on {first} and rank {b} on {second} have no peer access to each other; use GPUs that are "
                "joined by NVLink, or one GPU (nvidia-smi topo -p2p r shows pairs)"
            )
    return None


def _pairs(seats: Sequence[Seat]) -> combinations[tuple[tuple[int, Seat], tuple[int, Seat]]]:
    return combinations(enumerate(seats), 2)


PROBLEMS = {"cuda_ipc": cuda_ipc_problem, "symm_mem": symm_mem_problem}
