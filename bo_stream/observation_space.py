"""Posteriors in the space of points: exact for few rows, and means as sums of covariances."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial, singledispatch
from typing import ClassVar

import torch
from torch import Tensor

from bo_stream.bases.inducing import Basis, InducingBasis
from bo_stream.bases.radial import RadialSums
from bo_stream.bases.spectral import RandomDraws
from bo_stream.linalg import (
    cholesky_with_jitter,
    inverse_root_product,
    row_product,
    safe_cholesky,
    solve_columns,
    solve_columns_transposed,
    solve_lower,
    solve_rows,
    stack_columns,
    stack_rows,
)
from bo_stream.process import (
    ConditionedProcess,
    Joint,
    Points,
    PosteriorProcess,
    Residual,
    WeightSpaceProcess,
)
from bo_stream.tensors import outside_inference_mode, zip_tensors
from bo_stream.weights import evidence_of, solve

WeightedFunction = tuple[Callable[..., Tensor], Tensor]
"""A rule and weights, ``... x m x N x 1``, with values ``rule(weights, X)`` at X; the rule is a
method of a module, or a ``partial`` of one."""


class ObservationSpacePrior(ABC):
    """A Gaussian process prior at fixed hyperparameters, whose features are not needed.

    A covariance takes the ``coordinates`` of one point and the ``images`` of the other's: images
    of observations are stored and not computed again.

    Attributes:
        has_residual: Whether the features of :meth:`basis_for` leave a part of the kernel out.
        mean: Constant prior mean, ``... x m x 1``.
    """

    has_residual: ClassVar[bool] = False

    mean: Tensor

    @abstractmethod
    def coordinates(self, X: Tensor) -> Tensor:
        """Compute the kernel's coordinates of inputs ``... x n x d``, ``... x 1 x n x c``."""

    @abstractmethod
    def images(self, coordinates: Tensor) -> Tensor:
        """Compute the images of coordinates, ``... x m x n x c'``."""

    @abstractmethod
    def covariance(self, coordinates: Tensor, images: Tensor) -> Tensor:
        """Compute the covariance of n points with n' others, ``... x m x n x n'``."""

    @abstractmethod
    def variance(self, coordinates: Tensor, images: Tensor) -> Tensor:
        """Compute the variances of n points, ``... x m x n``."""

    @abstractmethod
    def radial(self, images: Tensor) -> RadialSums | None:
        """Return the kernel with known points, if it is one of the distance from them."""

    def regression(self, images: Tensor, weights: Tensor, X: Tensor) -> Tensor:
        """Compute ``mean + Σ_i w_i k(x, x_i)``, ``... x m x n``, with w ``... x m x N x 1``."""
        covariance = self.covariance(self.coordinates(X), images)
        return self.mean + row_product(covariance, weights).squeeze(-1)

    def weighted(self, images: Tensor, weights: Tensor) -> WeightedFunction:
        """Return :meth:`regression` as a function that is fast where the kernel is radial."""
        known = self.radial(images)
        if known is None:
            return partial(self.regression, images), weights
        return partial(known.regression, self.mean), known.scaled(weights)

    @abstractmethod
    def basis_for(self, X: Tensor, batch: torch.Size) -> Basis:
        """Build features in which observations at X are exact, for outputs ``batch_shape x m``."""


@dataclass(frozen=True)
class CentredRows:
    """Observations that a process is conditioned on.

    Attributes:
        X: ``... x n x d``.
        residual: Outcomes less the prior mean, ``... x m x n``.
        noise: Variances, ``... x m x n``.
    """

    X: Tensor
    residual: Tensor
    noise: Tensor


