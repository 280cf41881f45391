"""A GPU's Buffer on CPU memory, with kernels in the interpreter: one process per rank."""

import weakref

from device_checks import CAPACITY, EXPERTS, HIDDEN, TOPK
from interpreted import SharedFiles, use_interpreter

from expertwire._check import Settings
from expertwire.buffer import Buffer
from expertwire.topology import Placement
from expertwire.transports.shm import Shm
from expertwire.world import bootstrap


def interpreted_buffer(
    group, placement=None, *, capacity=CAPACITY, hidden=HIDDEN, num_topk=TOPK, on_timeout="raise", validate=True,
    num_sms=4, **options,
):  # fmt: skip
    """What `Buffer` makes of device="cuda", but for the memory. `options` are the engine's."""
    use_interpreter()
    from expertwire.kernels.engine import DeviceEngine
    from expertwire.kernels.launch import Launcher
    from expertwire.kernels.meeting import MEETING_BYTES, Meeting
    from expertwire.kernels.runtime import DeviceRuntime

    class PreparedLauncher(Launcher):
        """No kernel is compiled while a peer may be waiting: all that Triton compiles one for was prepared before."""

        def _interpret(self, kernel, grid, key, changing, rest):
            types = tuple(arg.dtype if hasattr(arg, "dtype") else type(arg) for arg in (*changing, *rest[0]))
            compiled_for = (kernel.fn, types, tuple(rest[1].items()))
            prepared = self.__dict__.setdefault("prepared", set())
            if self.compiling:
                prepared.add(compiled_for)
            assert compiled_for in prepared, f"{kernel.fn.__name__} is compiled in a call: {compiled_for[1:]}"
            super()._interpret(kernel, grid, key, changing, rest)

    memory = SharedFiles(group)
    placement = placement or Placement.contiguous(EXPERTS, memory.num_ranks)
    engine = DeviceEngine(
        memory, placement, capacity=capacity, hidden=hidden, num_topk=num_topk, num_banks=2, num_sms=num_sms,
        timeout_us=1, **options,
    )  # fmt: skip
    engine.launch.__class__ = PreparedLauncher
    meeting = Meeting(Shm(bootstrap(group), MEETING_BYTES, MEETING_BYTES)) if memory.num_ranks > 1 else None
    buf = object.__new__(Buffer)
    buf.rank, buf.num_ranks, buf._handles, buf._closed = memory.rank, memory.num_ranks, weakref.WeakSet(), False
    buf.settings = Settings(
        num_experts=placement.num_experts, hidden=hidden, num_topk=num_topk, num_max_tokens_per_rank=capacity,
        max_in_flight=2, device="cpu", transport="files", on_timeout=on_timeout, placement=placement,
    )  # fmt: skip
    runtime = DeviceRuntime(
        engine, memory, 60.0, meeting=meeting, mask_peers=on_timeout != "raise", end_late=on_timeout == "end"
    )
    buf._use(runtime, validate=validate)
    buf.combine_input = buf._combine.inputs  # refused where device is "cpu"
    return buf
