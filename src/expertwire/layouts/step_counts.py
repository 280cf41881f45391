"""What kernels count of a step on a device: int32 in one piece, whose parts begin at multiples of 16 bytes.

0           num_rows   rows that arrived, one per (token, rank)
1           void       unless 0: a rank refused this dispatch, or did not come in time
2           refused    and the same of its combine, or else of the dispatch
3           repeated   and of the dispatch that repeated this plan last
4           number     of the dispatch that made the plan, its low bits
6           combine    int64: the number of the combine under way
8  [R]      per_rank   rows that arrived from each rank
   [R]      sent       rows sent to each rank
   [L]      per_expert selections of each local expert
   [L]      padded     the same with padding      (EXPERT_SLOTS: not written, they are fixed)
   [L + 1]  offsets    where their rows begin     (likewise)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from expertwire._math import round_up

NUM_ROWS, VOID, REFUSED, REPEATED, NUMBER, COMBINE, PER_RANK = 0, 1, 2, 3, 4, 6, 8


@dataclass(frozen=True)
class StepCounts:
    """Where the parts are, for R = `num_ranks` and L = `num_local_experts`.

    >>> counts = StepCounts(2, 3)
    >>> counts.sent, counts.per_expert, counts.padded, counts.offsets, counts.size
    (slice(12, 14, None), slice(16, 19, None), slice(20, 23, None), slice(24, 28, None), 28)
    """

    num_ranks: int
    num_local_experts: int

    def _ranks(self, nth: int) -> slice:
        first = PER_RANK + nth * round_up(self.num_ranks, 4)
        return slice(first, first + self.num_ranks)

    def _experts(self, nth: int, more: int = 0) -> slice:
        first = PER_RANK + 2 * round_up(self.num_ranks, 4) + nth * round_up(self.num_local_experts, 4)
        return slice(first, first + self.num_local_experts + more)

    @cached_property
    def per_rank(self) -> slice:
        return self._ranks(0)

    @cached_property
    def sent(self) -> slice:
        return self._ranks(1)

    @cached_property
    def per_expert(self) -> slice:
        return self._experts(0)

    @cached_property
    def padded(self) -> slice:
        return self._experts(1)

    @cached_property
    def offsets(self) -> slice:
        return self._experts(2, 1)

    @cached_property
    def size(self) -> int:
        return (
            PER_RANK
            + 2 * round_up(self.num_ranks, 4)
            + 2 * round_up(self.num_local_experts, 4)
            + (self.num_local_experts + 1)
        )
