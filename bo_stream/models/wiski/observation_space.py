"""A grid model's posterior in observation space: exact for few rows, without features."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from bo_stream.bases.grid.interpolated_kernel import InterpolatedKernel, interpolation_lines
from bo_stream.bases.grid.interpolation import grid_basis
from bo_stream.bases.grid.kernel import GridKernel
from bo_stream.bases.grid.mesh import Mesh
from bo_stream.linalg import (
    cholesky_with_jitter,
    inverse_lower,
    row_product,
    safe_cholesky,
    stack_columns,
    stack_rows,
)
from bo_stream.process.joint import Joint, Residual
from bo_stream.process.process import Points, PosteriorProcess, WeightSpaceProcess
from bo_stream.tensors import outside_inference_mode
from bo_stream.weights import evidence_of, solve


@dataclass(frozen=True)
class GridPrior:
    """A Gaussian process prior with an interpolated kernel at fixed hyperparameters.

    Attributes:
        kernel: Before it is interpolated, detached.
        mesh: The nodes.
        mean: Constant prior mean, ``... x m x 1``.
        tolerance: Part of the kernel's trace that its features may leave out.
        max_rank: Cap on the number of features.
    """

    kernel: GridKernel
    mesh: Mesh
    mean: Tensor
    tolerance: float
    max_rank: int

    @cached_property
    def interpolated(self) -> InterpolatedKernel:
        """The kernel k̃, ``batch x m``, also where all outputs share one."""
        kernel = InterpolatedKernel.of(self.kernel, self.mesh)
        return replace(kernel, scales=tuple(s.expand(self.mean.shape[:-1]) for s in kernel.scales))

    def lines(self, X: Tensor) -> Tensor:
        """Interpolation weights, ``... x n x d -> ... x 1 x n x G``."""
        return interpolation_lines(self.mesh, X).unsqueeze(-3)


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

    def __add__(self, other: CentredRows) -> CentredRows:
        return CentredRows(
            torch.cat((self.X, other.X), -2),
            torch.cat((self.residual, other.residual), -1),
            torch.cat((self.noise, other.noise), -1),
        )


@dataclass(frozen=True)
class ObservationSpaceProcess(PosteriorProcess):
    """A grid prior given n observations, solved in an n x n system (Rasmussen, Williams, 2006).

    With C the noisy covariance of the observations and L its Cholesky factor, the posterior
    covariance is ``k̃(x, x') − (L⁻¹ k̃(X, x))ᵀ L⁻¹ k̃(X, x')`` (eq. 2.24). Equal to the posterior in
    the weights of the kernel's features where these leave nothing out.

    Attributes:
        prior: The process before.
        told: The n observations.
        images: ``K w`` of their inputs, ``... x m x n x G``.
        inverse_factor: L⁻¹, ``... x m x n x n``.
        whitened: ``L⁻¹ residual``, ``... x m x n x 1``.
    """

    prior: GridPrior
    told: CentredRows
    images: Tensor
    inverse_factor: Tensor
    whitened: Tensor

    @classmethod
    def of(cls, prior: GridPrior, told: CentredRows) -> tuple[ObservationSpaceProcess, float]:
        """Return the process, and the relative jitter that its solution took. Cost O(n³).

        Raises:
            NotPSDError: Hyperparameters are NaN or infinite.
        """
        lines = prior.lines(told.X)
        images = prior.interpolated.images(lines)
        covariance = prior.interpolated.covariance(lines, images) + torch.diag_embed(told.noise)
        factor, jitter = cholesky_with_jitter(covariance)
        inverse = inverse_lower(factor)
        whitened = inverse @ told.residual.unsqueeze(-1)
        return cls(prior, told, images, inverse, whitened), jitter

    def observe(self, X: Tensor, outcomes: Tensor, noise: Tensor) -> ObservationSpaceProcess:
        """Condition the process on k more observations. Cost O(k n²)."""
        new = CentredRows(X, outcomes - self.prior.mean, noise)
        points = self.at(new.X)
        images = self.prior.interpolated.images(points.prior)
        corner = self.cross_covariance(points, points) + torch.diag_embed(new.noise)
        inverse = inverse_lower(safe_cholesky(corner))
        innovation = new.residual.unsqueeze(-1) - points.posterior @ self.whitened
        above = self.inverse_factor.new_zeros(*self.inverse_factor.shape[:-1], new.X.shape[-2])
        below = -(inverse @ (points.posterior @ self.inverse_factor))
        return replace(
            self,
            told=self.told + new,
            images=torch.cat((self.images, images), -2),
            inverse_factor=torch.cat(
                (stack_columns(self.inverse_factor, above), stack_columns(below, inverse)), -2
            ),
            whitened=stack_rows(self.whitened, inverse @ innovation),
        )

    @property
    def prior_mean(self) -> Tensor:
        """Constant prior mean, ``... x m x 1``."""
        return self.prior.mean

    def at(self, X: Tensor) -> Points:
        """Interpolation weights and whitened covariances with the observations. Cost O(q n²)."""
        lines = self.prior.lines(X)
        cross = self.prior.interpolated.covariance(lines, self.images)
        return Points(X, lines, row_product(cross, self.inverse_factor.mT))

    def mean_at(self, points: Points) -> Tensor:
        """Prior mean plus the regression on the observations."""
        return self.prior.mean + row_product(points.posterior, self.whitened).squeeze(-1)

    def cross_covariance(self, points: Points, others: Points) -> Tensor:
        """Prior covariance less what the observations explain."""
        return self._prior_covariance(points, others) - points.posterior @ others.posterior.mT

    def variance_at(self, points: Points) -> Tensor:
        """Prior variance less what the observations explain."""
        return self._prior_variance(points) - points.posterior.square().sum(-1)

    def joint_at(self, points: Points) -> Joint:
        """Return the prior as residual, with the observations as downdate."""
        return Joint(
            self.mean_at(points),
            points.posterior[..., :0],
            points.posterior,
            Residual(
                lambda: self._prior_covariance(points, points),
                lambda: self._prior_variance(points),
            ),
        )

    def _prior_covariance(self, points: Points, others: Points) -> Tensor:
        kernel = self.prior.interpolated
        return kernel.covariance(points.prior, kernel.images(others.prior))

    def _prior_variance(self, points: Points) -> Tensor:
        kernel = self.prior.interpolated
        return kernel.variance(points.prior, kernel.images(points.prior))

    @cached_property
    def in_weights(self) -> WeightSpaceProcess:
        """The process in the weights of the kernel's features. Cost O(n r² + r³), once."""
        return self._solved_in_weights()

    @outside_inference_mode()
    def _solved_in_weights(self) -> WeightSpaceProcess:
        prior, told = self.prior, self.told
        batch = told.residual.shape[:-1]
        basis = grid_basis(prior.mesh, prior.kernel, batch, prior.tolerance, prior.max_rank)
        evidence = evidence_of(basis.features(told.X), told.residual, told.noise)
        return WeightSpaceProcess(basis, solve(evidence), prior.mean)
