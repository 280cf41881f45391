"""A GPU's Buffer on CPU memory, with kernels in the interpreter: one process per rank."""

import weakref

from device_checks import CAPACITY, EXPERTS, HIDDEN, TOPK
from interpreted import SharedFiles, use_interpreter

from expertwire._check import Settings
from expertwire.buffer import Buffer
from expertwire.topology import Placement
from expertwire.transports.shm import Shm
from expertwire.world import bootstrap


def interpreted_buffer(group, placement=None, on_timeout="raise", over_rows=False, debug_poison=False):
    """What `Buffer` makes of device="cuda", but for the memory."""
    use_interpreter()
    from expertwire.kernels.engine import DeviceEngine
    from expertwire.kernels.meeting import MEETING_BYTES, Meeting
    from expertwire.kernels.runtime import DeviceRuntime

    memory = SharedFiles(group)
    placement = placement or Placement.contiguous(EXPERTS, memory.num_ranks)
    engine = DeviceEngine(
        memory,
        placement,
        capacity=CAPACITY,
        hidden=HIDDEN,
        num_topk=TOPK,
        num_banks=2,
        num_sms=4,
        timeout_us=1,
        over_rows=over_rows,
        debug_poison=debug_poison,
    )
    meeting = Meeting(Shm(bootstrap(group), MEETING_BYTES, MEETING_BYTES)) if memory.num_ranks > 1 else None
    buf = object.__new__(Buffer)
    buf.rank, buf.num_ranks, buf._handles, buf._closed = memory.rank, memory.num_ranks, weakref.WeakSet(), False
    buf.settings = Settings(
        num_experts=EXPERTS, hidden=HIDDEN, num_topk=TOPK, num_max_tokens_per_rank=CAPACITY, max_in_flight=2,
        device="cpu", transport="files", on_timeout=on_timeout, placement=placement,
    )  # fmt: skip
    runtime = DeviceRuntime(
        engine, memory, 60.0, meeting=meeting, mask_peers=on_timeout != "raise", end_late=on_timeout == "end"
    )
    buf._use(runtime, validate=True)
    buf.combine_input = buf._combine.inputs  # refused where device is "cpu"
    return buf
