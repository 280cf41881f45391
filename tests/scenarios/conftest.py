"""Every scenario is a function of a group; it runs on the threads of a World, and where it matters on processes too."""

import pytest

import expertwire as ew
from expertwire.testing import Processes


@pytest.fixture(scope="session")
def processes():
    with Processes(4) as crew:
        yield crew


@pytest.fixture
def inproc():
    """run(num_ranks, fn, *args) -> results in rank order, ranks being threads."""
    return lambda num_ranks, fn, *args: ew.World(num_ranks).run(lambda rank: fn(rank, *args))


@pytest.fixture(params=["inproc", "shm"])
def anywhere(request, inproc):
    """The same, also with ranks being processes."""
    if request.param == "inproc":
        return inproc
    crew = request.getfixturevalue("processes")
    return lambda num_ranks, fn, *args: crew.run(fn, *args, num_ranks=num_ranks)
