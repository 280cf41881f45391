"""Where experts live: `Placement` maps every expert to a rank and to its index on that rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

from expertwire.errors import InvalidArgument


@dataclass(frozen=True)
class Placement:
    """Expert e lives on rank `expert_ranks[e]`; experts of one rank keep the order of their ids.

    >>> Placement.contiguous(num_experts=7, num_ranks=3).expert_ranks     # the first ranks hold one more
    (0, 0, 0, 1, 1, 2, 2)
    >>> Placement((1, 0, 1, 0)).local_experts(1)                          # an explicit table
    (0, 2)
    """

    expert_ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "expert_ranks", tuple(index(rank) for rank in self.expert_ranks))
        except TypeError:
            raise InvalidArgument(
                f"placement: a table has the rank of every expert, such as (0, 0, 1, 1), got {self.expert_ranks!r}"
            ) from None
        if not self.expert_ranks:
            raise InvalidArgument("placement: at least one expert is needed, got an empty table")
        if min(self.expert_ranks) < 0:
            raise InvalidArgument(f"placement: ranks must be >= 0, got {min(self.expert_ranks)}")

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> Placement:
        """Equal runs in rank order; when experts do not divide by ranks, the first ranks hold one more."""
        if num_ranks < 1:
            raise InvalidArgument(f"placement: at least one rank is needed, got {num_ranks}")
        share, extra = divmod(num_experts, num_ranks)
        return cls.from_counts([share + (rank < extra) for rank in range(num_ranks)])

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> Placement:
        """Runs of the given lengths in rank order: `from_counts([2, 0, 3])` puts two experts on rank 0, three on 2."""
        if any(count < 0 for count in counts):
            raise InvalidArgument(f"placement: counts must be >= 0, got {list(counts)}")
        return cls(tuple(rank for rank, count in enumerate(counts) for _ in range(count)))

    @property
    def num_experts(self) -> int:
        """Experts on all ranks together."""
        return len(self.expert_ranks)

    def local_experts(self, rank: int) -> tuple[int, ...]:
        """Global ids of the experts on `rank`, ascending; position in this tuple is the local id."""
        return tuple(e for e, owner in enumerate(self.expert_ranks) if owner == rank)

    def local_ids(self) -> tuple[int, ...]:
        """For every expert, its local id on the rank that owns it."""
        seen: dict[int, int] = {}
        ids = []
        for owner in self.expert_ranks:
            ids.append(seen.get(owner, 0))
            seen[owner] = ids[-1] + 1
        return tuple(ids)
