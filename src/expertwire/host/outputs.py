"""Memory for received rows that peers write directly: blocks of this rank's shared outputs, lent first fit.

A block is lent again when no tensor looks at it any more, as in `host.pool`; that its reader is done with it is known
here, without a word to the peers, since they write only where a step has told them to. Where there is no room, or the
system has no pages left, rows take the way through the window.
"""

from __future__ import annotations

import ctypes
import errno
import math
import weakref
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from expertwire._math import round_up
from expertwire.layouts.window import PAGE_BYTES

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Outputs:
    """The outputs of one rank; `memory` begins on a page."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._first = memory.ctypes.data
        self._taken: dict[int, tuple[int, int]] = {}  # id of a loan -> first byte, last byte + 1
        self._loans: dict[int, weakref.ref[np.ndarray]] = {}
        self._kept: list[torch.Tensor] = []
        self._touched = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor in the first gap that is large enough; None if there is none."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(*shape, dtype=dtype)
        end = first = 0
        for taken, taken_end in [*sorted(self._taken.values()), (len(self._memory), 0)]:
            end = first + round_up(num_bytes, PAGE_BYTES)
            if end <= taken:
                break
            first = taken_end
        else:
            return None
        if end > self._touched and not self._populate(end):
            return None
        loan = np.ndarray((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8, self._memory, first)
        self._taken[id(loan)] = first, end
        self._loans[id(loan)] = weakref.ref(loan, partial(self._return, id(loan)))
        return torch.from_numpy(loan).view(dtype)

    def _populate(self, end: int) -> bool:
        """Take the pages up to `end` now: a page that cannot be had later would kill whoever touches it (SIGBUS)."""
        failed = _madvise(self._first + self._touched, end - self._touched, _POPULATE_WRITE)
        if failed and ctypes.get_errno() != errno.EINVAL:  # EINVAL: an older kernel, which cannot say
            return False
        self._touched = end
        return True

    def _return(self, key: int, loan: object) -> None:
        del self._taken[key], self._loans[key]

    def place(self, block: torch.Tensor) -> int:
        """Where in the outputs a block begins."""
        return block.data_ptr() - self._first

    def keep(self, blocks: Sequence[torch.Tensor]) -> None:
        """Never lend these again: a peer was told to write there, and may do so at any time."""
        self._kept += blocks

    def close(self) -> None:
        """Lend no more. What is lent stays."""
        self._memory = np.empty(0, np.uint8)
