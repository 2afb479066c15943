"""Criteria: uncertainties of target points that a round of observations is to reduce.

At the end the functions and quadratic forms of features at many sites, which gains are made of.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from bo_stream.acquisition.feature_nipv import CHUNK_NUMBERS
from bo_stream.acquisition.lookahead import (
    LinearLookahead,
    Lookahead,
    Loss,
    exceedance_loss,
    misclassification,
    prevalence_variance,
)
from bo_stream.bases.grid.contraction import KroneckerPullBack
from bo_stream.bases.grid.interpolation import GridBasis, InterpolationBasis
from bo_stream.bases.grid.mesh import STENCIL, Grid, legendre, outer_product, ravel
from bo_stream.bases.grid.mesh import weights as cubic_weights
from bo_stream.bases.inducing import Basis, InducingBasis, frozen
from bo_stream.tensors import map_tensors

Scale = Literal["latent", "prevalence"]
"""The process f itself, or the prevalence ``1 / (1 + exp(−f))`` whose logit it is."""

_SMALLEST_VARIANCE = 1e-18
"""Targets of a smaller variance count as known to this one."""


class HasThreshold:
    """Criteria about a threshold of the process f, or of the prevalence ``1 / (1 + exp(−f))``.

    Attributes:
        threshold: In the units that ``scale`` names.
        scale: "latent": of f; "prevalence": a prevalence in (0, 1).
    """

    threshold: float
    scale: Scale

    def __post_init__(self) -> None:
        """Check threshold and scale.

        Raises:
            ValueError: It is not finite, or a prevalence outside (0, 1); the scale is another one.
        """
        _check_scale(self.scale)
        if self.scale == "latent":
            if not math.isfinite(self.threshold):
                raise ValueError(f"Expected a finite threshold, got {self.threshold}.")
        elif not 0.0 < self.threshold < 1.0:
            raise ValueError(
                f"Expected threshold to be a prevalence in (0, 1), got {self.threshold}. From per "
                'cent: divide by 100. For a threshold of f itself pass scale="latent".'
            )

    @property
    def latent(self) -> float:
        """The threshold in units of f."""
        if self.scale == "latent":
            return float(self.threshold)
        return math.log(self.threshold) - math.log1p(-self.threshold)

    def _distance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return (m − threshold) / s for values ``f ~ N(m, s²)``, ``M``."""
        return (mean - self.latent) / variance.clamp_min(_SMALLEST_VARIANCE).sqrt()


