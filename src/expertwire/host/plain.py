"""The kernels without numba: numpy, torch and ctypes. The same bits as `host.compiled`, on any machine, but slower.

`host.rows`, `host.quantize`, `host.logfmt` and `host.memory` document each function. Words need loads that acquire and
stores that release: libatomic has them; without it an aligned 8-byte access is one on x86-64, and elsewhere nothing in
Python is.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from expertwire.errors import TransportUnavailable
from expertwire.formats import FP8Block, LogFMT10

Array = NDArray[Any]
_ACQUIRE, _RELEASE = 2, 3
_MOST_SPINS = 5
_ROWS_AT_A_TIME = 64


def _word_access() -> tuple[Callable[[int], int], Callable[[int, int], None]]:
    """How to load a word with acquire and store one with release here."""
    try:
        atomic = ctypes.CDLL("libatomic.so.1")
    except OSError:
        if platform.machine() not in ("x86_64", "AMD64"):
            raise TransportUnavailable(
                f"engine='torch' needs libatomic on {platform.machine()}: install the system's libatomic1, "
                "or numba with pip install 'expertwire[cpu]'"
            ) from None

        def store_plain(address: int, word: int) -> None:
            ctypes.c_int64.from_address(address).value = word

        return lambda address: ctypes.c_int64.from_address(address).value, store_plain
    load, store = atomic.__atomic_load_8, atomic.__atomic_store_8
    load.argtypes, load.restype = [ctypes.c_void_p, ctypes.c_int], ctypes.c_int64
    store.argtypes, store.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int], None
    return lambda address: int(load(address, _ACQUIRE)), lambda address, word: store(address, word, _RELEASE)


_load, _store = _word_access()
_sched_yield = ctypes.CDLL(None).sched_yield  # unlike os.sched_yield in some versions, lets other threads run Python


def warm_up() -> None:
    """Nothing to compile."""


def read_word(address: int) -> int:
    return _load(address)


def publish(address: int, word: int) -> None:
    _store(address, word)


def wait_word(address: int, word: int, spins: int, yields: int, naps: int) -> int:
    """As `memory.wait_word`, with few spins: each costs more than the pause of a compiled one."""
    spins = min(spins, _MOST_SPINS)
    for i in range(spins + yields + naps):
        seen = _load(address)
        if seen >= word:
            return seen
        if i >= spins + yields:
            time.sleep(50e-6)
        elif i >= spins:
            _sched_yield()
    return _load(address)


def _bytes_at(address: int, num_bytes: int) -> Array:
    """uint8 [num_bytes] over the memory itself."""
    if num_bytes == 0:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def _rows_at(address: int, num_rows: int, row_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """[num_rows, row_bytes / itemsize] over the memory itself."""
    return torch.from_numpy(_bytes_at(address, num_rows * row_bytes)).view(num_rows, row_bytes).view(dtype)


def _quiet(rows: torch.Tensor) -> torch.Tensor:
    """Every NaN as 0x7fc0; torch's casts leave different ones."""
    return rows.masked_fill_(rows.isnan(), torch.nan)


def route(
    topk_idx: int, weights: int, num_tokens: int, num_topk: int, expert_rank: Array, expert_local: Array,
    num_ranks: int, distinct: bool,
) -> tuple[Array, Array, Array, Array, int, int]:  # fmt: skip
    ids = _bytes_at(topk_idx, 8 * num_tokens * num_topk).view(np.int64).reshape(num_tokens, num_topk)
    shares = np.ones(ids.shape, np.float32)
    if weights:
        shares[:] = _bytes_at(weights, shares.nbytes).view(np.float32).reshape(ids.shape)
    is_repeat = _repeats(ids) & (ids < expert_rank.size) & distinct
    valid = (ids >= 0) & (ids < expert_rank.size) & ~is_repeat
    expert = np.where(valid, ids, 0)
    slot_rank = np.where(valid, expert_rank[expert], -1).astype(np.int32)
    slot_local = np.where(valid, expert_local[expert], -1).astype(np.int32)
    is_last = valid & ~_named_before(slot_rank[:, ::-1])[:, ::-1]
    goes = np.zeros((num_ranks, num_tokens), np.bool_)
    token, slot = np.nonzero(valid)
    goes[slot_rank[token, slot], token] = True
    offsets = np.concatenate([[0], np.cumsum(goes.sum(axis=1))]).astype(np.int64)
    illegal = int(((ids < -1) | (ids >= expert_rank.size)).sum())
    tokens = np.nonzero(goes)[1].astype(np.int32)
    slots = np.stack([slot_rank, slot_local, is_last.astype(np.int32)])
    return slots, offsets, tokens, shares, int(is_repeat.sum()), illegal


def _named_before(ids: Array) -> Array:
    """Which entries [n, K] equal an earlier one of their row."""
    earlier = np.tri(ids.shape[1], k=-1, dtype=np.bool_)
    named: Array = ((ids[:, :, None] == ids[:, None, :]) & earlier).any(axis=2)
    return named


