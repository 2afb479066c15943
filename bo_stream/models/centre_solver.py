"""Solving at the centres of clusters, without jitter: by a Cholesky factor or iteratively."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from linear_operator.utils.errors import NotPSDError
from linear_operator.utils.linear_cg import linear_cg
from torch import Tensor

from bo_stream.linalg import inverse_root, row_product
from bo_stream.process import Points
from bo_stream.weights import GaussianEvidence

PRECONDITIONER_RANK = 1024
"""Most columns of the partial Cholesky factor that conjugate gradients are preconditioned by; at
most a quarter of the centres, so that it costs a part of an iteration's product.
"""

MAX_ITERATIONS = 1000
"""Of conjugate gradients; linear_operator warns where they were not enough."""

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Norm of the residual, relative to the right side's, at which conjugate gradients stop."""


@dataclass(frozen=True)
class RootEvidence:
    """Evidence at the centres by square roots of precisions: nothing is divided by.

    With Λ the noise of the clusters' means u: ``R = Λ^(−½)``, zero for a cluster without data. The
    system to solve is ``Q = I + R K R``, never smaller than the identity, whatever K and Λ are:
    ``(K + Λ)⁻¹ = R Q⁻¹ R`` and ``(K + Λ)⁻¹ u = R Q⁻¹ R u``.

    Attributes:
        root: The diagonal of R, ``... x m x M x 1``.
        target: ``R u``, ``... x m x M x 1``.
    """

    root: Tensor
    target: Tensor

    @classmethod
    def of(cls, evidence: GaussianEvidence, dtype: torch.dtype) -> RootEvidence:
        """In the dtype that is to be computed in.

        Args:
            evidence: Its gram a diagonal kept as a column.
            dtype: Of the result.
        """
        root = evidence.gram.clamp_min(0.0).sqrt()
        target = torch.where(root > 0.0, evidence.moment / root, 0.0)
        return cls(root.to(dtype), target.to(dtype))

    def system(self, K: Tensor) -> Tensor:
        """``Q = I + R K R``, ``... x m x M x M``; K is not kept."""
        matrix = (self.root * K).mul_(self.root.mT)
        matrix.diagonal(dim1=-2, dim2=-1).add_(1.0)
        return matrix


class CentreSolver(ABC):
    """Solves with Q for columns, and for the variance that observations explain.

    Points are given by ``prior = k(x, Z) R``, ``... x m x n x M``.
    """

    @abstractmethod
    def solve(self, columns: Tensor) -> Tensor:
        """``Q⁻¹ columns``, ``... x m x M x n``."""

    @abstractmethod
    def prepared(self, prior: Tensor) -> Tensor:
        """What points keep of their ``prior`` beside it."""

    @abstractmethod
    def explained(self, points: Points, others: Points) -> Tensor:
        """``prior Q⁻¹ prior'ᵀ``, ``... x m x n x n'``."""

    @abstractmethod
    def explained_variance(self, points: Points) -> Tensor:
        """Its diagonal, ``... x m x n``."""


@dataclass(frozen=True)
class CholeskySolver(CentreSolver):
    """By a root of the inverse, ``Q⁻¹ = S Sᵀ``. Cost O(M³) once, then O(M²) a point.

    Attributes:
        root: S, ``... x m x M x M``.
    """

    root: Tensor

    @classmethod
    def of(cls, Q: Tensor) -> CholeskySolver:
        """Factorise. Cost O(M³)."""
        return cls(inverse_root(Q))

    def solve(self, columns: Tensor) -> Tensor:
        """Two products."""
        return self.root @ (self.root.mT @ columns)

    def prepared(self, prior: Tensor) -> Tensor:
        """``prior S``."""
        return row_product(prior, self.root)

    def explained(self, points: Points, others: Points) -> Tensor:
        """A product of what was prepared."""
        return points.posterior @ others.posterior.mT

    def explained_variance(self, points: Points) -> Tensor:
        """Squares of what was prepared."""
        return points.posterior.square().sum(-1)


@dataclass(frozen=True)
class ConjugateGradients(CentreSolver):
    """By preconditioned conjugate gradients: cost O(M²) an iteration, and a column.

    They stop when the residual is ``tolerance`` of the right side, on average over the columns;
    because Q is no smaller than the identity, a solution's error is no larger than its residual.
    Differentiable in columns: the gradient is solved for alike.

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
        """Precondition by a partial Cholesky factor of ``Q − I``. Cost O(M k²).

        Args:
            Q: ``... x m x M x M``.
            tolerance: By default that of ``TOLERANCE`` for the dtype.
        """
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
        """The same: solved for only where a covariance is asked for."""
        return prior

    def explained(self, points: Points, others: Points) -> Tensor:
        """Solves for the fewer of the points."""
        if points.prior.shape[-2] < others.prior.shape[-2]:
            return self.solve(points.prior.mT).mT @ others.prior.mT
        explained = points.prior @ self.solve(others.prior.mT)
        return 0.5 * (explained + explained.mT) if points is others else explained

    def explained_variance(self, points: Points) -> Tensor:
        """Solves for every point."""
        return (points.prior * self.solve(points.prior.mT).mT).sum(-1)

    def iterated(self, columns: Tensor) -> Tensor:
        """``Q⁻¹ columns``, leading dimensions beyond those of Q beside the columns."""
        batch = torch.broadcast_shapes(columns.shape[:-2], self.Q.shape[:-2])
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
            preconditioner=self._precondition,
        )
        _check_solved(right, right - self._product(solution))
        return solution.unflatten(-1, stacked.shape[-2:]).movedim(-1, 0).reshape(columns.shape)

    def _product(self, columns: Tensor) -> Tensor:
        return (columns.mT @ self.Q).mT  # a few columns are twice as fast this way round

    def _precondition(self, residual: Tensor) -> Tensor:
        return residual - self.deflation @ (self.deflation.mT @ residual)


class _Solve(torch.autograd.Function):
    """Q⁻¹ as a differentiable function: it is its own transpose."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, solver: ConjugateGradients) -> Tensor:
        ctx.solver = solver
        return solver.iterated(columns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Solve.apply(gradient, ctx.solver), None  # type: ignore[no-untyped-call]


def _check_solved(right: Tensor, residual: Tensor) -> None:
    """Refuse what is worse than no solution at all; ``not <=`` holds for NaN too."""
    if not bool((residual.norm(dim=-2) <= right.norm(dim=-2)).all()):
        raise NotPSDError(
            "Conjugate gradients broke down: the observations in reach of a lengthscale are too "
            f"many over the noise variance for {right.dtype}. Take solver='cholesky', or check the "
            "hyperparameters for extreme values."
        )


def partial_cholesky(Q: Tensor, rank: int) -> Tensor:
    """F with ``Fᵀ F ≈ Q − I``, pivoted, ``... x rank x M``. Cost O(M rank²).

    Rows are zero where nothing that arithmetic can tell is left to explain.
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
