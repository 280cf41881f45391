"""The ptx machine: views over messages.

Every location has its writes ("messages") in coherence order. A thread's *view* holds, per proxy and location, the
newest message that causality has brought to it; a read returns any message that is not older than that. So a racy weak
read may return any value not overwritten in the reader's causal past.

    release      attaches the thread's view to the message, with the scope and the thread
    acquire      adds a message's view to the own one if writer and reader lie in each other's scopes (morally strong)
    fence        release and acquire for the relaxed accesses after and before it; .sc fences also see each other
    atom, red    continue the release sequence of the message that they replace
    bar.sync     everybody knows what everybody knew, in all proxies
    proxy fence  joins the view of another proxy (async, surface, multicast alias) and the generic one
    bulk copies  read and write later, through the async proxy; waiting for completion is an implicit proxy fence

A generic load that no proxy fence orders before a later bulk write to the same word may still return that write
(write-after-read across proxies). Weaker than the axiomatic model where it differs, with one exception: like every view
machine without promises it does not show load buffering (docs/memory-model.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from expertwire.errors import InvalidArgument
from expertwire.ordering.operations import Order, Scope
from expertwire.ordering.profiles import Profile
from expertwire.ordering.program import Answer, Node, Program, Tree, registers
from expertwire.ordering.ptx_reduce import reduced
from expertwire.ordering.ptx_verbs import (
    PROXIES,
    Arrive,
    Bulk,
    Commit,
    Ld,
    Leave,
    MemFence,
    ProxyFence,
    Rmw,
    St,
    WaitGroup,
)
from expertwire.ordering.ptx_views import (
    ACQUIRES,
    ALIAS,
    ASYNC,
    GENERIC,
    RELEASES,
    Barrier,
    Entry,
    Flight,
    Local,
    Message,
    Views,
    index_of,
    inserted,
    joined,
    known,
    messages_of,
    raised,
    with_messages,
    with_view,
)
from expertwire.ordering.ptx_words import bulk_words, step_words
from expertwire.ordering.transitions import COMPARE, Move, State, Violation, check_read
from expertwire.ordering.verbs import Claim, Loc, Sometimes


@dataclass(slots=True)
class Code:
    """Where an action is in its thread: the bulk operations so far with their commit group, the number of generic
    loads; `touches` and `sources` are the locations of this action and of the bulk operations' sources, as bits."""

    bulks: tuple[tuple[Bulk, int], ...] = ()
    group: int = 0
    loads: int = 0
    touches: int = 0
    sources: tuple[int, ...] = ()


