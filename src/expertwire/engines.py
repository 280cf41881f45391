"""Chooses the transport and the row work for a group, and joins them to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from expertwire.errors import InvalidArgument, TransportUnavailable
from expertwire.host import kernels
from expertwire.host.engine import HostEngine
from expertwire.host.halves import acts
from expertwire.host.remote import RemoteRuntime
from expertwire.host.runtime import HostRuntime
from expertwire.layouts.window import WindowLayout
from expertwire.protocols.barrier import barrier
from expertwire.topology import Placement
from expertwire.transports import gpus
from expertwire.transports.base import Bootstrap, Transport
from expertwire.transports.fabric import FabricTransport
from expertwire.transports.inproc import Inproc, Rank
from expertwire.transports.shm import Shm

if TYPE_CHECKING:
    from expertwire.kernels.meeting import Meeting
    from expertwire.kernels.runtime import DeviceRuntime
    from expertwire.kernels.state import DeviceMemory

TRANSPORTS: dict[str, type[Transport]] = {"inproc": Inproc, "shm": Shm, "fabric": FabricTransport}
DEVICE_TRANSPORTS = ("inproc", "cuda_ipc", "symm_mem")
ENGINES = ("auto", "numba", "torch", "triton")


def transport_name(requested: str, group: Bootstrap) -> str:
    """The transport that `requested` means for this group; raises where it cannot work."""
    if requested != "auto" and requested not in TRANSPORTS:
        raise InvalidArgument(
            f"transport must be 'auto' or one of {', '.join(map(repr, TRANSPORTS))}, got {requested!r}"
        )
    fitting, have = "shm", "processes"
    if isinstance(group, Rank):
        fitting, have = "inproc", "threads of one ew.World"
        if group.crew.fabric is not None:
            fitting, have = "fabric", "threads of an ew.World with a simulated fabric"
    name = fitting if requested == "auto" else requested
    if name != fitting:
        raise TransportUnavailable(f"transport={name!r} does not fit this group, whose ranks are {have}; use 'auto'")
    reason = TRANSPORTS[name].unavailable()
    if reason:
        raise TransportUnavailable(f"transport {name!r} does not work here: {reason}")
    return name


def device_transport_name(requested: str, group: Bootstrap) -> str:
    """The transport between ranks on GPUs that `requested` means for this group: "auto" is "inproc" for the ranks of a
    World and "cuda_ipc" for processes, which also joins GPUs with peer access."""
    if requested == "nvshmem":
        raise TransportUnavailable(
            "transport='nvshmem' does not exist yet: no kernel here puts through NVSHMEM, so nothing joins GPUs of "
            "different machines; within one NVLink domain use 'symm_mem', within one host 'cuda_ipc'"
        )
    if requested != "auto" and requested not in DEVICE_TRANSPORTS:
        names = ", ".join(map(repr, DEVICE_TRANSPORTS))
        raise InvalidArgument(f"on a GPU, transport must be 'auto' or one of {names}, got {requested!r}")
    threads = isinstance(group, Rank)
    fitting = ("inproc",) if threads else ("cuda_ipc", "symm_mem")
    if requested not in ("auto", *fitting):
        have, use = "threads of one ew.World" if threads else "processes", " or ".join(map(repr, fitting))
        raise TransportUnavailable(
            f"transport={requested!r} does not fit this group, whose ranks are {have}; use {use}"
        )
    reason = gpus.symm_mem_unavailable() if requested == "symm_mem" else None
    if reason:
        raise TransportUnavailable(f"transport 'symm_mem' does not work here: {reason}")
    return fitting[0] if requested == "auto" else requested


def device_runtime(
    group: Bootstrap, transport: str, device: str, placement: Placement, *, capacity: int, hidden: int, num_topk: int,
    num_banks: int, timeout_s: float | None, mask_peers: bool, end_late: bool,
    num_sms: int | None, over_rows: bool, debug_poison: bool,
) -> DeviceRuntime:  # fmt: skip
    """Windows on the GPUs of all ranks, and the kernels that work on them. Collective."""
    from expertwire.kernels.engine import DeviceEngine
    from expertwire.kernels.runtime import DeviceRuntime

    here = torch.device(device)
    here = torch.device("cuda", torch.cuda.current_device() if here.index is None else here.index)
    seats: list[gpus.Seat] = group.all_gather(gpus.seat(here))
    memory = device_memory(group, transport, here, seats)
    seat, meeting = seats[group.rank], host_meeting(group, transport)
    if mask_peers and meeting is None and group.num_ranks > 1:
        raise TransportUnavailable(
            f"rank {group.rank}: on_timeout='mask' on a GPU needs ranks of one host, which see each other's processes "
            "end; use on_timeout='raise'"
        )
    if end_late and transport == "inproc":
        raise TransportUnavailable(
            f"rank {group.rank}: on_timeout='end' ends a process, and the ranks of a World share one; use 'mask'"
        )
    beside = sum(other.uuid == seat.uuid for other in seats)  # ranks that share this GPU
    engine = DeviceEngine(
        memory, placement, capacity=capacity, hidden=hidden, num_topk=num_topk, num_banks=num_banks, timeout_us=1,
        num_sms=num_sms or max(1, seat.num_sms // beside), strict_sms=num_sms is not None,
        over_rows=over_rows, debug_poison=debug_poison,
    )  # fmt: skip
    sharing = len({other.uuid for other in seats}) < len(seats)
    runtime = DeviceRuntime(
        engine, memory, timeout_s, meeting=meeting, sharing=sharing, mask_peers=mask_peers, end_late=end_late
    )  # fmt: skip
    group.all_gather(None)
    return runtime


def host_meeting(group: Bootstrap, transport: str) -> Meeting | None:
    """Where ranks on GPUs meet on the host; None for one rank, and where ranks do not share a host. Collective."""
    from expertwire.kernels.meeting import MEETING_BYTES, Meeting

    if group.num_ranks == 1:
        return None
    try:
        return Meeting((Inproc if transport == "inproc" else Shm)(group, MEETING_BYTES, MEETING_BYTES))
    except TransportUnavailable:
        return None


def device_memory(
    group: Bootstrap, transport: str, device: torch.device, seats: Sequence[gpus.Seat]
) -> DeviceMemory:  # fmt: skip
    """Memory of this transport, of which nothing is taken yet; raises on all ranks where it cannot join their GPUs."""
    from expertwire.transports.device import CudaIpc, InprocDevice, SymmMem

    problem = gpus.PROBLEMS[transport](seats) if transport in gpus.PROBLEMS else None
    if problem:
        raise TransportUnavailable(f"rank {group.rank}: transport {transport!r} does not work here: {problem}")
    if transport == "symm_mem":
        return SymmMem(group, device)  # type: ignore[arg-type]  # a group of processes, as its name was checked
    return (InprocDevice if transport == "inproc" else CudaIpc)(group, device)


def host_engine(
    group: Bootstrap,
    transport: str,
    layout: WindowLayout,
    placement: Placement,
    *,
    row_work: kernels.Kernels,
    timeout_s: float | None,
    mask_peers: bool,
    debug_poison: bool,
) -> HostEngine:
    """Create windows on all ranks and try them out with a barrier. Collective."""
    runtime_of = RemoteRuntime if transport == "fabric" else HostRuntime
    runtime = runtime_of(
        layout,
        TRANSPORTS[transport](group, layout.total_bytes, layout.output_bytes),  # type: ignore[call-arg]
        row_work,
        timeout_s=timeout_s,
        mask_peers=mask_peers,
        debug_poison=debug_poison,
    )
    try:
        group.all_gather(None)  # nobody signals into a window that its owner is still filling with poison
        runtime.run("creation barrier", acts(barrier(group.rank, 1, group.num_ranks)))
    except BaseException:
        runtime.close()
        raise
    return HostEngine(runtime, placement)
