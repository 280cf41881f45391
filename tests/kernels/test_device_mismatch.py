"""Ranks that make different calls, on a device: kernels in the interpreter and one process per rank."""

import doctest
import importlib.util

import mismatches
import pytest
import torch
from interpreted_buffer import interpreted_buffer

from expertwire.kernels import names

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


NUM_PROCESSES = 3


def rank_work(group, check, options):
    buf = interpreted_buffer(group)
    getattr(mismatches, f"check_{check}")(buf, **options)
    torch.distributed.barrier(group)


CASES = [
    ("first_calls", {}, 2),
    *(("dispatch", {"kind": kind}, 2) for kind in mismatches.KINDS),
    ("dispatch", {"kind": "layout", "counts": "device"}, 3),
    ("dispatch", {"kind": "wire", "defer_receive": True}, 2),
    ("weights", {}, 3),
    ("repeats", {}, 3),
    ("combine", {}, 2),
    ("deferred_combine", {}, 2),
    ("turns", {}, 2),
    ("new_kind", {}, 3),
]


@pytest.mark.parametrize(("check", "options", "num_ranks"), CASES)
def test_mismatch(processes, check, options, num_ranks):
    processes.run(rank_work, check, options, num_ranks=num_ranks, timeout_s=120)


def test_examples():
    assert doctest.testmod(names) == (0, 3)


def test_names_leave_room_for_the_number_and_for_refusals():
    found = names.CallNames()
    for n in range(1000):
        name = found.name(f"text {n}")
        assert 0 <= name < names.UNKNOWN < (1 << 24) - 2
        assert name % (1 << names.NUMBER_BITS) == 0
        assert name >> names.NUMBER_BITS != names.UNKNOWN >> names.NUMBER_BITS
    assert found.differ(name | 1, name | 2) == "text 999, routing of another dispatch"
    assert found.text(5) == "a call that was never made here"
