"""The events of a network operation, and the edges between them that a profile keeps.

    post -> source read -> accept -> place -> ack -> cqe             WRITE, Notify, ATOMIC WRITE
                           accept -> rmw (read, write) -> ack        ATOMIC; then the old value returns
                           accept -> remote read -> local place      READ
                                     place -> rcqe                   immediate, SEND

An event may happen as soon as all events that it waits for have happened (`Event.after`, a bit set). Everything that a
contract promises about order is such an edge; everything else is free. `events_of` is a pure function of the profile,
the operation and the earlier operations of the same thread, so a simulated fabric can drive real transfers with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from expertwire.errors import InvalidArgument
from expertwire.ordering.profiles import Profile
from expertwire.ordering.verbs import Atomic, AtomicWrite, Flush, Loc, Notify, Post, Queue, Read, Send, Write


class Kind(StrEnum):
    """What happens at an event."""

    SOURCE = "source read"
    ACCEPT = "accept"
    PLACE = "place"
    RMW_READ = "rmw read"
    RMW = "rmw"
    SHOW = "show"  # a placed word becomes visible to an observer that the NIC's order does not cover
    REMOTE_READ = "remote read"
    RETURN = "return"
    FLUSHED = "flushed"
    ACK = "ack"
    CQE = "cqe"
    RCQE = "rcqe"


@dataclass(eq=False, slots=True)
class Event:
    """One event. `source`, `target` and `temp` are the locations whence its value comes, whither it goes and where the
    operation keeps what it has read; `value` is a constant instead of a source. `queue` is the NIC's queue of posted
    writes that it enters (accept) or leaves (place), `entry` its bit there. `reads`, `writes` and `marks` say with what
    else it does not commute."""

    bit: int
    kind: Kind
    post: Posted
    after: int = 0
    source: int = -1
    target: int = -1
    value: int = 0
    action: str = "set"
    use: str = ""
    queue: int = -1
    entry: int = 0
    lock: int = -1
    reads: int = 0
    writes: int = 0
    marks: int = 0
    enters: int = 0
    label: str = ""


@dataclass(eq=False, slots=True)
class Posted:
    """A post with its events: `number` counts the posts of one thread."""

    op: Post
    number: int
    thread: int
    rank: str
    peer: str
    queue: Queue
    events: list[Event] = field(default_factory=list)
    accepts: int = 0
    places: int = 0
    shown: int = 0
    returns: int = 0
    cqes: int = 0
    rcqes: int = 0
    flushes: int = 0

    @property
    def is_amo(self) -> bool:
        return isinstance(self.op, Atomic)

    @property
    def is_read(self) -> bool:
        return isinstance(self.op, Read)


@dataclass(slots=True)
class Numbering:
    """Gives numbers to events, locations and NIC queues. `observers` lists, per rank, the observers that exist besides
    those that see what the NIC sees; `uses` in which ways each location is written."""

    observers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    locations: dict[tuple[str, str, str], int] = field(default_factory=dict)
    queues: dict[tuple[str, str], int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    uses: dict[int, set[str]] = field(default_factory=dict)

    def location(self, loc: Loc, observer: str = "") -> int:
        return self.locations.setdefault((loc.rank, loc.name, observer), len(self.locations))

    def scratch(self, name: str) -> int:
        return self.locations.setdefault(("", name, ""), len(self.locations))

    def use(self, location: int, how: str) -> None:
        """Remember that a location is written plainly ("put"), set or added to."""
        self.uses.setdefault(location, set()).add(how)

    def nic_queue(self, rank: str, nic: str) -> int:
        return self.queues.setdefault((rank, nic), len(self.queues))

    def event(self, kind: Kind, post: Posted, after: int) -> Event:
        event = Event(1 << len(self.events), kind, post, after)
        self.events.append(event)
        post.events.append(event)
        return event


def peer_of(op: Post) -> str:
    """The rank at the other end."""
    match op:
        case Write():
            return op.target[0].rank
        case Send():
            return op.arrival.word.rank
        case Flush():
            return op.peer
        case _:
            return op.target.rank


def _union(posts: Sequence[Posted], what: Callable[[Posted], int]) -> int:
    bits = 0
    for post in posts:
        bits |= what(post)
    return bits


def events_of(
    profile: Profile, op: Post, rank: str, thread: int, earlier: Sequence[Posted], ordered: int, number: Numbering
) -> Posted:
    """Number the events of `op` and give them their edges.

    `earlier` are the thread's earlier posts, `ordered` the places that an order-puts fence has put before this one.
    """
    post = Posted(op, len(earlier), thread, rank, peer_of(op), op.queue)
    same = [p for p in earlier if p.queue == post.queue and p.peer == post.peer]
    entry = _accept(profile, op, post, same, number)
    match op:
        case Write():
            _write(profile, op, post, entry, same, ordered, number)
        case Notify():
            _notify(profile, op, post, entry, same, earlier, ordered, number)
        case AtomicWrite():
            waits = _queue_order(profile, same)
            waits |= _union(same, lambda p: p.flushes | (p.places if p.is_amo else 0))
            if profile.aw_waits == "placed":
                waits |= _union(same, lambda p: p.places)
            _place(post, entry, op.target, op.value, waits, number)
        case Atomic():
            _atomic(profile, op, post, entry, same, number)
        case Read():
            _read(profile, op, post, entry, same, number)
        case Flush():
            event = number.event(Kind.FLUSHED, post, entry.bit | _union(same, lambda p: p.places | p.shown))
            post.flushes = event.bit
        case Send():
            pass
    if profile.coherent:
        for event in post.events:
            for other in (e for p in earlier for e in p.events if e.use and event.use and e.target == event.target):
                event.after |= other.bit
    _completions(profile, op, post, entry, same, number)
    return post


def _accept(profile: Profile, op: Post, post: Posted, same: Sequence[Posted], number: Numbering) -> Event:
    """Source read and accept."""
    fenced = getattr(op, "fenced", "none")
    start = 0
    if fenced == "spec" and profile.fence == "spec":
        start |= _union(same, lambda p: p.cqes if p.is_amo or p.is_read else 0)
    if fenced == "strong":
        if not profile.strong_fence:
            raise InvalidArgument(f"profile {profile.name} has no strong-order flag")
        start |= _union(same, lambda p: p.places | p.shown | p.returns)
    source = getattr(op, "source", None)
    after = start
    if source is not None:
        read = number.event(Kind.SOURCE, post, start)
        read.source, read.target = number.location(source), number.scratch(f"t{post.thread}.{post.number}")
        read.reads = 1 << read.source
        after |= read.bit
    if profile.wire == "fifo":
        after |= _union(same, lambda p: p.accepts)
    accept = number.event(Kind.ACCEPT, post, after)
    if profile.place_ww == "fifo_nic" and not isinstance(op, Read | Send | Flush):
        accept.queue = number.nic_queue(post.peer, post.queue.nic)
        accept.marks = 1 << accept.queue
    post.accepts = accept.bit
    return accept


def _place(post: Posted, entry: Event, target: Loc, value: int, waits: int, number: Numbering) -> Event:
    """One word becomes visible: to the NIC's own order first, to other observers whenever they like afterwards."""
    event = number.event(Kind.PLACE, post, entry.bit | waits)
    event.target, event.value = number.location(target), value
    event.writes = 1 << event.target
    event.queue, event.entry = entry.queue, event.bit
    event.label = str(target)
    entry.enters |= event.bit
    post.places |= event.bit
    _show(post, event, target, number)
    return event


