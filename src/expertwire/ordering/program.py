"""Programs: named threads that yield actions, unfolded lazily into a tree.

A generator cannot be copied, but it is a function of the answers it was given. So a thread's state is a node of a tree:
the path from the root is what it was answered, the node says what it yields next. Nodes are created once and shared by
every execution that comes through them; a state of the explorer holds one node per thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Answer = int | None
ThreadBody = Callable[[], Generator[Any, Answer, None]]


def in_turn(actions: Iterable[Any]) -> Generator[Any, Answer, None]:
    """Yield actions one by one; their answers are not wanted. (`yield from` a list cannot take answers.)"""
    for action in actions:
        _ = yield action


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread of a program.

    `rank` owns the memory and NIC that it uses. `observer` says as whom it reads memory that a NIC has written:
    "host", "gpu_owner" (a kernel on the GPU that owns the memory) or "gpu_other". `place` is (device, block, thread)
    for the ptx machine.
    """

    name: str
    rank: str
    body: ThreadBody
    observer: str = "host"
    place: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Program:
    """Threads that run together. `goals` are `Sometimes` labels that a non-vacuous exploration must reach. `bulk` says
    that some thread uses bulk copies (ptx)."""

    name: str
    threads: tuple[Thread, ...]
    goals: tuple[str, ...] = ()
    bulk: bool = False


@dataclass(eq=False, slots=True)
class Node:
    """A point in a thread: `action` is what it does next (None: it has ended).

    `reads`, `writes` and `marks` are what may still happen from here on, as bit sets over locations and over resources
    that serialise (a machine fills them in); they only grow, and `Tree.grew` tells when they did.
    """

    thread: int
    parent: Node | None
    answer: Answer
    action: Any
    depth: int
    generator: Generator[Any, Answer, None] | None
    children: dict[Answer, Node] = field(default_factory=dict)
    reads: int = 0
    writes: int = 0
    marks: int = 0
    code: Any = None


class Tree:
    """The unfolding of a program."""

    def __init__(self, threads: Sequence[Thread], compile_node: Callable[[Node], tuple[int, int, int]]) -> None:
        self.threads = threads
        self._compile = compile_node
        self.grew = False
        self.num_nodes = 0
        self.roots = tuple(self._new(i, None, None, thread.body(), start=True) for i, thread in enumerate(threads))

    def child(self, node: Node, answer: Answer) -> Node:
        """The node after `node` when its action is answered with `answer`."""
        found = node.children.get(answer)
        if found is None:
            generator, node.generator = node.generator, None
            if generator is None:
                generator = self._replay(node)
            found = node.children[answer] = self._new(node.thread, node, answer, generator, start=False)
        return found

    def _new(
        self, thread: int, parent: Node | None, answer: Answer, generator: Generator[Any, Answer, None], start: bool
    ) -> Node:
        try:
            action = next(generator) if start else generator.send(answer)
        except StopIteration:
            action = None
        depth = parent.depth + 1 if parent else 0
        node = Node(thread, parent, answer, action, depth, generator if action is not None else None)
        self.num_nodes += 1
        self._note(node, self._compile(node))
        return node

    def _note(self, node: Node, footprint: tuple[int, int, int]) -> None:
        """Add a footprint to a node and all its ancestors."""
        reads, writes, marks = footprint
        at: Node | None = node
        while at is not None:
            if at.reads | reads == at.reads and at.writes | writes == at.writes and at.marks | marks == at.marks:
                return
            at.reads, at.writes, at.marks = at.reads | reads, at.writes | writes, at.marks | marks
            self.grew = True
            at = at.parent

    def _replay(self, node: Node) -> Generator[Any, Answer, None]:
        answers = []
        at = node
        while at.parent is not None:
            answers.append(at.answer)
            at = at.parent
        generator = self.threads[node.thread].body()
        next(generator)
        for answer in reversed(answers):
            generator.send(answer)
        return generator


def registers(node: Node) -> dict[str, Answer]:
    """What the loads on the way to `node` were answered, by register name."""
    values: dict[str, Answer] = {}
    at = node
    while at.parent is not None:
        name = getattr(at.parent.action, "register", "")
        if name and name not in values:
            values[name] = at.answer
        at = at.parent
    return values
