"""What a variance is averaged over: weighted points, or a box, as a gram in feature space."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from torch import Tensor

from bo_stream.bases.basis import Basis
from bo_stream.bases.interpolation import InterpolationBasis
from bo_stream.models.streaming_gp import StreamingGP
from bo_stream.models.validation import check_finite

CHUNK_NUMBERS = 4_000_000
"""Features evaluated at once."""


class Measure(ABC):
    """A probability measure over transformed inputs: ``tr(gram Σ)`` is the mean variance under it."""

    @property
    @abstractmethod
    def corners(self) -> Tensor:
        """The box that holds it, ``2 x d``."""

    @abstractmethod
    def gram(self, basis: Basis) -> Tensor:
        """Mean of ``z zᵀ``, ``... x m x r x r``."""


@dataclass(frozen=True)
class PointMeasure(Measure):
    """Weighted points.

    Attributes:
        points: ``N x d``, in transformed inputs.
        weights: ``N``, summing to one.
    """

    points: Tensor
    weights: Tensor

    @property
    def corners(self) -> Tensor:
        """The points' box."""
        return box_of(self.points)

    def gram(self, basis: Basis) -> Tensor:
        """``Σ weight z zᵀ``, in chunks of points. Cost O(N r²), memory O(r²)."""
        size = max(1, CHUNK_NUMBERS // basis.rank)
        chunks = zip(self.points.split(size), self.weights.split(size), strict=True)
        return sum(_weighted_gram(basis.features(X), weights) for X, weights in chunks)


def _weighted_gram(features: Tensor, weights: Tensor) -> Tensor:
    return features.mT @ (features * weights.unsqueeze(-1))


@dataclass(frozen=True)
class BoxMeasure(Measure):
    """The uniform measure over a box.

    Attributes:
        bounds: ``2 x d``, in transformed inputs.
    """

    bounds: Tensor

    @property
    def corners(self) -> Tensor:
        """The box."""
        return self.bounds

    def gram(self, basis: Basis) -> Tensor:
        """Exact, dimension by dimension. Cost O(r²).

        Raises:
            UnsupportedError: The basis has no closed form.
        """
        if not isinstance(basis, InterpolationBasis):
            raise UnsupportedError(
                f"Expected an interpolation basis for an exact integral over bounds, got "
                f"{type(basis).__name__}. Pass mc_points drawn from the box instead."
            )
        return basis.integrated_gram(self.bounds)


def box_of(points: Tensor) -> Tensor:
    """Lower and upper corner of ``N x d`` points, ``2 x d``."""
    return torch.stack((points.amin(0), points.amax(0)))


def point_measure(
    model: StreamingGP, mc_points: Tensor, weights: Tensor | None = None
) -> PointMeasure:
    """The measure of ``N x d`` points, before the input transform.

    Raises:
        BotorchTensorDimensionError: Shapes do not fit the model.
        InputDataError: No points, values that are not finite, or negative weights.
    """
    points = listed_inputs(model, "mc_points", mc_points)
    if weights is None:
        weights = points.new_ones(points.shape[0])
    _check_weights(weights, points.shape[0])
    shares = weights.detach().to(points)
    return PointMeasure(points, shares / shares.sum())


def _check_weights(weights: Tensor, count: int) -> None:
    if weights.shape != (count,):
        raise BotorchTensorDimensionError(
            f"Expected weights of shape `{count}`, one for each of mc_points, got "
            f"{tuple(weights.shape)}."
        )
    check_finite("weights", weights)
    if bool((weights < 0).any()) or not bool((weights > 0).any()):
        raise InputDataError(
            "Expected weights to be zero or more, and positive somewhere, got "
            f"{int((weights < 0).sum())} negative and {int((weights > 0).sum())} positive ones."
        )


def listed_inputs(model: StreamingGP, name: str, X: Tensor) -> Tensor:
    """Check ``N x d`` inputs and transform them; float64.

    Raises:
        BotorchTensorDimensionError: Another shape.
        InputDataError: No rows, or values that are not finite.
    """
    if X.ndim != 2 or X.shape[-1] != model._input_dim:
        raise BotorchTensorDimensionError(
            f"Expected {name} of shape `N x {model._input_dim}`, got {tuple(X.shape)}."
        )
    if X.shape[0] == 0:
        raise InputDataError(f"Expected {name} to hold at least one point, got none.")
    check_finite(name, X)
    model.eval()
    inputs: Tensor = model.transform_inputs(X.detach())
    return inputs.double()
