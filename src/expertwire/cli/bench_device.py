"""The bench on a GPU: its cases, their bytes, and the floor that no kernel can beat on this card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from expertwire.cli.bench_cases import WIRES, Case
from expertwire.errors import InvalidArgument, TransportUnavailable

FORMULA = (
    "bytes: dispatch reads x once and writes every row that is sent (payload and scale factors), combine reads every "
    "row that is summed and writes the result, round trip is both; of all ranks that share the GPU. floor = bytes / "
    "bandwidth of a 1 GiB device copy (read and written) in the same run; small cases repeat over the same buffers, "
    "partly from L2, and may beat it. expertwire = replays of a graph by CUDA events, of the slowest rank; "
    "dispatch includes giving its bank back. plain torch = what each rank would do alone, without an exchange: "
    "quantise, index_select; index_add of weighted rows"
)


@dataclass(frozen=True)
class DeviceCase(Case):
    """A case on a GPU. `num_sms` 0: each rank's share. Ranks are threads of one World, or, with `processes`, processes,
    which take the visible GPUs in turn."""

    num_sms: int = 0
    processes: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.num_sms <= 1024:
            raise InvalidArgument(f"num-sms must be in [0, 1024], 0 for each rank's share, got {self.num_sms}")

    @property
    def world(self) -> str:
        if not self.processes:
            return super().world
        return "1 process" if self.ranks == 1 else f"{self.ranks} processes"

    @property
    def title(self) -> str:
        budget = f", {self.num_sms} SMs each" if self.num_sms else ""
        return super().title + budget

    def dispatch_bytes(self, num_rows: int) -> int:
        """Bytes that one rank reads and writes to send `num_rows` rows.

        >>> DeviceCase(tokens=128, topk=8, layout="expert_slots", wire="fp8").dispatch_bytes(1024)
        9404416
        """
        wire = WIRES[self.wire]()
        row = wire.payload_bytes(self.hidden) + wire.sf_bytes(self.hidden)
        return 2 * self.tokens * self.hidden + num_rows * row

    def combine_bytes(self, num_rows: int) -> int:
        """Bytes that one rank reads and writes to sum `num_rows` bfloat16 rows.

        >>> DeviceCase(tokens=128, topk=8, layout="expert_slots").combine_bytes(1024)
        16515072
        """
        return 2 * (num_rows + self.tokens) * self.hidden


DECODE = DeviceCase(ranks=1, tokens=128, topk=8, layout="expert_slots", wire="fp8", name="decode")
PREFILL = DeviceCase(ranks=1, tokens=4096, topk=8, layout="expert_major", name="prefill")

DEVICE_SUITES: dict[str, list[DeviceCase]] = {
    "standard": [
        *(replace(DECODE, tokens=n) for n in (16, 64, 128, 256)),
        *(replace(DECODE, ranks=n, name="decode, shared GPU") for n in (2, 4, 8)),
        replace(PREFILL, wire="fp8"),
        PREFILL,
        replace(PREFILL, wire="fp8", layout="compact", num_sms=24),
        replace(PREFILL, wire="fp8", layout="compact", num_sms=24, ranks=2, name="prefill, shared GPU"),
    ],
    "scaling": [
        *(replace(DECODE, tokens=4**n, layout="expert_major", wire="bf16", name="rows") for n in range(7)),
        *(replace(DECODE, experts=n, name="experts") for n in (8, 64, 256, 1024)),
        *(replace(DECODE, ranks=n, tokens=256 // n, name="ranks") for n in (1, 2, 4, 8)),
    ],
}


def runner(seconds: float, processes: Any) -> Callable[[DeviceCase], list[Any]]:
    """What measures a case on all its ranks. Raises TransportUnavailable where there is no GPU."""
    import os

    # Loading a kernel waits for the GPU, on which a kernel may wait for the rank that loads.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    import torch

    from expertwire.cli.bench_device_measure import measure, oracle
    from expertwire.world import World

    World(1, device="cuda")  # refuses where there is no GPU, before any process is started

    def run(case: DeviceCase) -> list[Any]:
        try:
            if case.processes:
                results: list[Any] = processes.run(measure, case, seconds, num_ranks=case.ranks, timeout_s=600.0)
                return results
            oracle(case)  # once for all threads
            return World(case.ranks, device="cuda").run(lambda rank: measure(rank, case, seconds))
        except torch.OutOfMemoryError as error:
            raise TransportUnavailable(f"{case.title} does not fit on this GPU: {error}; use fewer tokens") from error

    return run


def gpu_facts() -> dict[str, Any]:
    """The card, for the report."""
    from expertwire.cli.doctor_gpu import look

    facts = look()
    card = facts.gpus[0]
    return {
        "gpu": card.name, "gpus": len(facts.gpus), "sms": card.num_sms,
        "gpu_memory_gib": round(card.memory_bytes / 2**30, 1), "driver": facts.driver, "cuda": facts.torch_cuda,
        "mps": facts.mps_runs,
    }  # fmt: skip
