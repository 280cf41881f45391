"""Groups of ranks: `World` runs n ranks inside one process; a torch process group is adapted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from expertwire.errors import InvalidArgument, TransportUnavailable
from expertwire.transports.base import Bootstrap
from expertwire.transports.inproc import Crew, Rank

T = TypeVar("T")


class World:
    """`num_ranks` ranks in one process, for notebooks, tests and debugging: each runs in a thread of its own.

    >>> World(2).run(lambda rank: rank.rank * 10)
    [0, 10]
    """

    def __init__(self, num_ranks: int, device: str = "cpu") -> None:
        if num_ranks < 1:
            raise InvalidArgument(f"World: num_ranks must be >= 1, got {num_ranks}")
        if device != "cpu":
            raise TransportUnavailable(f"World: device={device!r} is not offered by this version; use device='cpu'")
        self.num_ranks = num_ranks
        self.device = device

    def run(self, fn: Callable[[Rank], T]) -> list[T]:
        """Call `fn(rank)` once per rank and return the results in rank order.

        The first exception ends all ranks: they stop at their next wait, and that exception is raised here, with a
        note that names its rank.
        """
        crew = Crew(self.num_ranks)
        results: list[Any] = [None] * self.num_ranks

        def call(rank: int) -> None:
            try:
                results[rank] = fn(Rank(crew, rank))
            except BaseException as error:  # noqa: BLE001  # carried over to the caller's thread
                crew.leave(rank, error)
            else:
                crew.leave(rank)

        threads = [
            threading.Thread(target=call, args=(rank,), name=f"expertwire-rank-{rank}", daemon=True)
            for rank in range(self.num_ranks)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(timeout=0.2)
        except BaseException as interruption:
            crew.leave(-1, interruption)
            raise
        if crew.failure is not None:
            rank, error = crew.failure
            error.add_note(f"raised on rank {rank} of {self.num_ranks}")
            raise error
        return results


class _ProcessGroup:
    """A torch process group as a Bootstrap."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)

    def all_gather(self, value: object) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self._group)
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
