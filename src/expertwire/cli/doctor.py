"""`expertwire doctor`: what this machine offers, and what to do about what it does not."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

from expertwire.cli.finding import Finding, installed, numbers

_STYLE = {"ok": "green", "warn": "yellow", "no": "red"}
_PACKAGES = {"torch": "2.10", "numpy": "1.26", "typer": "0.15", "rich": "13.7"}
_GIB = 1 << 30


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False) -> None:
    """Say what works on this machine: versions, engines, transports. Exit code 1 if expertwire cannot run."""
    findings = examine()
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    if any(f.state == "no" and f.topic in ("python", *_PACKAGES) for f in findings):
        raise typer.Exit(1)


def examine() -> list[Finding]:
    """All findings. Starts no process and creates nothing that outlives the call."""
    checks: list[Callable[[], list[Finding]]] = [_versions, _engines, _transports, _machine, _gpu, _mpi]
    return [finding for check in checks for finding in check()]


def _versions() -> list[Finding]:
    import expertwire

    found = [Finding("expertwire", "ok", expertwire.__version__)]
    python = platform.python_version()
    old = sys.version_info < (3, 11)
    found.append(Finding("python", "no" if old else "ok", python, "use Python 3.11 or newer" if old else ""))
    for name, least in _PACKAGES.items():
        version = installed(name)
        if version is None:
            found.append(Finding(name, "no", "not installed", f"pip install '{name}>={least}'"))
        elif numbers(version) < numbers(least):
            found.append(Finding(name, "warn", f"{version} is older than {least}", f"pip install '{name}>={least}'"))
        else:
            found.append(Finding(name, "ok", version))
    return found


def _engines() -> list[Finding]:
    from expertwire.host.kernels import numba_missing

    found = []
    reason = numba_missing()
    if reason:
        found.append(Finding("engine numba", "no", "not installed", "pip install 'expertwire[cpu]'"))
        found.append(Finding("engine torch", "warn", "in place of numba: the same bits, several times slower"))
    else:
        found.append(Finding("engine numba", "ok", f"numba {installed('numba')}, llvmlite {installed('llvmlite')}"))
        found.append(Finding("engine torch", "ok", "engine='torch' for comparison"))
        found.append(_kernel_cache())
    return found


def _kernel_cache() -> Finding:
    from expertwire import _env

    folder = _env.cache_dir("numba")
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        remedy = "set EXPERTWIRE_CACHE_DIR to a folder that can be written"
        return Finding("kernel cache", "warn", f"{folder}: {error.strerror}; every process compiles anew", remedy)
    num_files = sum(len(files) for _, _, files in os.walk(folder))
    state = f"{num_files} files" if num_files else "empty, the first use compiles for some seconds"
    return Finding("kernel cache", "ok", f"{folder} ({state})")


def _transports() -> list[Finding]:
    from expertwire.engines import TRANSPORTS

    found = []
    for name, transport in TRANSPORTS.items():
        reason = transport.unavailable() or (_shm_problem() if name == "shm" else None)
        if reason:
            what, _, remedy = reason.partition("; ")
            found.append(Finding(f"transport {name}", "no", what, remedy))
        else:
            found.append(Finding(f"transport {name}", "ok", transport.mechanism))
    return found


def _shm_problem() -> str | None:
    """Create a small window and map it the way a peer does, through /proc."""
    import mmap

    try:
        own = os.memfd_create("expertwire-doctor")
        try:
            os.ftruncate(own, mmap.PAGESIZE)
            with mmap.mmap(own, mmap.PAGESIZE) as memory:
                memory[:2] = b"ok"
                peer = os.open(f"/proc/{os.getpid()}/fd/{own}", os.O_RDWR)
                try:
                    with mmap.mmap(peer, mmap.PAGESIZE) as seen:
                        if seen[:2] != b"ok":
                            return (
                                "a window mapped through /proc shows other bytes; use ew.World for ranks in one process"
                            )
                finally:
                    os.close(peer)
            os.close(os.pidfd_open(os.getpid()))
        finally:
            os.close(own)
    except OSError as error:
        return f"a window cannot be created and mapped: {error}; use ew.World for ranks in one process"
    return None


def _machine() -> list[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory, limit = _memory()
    found = [
        Finding(
            "cores",
            "ok" if cores > 1 else "warn",
            f"{cores} for this process, {platform.machine()}",
            "" if cores > 1 else "ranks take turns on one core: correct, but slow",
        )
    ]
    detail = f"{memory / _GIB:.1f} GiB" + (f", limited to {limit / _GIB:.1f} GiB" if limit else "")
    found.append(Finding("memory", "ok", detail))
    return found


def _memory() -> tuple[int, int | None]:
    """Bytes of the machine, and the limit of the control group if there is a lower one."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            limit = int(file.read())
    except (OSError, ValueError):
        return total, None
    return total, limit if limit < total else None


def _gpu() -> list[Finding]:
    if installed("torch") is None:
        return []
    from expertwire.cli import doctor_gpu

    return doctor_gpu.findings(doctor_gpu.look())


def _mpi() -> list[Finding]:
    if importlib.util.find_spec("mpi4py") and mpiexec():
        return [Finding("mpi", "ok", f"mpi4py {installed('mpi4py')}, {mpiexec()}: a line of comparison in bench")]
    remedy = "pip install 'expertwire[mpi]' for a line of comparison in bench; nothing else needs it"
    return [Finding("mpi", "no", "mpi4py or mpiexec is missing", remedy)]


def mpiexec() -> str | None:
    """The launcher beside this Python, or on the path."""
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return beside if os.access(beside, os.X_OK) else shutil.which("mpiexec")


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        for f in findings:
            typer.echo(f"{f.state:4}  {f.topic}: {f.detail}" + (f" ({f.remedy})" if f.remedy else ""))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "what", "found", "to do"):
        table.add_column(name, overflow="fold")
    for f in findings:
        table.add_row(f"[{_STYLE[f.state]}]{f.state}[/]", f.topic, f.detail, f.remedy)
    console.print(table)
