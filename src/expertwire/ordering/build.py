"""Which machine runs a profile."""

from __future__ import annotations

from expertwire.ordering.machine import Network
from expertwire.ordering.profiles import Profile
from expertwire.ordering.program import Program
from expertwire.ordering.ptx import Ptx
from expertwire.ordering.transitions import Machine


def build(program: Program, profile: Profile) -> Machine:
    """The machine of a profile."""
    if profile.machine == "ptx":
        return Ptx(program, profile)
    return Network(program, profile)
