"""Where things lie in a rank's memory on a device."""

import doctest
import itertools

import pytest

from expertwire.kernels import part
from expertwire.layouts import device_window, step_counts
from expertwire.layouts.step_counts import NUM_ROWS, PER_RANK, REFUSED, VOID, StepCounts


@pytest.mark.parametrize("module", [device_window, step_counts, part])
def test_examples(module):
    found = doctest.testmod(module)
    assert found.failed == 0
    assert found.attempted > 0


@pytest.mark.parametrize(
    ("num_ranks", "num_local_experts"), [*itertools.product([1, 2, 4, 5, 8, 72], [0, 1, 3, 4, 4096])]
)
def test_counts_lie_apart_and_aligned(num_ranks, num_local_experts):
    counts = StepCounts(num_ranks, num_local_experts)
    parts = {
        "per_rank": num_ranks, "sent": num_ranks, "per_expert": num_local_experts, "padded": num_local_experts,
        "offsets": num_local_experts + 1,
    }  # fmt: skip
    taken = [NUM_ROWS, VOID, REFUSED]
    for name, size in parts.items():
        part = getattr(counts, name)
        assert part.start % 4 == 0
        assert part.stop - part.start == size
        taken += range(part.start, part.stop)
    assert len(set(taken)) == len(taken)
    assert max(taken) == counts.size - 1
    assert counts.per_rank.start == PER_RANK
