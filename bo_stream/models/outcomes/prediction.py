"""Outcomes at single points: their moments, log density and draws, with the noise in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Predictive:
    """Mean and variance of outcomes at single points, ``... x q x m`` each.

    Attributes:
        mean: Of a label, its probability; of counts, the positives of a hypothetical survey.
        variance: Of the outcome, noise included.
    """

    mean: Tensor
    variance: Tensor
