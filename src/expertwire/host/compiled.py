"""The numba kernels in one place, loaded with the folder that keeps them compiled."""

# mypy: ignore-errors
from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numba
import numpy as np

from expertwire.host.cache import FOLDER

# numba reads the folder when a function is decorated; the setting is put back for everybody else.
_before = numba.config.CACHE_DIR
numba.config.CACHE_DIR = FOLDER or _before
try:
    from expertwire.host.logfmt import decode_logfmt, encode_logfmt
    from expertwire.host.memory import publish, read_word, wait_word
    from expertwire.host.quantize import decode_fp8, encode_fp8
    from expertwire.host.rows import (
        arrange,
        expected_rows,
        first_illegal,
        first_repeat,
        gather_rows,
        move_rows,
        outgoing_rows,
        overlay_rows,
        place_rows,
        read_routing,
        reduce_rows,
        route,
        scatter_rows,
        write_routing,
    )
finally:
    numba.config.CACHE_DIR = _before


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Of the processes that find nothing compiled, one compiles and the others wait for it; without a folder to find it
    in, each compiles for itself."""
    if FOLDER is None:
        yield
        return
    with open(os.path.join(FOLDER, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@functools.cache
def warm_up() -> None:
    """Compile or load every kernel, so that no rank waits for a peer's compiler in the middle of a call."""
    with _one_at_a_time():
        memory = np.zeros(512, np.uint8)
        at = memory.ctypes.data
        index, ids = np.zeros((0, 1), np.int64), np.zeros((0, 1), np.int32)
        weights, slots, offsets = np.zeros((0, 1), np.float32), np.zeros((3, 0, 1), np.int32), np.zeros(2, np.int64)
        rows, tokens, ranks = index[:, 0].copy(), ids[:, 0].copy(), np.zeros(1, np.int32)
        publish(at, 1)
        read_word(at)
        wait_word(at, 1, 1, 1, 1)
        route(at, at, 0, 1, ranks, ranks, 1, False)
        first_illegal(index, 1)
        first_repeat(index)
        move_rows(rows, rows, 8, False)
        gather_rows(at, tokens, at, 8, 8, False)
        place_rows(np.zeros(1, np.int64), 64, offsets, 0, tokens, index, at, 8, False)
        scatter_rows(index, tokens, at, 64, 8, False)
        outgoing_rows(index, at, 8, offsets)
        expected_rows(slots, True, np.zeros(1, np.int64), at, 64, 64)
        overlay_rows(index, tokens, index, 0, 0)
        write_routing(at, tokens, 0, slots, weights)
        read_routing(at, 64, offsets, 1)
        arrange(ids, 1, 1, 0, False)
        reduce_rows(index, False, weights, False, rows, at, 8, False)
        encode_fp8(at, 0, 8, 128, False, at, at, 4)
        decode_fp8(at, at, 0, 8, 128, False, 4, at)
        encode_logfmt(at, 0, 128, at, at)
        decode_logfmt(at, at, 0, 128, at)


__all__ = [
    "arrange",
    "decode_fp8",
    "decode_logfmt",
    "encode_fp8",
    "encode_logfmt",
    "expected_rows",
    "first_illegal",
    "first_repeat",
    "gather_rows",
    "move_rows",
    "outgoing_rows",
    "overlay_rows",
    "place_rows",
    "publish",
    "read_routing",
    "read_word",
    "reduce_rows",
    "route",
    "scatter_rows",
    "wait_word",
    "warm_up",
    "write_routing",
]