class Ptx:
    """The machine of the ptx profiles. A state is (nodes, memory, locals, flights, barriers, sc fences, late reads)."""

    def __init__(self, program: Program, profile: Profile) -> None:
        self.program, self.profile = program, profile
        self.reached: set[str] = set()
        self.locations: dict[tuple[str, str], int] = {}
        self.open_loads: dict[int, tuple[int, int, Ld]] = {}  # pseudo-location -> (thread, location, load)
        self.tree = Tree(program.threads, self._compile)

    # ---- compiling ---------------------------------------------------------------------------------------------------

    def loc(self, loc: Loc) -> int:
        return self.locations.setdefault((loc.rank, loc.name), len(self.locations))

    def _compile(self, node: Node) -> tuple[int, int, int]:
        before: Code = node.parent.code if node.parent else Code()
        code = node.code = Code(before.bulks, before.group, before.loads, 0, before.sources)
        done = node.parent.action if node.parent else None
        if isinstance(done, Bulk):
            code.bulks = (*before.bulks, (done, before.group))
            code.sources = (*before.sources, 1 << self.loc(done.source) if done.source else 0)
        elif isinstance(done, Commit):
            code.group += 1
        elif isinstance(done, Ld) and done.proxy == "generic":
            code.loads += 1
        match node.action:
            case Ld(loc=loc):
                code.touches = 1 << self.loc(loc)
                return code.touches, 0, 0
            case St(loc=loc):
                code.touches = 1 << self.loc(loc)
                return 0, code.touches, 0
            case Rmw(loc=loc):
                code.touches = 1 << self.loc(loc)
                return code.touches, code.touches, 0
            case Bulk(target=target, source=source):
                return (1 << self.loc(source) if source else 0), 1 << self.loc(target), 0
            case MemFence(order=Order.SC):
                return 0, 0, 1
        return 0, 0, 0

    # ---- scopes, views -----------------------------------------------------------------------------------------------

    def _within(self, scope: Scope, a: int, b: int) -> bool:
        """Whether thread `b` lies in `scope` of thread `a`."""
        if a < 0 or b < 0 or a == b or scope is Scope.SYS:
            return True
        pa, pb = self.program.threads[a].place, self.program.threads[b].place
        return pa[0] == pb[0] and (scope is not Scope.CTA or pa[1] == pb[1])

    def _mutual(self, a: int, scope_a: Scope, b: int, scope_b: Scope) -> bool:
        return self._within(scope_a, a, b) and self._within(scope_b, b, a)

    def _strong(self, message: Message, thread: int, action: Ld | St | Rmw, aliased: bool) -> bool:
        """Whether an access is morally strong with a write."""
        if message.thread < 0:
            return True
        if message.scope is None or action.order is Order.WEAK:
            return False
        same_proxy = message.proxy == action.proxy or (
            aliased and {message.proxy, action.proxy} == {"alias", "generic"}
        )
        return same_proxy and self._mutual(message.thread, message.scope, thread, action.scope)

    def _learn(self, memory: State, thread: int, mine: Views, entry: Entry) -> Views:
        """What acquiring `entry` teaches: the generic view; other proxies within the CTA, or as the profile says."""
        near = entry.thread == thread or self._within(Scope.CTA, entry.thread, thread)
        kept = []
        for proxy, (own, other) in enumerate(zip(mine, entry.views, strict=True)):
            travels = proxy == GENERIC or near or (proxy == ASYNC and self.profile.proxy_fence == "path")
            kept.append(joined(memory, own, other) if travels else own)
        return tuple(kept)

    # ---- running -----------------------------------------------------------------------------------------------------

    def initial(self) -> State:
        nothing = Local(((),) * len(PROXIES), ())
        return (self.tree.roots, (), (nothing,) * len(self.tree.roots), (), (), (), ())

    def moves(self, state: State) -> list[Move]:
        nodes, flights = state[0], state[3]
        found = []
        for node in nodes:
            if node.action is not None:
                found += [Move(node.thread, k) for k in range(self._options(state, node))]
        for i, flight in enumerate(flights):
            if flight.phase < 2:
                found += [Move(-1, k, i) for k in range(len(self._flight_options(state, flight)))]
        return found

    def _options(self, state: State, node: Node) -> int:
        _, memory, locals_, flights, barriers = state[:5]
        mine = locals_[node.thread]
        match node.action:
            case Ld() | Rmw() as action:
                return len(self._readable(memory, node.thread, mine, action))
            case St() as action:
                return len(self._positions(memory, node.thread, mine, action))
            case Leave(name=name, count=count):
                return int(any(b.name == name and b.arrived.bit_count() >= count for b in barriers))
            case WaitGroup(pending=pending, read=read):
                waited = [n for n, (_, g) in enumerate(node.code.bulks) if g < node.code.group - pending]
                phase = {f.number: f.phase for f in flights if f.thread == node.thread}
                return int(all(phase[n] >= (1 if read else 2) for n in waited))
        return 1

    def _readable(self, memory: State, thread: int, mine: Local, action: Ld | Rmw) -> list[Message]:
        """The messages that a read may return."""
        at = self.loc(action.loc)
        messages = messages_of(memory, at)
        if action.proxy == "nc":
            return list(messages)
        least = index_of(memory, at, known(mine.views[PROXIES.index(action.proxy)], at))
        coherent = index_of(memory, at, known(mine.coherent, at))
        found = []
        for i, message in enumerate(messages):
            strong = self._strong(message, thread, action, mine.aliased)
            if i < least or (strong and i < coherent and action.order is not Order.WEAK):
                continue
            if isinstance(action, Rmw):
                if any(self._strong(m, thread, action, mine.aliased) for m in messages[i + 1 :]):
                    continue
                if action.kind == "cas" and message.value != action.compare:
                    continue
            elif action.compare and not COMPARE[action.compare](message.value, action.value):
                continue
            found.append(message)
        return found

    def _positions(self, memory: State, thread: int, mine: Local, action: St) -> list[int]:
        """Where in coherence order a store may go: anywhere after what the thread knows, but not into an atomic."""
        at = self.loc(action.loc)
        messages = messages_of(memory, at)
        least = max(
            index_of(memory, at, known(mine.views[PROXIES.index(action.proxy)], at)),
            index_of(memory, at, known(mine.coherent, at)),
        )
        return [i for i in range(least + 1, len(messages) + 1) if i == len(messages) or not messages[i].rmw]

    def apply(self, state: State, move: Move) -> tuple[State, Violation | None]:
        if move.event >= 0:
            return self._fly(state, move)
        nodes, memory, locals_, flights, barriers, fences, late = state
        node, thread = nodes[move.thread], move.thread
        mine: Local = locals_[thread]
        action, answer, violation = node.action, None, None
        match action:
            case Ld():
                message = self._readable(memory, thread, mine, action)[move.choice]
                mine = self._read(memory, thread, mine, action, message)
                answer = None if action.expect is not None else message.value
                if action.expect is not None:
                    violation = check_read(action.loc, message.value, action.expect, action.note)
                if action.proxy == "nc" and len(messages_of(memory, self.loc(action.loc))) > 1:
                    violation = Violation("undefined", f"{action.loc} is read through ld.nc while it is written")
                if action.proxy == "generic" and (self.program.bulk or action.expect is not None):
                    memory, mine = self._stay_open(memory, thread, mine, node, action)
            case St():
                violation = self._overtakes(locals_, thread, mine, action)
                position = self._positions(memory, thread, mine, action)[move.choice]
                memory, mine = self._write(memory, thread, mine, action, action.value, position, ())
            case Rmw():
                message = self._readable(memory, thread, mine, action)[move.choice]
                mine = self._read(memory, thread, mine, action, message)
                old = message.value
                value = old + action.operand if action.kind == "add" else action.operand
                carried = message.releases if self._strong(message, thread, action, mine.aliased) else ()
                end = len(messages_of(memory, self.loc(action.loc)))
                memory, mine = self._write(memory, thread, mine, action, value, end, carried)
                answer = old
            case MemFence():
                mine, fences = self._fence(memory, thread, mine, action, fences)
            case ProxyFence(proxy=proxy):
                mine = self._proxy_fence(memory, thread, mine, PROXIES.index(proxy))
            case Arrive(name=name):
                barriers = self._arrive(memory, thread, mine, name, barriers)
            case Leave(name=name):
                mine, barriers = self._leave(memory, thread, mine, name, barriers)
            case Bulk():
                flights = (*flights, Flight(thread, len(node.code.bulks), 0, mine.views))
            case WaitGroup(pending=pending, read=read):
                if not read:
                    mine = self._completed(memory, node, mine, flights, pending)
            case Commit():
                pass
            case Claim(holds=holds, kind=kind, note=note):
                violation = None if holds else Violation(kind, note)
            case Sometimes(label=label):
                self.reached.add(label)
            case _:
                raise InvalidArgument(f"the ptx machine has no {action}")
        after = self.tree.child(node, answer)
        nodes = (*nodes[:thread], after, *nodes[thread + 1 :])
        locals_ = (*locals_[:thread], mine, *locals_[thread + 1 :])
        return (nodes, memory, locals_, flights, barriers, fences, late), violation

    def _read(self, memory: State, thread: int, mine: Local, action: Ld | Rmw, message: Message) -> Local:
        if action.order is Order.WEAK or not self._strong(message, thread, action, mine.aliased):
            return mine
        mine = mine._replace(coherent=raised(memory, mine.coherent, self.loc(action.loc), message.id))
        if action.order not in ACQUIRES:
            pending = tuple(sorted({*mine.pending, *message.releases}))
            return mine._replace(pending=pending)
        views = mine.views
        for entry in message.releases:
            if self._mutual(entry.thread, entry.scope, thread, action.scope):
                views = self._learn(memory, thread, views, entry)
        return mine._replace(views=views)

    def _write(
        self,
        memory: State,
        thread: int,
        mine: Local,
        action: St | Rmw,
        value: int,
        position: int,
        carried: tuple[Entry, ...],
    ) -> tuple[State, Local]:
        at, proxy = self.loc(action.loc), PROXIES.index(action.proxy)
        messages = messages_of(memory, at)
        number = len(messages)
        scope = None if action.order is Order.WEAK else action.scope
        views = with_view(mine.views, proxy, at, number)
        releases = set(carried)
        if action.order in RELEASES:
            releases.add(Entry(thread, action.scope, views))
        if scope is not None:
            releases.update(Entry(thread, s, v) for s, v in mine.fenced)
        entries = tuple(sorted(releases))
        message = Message(number, value, thread, scope, action.proxy, entries, isinstance(action, Rmw))
        memory = inserted(memory, at, position, message)
        return memory, mine._replace(views=views, coherent=raised(memory, mine.coherent, at, number))

    def _fence(
        self, memory: State, thread: int, mine: Local, fence: MemFence, fences: tuple[Entry, ...]
    ) -> tuple[Local, tuple[Entry, ...]]:
        views = mine.views
        for entry in mine.pending:
            if self._mutual(entry.thread, entry.scope, thread, fence.scope):
                views = self._learn(memory, thread, views, entry)
        if fence.order is Order.SC:
            for entry in fences:
                if self._mutual(entry.thread, entry.scope, thread, fence.scope):
                    views = self._learn(memory, thread, views, entry)
            fences = (*fences, Entry(thread, fence.scope, views))
        kept = dict(mine.fenced) | {fence.scope: views}
        return mine._replace(views=views, fenced=tuple(sorted(kept.items()))), fences

    def _arrive(
        self, memory: State, thread: int, mine: Local, name: str, barriers: tuple[Barrier, ...]
    ) -> tuple[Barrier, ...]:
        kept = {b.name: b for b in barriers}
        at = kept.get(name) or Barrier(name, 0, 0, mine.views)
        views = tuple(joined(memory, a, b) for a, b in zip(at.views, mine.views, strict=True))
        kept[name] = Barrier(name, at.arrived | 1 << thread, 0, views)
        return tuple(sorted(kept.values()))

    def _leave(
        self, memory: State, thread: int, mine: Local, name: str, barriers: tuple[Barrier, ...]
    ) -> tuple[Local, tuple[Barrier, ...]]:
        at = next(b for b in barriers if b.name == name)
        rest = tuple(b for b in barriers if b.name != name)
        views = tuple(joined(memory, a, b) for a, b in zip(mine.views, at.views, strict=True))
        at = at._replace(left=at.left | 1 << thread)
        if at.left != at.arrived:
            rest = tuple(sorted((*rest, at)))
        return mine._replace(views=views), rest

    def _proxy_fence(self, memory: State, thread: int, mine: Local, proxy: int) -> Local:
        generic, other = mine.views[GENERIC], mine.views[proxy]
        if self.profile.proxy_fence == "own" and proxy == ASYNC:
            own = tuple(
                m if m and messages_of(memory, at)[index_of(memory, at, m)].thread == thread else 0
                for at, m in enumerate(generic)
            )
            both = joined(memory, other, own)
        else:
            both = joined(memory, generic, other)
        views = list(mine.views)
        views[proxy], views[GENERIC] = both, joined(memory, generic, both)
        return mine._replace(views=tuple(views), aliased=mine.aliased or proxy == ALIAS)

    def _overtakes(self, locals_: State, thread: int, mine: Local, action: St) -> Violation | None:
        """A store that does not know of an earlier load of its location might as well have come before it."""
        at = self.loc(action.loc)
        for pseudo, (reader, location, load) in self.open_loads.items():
            if location == at and load.expect is not None and reader != thread:
                ran = known(locals_[reader].views[GENERIC], pseudo)
                if ran and not known(mine.views[GENERIC], pseudo):
                    text = f"{load.note or load.loc}: step {action.value} is stored without knowing that step "
                    return Violation("bank reused too early", f"{text}{load.expect} has been read")
        return None

    def _stay_open(self, memory: State, thread: int, mine: Local, node: Node, action: Ld) -> tuple[State, Local]:
        """Note that a load has run, as a write to a location of its own: whoever knows that write runs after it."""
        at = self.loc(Loc("", f"load {thread}.{node.code.loads}"))
        self.open_loads[at] = (thread, self.loc(action.loc), action)
        memory = with_messages(memory, at, (Message(0, 0, -1, None, ""), Message(1, 0, thread, None, "")))
        return memory, mine._replace(views=with_view(mine.views, GENERIC, at, 1))

    # ---- bulk operations ---------------------------------------------------------------------------------------------

    def _bulk(self, state: State, flight: Flight) -> Bulk:
        op: Bulk = state[0][flight.thread].code.bulks[flight.number][0]
        return op

    def _flight_options(self, state: State, flight: Flight) -> list[Any]:
        """Phase 0: values that may be read. Phase 1: which open loads return the new value after all (or None)."""
        memory = state[1]
        op = self._bulk(state, flight)
        if flight.phase == 0:
            at = self.loc(op.target if op.add else op.source) if op.add or op.source else -1  # type: ignore[arg-type]
            if at < 0:
                return [op.value]
            least = index_of(memory, at, known(flight.views[ASYNC], at))
            return [m.value + (op.value if op.add else 0) for m in messages_of(memory, at)[least:]]
        return [None, *self._still_open(state, flight, self.loc(op.target))]

    def _still_open(self, state: State, flight: Flight, at: int) -> list[int]:
        """Generic loads of a location that have run, but that no proxy fence orders before this bulk write."""
        return [
            pseudo
            for pseudo, (thread, location, _) in self.open_loads.items()
            if location == at
            and known(state[2][thread].views[GENERIC], pseudo)
            and not known(flight.views[ASYNC], pseudo)
            and not any(p == pseudo for p, _ in state[6])
        ]

    def _fly(self, state: State, move: Move) -> tuple[State, Violation | None]:
        nodes, memory, locals_, flights, barriers, fences, late = state
        flight: Flight = flights[move.event]
        chosen = self._flight_options(state, flight)[move.choice]
        violation = None
        if flight.phase == 0:
            flight = flight._replace(phase=1, value=chosen)
        else:
            at = self.loc(self._bulk(state, flight).target)
            number = len(messages_of(memory, at))
            memory = inserted(memory, at, number, Message(number, flight.value, flight.thread, None, "async"))
            if chosen is not None:
                late = tuple(sorted((*late, (chosen, flight.value))))
                load = self.open_loads[chosen][2]
                if load.expect is not None:
                    violation = check_read(load.loc, flight.value, load.expect, load.note)
            flight = flight._replace(phase=2, message=number)
        flights = (*flights[: move.event], flight, *flights[move.event + 1 :])
        return (nodes, memory, locals_, flights, barriers, fences, late), violation

    def _completed(self, memory: State, node: Node, mine: Local, flights: State, pending: int) -> Local:
        """The implicit proxy fence of a completed bulk group, for the thread that waited."""
        views = mine.views
        for flight in flights:
            if flight.thread != node.thread or flight.number >= len(node.code.bulks):
                continue
            op, group = node.code.bulks[flight.number]
            if group < node.code.group - pending:
                at = self.loc(op.target)
                views = tuple(raised(memory, v, at, flight.message) for v in views)
        return mine._replace(views=views)

    # ---- telling -----------------------------------------------------------------------------------------------------

    def reduced(self, state: State, moves: list[Move]) -> list[Move]:
        targets = [1 << self.loc(self._bulk(state, f).target) for f in state[3]]
        return reduced(state, moves, targets)

    def unfinished(self, state: State) -> list[str]:
        found = []
        for node in state[0]:
            if node.action is not None:
                name = self.program.threads[node.thread].name
                found.append(f"{name} stops at: {step_words(node.action, None)}")
        return found

    def lost(self, state: State) -> bool:
        return False  # a read may return any write that is not overwritten: nothing that is waited for gets lost

    def outcome(self, state: State) -> dict[str, Answer]:
        nodes, memory = state[:2]
        found: dict[str, Answer] = {}
        for (rank, name), at in self.locations.items():
            if rank:
                found[f"{rank}.{name}"] = messages_of(memory, at)[-1].value
        for node in nodes:
            found.update(registers(node))
        for pseudo, value in state[6]:
            found[self.open_loads[pseudo][2].register] = value
        return found

    def describe(self, state: State, move: Move) -> tuple[str, str, str]:
        if move.event >= 0:
            flight = state[3][move.event]
            rank = self.program.threads[flight.thread].rank
            late = flight.phase == 1 and move.choice > 0
            return rank, "", bulk_words(self._bulk(state, flight), flight.phase, late)
        node = state[0][move.thread]
        action, seen, stale = node.action, None, False
        if isinstance(action, Ld | Rmw):
            message = self._readable(state[1], move.thread, state[2][move.thread], action)[move.choice]
            seen = message.value
            stale = message.id != messages_of(state[1], self.loc(action.loc))[-1].id
        thread = self.program.threads[move.thread]
        who = "" if thread.name == thread.rank else thread.name.removeprefix(thread.rank).strip() + ": "
        return thread.rank, "", who + step_words(action, seen, stale)

    def process(self, state: State, move: Move) -> tuple[int, int]:
        if move.event < 0:
            return 0, move.thread
        flight = state[3][move.event]
        return 1, flight.thread << 16 | flight.number

    def key(self, move: Move) -> tuple[int, int, int, int]:
        return int(move.event >= 0), move.thread, move.event, move.choice

    def is_placement(self, move: Move) -> bool:
        return move.event >= 0
