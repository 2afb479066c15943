"""Effects of hypothetical observations at target points; baselines that are evaluated once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.cached_cholesky import CachedCholeskyMCSamplerMixin
from botorch.exceptions.errors import InputDataError
from botorch.models.model import Model, ModelList
from botorch.models.model_list_gp_regression import ModelListGP
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline
from scipy.special import ndtr, owens_t
from torch import Tensor

from bo_stream.models.base import StreamingGP
from bo_stream.tensors import map_tensors

_NUM_ANGLES = 97
"""Nodes in the angle, from 0 to π/2, denser near 0: uniform in its square root."""

_DIRECT = 22
"""Angles, up to 0.08, at which expected losses are integrated for each target itself: where
observations tell little, the kink of a loss stays sharper than a table could show."""

_FARTHEST = 7.0
"""Distance from the threshold, in standard deviations, beyond which expected losses are those at
this distance, made smaller in proportion to the probability of the other side."""

_NUM_DISTANCES = 449
"""Nodes in the distance from the threshold, 32 a standard deviation."""

_ORDER = 24
"""Order of the Hermite expansion of a prevalence."""

_Array = NDArray[np.float64]
_ANGLES: _Array = 0.5 * math.pi * np.linspace(0.0, 1.0, _NUM_ANGLES) ** 2
_DISTANCES: _Array = np.linspace(-_FARTHEST, _FARTHEST, _NUM_DISTANCES)
_FAR_NODES: _Array = np.linspace(-9.0, 9.0, 901)


@dataclass(frozen=True)
class Lookahead(ABC):
    """Expected uncertainties of M target points, functions of the variance removed from each.

    Observations that remove r of the variance s² of ``f ~ N(m, s²)`` move its mean by ``N(0, r)``
    and leave the variance ``s² − r``.

    Attributes:
        variance: s², ``M``. Further tensors are ``M`` or ``K x M``, the latter with more after M.
    """

    variance: Tensor

    @abstractmethod
    def __call__(self, removed: Tensor) -> Tensor:
        """Compute the expected uncertainties for removed variances, ``... x M`` each."""

    def part(self, chosen: slice) -> Self:
        """Return the functions of some of the targets."""
        return map_tensors(self, lambda t: t[chosen] if t.ndim == 1 else t[:, chosen])


@dataclass(frozen=True)
class LinearLookahead(Lookahead):
    """Uncertainties ``slope (s² − r)``.

    Attributes:
        slope: ``M``, not negative.
    """

    slope: Tensor

    def __call__(self, removed: Tensor) -> Tensor:
        """Compute the expected uncertainties; see :class:`Lookahead`."""
        return self.slope * (self.variance - removed)


@dataclass(frozen=True)
class ShareLookahead(Lookahead):
    """Uncertainties that depend on the share ``r / s²`` of the variance removed.

    Attributes:
        coefficients: Of each target, ``K x M``, or ``K x M x cells``.
    """

    coefficients: Tensor

    def share(self, removed: Tensor) -> Tensor:
        """Compute ``r / s²`` within [0, 1], 0 where there is no variance."""
        least = torch.finfo(self.variance.dtype).tiny
        return (removed / self.variance.clamp_min(least)).clamp(0.0, 1.0)


@dataclass(frozen=True)
class PolynomialLookahead(ShareLookahead):
    """Polynomials in the share, with the coefficients of powers from 0, ``K x M``."""

    def __call__(self, removed: Tensor) -> Tensor:
        """Compute the expected uncertainties; see :class:`Lookahead`."""
        share = self.share(removed)
        value = self.coefficients[-1].expand_as(share)
        for coefficient in self.coefficients.flipud()[1:]:
            value = torch.addcmul(coefficient, value, share)
        return value


@dataclass(frozen=True)
class SplineLookahead(ShareLookahead):
    """Cubic splines in ``√θ`` with the angle ``θ = arcsin √(r / s²)``.

    The coefficients are of powers from 3 to 0 of the position in a cell, ``4 x M x cells``.
    """

    @classmethod
    def of(cls, variance: Tensor, values: _Array) -> Self:
        """Interpolate values at the angles, ``M x 97``."""
        spline = CubicSpline(np.arange(_NUM_ANGLES), values, axis=-1).c  # power x cell x M
        return cls(variance, torch.as_tensor(spline.swapaxes(1, 2).copy()).to(variance))

    def __call__(self, removed: Tensor) -> Tensor:
        """Compute the expected uncertainties; see :class:`Lookahead`."""
        cells = self.coefficients.shape[-1]
        angle = self.share(removed).sqrt().asin()
        position = angle.sqrt() * (cells / math.sqrt(0.5 * math.pi))
        cell = position.floor().clamp_max(cells - 1)
        position = position - cell
        rows = torch.arange(len(self.variance), device=position.device) * cells
        index = cell.long() + rows
        value, *rest = (power.flatten().take(index) for power in self.coefficients)
        for coefficient in rest:
            value = torch.addcmul(coefficient, value, position)
        return value


def prevalence_variance(mean: Tensor, variance: Tensor, slope: Tensor) -> PolynomialLookahead:
    """Return ``slope · E Var(p)`` of the prevalence ``p = 1 / (1 + exp(−f))``.

    Two values of f of correlation ``c = r / s²`` have ``E (E p)² = Σ_k h_k² c^k`` with the Hermite
    coefficients ``h_k = E p(m + s Z) He_k(Z) / √k!`` (Mehler's expansion); ``E p²`` is the same sum
    for c = 1. The part of ``E p²`` beyond the sum up to order 24 is the coefficient of the next
    power, which errs by at most that coefficient times the power. All by the trapezoidal rule.

    Args:
        mean: m, ``M``.
        variance: s², ``M``.
        slope: ``M``.
    """
    nodes = torch.linspace(-11.0, 11.0, 221, dtype=mean.dtype, device=mean.device)
    weights = (-0.5 * nodes.square()).exp()
    weights = weights / weights.sum()
    chance = (mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * nodes).sigmoid()
    second = chance.square() @ weights
    hermite = [torch.ones_like(nodes), nodes]  # normalised, of orders from 0
    for k in range(1, _ORDER):
        hermite.append((nodes * hermite[k] - math.sqrt(k) * hermite[k - 1]) / math.sqrt(k + 1.0))
    squares = [(chance @ (values * weights)).square() for values in hermite]
    rest = (second - torch.stack(squares).sum(0)).clamp_min(0.0)
    spread = torch.stack([*squares[1:], rest])
    coefficients = torch.cat((spread.sum(0, keepdim=True), -spread))
    return PolynomialLookahead(variance, slope * coefficients)


def misclassification(distance: Tensor, variance: Tensor) -> SplineLookahead:
    """Return the expected probability of a wrong class, above or below a threshold t.

    f and its new mean lie on different sides of t with probability ``2 T(a, cot θ)``, T Owen's
    function and ``a = (m − t) / s``: ``Φ(−|a|)`` without observations. Exact at the nodes.

    Args:
        distance: a, ``M``.
        variance: s², ``M``.
    """
    a = distance.cpu().numpy()[:, np.newaxis]
    with np.errstate(divide="ignore"):
        cotangent = 1.0 / np.tan(_ANGLES)
    cotangent[-1] = 0.0
    return SplineLookahead.of(variance, 2.0 * owens_t(a, cotangent))


Loss = Callable[[Tensor], Tensor]
"""Maps probabilities of exceeding a threshold to expected losses, elementwise."""


def exceedance_loss(loss: Loss, distance: Tensor, variance: Tensor) -> SplineLookahead:
    """Return the expected loss ``E ψ(P(f > t | observations))``.

    More than ``b = 7`` standard deviations below the threshold its difference from ``ψ(0)``, above
    it that from ``ψ(1)``, is ``Φ(−|a|) / Φ(−b)`` times the difference at b.

    Args:
        loss: ψ.
        distance: ``a = (m − t) / s``, ``M``.
        variance: s², ``M``.
    """
    a = distance.cpu().numpy()
    near = np.clip(a, -_FARTHEST, _FARTHEST)
    few = _expected_losses(loss, near, _ANGLES[:_DIRECT], points=161)
    chances = np.concatenate(([0.0, 1.0], ndtr(_FAR_NODES)))
    losses = evaluated(loss, chances)
    most = _interpolated(_KnownLoss(losses.tobytes(), loss))(near)
    values = np.concatenate((few, most), -1)
    far = a != near
    certain = np.where(a[far] < 0.0, losses[0], losses[1])[:, np.newaxis]
    faded = (ndtr(-np.abs(a[far])) / ndtr(-_FARTHEST))[:, np.newaxis]
    values[far] = certain + (values[far] - certain) * faded
    return SplineLookahead.of(variance, values)


@dataclass(frozen=True)
class _KnownLoss:
    """A loss, which is another one when its values are others."""

    values: bytes
    loss: Loss = field(compare=False)


@lru_cache(maxsize=8)
def _interpolated(known: _KnownLoss) -> CubicSpline:
    """Interpolate expected losses in the distance, at all angles but the first ones."""
    table = _expected_losses(known.loss, _DISTANCES, _ANGLES[_DIRECT:])
    return CubicSpline(_DISTANCES, table, axis=0)


def _expected_losses(loss: Loss, distances: _Array, angles: _Array, points: int = 401) -> _Array:
    """Integrate ``V(a, θ) = E ψ(Φ(Y))`` with ``Y ~ N(a / cos θ, tan² θ)``.

    By the trapezoidal rule, exponentially accurate where ψ is smooth: in ``(Y − E Y) / tan θ`` up
    to 45 degrees, beyond them in Y, of ψ less its chord from 0 to 1, whose expectation is the chord
    at ``Φ(a)``.

    Args:
        loss: ψ.
        distances: a, ``n``.
        angles: θ from 0 to π/2, ``k``.
        points: Nodes up to 45 degrees.

    Returns:
        ``n x k``.
    """
    z = np.linspace(-8.5, 8.5, points)
    normal = np.exp(-0.5 * z**2) * (z[1] - z[0]) / math.sqrt(2.0 * math.pi)
    y = _FAR_NODES
    ends = evaluated(loss, np.array([0.0, 1.0]))
    bump = evaluated(loss, ndtr(y)) - ends[0] - (ends[1] - ends[0]) * ndtr(y)
    chord = ends[0] + (ends[1] - ends[0]) * ndtr(distances)

    values = np.empty((len(distances), len(angles)))
    for column, angle in zip(values.T, angles, strict=True):
        centre, spread = distances[:, np.newaxis] / math.cos(angle), math.tan(angle)
        if spread == 0.0:
            column[:] = evaluated(loss, ndtr(distances))
        elif spread <= 1.0:
            column[:] = evaluated(loss, ndtr(centre + spread * z)) @ normal
        else:
            density = np.exp(-0.5 * ((y - centre) / spread) ** 2) @ bump
            column[:] = chord + density * (y[1] - y[0]) / (spread * math.sqrt(2.0 * math.pi))
    return values


def evaluated(loss: Loss, chance: _Array) -> _Array:
    """Evaluate a loss at probabilities.

    Raises:
        InputDataError: It returns another shape, or values that are not finite.
    """
    given = loss(torch.as_tensor(chance))
    if not isinstance(given, Tensor) or given.shape != chance.shape:
        raise InputDataError(
            f"Expected loss to map probabilities of shape {chance.shape} to losses of the same "
            f"shape, got {getattr(given, 'shape', type(given).__name__)}."
        )
    values: _Array = given.detach().cpu().double().numpy()
    if not np.isfinite(values).all():
        at = chance[~np.isfinite(values)].ravel()[0]
        raise InputDataError(
            f"Expected loss to be finite for probabilities from 0 to 1, got {loss} that is not at "
            f"{at:.3g}."
        )
    return values


# --- acquisition functions whose baseline and pending points are evaluated once ------------------


A = TypeVar("A", bound=AcquisitionFunction)


def evaluate_known_points_once(acqf: A) -> A:
    """Cache the model's evaluations at an acquisition function's baseline and pending points.

    Monte Carlo acquisition functions compute the joint posterior of q candidates and k points that
    stay: pending ones, and the baseline of functions like ``qLogNoisyExpectedImprovement`` and
    ``qLogNoisyExpectedHypervolumeImprovement``. Cost of streaming models, alone or in a list,
    O(q r² + k q r) instead of O((k + q) r²); values and gradients stay as they are. Other models
    stay as they are, and pending points that are set later are evaluated with every candidate.

    Args:
        acqf: Changed in place; its model is not.
    """
    known: Any = acqf
    baseline = known.X_baseline if isinstance(acqf, CachedCholeskyMCSamplerMixin) else None
    pending = getattr(acqf, "X_pending", None)
    if baseline is not None or pending is not None:
        known.model = _with_known_points(known.model, baseline, pending)
    return acqf


def _with_known_points(model: Model, first: Tensor | None, last: Tensor | None) -> Model:
    """Return a model, or list of models, that caches k points before and k' after all others."""
    if isinstance(model, StreamingGP):
        return model.with_known_points(first, last)
    if not isinstance(model, ModelList | ModelListGP):
        return model
    parts: list[Any] = [_with_known_points(cast(Model, part), first, last) for part in model.models]
    return type(model)(*parts)
