"""The calls that a GPU's Buffer makes, with kernels in the interpreter and one process per rank."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from device_checks import CAPACITY, COMPACT, EXPERTS, HIDDEN, MAJOR, SLOTS, TOPK, check_rank
from interpreted import SharedFiles, use_interpreter

from expertwire._check import Settings
from expertwire.buffer import Buffer
from expertwire.formats import BF16, FP8Block
from expertwire.testing import Processes
from expertwire.topology import Placement

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def rank_work(group, layout, wire, options):
    use_interpreter()
    from expertwire.device_calls import DeviceDispatcher
    from expertwire.device_combine import DeviceCombiner
    from expertwire.device_steps import DeviceSteps
    from expertwire.kernels.engine import DeviceEngine
    from expertwire.kernels.runtime import DeviceRuntime

    memory = SharedFiles(group)
    placement = Placement.contiguous(EXPERTS, memory.num_ranks)
    settings = Settings(
        num_experts=EXPERTS, hidden=HIDDEN, num_topk=TOPK, num_max_tokens_per_rank=CAPACITY, max_in_flight=2,
        device="cpu", transport="files", on_timeout="raise", placement=placement,
    )  # fmt: skip
    engine = DeviceEngine(
        memory, placement, capacity=CAPACITY, hidden=HIDDEN, num_topk=TOPK, num_banks=2, num_sms=4, spin_limit=1
    )

    class Interpreted(DeviceRuntime):
        def launch(self, kind, launches):
            launches()

    runtime, steps, owner = Interpreted(engine, memory, 60.0, 1e4), DeviceSteps(engine), object()
    steps.runtime = runtime
    dispatcher = DeviceDispatcher(owner, settings, runtime, steps, validate=True, raise_if_full=lambda: None)
    combiner = DeviceCombiner(owner, settings, runtime, steps)

    def dispatch(
        x, topk_idx=None, topk_weights=None, *, handle=None, layout=COMPACT, expert_alignment=1, wire=None,
        counts="host", defer_receive=False, zero_copy=False,
    ):  # fmt: skip
        assert steps.failure is None
        return dispatcher(
            x, topk_idx, topk_weights, handle, layout, expert_alignment, wire, counts, defer_receive, zero_copy
        )

    def combine(x, handle, *, topk_weights=None, bias=None, reduce="token", wire=None, defer_receive=False):
        return combiner(x, handle, topk_weights, bias, reduce, wire, defer_receive)

    buf = SimpleNamespace(
        dispatch=dispatch, combine=combine, rank=memory.rank, num_ranks=memory.num_ranks, settings=settings
    )
    check_rank(buf, layout, wire, steps=2, **options)
    if not options.get("deferred"):
        size = Buffer.size_hint(
            num_ranks=memory.num_ranks, hidden=HIDDEN, num_topk=TOPK, num_max_tokens_per_rank=CAPACITY, device="cuda",
            num_experts=EXPERTS, layout=layout, expert_alignment=options.get("alignment", 1), wire=wire,
        )  # fmt: skip
        inputs = engine.state.inputs(layout, options.get("alignment", 1)).region.total_bytes
        assert engine.state.total_bytes == size + 2 * inputs
    torch.distributed.barrier(group)


@pytest.fixture(scope="module")
def processes():
    with Processes(3) as crew:
        yield crew


CASES = [
    (SLOTS, FP8Block(), {"zero_copy": True, "counts": "device"}, 3),
    (MAJOR, BF16(), {"alignment": 4, "deferred": True}, 3),
    (COMPACT, FP8Block(scale="ue8m0"), {}, 3),
    (MAJOR, BF16(), {"counts": "device"}, 1),
]


@pytest.mark.parametrize(("layout", "wire", "options", "num_ranks"), CASES)
def test_device_calls(processes, layout, wire, options, num_ranks):
    processes.run(rank_work, layout, wire, options, num_ranks=num_ranks, timeout_s=120)
