"""What the ptx machine keeps: messages, what threads know of them, and bulk operations under way."""

from __future__ import annotations

from typing import NamedTuple

from expertwire.ordering.operations import Order, Scope
from expertwire.ordering.ptx_verbs import PROXIES
from expertwire.ordering.transitions import State

View = tuple[int, ...]
Views = tuple[View, ...]
GENERIC, ASYNC, ALIAS = (PROXIES.index(p) for p in ("generic", "async", "alias"))
RELEASES = (Order.RELEASE, Order.ACQ_REL, Order.SC)
ACQUIRES = (Order.ACQUIRE, Order.ACQ_REL, Order.SC)


class Entry(NamedTuple):
    """A release that a reader may synchronise with."""

    thread: int
    scope: Scope
    views: Views


class Message(NamedTuple):
    """A write. `id` counts the writes of its location; 0 is the initial one."""

    id: int
    value: int
    thread: int
    scope: Scope | None
    proxy: str
    releases: tuple[Entry, ...] = ()
    rmw: bool = False


INITIAL = (Message(0, 0, -1, Scope.SYS, "generic"),)


class Local(NamedTuple):
    """What a thread knows. `coherent` bounds its morally strong reads, `pending` waits for an acquire fence, `fenced`
    are its release fences, `aliased` says that it has executed fence.proxy.alias."""

    views: Views
    coherent: View
    pending: tuple[Entry, ...] = ()
    fenced: tuple[tuple[Scope, Views], ...] = ()
    aliased: bool = False


class Barrier(NamedTuple):
    """A barrier of one CTA in use: who has arrived and left (bit sets), and what they knew together."""

    name: str
    arrived: int
    left: int
    views: Views


class Flight(NamedTuple):
    """A bulk operation: 0 issued, 1 source read, 2 target written (as message `message`)."""

    thread: int
    number: int
    phase: int
    views: Views
    value: int = 0
    message: int = 0


def messages_of(memory: State, at: int) -> tuple[Message, ...]:
    """The writes of a location in coherence order."""
    return memory[at] if at < len(memory) and memory[at] else INITIAL


def known(view: View, at: int) -> int:
    """The newest known message of a location."""
    return view[at] if at < len(view) else 0


def index_of(memory: State, at: int, number: int) -> int:
    """The place of message `number` in coherence order."""
    if number == 0:
        return 0
    messages = messages_of(memory, at)
    if number < len(messages) and messages[number].id == number:
        return number
    return next(i for i, m in enumerate(messages) if m.id == number)


def raised(memory: State, view: View, at: int, number: int) -> View:
    """A view that knows message `number` at least."""
    if index_of(memory, at, known(view, at)) >= index_of(memory, at, number):
        return view
    view += (0,) * (at + 1 - len(view))
    return (*view[:at], number, *view[at + 1 :])


def with_view(views: Views, proxy: int, at: int, number: int) -> Views:
    """Views with one entry set."""
    view = views[proxy] + (0,) * (at + 1 - len(views[proxy]))
    return (*views[:proxy], (*view[:at], number, *view[at + 1 :]), *views[proxy + 1 :])


def with_messages(memory: State, at: int, messages: tuple[Message, ...]) -> State:
    """Memory with the writes of one location replaced."""
    memory += ((),) * (at + 1 - len(memory))
    return (*memory[:at], messages, *memory[at + 1 :])


def inserted(memory: State, at: int, position: int, message: Message) -> State:
    """Memory with a write at a place of the coherence order."""
    messages = messages_of(memory, at)
    return with_messages(memory, at, (*messages[:position], message, *messages[position:]))


def joined(memory: State, a: View, b: View) -> View:
    """The newer message of each location."""
    if a == b or not b:
        return a
    if not a:
        return b
    size = max(len(a), len(b))
    a, b = a + (0,) * (size - len(a)), b + (0,) * (size - len(b))
    pairs = enumerate(zip(a, b, strict=True))
    return tuple(x if x == y or index_of(memory, i, x) >= index_of(memory, i, y) else y for i, (x, y) in pairs)
