"""The worked examples in the docstrings of the kernels, in the interpreter."""

import importlib.util

import pytest
import torch
from interpreted import SharedFiles, use_interpreter

from expertwire.formats import BF16
from expertwire.layouts.receive import Layout
from expertwire.topology import Placement

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def places(where):
    return [[f"{int(w) >> 40}:{int(w) & (1 << 40) - 1}" if w >= 0 else "-" for w in row] for row in where]


def routing_example(group):
    """`where` of rank 1 and the counts that it sent."""
    use_interpreter()
    from expertwire.kernels.engine import DeviceEngine, Rows

    memory = SharedFiles(group)
    placement, slots = Placement.contiguous(4, 2), Layout.EXPERT_SLOTS
    engine = DeviceEngine(
        memory, placement, capacity=4, hidden=16, num_topk=2, num_banks=2, num_sms=3, timeout_us=60_000_000
    )
    rows = engine.state.places(slots, Rows.of_wire(BF16(), 16))
    ids = torch.tensor([[[0, -1], [0, -1], [0, -1]], [[0, 2], [1, 0], [-1, -1]]][memory.rank])
    x, step = torch.zeros(3, 16, dtype=torch.bfloat16), engine.state.step(0, slots, ids, None)
    engine.send(x, None, engine.planner.plan(step), step, rows, receive=True)
    window = engine.state.window
    counts = engine.state.own[window.counts(0) :].view(torch.int32)[: 2 * window.counts_row]
    return places(step.sends_to.tensor()), counts.view(2, -1)[memory.rank].tolist()


def slots_example(group):
    """`where`, the rows per expert, and the routing of the rows that were written."""
    use_interpreter()
    from expertwire.kernels.engine import DeviceEngine, Rows

    engine = DeviceEngine(
        SharedFiles(group), Placement.contiguous(2, 1), capacity=4, hidden=16, num_topk=2, num_banks=1, num_sms=3,
        timeout_us=1,
    )  # fmt: skip
    rows = engine.state.places(Layout.EXPERT_SLOTS, Rows.of_wire(BF16(), 16))
    rows.meta(0).fill_(-7)
    step = engine.state.step(0, Layout.EXPERT_SLOTS, torch.tensor([[0, 1], [1, -1]]), None)
    engine.dispatch_fused(torch.zeros(2, 16, dtype=torch.bfloat16), step, rows)
    assert (int(step.rank_counts.tensor()), int(step.num_rows.tensor())) == (2, 2)
    written = {row: meta for row, meta in enumerate(rows.meta(0).tolist()) if meta != [-7] * 3}
    return step.sends_to.tensor().tolist(), step.expert_counts.tensor().tolist(), written