def _queue_order(profile: Profile, same: Sequence[Posted]) -> int:
    return _union(same, lambda p: p.places) if profile.place_ww == "fifo_qp" else 0


def _show(post: Posted, placed: Event, target: Loc, number: Numbering) -> None:
    for observer in number.observers.get(target.rank, ()):
        show = number.event(Kind.SHOW, post, placed.bit)
        show.source, show.target = placed.target, number.location(target, observer)
        show.reads, show.writes = 1 << show.source, 1 << show.target
        show.label = f"{target} to {observer}"
        post.shown |= show.bit


def _write(
    profile: Profile, op: Write, post: Posted, entry: Event, same: Sequence[Posted], ordered: int, number: Numbering
) -> None:
    waits = ordered | _queue_order(profile, same)
    previous: Event | None = None
    for i, target in enumerate(op.target):
        event = _place(post, entry, target, op.values[i] if op.values else 0, waits, number)
        event.use = "put"
        number.use(event.target, "put")
        if op.source is not None:
            event.source = number.scratch(f"t{post.thread}.{post.number}")
        block = op.block or (0,) * len(op.target)
        follows = profile.in_message == "ascending" or (profile.in_message == "block" and block[i] == block[i - 1])
        if previous is not None and follows:
            event.after |= previous.bit
        previous = event