@dataclass(frozen=True)
class ObservationSpaceProcess(PosteriorProcess):
    """A prior given n observations, solved in an n x n system (Rasmussen and Williams, 2006).

    With C the noisy covariance of the observations and L its Cholesky factor, the posterior
    covariance is ``k(x, x') − (L⁻¹ k(X, x))ᵀ L⁻¹ k(X, x')`` (eq. 2.24). Equal to the posterior in
    the weights of the kernel's features where these leave nothing out.

    Attributes:
        prior: The process before.
        told: The n observations.
        images: Images of their inputs, see :class:`ObservationSpacePrior`, ``... x m x n x c'``.
        factor: L, ``... x m x n x n``.
        whitened: ``L⁻¹ residual``, ``... x m x n x 1``.
    """

    prior: ObservationSpacePrior
    told: CentredRows
    images: Tensor
    factor: Tensor
    whitened: Tensor

    @classmethod
    def of(
        cls, prior: ObservationSpacePrior, told: CentredRows
    ) -> tuple[ObservationSpaceProcess, float]:
        """Return the process given observations, and the relative jitter needed. Cost O(n³).

        Raises:
            NotPSDError: Hyperparameters are NaN or infinite.
        """
        coordinates = prior.coordinates(told.X)
        images = prior.images(coordinates)
        covariance = prior.covariance(coordinates, images) + torch.diag_embed(told.noise)
        factor, jitter = cholesky_with_jitter(covariance)
        whitened = solve_lower(factor, told.residual.unsqueeze(-1))
        return cls(prior, told, images, factor, whitened), jitter

    def observe(self, X: Tensor, outcomes: Tensor, noise: Tensor) -> ObservationSpaceProcess:
        """Condition the process on k more observations. Cost O(k n²)."""
        told, residual, points = self.told, outcomes - self.prior.mean, self.at(X)
        images = self.prior.images(points.prior)
        explained = row_product(points.posterior, points.posterior.mT)
        corner = self.prior.covariance(points.prior, images) - explained
        below = safe_cholesky(corner + torch.diag_embed(noise), is_new=True)
        innovation = residual.unsqueeze(-1) - row_product(points.posterior, self.whitened)
        above = self.factor.new_zeros(*self.factor.shape[:-1], X.shape[-2])
        return replace(
            self,
            told=CentredRows(
                torch.cat((told.X, X), -2),
                torch.cat((told.residual, residual), -1),
                torch.cat((told.noise, noise), -1),
            ),
            images=torch.cat((self.images, images), -2),
            factor=torch.cat(
                (stack_columns(self.factor, above), stack_columns(points.posterior, below)), -2
            ),
            whitened=stack_rows(self.whitened, solve_lower(below, innovation)),
        )

    @property
    def prior_mean(self) -> Tensor:
        """Constant prior mean, ``... x m x 1``."""
        return self.prior.mean

    def at(self, X: Tensor) -> Points:
        """Compute coordinates and whitened covariances with the observations. Cost O(q n²)."""
        coordinates = self.prior.coordinates(X)
        cross = self.prior.covariance(coordinates, self.images)
        return Points(X, coordinates, solve_rows(self.factor, cross))

    def mean_at(self, points: Points) -> Tensor:
        """Add the regression on the observations to the prior mean."""
        return self.prior.mean + row_product(points.posterior, self.whitened).squeeze(-1)

    def regression(self, X: Tensor) -> Tensor:
        """Compute the mean alone at ``... x q x d`` inputs, ``... x m x q``. Cost O(q n).

        ``k(x, X) C⁻¹ residual`` (Rasmussen and Williams, 2006, eq. 2.23): no system is solved for.
        """
        return self.prior.regression(self.images, self.representer_weights, X)

    @cached_property
    def representer_weights(self) -> Tensor:
        """``C⁻¹ residual``, ``... x m x n x 1``."""
        return torch.linalg.solve_triangular(self.factor.mT, self.whitened, upper=True)

    def cross_covariance(self, points: Points, others: Points) -> Tensor:
        """Subtract the covariance that the observations explain from the prior covariance."""
        explained = row_product(points.posterior, others.posterior.mT)
        images = self.prior.images(others.prior)
        return self.prior.covariance(points.prior, images) - explained

    def variance_at(self, points: Points) -> Tensor:
        """Subtract the variance that the observations explain from the prior variance."""
        variance = self.prior.variance(points.prior, self.prior.images(points.prior))
        return variance - points.posterior.square().sum(-1)

    def joint_at(self, points: Points) -> Joint:
        """Return mean and covariance: the prior covariance is the joint's residual, without root.

        The downdate is the whitened covariance with the observations.
        """
        prior, own = self.prior, points.prior
        residual = Residual(
            lambda: prior.covariance(own, prior.images(own)),
            lambda: prior.variance(own, prior.images(own)),
        )
        downdate = points.posterior
        return Joint(self.mean_at(points), downdate[..., :0], downdate, residual)

    @cached_property
    @outside_inference_mode()
    def in_weights(self) -> WeightSpaceProcess:
        """The process in the weights of the kernel's features. Cost O(n r² + r³), once."""
        prior, told = self.prior, self.told
        basis = prior.basis_for(told.X, told.residual.shape[:-1])
        evidence = evidence_of(basis.features(told.X), told.residual, told.noise)
        return WeightSpaceProcess(basis, solve(evidence), prior.mean)


# --- means as sums of covariances with points -----------------------------------------------------


@singledispatch
def conditional_mean(
    process: PosteriorProcess, points: Points, weights: Tensor
) -> WeightedFunction:
    """Return the mean given values v at points C, ``m(x) + cov(f(x), f(C)) w``.

    With Σ the covariance at C it is ``E[f(x) | f(C) = v]`` for ``w = Σ⁻¹ (v − m(C))``. (Rasmussen
    and Williams, 2006, eq. 2.19) Differentiable in X. Cost as of n covariances with N points, for
    an exact model or one of inducing points O(n (M + N) d) where the kernel is radial.

    Args:
        process: f, of mean m.
        points: C, evaluated by the process, N of them.
        weights: w, ``... x batch_shape x m x N x 1``.
    """
    return partial(_regression, process, points), weights


