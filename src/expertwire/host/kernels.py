"""The row work that the host engine needs, and the choice of who does it: numba, or numpy and torch without it."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Protocol

from numpy.typing import NDArray

from expertwire.errors import ExpertWireError, TransportUnavailable

Array = NDArray[Any]


class Kernels(Protocol):
    """What `compiled` (numba) and `plain` (numpy, torch, ctypes) both provide; `host.rows` documents each function."""

    def warm_up(self) -> None: ...
    def wait_word(self, address: int, word: int, spins: int, yields: int, naps: int) -> int: ...
    def publish(self, address: int, word: int) -> None: ...
    def read_word(self, address: int) -> int: ...
    def route(
        self, topk_idx: int, weights: int, num_tokens: int, num_topk: int, expert_rank: Array, expert_local: Array,
        num_ranks: int, distinct: bool,
    ) -> tuple[Array, Array, Array, Array, int, int]: ...  # fmt: skip
    def first_illegal(self, topk_idx: Array, num_experts: int) -> tuple[int, int]: ...
    def first_repeat(self, topk_idx: Array) -> tuple[int, int]: ...
    def move_rows(self, source: Array, destination: Array, num_bytes: int, stream: bool) -> None: ...
    def gather_rows(self, source: int, tokens: Array, out: int, stride: int, num_bytes: int, stream: bool) -> None: ...
    def place_rows(
        self, first: Array, stride: int, offsets: Array, own: int, tokens: Array, rows: Array, out: int, num_bytes: int,
        stream: bool,
    ) -> None: ...  # fmt: skip
    def scatter_rows(
        self, source: Array, tokens: Array, records: int, stride: int, num_bytes: int, stream: bool
    ) -> None: ...
    def outgoing_rows(self, rows: Array, y: int, num_bytes: int, offsets: Array) -> tuple[Array, Array]: ...
    def expected_rows(
        self, slots: Array, per_token: bool, brought: Array, records: int, apart: int, stride: int
    ) -> tuple[Array, int, bool]: ...
    def overlay_rows(self, table: Array, tokens: Array, rows: Array, first: int, end: int) -> None: ...
    def write_routing(self, at: int, tokens: Array, rank: int, slots: Array, weights: Array) -> None: ...
    def read_routing(self, at: int, apart: int, offsets: Array, num_topk: int) -> tuple[Array, Array, Array]: ...
    def arrange(
        self, topk_idx: Array, num_local_experts: int, alignment: int, room: int, compact: bool
    ) -> tuple[Array, Array]: ...
    def reduce_rows(
        self,
        operands: Array,
        is_float32: bool,
        weights: Array,
        weighted: bool,
        biases: Array,
        out: int,
        hidden: int,
        stream: bool,
    ) -> None: ...
    def encode_fp8(
        self, x: int, num_rows: int, hidden: int, block: int, packed: bool, payload: int, sf: int, sf_stride: int
    ) -> None: ...
    def decode_fp8(
        self, payload: int, sf: int, num_rows: int, hidden: int, block: int, packed: bool, sf_stride: int, out: int
    ) -> None: ...
    def encode_logfmt(self, x: int, num_rows: int, hidden: int, payload: int, sf: int) -> None: ...
    def decode_logfmt(self, payload: int, sf: int, num_rows: int, hidden: int, out: int) -> None: ...


def numba_missing() -> str | None:
    """None if numba can be imported, else why not and what to do."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed: pip install 'expertwire[cpu]'"
    return None


def load(engine: str) -> Kernels:
    """The kernels named by `engine`: "numba", "torch", or "auto" for numba where it is installed."""
    if engine == "auto":
        engine = "torch" if numba_missing() else "numba"
    if engine == "torch":
        return importlib.import_module("expertwire.host.plain")
    reason = numba_missing()
    if reason:
        raise TransportUnavailable(f"engine='numba': {reason}, or pass engine='torch'")
    return importlib.import_module("expertwire.host.compiled")


def ready(engine: str) -> Kernels:
    """The same, compiled. TransportUnavailable, whatever it is that does not work here."""
    try:
        found = load(engine)
        found.warm_up()
    except ExpertWireError:
        raise
    except Exception as error:
        raise TransportUnavailable(
            f"engine={engine!r} does not work here: {error!r}; engine='torch' needs no compiler"
        ) from error
    return found
