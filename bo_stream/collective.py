"""Sums over processes that take the same steps on one model, each with rows of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class Collective(ABC):
    """Processes that move copies of one model together (data-parallel training).

    Law: all processes call the same methods in the same order, and a method returns the same value
    in all of them. So a sum over rows is the sum over processes of each one's own rows, and a term
    that is no sum over rows is computed by each, and counts ``share`` in each.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of processes.
        is_alone: Whether there is only one process.
        share: Fraction that each process takes of a term that is no sum over rows.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        """Count the processes."""
        self.rank, self.size = rank, size
        self.is_alone, self.share = size == 1, 1.0 / size

    @abstractmethod
    def sum(self, value: Tensor) -> Tensor:
        """Sum a tensor, of the same shape in all processes, over them; no gradient passes."""

    def sums(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Sum several tensors at once."""
        total = self.sum(torch.cat([value.reshape(-1) for value in values]))
        parts = total.split([value.numel() for value in values])
        pairs = zip(parts, values, strict=True)
        return [part.view(value.shape).to(value.dtype) for part, value in pairs]

    def agreed(self, value: Tensor) -> Tensor:
        """Return the value of the first process."""
        return self.sum(value if self.rank == 0 else torch.zeros_like(value))

    def total(self, count: int, device: torch.device) -> int:
        """Sum a number of rows over the processes."""
        return count if self.is_alone else sum(self.counts(count, device))

    def assembled(self, rows: Tensor, places: Tensor, count: int) -> Tensor:
        """Put rows of all processes together, ``... x k x d`` to ``... x count x d``.

        Args:
            rows: Rows of this process.
            places: Positions of these rows among all, ``k`` whole numbers below the count; each
                position belongs to one process.
            count: Number of all rows.
        """
        whole = rows.new_zeros(*rows.shape[:-2], count, rows.shape[-1])
        whole[..., places.to(rows.device), :] = rows
        return self.sum(whole)

    def first(self, rows: Tensor, most: int | None = None) -> Tensor:
        """Return the first rows of all processes, ``... x n x d``, in the order of ranks.

        Args:
            rows: Rows of this process.
            most: Largest number of rows to return; None: all.
        """
        if self.is_alone:
            return rows
        counts = self.counts(rows.shape[-2], rows.device)
        total, before = sum(counts), sum(counts[: self.rank])
        count = total if most is None else min(most, total)
        own = max(0, min(rows.shape[-2], count - before))
        return self.assembled(rows[..., :own, :], torch.arange(before, before + own), count)

    def largest(self, value: float, device: torch.device) -> float:
        """Return the largest value of all processes."""
        if self.is_alone:
            return value
        own = torch.zeros(self.size, dtype=torch.float64, device=device)
        own[self.rank] = value
        return float(self.sum(own).max())

    def counts(self, count: int, device: torch.device) -> list[int]:
        """Return the numbers of all processes."""
        own = torch.zeros(self.size, dtype=torch.int64, device=device)
        own[self.rank] = count
        numbers: list[int] = self.sum(own).tolist()
        return numbers


class Alone(Collective):
    """One process, whose sums are its own."""

    def sum(self, value: Tensor) -> Tensor:
        """Return the value."""
        return value


ALONE = Alone()
"""The collective of a model that no other process trains."""
