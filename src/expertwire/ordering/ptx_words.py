"""PTX actions in words, for traces."""

from __future__ import annotations

from typing import Any

from expertwire.ordering.operations import Order
from expertwire.ordering.ptx_verbs import Arrive, Bulk, Commit, Ld, Leave, MemFence, ProxyFence, Rmw, St, WaitGroup
from expertwire.ordering.words import step_words as plain_words
from expertwire.ordering.words import value_words

_SHORT = {
    Order.WEAK: "weak",
    Order.RELAXED: "relaxed",
    Order.ACQUIRE: "acquire",
    Order.RELEASE: "release",
    Order.ACQ_REL: "acq_rel",
    Order.SC: "sc",
}


def _suffix(action: Any) -> str:
    proxy = "" if action.proxy == "generic" else f".{action.proxy}"
    scope = "" if action.order is Order.WEAK else f".{action.scope.value}"
    return f"{proxy}.{_SHORT[action.order]}{scope}"


def step_words(action: Any, seen: int | None, stale: bool = False) -> str:
    """One instruction; `seen` is what it read."""
    note = f"   [{action.note}]" if getattr(action, "note", "") else ""
    read = "" if seen is None else f": sees {value_words(seen)}" + (" (an older write)" if stale else "")
    match action:
        case Ld(loc=loc, compare=compare, value=value):
            spin = f" until {compare} {value_words(value)}" if compare else ""
            return f"ld{_suffix(action)} {loc}{spin}{read}{note}"
        case St(loc=loc, value=value):
            return f"st{_suffix(action)} {loc} = {value_words(value)}{note}"
        case Rmw(loc=loc, kind=kind, operand=operand):
            return f"atom.{kind}{_suffix(action)} {loc}, {value_words(operand)}{read}{note}"
        case MemFence(order=order, scope=scope):
            return f"fence.{order.value}.{scope.value}"
        case ProxyFence(proxy=proxy):
            return f"fence.proxy.{proxy}"
        case Arrive(name=name):
            return f"bar {name}: arrive"
        case Leave(name=name):
            return f"bar {name}: all are there"
        case Bulk():
            return f"issue bulk {_bulk(action)}"
        case Commit():
            return "commit group"
        case WaitGroup(pending=pending, read=read_only):
            return f"wait_group{'.read' if read_only else ''} {pending}"
    return plain_words(action, seen or 0, False)


def _bulk(op: Bulk) -> str:
    source = str(op.source) if op.source else str(op.value)
    return f"{op.target} {'+=' if op.add else '='} {source}"


def bulk_words(op: Bulk, phase: int, late: bool) -> str:
    """An event of a bulk operation."""
    if phase == 0:
        return f"bulk reads its source: {_bulk(op)}"
    return f"bulk WRITES {_bulk(op)}" + ("; an unfenced earlier load returns it" if late else "")
