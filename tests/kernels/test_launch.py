"""What the launcher holds its callers to."""

from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

from expertwire.kernels import launch  # noqa: E402
from expertwire.kernels.dispatch_recv import give_back  # noqa: E402
from expertwire.kernels.part import Part  # noqa: E402


class Interpreted:
    """A kernel of the interpreter, which notes what it is called with."""

    def fn(self):
        """The function, of which only the name counts."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.calls.append((grid, args, options))


def test_the_interpreter_sees_everything_in_order():
    kernel, start = Interpreted(), launch.Launcher()
    start(kernel, 3, ("kind",), (1, None), lambda: ((2,), {"SIZE": 8}))
    assert kernel.calls == [((3,), (1, None, 2), {"SIZE": 8})]


def test_the_interpreter_gets_a_tensor_of_a_part():
    kernel, start, memory = Interpreted(), launch.Launcher(), torch.arange(8, dtype=torch.int32)
    start(kernel, 1, ("kind",), (Part(memory, 2, (2, 1), torch.int64),), lambda: ((), {}))
    [(_, (found,), _)] = kernel.calls
    assert (found.dtype, found.tolist()) == (torch.int64, [[2 | 3 << 32], [4 | 5 << 32]])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.bool])
def test_a_kernel_gets_bytes_of_dtypes_that_triton_does_not_have(dtype):
    kernel, start, memory = Interpreted(), launch.Launcher(), torch.arange(16, dtype=torch.uint8)
    start(kernel, 1, ("kind",), (memory.view(dtype).view(1, -1), memory.view(torch.bfloat16)), lambda: ((), {}))
    [(_, (found, known), _)] = kernel.calls
    assert (found.dtype, found.data_ptr(), found.numel()) == (torch.uint8, memory.data_ptr(), 16)
    assert known.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changing", "rest"),
    [
        ((torch.zeros(1),), ((2,), {"SIZE": 8})),
        ((None,), ((2,), {"SIZE": 8})),
        ((torch.zeros(1, dtype=torch.int32),), ((3,), {"SIZE": 8})),
        ((torch.zeros(1, dtype=torch.int32),), ((2,), {"SIZE": 9})),
    ],
)
def test_a_kind_that_says_too_little_is_noticed(changing, rest):
    kernel, start = Interpreted(), launch.Launcher()
    first = torch.zeros(4, dtype=torch.int32)
    start(kernel, 1, (), (first,), lambda: ((2,), {"SIZE": 8}))
    start(kernel, 1, (), (first[1:],), lambda: ((2,), {"SIZE": 8}))
    with pytest.raises(AssertionError, match="two calls of the kind"):
        start(kernel, 1, (), changing, lambda: rest)
    start(kernel, 1, ("another",), changing, lambda: rest)
    assert len(kernel.calls) == 3


def test_arguments_are_aligned(monkeypatch):
    compiled = SimpleNamespace(function=0, packed_metadata=0, run=lambda *args: started.append(args[9:]))
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch.Launcher, "_compile", lambda self, *args: (compiled, ("rest",), ()))
    started, start, memory = [], launch.Launcher(), torch.zeros(8, dtype=torch.int32)
    start(give_back, 1, (), (memory, memory[4:], memory[1:1], Part(memory, 4, (2,), torch.int64)), tuple)
    assert started == [(memory.data_ptr(), memory.data_ptr() + 16, 0, memory.data_ptr() + 16, "rest")]
    for second in (memory[1:], Part(memory, 1, (1,))):
        with pytest.raises(AssertionError, match="give_back: argument 1 is not aligned"):
            start(give_back, 1, (), (memory, second), tuple)


def test_a_launch_is_on_the_current_stream_of_the_device_that_has_the_kernel(monkeypatch):
    streams, devices, started = {0: 5, 1: 6}, [1, 0], []
    compiled = SimpleNamespace(function=0, packed_metadata=0, run=lambda *args: started.append(args[3]))
    active = SimpleNamespace(get_current_device=lambda: devices.pop(0), get_current_stream=streams.get)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch.Launcher, "_compile", lambda self, *args: (compiled, (), ()))
    start = launch.Launcher()
    start(give_back, 1, (), (1,), tuple)
    streams[1] = 7
    start(give_back, 1, (), (1,), tuple)
    assert started == [6, 7]