@dataclass(frozen=True)
class Criterion(ABC):
    """An uncertainty U of each target point; a choice reduces the weighted sum over targets.

    A target has ``f ~ N(m, s²)`` now, in the units of the outcomes; for counts f is the logit of
    prevalence. Observations that remove r of its variance move its mean by ``N(0, r)``.
    """

    @abstractmethod
    def lookahead(self, mean: Tensor, variance: Tensor) -> Lookahead:
        """Return E U of M targets as a function of the removed variance.

        Args:
            mean: m before the round, ``M``.
            variance: s² before the round, ``M``.
        """

    def expected(self, mean: Tensor, variance: Tensor, removed: Tensor) -> Tensor:
        """Compute E U after observations.

        Args:
            mean: m before them, ``M``.
            variance: s² before them, ``M``.
            removed: Variance r that they remove, at most s², ``... x M``.

        Returns:
            ``... x M``.
        """
        return self.lookahead(mean, variance)(removed)

    def current(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Compute U before observations, ``M``; arguments as :meth:`expected`."""
        return self.expected(mean, variance, torch.zeros_like(variance))


@dataclass(frozen=True)
class IntegratedVariance(Criterion):
    """Variance of f, or of prevalence (integrated mean squared error, IMSE).

    ``s² − r``, the same for all outcomes; on the scale of prevalence p ``E p² − E (E p)²``,
    which the counts to come change.

    Attributes:
        scale: "latent": of f; "prevalence": of ``1 / (1 + exp(−f))``.
    """

    scale: Scale = "latent"

    def __post_init__(self) -> None:
        """Check the scale; ValueError."""
        _check_scale(self.scale)

    def lookahead(self, mean: Tensor, variance: Tensor) -> Lookahead:
        """Return the expected variance; see :class:`Criterion`."""
        return _variance(self.scale, mean, variance, torch.ones_like(variance))


@dataclass(frozen=True)
class TargetedVariance(HasThreshold, Criterion):
    """Variance of points near a threshold t (targeted integrated mean squared error, tIMSE).

    The variance as of :class:`IntegratedVariance` times the density of ``N(m, s² + width²)`` at t,
    with m and s² before the round. Source: Picheny et al. (2010), Journal of Mechanical Design
    132(7), eq. 16, with the weight that uses the whole uncertainty of the prediction.

    Attributes:
        threshold: The threshold t, in the units that ``scale`` names.
        scale: "latent": t and the variance are of f; "prevalence": of ``1 / (1 + exp(−f))``.
        width: Standard deviation of a band about t that is of interest, in units of f.
    """

    threshold: float
    scale: Scale
    width: float = 0.0

    def __post_init__(self) -> None:
        """Check threshold, scale and width; ValueError."""
        super().__post_init__()
        if not 0.0 <= self.width < math.inf:
            raise ValueError(f"Expected width to be zero or more and finite, got {self.width}.")

    def lookahead(self, mean: Tensor, variance: Tensor) -> Lookahead:
        """Return the expected weighted variance; see :class:`Criterion`."""
        spread = (variance + self.width**2).clamp_min(_SMALLEST_VARIANCE).sqrt()
        gap = (mean - self.latent) / spread
        density = (-0.5 * gap.square()).exp() / (spread * math.sqrt(2.0 * math.pi))
        return _variance(self.scale, mean, variance, density)


@dataclass(frozen=True)
class ExceedanceEntropy(HasThreshold, Criterion):
    """Entropy of whether a point exceeds a threshold t, in nats.

    With P the probability of f > t: ``−P log P − (1 − P) log(1 − P)``; expected to an absolute
    error below 1e-6.

    Attributes:
        threshold: The threshold t, in the units that ``scale`` names.
        scale: "latent": t is a value of f; "prevalence": of ``1 / (1 + exp(−f))``.
    """

    threshold: float
    scale: Scale

    def lookahead(self, mean: Tensor, variance: Tensor) -> Lookahead:
        """Return the expected entropy; see :class:`Criterion`."""
        return exceedance_loss(binary_entropy, self._distance(mean, variance), variance)


@dataclass(frozen=True)
class Misclassification(HasThreshold, Criterion):
    """Probability that a point is called on the wrong side of a threshold t.

    ``Φ(−|m − t| / s)`` now; expected after the round ``2 T((m − t) / s, √(s² / r − 1))`` with
    Owen's function T. The sum over targets is the expected number of wrong calls: stepwise
    uncertainty reduction, SUR. Source: Bect et al. (2012), Statistics and Computing 22, eq. 17,
    integrated in closed form as of Chevalier et al. (2014), Technometrics 56(4). Interpolated, with
    an absolute error below 1e-5.

    With a ``miss_cost`` w other than 1 the expected cost of the cheaper call, ``min(w P, 1 − P)``
    with P the probability of f > t, by the table of :class:`ExpectedLoss`: a point is called above
    from ``P = 1 / (1 + w)`` on.

    Attributes:
        threshold: The threshold t, in the units that ``scale`` names.
        scale: "latent": t is a value of f; "prevalence": of ``1 / (1 + exp(−f))``.
        miss_cost: Cost of calling a point below that is above, in costs of the opposite mistake.
    """

    threshold: float
    scale: Scale
    miss_cost: float = 1.0

    def __post_init__(self) -> None:
        """Check threshold, scale and cost; ValueError."""
        super().__post_init__()
        if not 0.0 < self.miss_cost < math.inf:
            raise ValueError(f"Expected miss_cost above 0 and finite, got {self.miss_cost}.")

    def lookahead(self, mean: Tensor, variance: Tensor) -> Lookahead:
        """Return the expected cost of a wrong call; see :class:`Criterion`."""
        distance = self._distance(mean, variance)
        if self.miss_cost == 1.0:
            return misclassification(distance, variance)
        return exceedance_loss(CheaperCall(self.miss_cost), distance, variance)


@dataclass(frozen=True)
class CheaperCall:
    """Expected cost ``min(w P, 1 − P)`` of calling a point above or below, whichever is cheaper.

    Attributes:
        miss_cost: Cost w of calling a point below that is above; the opposite mistake costs 1.
    """

    miss_cost: float

    def __call__(self, chance: Tensor) -> Tensor:
        """Compute the expected loss for probabilities P of being above, elementwise."""
        return torch.minimum(self.miss_cost * chance, 1.0 - chance)


@dataclass(frozen=True)
class ExpectedLoss(HasThreshold, Criterion):
    """Loss of a programme's best action, given the probability of exceeding a threshold.

    Such as ``lambda P: torch.minimum(10.0 * P, 1.0 - P)``: leaving out a site above the threshold
    costs 10, treating one below costs 1. Losses of best actions are concave in P; observations can
    only lower their expectation.

    The expectation is interpolated, with an error below 1e-6 of the loss's range where the loss is
    smooth, and below 1e-4 of it where it has kinks.

    Attributes:
        loss: Maps probabilities to losses, elementwise, by torch.
        threshold: The threshold t, in the units that ``scale`` names.
        scale: "latent": t is a value of f; "prevalence": of ``1 / (1 + exp(−f))``.
    """

    loss: Loss
    threshold: float
    scale: Scale

    def lookahead(self, mean: Tensor, variance: Tensor) -> Lookahead:
        """Return the expected loss; see :class:`Criterion`."""
        return exceedance_loss(self.loss, self._distance(mean, variance), variance)


def binary_entropy(chance: Tensor) -> Tensor:
    """Compute ``−P log P − (1 − P) log(1 − P)``, in nats."""
    return torch.special.entr(chance) + torch.special.entr(1.0 - chance)


def _check_scale(scale: str) -> None:
    if scale not in get_args(Scale):
        raise ValueError(f'Expected scale "latent" or "prevalence", got {scale!r}.')


def _variance(scale: Scale, mean: Tensor, variance: Tensor, slope: Tensor) -> Lookahead:
    if scale == "latent":
        return LinearLookahead(variance, slope)
    return prevalence_variance(mean, variance, slope)


# --- sites: functions and quadratic forms of a basis's features at many inputs -------------------


KEPT_NUMBERS = 32_000_000
"""Up to this many interpolation weights are cached; beyond it they are computed at each use."""

_KEPT_FEATURES = 500_000_000
"""Up to this many features are cached in float32, 2 GB; beyond it they are computed at each use."""

_SINGLE = torch.float32
_ROWS = 2048


def sites(basis: Basis, X: Tensor, cached: bool = False) -> FeatureSites:
    """Return the sites of a basis.

    Args:
        basis: Any.
        X: Transformed inputs, ``N x d``.
        cached: Whether features are cached, in float32, where that is not a single grid's and
            memory allows it.
    """
    if isinstance(basis, GridBasis) and len(basis.parts) == 1:
        (part,) = basis.parts
        keep = X.shape[0] * STENCIL**part.grid.dim <= KEPT_NUMBERS
        return _GridSites(basis, X, part, tuple(_locate(part.grid, X)) if keep else None)
    if cached and X.shape[0] * basis.rank <= _KEPT_FEATURES:
        return _CachedSites.of(basis, X)
    return _DenseSites(basis, X)


@dataclass(frozen=True)
class FeatureSites(ABC):
    """N inputs of one basis with r features z and m outputs.

    Attributes:
        basis: The basis.
        X: Transformed inputs, ``N x d``.
    """

    basis: Basis
    X: Tensor

    @abstractmethod
    def linear(self, weights: Tensor) -> Tensor:
        """Evaluate k functions ``z(x)ᵀ w`` at all sites, ``m x r x k -> m x k x N``."""

    @abstractmethod
    def quadratic(self, matrices: Tensor) -> Tensor:
        """Evaluate k symmetric ``z(x)ᵀ M z(x)`` at all sites, ``k x m x r x r -> k x m x N``."""

    def residual(self) -> Tensor:
        """Compute the variance of one output outside the features at all sites, ``N``."""
        basis: Any = self.basis
        if not basis.has_residual:
            return self.X.new_zeros(len(self.X))
        parts = [basis.residual_variance(X)[0] for X in self.X.split(_ROWS)]
        return torch.cat(parts).to(self.X)


@dataclass(frozen=True)
class _DenseSites(FeatureSites):
    """Sites of any basis, whose features are computed at each use, in chunks.

    Cost O(N r) a function, O(N r²) a form.
    """

    def _features(self) -> Iterator[Tensor]:
        size = max(1, CHUNK_NUMBERS // self.basis.rank)
        return (self.basis.features(X) for X in self.X.split(size))

    def linear(self, weights: Tensor) -> Tensor:
        return torch.cat([weights.mT @ z.mT for z in self._features()], -1)

    def quadratic(self, matrices: Tensor) -> Tensor:
        return torch.cat([((z @ matrices) * z).sum(-1) for z in self._features()], -1)


@dataclass(frozen=True)
class _CachedSites(FeatureSites):
    """Sites of any basis of one output with cached features, in float32.

    Memory O(N r). Cost O(N r²) once, O(N r) a function, O(N r²) a form.

    Attributes:
        features: ``N x r``.
        left: Variance outside the features, ``N``.
    """

    features: Tensor
    left: Tensor

    @classmethod
    def of(cls, basis: Basis, X: Tensor) -> _CachedSites:
        """Compute the features, of an inducing basis in float32."""
        single: Any = basis
        if isinstance(basis, InducingBasis):
            single = replace(map_tensors(basis, Tensor.float), kernel=frozen(basis.kernel, _SINGLE))
        features = torch.empty(len(X), basis.rank, dtype=_SINGLE, device=X.device)
        left = torch.zeros_like(features[:, 0])
        for z, rest, rows in zip(
            features.split(_ROWS), left.split(_ROWS), X.split(_ROWS), strict=True
        ):
            inputs = rows if single is basis else rows.to(_SINGLE)
            values = single.features(inputs)
            z.copy_(values[0])
            if basis.has_residual:
                rest.copy_(single.residual_variance(inputs, values)[0])
        return cls(basis, X, features, left)

    def linear(self, weights: Tensor) -> Tensor:
        columns = weights[0].to(_SINGLE).unbind(-1)  # few: a product with each reads less memory
        parts = [torch.stack([z @ w for w in columns]) for z in self.features.split(_ROWS)]
        return torch.cat(parts, -1).to(weights).unsqueeze(0)

    def quadratic(self, matrices: Tensor) -> Tensor:
        single = matrices.to(_SINGLE)
        parts = [((z @ single) * z).sum(-1) for z in self.features.split(_ROWS)]
        return torch.cat(parts, -1).to(matrices)

    def residual(self) -> Tensor:
        """Return the variance outside the features at all sites, ``N``."""
        return self.left.to(self.X)


@dataclass(frozen=True)
class _GridSites(FeatureSites):
    """Sites of an interpolation basis, without their N x r features.

    A function of the basis is interpolated from its node values, and a quadratic form is a
    polynomial in each cell. Cost O(4^d N + p Σ r_i) a function of p nodes, O(7^d N + (7 g)^d g²) a
    form.

    Attributes:
        part: The features on its only grid.
        located: Nodes and interpolation weights, or None where they are too many to cache.
    """

    part: InterpolationBasis
    located: tuple[tuple[Tensor, Tensor], ...] | None

    def linear(self, weights: Tensor) -> Tensor:
        # the functions at the p nodes of the grid, m x k x p, in O(k p Σ r_i)
        roots = self.part.roots
        sizes = [root.shape[-1] for root in roots]
        scaled = weights * self.part.scale.sqrt()[..., None, None]
        values = weights.new_zeros(*weights.mT.shape[:-1], *sizes).flatten(-len(sizes))
        values[..., ravel(self.part.index, sizes)] = scaled.mT
        for root in roots:
            inner = values.unflatten(-1, (root.shape[-1], -1)).mT
            values = (inner @ root.mT.unsqueeze(-3)).flatten(-2)
        table = values.flatten(0, -2).mT.contiguous()
        located = _locate(self.part.grid, self.X) if self.located is None else self.located
        parts = [
            embedding_bag(nodes, table, per_sample_weights=shares, mode="sum").mT
            for nodes, shares in located
        ]
        return torch.cat(parts, -1).unflatten(0, values.shape[:-1])

    def quadratic(self, matrices: Tensor) -> Tensor:
        coefficients = KroneckerPullBack(self.part, self.part.grid).coefficients(matrices)
        size = max(1, CHUNK_NUMBERS // coefficients.shape[-1])
        parts = []
        for cell, t in map(self.part.grid.locate, self.X.split(size)):
            chosen = coefficients[..., ravel(cell, self.part.grid.cells), :]
            parts.append((chosen * outer_product(legendre(t))).sum(-1))
        return torch.cat(parts, -1)


def _locate(grid: Grid, X: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the nodes around each site of a chunk, flat indices, and their weights, ``N x 4^d``."""
    for chunk in X.split(max(1, CHUNK_NUMBERS // STENCIL**grid.dim)):
        cell, t = grid.locate(chunk)
        yield grid.nodes_around(cell), outer_product(cubic_weights(t))
