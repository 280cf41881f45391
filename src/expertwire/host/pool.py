"""Memory for what a buffer returns, reused when the caller has dropped it.

A large fresh allocation costs more in page faults than in copying. So blocks are kept, backed by huge pages where the
system offers them, and lent out again once no tensor looks at them any more. The tensors are ordinary: nobody else
touches their memory while they live.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import torch

from expertwire._math import round_up

_SMALLEST_BYTES = 64 << 10
_PAGE_BYTES = 2 << 20
_MAX_IDLE = 16


class Pool:
    """`empty(shape, dtype)` is torch.empty with memory that comes back by itself. Thread-safe."""

    def __init__(self) -> None:
        self._idle: list[mmap.mmap] = []
        self._lent: dict[int, tuple[weakref.ref[np.ndarray], mmap.mmap]] = {}
        self._lock = threading.RLock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _SMALLEST_BYTES:
            return torch.empty(*shape, dtype=dtype)  # sizes one by one: torch parses a tuple more slowly
        block = self._take(num_bytes)
        loan = np.ndarray((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8, block)
        self._lent[id(loan)] = weakref.ref(loan, partial(self._return, id(loan))), block
        return torch.from_numpy(loan).view(dtype)

    def _take(self, num_bytes: int) -> mmap.mmap:
        """The smallest idle block that fits and is not much too large, else a new one."""
        with self._lock:
            fitting = [b for b in self._idle if num_bytes <= len(b) <= 2 * num_bytes + _PAGE_BYTES]
            if fitting:
                block = min(fitting, key=len)
                with suppress(ValueError):  # memory freed meanwhile may have pushed it out: then it is ours alone
                    self._idle.remove(block)
                return block
        block = mmap.mmap(-1, round_up(num_bytes, _PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.madvise(mmap.MADV_HUGEPAGE)
        return block

    def _return(self, key: int, loan: object) -> None:
        _, block = self._lent.pop(key)
        with self._lock:
            self._idle.append(block)
            del self._idle[:-_MAX_IDLE]
