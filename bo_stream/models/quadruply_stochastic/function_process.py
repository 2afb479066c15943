"""The posterior process of very many functions, summed a part of them at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bo_stream.bases.inducing import kernel_matrix, kernel_variance
from bo_stream.bases.sampled import SampledBasis
from bo_stream.linalg import row_product
from bo_stream.process.process import Joint, Points, PosteriorProcess, Residual

KEPT = 4096
"""Up to this many functions are evaluated once for each set of points; more are not held."""

NUMBERS = 1 << 20
"""Values of functions that are held at a time where there are more."""

PART = 1 << 15
"""Most functions that are evaluated at a time."""


@dataclass(frozen=True)
class WeightMoments:
    """``w ~ N(μ, C Cᵀ)``: columns of C that are dense, and the diagonal of the others.

    Attributes:
        mean: ``m x p``.
        rows: Of the dense columns, ``m x p x k``.
        scale: Of the others, 0 at the dense ones, ``m x p``.
    """

    mean: Tensor
    rows: Tensor
    scale: Tensor


@dataclass(frozen=True)
class FunctionProcess(PosteriorProcess):
    """``f(x) = prior mean + φ(x) w``: a weighted sum of functions, which are never stored.

    Beyond ``KEPT`` functions every question evaluates them anew, a part at a time: O(n p) time and
    O(n + p) memory, gradients included.

    Kernel functions at points can be augmented by one at each point asked about, for variance far
    from all others: ``σ² k(x, x)² / (|φ(x)|² + σ² k(x, x))``, correlated as the kernel is, where
    the paper has single points only. [Evans2020, proposition 4]

    Attributes:
        basis: Of p functions, of a frozen kernel.
        weights: Their distribution.
        prior_mean: ``m x 1``.
        noise: σ², ``m x 1``, or None without an augmentation.
    """

    basis: SampledBasis
    weights: WeightMoments
    prior_mean: Tensor
    noise: Tensor | None = None

    @property
    def _is_kept(self) -> bool:
        return self.basis.size <= KEPT

    def at(self, X: Tensor) -> Points:
        """Evaluate the functions, if they are few. Cost O(n p (d + k)) then."""
        if not self._is_kept:
            nothing = X.new_zeros(*X.shape[:-2], 1, X.shape[-2], 0)
            return Points(X, nothing, nothing)
        functions = self.basis.functions(X, torch.arange(self.basis.size, device=X.device))
        diagonal = functions * self.weights.scale.double().unsqueeze(-2)
        dense = functions @ self.weights.rows.double()
        return Points(X, functions, torch.cat((diagonal, dense), -1))

    def _summed(self, X: Tensor, rule: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Sum over all parts of a rule for the functions of a part, and their indices."""
        rows = max(1, X.shape[:-1].numel())
        size = min(PART, max(1, NUMBERS // rows))
        parts = torch.arange(self.basis.size, device=X.device).split(size)

        def part(X: Tensor, index: Tensor) -> Tensor:
            return rule(self.basis.functions(X, index), index)

        total: Any = 0.0
        for index in parts:
            if torch.is_grad_enabled():
                total = total + checkpoint(
                    part, X, index, use_reentrant=False, preserve_rng_state=False
                )
            else:
                total = total + part(X, index)
        return total

    def mean_at(self, points: Points) -> Tensor:
        """Cost O(n p)."""
        return self.prior_mean + self.weighted(points, self.weights.mean)

    def weighted(self, points: Points, weights: Tensor) -> Tensor:
        """``φ(x) w`` for weights ``... x m x p``, ``... x m x n``. Cost O(n p)."""
        if self._is_kept:
            return row_product(points.prior, weights.double().unsqueeze(-1)).squeeze(-1)

        def rule(functions: Tensor, index: Tensor) -> Tensor:
            return row_product(functions, weights[..., index].double().unsqueeze(-1))

        return self._summed(points.X, rule).squeeze(-1)

    def cross_covariance(self, points: Points, others: Points) -> Tensor:
        """``φ C Cᵀ φ'ᵀ`` and the augmentation. Cost O(n n' p)."""
        if self._is_kept:
            covariance = points.posterior @ others.posterior.mT
        else:
            covariance = self._covariance_in_parts(points, others)
        if self.noise is None:
            return covariance
        factors = self.augmentation_factor(points), self.augmentation_factor(others)
        return covariance + self._augmentation(points.X, others.X, *factors)

    def _covariance_in_parts(self, points: Points, others: Points) -> Tensor:
        def rule(functions: Tensor, index: Tensor) -> Tensor:
            scaled = functions * self.weights.scale[:, index].double().square().unsqueeze(-2)
            return scaled @ self.basis.functions(others.X, index).mT

        covariance = self._summed(points.X, rule)
        if self.weights.rows.shape[-1] == 0:
            return covariance
        dense = self._dense_sums(points)
        return covariance + dense @ (dense if others is points else self._dense_sums(others)).mT

    def _dense_sums(self, points: Points) -> Tensor:
        """``φ c_r`` of the dense columns, ``... x m x n x k``."""
        rows = self.weights.rows
        return self._summed(points.X, lambda at, index: at @ rows[:, index].double())

    def variance_at(self, points: Points) -> Tensor:
        """Cost O(n p)."""
        if self._is_kept:
            variance = points.posterior.square().sum(-1)
        else:

            def rule(functions: Tensor, index: Tensor) -> Tensor:
                scale = self.weights.scale[:, index].double()
                return functions.square() @ scale.square().unsqueeze(-1)

            variance = self._summed(points.X, rule).squeeze(-1)
            if self.weights.rows.shape[-1] > 0:
                variance = variance + self._dense_sums(points).square().sum(-1)
        if self.noise is None:
            return variance
        return variance + self._augmented_variance(points.X, self.augmentation_factor(points))

    def augmentation_factor(self, points: Points) -> Tensor:
        """Root of the part of the prior variance that the augmentation adds, ``... x m x n``."""
        assert self.noise is not None  # noqa: S101
        if self._is_kept:
            power = points.prior.square().sum(-1)
        else:
            power = self._summed(points.X, lambda at, _: at.square().sum(-1))
        own = self.noise * kernel_variance(self.basis.kernel, points.X, len(self.prior_mean))
        return (own / (power + own)).sqrt()

    def _augmentation(self, X: Tensor, X2: Tensor, factor: Tensor, factor2: Tensor) -> Tensor:
        K = kernel_matrix(self.basis.kernel, X, X2, len(self.prior_mean))
        return factor.unsqueeze(-1) * K * factor2.unsqueeze(-2)

    def _augmented_variance(self, X: Tensor, factor: Tensor) -> Tensor:
        return factor.square() * kernel_variance(self.basis.kernel, X, len(self.prior_mean))

    def joint_at(self, points: Points) -> Joint:
        """Factors where the functions are kept; else the covariance, when it is asked for."""
        mean, X = self.mean_at(points), points.X
        nothing = torch.zeros_like(mean).unsqueeze(-1)[..., :0]
        if not self._is_kept:
            residual = Residual(
                lambda: self.cross_covariance(points, points), lambda: self.variance_at(points)
            )
            return Joint(mean, nothing, nothing, residual)
        if self.noise is None:
            return Joint(mean, points.posterior, nothing, None)
        factor = self.augmentation_factor(points)
        residual = Residual(
            lambda: self._augmentation(X, X, factor, factor),
            lambda: self._augmented_variance(X, factor),
        )
        return Joint(mean, points.posterior, nothing, residual)
