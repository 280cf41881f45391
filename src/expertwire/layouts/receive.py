"""Shapes of what dispatch returns, for each layout."""

from __future__ import annotations

from enum import StrEnum

from expertwire._math import round_up


class Layout(StrEnum):
    """How received rows are arranged.

    COMPACT       one row per (token, destination rank), by source rank, then source token
    EXPERT_MAJOR  one row per (token, valid top-k slot), grouped by local expert, groups padded to `expert_alignment`
    EXPERT_SLOTS  [num_local_experts, num_ranks * capacity, hidden], valid rows first: fixed shapes for decode

    Inside an expert: by source rank, source token, top-k slot.
    """

    COMPACT = "compact"
    EXPERT_MAJOR = "expert_major"
    EXPERT_SLOTS = "expert_slots"


def worst_case_rows(
    layout: Layout, num_ranks: int, capacity: int, num_topk: int, num_local_experts: int, alignment: int
) -> int:
    """Rows that a rank may receive at most, padding included: the fixed size with `counts="device"`.

    >>> worst_case_rows(Layout.EXPERT_MAJOR, num_ranks=2, capacity=4, num_topk=2, num_local_experts=3, alignment=8)
    40
    """
    if layout is Layout.COMPACT:
        return num_ranks * capacity
    if num_local_experts == 0:
        return 0
    if layout is Layout.EXPERT_SLOTS:
        return num_local_experts * num_ranks * capacity
    return round_up(num_ranks * capacity * num_topk + num_local_experts * (alignment - 1), alignment)
