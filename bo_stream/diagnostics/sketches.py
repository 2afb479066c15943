"""Sketches of a stream of rows in fixed memory: a fair sample, and a count of repeated rows."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Reservoir:
    """A uniform sample without replacement of all rows so far.

    Algorithm R of Vitter, ACM Transactions on Mathematical Software 11, 1985.

    Attributes:
        size: Number of rows that are kept.
        seen: Number of rows so far.
        rows: The sample, ``min(seen, size) x k``; None before any row.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        """Begin empty; ``seed`` decides which rows are kept."""
        self.size, self.seen = size, 0
        self.rows: Array | None = None
        self._random = np.random.default_rng(seed)

    def add(self, rows: Array) -> None:
        """Offer rows, ``n x k``; the width k stays what it was at first. Cost O(n k)."""
        if self.rows is None:
            self.rows = rows[:0]
        room = max(0, self.size - len(self.rows))
        first, later = rows[:room], rows[room:]
        self.rows = np.concatenate((self.rows, first))
        counts = np.arange(self.seen + len(first) + 1, self.seen + len(rows) + 1)
        places = self._random.integers(0, counts) if len(later) else counts
        for row, place in zip(later, places, strict=True):
            if place < self.size:
                self.rows[place] = row
        self.seen += len(rows)

    def state(self) -> dict[str, Any]:
        """Return all that it is as plain values."""
        rows = None
        if self.rows is not None:
            rows = [
                [None if value != value else value for value in row] for row in self.rows.tolist()
            ]
        generator = self._random.bit_generator.state
        return {"size": self.size, "seen": self.seen, "rows": rows, "generator": generator}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Build a reservoir of :meth:`state`."""
        reservoir = cls(int(state["size"]))
        reservoir.seen = int(state["seen"])
        if state["rows"] is not None:
            reservoir.rows = np.asarray(state["rows"], dtype=np.float64)
        reservoir._random.bit_generator.state = state["generator"]
        return reservoir


@dataclass
class RepeatedRows:
    """How often rows were repeated, bit by bit, from the rows of the smallest digests.

    A row of the ``size`` smallest digests so far has been among them since it first came, so that
    it was counted each time. They are a fair sample of the distinct rows, however far apart the
    repetitions. [Bar-Yossef et al., RANDOM 2002: k minimum values]

    Attributes:
        size: Number of digests that are kept.
        counts: How often each of these rows came, by digest.
    """

    size: int = 512
    counts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._largest = [-digest for digest in self.counts]
        heapq.heapify(self._largest)

    def add(self, rows: Array) -> None:
        """Count rows, ``n x k``. Cost O(n k), a microsecond a row."""
        for row in np.ascontiguousarray(rows + 0.0):  # -0.0 is 0.0
            digest = int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=6).digest(), "big")
            if digest in self.counts:
                self.counts[digest] += 1
            elif len(self.counts) < self.size:
                self.counts[digest] = 1
                heapq.heappush(self._largest, -digest)
            elif digest < -self._largest[0]:
                del self.counts[-heapq.heapreplace(self._largest, -digest)]
                self.counts[digest] = 1

    @property
    def repeated(self) -> int:
        """Number of repetitions of the rows that are counted."""
        return sum(self.counts.values()) - len(self.counts)

    @property
    def share(self) -> float:
        """Estimated share of all observations that repeat an earlier one."""
        total = sum(self.counts.values())
        return self.repeated / total if total else 0.0

    def state(self) -> dict[str, Any]:
        """Return all that it is as plain values."""
        return {"size": self.size, "counts": [list(item) for item in self.counts.items()]}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Build it of :meth:`state`."""
        return cls(int(state["size"]), {int(digest): int(n) for digest, n in state["counts"]})
