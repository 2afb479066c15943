"""The exact posterior for inputs that were moved to the centres of their clusters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.bases.inducing import kernel_variance
from bo_stream.models.centre_solver import CentreSolver
from bo_stream.models.cluster_kernel import cross_matrix
from bo_stream.process import Joint, Points, PosteriorProcess, Residual


@dataclass(frozen=True)
class ClusteredProcess(PosteriorProcess):
    """``f(x) = prior_mean + k(x, Z) (K + Λ)⁻¹ u``, covariance ``k − k(x, Z) (K + Λ)⁻¹ k(Z, x')``.

    Covariances carry the whole prior: nothing is missed far from the centres. Evaluated in the
    dtype of the centres, given back in float64. [Terenin2024, eq. 21 and proposition 11]

    Attributes:
        kernel: Frozen, in the dtype of the centres.
        Z: Centres, ``M x d``.
        outputs: Number m of outputs.
        root: The diagonal of ``R = Λ^(−½)`` as a row, ``... x m x 1 x M``.
        solution: ``Q⁻¹ R u``, ``... x m x M x 1``, with ``Q = I + R K R``.
        solver: Solves with Q.
        prior_mean: ``... x m x 1``, float64.
    """

    kernel: Kernel
    Z: Tensor
    outputs: int
    root: Tensor
    solution: Tensor
    solver: CentreSolver
    prior_mean: Tensor

    def at(self, X: Tensor) -> Points:
        """Covariances with the centres. Cost O(n M²) with a Cholesky factor, else O(n M)."""
        inputs = X.to(self.Z)
        prior = cross_matrix(self.kernel, inputs, self.Z, self.outputs) * self.root
        return Points(inputs, prior, self.solver.prepared(prior))

    def mean_at(self, points: Points) -> Tensor:
        """Cost O(n M)."""
        return self.prior_mean + (points.prior @ self.solution).squeeze(-1).double()

    def cross_covariance(self, points: Points, others: Points) -> Tensor:
        """Cost O(n n' M); with conjugate gradients besides a solve for the fewer of the points."""
        covariance = cross_matrix(self.kernel, points.X, others.X, self.outputs)
        return (covariance - self.solver.explained(points, others)).double()

    def variance_at(self, points: Points) -> Tensor:
        """Never negative. Cost O(n M), with conjugate gradients n solves."""
        variance = kernel_variance(self.kernel, points.X, self.outputs)
        return (variance - self.solver.explained_variance(points)).clamp_min(0.0).double()

    def joint_at(self, points: Points) -> Joint:
        """All covariance is the residual's."""
        mean = self.mean_at(points)
        nothing = torch.zeros_like(mean).unsqueeze(-1)[..., :0]
        residual = Residual(
            lambda: self.cross_covariance(points, points), lambda: self.variance_at(points)
        )
        return Joint(mean, nothing, nothing, residual)
