"""One line of the doctor's report."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "no"]


@dataclass(frozen=True)
class Finding:
    """`remedy` is empty where there is nothing to do."""

    topic: str
    state: State
    detail: str
    remedy: str = ""


def installed(package: str) -> str | None:
    """The version of a package, None if it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    >>> numbers("2.13.0+cpu")
    (2, 13, 0)
    """
    found = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)
