"""What a profiler is told, and that nothing is told to nobody."""

import doctest
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")

from triton import knobs  # noqa: E402

from expertwire.kernels import launch, profile  # noqa: E402
from expertwire.kernels.combine_recv import combine_gather  # noqa: E402
from expertwire.kernels.dispatch_send import dispatch_send  # noqa: E402
from expertwire.kernels.dispatch_slots import dispatch_slots  # noqa: E402


def test_examples():
    assert doctest.testmod(profile).failed == 0
    assert doctest.testmod(profile).attempted == 5


@pytest.mark.parametrize("kernel", [dispatch_send, dispatch_slots, combine_gather], ids=lambda k: k.__name__)
def test_bytes_are_made_of_arguments_that_the_kernel_has(kernel):
    arguments = dict.fromkeys(kernel.arg_names, 3)
    assert kernel.launch_metadata((1,), None, arguments)["bytes"] > 0


def test_opaque_rows_bring_their_scale_factors():
    sizes = {
        "num_tokens": 10,
        "width": 12,
        "unit_bytes": 4,
        "FP8": False,
        "sf_units": 3,
        "sf_unit_bytes": 1,
        "SENDS": 2,
    }
    assert profile.dispatch_send_bytes((1,), None, sizes) == {"bytes": 10 * (48 + 3 + 2 * (48 + 3))}


class Compiled:
    """A kernel that is only looked at."""

    function = packed_metadata = "of the kernel"

    def __init__(self):
        self.seen = []

    def run(self, *args):
        self.seen.append(("run", args))

    def __getitem__(self, grid):
        return lambda *args: self.seen.append((grid, args))


def test_metadata_is_made_only_while_a_profiler_listens(monkeypatch):
    compiled = Compiled()
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 77)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch.Launcher, "_compile", lambda self, *args: (compiled, (2, 8), ()))
    start = launch.Launcher()
    start(combine_gather, 5, (), (1,), lambda: ((2,), {"SENDS": 8}))
    assert compiled.seen == [("run", (5, 1, 1, 77, "of the kernel", "of the kernel", None, None, None, 1, 2, 8))]
    listen = knobs.runtime.launch_enter_hook
    listen.add(print)
    try:
        start(combine_gather, 5, (), (1,), lambda: ((2,), {"SENDS": 8}))
    finally:
        listen.remove(print)
    assert compiled.seen[1] == ((5, 1, 1), (1, 2, 8))
