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
from bo_stream.bases.grid import Mesh
from bo_stream.bases.integrals import integrated_gram
from bo_stream.bases.interpolation import GridBasis
from bo_stream.bases.node_gram import NodeGram
from bo_stream.bases.node_statistics import accumulate, zero_statistics
from bo_stream.bases.pull_back import MeshPullBack
from bo_stream.models.streaming_gp import StreamingGP
from bo_stream.models.validation import check_finite, check_type

CHUNK_NUMBERS = 4_000_000
"""Numbers in one chunk of whatever is evaluated at many points."""

FEW_POINTS = 2048
"""Up to this many points are summed in feature space, more in the grid's cells."""


class Measure(ABC):
    """A probability measure over transformed inputs; ``tr(gram Σ)`` is its mean variance."""

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
        """``Σ weight z zᵀ``. Cost O(N r²), and O(N 7^d + (7 g)^d g²) for many points on a grid."""
        if isinstance(basis, GridBasis) and self.points.shape[0] > FEW_POINTS:
            return MeshPullBack(basis, basis.grid).congruence(self._on(basis.grid))
        size = max(1, CHUNK_NUMBERS // basis.rank)
        chunks = zip(self.points.split(size), self.weights.split(size), strict=True)
        return torch.stack([_weighted_gram(basis.features(X), w) for X, w in chunks]).sum(0)

    def _on(self, mesh: Mesh) -> NodeGram:
        """The points as weighted observations of zero."""
        count, device = self.points.shape[0], self.points.device
        statistics = zero_statistics(mesh, torch.Size(), 1, 1, device)
        ones = self.points.new_ones(1, count)
        weights = self.weights.unsqueeze(0)
        accumulate(statistics, mesh, self.points, torch.zeros_like(ones), ones, weights)
        return statistics.gram


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
        if not isinstance(basis, GridBasis):
            raise UnsupportedError(
                f"Expected an interpolation basis for an exact integral over bounds, got "
                f"{type(basis).__name__}. Pass mc_points drawn from the box instead."
            )
        return integrated_gram(basis, self.bounds)


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


def box_measure(model: StreamingGP, bounds: Tensor) -> BoxMeasure:
    """The uniform measure over the box that ``2 x d`` bounds become by the input transform.

    Raises:
        BotorchTensorDimensionError: Another shape.
        InputDataError: Values that are not finite.
        UnsupportedError: The model's stem or input transform bends the box.
        ValueError: A lower bound that is not below the upper one.
    """
    if not model.maps_boxes:
        raise UnsupportedError(
            "Expected mc_points for a model whose stem or input_transform bends boxes: the image "
            "of a box of bounds is no box. Draw mc_points from the bounds."
        )
    corners = listed_inputs(model, "bounds", bounds)
    if corners.shape[0] != 2:
        raise BotorchTensorDimensionError(
            f"Expected bounds of shape `2 x {model._input_dim}` (lower, upper), got "
            f"{tuple(bounds.shape)}."
        )
    if not bool((bounds[0] < bounds[1]).all()):
        raise ValueError(f"Expected bounds with lower < upper, got {bounds.tolist()}.")
    return BoxMeasure(box_of(corners))


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
    """Check ``N x d`` inputs of any floating dtype, and transform them; float64.

    Raises:
        BotorchTensorDimensionError: Another shape.
        InputDataError: No rows, or values that are not finite.
        UnsupportedError: The model's input transform makes several inputs of each.
    """
    check_type(name, X, X)
    if X.ndim != 2 or X.shape[-1] != model._input_dim:
        raise BotorchTensorDimensionError(
            f"Expected {name} of shape `N x {model._input_dim}`, got {tuple(X.shape)}."
        )
    if X.shape[0] == 0:
        raise InputDataError(f"Expected {name} to hold at least one point, got none.")
    check_finite(name, X)
    model.eval()
    inputs = model.process_inputs(X.detach().to(model.train_targets))
    if inputs.shape[0] != X.shape[0]:
        raise UnsupportedError(
            f"Expected a model of one input for each of {name}, got one whose input_transform "
            f"{type(model._input_transform).__name__} makes {inputs.shape[0] // X.shape[0]}. Use "
            "BoTorch's qNegIntegratedPosteriorVariance and optimize_acqf_discrete."
        )
    return inputs
