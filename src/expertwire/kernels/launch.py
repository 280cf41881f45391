"""Starts kernels. What is the same for every call of a kind is found out once.

Triton looks at each of some forty arguments, and at its options, anew whenever a kernel is started, which takes longer
than the kernels run. Here a caller says which kind of call it is, hands over what changes from call to call, and how to
make the rest. The rest is made, and the kernel compiled, for the first call of the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime import driver

from expertwire.kernels.part import Part

_EVERYWHERE = {  # dtypes that Triton has on every GPU
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64,
}  # fmt: skip

Kernel = Any  # a function under @triton.jit
Changing = Sequence["torch.Tensor | Part | int | None"]
Rest = tuple[Sequence["torch.Tensor | int | None"], dict[str, Any]]


class _Ready(NamedTuple):
    """A kernel that is loaded, and what starts it."""

    compiled: Any
    run: Callable[..., None]
    function: Any
    metadata: Any
    others: tuple[object, ...]  # what follows the changing arguments
    tensors: list[int]  # which of those are tensors
    stream_of: Callable[[int], int]
    device: int
    kept: Sequence[object]  # what must live as long


class Launcher:
    """`launch(kernel, grid, kind, changing, rest)` on the current stream.

    A kernel's parameters are those of `changing`, then those of `rest()[0]`, then constants, in `rest()[1]` with the
    launch options. `kind` decides what `rest` returns, and dtypes and absence of tensors in `changing`; all of them
    begin at multiples of 16 bytes. The interpreter, which makes the rest anew for every call, holds callers to that.
    Tensors of a dtype that not every GPU has in Triton are bytes to a kernel.

    While `compiling` is set, kernels are compiled and loaded only: no rank must compile while another waits for it.
    """

    def __init__(self) -> None:
        self.compiling = False
        self._ready: dict[tuple[Hashable, ...], Any] = {}

    def __call__(
        self, kernel: Kernel, grid: int, kind: tuple[Hashable, ...], changing: Changing, rest: Callable[[], Rest]
    ) -> None:
        key = (kernel.fn, *kind)
        if not isinstance(kernel, triton.JITFunction):
            self._interpret(kernel, grid, key, changing, rest())
            return
        found = self._ready.get(key)
        if found is None:
            compiled, others, kept = self._compile(kernel, grid, changing, rest())
            found = self._ready[key] = _Ready(
                compiled, compiled.run, compiled.function, compiled.packed_metadata, others,
                [at for at, value in enumerate(changing) if isinstance(value, (torch.Tensor, Part))],
                driver.active.get_current_stream, driver.active.get_current_device(), kept,
            )  # fmt: skip
        if self.compiling:
            return
        compiled, run, function, metadata, others, tensors, stream_of, device, _ = found
        values: list[Any] = [*changing]
        for at in tensors:
            pointer = values[at] = values[at].data_ptr()
            assert not pointer & 15, f"{kernel.fn.__name__}: argument {at} is not aligned"
        if knobs.runtime.launch_enter_hook.calls:  # a profiler listens, and is told what `profile` says
            compiled[(grid, 1, 1)](*values, *others)
            return
        run(grid, 1, 1, stream_of(device), function, metadata, None, None, None, *values, *others)

    def _compile(
        self, kernel: Kernel, grid: int, changing: Changing, rest: Rest
    ) -> tuple[Any, tuple[object, ...], Sequence[object]]:
        """The kernel, loaded; what follows the changing arguments; and what must live as long."""
        fixed, options = rest
        args = (*map(_tensor, changing), *fixed)
        for parameter, arg in zip(kernel.params, args, strict=False):
            assert not isinstance(arg, int) or parameter.do_not_specialize, parameter.name
        compiled = kernel.warmup(*args, grid=(grid,), **options)
        compiled._init_handles()
        constants = [options[name] for name in kernel.arg_names[len(args) :]]
        return compiled, (*map(_value, fixed), *constants), fixed

    def _interpret(self, kernel: Kernel, grid: int, key: tuple[Hashable, ...], changing: Changing, rest: Rest) -> None:
        fixed, options = rest
        changing = tuple(map(_tensor, changing))
        types = [arg.dtype if isinstance(arg, torch.Tensor) else type(arg) for arg in changing]
        seen = (types, [_value(arg) for arg in fixed], options)
        known = self._ready.setdefault(key, seen)
        assert seen == known, f"{kernel.fn.__name__}: two calls of the kind {key[1:]} differ: {known}, {seen}"
        if not self.compiling:
            kernel[(grid,)](*changing, *fixed, **options)


def _tensor(arg: torch.Tensor | Part | int | None) -> torch.Tensor | int | None:
    if isinstance(arg, torch.Tensor) and arg.dtype not in _EVERYWHERE:
        return arg.view(-1).view(torch.uint8)
    return arg.tensor() if isinstance(arg, Part) else arg


def _value(arg: torch.Tensor | int | None) -> int | None:
    return arg.data_ptr() if isinstance(arg, torch.Tensor) else arg
