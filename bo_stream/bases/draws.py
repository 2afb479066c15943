"""Random subsets of things of which there are too many, with weights that make sums unbiased."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """Some of many, each with how many it stands for.

    Law: ``Σ weight · a[index]`` is on average ``Σ a`` of all.

    Attributes:
        index: Distinct, in order, ``k``.
        weight: ``k``, float64.
        of: How many there are.
    """

    index: Tensor
    weight: Tensor
    of: int

    @property
    def is_all(self) -> bool:
        """Whether nothing is left out."""
        return len(self.index) == self.of

    @classmethod
    def all(cls, of: int, device: torch.device) -> Draw:
        """Everything."""
        index = torch.arange(of, device=device)
        return cls(index, torch.ones(of, dtype=torch.float64, device=device), of)


def draw(count: int, of: int, generator: torch.Generator, device: torch.device) -> Draw:
    """One at random from each of ``count`` equal strata of a line of ``of``. Cost O(count).

    Strata may cut one in two: it is then drawn up to twice, and its weight says so. All for
    ``count = of``.

    Args:
        count: From 1 to ``of``.
        of: How many there are.
        generator: On the CPU, whatever the device.
        device: Of the result.
    """
    if count == of:
        return Draw.all(of, device)
    places = torch.rand(count, dtype=torch.float64, generator=generator)
    places = (places + torch.arange(count)) * (of / count)
    drawn = places.long().clamp_max(of - 1)
    index, counts = torch.unique_consecutive(drawn, return_counts=True)
    weight = counts.to(torch.float64) * (of / count)
    return Draw(index.to(device), weight.to(device), of)
