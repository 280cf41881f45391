"""`debug_poison` on a device, with kernels in the interpreter and one process per rank."""

import importlib.util

import pytest
import torch
from device_checks import (
    COMPACT,
    EXPERTS,
    HIDDEN,
    MAJOR,
    SLOTS,
    TOPK,
    check_guards,
    check_poison,
    check_rank,
    memory_of,
)
from gradient_checks import check_gradients
from interpreted_buffer import interpreted_buffer

from expertwire.buffer import Buffer
from expertwire.formats import BF16, FP8Block, LogFMT10
from expertwire.protocols.epoch_signal import unpack
from expertwire.testing import assert_equal, random_rows, uniform_routing

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def rank_work(group, layout, wire, options):
    buf = interpreted_buffer(group, debug_poison=True)
    check_poison(buf, layout, wire, **options)
    check_rank(buf, layout, wire, steps=1, **options)
    torch.distributed.barrier(group)
    check_guards(buf)


WIRES = {SLOTS: FP8Block(), MAJOR: BF16(), COMPACT: FP8Block(scale="ue8m0")}


@pytest.mark.parametrize("layout", list(WIRES), ids=str)
@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("counts", ["host", "device"])
def test_nan_where_no_rows_are(processes, layout, zero_copy, counts):
    options = {"counts": counts, "zero_copy": zero_copy, "alignment": 4 if layout is MAJOR else 1}
    processes.run(rank_work, layout, WIRES[layout], options, num_ranks=2, timeout_s=120)


def test_one_rank(processes):
    options = {"counts": "device", "zero_copy": True}
    processes.run(rank_work, SLOTS, FP8Block(decode=True), options, num_ranks=1, timeout_s=120)


def other_kinds_of_memory(group):
    """Rows on their way back, experts' output and values are NaN at first, received rows when they were given back."""
    buf = interpreted_buffer(group, debug_poison=True)
    check_rank(buf, MAJOR, BF16(), steps=1, deferred=True, zero_copy=True, back_wire=LogFMT10())
    check_gradients(buf, MAJOR, steps=1)
    state = buf._steps.engine.state
    state.inputs(MAJOR)
    names = {key[0] for key in state._places}
    assert names == {MAJOR, "inputs", "returned", "encoded", "dispatch values", "combine values"}
    for places, bank in memory_of(buf):
        rows = places.payload(bank)
        assert (rows[-1] == 0xFF).all(), "more rows than were filled"
        assert not places.meta(bank)[-1].any()
        if places.region.meta_words:
            assert (rows == 0xFF).all(), "all were given back"
    torch.distributed.barrier(group)
    assert buf._engine.runtime.broken_guards() == []


def test_other_kinds_of_memory(processes):
    processes.run(other_kinds_of_memory, num_ranks=2, timeout_s=120)


def given_back_last(group, over_rows):
    """Rows are overwritten before the peers hear that the bank is free: a repeated dispatch would write there."""
    buf = interpreted_buffer(group, over_rows=over_rows, debug_poison=True)
    state, rank, told = buf._steps.engine.state, buf.rank, []
    x, ids = random_rows(rank, 6, HIDDEN), uniform_routing(rank, 6, TOPK, EXPERTS)
    first = buf.dispatch(x, ids, layout=SLOTS)
    ((places, _), *_) = memory_of(buf)

    def done(bank):
        theirs = state.memory.kept[0][1 - rank]  # the peer's window
        return unpack(int(theirs[state.window.word("done", rank, bank) :][:8].view(torch.int64)))[0]

    def poison(bank):
        told.append((done(bank), int(state.banks[bank].epoch)))
        type(places).poison(places, bank)

    places.poison = poison
    for release in (False, True):
        sent = buf.dispatch(x, ids, layout=SLOTS, zero_copy=True)
        y = sent.x.clone()
        if over_rows:
            buf.combine_input(sent.handle).copy_(y)
            y = buf.combine_input(sent.handle)
        if release:
            sent.handle.release()
        else:
            back = buf.combine(y, sent.handle)
            assert_equal(back.x, (TOPK * x.float()).bfloat16())
        again = buf.dispatch(x, handle=first.handle)  # owned
        assert_equal(again.x.isnan(), first.x.isnan())
    assert len(told) == 4
    assert all(before < epoch for before, epoch in told), told
    torch.distributed.barrier(group)
    assert [done(bank) for bank in range(2)] == [int(state.banks[bank].epoch) for bank in range(2)]


@pytest.mark.parametrize("over_rows", [False, True])
def test_a_bank_is_given_back_when_its_rows_are_nan(processes, over_rows):
    processes.run(given_back_last, over_rows, num_ranks=2, timeout_s=120)


def off(group, debug_poison):
    """Whether a peer has it changes nothing: sizes, or what rows are before they are written."""
    buf = interpreted_buffer(group, debug_poison=debug_poison and group.rank() == 0)
    state = buf._steps.engine.state
    check_rank(buf, MAJOR, BF16(), steps=1)
    hint = Buffer.size_hint(
        num_ranks=2, hidden=HIDDEN, num_topk=TOPK, num_max_tokens_per_rank=24, device="cuda", num_experts=EXPERTS,
        layout=MAJOR,
    )  # fmt: skip
    assert state.total_bytes == hint
    guards = 256 * (1 + len(memory_of(buf))) if state.debug_poison else 0
    assert sum(maps[buf.rank].numel() for maps in state.memory.kept) == hint + guards
    ((places, bank), *_) = memory_of(buf)
    assert (places.payload(bank)[-1] == (0xFF if state.debug_poison else 0)).all()
    torch.distributed.barrier(group)
    buf.close()


@pytest.mark.parametrize("debug_poison", [False, True])
def test_off(processes, debug_poison):
    processes.run(off, debug_poison, num_ranks=2, timeout_s=120)
