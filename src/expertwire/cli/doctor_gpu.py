"""What the doctor says about GPUs: `look` asks torch and the driver, `findings` judges what it saw."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from expertwire.cli.finding import Finding, State, installed, numbers

TRITON = ("3.6", "3.10")  # from, and not including
_GIB = 1 << 30
_MPS_REMEDY = "for processes that share a GPU start MPS: nvidia-cuda-mps-control -d"
_NO_REMEDY = "nothing to do where there is none; see docs/gpu.md"


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    num_sms: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Facts:
    """`unreachable`: pairs of GPUs without peer access. `ipc`, `symm_mem`: None, or why memory cannot be shared so."""

    gpus: tuple[Gpu, ...] = ()
    torch_cuda: str | None = None
    driver: str = "unknown"
    triton: str | None = None
    mps_folder: str = ""
    mps_runs: bool = False
    unreachable: tuple[tuple[int, int], ...] = ()
    ipc: str | None = None
    symm_mem: str | None = None


def look() -> Facts:
    """The facts of this machine. Never raises for what a machine lacks."""
    import torch

    from expertwire.transports.gpus import symm_mem_unavailable

    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    all_facts = [torch.cuda.get_device_properties(i) for i in range(count)]
    return Facts(
        gpus=tuple(Gpu(f.name, f.total_memory, f.multi_processor_count, (f.major, f.minor)) for f in all_facts),
        torch_cuda=torch.version.cuda,
        driver=_driver(),
        triton=installed("triton") or installed("pytorch-triton"),
        mps_folder=folder,
        mps_runs=_mps_runs(Path(folder)),
        unreachable=tuple(
            (a, b) for a in range(count) for b in range(count) if a != b and not torch.cuda.can_device_access_peer(a, b)
        ),
        ipc=_ipc_problem() if count else None,
        symm_mem=symm_mem_unavailable() if count else None,
    )


def findings(facts: Facts) -> list[Finding]:
    """GPUs, versions, MPS, peer access, and what joins ranks on GPUs."""
    if not facts.gpus:
        why = "torch sees no GPU" if facts.torch_cuda else "torch is built without CUDA and sees no GPU"
        return [
            Finding(topic, "no", why, _NO_REMEDY)
            for topic in ("device cuda", "transport inproc (cuda)", "transport cuda_ipc", "transport symm_mem")
        ] + [_nvshmem()]
    triton = _triton(facts.triton)
    device = Finding("device cuda", triton.state, f"{len(facts.gpus)} GPU(s), Triton kernels", triton.remedy)
    return [device, *_gpus(facts), triton, _mps(facts), _peers(facts), *_transports(facts), _nvshmem()]


def _gpus(facts: Facts) -> list[Finding]:
    found = []
    for index, gpu in enumerate(facts.gpus):
        old = gpu.capability < (9, 0)
        detail = (
            f"{gpu.name}, {gpu.memory_bytes / _GIB:.1f} GiB, {gpu.num_sms} SMs, compute capability "
            f"{gpu.capability[0]}.{gpu.capability[1]}"
        )
        remedy = "older than Hopper: nothing has been measured on such a GPU" if old else ""
        found.append(Finding(f"gpu {index}", "warn" if old else "ok", detail, remedy))
    detail = f"driver {facts.driver}, torch built for CUDA {facts.torch_cuda}"
    return [*found, Finding("cuda", "ok", detail)]


def _triton(version: str | None) -> Finding:
    least, below = TRITON
    remedy = f"pip install 'triton>={least},<{below}'"
    if version is None:
        return Finding("triton", "no", "not installed, and GPU kernels need it", remedy)
    if numbers(least) <= numbers(version)[:2] < numbers(below):
        return Finding("triton", "ok", version)
    return Finding(
        "triton", "warn", f"{version} has not been tried: kernels are tested with {least} to <{below}", remedy
    )


def _mps(facts: Facts) -> Finding:
    if facts.mps_runs:
        return Finding("mps", "ok", f"a control daemon serves {facts.mps_folder}")
    detail = f"no control daemon in {facts.mps_folder}: processes that share a GPU take turns, and a wait takes ms"
    return Finding("mps", "warn", detail, _MPS_REMEDY)


def _peers(facts: Facts) -> Finding:
    count = len(facts.gpus)
    if count == 1:
        return Finding("peer access", "ok", "one GPU, no pairs")
    if not facts.unreachable:
        return Finding("peer access", "ok", f"all {count * (count - 1) // 2} pairs of {count} GPUs")
    pairs = sorted({(min(pair), max(pair)) for pair in facts.unreachable})
    shown = ", ".join(f"{a}-{b}" for a, b in pairs[:8]) + (", ..." if len(pairs) > 8 else "")
    return Finding(
        "peer access", "warn", f"none between {shown}", "ranks on such pairs cannot be joined; see nvidia-smi topo"
    )


def _transports(facts: Facts) -> list[Finding]:
    stores = "stores, block barrier, release at sys scope; ld.acquire.sys"
    found = [Finding("transport inproc (cuda)", "ok", stores)]
    if facts.ipc:
        found.append(Finding("transport cuda_ipc", "no", facts.ipc, "use ew.World for ranks in one process"))
    elif facts.unreachable:
        remedy = "ranks on one GPU, or on GPUs with peer access"
        found.append(Finding("transport cuda_ipc", "warn", "not between all GPUs, see peer access", remedy))
    else:
        alone = len(facts.gpus) == 1 and not facts.mps_runs
        state: State = "warn" if alone else "ok"
        found.append(Finding("transport cuda_ipc", state, stores, _MPS_REMEDY if alone else ""))
    if facts.symm_mem:
        what, _, remedy = facts.symm_mem.partition("; ")
        return [*found, Finding("transport symm_mem", "no", what, remedy)]
    if len(facts.gpus) == 1:
        detail, remedy = "for one rank only: it needs a GPU for each", "use cuda_ipc for ranks that share this GPU"
        return [*found, Finding("transport symm_mem", "warn", detail, remedy)]
    if facts.unreachable:
        detail, remedy = "not between all GPUs, see peer access", "give ranks GPUs with peer access"
        return [*found, Finding("transport symm_mem", "warn", detail, remedy)]
    return [*found, Finding("transport symm_mem", "ok", f"{stores}; NVLink multicast is switched off")]


def _nvshmem() -> Finding:
    remedy = "use cuda_ipc within a host, symm_mem within an NVLink domain"
    return Finding("transport nvshmem", "no", "does not exist yet: nothing joins GPUs of different machines", remedy)


def _mps_runs(folder: Path) -> bool:
    """Whether the daemon that owns this folder is there: it leaves its process id in it, also after a crash."""
    try:
        pid = int((folder / "nvidia-cuda-mps-control.pid").read_text())
        return "mps" in Path(f"/proc/{pid}/comm").read_text()
    except (OSError, ValueError):
        return False


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        program = shutil.which("nvidia-smi")
        if program is None:
            return "unknown"
        command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
        except (OSError, subprocess.TimeoutExpired):
            return "unknown"
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found.group() if found else "unknown"


def _ipc_problem() -> str | None:
    """None if this process can offer device memory to another one."""
    import torch

    try:
        offer = torch.zeros(1, device="cuda").untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return f"memory cannot be offered to another process: {str(error).splitlines()[0]}"
    # Nobody takes the offer: without this torch warns, when this process ends, that somebody still has the memory.
    torch.UntypedStorage._release_ipc_counter(*offer[4:6], device=offer[0])  # type: ignore[no-untyped-call]
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    return None
