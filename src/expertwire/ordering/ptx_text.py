"""The litmus format for GPU threads. A thread header is device.block.thread.

st.w x=1    st.rel.sys f=1    st.rlx.gpu f=2        stores: weak, release, relaxed, with scope cta cluster gpu sys
r=ld.w x    ld.acq.sys f==1   r=ld.vol x            loads; with a comparison they spin; vol = relaxed.sys
atom.rlx.gpu f+1    r=atom.acq_rel.gpu x+1    exch.rlx.gpu m=0    cas.rlx.gpu m:0=1    red.rel.gpu f+1
fence.acq_rel.sys   fence.sc.gpu    fence.proxy.async | alias | surface
surf.st x=1    r=surf.ld x    r=nc.ld x    multi.red.rel.sys f+1         other proxies
bar 0          warp 0                     bar.sync, __syncwarp among all threads that name it
tma x=1 | tma x=s | tma x+1    commit    wait_group 0    wait_group.read 0
st.v8 [d,f]=(1,1)    [r,s]=ld.v8 [d,f]    vectors: one instant up to the profile's single_copy bytes
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from expertwire.errors import InvalidArgument
from expertwire.ordering.litmus_text import VECTOR
from expertwire.ordering.operations import Order, Scope
from expertwire.ordering.profiles import Profile
from expertwire.ordering.program import Program, Thread, in_turn
from expertwire.ordering.ptx_verbs import (
    Arrive,
    Bulk,
    Commit,
    Ld,
    Leave,
    MemFence,
    Proxy,
    ProxyFence,
    PtxAction,
    Rmw,
    St,
    WaitGroup,
)
from expertwire.ordering.verbs import Loc

_ORDERS = {
    "w": Order.WEAK,
    "rlx": Order.RELAXED,
    "vol": Order.RELAXED,
    "acq": Order.ACQUIRE,
    "rel": Order.RELEASE,
    "acq_rel": Order.ACQ_REL,
    "sc": Order.SC,
}
_SCOPES = {s.value: s for s in Scope}
_PROXIES: dict[str, Proxy] = {"surf": "surface", "nc": "nc", "multi": "alias"}
_WORD = re.compile(r"(?:(\[?[\w,]+\]?)=)?([\w.]+)(?: (.+))?$")
_CONDITION = re.compile(r"(\w+)(==|>=|!=)(\d+)$")


def parse_ptx(name: str, lines: Mapping[str, str], profile: Profile) -> Program:
    """A program of GPU threads.

    >>> from expertwire.ordering.profiles import get
    >>> program = parse_ptx("mp", {"0.0.0": "st.w x=1; st.rel.sys f=1"}, get("ptx"))
    >>> program.threads[0].place, [a.order.value for a in program.threads[0].body()]
    ((0, 0, 0), ['weak', 'release'])
    """
    barriers = Counter(part.strip() for text in lines.values() for part in text.split(";") if _is_barrier(part))
    threads = []
    bulk = False
    for header, text in lines.items():
        device, block, thread = (int(n) for n in header.split("."))
        actions: list[PtxAction] = []
        for part in text.split(";"):
            if _is_barrier(part):
                bar = part.strip()
                actions += [Arrive(bar, barriers[bar]), Leave(bar, barriers[bar])]
            elif part.strip():
                actions += _parse(part.strip(), profile)
        bulk |= any(isinstance(action, Bulk) for action in actions)
        threads.append(Thread(header, header, partial(in_turn, actions), place=(device, block, thread)))
    return Program(name, tuple(threads), bulk=bulk)


def _is_barrier(text: str) -> bool:
    return text.strip().split(" ")[0] in ("bar", "warp")


def _loc(name: str) -> Loc:
    return Loc("B", name)


def _parse(text: str, profile: Profile) -> list[PtxAction]:
    match = _WORD.match(text)
    if match is None:
        raise InvalidArgument(f"not an instruction: {text!r}")
    register, dotted, operand = match[1] or "", match[2].split("."), match[3] or ""
    proxy: Proxy = "generic"
    if dotted[0] in _PROXIES:
        proxy = _PROXIES[dotted.pop(0)]
    verb, rest = dotted[0], dotted[1:]
    if rest and rest[0][0] == "v" and rest[0][1:].isdigit():
        return _vector(verb, int(rest[0][1:]), register, operand, profile)
    order = next((_ORDERS[r] for r in rest if r in _ORDERS), Order.WEAK)
    scope = next((_SCOPES[r] for r in rest if r in _SCOPES), Scope.SYS)
    if verb in ("atom", "red", "exch", "cas") and order is Order.WEAK:
        order = Order.RELAXED
    match verb:
        case "st":
            target, value = operand.split("=")
            return [St(_loc(target), int(value), order, scope, proxy)]
        case "ld":
            condition = _CONDITION.match(operand)
            if condition:
                compare: Any = condition[2]
                return [Ld(_loc(condition[1]), order, scope, register, proxy, compare, int(condition[3]))]
            return [Ld(_loc(operand), order, scope, register, proxy)]
        case "atom" | "red":
            target, value = re.split(r"(?=[+-])", operand)
            return [Rmw(_loc(target), int(value), "add", 0, order, scope, register, proxy)]
        case "exch":
            target, value = operand.split("=")
            return [Rmw(_loc(target), int(value), "exch", 0, order, scope, register, proxy)]
        case "cas":
            target, expected, value = re.split("[:=]", operand)
            return [Rmw(_loc(target), int(value), "cas", int(expected), order, scope, register, proxy)]
        case "fence":
            return [ProxyFence(_PROXIES.get(rest[1], rest[1]))] if rest[0] == "proxy" else [MemFence(order, scope)]  # type: ignore[arg-type]
        case "tma":
            return [_bulk(operand)]
        case "commit":
            return [Commit()]
        case "wait_group":
            return [WaitGroup(int(operand), rest == ["read"])]
    raise InvalidArgument(f"not an instruction: {text!r}")


def _bulk(operand: str) -> Bulk:
    if "+" in operand:
        target, value = operand.split("+")
        return Bulk(_loc(target), value=int(value), add=True)
    target, value = operand.split("=")
    return Bulk(_loc(target), value=int(value)) if value.isdigit() else Bulk(_loc(target), _loc(value))


def _vector(verb: str, width: int, register: str, operand: str, profile: Profile) -> list[PtxAction]:
    whole = width <= profile.single_copy
    if verb == "st":
        names, values = operand.split("=")
        targets, numbers = names.strip("[]").split(","), [int(v) for v in values.strip("()").split(",")]
        if whole:
            return [St(_loc(",".join(targets)), numbers[0] * VECTOR + numbers[1])]
        return [St(_loc(t), n) for t, n in zip(targets, numbers, strict=True)]
    sources, registers = operand.strip("[]").split(","), register.strip("[]").split(",")
    if whole:
        return [Ld(_loc(",".join(sources)), register=",".join(registers))]
    return [Ld(_loc(s), register=r) for s, r in zip(sources, registers, strict=True)]
