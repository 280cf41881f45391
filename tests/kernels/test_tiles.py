"""Tiles of kernels: few for all numbers of tokens, and every one compiled before it is needed."""

import importlib.util
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from expertwire.formats import BF16, FP8Block
from expertwire.kernels.tiles import Tile, all_tiles, combine_tile, pow2, send_tile, slots_tile
from expertwire.layouts.receive import Layout
from expertwire.topology import Placement

CAPACITY, HIDDEN, EXPERTS, TOPK = 700, 7168, 16, 4


def test_pow2():
    assert [pow2(n) for n in (0, 1, 2, 3, 4, 5, 1023, 1025)] == [1, 1, 2, 4, 4, 8, 1024, 2048]


def test_tiles_of_7168_channels_on_132_sms():
    slots = partial(slots_tile, lines=56, block=128, num_sms=132)
    assert [slots(tokens) for tokens in (1, 18, 64, 128)] == [(1, 8, 2), (1, 8, 2), (1, 32, 8), (1, 64, 8)]
    assert send_tile(4096, 16384, 64, 132, 4, False, True) == Tile(1, 64, 4)
    assert [send_tile(tokens, 16384, 64, 24, 4, True, True) for tokens in (24, 48, 4096)] == [
        (1, 64, 8),
        (2, 64, 16),
        (4, 64, 32),
    ]
    assert [combine_tile(tokens, HIDDEN, 132, False) for tokens in (128, 256, 4096)] == [
        (1, 1024, 4),
        (1, 1024, 2),
        (1, 2048, 4),
    ]
    assert combine_tile(4096, HIDDEN, 24, True) == Tile(4, 8192, 32)


@pytest.mark.parametrize("hidden", [8, 128, 1032, 7168, 16384])
@pytest.mark.parametrize("num_sms", [1, 16, 132])
@pytest.mark.parametrize("strict", [False, True])
def test_there_are_few_and_they_cover_a_row(hidden, num_sms, strict):
    lines = -(-hidden // 128)
    slots = all_tiles(partial(slots_tile, lines=lines, block=128, num_sms=num_sms), 1000)
    sends = all_tiles(
        partial(send_tile, row_bytes=pow2(lines) * 256, lines=pow2(lines), num_sms=num_sms, most_rows=4, strict=strict,
                fp8=True), 1000,
    )  # fmt: skip
    combines = all_tiles(partial(combine_tile, hidden=hidden, num_sms=num_sms, strict=strict), 1000)
    assert len(slots) <= 5
    assert len(sends) <= 3
    assert len(combines) <= 4
    for tile in slots | sends | combines:
        assert tile.columns == pow2(tile.columns)
        assert tile.rows in (1, 2, 4)
        assert tile.warps in (1, 2, 4, 8, 16, 32)


class Recorder:
    """Stands for a compiled kernel."""

    metadata = packed_metadata = function = None

    def run(self, *args):
        pass


def engine_of_two(**options):
    """The first rank's, without a device."""
    from expertwire.kernels.engine import DeviceEngine

    memory = SimpleNamespace(
        name="none", any_address=True, rank=0, num_ranks=2, device=torch.device("cpu"),
        all_gather=lambda value: [value, value],
        allocate=lambda num_bytes: (torch.zeros(num_bytes, dtype=torch.uint8), [0, 0]),
    )  # fmt: skip
    return DeviceEngine(
        memory, Placement.contiguous(EXPERTS, 2), capacity=CAPACITY, hidden=HIDDEN, num_topk=TOPK, num_banks=1,
        num_sms=30, timeout_us=1, **options,
    )  # fmt: skip


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@needs_triton
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 7, CAPACITY])
@pytest.mark.parametrize("layout", list(Layout), ids=str)
def test_parts_of_a_step_lie_apart_and_aligned(layout, num_tokens):
    state = engine_of_two().state
    step = state.step(0, layout, torch.zeros(num_tokens, TOPK, dtype=torch.int64), None)
    parts = [step.counts, step.sends_to]
    if layout is Layout.COMPACT:
        parts.append(step.owners)
    end = step.counts.data_ptr()
    for part in parts:
        found = part.tensor()
        assert part.data_ptr() >= end
        assert part.data_ptr() % 16 == 0
        assert found.shape == part.shape
        assert found.data_ptr() == (part.data_ptr() if found.numel() else 0)
        end = part.data_ptr() + found.numel() * found.element_size()
    memory = step.counts.tensor().untyped_storage()
    assert end <= memory.data_ptr() + memory.nbytes()
    assert [part.data_ptr() % 16 for part in state.filled(step)] == [0, 0]


@needs_triton
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("layout", list(Layout), ids=str)
def test_a_kind_of_call_compiles_once_for_all_numbers_of_tokens(monkeypatch, layout, strict):
    from expertwire.kernels import launch
    from expertwire.kernels.engine import Rows

    monkeypatch.setattr(launch.Launcher, "_compile", lambda *args: (Recorder(), (), ()))
    device = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=device))
    engine = engine_of_two(strict_sms=strict)
    places = [engine.state.places(layout, Rows.of_wire(wire, HIDDEN)) for wire in (BF16(), FP8Block())]

    def calls(num_tokens):
        x = torch.empty(num_tokens, HIDDEN, dtype=torch.bfloat16)
        ids, weights = torch.zeros(num_tokens, TOPK, dtype=torch.int64), torch.zeros(num_tokens, TOPK)
        step = engine.state.step(0, layout, ids, weights)
        for rows in places:
            if layout is Layout.EXPERT_SLOTS:
                engine.dispatch_fused(x, step, rows)
            engine.send(x, None, engine.planner.plan(step), step, rows, receive=True)
        engine.gather(x, step, torch.empty_like(x), weighted=layout is not Layout.COMPACT)

    engine.launch.compiling = True
    calls(CAPACITY)
    engine.launch.compiling = False
    compiled = len(engine.launch._ready)
    for num_tokens in range(1, CAPACITY + 1, 7):
        calls(num_tokens)
    assert len(engine.launch._ready) == compiled
