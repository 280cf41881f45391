"""Which machine runs a profile."""

from __future__ import annotations

from expertwire.ordering.machine import Network
from expertwire.ordering.profiles import Profile
from expertwire.ordering.program import Program
from expertwire.ordering.transitions import Machine


def build(program: Program, profile: Profile) -> Machine:
    """The machine of a profile."""
    return Network(program, profile)
