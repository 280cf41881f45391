"""The litmus format: programs and queries as short text.

    A: put q x=1; amo q f+1        thread A of rank A; `B2@B(gpu_owner):` is a second thread of rank B that is a kernel
    B: wait f==1; r=x              on the GPU which owns the memory
    ? r==0                         is this final state reachable?

Memory is 0 at the start. A bare name lies in B's memory; `A.s` lies in A's. A queue is `q1` or `q1@n2` (on NIC n2).

    put q x=1 | put q x=A.s | put q [x,y]=(1,1) | put q [x/y]=(1,1)     "/" starts another 128-byte block
    fence put ..., strong put ..., batch put ...                        fence flag, strong order flag, doorbell not rung
    imm q x=1 [=> c+1 | c=1 | c^1]      write-with-immediate; its completion at the target adds to, sets or raises c
    send q [=> c+1]    get q A.s=x    amo q f+1 [-> A.s]    aw q f=1    flush q    ring q
    sig q f=1 | sig q f+1 | weak ... | strong ...    signal; `#1` on a put and a signal makes the put its payload
    cqe [q]    quiet [q]    fence [q]                completions, remote completion, order of puts
    rcqe [n]                                         wait for n completions at the target that name no word
    wait f==1 | wait f>=1 | wait f!=0 | try f==1     acquiring wait; `try` may give up
    relaxed f==1 | poll f==1                         later loads may run before it; poll = plain loads
    r=x    x=1    C.m=1    local f+1                 load, store, message outside the network, local atomic add
    devflush | barflush                              make NIC writes visible to all observers; the same by a CPU read
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from expertwire.errors import InvalidArgument
from expertwire.ordering.program import Answer, Program, Thread, in_turn
from expertwire.ordering.verbs import (
    Action,
    AddWord,
    Arrival,
    Atomic,
    AtomicWrite,
    Await,
    Completion,
    DeviceFlush,
    Doorbell,
    Flush,
    LoadWord,
    Loc,
    Notify,
    OrderPuts,
    Queue,
    Quiet,
    Read,
    Send,
    StoreWord,
    Write,
)

_HOME = "B"
VECTOR = 1000  # a vector that is moved at one instant is one word: first * 1000 + second
_COMPARE = re.compile(r"(\S+?)(==|>=|!=)(-?\d+)$")
_ACCESS = re.compile(r"(\[?[\w.!,/]+\]?)(=|\+|\^)(.+)$")
_HEADER = re.compile(r"(\w+)(?:@(\w+))?(?:\((\w+)\))?$")


def parse_program(name: str, lines: Mapping[str, str]) -> Program:
    """A program from thread header -> actions.

    >>> program = parse_program("mp", {"A": "put q x=1; amo q f+1", "B": "wait f==1; r=x"})
    >>> [type(a).__name__ for a in program.threads[0].body()]
    ['Write', 'Atomic']
    """
    threads: list[Thread] = []
    for header, text in lines.items():
        match = _HEADER.match(header)
        if match is None:
            raise InvalidArgument(f"{name}: not a thread header: {header!r}")
        thread, rank, observer = match[1], match[2] or match[1], match[3] or "host"
        parser = _Parser(rank)
        actions = [parser.parse(part.strip()) for part in text.split(";") if part.strip()]
        for i, part in enumerate(_split_at_polls(actions)):
            threads.append(Thread(thread + "'" * i, rank, partial(in_turn, part), observer))
    return Program(name, tuple(threads))


def _split_at_polls(actions: list[Action]) -> list[list[Action]]:
    """A plain poll orders nothing, so what follows it runs at any time: as another thread."""
    parts: list[list[Action]] = [[]]
    for action in actions:
        parts[-1].append(action)
        if isinstance(action, Await) and action.order != "acquire":
            parts.append([])
    return [part for part in parts if part]


class _Parser:
    def __init__(self, rank: str) -> None:
        self.rank = rank

    def parse(self, text: str) -> Action:
        """One action."""
        words = text.split()
        modifier = words.pop(0) if words[0] in ("fence", "strong", "batch") and words[1:2] in (["put"], ["amo"]) else ""
        verb, rest = words[0], words[1:]
        build = getattr(self, f"_{verb}", None)
        if build is not None and not (len(words) == 1 and _ACCESS.match(text)):
            action: Action = build(rest, modifier)
            return action
        match = _ACCESS.match(text)
        if match is None or rest:
            raise InvalidArgument(f"not an action: {text!r}")
        target, _, value = match.groups()
        if _is_number(value):
            return StoreWord(self._loc(target), int(value))
        return LoadWord(self._loc(value), register=target)

    def _loc(self, name: str) -> Loc:
        rank, dot, rest = name.partition(".")
        return Loc(rank, rest.rstrip("!"), "!" in name) if dot else Loc(_HOME, name.rstrip("!"), "!" in name)

    def _put(self, words: list[str], modifier: str, arrival: Arrival | None = None) -> Action:
        target, values, source, block = self._written(words[1])
        fenced: Any = {"fence": "spec", "strong": "strong"}.get(modifier, "none")
        bundle = int(words[2].lstrip("#")) if len(words) > 2 else 0
        rung = modifier != "batch"
        return Write(_queue(words[0]), target, values, source, fenced, arrival, block, bundle, rung)

    def _written(self, text: str) -> tuple[tuple[Loc, ...], tuple[int, ...], Loc | None, tuple[int, ...]]:
        match = _ACCESS.match(text)
        if match is None:
            raise InvalidArgument(f"not a write: {text!r}")
        left, _, right = match.groups()
        blocks = left.strip("[]").split("/")
        target = tuple(self._loc(n) for names in blocks for n in names.split(","))
        block = tuple(i for i, names in enumerate(blocks) for _ in names.split(","))
        numbers = right.strip("()").split(",")
        if all(_is_number(n) for n in numbers):
            return target, tuple(int(n) for n in numbers), None, block
        return target, (), self._loc(right), block

    def _imm(self, words: list[str], modifier: str) -> Action:
        return self._put(words[:2], modifier, _arrival(self, words[2:]))

    def _send(self, words: list[str], modifier: str) -> Action:
        return Send(_queue(words[0]), _arrival(self, words[1:]))

    def _amo(self, words: list[str], modifier: str) -> Action:
        target, delta = words[1].split("+")
        into = self._loc(words[3]) if len(words) > 3 else None
        fenced: Any = {"fence": "spec", "strong": "strong"}.get(modifier, "none")
        return Atomic(_queue(words[0]), self._loc(target), int(delta), into, fenced)

    def _get(self, words: list[str], modifier: str) -> Action:
        into, _, target = words[1].partition("=")
        return Read(_queue(words[0]), self._loc(target), self._loc(into if "." in into else f"{self.rank}.{into}"))

    def _aw(self, words: list[str], modifier: str) -> Action:
        target, _, value = words[1].partition("=")
        return AtomicWrite(_queue(words[0]), self._loc(target), int(value))

    def _flush(self, words: list[str], modifier: str) -> Action:
        return Flush(_queue(words[0]), words[1] if len(words) > 1 else _HOME)

    def _ring(self, words: list[str], modifier: str) -> Action:
        return Doorbell(_queue(words[0]))

    def _sig(self, words: list[str], modifier: str, covers: Any = "profile") -> Action:
        match = _ACCESS.match(words[-1])
        if match is None:
            raise InvalidArgument(f"not a signal: {words}")
        target, action, value = match.groups()
        bundle = int(words[1].lstrip("#")) if len(words) > 2 else 0
        return Notify(
            _queue(words[0]), self._loc(target), int(value), "add" if action == "+" else "set", covers, bundle
        )

    def _weak(self, words: list[str], modifier: str) -> Action:
        return self._sig(words, modifier, "own")

    def _strong(self, words: list[str], modifier: str) -> Action:
        return self._sig(words, modifier, "earlier")

    def _cqe(self, words: list[str], modifier: str) -> Action:
        return Completion(_queue(words[0]) if words else None)

    def _quiet(self, words: list[str], modifier: str) -> Action:
        return Quiet(_queue(words[0]) if words else None)

    def _fence(self, words: list[str], modifier: str) -> Action:
        return OrderPuts(_queue(words[0]) if words else None)

    def _rcqe(self, words: list[str], modifier: str) -> Action:
        return Await(Loc(self.rank, "rcq"), ">=", int(words[0]) if words else 1)

    def _wait(self, words: list[str], modifier: str, order: Any = "acquire", may_expire: bool = False) -> Action:
        match = _COMPARE.match(words[0])
        if match is None:
            raise InvalidArgument(f"not a condition: {words[0]!r}")
        name, compare, value = match.groups()
        comparison: Any = compare
        return Await(self._loc(name), comparison, int(value), may_expire, order=order)

    def _poll(self, words: list[str], modifier: str) -> Action:
        return self._wait(words, modifier, "plain")

    def _relaxed(self, words: list[str], modifier: str) -> Action:
        return self._wait(words, modifier, "relaxed")

    def _try(self, words: list[str], modifier: str) -> Action:
        return self._wait(words, modifier, may_expire=True)

    def _local(self, words: list[str], modifier: str) -> Action:
        target, delta = words[0].split("+")
        return AddWord(self._loc(target), int(delta))

    def _devflush(self, words: list[str], modifier: str) -> Action:
        return DeviceFlush(self.rank)

    def _barflush(self, words: list[str], modifier: str) -> Action:
        return DeviceFlush(self.rank, trusted=False)


def _queue(text: str) -> Queue:
    name, _, nic = text.partition("@")
    return Queue(name, nic or "n0")


def _is_number(text: str) -> bool:
    return text.lstrip("-").isdigit()


def _arrival(parser: _Parser, words: list[str]) -> Arrival:
    if not words:
        return Arrival(Loc(_HOME, "rcq"))
    match = _ACCESS.match(words[-1])
    if match is None:
        raise InvalidArgument(f"not an arrival: {words}")
    action: Any = {"+": "add", "=": "set", "^": "max"}[match[2]]
    return Arrival(parser._loc(match[1]), action, int(match[3]))


def parse_query(text: str) -> Callable[[dict[str, Answer], bool], bool]:
    """A query: comparisons joined by & and |; `blocked` is true if some thread cannot go on.

    >>> parse_query("r==0 & x==1")({"r": 0, "B.x": 1}, True)
    True
    >>> parse_query("r==0")({}, False), parse_query("blocked")({}, False)
    (False, True)
    """
    choices = [[term.strip() for term in part.split("&")] for part in text.split("|")]

    def reached(outcome: dict[str, Answer], finished: bool) -> bool:
        return any(all(_term(term, outcome, finished) for term in terms) for terms in choices)

    return reached


def _component(name: str, outcome: dict[str, Answer]) -> Answer:
    """The value of one word of a vector that was moved at one instant."""
    for whole, value in outcome.items():
        names = whole.rpartition(".")[2].split(",")
        if len(names) > 1 and name in names and value is not None:
            return divmod(value, VECTOR)[names.index(name)]
    return None


def _term(term: str, outcome: dict[str, Answer], finished: bool) -> bool:
    if term == "blocked":
        return not finished
    match = _COMPARE.match(term.replace(" ", ""))
    if match is None:
        raise InvalidArgument(f"not a query: {term!r}")
    name, compare, value = match.groups()
    seen = outcome.get(name, outcome.get(f"{_HOME}.{name}"))
    if seen is None:
        seen = _component(name, outcome)
    if seen is None:
        return False
    return {"==": seen == int(value), ">=": seen >= int(value), "!=": seen != int(value)}[compare]
