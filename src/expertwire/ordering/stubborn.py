"""Partial-order reduction for the network machine: stubborn sets.

From every state it is enough to explore a set of moves with two properties (Valmari 1990; Godefroid 1996): a move
outside the set commutes with those inside, now and after any other outside moves; and something that must happen before
a disabled member lies inside. All state graphs here are finite and acyclic, so no move is put off forever: every final
state is reached, and so is every violation, since a violation depends on one move and those it depends on.

Two moves depend on each other if one writes what the other reads or writes, or if both enter the same NIC queue. What
threads may do later is known from the unfolded tree; if the tree grows while exploring, the explorer starts again, so
the exploration that counts ran with complete knowledge.
"""

from __future__ import annotations

from collections.abc import Sequence

from expertwire.ordering.events import Event, Kind
from expertwire.ordering.program import Node
from expertwire.ordering.transitions import Move, bits, fetch
from expertwire.ordering.verbs import Await


def stubborn(
    events: Sequence[Event],
    nodes: tuple[Node, ...],
    done: int,
    memory: tuple[int, ...],
    queues: tuple[tuple[int, ...], ...],
    moves: list[Move],
) -> list[Move]:
    """The smallest stubborn subset of `moves` that grows from any one of them."""
    if len(moves) == 1:
        return moves
    for move in moves:
        if move.event >= 0:
            event = events[move.event]
            touches = event.reads or event.writes or event.marks
        else:
            touches = nodes[move.thread].code.reads or nodes[move.thread].code.writes
        if not touches:
            return [move]  # posts, accepts, completions
    closure = _Closure(events, nodes, done, memory, queues, moves)
    best = moves
    for seed in reversed(moves):
        found = closure.grow(seed)
        if len(found) == 1:
            return found
        if len(found) < len(best):
            best = found
    return best


class _Closure:
    """Items are numbers: threads first, then events."""

    def __init__(
        self,
        events: Sequence[Event],
        nodes: tuple[Node, ...],
        done: int,
        memory: tuple[int, ...],
        queues: tuple[tuple[int, ...], ...],
        moves: list[Move],
    ) -> None:
        self.events, self.nodes, self.done, self.memory, self.queues, self.moves = (
            events, nodes, done, memory, queues, moves,
        )  # fmt: skip
        posted = 0
        for node in nodes:
            posted |= node.code.posted
        self.base = len(nodes)
        self.pending = [(i, events[i]) for i in bits(posted & ~done)]
        self.enabled = {self._item(m) for m in moves}

    def _item(self, move: Move) -> int:
        return move.thread if move.event < 0 else self.base + move.event

    def grow(self, seed: Move) -> list[Move]:
        """Close {seed} under dependence and enabling."""
        members = {self._item(seed)}
        work = list(members)
        limit = len(self.moves)
        while work:
            item = work.pop()
            for other in self._thread(item) if item < self.base else self._event(item):
                if other not in members:
                    members.add(other)
                    work.append(other)
        found = [m for m in self.moves if self._item(m) in members]
        return found if len(found) < limit else self.moves

    def _conflicts(self, item: int, reads: int, writes: int, marks: int) -> list[int]:
        """Pending events and threads whose present or future accesses do not commute with these."""
        touched = reads | writes
        found = []
        for i, event in self.pending:
            if event.writes & touched or event.reads & writes or event.marks & marks:
                found.append(self.base + i)
        for t, node in enumerate(self.nodes):
            if t != item and (node.writes & touched or node.reads & writes or node.marks & marks):
                found.append(t)
        return found

    def _thread(self, item: int) -> list[int]:
        node = self.nodes[item]
        code, action = node.code, node.action
        if action is None:
            return []
        missing = code.guard & ~self.done
        if missing:
            return [self.base + bits(missing)[0]]
        if item in self.enabled or isinstance(action, Await):
            return self._conflicts(item, code.reads, code.writes, 0)
        # a device flush waits for what is hidden: all pending events may matter
        return [self.base + i for i, _ in self.pending]

    def _event(self, item: int) -> list[int]:
        event = self.events[item - self.base]
        missing = event.after & ~self.done
        if missing:
            return [self.base + bits(missing)[0]]
        if item in self.enabled:
            return self._conflicts(item, event.reads, event.writes, event.marks)
        if event.queue >= 0 and event.kind is not Kind.ACCEPT:
            head = self.queues[event.queue][0]
            if not head & event.entry:
                return [self.base + i for i in bits(head & ~self.done)]
        assert event.kind is Kind.RMW_READ, event.kind
        assert fetch(self.memory, event.lock)
        return [self.base + i for i, e in self.pending if e.kind is Kind.RMW and e.lock == event.lock]