@conditional_mean.register
def _(process: ConditionedProcess, points: Points, weights: Tensor) -> WeightedFunction:
    """Take hypothetical observations for further points of the base.

    With F and i their factor and whitened innovation, ``w' = F⁻ᵀ (i − F⁻¹ cov(f(X'), f(C)) w)``.
    """
    known, factor = process.points, process.factor
    explained = row_product(process.base.cross_covariance(known, points), weights)
    missing = process.whitened_innovation - solve_columns(factor, explained)
    own = solve_columns_transposed(factor, missing)
    both = zip_tensors(stack_rows, points, known)
    return conditional_mean(process.base, both, stack_rows(weights, own))


@conditional_mean.register
def _(process: ObservationSpaceProcess, points: Points, weights: Tensor) -> WeightedFunction:
    """Weight prior covariances with the observations X and with C. Cost O(n (M + N) d).

    With F the factor and r the whitened residual of the M observations, those of X have the weights
    ``F⁻ᵀ (r − F⁻¹ k(X, C) w)``.
    """
    explained = row_product(points.posterior.mT, weights)
    own = solve_columns_transposed(process.factor, process.whitened - explained)
    images = stack_rows(process.images, process.prior.images(points.prior))
    return process.prior.weighted(images, stack_rows(own, weights))


@conditional_mean.register
def _(process: WeightSpaceProcess, points: Points, weights: Tensor) -> WeightedFunction:
    """Weight prior covariances with inducing points Z and with C. Cost O(n (M + N) d).

    With features ``z(x) = L⁻¹ k(Z, x)`` of weights ``N(μ, S Sᵀ)``, those of Z have the weights
    ``L⁻ᵀ (μ + (S Sᵀ − I) z(C)ᵀ w)``.
    """
    basis, other = process.basis, (partial(_regression, process, points), weights)
    if not isinstance(basis, InducingBasis) or basis.rank == 0:
        return other
    both = stack_rows(basis.Z.unsqueeze(-3), points.X.unsqueeze(-3))
    known = RadialSums.of(basis.radial, both)
    if known is None:
        return other
    of_points, root = row_product(points.prior.mT, weights), process.weights.root
    moved = row_product(root, row_product(root.mT, of_points)) - of_points
    own = solve_columns_transposed(basis.root, process.weights.mean + moved)
    return partial(known.regression, process.prior_mean), known.scaled(stack_rows(own, weights))


def _regression(process: PosteriorProcess, points: Points, weights: Tensor, X: Tensor) -> Tensor:
    """Evaluate ``m(x) + Σ_i w_i cov(f(x), f(c_i))`` of a process."""
    here = process.at(X)
    update = row_product(process.cross_covariance(here, points), weights)
    return process.mean_at(here) + update.squeeze(-1)


NUGGET = 1e-8
"""Added to posterior variances at the points of a draw, as a share of them, so that points close
together have no weights whose rounding errors are larger than what the weights mean."""

PRIOR_NUGGET = 1e-10
"""The same for prior variances, which may be many times the posterior's."""


@singledispatch
def drawn_mean(process: PosteriorProcess, inputs: Tensor, draws: RandomDraws) -> WeightedFunction:
    """Draw values jointly at inputs and at the rows of an exact model; return the mean given them.

    ``w = L⁻ᵀ e`` with ``L Lᵀ`` the posterior covariance. Cost O(N³ + n N²) for N points.
    """
    points = process.at(inputs)
    covariance = process.cross_covariance(points, points)
    covariance = covariance.expand(*draws.shape[-covariance.ndim + 2 :], *covariance.shape[-2:])
    normal = draws.normal(covariance.shape[-1], 1)
    return conditional_mean(process, points, inverse_root_product(covariance, normal, NUGGET))


@drawn_mean.register
def _(process: ObservationSpaceProcess, inputs: Tensor, draws: RandomDraws) -> WeightedFunction:
    """Draw ``g(x) = k(x, Z) L⁻ᵀ e`` from the prior at all points Z, rows X first: the same law.

    ``g(x) + k(x, X) (K + S)⁻¹ (y − g(X) − ε)`` with ``L Lᵀ = k(Z, Z)`` is one sum of kernels at Z.
    """
    prior, rows = process.prior, process.told.X.shape[-2]
    coordinates = stack_rows(prior.coordinates(process.told.X), prior.coordinates(inputs))
    images = prior.images(coordinates)
    K = prior.covariance(coordinates, images).expand(*process.factor.shape[:-2], -1, -1)
    weights = inverse_root_product(K, draws.normal(K.shape[-1], 1), PRIOR_NUGGET)
    noise = process.told.noise.sqrt().unsqueeze(-1) * draws.normal(rows, 1)
    noisy = row_product(K[..., :rows, :], weights) + noise
    missing = process.whitened - solve_columns(process.factor, noisy)
    own = solve_columns_transposed(process.factor, missing)
    weights[..., :rows, :] += own
    return prior.weighted(images, weights)
