"""expertwire: expert-parallel dispatch and combine for Mixture-of-Experts models.

buf = ew.Buffer(group, num_experts=64, hidden=1024, num_topk=4, num_max_tokens_per_rank=256)
sent = buf.dispatch(x, topk_idx, topk_weights, layout=ew.Layout.EXPERT_MAJOR)
back = buf.combine(experts(sent.x, sent.num_tokens_per_expert), sent.handle)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from expertwire.buffer import Buffer, Statistics
    from expertwire.errors import (
        BufferClosed,
        ExpertWireError,
        GroupMismatch,
        HandleError,
        InFlightError,
        InvalidArgument,
        PeerError,
        PeerLost,
        PeerMasked,
        PeerRefused,
        PeerTimeout,
        TransportBroken,
        TransportUnavailable,
        WorldAborted,
    )
    from expertwire.formats import BF16, FP8Block, LogFMT10
    from expertwire.handle import Combined, Dispatched, Handle
    from expertwire.layouts.receive import Layout
    from expertwire.topology import Placement
    from expertwire.world import World

_HOMES = {
    "expertwire.buffer": ("Buffer", "Statistics"),
    "expertwire.formats": ("BF16", "FP8Block", "LogFMT10"),
    "expertwire.handle": ("Combined", "Dispatched", "Handle"),
    "expertwire.layouts.receive": ("Layout",),
    "expertwire.topology": ("Placement",),
    "expertwire.world": ("World",),
}
__all__ = [
    "BF16",
    "Buffer",
    "BufferClosed",
    "Combined",
    "Dispatched",
    "ExpertWireError",
    "FP8Block",
    "GroupMismatch",
    "Handle",
    "HandleError",
    "InFlightError",
    "InvalidArgument",
    "Layout",
    "LogFMT10",
    "PeerError",
    "PeerLost",
    "PeerMasked",
    "PeerRefused",
    "PeerTimeout",
    "Placement",
    "Statistics",
    "TransportBroken",
    "TransportUnavailable",
    "World",
    "WorldAborted",
]

_HOME_OF = dict.fromkeys(__all__, "expertwire.errors") | {
    name: home for home, names in _HOMES.items() for name in names
}


def __getattr__(name: str) -> Any:
    """Names are resolved when they are first used, so that the import loads neither torch nor a kernel compiler."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'expertwire' has no attribute {name!r}")
    return globals().setdefault(name, getattr(importlib.import_module(_HOME_OF[name]), name))


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
