"""Device memory that the kernels of all ranks can address, as `kernels.state.DeviceMemory` wants it."""

from __future__ import annotations

from typing import Any

import torch

from expertwire.transports.base import Bootstrap


class _SharedDevice:
    """What both kinds have: memory is kept until `close`, and values travel by the group."""

    mechanism = "stores, block barrier, release at sys scope; ld.acquire.sys"
    profile = "ptx"

    def __init__(self, group: Bootstrap, device: torch.device) -> None:
        self.rank, self.num_ranks, self.device = group.rank, group.num_ranks, device
        self._group = group
        self._kept: list[Any] = []

    def all_gather(self, value: object) -> list[Any]:
        return self._group.all_gather(value)

    def close(self) -> None:
        self._kept = []


class InprocDevice(_SharedDevice):
    """Ranks as threads of one process on one device: every address is everybody's."""

    name = "inproc"
    any_address = True

    def allocate(self, num_bytes: int) -> tuple[torch.Tensor, list[int]]:
        own = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        everyone = self._group.all_gather(own)
        self._kept.append(everyone)
        return own, [t.data_ptr() for t in everyone]


class CudaIpc(_SharedDevice):
    """Processes of one host, on one device or on devices with peer access: memory mapped through CUDA IPC."""

    name = "cuda_ipc"
    any_address = False

    def allocate(self, num_bytes: int) -> tuple[torch.Tensor, list[int]]:
        from torch.multiprocessing.reductions import reduce_tensor

        own = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        torch.cuda.current_stream(self.device).synchronize()
        recipes = self._group.all_gather(reduce_tensor(own))  # type: ignore[no-untyped-call]
        everyone = []
        for peer, (rebuild, arguments) in enumerate(recipes):
            everyone.append(own if peer == self.rank else rebuild(*arguments))
        self._group.all_gather(None)  # nobody frees before everybody has mapped
        self._kept.append(everyone)
        return own, [t.data_ptr() for t in everyone]
