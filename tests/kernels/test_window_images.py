"""Windows, byte for byte: the modelled protocol, executed on the host, against the kernels.

The generators of `protocols.counted` and `protocols.lane`, which the checker explores, are executed here with real
bytes: what their operations put where `layouts.device_window` says, with rows from the oracle. The kernels must leave
the same words, tables of counts and rows, and rows that came back, in every rank's memory after every phase. One
thing is translated: where a word carries the number of rows in the model, it carries the name of the call on the
device, where numbers are in the table of counts, and READY of a void step says REFUSED there.
"""

import importlib.util
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from interpreted import WIRES, Case, SharedFiles, data, device_engine, route, use_interpreter

from expertwire import reference
from expertwire.kernels.names import NUMBER_BITS
from expertwire.layouts.device_window import DeviceWindow, num_places, row_region
from expertwire.layouts.receive import Layout
from expertwire.ordering.operations import Load, PutSignal, Signal, Wait
from expertwire.protocols import counted, lane
from expertwire.protocols.epoch_signal import REFUSED, pack, unpack
from expertwire.protocols.lane import Lane
from expertwire.testing import random_rows
from expertwire.topology import Placement

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

NUM_BANKS = 2
PURPOSES = {
    "dispatch_counts_ready": "counts", "dispatch_ready": "ready", "dispatch_done": "done",
    "combine_ready": "combine_ready", "combine_done": "combine_done",
}  # fmt: skip
REFUSED_STEP = 3  # by the last rank
DISPATCH, COMBINE = 5 << NUMBER_BITS, 6 << NUMBER_BITS  # names of calls
CASES = [
    Case(Layout.EXPERT_SLOTS, "fp8", steps=5),
    Case(Layout.EXPERT_MAJOR, "ue8m0", alignment=4, steps=5),
    Case(Layout.COMPACT, "bf16", steps=5, strict=True),
]


def routed(case, step):
    xs, ids, weights = data(case, step)
    return xs, ids, weights, reference.dispatch(xs, route(case, ids, weights), WIRES[case.wire])