def _repeats(topk_idx: Array) -> Array:
    return _named_before(topk_idx) & (topk_idx >= 0)


def _first(found: Array) -> tuple[int, int]:
    if not found.any():
        return -1, -1
    token, slot = divmod(int(found.argmax()), found.shape[1])
    return token, slot


def first_illegal(topk_idx: Array, num_experts: int) -> tuple[int, int]:
    return _first((topk_idx < -1) | (topk_idx >= num_experts))


def first_repeat(topk_idx: Array) -> tuple[int, int]:
    return _first(_repeats(topk_idx))


def move_rows(source: Array, destination: Array, num_bytes: int, stream: bool = False) -> None:
    for from_, to in zip(source.tolist(), destination.tolist(), strict=True):
        ctypes.memmove(to, from_, num_bytes)


def gather_rows(source: int, tokens: Array, out: int, stride: int, num_bytes: int, stream: bool = False) -> None:
    places = out + stride * np.arange(tokens.size, dtype=np.int64)
    move_rows(source + num_bytes * tokens.astype(np.int64), places, num_bytes)


def place_rows(
    first: Array, stride: int, offsets: Array, own: int, tokens: Array, rows: Array, out: int, num_bytes: int,
    stream: bool = False,
) -> None:  # fmt: skip
    for rank in np.flatnonzero(first):
        begin, end = offsets[rank : rank + 2]
        at = num_bytes * tokens[begin:end].astype(np.int64) if rank == own else stride * np.arange(end - begin)
        arrival, slot = np.nonzero(rows[begin:end] >= 0)
        move_rows(first[rank] + at[arrival], out + num_bytes * rows[begin:end][arrival, slot], num_bytes)


def scatter_rows(source: Array, tokens: Array, records: int, stride: int, num_bytes: int, stream: bool = False) -> None:
    arrival, slot = np.nonzero(source)
    place = records + stride * (tokens[arrival].astype(np.int64) * source.shape[1] + slot)
    move_rows(source[arrival, slot], place, num_bytes)


def outgoing_rows(rows: Array, y: int, num_bytes: int, offsets: Array) -> tuple[Array, Array]:
    sent = np.concatenate([[0], np.cumsum((rows >= 0).sum(axis=1))])
    return np.where(rows >= 0, y + num_bytes * rows, 0), np.diff(sent[offsets])


def expected_rows(
    slots: Array, per_token: bool, brought: Array, records: int, apart: int, stride: int
) -> tuple[Array, int, bool]:
    slot_rank, is_last = slots[0], slots[2] != 0
    expected = (slot_rank >= 0) & (is_last | per_token)
    present = expected & (brought >= 0)[slot_rank]
    cells = np.arange(slot_rank.size).reshape(slot_rank.shape)
    counts = np.bincount(slot_rank[present], minlength=brought.size)
    return (
        np.where(present, records + apart * slot_rank.astype(np.int64) + stride * cells, 0),
        int(expected.sum() - present.sum()),
        bool(((counts == brought) | (brought < 0)).all()),
    )


def overlay_rows(table: Array, tokens: Array, rows: Array, first: int, end: int) -> None:
    some, over = tokens[first:end], rows[first:end]
    table[some] = np.where(over != 0, over, table[some])


def _routing_at(at: int, num_rows: int, num_topk: int, dtype: type) -> Array:
    """[num_rows, 2 * K + 1] over the routing itself, as integers or as floats."""
    return _bytes_at(at, 4 * num_rows * (2 * num_topk + 1)).view(dtype).reshape(num_rows, 2 * num_topk + 1)


def write_routing(at: int, tokens: Array, rank: int, slots: Array, weights: Array) -> None:
    slot_rank, slot_local, _ = slots
    num_topk, here = slot_rank.shape[1], slot_rank[tokens] == rank
    ints, floats = (_routing_at(at, tokens.size, num_topk, dtype) for dtype in (np.int32, np.float32))
    ints[:, :num_topk] = np.where(here, slot_local[tokens], -1)
    floats[:, num_topk:-1] = np.where(here, weights[tokens], 0)
    ints[:, -1] = tokens


def read_routing(at: int, apart: int, offsets: Array, num_topk: int) -> tuple[Array, Array, Array]:
    found = np.concatenate(
        [_routing_at(at + r * apart, count, num_topk, np.int32) for r, count in enumerate(np.diff(offsets).tolist())]
    )
    weights = found[:, num_topk:-1].copy().view(np.float32)
    return found[:, :num_topk].copy(), weights, found[:, -1].copy()


