"""Starts kernels. What Triton finds out about the arguments at every launch is found out here once per kind of call.

Triton looks at each of some forty arguments and at its options anew whenever a kernel is started, which takes longer
than the kernels run. Here a kernel is looked up by its constants and by what else decides how it is compiled: which
arguments are None, and the types and 16-byte alignment of tensors. Then it is started with plain addresses.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver

Kernel = Any  # a function under @triton.jit


class Launcher:
    """`launch(kernel, grid, *arguments, **constants and launch options)` on the current stream.

    While `compiling` is set, kernels are compiled and loaded only: no rank must compile while another waits for it.
    """

    def __init__(self) -> None:
        self.compiling = False
        self._ready: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}

    def __call__(self, kernel: Kernel, grid: int, *args: Any, **options: Any) -> None:
        if not isinstance(kernel, triton.JITFunction):  # the interpreter's
            if not self.compiling:
                kernel[(grid,)](*args, **options)
            return
        values = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
        kinds = [
            (arg.dtype, value % 16) if isinstance(arg, torch.Tensor) else None if arg is None else arg >> 31
            for arg, value in zip(args, values, strict=True)
        ]
        key = (kernel.fn, *kinds, *options.values())
        found = self._ready.get(key)
        if found is None:
            found = self._ready[key] = self._compile(kernel, grid, args, options)
        if not self.compiling:
            compiled, constants = found
            if knobs.runtime.launch_enter_hook.calls:  # a profiler listens, and is told what `profile` says
                compiled[(grid, 1, 1)](*values, *constants)
                return
            stream = driver.active.get_current_stream(driver.active.get_current_device())
            compiled.run(
                grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *values, *constants
            )

    def _compile(
        self, kernel: Kernel, grid: int, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Any, tuple[object, ...]]:
        """The kernel, loaded, and its constants in the order of its parameters."""
        for parameter, arg in zip(kernel.params, args, strict=False):
            assert not isinstance(arg, int) or parameter.do_not_specialize, parameter.name
        compiled = kernel.warmup(*args, grid=(grid,), **options)
        compiled._init_handles()
        return compiled, tuple(options[name] for name in kernel.arg_names[len(args) :])
