"""What the tests on a real GPU share: import this before torch."""

import importlib.util
import os

import pytest

# Loading a kernel waits for the device, where a rank of the same process may be waiting for the one that loads.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import torch
from device_checks import CAPACITY, EXPERTS, HIDDEN, TOPK

import expertwire as ew

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


def buffer(group, **options):
    """A small buffer; `timeout_s` is the test's to choose."""
    options = {"hidden": HIDDEN, "num_topk": TOPK, "num_max_tokens_per_rank": CAPACITY} | options
    return ew.Buffer(group, num_experts=EXPERTS, device="cuda", **options)