class Host:
    """The memory of all ranks, and what executes protocols on it."""

    def __init__(self, case):
        self.case, self.window = case, DeviceWindow(case.num_ranks, case.num_experts, NUM_BANKS)
        self.placement, wire = Placement.contiguous(case.num_experts, case.num_ranks), WIRES[case.wire]
        most = max(len(self.placement.local_experts(rank)) for rank in range(case.num_ranks))
        self.region = row_region(
            case.layout, case.num_ranks, case.capacity, case.num_topk, most, case.alignment,
            wire.payload_bytes(case.hidden), wire.sf_bytes(case.hidden),
        )  # fmt: skip
        self.windows = np.zeros((case.num_ranks, self.window.total_bytes), np.uint8)
        self.rows = np.zeros((case.num_ranks, NUM_BANKS, self.region.total_bytes), np.uint8)
        self.num_places = num_places(case.layout, case.num_ranks, case.num_topk)
        shape = (case.num_ranks, NUM_BANKS, case.capacity * self.num_places, 2 * case.hidden)
        self.returned = np.zeros(shape, np.uint8)

    def word(self, rank, word, bank):
        at = self.window.word(PURPOSES[word.purpose], word.writer, bank)
        return self.windows[rank, at : at + 8].view(np.int64)

    def execute(self, bank, protocols, put):
        """Every rank's generator to its end, in turns. A bank counts its own steps, so it is a lane of one bank."""
        waiting = {rank: (protocol, protocol.send(None)) for rank, protocol in enumerate(protocols)}
        while waiting:
            before = dict(waiting)
            for rank, (protocol, operation) in before.items():
                answer = None
                if isinstance(operation, Wait):
                    epoch, answer = unpack(int(self.word(rank, operation.word, bank)[0]))
                    if epoch < operation.epoch:
                        continue
                elif isinstance(operation, PutSignal):
                    put(operation.region, operation.peer, operation.count)
                    self.word(operation.peer, operation.word, bank)[:] = pack(operation.epoch, operation.count)
                elif isinstance(operation, Signal):
                    self.word(operation.peer, operation.word, bank)[:] = pack(operation.epoch, operation.count)
                else:
                    assert isinstance(operation, Load)
                try:
                    waiting[rank] = protocol, protocol.send(answer)
                except StopIteration:
                    del waiting[rank]
            assert waiting != before, f"deadlock: {waiting}"

    def put_counts(self, bank, ids, region, peer, count):
        """The writer's row of the table: its selections per expert, its rows per rank."""
        row, size = self.counts(ids[region.writer]), 4 * self.window.counts_row
        assert count == row[self.case.num_experts + peer]
        at = self.window.counts(bank) + region.writer * size
        self.windows[peer, at : at + size] = row.view(np.uint8)

    def counts(self, ids):
        experts = np.bincount(ids[ids >= 0].numpy(), minlength=self.case.num_experts)
        rows = [int(self.served(ids, rank).sum()) for rank in range(self.case.num_ranks)]
        return np.concatenate([experts, rows]).astype(np.int32)

    def served(self, ids, rank):
        """Which tokens have an expert of this rank."""
        owners = np.array(self.placement.expert_ranks)[ids.numpy()]
        return ((owners == rank) & (ids.numpy() >= 0)).any(axis=1)

    def ranks_of(self, ids):
        """The ranks that serve a token, in the order of the highest slot that each serves."""
        owners = [self.placement.expert_ranks[expert] if expert >= 0 else -1 for expert in ids.tolist()]
        return np.array([r for slot, r in enumerate(owners) if r >= 0 and r not in owners[slot + 1 :]])

    def put_back(self, bank, ys, meta, region, peer, count):
        """The writer's output for the peer's tokens, each row at its place there. Own rows are read where they are."""
        rows = np.flatnonzero(meta[region.writer][:, 0] == peer)
        if peer != region.writer and len(rows):
            at = meta[region.writer][rows, 1] * self.num_places + meta[region.writer][rows, 2]
            self.returned[peer, bank][at] = ys[region.writer].view(torch.uint8).numpy()[rows]

    def meta(self, rank, bank):
        """The routing of rows, as it lies there."""
        size = self.region.num_rows * self.region.meta_words
        found = self.rows[rank, bank, self.region.meta :].view(np.int32)[:size]
        return found.reshape(self.region.num_rows, -1).copy()

    def put_rows(self, bank, ids, want, region, peer, count):
        """The writer's rows, scale factors and routing, where the peer's caller will see them."""
        mine, memory = want[peer], self.rows[peer, bank]
        payload = mine.x.contiguous().view(torch.uint8).reshape(-1, self.region.payload_bytes).numpy()
        if self.case.layout is Layout.COMPACT:
            before = int(mine.num_tokens_per_rank[: region.writer].sum())
            places = np.arange(before, before + int(mine.num_tokens_per_rank[region.writer]))
            tokens = np.flatnonzero(self.served(ids[region.writer], peer))
            routing = [mine.topk_idx.numpy(), mine.topk_weights.numpy().view(np.int32)]
            nth = [np.flatnonzero(self.ranks_of(ids[region.writer][token]) == peer).item() for token in tokens]
            source = np.stack([np.full(len(tokens), region.writer), tokens, nth], axis=1)
            meta = np.concatenate([source, *(part[places] for part in routing)], axis=1)
            assert count == len(places) == len(tokens)
        else:
            source = mine.row_source.reshape(-1, 3).numpy()
            places = np.flatnonzero(source[:, 0] == region.writer)
            meta = source[places]
            assert count == len(set(meta[:, 1].tolist()))
        parts = [(0, payload[places])]
        if mine.sf is not None:
            sf = mine.sf.contiguous().view(torch.uint8).reshape(-1, self.region.sf_bytes).numpy()
            parts.append((self.region.sf, sf[places]))
        parts.append((self.region.meta, np.ascontiguousarray(meta, np.int32).view(np.uint8)))
        for first, rows in parts:
            if len(rows):
                width = rows.shape[1]
                memory[first : first + self.region.num_rows * width].reshape(-1, width)[places] = rows

    def images(self):
        return self.windows.copy(), self.rows.copy(), self.returned.copy()


