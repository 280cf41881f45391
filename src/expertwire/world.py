"""Groups of ranks: `World` runs n ranks inside one process; a torch process group is adapted."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from expertwire.errors import InvalidArgument, TransportUnavailable
from expertwire.transports.base import Bootstrap
from expertwire.transports.fabric import Fabric
from expertwire.transports.inproc import Crew, Rank

T = TypeVar("T")
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_GRACE_S = (
    1.0  # for threads to end after an interruption: one that is inside torch when Python exits aborts the process
)


class World:
    """`num_ranks` ranks in one process, for notebooks, tests and debugging: each runs in a thread of its own.

    With device="cuda" the ranks share that GPU, each with a stream of its own; create tensors inside of `run`. For more
    than 8 ranks set CUDA_DEVICE_MAX_CONNECTIONS to their number.

    With `fabric`, the name of a network profile such as "rc.ooo", ranks are joined by a simulated network that places
    every piece of every transfer as late ("adversary") or as randomly ("random") as the profile allows; `signal` is the
    mechanism of put_signal (`expertwire check` lists them). Ranks then run one at a time, and a run is a function of
    `seed`: time-outs count simulated seconds.

    >>> World(2).run(lambda rank: rank.rank * 10)
    [0, 10]
    """

    def __init__(
        self,
        num_ranks: int,
        device: str = "cpu",
        *,
        fabric: str | None = None,
        signal: str = "atomic",
        seed: int = 0,
        schedule: str = "adversary",
    ) -> None:
        if not isinstance(num_ranks, int) or isinstance(num_ranks, bool) or num_ranks < 1:
            raise InvalidArgument(f"World: num_ranks must be an int >= 1, got {num_ranks!r}")
        if device != "cpu" and fabric is not None:
            raise InvalidArgument(f"World: a simulated fabric joins ranks on the CPU, got device={device!r}")
        reason = device_unavailable(device) or (too_few_queues(num_ranks) if device != "cpu" else None)
        if reason:
            raise TransportUnavailable(f"World: device={device!r} does not work here: {reason}")
        self.num_ranks = num_ranks
        self.device = device
        self._new_fabric = (lambda: Fabric(num_ranks, fabric, signal, seed, schedule)) if fabric else lambda: None
        self._new_fabric()  # refuses what cannot run, now

    def run(self, fn: Callable[[Rank], T]) -> list[T]:
        """Call `fn(rank)` once per rank and return the results in rank order.

        The first exception ends all ranks: they stop at their next wait, and that exception is raised here, with a
        note that names its rank.
        """
        crew = Crew(self.num_ranks, self._new_fabric())
        turns = None if crew.fabric is None else crew.fabric.turns
        results: list[Any] = [None] * self.num_ranks

        def call(rank: int) -> None:
            try:
                if turns is not None:
                    turns.join(rank)
                with _stream_of_its_own(self.device):
                    results[rank] = fn(Rank(crew, rank))
            except BaseException as error:  # noqa: BLE001  # carried over to the caller's thread
                crew.leave(rank, error)
            else:
                crew.leave(rank)
            finally:
                if turns is not None:
                    turns.leave(rank)

        threads = [
            threading.Thread(target=call, args=(rank,), name=f"expertwire-rank-{rank}", daemon=True)
            for rank in range(self.num_ranks)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(timeout=0.2)
        except BaseException as interruption:
            crew.leave(-1, interruption)
            deadline = time.monotonic() + _GRACE_S
            while any(crew.running) and time.monotonic() < deadline:  # an interrupted join would not tell
                time.sleep(0.01)
            raise
        if crew.failure is not None:
            rank, error = crew.failure
            error.add_note(f"raised on rank {rank} of {self.num_ranks}")
            raise error
        return results


@contextmanager
def _stream_of_its_own(device: str) -> Iterator[None]:
    """Ranks on one device work side by side, each on a stream; what they return is complete."""
    if device == "cpu":
        yield
        return
    import torch

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
        torch.cuda.current_stream().synchronize()


def device_unavailable(device: str) -> str | None:
    """None if ranks can use this device, else the reason and the remedy."""
    if device == "cpu":
        return None
    import importlib.util

    import torch

    if not isinstance(device, str) or device.partition(":")[0] != "cuda":
        return "devices are 'cpu' and 'cuda'"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'expertwire[gpu]'"
    here = torch.cuda.current_device()
    if device not in ("cuda", f"cuda:{here}"):
        return f"the current GPU of this process is cuda:{here}: call torch.cuda.set_device before, and pass 'cuda'"
    return None


def too_few_queues(num_ranks: int) -> str | None:
    """None if every rank's stream has a hardware queue of its own on a GPU, else the reason and the remedy: behind a
    kernel that waits for a peer, nothing else of its queue starts, which may be what it waits for."""
    queues = int(os.environ.get(_QUEUES, "8"))
    if num_ranks <= queues:
        return None
    remedy = (
        f"set {_QUEUES}={num_ranks} before CUDA is first used" if num_ranks <= 32 else "use processes, or fewer ranks"
    )
    return (
        f"{num_ranks} ranks need a hardware queue each, and {_QUEUES} allows {queues} (default 8, at most 32); {remedy}"
    )


class _ProcessGroup:
    """A torch process group as a Bootstrap."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self.process_group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)

    def all_gather(self, value: object) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.process_group)
        return values


def bootstrap(group: object) -> Bootstrap:
    """What a Buffer needs of `group`: a rank of a World, or a torch.distributed process group."""
    if isinstance(group, Rank):
        return group
    import torch.distributed as dist

    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return _ProcessGroup(group)
    raise InvalidArgument(
        f"group must be a rank of ew.World or a torch.distributed process group, got {type(group).__name__}. "
        "With torchrun: dist.init_process_group('gloo'), then pass dist.group.WORLD."
    )
