"""What a model of clusters keeps solved between calls, and how few observations change it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.kernels import Kernel
from linear_operator.utils.errors import NotPSDError
from linear_operator.utils.linear_cg import linear_cg
from torch import Tensor

from bo_stream.bases.inducing import kernel_matrix, kernel_variance
from bo_stream.bases.kernels import matrix_between
from bo_stream.linalg import inverse_root, row_product
from bo_stream.process import Points, PosteriorProcess
from bo_stream.tensors import State, broadcast_shapes
from bo_stream.weights import InformationForm


def cross_matrix(kernel: Kernel, A: Tensor, B: Tensor, outputs: int) -> Tensor:
    """Compute ``k(A, B)``, ``... x m x n x n'``, of points in the kernel's dtype, near and far."""
    return matrix_between(lambda A, B: kernel_matrix(kernel, A, B, outputs), A, B)


PRECONDITIONER_RANK = 1024
"""Most columns of the partial Cholesky factor that preconditions; a quarter of the centres at most.
"""

MAX_ITERATIONS = 1000
"""Of conjugate gradients; linear_operator warns where they were not enough."""

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Norm of the residual, relative to the right side's, at which conjugate gradients stop."""


@dataclass(frozen=True)
class RootEvidence:
    """Evidence at the centres by square roots of precisions: nothing is divided by.

    With Λ the noise of the clusters' means u: ``R = Λ^(−½)``, zero for a cluster without data. The
    system to solve is ``Q = I + R K R``, never smaller than the identity, and ``(K + Λ)⁻¹ u = R Q⁻¹
    R u``.

    Attributes:
        root: The diagonal of R, ``... x m x M x 1``.
        target: ``R u``, ``... x m x M x 1``.
    """

    root: Tensor
    target: Tensor

    @classmethod
    def of(cls, evidence: InformationForm, dtype: torch.dtype) -> RootEvidence:
        """Take roots of evidence whose gram is a diagonal kept as a column, into a dtype."""
        root = evidence.gram.clamp_min(0.0).sqrt()
        target = torch.where(root > 0.0, evidence.moment / root, 0.0)
        return cls(root.to(dtype), target.to(dtype))

    def system(self, K: Tensor) -> Tensor:
        """Compute ``Q = I + R K R``, ``... x m x M x M``."""
        matrix = (self.root * K).mul_(self.root.mT)
        matrix.diagonal(dim1=-2, dim2=-1).add_(1.0)
        return matrix


class CentreSolver(ABC):
    """A solver with Q, for columns and for the variance that observations explain of points.

    Points are given by ``prior = k(x, Z) R``, ``... x m x n x M``.
    """

    @abstractmethod
    def solve(self, columns: Tensor) -> Tensor:
        """Compute ``Q⁻¹ columns``, ``... x m x M x n``."""

    @abstractmethod
    def prepared(self, prior: Tensor) -> Tensor:
        """Return what a solver caches for points besides their prior covariance."""

    @abstractmethod
    def explained(self, points: Points, others: Points) -> Tensor:
        """Compute ``prior Q⁻¹ prior'ᵀ``, ``... x m x n x n'``."""

    @abstractmethod
    def explained_variance(self, points: Points) -> Tensor:
        """Return the diagonal of that, ``... x m x n``."""


@dataclass(frozen=True)
class CholeskySolver(CentreSolver):
    """By a root of the inverse, ``Q⁻¹ = S Sᵀ``. Cost O(M³) once, then O(M²) a point.

    Attributes:
        root: S, ``... x m x M x M``.
    """

    root: Tensor

    def solve(self, columns: Tensor) -> Tensor:
        """Multiply twice."""
        return self.root @ (self.root.mT @ columns)

    def prepared(self, prior: Tensor) -> Tensor:
        """Compute ``prior S``."""
        return row_product(prior, self.root)

    def explained(self, points: Points, others: Points) -> Tensor:
        """Multiply what was prepared."""
        return points.posterior @ others.posterior.mT

    def explained_variance(self, points: Points) -> Tensor:
        """Square what was prepared."""
        return points.posterior.square().sum(-1)


