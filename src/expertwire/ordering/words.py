"""Moves in words, for traces."""

from __future__ import annotations

from typing import Any

from expertwire.ordering.events import Event, Kind
from expertwire.ordering.verbs import (
    AddWord,
    Atomic,
    AtomicWrite,
    Await,
    Claim,
    Completion,
    DeviceFlush,
    Doorbell,
    Flush,
    LoadWord,
    Notify,
    Quiet,
    Read,
    Send,
    Sometimes,
    StoreWord,
    Undefined,
    Write,
)


def value_words(value: int) -> str:
    """A value; one with an epoch in its high bits is shown as such.

    >>> value_words(3), value_words((2 << 24) | 6), value_words(2 << 24)
    ('3', '(epoch 2, count 5)', '(epoch 2)')
    """
    if value >> 24 <= 0:
        return str(value)
    count = (value & 0xFFFFFF) - 1
    return f"(epoch {value >> 24}, count {count})" if count >= 0 else f"(epoch {value >> 24})"


def delta_words(value: int) -> str:
    """What is added to a word.

    >>> delta_words(1), delta_words((2 << 24) - 3)
    ('1', '(2 epochs, count -3)')
    """
    epochs = (value + (1 << 23)) >> 24
    return f"({epochs} epochs, count {value - (epochs << 24):+d})" if epochs else str(value)


def op_words(op: Any) -> str:
    """A posted operation."""
    match op:
        case Write(target=target, values=values, source=source, arrival=arrival):
            names = ", ".join(map(str, target))
            what = f"from {source}" if source else ", ".join(value_words(v) for v in values)
            return f"write {names} = {what}" + (" with immediate" if arrival else "")
        case Atomic(target=target, delta=delta):
            return f"fetch-add {target} += {delta_words(delta)}"
        case AtomicWrite(target=target, value=value):
            return f"atomic write {target} = {value_words(value)}"
        case Read(target=target, into=into):
            return f"read {target} into {into}"
        case Send():
            return "send"
        case Flush():
            return "flush"
        case Notify(target=target, value=value, action=action):
            return (
                f"signal {target} += {delta_words(value)}"
                if action == "add"
                else f"signal {target} = {value_words(value)}"
            )
    return type(op).__name__


def step_words(action: Any, seen: int, expired: bool) -> str:
    """A thread step; `seen` is the word that it looks at."""
    note = f"   [{action.note}]" if getattr(action, "note", "") else ""
    match action:
        case Await(loc=loc, compare=compare, value=value):
            if expired:
                return f"wait {loc} {compare} {value_words(value)}: gives up{note}"
            return f"wait {loc} {compare} {value_words(value)}: sees {value_words(seen)}{note}"
        case LoadWord(loc=loc, expect=expect):
            wanted = "" if expect is None or expect == seen else f", expected {value_words(expect)}"
            return f"load {loc}: sees {value_words(seen)}{wanted}{note}"
        case StoreWord(loc=loc, value=value):
            return f"store {loc} = {value_words(value)}{note}"
        case AddWord(loc=loc, delta=delta):
            return f"add {loc} += {value_words(delta)} (was {value_words(seen)}){note}"
        case Completion():
            return "local completions are there"
        case Quiet():
            return "quiet returns"
        case Doorbell():
            return "ring the doorbell"
        case DeviceFlush():
            return "flush to the device"
        case Claim(holds=holds):
            return ("check" if holds else "check fails") + note
        case Sometimes(label=label):
            return f"reached: {label}"
        case Undefined():
            return "undefined use" + note
    if isinstance(action, Write | Atomic | AtomicWrite | Read | Send | Flush | Notify):
        return f"post {op_words(action)} on {action.queue.name}"
    return type(action).__name__.lower()


def event_words(event: Event) -> tuple[str, str, str]:
    """(rank at which it is seen, peer, what happens)."""
    post = event.post
    op = op_words(post.op)
    where, other = post.peer, post.rank
    match event.kind:
        case Kind.SOURCE:
            where, other, text = post.rank, post.peer, f"source read: {op}"
        case Kind.ACCEPT:
            text = f"accepted: {op}"
        case Kind.PLACE:
            text = f"PLACED {event.label}" + ("" if event.source >= 0 else f" = {value_words(event.value)}")
        case Kind.RMW_READ:
            text = f"NIC reads {event.label}"
        case Kind.RMW:
            text = f"PLACED {event.label} += {delta_words(event.value)}"
        case Kind.SHOW:
            text = f"VISIBLE {event.label}"
        case Kind.RCQE:
            text = f"completion at the target: {op}"
        case Kind.REMOTE_READ:
            text = f"remote read of {event.label}"
        case Kind.FLUSHED:
            text = "flushed"
        case _:
            where, other = post.rank, post.peer
            text = f"{event.kind.value}: {op}"
    return where, other, text
