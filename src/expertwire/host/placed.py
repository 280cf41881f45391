"""Where received rows go: what the caller wants, and the place of every row, known before the first one moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from expertwire.host.dispatch import Arrivals
from expertwire.host.kernels import Array
from expertwire.layouts.receive import Layout


class Arrangement(NamedTuple):
    """How the caller wants rows arranged; `fixed_size` for `counts="device"`."""

    layout: Layout
    alignment: int
    fixed_size: bool


@dataclass(slots=True)
class Placed:
    """Where received rows have their places. `rows` [m, K] is the output row of each arrival and slot, -1 = none;
    `groups` is that of `host.rows.arrange`."""

    layout: Layout
    arrivals: Arrivals
    rows: Array
    groups: Array
    num_rows: int

    @property
    def counts(self) -> Array:
        """[L] selections per local expert."""
        counts: Array = self.groups[0, :-1]
        return counts

    @property
    def padded_counts(self) -> Array:
        """[L] rows of each expert's group."""
        padded: Array = self.groups[1, :-1]
        return padded

    @property
    def offsets(self) -> Array:
        """[L + 1] where the groups begin, and end."""
        offsets: Array = self.groups[2]
        return offsets

    @property
    def num_filled(self) -> int:
        return self.arrivals.num_rows if self.layout is Layout.COMPACT else int(self.counts.sum())

    def row_source(self) -> Array:
        """int32 [num_rows, 3]: source rank, token and slot of every output row, -1 for rows that nobody fills."""
        arrival, slot = np.nonzero(self.rows >= 0)
        source = np.repeat(np.arange(len(self.arrivals.offsets) - 1), self.arrivals.rows_per_peer)
        found = np.full((self.num_rows, 3), -1, np.int32)
        found[self.rows[arrival, slot]] = np.stack([source[arrival], self.arrivals.tokens[arrival], slot], axis=1)
        return found

    def row_weights(self) -> Array:
        """float32 [num_rows]: the weight of every output row, 0 for rows that nobody fills."""
        arrival, slot = np.nonzero(self.rows >= 0)
        found = np.zeros(self.num_rows, np.float32)
        found[self.rows[arrival, slot]] = self.arrivals.weights[arrival, slot]
        return found
