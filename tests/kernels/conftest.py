"""Rank processes for the tests of a file: two, or as many as its NUM_PROCESSES."""

import pytest

from expertwire.testing import Processes


@pytest.fixture(scope="module")
def processes(request):
    with Processes(getattr(request.module, "NUM_PROCESSES", 2)) as crew:
        yield crew
