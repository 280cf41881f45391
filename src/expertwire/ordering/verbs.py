"""Network operations and thread steps: the vocabulary below `operations`, in which litmus tests are written.

A protocol says "put, then signal"; a transport mechanism turns that into the records here (see `signals`). A program is
a set of threads that yield them. A `Post` is handed to a queue and happens later, in pieces, when the machine likes; a
`Step` happens when the thread reaches it, or blocks the thread.

Names are those of InfiniBand verbs; `Notify` is OpenSHMEM's and GIN's signal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fenced = Literal["none", "spec", "strong"]
Covers = Literal["profile", "own", "earlier"]


@dataclass(frozen=True, slots=True)
class Loc:
    """One word of memory of one rank. `strict`: lies in a registration without relaxed ordering."""

    rank: str
    name: str
    strict: bool = False

    def __str__(self) -> str:
        return f"{self.rank}.{self.name}"


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue pair (verbs), context (OpenSHMEM, GIN) or endpoint of the posting thread, on one NIC at each end."""

    name: str = "q"
    nic: str = "n0"


# ---- posts: handed to a queue ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Write:
    """RDMA WRITE of one message with one or more words.

    `values` are the bytes when `source` is None (sent inline), otherwise the NIC reads `source` some time before the
    completion. `arrival` is what a completion at the target does there (write-with-immediate). `block` numbers the
    128-byte block in which each word lies. `bundle` names the payload that a `Notify` vouches for.
    """

    queue: Queue
    target: tuple[Loc, ...]
    values: tuple[int, ...] = ()
    source: Loc | None = None
    fenced: Fenced = "none"
    arrival: Arrival | None = None
    block: tuple[int, ...] = ()
    bundle: int = 0
    rung: bool = True


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a target completion changes: `word` is increased by, set to, or raised to at least `value`."""

    word: Loc
    action: Literal["add", "set", "max"] = "add"
    value: int = 1


@dataclass(frozen=True, slots=True)
class Atomic:
    """RDMA fetch-and-add; the old value returns into `fetch_to`."""

    queue: Queue
    target: Loc
    delta: int = 1
    fetch_to: Loc | None = None
    fenced: Fenced = "none"
    rung: bool = True


@dataclass(frozen=True, slots=True)
class AtomicWrite:
    """IBTA memory placement extensions: 8-byte ATOMIC WRITE."""

    queue: Queue
    target: Loc
    value: int


@dataclass(frozen=True, slots=True)
class Read:
    """RDMA READ of `target` into local memory `into`."""

    queue: Queue
    target: Loc
    into: Loc
    fenced: Fenced = "none"


@dataclass(frozen=True, slots=True)
class Send:
    """Two-sided SEND: the receive completes at the target."""

    queue: Queue
    arrival: Arrival
    fenced: Fenced = "none"


@dataclass(frozen=True, slots=True)
class Flush:
    """IBTA memory placement extensions: FLUSH with global visibility, of everything earlier on the queue."""

    queue: Queue
    peer: str


@dataclass(frozen=True, slots=True)
class Notify:
    """A signal: set or add a word at the target. `covers` says which puts it vouches for: those of its own bundle
    (weak), all earlier ones to this peer on this queue (strong), or what the profile promises."""

    queue: Queue
    target: Loc
    value: int
    action: Literal["add", "set"] = "set"
    covers: Covers = "profile"
    bundle: int = 0


Post = Write | Atomic | AtomicWrite | Read | Send | Flush | Notify

# ---- steps: done by the thread itself --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Completion:
    """Wait for the local completion (CQE) of everything posted so far on `queue` (None: on all queues)."""

    queue: Queue | None = None


@dataclass(frozen=True, slots=True)
class Quiet:
    """OpenSHMEM quiet, UCX flush, GIN flush: what it waits for is the profile's `quiet` knob."""

    queue: Queue | None = None


@dataclass(frozen=True, slots=True)
class OrderPuts:
    """OpenSHMEM fence, UCX fence: earlier posts to each peer are delivered before later ones to that peer."""

    queue: Queue | None = None


@dataclass(frozen=True, slots=True)
class Doorbell:
    """Ring the doorbell: posts with `rung=False` before it may start."""

    queue: Queue


@dataclass(frozen=True, slots=True)
class Await:
    """Block until `loc` compares true with `value`, then acquire. Answered with the value seen, or with None when
    `may_expire` and the waiting time ends first. `mask` keeps some bits only, as a comparison of too few bits does.
    Polling by plain loads has no meaning in some contracts; relaxed and plain polling orders no later load (litmus
    tests run those as another thread)."""

    loc: Loc
    compare: Literal["==", ">=", "!="] = "=="
    value: int = 1
    may_expire: bool = False
    mask: int = -1
    order: Literal["acquire", "relaxed", "plain"] = "acquire"
    note: str = ""


@dataclass(frozen=True, slots=True)
class LoadWord:
    """Read a word. With `expect`, any other value is a violation: an older one is a stale read, a newer one means that
    the bank was reused too early."""

    loc: Loc
    register: str = ""
    expect: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class StoreWord:
    """Write a word of this rank's memory (or, as a message outside the network, of another's)."""

    loc: Loc
    value: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class AddWord:
    """Atomic add of the thread itself, answered with the old value."""

    loc: Loc
    delta: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class DeviceFlush:
    """Make what the NIC has written to this rank visible to all its observers: cuFlushGPUDirectRDMAWrites, a loopback
    READ, a kernel launch. `trusted=False` marks a flush by another requester (CPU read through the BAR mapping)."""

    rank: str
    trusted: bool = True


@dataclass(frozen=True, slots=True)
class Claim:
    """An assertion of the program about what it has seen; `kind` and `note` name the violation if it does not hold."""

    holds: bool
    kind: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Sometimes:
    """Marks that an interesting case was reached."""

    label: str


@dataclass(frozen=True, slots=True)
class Undefined:
    """The contract gives this use no meaning; reaching it is reported, not interpreted."""

    note: str


Step = (
    Completion
    | Quiet
    | OrderPuts
    | Doorbell
    | Await
    | LoadWord
    | StoreWord
    | AddWord
    | DeviceFlush
    | Claim
    | Sometimes
    | Undefined
)
Action = Post | Step
