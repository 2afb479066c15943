"""Stationary one-dimensional correlations by closed formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Correlation = Callable[..., Tensor]


@dataclass(frozen=True)
class Formula:
    """A correlation as a function of the distance, 1 at 0, and what is known of it.

    Attributes:
        correlation: ``correlation(distance, *parameters)``, which broadcast.
        smoothness: ν of a Matérn kernel, infinite where all derivatives exist.
        frequencies: Which of the parameters are frequencies, in cycles per unit of the input.
    """

    correlation: Correlation
    smoothness: float
    frequencies: tuple[int, ...] = ()


def _squared_exponential(distance: Tensor, lengthscale: Tensor) -> Tensor:
    return torch.exp(-0.5 * (distance / lengthscale).square())


def _matern12(distance: Tensor, lengthscale: Tensor) -> Tensor:
    return torch.exp(-distance / lengthscale)


def _matern32(distance: Tensor, lengthscale: Tensor) -> Tensor:
    scaled = math.sqrt(3.0) * distance / lengthscale
    return (1.0 + scaled) * torch.exp(-scaled)


def _matern52(distance: Tensor, lengthscale: Tensor) -> Tensor:
    scaled = math.sqrt(5.0) * distance / lengthscale
    return (1.0 + scaled + scaled.square() / 3.0) * torch.exp(-scaled)


def _periodic(distance: Tensor, frequency: Tensor, lengthscale: Tensor) -> Tensor:
    # gpytorch's lengthscale: dimensionless and not squared
    return torch.exp(-2.0 * torch.sin(math.pi * frequency * distance).square() / lengthscale)


def _spectral_component(distance: Tensor, frequency: Tensor, scale: Tensor) -> Tensor:
    # spectral density: normal, mirrored at 0 [Wilson and Adams, 2013, eq. 11]
    decay = torch.exp(-2.0 * (math.pi * scale * distance).square())
    return decay * torch.cos(2.0 * math.pi * frequency * distance)


SQUARED_EXPONENTIAL = Formula(_squared_exponential, math.inf)
MATERN: dict[float, Formula] = {
    0.5: Formula(_matern12, 0.5),
    1.5: Formula(_matern32, 1.5),
    2.5: Formula(_matern52, 2.5),
}
PERIODIC = Formula(_periodic, math.inf, frequencies=(0,))
SPECTRAL_COMPONENT = Formula(_spectral_component, math.inf, frequencies=(0,))
