"""The host's side of a rank on a device: time-outs, failures, and kernels that are compiled before anybody waits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from expertwire.errors import MissedSignal, PeerTimeout, TransportUnavailable
from expertwire.kernels.engine import DeviceEngine
from expertwire.kernels.state import DeviceMemory
from expertwire.protocols.epoch_signal import unpack

PHASES = {1: "dispatch send", 2: "dispatch receive", 3: "dispatch send", 4: "combine receive", 5: "combine receive"}
_MOST_SPINS = (1 << 31) - 1


class DeviceRuntime:
    """What `Buffer` needs of a device, under the names that `host.runtime.HostRuntime` has."""

    def __init__(
        self, engine: DeviceEngine, memory: DeviceMemory, timeout_s: float | None, spins_per_s: float | None = None,
        *, sharing: bool = True,
    ) -> None:  # fmt: skip
        """`sharing`: some ranks share a GPU."""
        self.engine, self.memory, self._sharing = engine, memory, sharing
        self.masked: set[int] = set()
        self.wait_s = np.zeros(engine.num_ranks)
        self.closed = False
        self._spins_per_s = spins_per_s or (engine.spins_per_second() if engine.num_ranks > 1 else 1e6)
        self._launched: set[Hashable] = set()
        self.rehearsing = False
        self._records = engine.state.mirror.numpy()
        self._clean = self._records.tobytes()
        self._pinned = torch.empty(0, dtype=torch.int32)
        self.timeout_s = timeout_s

    @property
    def timeout_s(self) -> float | None:
        """Waits in kernels are counted in looks at a word: None is as many as can be counted, about half an hour."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float | None) -> None:
        self._timeout_s = value
        spins = _MOST_SPINS if value is None else max(1, int(value * self._spins_per_s))
        self.engine.spin_limit = min(spins, _MOST_SPINS)

    def launch(self, kind: str | tuple[object, ...], launches: Callable[[], None]) -> None:
        """Run `launches`. The first time for a kind, kernels are compiled and loaded before. Where ranks share a GPU
        they then meet: loading waits for the GPU, where another rank's kernel may wait for this rank. Collective then,
        so a kind says only what is the same on all ranks."""
        if kind not in self._launched:
            if torch.cuda.is_current_stream_capturing():
                raise TransportUnavailable(
                    f"rank {self.engine.rank}: this kind of call cannot be captured before it has run once, since its "
                    "kernels must be compiled and its memory shared: call it once outside of the capture"
                )
            self.engine.launch.compiling = True
            try:
                launches()
            finally:
                self.engine.launch.compiling = False
            if self._sharing and self.engine.num_ranks > 1:
                self.engine.state.meet("kernels", kind if isinstance(kind, str) else kind[0])
            self._launched.add(kind)
        if not self.rehearsing:
            launches()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside, kernels are compiled, not started."""
        self.rehearsing = True
        try:
            yield
        finally:
            self.rehearsing = False

    def read(self, values: torch.Tensor) -> list[int]:
        """int32 values of the device, once everything launched before is done. PeerTimeout if a kernel gave up."""
        size = values.numel()
        if self._pinned.numel() < size:
            self._pinned = torch.zeros(size, dtype=torch.int32, pin_memory=values.is_cuda)
        self.launch(("export", size), lambda: self.engine.export(values, self._pinned))
        if values.is_cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            done.synchronize()
        self.raise_if_failed()
        return [int(n) for n in self._pinned[:size].tolist()]

    def raise_if_failed(self) -> None:
        """PeerTimeout if a kernel gave up waiting. Looks at host memory only; complete after a synchronisation."""
        if self._records.tobytes() == self._clean:
            return
        missed, phase, spins = [], "dispatch send", 0
        for peer, (code, wanted, seen, looks) in enumerate(self._records.tolist()):
            if code:
                missed.append(MissedSignal(peer, unpack(wanted)[0], *unpack(seen), alive=None))
                phase, spins = PHASES[code], looks
        hint = "If the ranks are only slow (compiling, loading), raise buf.timeout_s."
        raise PeerTimeout(self.engine.rank, phase, missed, spins / self._spins_per_s, hint)

    def broken_guards(self) -> list[int]:
        """Device windows have no guards."""
        return []

    def close(self) -> None:
        """Forget the windows, once this rank's kernels are done with them."""
        if not self.closed:
            self.closed = True
            torch.cuda.synchronize(self.engine.state.device)
            self.memory.close()
