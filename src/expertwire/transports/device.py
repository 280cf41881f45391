"""Device memory that the kernels of all ranks can address, as `kernels.state.DeviceMemory` wants it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch

from expertwire.errors import TransportUnavailable
from expertwire.transports.base import Bootstrap


class ProcessBootstrap(Bootstrap, Protocol):
    """A group whose ranks are processes."""

    @property
    def process_group(self) -> Any:
        """The torch.distributed group that it is made of."""
        ...


class _SharedDevice:
    """What all kinds have: memory is kept until `close`, and values travel by the group."""

    mechanism = "stores, block barrier, release at sys scope; ld.acquire.sys"
    profile = "ptx"
    needs_all = True

    def __init__(self, group: Bootstrap, device: torch.device) -> None:
        self.rank, self.num_ranks, self.device = group.rank, group.num_ranks, device
        self._group = group
        self._gather: Callable[[object], list[Any]] | None = None
        self._kept: list[Any] = []

    def _zeros(self, take: Callable[[], torch.Tensor], num_bytes: int) -> torch.Tensor:
        """Memory of this rank, zeroed by now. TransportUnavailable on all ranks if one has none left."""
        own, failure = None, None
        try:
            own = take().zero_()
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        except torch.OutOfMemoryError as error:
            failure = error
        lacking = [rank for rank, has in enumerate(self.all_gather(failure is None)) if has is False]
        if own is None or lacking:
            raise TransportUnavailable(
                f"rank {self.rank}: rank(s) {', '.join(map(str, lacking))} have no memory left on their GPU for the "
                f"{num_bytes} bytes that this kind of call needs, and it is taken on all ranks or none: see size_hint"
            ) from failure
        return own

    def all_gather(self, value: object) -> list[Any]:
        return (self._gather or self._group.all_gather)(value)

    def gather_by(self, all_gather: Callable[[object], list[Any]]) -> None:
        self._gather = all_gather

    def close(self) -> None:
        self._kept = []


class InprocDevice(_SharedDevice):
    """Ranks as threads of one process on one device: every address is everybody's."""

    name = "inproc"
    any_address = True

    def allocate(self, num_bytes: int) -> tuple[torch.Tensor, list[int]]:
        own = self._zeros(lambda: torch.empty(num_bytes, dtype=torch.uint8, device=self.device), num_bytes)
        everyone = self._group.all_gather(own)
        self._kept.append(everyone)
        return own, [t.data_ptr() for t in everyone]


class CudaIpc(_SharedDevice):
    """Processes of one host, on one device or on devices with peer access: memory mapped through CUDA IPC."""

    name = "cuda_ipc"
    any_address = False
    needs_all = False

    def allocate(self, num_bytes: int) -> tuple[torch.Tensor, list[int]]:
        from torch.multiprocessing.reductions import reduce_tensor

        own = self._zeros(lambda: torch.empty(num_bytes, dtype=torch.uint8, device=self.device), num_bytes)
        # One recipe for each peer: torch counts those who have taken one, and keeps the memory until all have left it.
        offers = [None if peer == self.rank else reduce_tensor(own) for peer in range(self.num_ranks)]  # type: ignore[no-untyped-call]
        found = self.all_gather(offers)
        recipes = [None if offered is None else offered[self.rank] for offered in found]
        everyone = [None if recipe is None else self._map(*recipe) for recipe in recipes]
        everyone[self.rank] = own
        self.all_gather(None)  # nobody frees before everybody has mapped
        self._kept.append(everyone)
        return own, [0 if t is None else t.data_ptr() for t in everyone]

    def _map(self, rebuild: Any, arguments: tuple[Any, ...]) -> torch.Tensor:
        """A peer's tensor, mapped for this rank's GPU: CUDA gives access to the device that opens a handle, not to
        others, and a peer's index may mean another GPU here. The peer has waited for its stream: no event is needed."""
        call = inspect.signature(rebuild).bind(*arguments)
        call.arguments |= {"storage_device": self.device.index, "event_sync_required": False}
        mapped: torch.Tensor = rebuild(*call.args, **call.kwargs)
        return mapped


class SymmMem(_SharedDevice):
    """Processes with one GPU each, in one NVLink domain: torch symmetric memory, by plain peer addresses.

    NVLink multicast is switched off in this process (TORCH_SYMM_MEM_DISABLE_MULTICAST=1): torch would otherwise create
    a multicast object for every piece of memory, and the kernels use none.
    """

    name = "symm_mem"
    any_address = False

    def __init__(self, group: ProcessBootstrap, device: torch.device) -> None:
        super().__init__(group, device)
        self._process_group = group.process_group
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"

    def allocate(self, num_bytes: int) -> tuple[torch.Tensor, list[int]]:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory

        # torch wants as much of all ranks, of which some may have guards behind.
        most = max(size or 0 for size in self.all_gather(num_bytes))
        # Not `_symmetric_memory.empty`, which takes blocks from a pool: a rank that is given a block of a buffer it has
        # closed does not meet peers that get a new one.
        own = self._zeros(
            lambda: _SymmetricMemory.empty_strided_p2p((most,), (1,), torch.uint8, self.device), num_bytes
        )
        shared = _symmetric_memory.rendezvous(own, self._process_group)  # ends when everybody has mapped
        self._kept.append((own, shared))
        return own[:num_bytes], [int(address) for address in shared.buffer_ptrs]
