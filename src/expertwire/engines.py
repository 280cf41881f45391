"""Chooses the transport and the row work for a group, and joins them to an engine."""

from __future__ import annotations

from expertwire.errors import InvalidArgument, TransportUnavailable
from expertwire.host import kernels
from expertwire.host.engine import HostEngine
from expertwire.host.remote import RemoteRuntime
from expertwire.host.runtime import HostRuntime
from expertwire.layouts.window import WindowLayout
from expertwire.protocols.barrier import barrier
from expertwire.topology import Placement
from expertwire.transports.base import Bootstrap, Transport
from expertwire.transports.fabric import FabricTransport
from expertwire.transports.inproc import Inproc, Rank
from expertwire.transports.shm import Shm

TRANSPORTS: dict[str, type[Transport]] = {"inproc": Inproc, "shm": Shm, "fabric": FabricTransport}
ENGINES = ("auto", "numba", "torch")


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


def host_engine(
    group: Bootstrap,
    transport: str,
    layout: WindowLayout,
    placement: Placement,
    *,
    engine: str,
    timeout_s: float | None,
    mask_peers: bool,
    debug_poison: bool,
) -> HostEngine:
    """Create windows on all ranks and try them out with a barrier. Collective."""
    row_work = kernels.load(engine)
    row_work.warm_up()
    runtime_of = RemoteRuntime if transport == "fabric" else HostRuntime
    runtime = runtime_of(
        layout,
        TRANSPORTS[transport](group, layout.total_bytes),  # type: ignore[call-arg]
        row_work,
        timeout_s=timeout_s,
        mask_peers=mask_peers,
        debug_poison=debug_poison,
    )
    try:
        group.all_gather(None)  # nobody signals into a window that its owner is still filling with poison
        runtime.run("creation barrier", barrier(group.rank, 1, group.num_ranks))
    except BaseException:
        runtime.close()
        raise
    return HostEngine(runtime, placement)
