"""Stubborn sets for the ptx machine (see `stubborn` for the idea).

A load may return any message that is there, so it commutes with a store: what the load returned before the store it can
return after it. Stores only add possibilities. Hence a load must wait for those who may still store to its location,
while a store must only wait for other stores to it. The exception are bulk writes, whose value an earlier load may
still return: they do not commute with loads.
"""

from __future__ import annotations

from expertwire.ordering.operations import Order
from expertwire.ordering.ptx_verbs import Ld, Leave, MemFence, Rmw, St, WaitGroup
from expertwire.ordering.transitions import Move, State


def reduced(state: State, moves: list[Move], targets: list[int]) -> list[Move]:
    """The smallest stubborn subset of `moves` that grows from any one of them. `targets` are what flights write."""
    if len(moves) == 1:
        return moves
    best = moves
    base = len(state[0])
    seeds = dict.fromkeys(m.thread if m.event < 0 else base + m.event for m in moves)
    for seed in seeds:
        members = _grow(state, seed, targets)
        found = [m for m in moves if (m.thread if m.event < 0 else base + m.event) in members]
        if len(found) == 1:
            return found
        if len(found) < len(best):
            best = found
    return best


def _grow(state: State, seed: int, targets: list[int]) -> set[int]:
    members, work = {seed}, [seed]
    base = len(state[0])
    while work:
        item = work.pop()
        for other in _thread(state, item, targets) if item < base else _flight(state, item - base, targets):
            if other not in members:
                members.add(other)
                work.append(other)
    return members


def _thread(state: State, item: int, targets: list[int]) -> list[int]:
    nodes, flights = state[0], state[3]
    node = nodes[item]
    base = len(nodes)
    others = [n for n in nodes if n.thread != item]
    match node.action:
        case None:
            return []
        case Ld(expect=expect) if expect is not None:
            return []  # a store that might come first is found when it runs
        case Ld() | Rmw() | St():
            mask = node.code.touches
            found = [n.thread for n in others if n.writes & mask]
            return found + [base + i for i, f in enumerate(flights) if f.phase < 2 and targets[i] & mask]
        case MemFence(order=Order.SC):
            return [n.thread for n in others if n.marks]
        case Leave(name=name, count=count):
            arrived = next((b.arrived for b in state[4] if b.name == name), 0)
            if arrived.bit_count() >= count:
                return []
            return [n.thread for n in others if not arrived >> n.thread & 1 and n.action is not None]
        case WaitGroup():
            return [base + i for i, f in enumerate(flights) if f.thread == item and f.phase < 2]
    return []


def _flight(state: State, index: int, targets: list[int]) -> list[int]:
    nodes, flights = state[0], state[3]
    flight = flights[index]
    base = len(nodes)
    op = nodes[flight.thread].code.bulks[flight.number][0]
    if flight.phase == 0:
        if op.source is None and not op.add:
            return []
        mask = targets[index] if op.add else nodes[flight.thread].code.sources[flight.number]
        found = [n.thread for n in nodes if n.writes & mask]
    else:
        mask = targets[index]
        found = [n.thread for n in nodes if (n.writes | n.reads) & mask]
    return found + [base + i for i, f in enumerate(flights) if i != index and f.phase < 2 and targets[i] & mask]
