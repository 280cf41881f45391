"""What a caller may pass: every rule that is checked before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from expertwire.errors import InvalidArgument
from expertwire.formats import BF16, FP8Block, WireFormat
from expertwire.layouts.receive import Layout
from expertwire.layouts.rows import DispatchRow, max_combine_bytes, max_data_bytes
from expertwire.protocols.epoch_signal import MAX_COUNT
from expertwire.topology import Placement

MAX_TOPK = 64
MAX_EXPERTS = 1 << 16


@dataclass(frozen=True)
class Settings:
    """What all ranks of a buffer must agree on."""

    num_experts: int
    hidden: int
    num_topk: int
    num_max_tokens_per_rank: int
    max_in_flight: int
    device: str
    transport: str
    on_timeout: str
    placement: Placement
    combine_input: str = "apart"


def integer(name: str, value: object, low: int, high: int, rank: int | None = None) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgument(f"{_of(rank)}{name} must be an int, got {value!r}")
    if not low <= value <= high:
        raise InvalidArgument(f"{_of(rank)}{name} must be in [{low}, {high}], got {value}")
    return value


def choice(name: str, value: object, allowed: tuple[object, ...], rank: int | None = None) -> None:
    if value not in allowed:
        raise InvalidArgument(f"{_of(rank)}{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _of(rank: int | None) -> str:
    return "" if rank is None else f"rank {rank}: "


def shape(num_experts: Any, hidden: Any, num_topk: Any, num_max_tokens_per_rank: Any, max_in_flight: Any) -> None:
    """The sizes that a buffer is created with."""
    integer("num_experts", num_experts, 1, MAX_EXPERTS)
    integer("num_topk", num_topk, 1, MAX_TOPK)
    integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 1, MAX_COUNT // num_topk)
    integer("max_in_flight", max_in_flight, 1, 64)
    integer("hidden", hidden, 1, 1 << 20)
    if hidden % 8:
        below, above = hidden // 8 * 8, hidden // 8 * 8 + 8
        near = f"{above}" if below == 0 else f"{below} and {above}"
        raise InvalidArgument(
            f"hidden must be a multiple of 8, so that a bfloat16 row is whole 16-byte pieces: got {hidden}, "
            f"the nearest legal is {near}"
        )


CPU = torch.device("cpu")


def _fits(shape: torch.Size, dims: tuple[int | None, ...]) -> bool:
    if dims[0] is None and shape[1:] == dims[1:]:
        return len(shape) > 0
    return len(shape) == len(dims) and not [d for d, n in zip(dims, shape, strict=True) if d is not None and d != n]


def tensor(
    rank: int,
    name: str,
    value: Any,
    dtypes: tuple[torch.dtype, ...] | None,
    dims: tuple[int | None, ...],
    meaning: str = "{}",
    device: torch.device = CPU,
) -> torch.Tensor:
    """A contiguous tensor on `device`, of one of `dtypes` (None: any) and of shape `dims` (None: any size), which
    errors describe by `meaning`, with `dims` in place of {}."""
    if not isinstance(value, torch.Tensor):
        problem = f"be a tensor {meaning.format(list(dims))}, got {type(value).__name__}"
    elif dtypes is not None and value.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        problem = f"have dtype {names}, got {str(value.dtype).removeprefix('torch.')}"
    elif value.device != device:
        problem = f"be on the buffer's device {str(device)!r}, got {str(value.device)!r}"
    elif value.layout is not torch.strided:
        problem = f"be a dense tensor, got {value.layout}"
    elif value.shape != dims and not _fits(value.shape, dims):
        problem = f"have shape {meaning.format(list(dims))}, got {list(value.shape)}"
    elif not value.is_contiguous():
        problem = f"be contiguous, got strides {value.stride()}; pass {name}.contiguous()"
    elif dtypes is None and value.is_conj():
        problem = f"hold its values, got a conjugate view, whose memory holds others; pass {name}.resolve_conj()"
    else:
        return value
    raise InvalidArgument(f"rank {rank}: {name} must {problem}")


def tokens(rank: int, name: str, num_tokens: int, capacity: int) -> None:
    if num_tokens > capacity:
        raise InvalidArgument(
            f"rank {rank}: {name} has {num_tokens} tokens, but the buffer was created with "
            f"num_max_tokens_per_rank={capacity}; split the batch or create a larger buffer"
        )


def dispatch_options(rank: int, layout: object, expert_alignment: object, counts: object, wire: object) -> Layout:
    """The layout, which may be given by its name."""
    if not isinstance(layout, Layout):
        choice("layout", layout, tuple(Layout), rank)
        layout = Layout(str(layout))
    choice("counts", counts, ("host", "device"), rank)
    integer("expert_alignment", expert_alignment, 1, 1 << 20, rank)
    if wire is not None and not isinstance(wire, (BF16, FP8Block)):
        raise InvalidArgument(f"rank {rank}: wire must be None, ew.BF16() or ew.FP8Block(...), got {wire!r}")
    return layout


def repeat(
    rank: int, num_tokens: int, handle_tokens: int, topk_idx: object, topk_weights: object, *, zero_copy: bool
) -> None:
    """A dispatch with a handle."""
    if topk_idx is not None or topk_weights is not None:
        raise InvalidArgument(f"rank {rank}: pass either handle or topk_idx and topk_weights, not both")
    if zero_copy:
        raise InvalidArgument(f"rank {rank}: zero_copy is not offered together with handle")
    if num_tokens != handle_tokens:
        raise InvalidArgument(f"rank {rank}: x has {num_tokens} tokens, its handle {handle_tokens}")


def combine_wire(rank: int, wire: object, hidden: int) -> WireFormat:
    if wire is None:
        return BF16()
    if isinstance(wire, BF16):
        return wire
    if not isinstance(wire, WireFormat):  # looks at every method
        raise InvalidArgument(f"rank {rank}: wire must be None or a wire format such as ew.LogFMT10(), got {wire!r}")
    if wire.payload_bytes(hidden) + wire.sf_bytes(hidden) > max_combine_bytes(hidden):
        raise InvalidArgument(f"rank {rank}: a row of {wire} is larger than a bfloat16 row with its metadata")
    return wire


def aligned(rank: int, name: str, value: torch.Tensor) -> None:
    """On a GPU, whose kernels are compiled for that."""
    if value.data_ptr() % 16:
        raise InvalidArgument(f"rank {rank}: {name} must begin at a multiple of 16 bytes; pass {name}.clone()")


def row_fits(rank: int, payload_bytes: int, sf_bytes: int, hidden: int) -> None:
    data_bytes = DispatchRow(payload_bytes, sf_bytes).data_bytes
    if data_bytes > max_data_bytes(hidden):
        raise InvalidArgument(
            f"rank {rank}: a row of {payload_bytes} payload and {sf_bytes} scale bytes needs {data_bytes} bytes, but "
            f"the buffer (hidden={hidden}) has room for {max_data_bytes(hidden)}"
        )


def differentiable_rows(rank: int, x: torch.Tensor | None, wire: WireFormat | None, zero_copy: bool) -> None:
    """A dispatch with an input that needs gradients; x is None for opaque rows."""
    if zero_copy:
        raise InvalidArgument(
            f"rank {rank}: zero_copy rows are overwritten before a backward pass could read them, but an input "
            "requires gradients; pass zero_copy=False, or detach it"
        )
    if x is not None and x.requires_grad and isinstance(wire, FP8Block) and not wire.decode:
        raise InvalidArgument(
            f"rank {rank}: x requires gradients, but FP8 rows cannot carry them; use FP8Block(..., decode=True), "
            "which returns bfloat16 rows, or detach x"
        )


def bad_id(rank: int, token: int, slot: int, expert: int, num_experts: int) -> InvalidArgument:
    """The error of an id that is none or, in EXPERT_SLOTS, of one that its token has named before."""
    problem = (
        "repeats an expert of the same token; EXPERT_SLOTS has room for distinct experts only (use EXPERT_MAJOR, or -1 "
        "in the later slot)"
    )
    if not 0 <= expert < num_experts:
        problem = f"is no expert: ids must be in [0, {num_experts}), or -1 for no selection"
    return InvalidArgument(f"rank {rank}: topk_idx[{token}, {slot}] = {expert} {problem}")


def timeout(value: object) -> None:
    if value is not None and not (isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0):
        raise InvalidArgument(f"timeout_s must be a positive number of seconds or None, got {value!r}")


def placement(value: object, num_experts: int, num_ranks: int) -> None:
    if not isinstance(value, Placement):
        raise InvalidArgument(f"placement must be an ew.Placement, got {type(value).__name__}")
    if value.num_experts != num_experts:
        raise InvalidArgument(f"placement has {value.num_experts} experts, but num_experts={num_experts}")
    if max(value.expert_ranks) >= num_ranks:
        raise InvalidArgument(f"placement names rank {max(value.expert_ranks)}, but the group has {num_ranks} ranks")
