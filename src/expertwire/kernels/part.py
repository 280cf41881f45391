"""Small tensors within one: taking memory for each would take the host as long as starting a kernel does."""

from __future__ import annotations

import math

import torch

_WORDS = {torch.int32: 1, torch.int64: 2}  # of 4 bytes


class Part:
    """int32 or int64 values of some shape in `memory`, int32, from its element `first` on. Kernels take the address;
    `tensor()` makes the tensor.

    >>> memory = torch.arange(8, dtype=torch.int32)
    >>> part = Part(memory, 4, (2, 2))
    >>> part.tensor().tolist(), part.data_ptr() - memory.data_ptr(), Part(memory, 4, (4,))[1:3].tensor().tolist()
    ([[4, 5], [6, 7]], 16, [5, 6])
    """

    __slots__ = ("_first", "_memory", "dtype", "shape")

    def __init__(
        self, memory: torch.Tensor, first: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int32
    ) -> None:
        self._memory, self._first, self.shape, self.dtype = memory, first, shape, dtype

    @classmethod
    def whole(cls, memory: torch.Tensor) -> Part:
        return cls(memory, 0, tuple(memory.shape))

    def data_ptr(self) -> int:
        return self._memory.data_ptr() + 4 * self._first

    def numel(self) -> int:
        return math.prod(self.shape)

    def __getitem__(self, some: slice) -> Part:
        """Of int32 [n] values from ... to."""
        return Part(self._memory, self._first + some.start, (some.stop - some.start,))

    def tensor(self) -> torch.Tensor:
        words = self._memory[self._first : self._first + self.numel() * _WORDS[self.dtype]]
        return words.view(self.dtype).view(self.shape)