@dataclass(frozen=True)
class ConjugateGradients(CentreSolver):
    """By preconditioned conjugate gradients: cost O(M²) an iteration, and a column.

    They stop when the residual is ``tolerance`` of the right side, on average over the columns; a
    solution's error is no larger. Differentiable in columns: the gradient is solved for alike.
    [Terenin2024, result 2]

    Attributes:
        Q: ``... x m x M x M``.
        deflation: W with ``I − W Wᵀ ≈ Q⁻¹`` the preconditioner, ``... x m x M x k``.
        tolerance: Relative.
    """

    Q: Tensor
    deflation: Tensor
    tolerance: float

    @classmethod
    def of(cls, Q: Tensor, tolerance: float | None = None) -> ConjugateGradients:
        """Precondition by a partial Cholesky factor of ``Q − I``. Cost O(M k²)."""
        factor = partial_cholesky(Q, min(PRECONDITIONER_RANK, Q.shape[-1] // 4)).double()
        small = factor @ factor.mT
        small.diagonal(dim1=-2, dim2=-1).add_(1.0)
        short_of_one = 1.0 - 16.0 * torch.finfo(Q.dtype).eps  # stays positive definite
        deflation = (short_of_one * factor.mT @ inverse_root(small)).to(Q)
        return cls(Q, deflation, TOLERANCE[Q.dtype] if tolerance is None else tolerance)

    def solve(self, columns: Tensor) -> Tensor:
        """Iterate, all columns at once."""
        return _Solve.apply(columns, self)  # type: ignore[no-untyped-call]

    def prepared(self, prior: Tensor) -> Tensor:
        """Keep ``prior``: it is solved for only where a covariance is asked for."""
        return prior

    def explained(self, points: Points, others: Points) -> Tensor:
        """Solve for the fewer of the points."""
        if points.prior.shape[-2] < others.prior.shape[-2]:
            return self.solve(points.prior.mT).mT @ others.prior.mT
        explained = points.prior @ self.solve(others.prior.mT)
        return 0.5 * (explained + explained.mT) if points is others else explained

    def explained_variance(self, points: Points) -> Tensor:
        """Solve for every point."""
        return (points.prior * self.solve(points.prior.mT).mT).sum(-1)

    def iterated(self, columns: Tensor) -> Tensor:
        """Compute ``Q⁻¹ columns``, with dimensions ahead of those of Q beside the columns."""
        batch = broadcast_shapes(columns.shape[:-2], self.Q.shape[:-2])
        columns = columns.expand(*batch, *columns.shape[-2:])
        ahead = columns.shape[: columns.ndim - self.Q.ndim]
        stacked = columns.reshape(ahead.numel(), *columns.shape[len(ahead) :]).movedim(0, -1)
        right = stacked.flatten(-2)
        solution = linear_cg(
            self._product,
            right,
            tolerance=self.tolerance,
            stop_updating_after=self.tolerance,
            eps=torch.finfo(self.Q.dtype).tiny,
            max_iter=MAX_ITERATIONS,
            preconditioner=lambda r: r - self.deflation @ (self.deflation.mT @ r),
        )
        residual = right - self._product(solution)
        if not bool((residual.norm(dim=-2) <= right.norm(dim=-2)).all()):  # nor is NaN a solution
            raise NotPSDError(
                "Conjugate gradients broke down: the observations in reach of a lengthscale are "
                f"too many over the noise variance for {right.dtype}. Take solver='cholesky', or "
                "check the hyperparameters for extreme values."
            )
        return solution.unflatten(-1, stacked.shape[-2:]).movedim(-1, 0).reshape(columns.shape)

    def _product(self, columns: Tensor) -> Tensor:
        return (columns.mT @ self.Q).mT  # a few columns are twice as fast this way round


class _Solve(torch.autograd.Function):
    """Function Q⁻¹, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, solver: ConjugateGradients) -> Tensor:
        ctx.solver = solver
        return solver.iterated(columns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Solve.apply(gradient, ctx.solver), None  # type: ignore[no-untyped-call]


def partial_cholesky(Q: Tensor, rank: int) -> Tensor:
    """Compute F with ``Fᵀ F ≈ Q − I``, pivoted, ``... x rank x M``. Cost O(M rank²).

    Rows are zero from where no pivot is larger than rounding errors.
    """
    left = Q.diagonal(dim1=-2, dim2=-1) - 1.0
    least = torch.finfo(Q.dtype).eps * Q.shape[-1] * left.amax(-1, keepdim=True).clamp_min(1.0)
    factor = Q.new_zeros(*Q.shape[:-2], rank, Q.shape[-1])
    for i in range(rank):
        own, pivot = left.max(-1, keepdim=True)
        before = factor[..., :i, :]
        known = torch.take_along_dim(before, pivot.unsqueeze(-1), -1)
        rest = torch.take_along_dim(Q, pivot.unsqueeze(-1), -2) - known.mT @ before
        scale = own.clamp_min(least).sqrt()
        row = (rest.squeeze(-2) / scale).scatter(-1, pivot, scale)
        factor[..., i, :] = row = torch.where(own > least, row, 0.0)
        left = (left - row.square()).clamp_min(0.0).scatter(-1, pivot, 0.0)
    return factor


@dataclass(frozen=True)
class ClusteredProcess(PosteriorProcess):
    """``f(x) = prior_mean + k(x, Z) (K + Λ)⁻¹ u``, covariance ``k − k(x, Z) (K + Λ)⁻¹ k(Z, x')``.

    Evaluated in the dtype of the centres, given back in float64. [Terenin2024, eq. 21 and
    23]

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
        """Evaluate covariances with the centres; O(n M²) with a Cholesky factor, else O(n M)."""
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


MOST_PENDING = 64
"""Observations that a solved process is conditioned on before it is solved again."""


@dataclass(frozen=True)
class SolvedClusters:
    """The posterior process at one state of all hyperparameters.

    An observation in a cluster is one at its centre, so that the process conditioned there is the
    process solved again: exact, at the cost of O(q M²) for q observations.

    Attributes:
        state: Of the hyperparameters.
        process: Solved, and conditioned on what came since.
        room: How many observations more it may be conditioned on.
    """

    state: State
    process: PosteriorProcess
    room: int
