"""Which promises of a profile a protocol really needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from expertwire.ordering.profiles import STRENGTH, Profile, at_least_as_weak


@dataclass(frozen=True, slots=True)
class Needs:
    """`needed` are the promises left when every other one has been given up and the check still holds."""

    profile: str
    needed: dict[str, Any]

    def __str__(self) -> str:
        return ", ".join(f"{knob}={value}" for knob, value in self.needed.items()) or "nothing"


def needs(start: Profile, holds: Callable[[Profile], bool]) -> Needs:
    """Weaken `start` knob by knob, each as far as the check still holds.

    The result is minimal: weakening any single remaining promise breaks the check. Where several minimal sets exist it
    is one of them.

    >>> from expertwire.ordering.profiles import get
    >>> str(needs(get("rc.hw"), lambda profile: profile.place_ww == "fifo_nic"))
    'place_ww=fifo_nic'
    """
    profile, before = start, None
    while profile is not before:  # giving up one promise may free another
        before = profile
        for knob, values in STRENGTH.items():
            for value in values[: values.index(getattr(profile, knob))]:
                candidate = profile.but(**{knob: value})
                if holds(candidate):
                    profile = candidate
                    break
    weakest = {knob: values[0] for knob, values in STRENGTH.items()}
    kept = {knob: getattr(profile, knob) for knob in STRENGTH if getattr(profile, knob) != weakest[knob]}
    return Needs(start.name, kept)


def weakest_of(profiles: Iterable[Profile]) -> list[Profile]:
    """Those that are not strictly stronger than another one.

    >>> from expertwire.ordering.profiles import get
    >>> [p.name for p in weakest_of([get("rc.hw"), get("rc.spec"), get("srd")])]
    ['rc.spec', 'srd']
    """
    known = list(profiles)
    return [
        p for p in known if not any(q is not p and at_least_as_weak(q, p) and not at_least_as_weak(p, q) for q in known)
    ]
