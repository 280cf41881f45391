"""What a GPU's Buffer is made of, on CPU memory, with kernels in the interpreter: one process per rank."""

from types import SimpleNamespace

from device_checks import CAPACITY, COMPACT, EXPERTS, HIDDEN, TOPK
from interpreted import SharedFiles, use_interpreter

from expertwire._check import Settings
from expertwire.topology import Placement


def interpreted_buffer(group, placement=None):
    """Looks like a Buffer."""
    use_interpreter()
    from expertwire.device_autograd import DeviceGradients
    from expertwire.device_calls import DeviceDispatcher
    from expertwire.device_combine import DeviceCombiner
    from expertwire.device_steps import DeviceSteps
    from expertwire.kernels.engine import DeviceEngine
    from expertwire.kernels.runtime import DeviceRuntime

    memory = SharedFiles(group)
    placement = placement or Placement.contiguous(EXPERTS, memory.num_ranks)
    settings = Settings(
        num_experts=EXPERTS, hidden=HIDDEN, num_topk=TOPK, num_max_tokens_per_rank=CAPACITY, max_in_flight=2,
        device="cpu", transport="files", on_timeout="raise", placement=placement,
    )  # fmt: skip
    engine = DeviceEngine(
        memory, placement, capacity=CAPACITY, hidden=HIDDEN, num_topk=TOPK, num_banks=2, num_sms=4, spin_limit=1
    )

    class Interpreted(DeviceRuntime):
        def launch(self, kind, launches):
            if not self.rehearsing:
                launches()

    runtime, steps, owner = Interpreted(engine, memory, 60.0, 1e4), DeviceSteps(engine), object()
    steps.runtime = runtime
    gradients = DeviceGradients(settings, runtime, steps)
    dispatcher = DeviceDispatcher(owner, settings, runtime, steps, gradients, validate=True, raise_if_full=lambda: None)
    combiner = DeviceCombiner(owner, settings, runtime, steps, gradients)

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

    return SimpleNamespace(
        dispatch=dispatch, combine=combine, combine_input=combiner.inputs, rank=memory.rank,
        num_ranks=memory.num_ranks, settings=settings, engine=engine, runtime=runtime,
    )  # fmt: skip