def small_examples(group):
    use_interpreter()
    from expertwire.kernels.combine_recv import combine_gather
    from expertwire.kernels.copy_rows import copy_rows
    from expertwire.kernels.dispatch_send import dispatch_send
    from expertwire.kernels.place import rows_of_slots

    def ints(*values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype)

    where, addresses = torch.empty(2, 2, dtype=torch.int64), torch.empty(2, 2, dtype=torch.int64)
    none = ints(0, 0, dtype=torch.int64)
    first_rows, memory = torch.zeros(9, dtype=torch.int32), torch.zeros(4096, dtype=torch.uint8)
    first_rows[5], first_rows[7] = 10, 20
    dispatch_send[(1,)](
        torch.zeros(2, 8, dtype=torch.bfloat16), None, where, None, None, none, 2, 0, 1,
        ints(5, 7, 7, 5), None, torch.zeros(9, dtype=torch.int32), first_rows, torch.zeros(8, dtype=torch.int32),
        addresses, ints(memory.data_ptr(), dtype=torch.int64), none, none, none, none, 0, 0, 1024,
        R=1, RANKS=1, E=8, K=2, SLOTS=2, TOKENS=2, KEYS=4, PLACE=True, COMPACT=False, SENDS=2, ROWS=1,
        LINES=1, BLOCK=8, width=8, unit_bytes=2, sf_units=0, SF_UNITS=1, sf_unit_bytes=4, FP8=False,
        UE8M0=False, RECEIVE=True, VOID=1,
    )  # fmt: skip
    source, out = torch.arange(1, 17, dtype=torch.int32)[:, None].contiguous(), torch.zeros(16, 1, dtype=torch.int32)
    sizes = {"SF_UNITS": 1, "sf_bytes": 4, "META_UNITS": 4, "meta_bytes": 3, "UE8M0": False}
    copied = [torch.zeros(16, dtype=torch.int32), torch.zeros(16, 3, dtype=torch.uint8)]
    three = source.view(torch.uint8)[:, :3].contiguous()
    copy_rows[(2,)](
        source, out, source, copied[0], three, copied[1], ints(3, 2), ints(0, 8), 4,
        GROUPS=2, ROWS=2, UNITS=1, row_bytes=4, BLOCK=0, **sizes,
    )  # fmt: skip
    codes, decoded = torch.tensor([[0x7E, 0xB8, 0x2A, 0x58]], dtype=torch.uint8), torch.zeros(1, 4).bfloat16()
    copy_rows[(1,)](
        codes, decoded, torch.ones(1, 1), None, None, None, ints(1), ints(0), 1,
        GROUPS=1, ROWS=1, UNITS=4, row_bytes=4, BLOCK=4, **sizes,
    )  # fmt: skip
    y, total = torch.tensor([[1.0], [3.0]]).bfloat16(), torch.zeros(1, 1, dtype=torch.bfloat16)
    combine_gather[(1,)](
        y, ints(0, 1, dtype=torch.int64)[None], torch.tensor([[0.5, 2.0]]), torch.ones(1, 1).bfloat16(), None,
        total, none, 1, 1, none, none, ints(0, 0), none, none, none, 0,
        R=1, RANKS=1, BANKS=1, TABLE_BYTES=256, SENDS=2, ROWS=1, COLUMNS=1, PARTS=1, hidden=1, WEIGHTED=True,
        NUM_BIASES=1, FINISH=False, BY_RANK=False,
    )  # fmt: skip
    owners, slots = ints(1, 0, 1), torch.zeros(1, 3, dtype=torch.int64)
    rows_of_slots[(1,)](owners, ints(3, 1 << 40 | 5, dtype=torch.int64), 3, slots, K=3, SENDS=2, ENTRIES=4)
    offsets = (addresses - memory.data_ptr()).tolist()
    rows = [part.view(16, -1).any(1).nonzero()[:, 0].tolist() for part in (out, *copied)]
    return where.tolist(), offsets, rows, decoded.tolist(), float(total), places(slots)


def ids_example(group):
    """What is left behind for ids with an illegal one, and then with none, that must be distinct, or need not."""
    use_interpreter()
    from expertwire.kernels.check_ids import check_ids

    found, words = [], torch.zeros(2, dtype=torch.int32)
    for illegal, distinct in ((7, 1), (3, 1), (3, 0)):
        left, ids = torch.empty(2, dtype=torch.int64), torch.tensor([[2, 2], [1, illegal], [-1, -1]])
        check_ids[(3,)](ids, 3, distinct, left, words[:1], words[1:], E=4, K=2, SLOTS=2, TOKENS=1)
        found.append((left.tolist(), words.tolist()))
    return found


def push_example(group):
    """Rows for places of ranks 1, 0 (this one) and a masked one: what lies in the memory of ranks 0 and 1 then."""
    use_interpreter()
    from expertwire.kernels.combine_push import combine_push

    def ints(*values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype)

    y, meta = torch.arange(1, 13, dtype=torch.int32).view(3, 4), ints(1, 3, 0, 0, 2, 1, -1, 0, 0).view(3, 3)
    found = []
    for own in (False, True):
        memory = torch.zeros(2, 8, 4, dtype=torch.int32)
        combine_push[(2,)](
            y, meta, ints(3), ints(0), ints(0, 0), ints(*(part.data_ptr() for part in memory), dtype=torch.int64), 0, 2,
            torch.empty(2, 2, dtype=torch.int64), GROUPS=1, CHUNK=2, ROWS=1, UNITS=4, units=4, SENDS=2, META=3, OWN=own,
        )  # fmt: skip
        found.append({(rank, row): memory[rank, row].tolist() for rank, row in memory.any(2).nonzero().tolist()})
    return found


