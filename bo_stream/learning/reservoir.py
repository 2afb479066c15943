"""A uniform sample of a stream, of bounded size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor


@dataclass
class Kept:
    """One observation that was kept.

    Attributes:
        X: ``d``.
        Y: ``m``.
        Yvar: ``m``, or None.
        coordinates: Where it entered the grid, ``k``.
    """

    X: Tensor
    Y: Tensor
    Yvar: Tensor | None
    coordinates: Tensor


class Reservoir:
    """Keeps each observation of a stream with the same probability. Source: Vitter (1985), R."""

    def __init__(self, size: int, seed: int) -> None:
        """Empty.

        Args:
            size: Most observations to keep.
            seed: Of the choice.

        Raises:
            ValueError: The size is negative.
        """
        if size < 0:
            raise ValueError(f"Expected to keep at least 0 observations, got {size}.")
        self.size = size
        self.kept: list[Kept] = []
        self._seen = 0
        self._generator = torch.Generator().manual_seed(seed)

    def columns(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """What is kept: ``n x d``, ``n x m``, and noise variances, ``n x m``, NaN where unknown."""
        if not self.kept:
            raise InputDataError("Expected kept observations, got none: give keep a budget.")
        X, Y = torch.stack([k.X for k in self.kept]), torch.stack([k.Y for k in self.kept])
        if all(k.Yvar is None for k in self.kept):
            return X, Y, None
        unknown = torch.full_like(self.kept[0].Y, torch.nan)
        return X, Y, torch.stack([unknown if k.Yvar is None else k.Yvar for k in self.kept])

    def offer(self, observation: Kept) -> None:
        """Keep an observation, or not. Cost O(1)."""
        self._seen += 1
        if len(self.kept) < self.size:
            self.kept.append(observation)
            return
        place = int(torch.randint(self._seen, (), generator=self._generator))
        if place < self.size:
            self.kept[place] = observation
