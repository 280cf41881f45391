"""Every transport and engine against the oracle, bit for bit: rows, scale factors, order, counts, sums, gradients.

All cases of a setup run on one buffer, one after another, at the first test that asks for one of them; each test then
compares its own case.
"""

from __future__ import annotations

import pytest
import torch
from conformance_cases import Case, Setup, covering_cases, legal
from conformance_check import check
from conformance_run import Report, run_rank

import expertwire as ew
from expertwire.testing import Processes

SETUPS = [
    *(
        Setup("inproc", num_ranks, engine, placement, hidden, interleaved)
        for num_ranks in (1, 2, 3, 4, 8)
        for engine, placement, hidden, interleaved in (
            ("numba", "contiguous", 144, False),
            ("numba", "table", 8, True),
            ("torch", "table", 144, True),
        )
    ),
    Setup("inproc", 2, "numba", "contiguous", 1024, interleaved=True),
    Setup("inproc", 3, "torch", "contiguous", 520),
    *(Setup("shm", num_ranks, "numba", "table", 144, interleaved=True) for num_ranks in (1, 2, 3, 4, 8)),
    Setup("shm", 3, "torch", "contiguous", 144),
    Setup("shm", 2, "numba", "contiguous", 144, direct=True),
    Setup("shm", 3, "numba", "table", 8, interleaved=True, direct=True),
    Setup("inproc", 4, "numba", "table", 144, interleaved=True, direct=True),
    Setup("inproc", 3, "torch", "contiguous", 520, direct=True),
]
CASES = {setup: [c for c in covering_cases(seed) if legal(setup, c)] for seed, setup in enumerate(SETUPS)}


class Results:
    """Reports per setup and case; a setup runs once, and if that fails, so do all its cases."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._found: dict[Setup, dict[Case, list[Report]]] = {}
        self._failed: dict[Setup, str] = {}

    def of(self, setup: Setup, case: Case) -> list[Report]:
        if setup in self._failed:
            pytest.fail(f"{setup} failed before: {self._failed[setup]}", pytrace=False)
        if setup not in self._found:
            try:
                self._found[setup] = self._run(setup)
            except Exception as error:
                self._failed[setup] = repr(error)
                raise
        return self._found[setup][case]

    def _run(self, setup: Setup) -> dict[Case, list[Report]]:
        cases = CASES[setup]
        if setup.transport == "inproc":
            reports = ew.World(setup.num_ranks).run(lambda rank: run_rank(rank, setup, cases))
        else:
            reports = self._processes.run(run_rank, setup, cases, num_ranks=setup.num_ranks)
        return dict(zip(cases, map(list, zip(*reports, strict=True)), strict=True))


@pytest.fixture(scope="module")
def results():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with Processes(8) as processes:
        yield Results(processes)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("setup", "case"), [(s, c) for s in SETUPS for c in CASES[s]], ids=str)
def test_bitwise_equal_to_the_oracle(results, setup, case):
    check(setup, case, results.of(setup, case))
