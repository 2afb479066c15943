"""Lists of different lengths in one tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

PAIRS = 1 << 21
"""About as many pairs as :meth:`Ragged.pairs_by_parts` makes at a time."""


@dataclass(frozen=True)
class Ragged:
    """M lists of indices: list i is ``items[offsets[i] : offsets[i + 1]]``.

    Attributes:
        offsets: ``M + 1``, ascending from 0.
        items: All lists in a row.
    """

    offsets: Tensor
    items: Tensor

    @classmethod
    def of(cls, rows: Tensor, items: Tensor, count: int) -> Ragged:
        """Pairs of a list's number and an item, in any order, as ``count`` lists. Cost O(n log n).

        Items of a list keep the order that they come in.
        """
        order = torch.argsort(rows, stable=True)
        sizes = torch.bincount(rows, minlength=count)
        return cls(torch.cat((sizes.new_zeros(1), sizes.cumsum(0))), items[order])

    def to(self, device: torch.device) -> Ragged:
        """The lists on another device."""
        return Ragged(self.offsets.to(device), self.items.to(device))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def pairs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Each of some lists' items beside its position in ``rows``.

        Args:
            rows: Numbers of lists, ``n``, repetitions allowed.

        Returns:
            Positions in ``rows``, ascending, and items.
        """
        begins = self.offsets[rows]
        sizes = self.offsets[rows + 1] - begins
        where = torch.repeat_interleave(sizes)
        within = torch.arange(len(where), device=where.device) - (sizes.cumsum(0) - sizes)[where]
        return where, self.items[begins[where] + within]

    def pairs_by_parts(self, rows: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """:meth:`pairs` of a slice of the rows after the other, about ``PAIRS`` pairs each.

        Yields:
            The slice, positions within it, items.
        """
        ends = (self.offsets[rows + 1] - self.offsets[rows]).cumsum(0)
        parts = torch.unique_consecutive(ends // PAIRS, return_counts=True)[1].tolist()
        begin = 0
        for size in parts:
            part = slice(begin, begin + size)
            yield part, *self.pairs(rows[part])
            begin += size


def nothing_yet(device: torch.device) -> Ragged:
    """No lists."""
    empty = torch.zeros(0, dtype=torch.long, device=device)
    return Ragged(empty.new_zeros(1), empty)
