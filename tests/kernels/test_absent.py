"""A rank that does not come, in kernels: the wait is recorded, and nothing is read or written on its account."""

import importlib.util

import pytest
import torch
from interpreted import SharedFiles, use_interpreter

from expertwire.formats import BF16
from expertwire.layouts.receive import Layout
from expertwire.protocols.epoch_signal import REFUSED, pack
from expertwire.testing import Processes, random_rows
from expertwire.topology import Placement

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

HIDDEN, TOKENS = 16, 3
DISPATCH_DONE, COMBINE_READY, COUNTS = 3, 4, 1  # phases of `kernels.runtime`
SAID = pack(1, 1)  # the words of the first dispatch, which has no name


IDS = torch.tensor([[0, 2], [1, 3], [2, -1]])


def engine_of(group, num_experts=4, timeout_us=60_000_000):
    """The memory and the engine of this rank, in the interpreter."""
    use_interpreter()
    from expertwire.kernels.engine import DeviceEngine

    memory = SharedFiles(group)
    placement = Placement.contiguous(num_experts, memory.num_ranks)
    return memory, DeviceEngine(
        memory, placement, capacity=TOKENS, hidden=HIDDEN, num_topk=2, num_banks=1, num_sms=3, timeout_us=timeout_us
    )


def rows_of(engine, layout):
    from expertwire.kernels.engine import Rows

    return engine.state.places(layout, Rows.of_wire(BF16(), HIDDEN))


def rank_work(group, layout, call):
    """Both ranks make a step; then rank 0 makes `call` alone. What is unchanged, and what the wait left behind."""
    memory, engine = engine_of(group)
    places, inputs = rows_of(engine, layout), engine.state.inputs(layout)
    x, out = random_rows(memory.rank, TOKENS, HIDDEN), torch.full((TOKENS, HIDDEN), 7.0).bfloat16()
    y = inputs.payload(0).view(torch.bfloat16)

    def dispatch(step, plan):
        engine.send(x, None, plan, step, places, receive=True)

    def new_step():
        return engine.state.step(0, layout, IDS, torch.ones(TOKENS, 2))

    step = new_step()
    dispatch(step, engine.planner.plan(step))
    y.copy_(places.payload(0).view(torch.bfloat16))
    told = inputs.seen_at[0]
    engine.combine_ready(y, step, told)
    engine.gather(y, step, out, weighted=False, finish=memory.rank == 0 or call != "repeated dispatch")
    memory.all_gather(None)
    places.payload(0).fill_(0xEE)
    out.fill_(7.0)
    if memory.rank == 0:
        engine.state.timeout_us, x = 20, -x
        if call == "combine":
            engine.combine_ready(y, step, told)
            engine.gather(y, step, out, weighted=False)
        elif call == "dispatch":
            step = new_step()
            dispatch(step, engine.planner.plan(step))
        else:
            dispatch(step, engine.planner.repeat(step, places))
    memory.all_gather(None)
    untouched = bool((places.payload(0) == 0xEE).all()) and bool((out == 7.0).all())
    records = engine.state.status.view(-1, 4)
    return (
        untouched,
        records[:, 0].tolist(),
        records[:, 3].tolist(),
        int(step.void.tensor()),
        int(step.refused.tensor()),
    )


@pytest.mark.parametrize("layout", [Layout.COMPACT, Layout.EXPERT_SLOTS], ids=str)
@pytest.mark.parametrize(
    ("call", "phase"), [("combine", COMBINE_READY), ("dispatch", COUNTS), ("repeated dispatch", DISPATCH_DONE)]
)
def test_nothing_moves(processes, layout, call, phase):
    (mine, phases, waited, void, refused), (theirs, none, *_) = processes.run(rank_work, layout, call)
    assert mine
    assert theirs
    assert phases == [0, phase]
    assert waited[0] == 0
    assert 20_000 <= waited[1] < 10**10, "nanoseconds"
    assert none == [0, 0]
    assert (refused if call == "combine" else void) > 0


def late_for_one(group):
    """Rank 2 makes no step, but its words are there in time for rank 0. Who was late, whether the step is void, and who
    refused it."""
    first = torch.distributed.get_rank(group) == 0
    memory, engine = engine_of(group, 6, 60_000_000 if first else 2_000_000)
    state, places = engine.state, rows_of(engine, Layout.COMPACT)
    if memory.rank == 0:
        for purpose in ("counts", "ready"):
            at = state.window.word(purpose, 2, 0)
            state.own[at : at + 8].view(torch.int64).fill_(SAID)
    step = state.step(0, Layout.COMPACT, IDS, None)
    if memory.rank != 2:
        engine.send(random_rows(memory.rank, TOKENS, HIDDEN), None, engine.planner.plan(step), step, places,
                    receive=True)  # fmt: skip
    memory.all_gather(None)
    return state.status.view(-1, 4)[:, 0].tolist(), int(step.void.tensor()) > 0, state.news[0, 0].tolist()


def test_who_gave_up_says_so_to_those_who_did_not():
    """Else rank 0 would take the rows of rank 1, which sent none, to be complete."""
    with Processes(3) as crew:
        first, second, _ = crew.run(late_for_one)
    assert second == ([0, 0, COUNTS], True, [0, 0, 0])
    assert first == ([0, 0, 0], True, [SAID, pack(1, REFUSED), SAID])


def one_warp_gives_up(group):
    """All rows come in time, but a warp of rank 0, which is not the one that keeps records, has given up before."""
    memory, engine = engine_of(group)
    from expertwire.kernels import memory as words

    places, step = rows_of(engine, Layout.COMPACT), engine.state.step(0, Layout.COMPACT, IDS, None)
    x = random_rows(memory.rank, TOKENS, HIDDEN)
    engine.send(x, None, engine.planner.plan(step), step, places, receive=False)
    memory.all_gather(None)
    with pytest.MonkeyPatch.context() as patched:
        if memory.rank == 0:
            patched.setattr(words, "_agree", lambda found: found + (1 << 16))
        engine.await_rows(step)
    records = engine.state.status.view(-1, 4)
    return int(step.void.tensor()), records[:, :3].tolist(), engine.state.mirror[:, 0].tolist()


def test_a_warp_that_gives_up_is_on_record(processes):
    (void, records, told), theirs = processes.run(one_warp_gives_up)
    assert void == 1
    assert records == [[2, 1 << 24, SAID]] * 2
    assert told == [2, 2]
    assert theirs == (0, [[0, 0, 0]] * 2, [0, 0])
