"""The network machine: threads that post operations, and the events of those operations.

A state is (thread nodes, events that have happened, memory, NIC queues). A thread move does the thread's next action;
an event happens once all events that it waits for have happened (`events`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from expertwire.errors import InvalidArgument
from expertwire.ordering.events import Event, Kind, Numbering, Posted, events_of, peer_of
from expertwire.ordering.profiles import Profile
from expertwire.ordering.program import Answer, Node, Program, Tree, registers
from expertwire.ordering.stubborn import stubborn
from expertwire.ordering.transitions import COMPARE, EXPIRED, MODIFY, Move, State, Violation, check_read, fetch, store
from expertwire.ordering.verbs import (
    AddWord,
    Await,
    Claim,
    Completion,
    DeviceFlush,
    Doorbell,
    LoadWord,
    Loc,
    OrderPuts,
    Post,
    Queue,
    Quiet,
    Sometimes,
    StoreWord,
    Undefined,
)
from expertwire.ordering.words import event_words, step_words


@dataclass(slots=True)
class Code:
    """A compiled action. `posts` and `posted` are what the thread has handed over before it, `held` what waits for a
    doorbell, `ordered` what a fence has put before later posts. `guard` are the events that the action waits for."""

    posts: tuple[Posted, ...] = ()
    posted: int = 0
    held: int = 0
    ordered: dict[tuple[Queue, str], int] = field(default_factory=dict)
    new: Posted | None = None
    guard: int = 0
    reads: int = 0
    writes: int = 0
    location: int = -1
    stores: tuple[int, ...] = ()


class Network:
    """The machine of all network profiles."""

    def __init__(self, program: Program, profile: Profile) -> None:
        self.program, self.profile = program, profile
        self.number = Numbering(observers=_observers(program, profile))
        self.reached: set[str] = set()
        self.tree = Tree(program.threads, self._compile)

    # ---- compiling: what an action posts, waits for, reads and writes ------------------------------------------------

    def _compile(self, node: Node) -> tuple[int, int, int]:
        code = node.code = self._inherit(node)
        action = node.action
        if action is None:
            return 0, 0, 0
        if isinstance(action, Post):
            return self._compile_post(node, action, code)
        match action:
            case Await(loc=loc) | LoadWord(loc=loc):
                code.location = self._seen(node.thread, loc)
                code.reads = 1 << code.location
            case StoreWord(loc=loc) | AddWord(loc=loc):
                code.location = self._seen(node.thread, loc)
                code.stores = self._everywhere(loc)
                code.writes = sum(1 << s for s in code.stores)
                code.reads = code.writes if isinstance(action, AddWord) else 0
            case Completion(queue=queue):
                code.guard = self._mask(code, queue, "cqes")
            case Quiet(queue=queue):
                placed = self.profile.quiet == "placed"
                code.guard = self._mask(code, queue, "places", "shown", "returns") if placed else 0
                code.guard |= self._mask(code, queue, "cqes")
            case DeviceFlush():
                code.reads = -1  # whatever is placed meanwhile may have to be shown first
        return code.reads, code.writes, 0

    def _compile_post(self, node: Node, action: Post, code: Code) -> tuple[int, int, int]:
        rank = self.program.threads[node.thread].rank
        ordered = code.ordered.get((action.queue, peer_of(action)), 0)
        new = code.new = events_of(self.profile, action, rank, node.thread, code.posts, ordered, self.number)
        reads = writes = marks = 0
        for event in new.events:
            reads, writes, marks = reads | event.reads, writes | event.writes, marks | event.marks
        return reads, writes, marks

    def _inherit(self, node: Node) -> Code:
        """What the thread has posted when it arrives at `node`."""
        if node.parent is None:
            return Code()
        before: Code = node.parent.code
        action = node.parent.action
        code = Code(before.posts, before.posted, before.held, before.ordered)
        if before.new is not None:
            code.posts = (*before.posts, before.new)
            code.held |= sum(e.bit for e in before.new.events)
        if isinstance(action, Doorbell) or (before.new is not None and getattr(action, "rung", True)):
            code.posted, code.held = code.posted | code.held, 0
        if isinstance(action, OrderPuts):
            if not self.profile.order_puts:
                raise InvalidArgument(f"profile {self.profile.name} has no fence between puts")
            code.ordered = dict(before.ordered)
            for post in code.posts:
                if action.queue in (None, post.queue):
                    key = (post.queue, post.peer)
                    code.ordered[key] = code.ordered.get(key, 0) | post.places | post.shown
        return code

    @staticmethod
    def _mask(code: Code, queue: Queue | None, *what: str) -> int:
        mask = 0
        for post in code.posts:
            if queue in (None, post.queue):
                for name in what:
                    mask |= getattr(post, name)
        return mask

    def _seen(self, thread: int, loc: Loc) -> int:
        """The location at which a thread sees `loc`."""
        observer = self.program.threads[thread].observer
        return self.number.location(loc, observer if observer in self.number.observers.get(loc.rank, ()) else "")

    def _everywhere(self, loc: Loc) -> tuple[int, ...]:
        """The locations that a local store to `loc` changes: only what NICs write is seen differently."""
        return tuple(self.number.location(loc, o) for o in ("", *self.number.observers.get(loc.rank, ())))

    # ---- running -----------------------------------------------------------------------------------------------------

    def initial(self) -> State:
        return (self.tree.roots, 0, (), ())

    def moves(self, state: State) -> list[Move]:
        nodes, done, memory, queues = state
        found = []
        posted = 0
        for node in nodes:
            posted |= node.code.posted
            if node.action is not None:
                found += self._thread_moves(node, done, memory)
        pending = posted & ~done
        events = self.number.events
        while pending:
            low = pending & -pending
            pending ^= low
            i = low.bit_length() - 1
            if self.ready(events[i], done, memory, queues):
                found.append(Move(-1, 0, i))
        return found

    def _thread_moves(self, node: Node, done: int, memory: tuple[int, ...]) -> list[Move]:
        code, action = node.code, node.action
        if code.guard & ~done:
            return []
        if isinstance(action, Await):
            found = [Move(node.thread, EXPIRED)] if action.may_expire else []
            if COMPARE[action.compare](fetch(memory, code.location) & action.mask, action.value & action.mask):
                found.append(Move(node.thread))
            return found
        if isinstance(action, DeviceFlush) and self._hidden(action, done):
            return []
        return [Move(node.thread)]

    def _hidden(self, action: DeviceFlush, done: int) -> int:
        """Events that would show what has been placed at a rank, but have not happened."""
        if not (action.trusted or self.profile.gdr_flush_trusted):
            return 0
        hidden = 0
        for event in self.number.events:
            if event.kind is Kind.SHOW and event.post.peer == action.rank and not event.after & ~done:
                hidden |= event.bit & ~done
        return hidden

    @staticmethod
    def ready(event: Event, done: int, memory: tuple[int, ...], queues: State) -> bool:
        """Whether a posted event may happen."""
        if event.after & ~done:
            return False
        if event.queue >= 0 and event.kind is not Kind.ACCEPT:
            queue = queues[event.queue] if event.queue < len(queues) else ()
            if not queue or not queue[0] & event.entry:
                return False
        return not (event.kind is Kind.RMW_READ and fetch(memory, event.lock))

    def apply(self, state: State, move: Move) -> tuple[State, Violation | None]:
        nodes, done, memory, queues = state
        if move.event >= 0:
            event = self.number.events[move.event]
            memory = self._happen(event, memory)
            if event.queue >= 0 and event.kind is not Kind.RMW_READ:
                queues = _turn(queues, event)
            race = self._race(event.target, event.use, nodes, done | event.bit) if event.use else None
            return (nodes, done | event.bit, memory, queues), race
        node = nodes[move.thread]
        answer, memory, violation = self._act(node, move.choice, memory)
        if isinstance(node.action, StoreWord):
            violation = self._race(node.code.location, "store", nodes, done)
        after = self.tree.child(node, answer)
        return ((*nodes[: move.thread], after, *nodes[move.thread + 1 :]), done, memory, queues), violation

    def _race(self, location: int, use: str, nodes: tuple[Node, ...], done: int) -> Violation | None:
        """A use of a word while another operation is about to use it in a way that does not mix with it."""
        if not self.profile.racy_is_undefined or self.number.uses.get(location, {use}) == {use}:
            return None
        posted = 0
        for node in nodes:
            posted |= node.code.posted
        for event in self.number.events:
            if event.target == location and event.use and event.use != use and event.bit & posted & ~done:
                return Violation("undefined", f"{event.label} is written by {use} and {event.use} at a time")
        return None

    @staticmethod
    def _happen(event: Event, memory: tuple[int, ...]) -> tuple[int, ...]:
        match event.kind:
            case Kind.ACCEPT | Kind.ACK | Kind.CQE | Kind.FLUSHED:
                return memory
            case Kind.RMW_READ:
                return store(store(memory, event.target, fetch(memory, event.source)), event.lock, 1)
            case Kind.RMW:
                old = fetch(memory, event.source if event.lock >= 0 else event.target)
                memory = store(store(memory, event.source, old), event.target, old + event.value)
                return store(memory, event.lock, 0) if event.lock >= 0 else memory
        value = fetch(memory, event.source) if event.source >= 0 else event.value
        return store(memory, event.target, MODIFY[event.action](fetch(memory, event.target), value))

    def _act(
        self, node: Node, choice: int, memory: tuple[int, ...]
    ) -> tuple[Answer, tuple[int, ...], Violation | None]:
        code = node.code
        match node.action:
            case Await(order="plain", loc=loc) if self.profile.racy_is_undefined:
                return None, memory, Violation("undefined", f"{loc} is polled with plain loads")
            case Await():
                return (None if choice == EXPIRED else fetch(memory, code.location)), memory, None
            case LoadWord(expect=expect, loc=loc, note=note):
                seen = fetch(memory, code.location)
                if expect is None:
                    return seen, memory, None
                return None, memory, check_read(loc, seen, expect, note)
            case StoreWord(value=value):
                for place in code.stores:
                    memory = store(memory, place, value)
            case AddWord(delta=delta):
                old = fetch(memory, code.location)
                for place in code.stores:
                    memory = store(memory, place, old + delta)
                return old, memory, None
            case Claim(holds=False, kind=kind, note=note):
                return None, memory, Violation(kind, note)
            case Undefined(note=note):
                return None, memory, Violation("undefined", note)
            case Sometimes(label=label):
                self.reached.add(label)
        return None, memory, None

    # ---- telling -----------------------------------------------------------------------------------------------------

    def reduced(self, state: State, moves: list[Move]) -> list[Move]:
        nodes, done, memory, queues = state
        return stubborn(self.number.events, nodes, done, memory, queues, moves)

    def unfinished(self, state: State) -> list[str]:
        nodes, done, memory, _ = state
        return [self._blocked(n, done, memory) for n in nodes if n.action is not None]

    def _blocked(self, node: Node, done: int, memory: tuple[int, ...]) -> str:
        name, action = self.program.threads[node.thread].name, node.action
        if isinstance(action, Await):
            seen = fetch(memory, node.code.location)
            what = f" ({action.note})" if action.note else ""
            return f"{name} waits for {action.loc} {action.compare} {action.value}{what}, and sees {seen}"
        return f"{name} stops at {type(action).__name__.lower()}"

    def lost(self, state: State) -> bool:
        nodes, done, _, _ = state
        for node in nodes:
            if isinstance(node.action, Await):
                action = node.action
                written = [e for e in self.number.events if e.bit & done and e.target == node.code.location and e.use]
                values = [e.value for e in written if e.use != "add"]
                values.append(sum(e.value for e in written if e.use == "add"))
                if any(COMPARE[action.compare](v & action.mask, action.value & action.mask) for v in values):
                    return True
        return False

    def outcome(self, state: State) -> dict[str, Answer]:
        nodes, _, memory, _ = state
        found: dict[str, Answer] = {}
        for (rank, name, observer), place in self.number.locations.items():
            if rank and not observer:
                found[f"{rank}.{name}"] = fetch(memory, place)
        for node in nodes:
            found.update(registers(node))
        return found

    def describe(self, state: State, move: Move) -> tuple[str, str, str]:
        if move.event >= 0:
            return event_words(self.number.events[move.event])
        node = state[0][move.thread]
        seen = fetch(state[2], node.code.location) if node.code.location >= 0 else 0
        return self.program.threads[move.thread].rank, "", step_words(node.action, seen, move.choice == EXPIRED)

    def process(self, state: State, move: Move) -> tuple[int, int]:
        if move.event < 0:
            return 0, move.thread
        post = self.number.events[move.event].post
        return 1, post.thread << 16 | post.number

    def key(self, move: Move) -> tuple[int, int, int, int]:
        if move.event < 0:
            return 0, move.thread, move.choice, 0
        event = self.number.events[move.event]
        return 1, event.post.thread, event.post.number, event.post.events.index(event)

    def is_placement(self, move: Move) -> bool:
        return move.event >= 0 and self.number.events[move.event].kind in (Kind.PLACE, Kind.SHOW, Kind.RMW, Kind.RETURN)


def _observers(program: Program, profile: Profile) -> dict[str, tuple[str, ...]]:
    """Per rank, the GPU observers for which the NIC's order does not hold."""
    covered = {"none": set(), "owner": {"gpu_owner"}, "all": {"gpu_owner", "gpu_other"}}[profile.gdr_order] | {"host"}
    found: dict[str, tuple[str, ...]] = {}
    for thread in program.threads:
        if thread.observer not in covered:
            found[thread.rank] = tuple(sorted({*found.get(thread.rank, ()), thread.observer}))
    return found


def _turn(queues: State, event: Event) -> State:
    """The NIC queues after an accept (the operation joins) or a placement (its entry leaves)."""
    at = event.queue
    if at >= len(queues):
        queues += ((),) * (at + 1 - len(queues))
    queue = queues[at]
    if event.kind is Kind.ACCEPT:
        queue = (*queue, event.enters)
    else:
        rest = queue[0] & ~event.entry
        queue = (rest, *queue[1:]) if rest else queue[1:]
    return (*queues[:at], queue, *queues[at + 1 :])
