"""The operations of which every protocol is made.

A protocol is a generator that yields these records and receives the answer of each: `Wait` is answered with the count
that the word carries, everything else with None. The host engine executes them with real bytes; the checker explores
them with symbolic ones; the GPU kernels restate them.

A call makes dozens of these records, so they are cheap ones: regions and words are tuples, operations are not frozen.

Orders and scopes carry PTX's names, the verbs OpenSHMEM's meanings.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Order(StrEnum):
    """Memory order of an access or fence (PTX ISA, memory consistency model)."""

    WEAK = "weak"
    RELAXED = "relaxed"
    ACQUIRE = "acquire"
    RELEASE = "release"
    ACQ_REL = "acq_rel"
    SC = "sc"


class Scope(StrEnum):
    """The set of threads among which an order holds."""

    CTA = "cta"
    CLUSTER = "cluster"
    GPU = "gpu"
    SYS = "sys"


class Region(NamedTuple):
    """The rows that `writer` puts into a reader's window, in one bank of one lane ("dispatch", "combine")."""

    lane: str
    bank: int
    writer: int


class Word(NamedTuple):
    """The 8-byte signal word in a reader's window that only `writer` writes, for one purpose (and one bank)."""

    purpose: str
    writer: int
    bank: int = 0


@dataclass(slots=True)
class Put:
    """Write `count` rows of `region` into the window of `peer`. Says nothing about when the reader may look."""

    peer: int
    region: Region
    count: int


@dataclass(slots=True)
class Signal:
    """Set a word in the window of `peer` to (epoch, count), ordered after this rank's earlier *reads* (release)."""

    peer: int
    word: Word
    epoch: int
    count: int = 0


@dataclass(slots=True)
class PutSignal:
    """Write rows, then set the word that vouches for them: whoever acquires the word sees the rows.

    The one primitive that a transport must provide; by which mechanism is its own business.
    """

    peer: int
    region: Region
    count: int
    word: Word
    epoch: int


@dataclass(slots=True)
class Wait:
    """Block until the word of this rank's own window holds `epoch` or a later one (acquire).

    Answered with the word's count, or with None when the writer is masked and will not be waited for.
    """

    word: Word
    epoch: int


@dataclass(slots=True)
class Load:
    """Read `count` rows of a region in this rank's own window."""

    region: Region
    count: int


@dataclass(slots=True)
class Store:
    """Write `count` rows of a region in this rank's own window."""

    region: Region
    count: int


@dataclass(slots=True)
class Fence:
    """Order this thread's earlier accesses before its later ones."""

    order: Order = Order.ACQ_REL
    scope: Scope = Scope.SYS


Operation = Put | Signal | PutSignal | Wait | Load | Store | Fence