def _notify(
    profile: Profile,
    op: Notify,
    post: Posted,
    entry: Event,
    same: Sequence[Posted],
    earlier: Sequence[Posted],
    ordered: int,
    number: Numbering,
) -> None:
    covers = profile.covers if op.covers == "profile" else op.covers
    if profile.covers_all:
        covered: Sequence[Posted] = earlier
    elif covers == "earlier":
        covered = same
    else:
        covered = [p for p in same if isinstance(p.op, Write) and p.op.bundle == op.bundle and op.bundle]
    waits = ordered | _queue_order(profile, same) | _union(covered, lambda p: p.places | p.shown)
    event = _place(post, entry, op.target, op.value, waits, number)
    event.action = event.use = op.action
    number.use(event.target, op.action)
    if op.action == "add":
        event.reads = event.writes


def _atomic(
    profile: Profile, op: Atomic, post: Posted, entry: Event, same: Sequence[Posted], number: Numbering
) -> None:
    after = entry.bit
    waits = profile.amo_waits
    if waits == "accepted" and op.target.strict and profile.strict_waits:
        waits = "placed"
    writes = [p for p in same if not p.is_amo]
    if waits == "placed":
        after |= _union(writes, lambda p: p.places)
    elif waits == "accepted":
        after |= _union(writes, lambda p: p.accepts)
    if profile.amo_order:
        after |= _union([p for p in same if p.is_amo], lambda p: p.places)
    target, temp = number.location(op.target), number.scratch(f"t{post.thread}.{post.number}")
    if profile.amo_scope == "nic":
        # two instants: whatever does not go through this NIC may come between them
        lock = number.scratch(f"lock {op.target} {post.queue.nic}")
        first = number.event(Kind.RMW_READ, post, after)
        first.source, first.target, first.lock, first.queue = target, temp, lock, entry.queue
        first.reads, first.writes = 1 << target, 1 << lock
        first.label = str(op.target)
        final = number.event(Kind.RMW, post, first.bit)
        final.lock, first.entry = lock, final.bit
    else:
        final = number.event(Kind.RMW, post, after)
    final.queue, final.entry, final.use = entry.queue, final.bit, "add"
    number.use(target, "add")
    entry.enters |= final.bit
    final.source, final.target, final.value = temp, target, op.delta
    final.reads = final.writes = (1 << target) | (1 << final.lock if final.lock >= 0 else 0)
    final.label = str(op.target)
    post.places |= final.bit
    _show(post, final, op.target, number)
    if op.fetch_to is not None:
        back = number.event(Kind.RETURN, post, final.bit)
        back.source, back.target = temp, number.location(op.fetch_to)
        back.writes = 1 << back.target
        back.label = str(op.fetch_to)
        post.returns |= back.bit


def _read(profile: Profile, op: Read, post: Posted, entry: Event, same: Sequence[Posted], number: Numbering) -> None:
    after = entry.bit
    if profile.read_waits == "placed":
        after |= _union(same, lambda p: p.places | p.shown)
    temp = number.scratch(f"t{post.thread}.{post.number}")
    read = number.event(Kind.REMOTE_READ, post, after)
    read.source, read.target = number.location(op.target), temp
    read.reads = 1 << read.source
    read.label = str(op.target)
    back = number.event(Kind.RETURN, post, read.bit)
    back.source, back.target = temp, number.location(op.into)
    back.writes = 1 << back.target
    back.label = str(op.into)
    post.returns |= back.bit


def _completions(
    profile: Profile, op: Post, post: Posted, entry: Event, same: Sequence[Posted], number: Numbering
) -> None:
    own = post.places | post.returns | post.flushes
    after = entry.bit
    if profile.cqe_after == "placed" or post.is_amo or post.is_read or post.flushes:
        after |= own
    ack = number.event(Kind.ACK, post, after)
    cqe = number.event(Kind.CQE, post, ack.bit)
    if profile.cqe_order:
        cqe.after |= _union(same, lambda p: p.cqes)
    post.cqes = cqe.bit
    arrival = getattr(op, "arrival", None)
    if arrival is not None:
        rcqe = number.event(Kind.RCQE, post, entry.bit | own)
        if profile.rcqe_after == "qp_placed":
            rcqe.after |= _union(same, lambda p: p.places | p.rcqes)
        rcqe.target, rcqe.value, rcqe.action = number.location(arrival.word), arrival.value, arrival.action
        rcqe.reads = rcqe.writes = 1 << rcqe.target
        rcqe.label = str(arrival.word)
        post.rcqes = rcqe.bit
