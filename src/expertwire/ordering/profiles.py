"""Transport profiles: which pairs of network events each contract keeps in order.

A profile is a set of knobs; each knob adds or removes edges between the events of `events`. A profile claims what its
source promises and nothing else. Where sources disagree there are two profiles, or a litmus row that runs both
readings.

>>> get("rc.spec").amo_waits
'placed'
>>> get("rc.spec").but(amo_waits="accepted").name
'rc.spec+amo_waits=accepted'
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_type_hints

from expertwire.errors import InvalidArgument

KNOBS: dict[str, str] = {
    "wire": "order in which requests of one queue are accepted at the target. IBTA C9-28 family; efadv: none",
    "place_ww": "order in which accepted writes become visible: of one NIC, of one queue, none. o9-20; "
    "ibv_reg_mr(3); mlx5dv_create_qp(3)",
    "in_message": "order of the words of one write: none, within 128-byte blocks, ascending. libfabric #9012; "
    "ibv_query_qp_data_in_order(3)",
    "amo_waits": "what an atomic waits for among earlier writes of its queue. o9-20 (c); NCCL #2210, DeepEP #661",
    "amo_order": "atomics of one queue execute in order. IBTA C9-28 family (from memory, medium confidence)",
    "amo_scope": "with whom an atomic is atomic: operations through the same NIC, or everybody. ibv_wr_post(3)",
    "strict_waits": "with amo_waits=accepted: an atomic on a strictly ordered registration waits for placement all the "
    "same. torchcomms #3015, NCCL #2210; PCIe ordering table (contested)",
    "aw_waits": "what an ATOMIC WRITE waits for: everything placed, or earlier flushes only. IBTA A19 (contested)",
    "read_waits": "a READ pushes earlier writes of its queue out. PCIe: reads push posted writes; mlx5dv_create_qp(3)",
    "cqe_after": "when the initiator's completion may appear: request accepted, or data placed. o9-20; fi_cq(3)",
    "cqe_order": "completions of one queue are reported in order. IBTA work queue rules; efadv: no",
    "rcqe_after": "what a target completion covers: all earlier writes of the queue, its own message. ibv_reg_mr(3), "
    "o9-20 (a) (b); efadv, pplx-garden",
    "fence": "what the fence flag of a request waits for: nothing, earlier READs and ATOMICs. RDMAmojo 2013-12-06",
    "strong_fence": "a strong-order flag exists: earlier writes are placed first. rdma-core mlx5 provider; UCX #10658",
    "order_puts": "OpenSHMEM fence, UCX fence: later puts are delivered after earlier ones, per peer and context. "
    "OpenSHMEM 1.6 shmem_fence; UCP design wiki, UCX #9502",
    "quiet": "what quiet or flush waits for: data placed, or local completion only. OpenSHMEM shmem_quiet; GIN flush",
    "covers": "what a signal vouches for: its own payload, or all earlier puts of the context to that peer. OpenSHMEM "
    "put_signal; GIN WeakSignal, StrongSignal",
    "covers_all": "a release store covers everything that the thread wrote, to whichever peer. PTX, C++ release",
    "coherent": "writes of one thread to one word become visible in their order. C++ memory model, coherence",
    "source_read": "when the source is read: any time before completion, or while posting (a store).",
    "gdr_order": "for which GPU observers the NIC's order holds: none, owner, all. "
    "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING",
    "gdr_flush_trusted": "a flush by another requester than the NIC counts. NCCL #2092 (contested)",
    "racy_is_undefined": "plain and atomic, or adding and setting, accesses to one word at a time have no meaning; nor "
    "has polling with plain loads. OpenSHMEM 1.6 (shmem_wait_until, signals); GIN resetSignal",
    "single_copy": "bytes that a vector store writes at one instant. PTX ISA: 8; NCCL LL128: 128 on some NVLink parts",
    "proxy_fence": "where a proxy fence counts: on the path, in the CTA of the non-generic access, for own accesses "
    "only. PTX ISA 8.9.5; Exo notes; FlashKDA #24 (contested)",
}


@dataclass(frozen=True, slots=True)
class Profile:
    """One contract. `KNOBS` says what each field means and where it comes from."""

    name: str
    source: str
    machine: Literal["network", "ptx"] = "network"
    wire: Literal["fifo", "any"] = "fifo"
    place_ww: Literal["fifo_nic", "fifo_qp", "any"] = "any"
    in_message: Literal["any", "block", "ascending"] = "any"
    amo_waits: Literal["placed", "accepted", "none"] = "placed"
    amo_order: bool = True
    amo_scope: Literal["nic", "sys"] = "nic"
    strict_waits: bool = True
    aw_waits: Literal["placed", "flush"] = "flush"
    read_waits: Literal["placed", "none"] = "placed"
    cqe_after: Literal["accept", "placed"] = "accept"
    cqe_order: bool = True
    rcqe_after: Literal["qp_placed", "own_placed"] = "qp_placed"
    fence: Literal["none", "spec"] = "spec"
    strong_fence: bool = True
    order_puts: bool = False
    quiet: Literal["placed", "cqe"] = "cqe"
    covers: Literal["own", "earlier"] = "own"
    covers_all: bool = False
    coherent: bool = False
    source_read: Literal["any", "post"] = "any"
    gdr_order: Literal["none", "owner", "all"] = "all"
    gdr_flush_trusted: bool = False
    racy_is_undefined: bool = False
    single_copy: Literal[8, 16, 32, 64, 128] = 8
    proxy_fence: Literal["path", "cta", "own"] = "cta"

    def but(self, **knobs: Any) -> Profile:
        """The same contract with some knobs turned. InvalidArgument names what is no knob, or no value of it."""
        for knob, value in knobs.items():
            if value not in values_of(knob):
                raise _no_value(knob, value)
        changed = ",".join(f"{k}={v}" for k, v in knobs.items())
        join = "," if "+" in self.name else "+"
        return replace(self, name=f"{self.name}{join}{changed}" if changed else self.name, **knobs)


def values_of(knob: str) -> tuple[Any, ...]:
    """What a knob may be, as its field says.

    >>> values_of("wire"), values_of("amo_order")
    (('fifo', 'any'), (False, True))
    """
    if knob not in KNOBS:
        raise InvalidArgument(f"unknown knob {knob!r}; valid: {', '.join(sorted(KNOBS))}")
    kind = get_type_hints(Profile)[knob]
    return (False, True) if kind is bool else get_args(kind)


def _no_value(knob: str, value: Any) -> InvalidArgument:
    valid = ", ".join(map(str, values_of(knob)))
    return InvalidArgument(f"knob {knob} must be one of {valid}, got {value!r}; separate knobs with commas")


def _rc(name: str, source: str, **knobs: Any) -> Profile:
    return Profile(name, source, **knobs)


_SHMEM: dict[str, Any] = {
    "wire": "any",
    "amo_waits": "none",
    "amo_order": False,
    "amo_scope": "sys",
    "read_waits": "none",
    "cqe_after": "placed",
    "cqe_order": False,
    "rcqe_after": "own_placed",
    "fence": "none",
    "strong_fence": False,
    "racy_is_undefined": True,
}

_GIN = {**_SHMEM, "cqe_after": "accept"}  # flush is local: the source may be reused, no more

PROFILES: dict[str, Profile] = {
    p.name: p
    for p in (
        _rc("rc.spec", "InfiniBand RC by the closed list of o9-20 alone: write, write-with-immediate, SEND, ATOMIC"),
        _rc(
            "rc.hw",
            "RC as deployed: relaxed ordering off, one static path, one posted PCIe stream per NIC. DeepEP #40",
            place_ww="fifo_nic",
        ),
        _rc("rc.ro", "IBV_ACCESS_RELAXED_ORDERING: writes in any order, atomics not bypassed. ibv_reg_mr(3)"),
        _rc(
            "rc.ro_pcieatomic",
            "relaxed ordering and PCIe AtomicOps: the atomic may pass earlier writes. NCCL #2210, DeepEP #661",
            amo_waits="accepted",
        ),
        _rc(
            "rc.ooo",
            "MLX5DV_QP_CREATE_OOO_DP: any placement order, READ and ATOMIC run after earlier messages are done",
            wire="any",
        ),
        _rc(
            "srd",
            "EFA SRD: nothing ordered, an initiator completion implies placement. efadv_create_qp_ex; NCCL #2333",
            wire="any",
            amo_waits="none",
            amo_order=False,
            read_waits="none",
            cqe_after="placed",
            cqe_order=False,
            rcqe_after="own_placed",
            fence="none",
            strong_fence=False,
        ),
        _rc(
            "srd.transmit",
            "SRD through libfabric at FI_TRANSMIT_COMPLETE: a completion says nothing about the peer. fi_cq(3)",
            wire="any",
            amo_waits="none",
            amo_order=False,
            read_waits="none",
            cqe_order=False,
            rcqe_after="own_placed",
            fence="none",
            strong_fence=False,
        ),
        Profile(
            "shmem",
            "OpenSHMEM: put, fence, quiet, put_signal; atomics order nothing. OpenSHMEM 3a8a05c0, PR #518",
            order_puts=True,
            quiet="placed",
            **_SHMEM,
        ),
        Profile(
            "gin.weak",
            "NCCL GIN with WeakSignal: a visible signal implies its bundled put. NCCL 5067397c headers",
            **_GIN,
        ),
        Profile(
            "gin.strong",
            "NCCL GIN with StrongSignal: a visible signal implies all earlier puts to the peer on its context",
            covers="earlier",
            **_GIN,
        ),
        Profile(
            "ucx",
            "UCX: RMA, atomics and active messages unordered; fence orders puts, flush completes. UCP design wiki",
            order_puts=True,
            quiet="placed",
            **_SHMEM,
        ),
        Profile(
            "host",
            "shared memory: plain stores in any order, a release store after them, an acquire load. C++ memory model",
            covers="earlier",
            covers_all=True,
            coherent=True,
            source_read="post",
            quiet="placed",
            order_puts=True,
            **{**_SHMEM, "racy_is_undefined": False},
        ),
        Profile(
            "ptx",
            "loads and stores over NVLink: scopes, release and acquire patterns, proxies. PTX ISA 8; Dat3M ptx-v7.5",
            machine="ptx",
        ),
    )
}


def get(name: str) -> Profile:
    """The profile of that name; knobs may be appended: "rc.spec+amo_order=False,wire=any"."""
    base, plus, turned = name.partition("+")
    if base not in PROFILES:
        raise InvalidArgument(f"unknown profile {base!r}; valid: {', '.join(PROFILES)}")
    knobs: dict[str, Any] = {}
    for item in turned.split(",") if plus else ():
        knob, _, text = item.partition("=")
        if knob in knobs:
            raise InvalidArgument(f"knob {knob} is turned twice in {name!r}")
        named = {str(value): value for value in values_of(knob)}
        if text not in named:
            raise _no_value(knob, text)
        knobs[knob] = named[text]
    return PROFILES[base].but(**knobs)


def at_least_as_weak(weaker: Profile, stronger: Profile) -> bool:
    """True if every edge of `weaker` is also one of `stronger`, judged knob by knob.

    >>> at_least_as_weak(get("rc.spec"), get("rc.hw")), at_least_as_weak(get("rc.hw"), get("rc.spec"))
    (True, False)
    """
    if weaker.machine != stronger.machine:
        return False
    return all(_rank(k, getattr(weaker, k)) <= _rank(k, getattr(stronger, k)) for k in STRENGTH)


# each knob's values from weakest to strongest
STRENGTH: dict[str, tuple[Any, ...]] = {
    "wire": ("any", "fifo"),
    "place_ww": ("any", "fifo_qp", "fifo_nic"),
    "in_message": ("any", "block", "ascending"),
    "amo_waits": ("none", "accepted", "placed"),
    "amo_order": (False, True),
    "amo_scope": ("nic", "sys"),
    "read_waits": ("none", "placed"),
    "cqe_after": ("accept", "placed"),
    "cqe_order": (False, True),
    "rcqe_after": ("own_placed", "qp_placed"),
    "fence": ("none", "spec"),
    "strong_fence": (False, True),
    "order_puts": (False, True),
    "quiet": ("cqe", "placed"),
    "covers": ("own", "earlier"),
    "covers_all": (False, True),
    "coherent": (False, True),
    "source_read": ("any", "post"),
    "gdr_order": ("none", "owner", "all"),
}


def _rank(knob: str, value: Any) -> int:
    return STRENGTH[knob].index(value)