def outputs(host, step):
    """What the experts of every rank make of a step: rows of bfloat16 for all that it may receive."""
    rows, hidden = host.region.num_rows, host.case.hidden
    return [random_rows(1000 * step + rank, rows, hidden) for rank in range(host.case.num_ranks)]


def used(meta, mine):
    """`meta` where this step has rows, -1 where it has the routing of an earlier one."""
    if mine.row_source is None:
        here = np.arange(len(meta)) < mine.x.shape[0]
    else:
        here = np.zeros(len(meta), bool)
        source = mine.row_source.reshape(-1, 3).numpy()
        here[: len(source)] = source[:, 0] >= 0
    return np.where(here[:, None], meta, -1)


def expected(case):
    """Images of all ranks after each phase of each step."""
    host, ranks, found = Host(case), range(case.num_ranks), []
    dispatch, combine, combined = Lane("dispatch", 1), Lane("combine", NUM_BANKS), 0
    for step in range(1, case.steps + 1):
        _, ids, _, want = routed(case, step)
        bank, epoch = step % NUM_BANKS, (step + 1) // NUM_BANKS
        counts = [host.counts(ids[rank])[case.num_experts :].tolist() for rank in ranks]
        put_counts, put_rows = partial(host.put_counts, bank, ids), partial(host.put_rows, bank, ids, want)
        nothing = [0] * case.num_ranks
        if step == REFUSED_STEP:
            last = case.num_ranks - 1
            sends = [counted.send(dispatch, rank, epoch, counts[rank]) for rank in range(last)]
            host.execute(bank, [*sends, counted.refuse(dispatch, last, epoch, case.num_ranks)], put_counts)
            host.execute(bank, [lane.receive(dispatch, rank, epoch, case.num_ranks) for rank in range(last)], None)
            host.execute(bank, [lane.finish(dispatch, rank, epoch, case.num_ranks) for rank in range(last)], None)
            found.append(("refused", host.images()))
            continue
        host.execute(bank, [counted.exchange(dispatch, rank, epoch, counts[rank]) for rank in ranks], put_counts)
        found.append(("counts", host.images()))
        host.execute(bank, [counted.send_rows(dispatch, rank, epoch, counts[rank]) for rank in ranks], put_rows)
        host.execute(bank, [lane.receive(dispatch, rank, epoch, case.num_ranks) for rank in ranks], None)
        found.append(("rows", host.images()))
        host.execute(bank, [lane.finish(dispatch, rank, epoch, case.num_ranks) for rank in ranks], None)
        combined += 1
        ys, meta = outputs(host, step), [host.meta(rank, bank) for rank in ranks]
        put_back = partial(host.put_back, bank, ys, [used(part, want[rank]) for rank, part in enumerate(meta)])
        turn = combine.bank(combined)
        host.execute(turn, [lane.send(combine, rank, combined, nothing) for rank in ranks], put_back)
        host.execute(turn, [lane.receive(combine, rank, combined, case.num_ranks) for rank in ranks], None)
        host.execute(turn, [lane.finish(combine, rank, combined, case.num_ranks) for rank in ranks], None)
        found.append(("combined", host.images()))
    return found


