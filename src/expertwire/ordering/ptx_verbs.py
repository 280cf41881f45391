"""Actions of GPU threads on memory that they load and store directly (NVLink, one GPU): PTX instructions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expertwire.ordering.operations import Order, Scope
from expertwire.ordering.verbs import Loc

Proxy = Literal["generic", "async", "surface", "alias", "nc"]
PROXIES: tuple[Proxy, ...] = ("generic", "async", "surface", "alias")


@dataclass(frozen=True, slots=True)
class Ld:
    """ld. With `compare` it spins until the value read fits. `expect` as in `verbs.LoadWord`."""

    loc: Loc
    order: Order = Order.WEAK
    scope: Scope = Scope.SYS
    register: str = ""
    proxy: Proxy = "generic"
    compare: Literal["", "==", ">=", "!="] = ""
    value: int = 0
    expect: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class St:
    """st."""

    loc: Loc
    value: int
    order: Order = Order.WEAK
    scope: Scope = Scope.SYS
    proxy: Proxy = "generic"
    note: str = ""


@dataclass(frozen=True, slots=True)
class Rmw:
    """atom and red: "add", "exch", or "cas", which blocks until the word is `compare`. Answered with the old value."""

    loc: Loc
    operand: int
    kind: Literal["add", "exch", "cas"] = "add"
    compare: int = 0
    order: Order = Order.RELAXED
    scope: Scope = Scope.SYS
    register: str = ""
    proxy: Proxy = "generic"
    note: str = ""


@dataclass(frozen=True, slots=True)
class MemFence:
    """fence.acq_rel, fence.sc."""

    order: Order = Order.ACQ_REL
    scope: Scope = Scope.SYS


@dataclass(frozen=True, slots=True)
class ProxyFence:
    """fence.proxy.async, .alias, or that of a surface access: joins this proxy and the generic one."""

    proxy: Proxy = "async"


@dataclass(frozen=True, slots=True)
class Arrive:
    """First half of bar.sync or __syncwarp among `count` threads."""

    name: str
    count: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Second half: blocks until all have arrived, then knows what they knew."""

    name: str
    count: int


@dataclass(frozen=True, slots=True)
class Bulk:
    """cp.async.bulk through the async proxy: copy `source` (or a constant) to `target`, or reduce-add to it. Happens
    later, in two events: the source is read, the target is written."""

    target: Loc
    source: Loc | None = None
    value: int = 0
    add: bool = False


@dataclass(frozen=True, slots=True)
class Commit:
    """cp.async.bulk.commit_group: the bulk operations since the last one form a group."""


@dataclass(frozen=True, slots=True)
class WaitGroup:
    """cp.async.bulk.wait_group: all but the last `pending` groups are complete; with `read` only their sources have
    been read."""

    pending: int = 0
    read: bool = False


PtxAction = Ld | St | Rmw | MemFence | ProxyFence | Arrive | Leave | Bulk | Commit | WaitGroup
