"""The engine without numba gives what the compiled one gives, and says so where it cannot."""

import ctypes
import inspect
import platform

import numpy as np
import pytest
import torch
from host_calls import (
    assert_same,
    bits,
    decode_fp8,
    decode_logfmt,
    encode_fp8,
    encode_logfmt,
    mixed,
    reduce_rows,
    routed,
    write_routing,
)

from expertwire.errors import TransportUnavailable
from expertwire.formats import FP8Block
from expertwire.host import kernels, plain

NAMES = [name for name in vars(kernels.Kernels) if not name.startswith("_")]
needs_numba = pytest.mark.skipif(kernels.numba_missing() is not None, reason=kernels.numba_missing() or "")


@pytest.fixture
def both():
    return kernels.load("numba"), kernels.load("torch")


def same(a, b):
    assert type(a) is type(b) or (isinstance(a, (int, np.integer)) and isinstance(b, (int, np.integer)))
    if isinstance(a, tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, torch.Tensor):
        assert_same(a, b)
    else:
        assert a == b


def parameters(function):
    return list(inspect.signature(getattr(function, "py_func", function)).parameters)


def test_plain_has_every_kernel():
    for name in NAMES:
        assert parameters(getattr(plain, name)) == parameters(getattr(kernels.Kernels, name))[1:], name


@needs_numba
def test_compiled_has_every_kernel(both):
    compiled, _ = both
    assert sorted(compiled.__all__) == sorted(NAMES)
    for name in NAMES:
        assert parameters(getattr(compiled, name)) == parameters(getattr(plain, name)), name


@needs_numba
@pytest.mark.parametrize("seed", range(12))
def test_routing(both, seed):
    rng = np.random.default_rng(seed)
    num_tokens, num_topk, num_ranks = [(0, 3, 2), (1, 1, 1), (40, 6, 4), (200, 8, 9)][seed % 4]
    num_experts = int(rng.integers(1, 30))
    expert_rank = rng.integers(0, num_ranks, num_experts).astype(np.int32)
    expert_local = rng.integers(0, 9, num_experts).astype(np.int32)
    topk_idx = rng.integers(-2, num_experts + 2, (num_tokens, num_topk))
    legal = np.clip(topk_idx, -1, num_experts - 1)
    weights = rng.random((num_tokens, num_topk)).astype(np.float32)
    results = []
    for engine in both:
        for ids in (topk_idx, legal):
            parts = engine.first_illegal(ids, num_experts), engine.first_repeat(ids)
            routes = [
                routed(engine, ids, expert_rank, expert_local, num_ranks, distinct, weights)
                for distinct in (False, True)
            ]
            results.append((parts, *routes))
    same(results[0], results[2])
    same(results[1], results[3])

    slots, offsets, tokens, _, _, _ = results[1][1]
    brought = rng.integers(-1, 3, num_ranks)
    for per_token in (False, True):
        same(*[engine.expected_rows(slots, per_token, brought, 4096, 1 << 20, 24) for engine in both])
    for rank in range(num_ranks):
        mine = tokens[offsets[rank] : offsets[rank + 1]]
        records = [write_routing(engine, len(mine), mine, rank, slots, weights) for engine in both]
        same(*records)
        all_rows = np.array([0, len(mine)])
        reads = [engine.read_routing(records[0].data_ptr(), 0, all_rows, num_topk) for engine in both]
        same(*reads)
        compacted = [engine.arrange(reads[0][0], 9, 1, 0, True) for engine in both]
        same(*compacted)
        arranged = [engine.arrange(reads[0][0], 9, 1 + rank, 0, False) for engine in both]
        same(*arranged)
        rows, starts = [found[0] for found in arranged], arranged[0][1][2]
        cuts = np.sort(rng.integers(0, len(mine) + 1, num_ranks + 1))
        cuts[0], cuts[-1] = 0, len(mine)
        same(*[engine.outgoing_rows(rows[0], 4096, 24, cuts) for engine in both])
        same(*[placed_and_scattered(engine, rows[0], mine, num_tokens, int(starts[-1])) for engine in both])


def placed_and_scattered(engine, rows, tokens, num_tokens, num_placed):
    """Rows of eight bytes, all different, by `place_rows` and from there by `scatter_rows`."""
    records = torch.arange(1, len(tokens) + 1).view(len(tokens), 1).view(torch.uint8)
    placed = torch.zeros(num_placed, 8, dtype=torch.uint8)
    first, all_rows = np.array([records.data_ptr()]), np.array([0, len(tokens)])
    engine.place_rows(first, 8, all_rows, -1, tokens, rows, placed.data_ptr(), 8, False)
    back = torch.zeros(num_tokens, rows.shape[1], 8, dtype=torch.uint8)
    source = np.where(rows >= 0, placed.data_ptr() + 8 * rows, 0)
    engine.scatter_rows(source, tokens, back.data_ptr(), 8, 8, False)
    return placed, back


@needs_numba
@pytest.mark.parametrize("seed", range(6))
def test_rows(both, seed):
    generator = torch.Generator().manual_seed(seed)
    count, topk, hidden = [(0, 4, 64), (130, 2, 24), (5, 8, 600)][seed % 3]
    rows = mixed(count * topk, hidden, seed).view(count, topk, hidden)
    rows = rows.float() * 1.2345 if seed >= 3 else rows
    weights = torch.rand(count, topk, generator=generator)
    present = torch.rand(count, topk, generator=generator) < 0.8
    biases = [mixed(count, hidden, seed + 1)] * (seed % 2)
    for shares in (None, weights):
        seen = [reduce_rows(engine, rows, shares, biases, present, stream=seed % 2 == 1) for engine in both]
        assert torch.equal(bits(seen[0]), bits(seen[1]))


@needs_numba
@pytest.mark.parametrize("hidden", [8, 200, 1536])
@pytest.mark.parametrize("rows", [0, 9])
def test_formats(both, hidden, rows):
    x = mixed(rows, hidden, hidden, scale=0.1)
    for wire in (FP8Block(block=32), FP8Block(scale="ue8m0"), FP8Block(block=64, scale="ue8m0")):
        parts = [encode_fp8(engine, x, wire, spare=4) for engine in both]
        for one, other in zip(*parts, strict=True):
            assert torch.equal(bits(one), bits(other))
        decoded = [decode_fp8(engine, *parts[0], wire) for engine in both]
        assert torch.equal(bits(decoded[0]), bits(decoded[1]))
    parts = [encode_logfmt(engine, x) for engine in both]
    for one, other in zip(*parts, strict=True):
        assert torch.equal(bits(one), bits(other))
    decoded = [decode_logfmt(engine, *parts[0]) for engine in both]
    assert torch.equal(bits(decoded[0]), bits(decoded[1]))


def without_libatomic(monkeypatch, machine):
    def refuse(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(platform, "machine", lambda: machine)


def test_words_without_libatomic_on_x86(monkeypatch):
    without_libatomic(monkeypatch, "x86_64")
    load, store = plain._word_access()
    memory = np.zeros(2, np.int64)
    store(memory.ctypes.data + 8, -(1 << 62) + 5)
    assert load(memory.ctypes.data + 8) == -(1 << 62) + 5
    assert memory[0] == 0


def test_no_words_without_libatomic_elsewhere(monkeypatch):
    without_libatomic(monkeypatch, "aarch64")
    with pytest.raises(TransportUnavailable, match=r"libatomic on aarch64: install .*libatomic1, or numba with pip"):
        plain._word_access()