def made_by_kernels(group, case):
    """The same of this rank, by the kernels."""
    use_interpreter()
    from expertwire.kernels.engine import Rows

    memory = SharedFiles(group)
    engine = device_engine(memory, case, NUM_BANKS)
    places = engine.state.places(case.layout, Rows.of_wire(WIRES[case.wire], case.hidden), case.alignment)
    returned, found, host = engine.state.returned(case.layout), [], Host(case)

    def image(phase):
        memory.all_gather(None)
        back = np.stack([returned.payload(bank).numpy() for bank in range(NUM_BANKS)])
        found.append((phase, engine.state.own.numpy().copy(), np.stack([own.numpy() for own in places._own]), back))
        memory.all_gather(None)

    for number in range(1, case.steps + 1):
        xs, ids, weights, _ = routed(case, number)
        x, bank = xs[memory.rank], number % NUM_BANKS
        step = engine.state.step(bank, case.layout, ids[memory.rank], weights[memory.rank], case.alignment, DISPATCH)
        if number == REFUSED_STEP:
            if memory.rank == case.num_ranks - 1:
                engine.refuse_dispatch(bank)
            else:
                engine.send(x, None, engine.planner.plan(step), step, places, receive=True)
                engine.give_back(bank)
            image("refused")
            continue
        plan = engine.planner.plan(step)
        image("counts")
        engine.send(x, None, plan, step, places, receive=True)
        image("rows")
        engine.give_back(bank)
        out = torch.empty_like(x)
        y = outputs(host, number)[memory.rank]
        engine.push(y, places.meta(bank), step, returned)
        engine.combine_ready(y, step, engine.state.nowhere, name=COMBINE)
        engine.gather(y, step, out, weighted=case.layout is not Layout.COMPACT, returned=returned)
        image("combined")
    return found


def comparable(window, image, rank):
    """Without the address of the own output, which nobody else is told."""
    image = image.copy()
    for bank in range(NUM_BANKS):
        at = window.sources(bank) + 8 * rank
        image[at : at + 8] = 0
    return image


def number_of(step):
    """The number of a dispatch on the device: a bank counts its own steps."""
    return (step + 1) // NUM_BANKS * NUM_BANKS + step % NUM_BANKS


def named(window, image, combined):
    """An image of the model, whose words carry names; `combined`: the numbers of the dispatches that were combined."""
    image = image.copy()
    for bank, purpose, writer in itertools.product(range(NUM_BANKS), PURPOSES.values(), range(window.num_ranks)):
        at = window.word(purpose, writer, bank)
        word = image[at : at + 8].view(np.int64)
        epoch, count = unpack(int(word[0]))
        if epoch and count != REFUSED and not purpose.endswith("done"):
            number = combined[epoch - 1] if purpose == "combine_ready" else epoch * NUM_BANKS + bank
            void = purpose == "ready" and number == number_of(REFUSED_STEP)
            name = COMBINE if purpose == "combine_ready" else DISPATCH
            word[:] = pack(epoch, REFUSED if void else name | number)
    return image


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_leave_what_the_protocol_leaves(processes, case):
    wanted = expected(case)
    made = processes.run(made_by_kernels, case, num_ranks=case.num_ranks, timeout_s=120)
    window = DeviceWindow(case.num_ranks, case.num_experts, NUM_BANKS)
    assert [phase for phase, *_ in made[0]] == [phase for phase, _ in wanted]
    steps = [step for step in range(1, case.steps + 1) if step != REFUSED_STEP]
    combined = [number_of(step) for step in steps]
    for nth, (phase, (windows, rows, returned)) in enumerate(wanted):
        for rank in range(case.num_ranks):
            _, seen, seen_rows, seen_returned = made[rank][nth]
            assert not (returned[rank] != seen_returned).any(), f"rows that came back after {phase}, rank {rank}"
            model = named(window, windows[rank], combined)
            differ = comparable(window, model, rank) != comparable(window, seen, rank)
            assert not differ.any(), f"{phase}, rank {rank}, first byte {differ.argmax()}"
            if phase != "counts":  # COMPACT writes the routing of rows before the rows
                assert not (rows[rank] != seen_rows).any(), f"rows after {phase}, rank {rank}"
