"""A test kit for code that uses expertwire: real ranks, known data, bitwise comparison.

from expertwire.testing import assert_equal, payload, round_robin, run_processes
"""

from expertwire.testing.compare import Mismatch, assert_equal, first_mismatch
from expertwire.testing.data import (
    payload,
    random_rows,
    random_weights,
    repeated_routing,
    round_robin,
    skewed_routing,
    uniform_routing,
    with_holes,
)
from expertwire.testing.ranks import Outcome, Processes, RankError, run_processes

__all__ = [
    "Mismatch",
    "Outcome",
    "Processes",
    "RankError",
    "assert_equal",
    "first_mismatch",
    "payload",
    "random_rows",
    "random_weights",
    "repeated_routing",
    "round_robin",
    "run_processes",
    "skewed_routing",
    "uniform_routing",
    "with_holes",
]
