"""One-dimensional kernels with their parameters, and weighted sums of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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


SPREAD = 0.02
"""Cycles over the box by which :meth:`Factor.spread` moves frequencies."""


@dataclass(frozen=True)
class Factor:
    """One stationary one-dimensional kernel, ``correlation(|x − x'|, *parameters)``, 1 at 0.

    Attributes:
        dimension: The input dimension it acts on.
        formula: The correlation.
        parameters: Positive numbers whose logarithms tell how far the kernel has moved
            (lengthscales, frequencies, relative weights), each one per batch element.
    """

    dimension: int
    formula: Formula
    parameters: tuple[Tensor, ...]

    def __call__(self, distance: Tensor) -> Tensor:
        """Correlations at ``g x g'`` distances, ``batch x g x g'``."""
        return self.formula.correlation(distance, *(p[..., None, None] for p in self.parameters))

    def spread(self, width: float) -> Factor:
        """The mean of the kernel and of two with frequencies ``SPREAD / width`` above and below.

        A kernel with a few sharp frequencies has few eigenvectors, and these do not hold its
        derivative in a frequency. Those of the mean do.
        """
        if not self.formula.frequencies:
            return self
        parts = [[self._shifted(shift / width)] for shift in (-SPREAD, 0.0, SPREAD)]
        third = torch.full_like(self.parameters[0], 1.0 / len(parts))
        return weighted_sum(self.dimension, [third] * len(parts), parts)

    def _shifted(self, shift: float) -> Factor:
        frequencies = self.formula.frequencies
        moved = [p + shift if i in frequencies else p for i, p in enumerate(self.parameters)]
        return replace(self, parameters=tuple(moved))


def weighted_sum(
    dimension: int, weights: Sequence[Tensor], parts: Sequence[Sequence[Factor]]
) -> Factor:
    """One factor for a sum of products of factors. Costs as much as all its parts.

    Args:
        dimension: The input dimension that all act on.
        weights: One per part, each one per batch element; they sum to one.
        parts: The factors of each part.
    """
    factors = [factor for part in parts for factor in part]
    parameters, frequencies = list(weights), list[int]()
    for factor in factors:
        frequencies += [len(parameters) + i for i in factor.formula.frequencies]
        parameters += factor.parameters
    terms = tuple(tuple((f.formula.correlation, len(f.parameters)) for f in p) for p in parts)
    smoothness = min(factor.formula.smoothness for factor in factors)
    formula = Formula(_WeightedSum(terms), smoothness, tuple(frequencies))
    return Factor(dimension, formula, tuple(parameters))


@dataclass(frozen=True)
class _WeightedSum:
    """Correlation ``Σ_j weight_j Π correlations_j``; all weights come before the other parameters.

    Attributes:
        terms: Per part its correlations, each with the number of its parameters.
    """

    terms: tuple[tuple[tuple[Correlation, int], ...], ...]

    def __call__(self, distance: Tensor, *parameters: Tensor) -> Tensor:
        weights, own = parameters[: len(self.terms)], iter(parameters[len(self.terms) :])
        total = torch.zeros_like(distance)
        for weight, correlations in zip(weights, self.terms, strict=True):
            product = weight
            for correlation, count in correlations:
                product = product * correlation(distance, *(next(own) for _ in range(count)))
            total = total + product
        return total