def arrange(topk_idx: Array, num_local_experts: int, alignment: int, room: int, compact: bool) -> tuple[Array, Array]:
    groups = np.zeros((3, num_local_experts + 1), np.int64)
    counts, padded, offsets = groups[0, :-1], groups[1, :-1], groups[2]
    counts[:] = np.bincount(topk_idx[topk_idx >= 0], minlength=num_local_experts)
    padded[:] = room or -(-counts // alignment) * alignment
    offsets[1:] = np.cumsum(padded)
    return _compact_rows(topk_idx) if compact else _expert_rows(topk_idx, offsets), groups


def _compact_rows(topk_idx: Array) -> Array:
    rows = np.full(topk_idx.shape, -1, np.int64)
    highest = topk_idx.shape[1] - 1 - np.argmax(topk_idx[:, ::-1] >= 0, axis=1)
    (served,) = np.nonzero((topk_idx >= 0).any(axis=1))
    rows[served, highest[served]] = served
    return rows


def _expert_rows(topk_idx: Array, offsets: Array) -> Array:
    rows = np.full(topk_idx.size, -1, np.int64)
    flat = topk_idx.reshape(-1)
    order = np.argsort(flat, kind="stable")[(flat < 0).sum() :]
    expert = flat[order]
    rows[order] = offsets[expert] + np.arange(expert.size) - np.searchsorted(expert, expert)
    return rows.reshape(topk_idx.shape)


def reduce_rows(
    operands: Array, is_float32: bool, weights: Array, weighted: bool, biases: Array, out: int, hidden: int,
    stream: bool = False,
) -> None:  # fmt: skip
    dtype = torch.float32 if is_float32 else torch.bfloat16
    for first in range(0, len(operands), _ROWS_AT_A_TIME):
        part = slice(first, first + _ROWS_AT_A_TIME)
        count = len(operands[part])
        total = torch.zeros(count, hidden)
        for bias in biases.tolist():
            total += _rows_at(bias + 2 * hidden * first, count, 2 * hidden, torch.bfloat16).float()
        for k in range(operands.shape[1]):
            (present,) = np.nonzero(operands[part, k])
            rows = _gathered(operands[part, k][present], hidden, dtype)
            if weighted:
                rows *= torch.from_numpy(weights[part, k][present]).unsqueeze(1)
            total[present] += rows
        _rows_at(out + 2 * hidden * first, count, 2 * hidden, torch.bfloat16).copy_(_quiet(total.bfloat16()))


def _addresses(rows: torch.Tensor) -> Array:
    return rows.data_ptr() + rows.shape[1] * rows.element_size() * np.arange(rows.shape[0], dtype=np.int64)


def _gathered(addresses: Array, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Copies of the rows at these addresses, float32 [n, hidden]."""
    rows = torch.empty(addresses.size, hidden, dtype=dtype)
    move_rows(addresses, _addresses(rows), rows.element_size() * hidden)
    return rows.float()


def encode_fp8(
    x: int, num_rows: int, hidden: int, block: int, packed: bool, payload: int, sf: int, sf_stride: int
) -> None:
    if num_rows == 0:
        return
    wire = FP8Block(block=block, scale="ue8m0" if packed else "float32")
    codes, scales = wire.encode(_rows_at(x, num_rows, 2 * hidden, torch.bfloat16))
    _rows_at(payload, num_rows, hidden, torch.uint8).copy_(codes.view(torch.uint8))
    rows = _rows_at(sf, num_rows, sf_stride, torch.uint8)
    rows[:, : wire.sf_bytes(hidden)] = scales.contiguous().view(torch.uint8)
    if packed:
        rows[:, wire.sf_bytes(hidden) :] = 0


def decode_fp8(
    payload: int, sf: int, num_rows: int, hidden: int, block: int, packed: bool, sf_stride: int, out: int
) -> None:
    wire = FP8Block(block=block, scale="ue8m0" if packed else "float32")
    codes = _rows_at(payload, num_rows, hidden, torch.float8_e4m3fn)
    scales = _rows_at(sf, num_rows, sf_stride, torch.uint8)[:, : wire.sf_bytes(hidden)].contiguous()
    x = wire.decode_bfloat16(codes, scales.view(wire.sf_dtype), hidden)
    _rows_at(out, num_rows, 2 * hidden, torch.bfloat16).copy_(_quiet(x))


def encode_logfmt(x: int, num_rows: int, hidden: int, payload: int, sf: int) -> None:
    wire = LogFMT10()
    octets, limits = wire.encode(_rows_at(x, num_rows, 2 * hidden, torch.bfloat16))
    _rows_at(payload, num_rows, wire.payload_bytes(hidden), torch.uint8).copy_(octets)
    _rows_at(sf, num_rows, wire.sf_bytes(hidden), torch.bfloat16).copy_(limits)


def decode_logfmt(payload: int, sf: int, num_rows: int, hidden: int, out: int) -> None:
    wire = LogFMT10()
    octets = _rows_at(payload, num_rows, wire.payload_bytes(hidden), torch.uint8)
    limits = _rows_at(sf, num_rows, wire.sf_bytes(hidden), torch.bfloat16)
    _rows_at(out, num_rows, 4 * hidden, torch.float32).copy_(wire.decode_float32(octets, limits, hidden))
