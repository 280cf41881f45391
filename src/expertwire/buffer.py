"""`Buffer`: dispatch and combine for one group of ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch

from expertwire import _check
from expertwire._check import Settings
from expertwire.agreement import agree
from expertwire.call import Context
from expertwire.combine import Combiner
from expertwire.dispatch import Dispatcher
from expertwire.engines import ENGINES, device_runtime, device_transport_name, host_engine, transport_name
from expertwire.errors import (
    BufferClosed,
    ExpertWireError,
    InFlightError,
    InvalidArgument,
    TransportUnavailable,
)
from expertwire.formats import BF16, WireFormat
from expertwire.handle import Combined, Dispatched, Handle
from expertwire.host import kernels
from expertwire.layouts.device_window import device_bytes
from expertwire.layouts.receive import Layout
from expertwire.layouts.window import WindowLayout
from expertwire.steps import Steps
from expertwire.topology import Placement
from expertwire.transports.base import Bootstrap
from expertwire.world import bootstrap, device_unavailable

_EVERYTHING = tuple({"layout": layout, "counts": counts} for layout in Layout for counts in ("host", "device"))
Tensors = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Statistics:
    """Totals of one rank since its buffer was created, per peer (index = rank; the own rank is included).

    rows_sent, rows_received   dispatch rows, one per (token, rank)
    bytes_sent                 bytes of dispatch and combine records for each peer; own rows may not have been copied
    wait_s                     seconds this rank was blocked on the peer after all peers asked before it had signalled:
                               elapsed time, never counted twice, so a peer that is in time shows none
    dropped_selections         selections that counted as -1: repeats in EXPERT_SLOTS, illegal ids, if not checked

    On a GPU bytes_sent and wait_s are None, not counted, and a repeated routing that was refused counts as sent.
    """

    rows_sent: tuple[int, ...]
    rows_received: tuple[int, ...]
    bytes_sent: tuple[int, ...] | None
    wait_s: tuple[float, ...] | None
    dropped_selections: int


class Buffer:
    """Dispatch and combine for one group of ranks. Creation is collective: all ranks, same settings.

    group                     a rank of `ew.World`, or a torch.distributed process group
    num_experts, num_topk     of the router; experts need not divide by ranks
    hidden                    width of a row; a multiple of 8
    num_max_tokens_per_rank   capacity: the most tokens that a rank may dispatch at once
    device                    "cpu", or "cuda" for the current GPU (docs/gpu.md says what is not offered there yet)
    transport                 "auto", "inproc" (ranks of a World), "shm" (processes of one host); on GPUs processes
                              have "cuda_ipc" (the default) or "symm_mem" (a GPU for each rank)
    placement                 expert -> rank, default `Placement.contiguous`
    max_in_flight             handles that may be between dispatch and combine at once. Windows are used in turn: a
                              dispatch that is held (not received, or zero-copy views not given back) holds up the
                              `max_in_flight`-th dispatch after it, with InFlightError
    timeout_s, on_timeout     longest wait for peers, None = for ever (on a GPU 35 minutes, the most); then "raise"
                              PeerTimeout, or "mask" them: skip them from then on. A peer whose process has ended is
                              noticed at once. On a GPU after `timeout_s`, all raise PeerMasked once, and ranks that
                              have left are masked; "end" first ends the process of one that does not come (SIGKILL).
                              See docs/gpu.md
    validate                  check that ids are in range, and distinct for EXPERT_SLOTS; on a GPU only with
                              counts="host": with "device" such ids are dropped, and counted in `statistics`
    debug_poison              fill windows and unused rows with NaN, and check guards at close
    engine                    row work: "auto", "numba" or "torch"; on GPUs "auto" or "triton"
    combine_input             GPUs only: whether the memory of that method is "apart", or "over_rows": that of the
                              handle's zero-copy rows, which takes half the room. Then x and sf must have been read
                              before the experts' output is written, or, if it is another tensor, given to combine
    num_sms                   GPUs only: kernels that move rows are one block on each of so many SMs; None = no budget

    One thread at a time may use a buffer.

    Before memory is taken, raises on every rank if one rank's settings are illegal (InvalidArgument there, PeerRefused
    elsewhere) or differ (GroupMismatch), or if the transport or engine does not work there (TransportUnavailable).
    Creation waits for ranks that have not come as long as the process group's own time-out.
    """

    def __init__(
        self,
        group: object,
        *,
        num_experts: int,
        hidden: int,
        num_topk: int,
        num_max_tokens_per_rank: int,
        device: str = "cpu",
        transport: str = "auto",
        placement: Placement | None = None,
        max_in_flight: int = 2,
        timeout_s: float | None = 100.0,
        on_timeout: Literal["raise", "mask", "end"] = "raise",
        validate: bool = True,
        debug_poison: bool = False,
        engine: str = "auto",
        combine_input: Literal["apart", "over_rows"] = "apart",
        num_sms: int | None = None,
    ) -> None:
        ranks = bootstrap(group)
        self.rank, self.num_ranks = ranks.rank, ranks.num_ranks

        def settings() -> Settings:
            _check.shape(num_experts, hidden, num_topk, num_max_tokens_per_rank, max_in_flight)
            on_device = device != "cpu"
            _check.choice("on_timeout", on_timeout, ("raise", "mask", *(["end"] if on_device else [])))
            _check.choice("combine_input", combine_input, ("apart", *(["over_rows"] if on_device else [])))
            _check.choice("engine", engine, ENGINES)
            _check.timeout(timeout_s)
            _device_options(device, engine, num_sms)
            experts = Placement.contiguous(num_experts, ranks.num_ranks) if placement is None else placement
            _check.placement(experts, num_experts, ranks.num_ranks)
            if not on_device:
                kernels.ready(engine)
            return Settings(
                num_experts=num_experts,
                hidden=hidden,
                num_topk=num_topk,
                num_max_tokens_per_rank=num_max_tokens_per_rank,
                max_in_flight=max_in_flight,
                device="cuda" if on_device else "cpu",  # each rank's current GPU, whose number may differ
                transport=(device_transport_name if on_device else transport_name)(transport, ranks),
                on_timeout=on_timeout,
                placement=experts,
                combine_input=combine_input,
            )

        self.settings = agree(ranks, settings)
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._closed = False
        self._engine: Any
        self._steps: Any
        self._dispatch: Any
        self._combine: Any
        if device != "cpu":
            self._on_device(ranks, timeout_s, validate=validate, num_sms=num_sms, debug_poison=debug_poison)
            return
        self._engine = host_engine(
            ranks,
            self.settings.transport,
            WindowLayout(
                ranks.num_ranks, num_max_tokens_per_rank, hidden, num_topk, max_in_flight, on_timeout == "mask"
            ),
            self.settings.placement,
            row_work=kernels.load(engine),
            timeout_s=timeout_s,
            mask_peers=on_timeout == "mask",
            debug_poison=debug_poison,
        )
        self._steps = Steps(self._engine)
        context = Context(self, self.settings, self._steps, validate, self._raise_if_full)
        self._dispatch, self._combine = Dispatcher(context), Combiner(context)

    def _on_device(
        self, ranks: Bootstrap, timeout_s: float | None, *, validate: bool, num_sms: int | None, debug_poison: bool
    ) -> None:
        """The same parts for a GPU; what they are called here is what they answer to on the CPU."""
        from expertwire.device_calls import rehearse

        s = self.settings
        runtime = device_runtime(
            ranks, s.transport, s.device, s.placement, capacity=s.num_max_tokens_per_rank, hidden=s.hidden,
            num_topk=s.num_topk, num_banks=s.max_in_flight, timeout_s=timeout_s,
            mask_peers=s.on_timeout != "raise", end_late=s.on_timeout == "end", num_sms=num_sms,
            over_rows=s.combine_input == "over_rows", debug_poison=debug_poison,
        )  # fmt: skip
        rehearse(runtime.engine.state.device)
        ranks.all_gather(None)
        self._use(runtime, validate=validate)

    def _use(self, runtime: Any, *, validate: bool) -> None:
        from expertwire.device_autograd import DeviceGradients
        from expertwire.device_calls import DeviceDispatcher
        from expertwire.device_combine import DeviceCombiner
        from expertwire.device_steps import DeviceSteps

        self._engine = _OnDevice(runtime)
        self._steps = DeviceSteps(runtime)
        self._steps.handles = self._handles
        gradients = DeviceGradients(self.settings, runtime, self._steps)
        self._dispatch = DeviceDispatcher(
            self, self.settings, runtime, self._steps, gradients, validate=validate, raise_if_full=self._raise_if_full
        )
        self._combine = DeviceCombiner(self, self.settings, runtime, self._steps, gradients)

    # -- the two operations --------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: torch.Tensor | Tensors,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        handle: Handle | None = None,
        layout: Layout = Layout.COMPACT,
        expert_alignment: int = 1,
        wire: WireFormat | None = None,
        counts: Literal["host", "device"] = "host",
        defer_receive: bool = False,
        zero_copy: bool = False,
    ) -> Dispatched:
        """Send every token's row to the ranks of its experts. Collective; T may be 0 and differ between ranks.

        x                  [T, hidden] bfloat16; or a tuple (payload [T, W], scale factors [T, S]) of any dtype, whose
                           bytes travel as they are. On a GPU x, or the payload, begins at a multiple of 16 bytes
        topk_idx           [T, num_topk] int32 or int64 expert ids, -1 = no selection; a token may name an expert twice
        topk_weights       [T, num_topk] float32; combine of an EXPERT_* layout weights by them. On a GPU it reads them
                           then: leave them as they are until it is done
        handle             repeat the routing of an earlier dispatch in place of the two; its layout, alignment and kind
                           of counts hold again
        layout, expert_alignment   how received rows are arranged, see `Layout`
        wire               None or BF16(), or FP8Block(): how x travels and, unless its `decode`, arrives
        counts             "host": exact shapes and host lists; "device": worst-case shapes, valid rows are a prefix
        defer_receive      send only; the record's hook() receives, and x may be overwritten meanwhile
        zero_copy          place rows into memory of the buffer, valid until the handle is finished

        Raises InvalidArgument here and PeerRefused on all peers if this rank's arguments are illegal, GroupMismatch on
        all if ranks make different calls; the call is then void and the next one works. Raises PeerTimeout, PeerLost,
        PeerMasked, InFlightError, HandleError, BufferClosed. On a GPU ranks may learn of it later, see `synchronize`.
        """
        self._raise_if_unusable()
        record: Dispatched = self._dispatch(
            x, topk_idx, topk_weights, handle, layout, expert_alignment, wire, counts, defer_receive, zero_copy
        )
        if handle is None:
            self._handles.add(record.handle)
        return record

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        *,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | Tensors | None = None,
        reduce: Literal["token", "rank"] = "token",
        wire: WireFormat | None = None,
        defer_receive: bool = False,
    ) -> Combined:
        """Bring the experts' rows back and sum them per token, in float32, in a fixed order, rounded once. Collective.

        x              bfloat16, of the shape that the dispatch of `handle` returned; unused rows are not read
        topk_weights   COMPACT only, [rows, num_topk] float32: also return these to the slots they belong to
        bias           one or two [T, hidden] bfloat16, added before the rows
        reduce         EXPERT_* only: "token" sums rows in ascending slots; "rank" sums each rank's rows there, rounds,
                       and sends one row per (token, rank), which is less traffic
        wire           None, or LogFMT10() and the like: how rows travel
        defer_receive  send only; the record's hook() receives, and x may be overwritten meanwhile, unless rows are
                       weighted and a backward pass follows, which raises then

        EXPERT_* rows are weighted by the topk_weights given to dispatch, COMPACT rows are not. On a GPU x, topk_weights
        and bias begin at multiples of 16 bytes. Raises as dispatch does.
        """
        self._raise_if_unusable()
        record: Combined = self._combine(x, handle, topk_weights, bias, reduce, wire, defer_receive)
        return record

    def combine_input(self, handle: Handle) -> torch.Tensor:
        """Memory of the buffer, shaped as combine wants x of this handle: rows written there are read in place.

        GPUs only, where it saves a copy between processes. Valid until combine has finished. Collective the first time.
        With combine_input="over_rows" HandleError, unless the dispatch was zero-copy and is not finished.
        """
        self._raise_if_unusable()
        if self.settings.device == "cpu":
            raise TransportUnavailable("combine_input is offered on GPUs only; on the CPU pass any tensor to combine")
        found: torch.Tensor = self._combine.inputs(handle)
        return found

    def warmup(self, *calls: Mapping[str, Any], progress: Callable[[int, int], None] | None = None) -> None:
        """Make every kernel and all memory ready that calls of these kinds need, so that the first of them takes no
        longer than the others and, on a GPU, can be captured. Collective.

        calls      keyword arguments of dispatch, such as {"layout": Layout.EXPERT_SLOTS, "wire": FP8Block(), "counts":
                   "device"}; without any: every layout, bfloat16, counts on the host and on the device
        progress   is told (kinds done, kinds) after each

        Runs a dispatch of no tokens and its combine for each, with int64 ids and with weights.
        """
        device, calls = self.settings.device, calls or _EVERYTHING
        for call in calls:
            if not isinstance(call, Mapping):
                raise InvalidArgument(
                    f"rank {self.rank}: warmup takes keyword arguments of dispatch, such as {{'layout': "
                    f"Layout.EXPERT_MAJOR}}, got {call!r}"
                )
        x = torch.empty(0, self.settings.hidden, dtype=torch.bfloat16, device=device)
        ids = torch.empty(0, self.settings.num_topk, dtype=torch.int64, device=device)
        weights = torch.empty(0, self.settings.num_topk, device=device)
        for done, call in enumerate(calls, 1):
            deferred = bool(call.get("defer_receive"))
            sent = self.dispatch(x, ids, weights, **call)
            sent = sent.hook() if sent.hook else sent
            y = torch.empty(*sent.x.shape[:-1], self.settings.hidden, dtype=torch.bfloat16, device=device)
            back = self.combine(y, sent.handle, defer_receive=deferred)
            if back.hook:
                back.hook()
            if progress is not None:
                progress(done, len(calls))
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until this rank's calls are done, and raise what they met: on a GPU they return before that.

        There, PeerRefused, GroupMismatch and PeerTimeout are raised by the call only where it waits for the device
        (counts="host"), and else by a later call or by this one. The next call works after the first two.
        """
        self._raise_if_unusable()
        self._steps.synchronize()

    # -- settings and state --------------------------------------------------------------------------------------

    @property
    def timeout_s(self) -> float | None:
        """Longest wait for peers in one half of a call; may be changed between calls."""
        value: float | None = self._engine.runtime.timeout_s
        return value

    @timeout_s.setter
    def timeout_s(self, value: float | None) -> None:
        _check.timeout(value)
        self._engine.runtime.timeout_s = value

    @property
    def masked_ranks(self) -> tuple[int, ...]:
        """Peers that are skipped since they did not signal in time (`on_timeout="mask"`); on a GPU they have left."""
        masked: tuple[int, ...] = self._engine.runtime.masked_ranks
        return masked

    def statistics(self) -> Statistics:
        """Totals of this rank since its buffer was created. On a GPU this waits for the calls made so far."""
        engine = self._engine
        if isinstance(engine, _OnDevice):
            sent, received, dropped = engine.runtime.totals()
            return Statistics(tuple(sent), tuple(received), None, None, dropped)
        return Statistics(
            tuple(engine.rows_sent),
            tuple(engine.rows_received),
            tuple(engine.bytes_sent),
            tuple(float(s) for s in engine.runtime.wait_s),
            self._dispatch.dropped_selections,
        )

    @staticmethod
    def size_hint(
        *,
        num_ranks: int,
        hidden: int,
        num_topk: int,
        num_max_tokens_per_rank: int,
        max_in_flight: int = 2,
        on_timeout: Literal["raise", "mask", "end"] = "raise",
        device: str = "cpu",
        num_experts: int = 1,
        layout: Layout = Layout.COMPACT,
        expert_alignment: int = 1,
        wire: WireFormat | None = None,
        combine_input: Literal["apart", "over_rows"] | None = None,
    ) -> int:
        """Bytes of memory that one rank shares with its peers, exactly. Pure: needs no group and no device.

        On the CPU that is its window, and outputs into which peers put large dispatches directly; pages that no batch
        reaches take no memory. "mask" needs a larger window, since each writer gets its own combine records, and has no
        outputs.

        On GPUs rows land where the caller sees them, so memory is taken for the kinds of rows that are dispatched, when
        they first are: this is the size for one kind, with experts spread evenly. Copies of it are the caller's. With
        more than one rank it counts the rows that come back for combine, which ranks of a World only have once a
        combine was deferred; with `combine_input` also the memory of that method, or, "over_rows", in their place.
        `debug_poison` takes 256 bytes more for each piece of memory: the window, and each kind of rows in each bank.

        >>> Buffer.size_hint(num_ranks=8, hidden=7168, num_topk=8, num_max_tokens_per_rank=128)
        103454912
        >>> from expertwire import FP8Block
        >>> Buffer.size_hint(num_ranks=8, hidden=7168, num_topk=8, num_max_tokens_per_rank=128, max_in_flight=1,
        ...                  device="cuda", num_experts=256, layout=Layout.EXPERT_SLOTS, wire=FP8Block())
        257305600
        """
        _check.integer("num_ranks", num_ranks, 1, 1 << 20)
        _check.shape(num_experts, hidden, num_topk, num_max_tokens_per_rank, max_in_flight)
        _check.choice("device", device, ("cpu", "cuda"))
        _check.choice("on_timeout", on_timeout, ("raise", "mask", "end"))
        _check.choice("layout", layout, tuple(Layout))
        if device == "cpu":
            apart = on_timeout == "mask"
            shared = WindowLayout(num_ranks, num_max_tokens_per_rank, hidden, num_topk, max_in_flight, apart)
            return shared.total_bytes + shared.output_bytes
        _check.choice("combine_input", combine_input, (None, "apart", "over_rows"))
        wire = wire or BF16()
        return device_bytes(
            num_ranks=num_ranks,
            num_experts=num_experts,
            capacity=num_max_tokens_per_rank,
            num_topk=num_topk,
            num_banks=max_in_flight,
            layout=Layout(layout),
            alignment=expert_alignment if layout == Layout.EXPERT_MAJOR else 1,
            payload_bytes=wire.payload_bytes(hidden),
            sf_bytes=wire.sf_bytes(hidden),
            returned_bytes=2 * hidden,
            output_bytes=2 * hidden if combine_input else 0,
            over_rows=combine_input == "over_rows",
        )

    def _raise_if_unusable(self) -> None:
        if self._closed:
            raise BufferClosed(f"rank {self.rank}: this buffer is closed; create another one")
        failure = self._steps.failure
        if failure is not None:
            raise BufferClosed(
                f"rank {self.rank}: this buffer can no longer be used, since a call failed in the middle: {failure}"
            ) from failure

    def _raise_if_full(self) -> None:
        if len(self._handles) < self.settings.max_in_flight:
            return
        in_flight = [handle for handle in self._handles if not handle.finished]
        if len(in_flight) >= self.settings.max_in_flight:
            raise InFlightError(
                f"rank {self.rank}: {len(in_flight)} handles are in flight, and the buffer was created with "
                f"max_in_flight={self.settings.max_in_flight}; combine or release() one of them, or create the buffer "
                "with a larger max_in_flight"
            )

    # -- leaving -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the group. Every rank should; it may be called twice, waits for nobody, and never hangs.

        Peers that still wait for this rank learn that it left. Tensors that were returned stay valid.
        """
        if self._closed:
            return
        self._closed = True
        broken = self._engine.runtime.broken_guards()
        self._engine.runtime.close()
        if broken:
            raise ExpertWireError(f"rank {self.rank}: window guards at byte offsets {broken} were overwritten")

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        s = self.settings
        return (
            f"Buffer(rank {self.rank} of {self.num_ranks}, {s.transport}, {s.num_experts} experts, hidden {s.hidden}, "
            f"top-{s.num_topk}, up to {s.num_max_tokens_per_rank} tokens{', closed' if self._closed else ''})"
        )


@dataclass(frozen=True)
class _OnDevice:
    """Where the CPU has its engine."""

    runtime: Any


def _device_options(device: str, engine: str, num_sms: int | None) -> None:
    """Raise for what this device does not offer."""
    reason = device_unavailable(device)
    if reason:
        raise TransportUnavailable(f"device={device!r} does not work here: {reason}")
    on_device = device != "cpu"
    if engine != "auto" and (engine == "triton") != on_device:
        raise InvalidArgument(f"engine={engine!r} does not run on device={device!r}; use 'auto'")
    if num_sms is not None:
        _check.integer("num_sms", num_sms, 1, 1 << 10)
        if not on_device:
            raise InvalidArgument("num_sms is a setting of GPUs; leave it out on the CPU")
    if on_device and torch.cuda.is_current_stream_capturing():
        raise TransportUnavailable(
            "a buffer cannot be created while a graph is captured, since its memory is shared and zeroed at once; "
            "create it before"
        )