def sums_example(group):
    """The rows of two ranks, summed in slots and in ranks."""
    use_interpreter()
    import triton
    import triton.language as tl

    from expertwire.kernels import combine_sum as sums

    globals().update(tl=tl, sums=sums)  # where the interpreter looks for them

    @triton.jit
    def both(bases, where, by_slot, by_rank):
        one = tl.arange(0, 1).to(tl.int64)
        sums.sum_rows(by_slot, bases, where, None, None, None, by_slot, one, one, 1, 2, 4, 1, 1, 1, False, 0)
        sums.sum_ranks(by_rank, bases, where, None, None, None, by_rank, one, one, 1, 2, 4, 1, 1, 1, False, 0)

    rows = [torch.tensor([256.0, 1.0]).bfloat16(), torch.ones(2).bfloat16()]
    bases = torch.tensor([r.data_ptr() for r in rows])
    where = torch.tensor([[0, 1, 1 << 40, 1 << 40 | 1]])
    out = torch.zeros(2, 1, dtype=torch.bfloat16)
    both[(1,)](bases, where, out[0], out[1])
    return out[:, 0].tolist()


def gradients_example(group):
    """A row's gradient and its weight's; values at the rows of two ranks, and back from there."""
    use_interpreter()
    from expertwire.kernels.gradients import gradient_rows
    from expertwire.kernels.values import combine_values, send_values

    arrived, y = torch.tensor([[1.0, 2.0], [7.0, 7.0]]).bfloat16(), torch.tensor([[3.0, -1.0], [7.0, 7.0]]).bfloat16()
    out, dots = torch.full((2, 2), 7.0).bfloat16(), torch.full((2,), 7.0)
    one, none = torch.ones(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    gradient_rows[(1,)](
        arrived, y, torch.tensor([0.5, 7.0]), out, dots, one, 0 * one, 2,
        GROUPS=1, GROUP_BINS=1, ROWS=2, COLUMNS=2, hidden=2, WEIGHTED=True,
    )  # fmt: skip
    given, found = torch.tensor([[0.5, 2.0]]), []
    for places in ([3, 3], [3, 1 << 40 | 1]):
        rows, back, where = torch.full((2, 4, 2), 7.0), torch.empty(1, 2), torch.tensor([places])
        bases = torch.tensor([part.data_ptr() for part in rows])
        send_values[(1,)](given, where, 2, bases, K=2, WIDTH=2, ENTRIES=4)
        found.append((rows[0, 3].tolist(), rows[1, 1].tolist(), int((rows == 7).sum())))
        combine_values[(1,)](
            where, back, none, 2, 1, bases, none, none, none, 0,
            R=1, RANKS=1, BANKS=1, K=2, WIDTH=2, ENTRIES=4, ALONE=True,
        )  # fmt: skip
        found.append(back.tolist())
    return out.tolist(), dots.tolist(), found


def test_routing(processes):
    _, (where, counts) = processes.run(routing_example)
    assert where == [["0:3", "1:0"], ["0:8", "0:4"], ["-", "-"]]
    assert counts == [2, 1, 1, 0, 2, 1]


def test_slots_of_one_rank(processes):
    ((where, experts, rows),) = processes.run(slots_example, num_ranks=1)
    assert where == [[0, 4], [5, -1]]
    assert experts == [1, 2]
    assert rows == {0: [0, 0, 0], 4: [0, 0, 1], 5: [0, 1, 0]}


def test_place_copy_and_combine(processes):
    ((where, addresses, copied, decoded, total, slots),) = processes.run(small_examples, num_ranks=1)
    assert where == [[10, 20], [21, 11]]
    assert addresses == [[160, 320], [336, 176]]
    assert copied == [[0, 1, 2, 8, 9]] * 3
    assert decoded == [[448.0, -1.0, 0.3125, 16.0]]
    assert total == 7.5
    assert slots == [["1:5", "0:3", "1:5"]]


def test_ids(processes):
    assert processes.run(ids_example, num_ranks=1) == [[([3, 7], [0, 0]), ([1, 2], [0, 0]), ([-1, 0], [0, 0])]]


def test_push(processes):
    assert processes.run(push_example, num_ranks=1) == [
        [{(1, 6): [1, 2, 3, 4]}, {(1, 6): [1, 2, 3, 4], (0, 5): [5, 6, 7, 8]}]
    ]


def test_sums_of_slots_and_of_ranks(processes):
    assert processes.run(sums_example, num_ranks=1) == [[260.0, 258.0]]


def test_gradients_and_values(processes):
    ((rows, dots, values),) = processes.run(gradients_example, num_ranks=1)
    assert rows == [[0.5, 1.0], [0.0, 0.0]]
    assert dots == [1.0, 0.0]
    assert values == [
        ([0.5, 2.0], [7.0, 7.0], 14), [[0.5, 2.0]],
        ([0.5, 0.0], [0.0, 2.0], 12), [[0.5, 2.0]],
    ]  # fmt: skip
