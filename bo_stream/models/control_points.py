"""Support points of a control variate, and what the weights make of them, kept current."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.bases.inducing import kernel_matrix
from bo_stream.bases.point_basis import PointBasis
from bo_stream.bases.sampled_basis import SampledBasis
from bo_stream.linalg import inverse_lower, safe_cholesky
from bo_stream.models.sampled_bound import Control
from bo_stream.models.weight_posterior import ChevronPosterior

_CHUNK = 1 << 21
"""Numbers of features that are held at a time."""


@dataclass(frozen=True)
class ControlPoints:
    """Points, functions that stay as they were, and ``a = Φ_p [μ, c_1, ...]``.

    Functions are those of the hyperparameters at the start: the variate need not follow them to be
    right, only to be good. [Evans2020, proposition 3 and appendix F.3]

    Attributes:
        basis: Of functions that stay.
        X: ``s x d``.
        targets: Outcomes there, ``m x s``.
        values: a, ``m x s x (1 + columns)``; moved in place.
        prior_root: ``L⁻¹`` with ``L Lᵀ = K_pp``, or None.
    """

    basis: SampledBasis
    X: Tensor
    targets: Tensor
    values: Tensor
    prior_root: Tensor | None

    @classmethod
    @torch.no_grad()
    def of(
        cls, basis: SampledBasis, X: Tensor, targets: Tensor, posterior: ChevronPosterior
    ) -> ControlPoints:
        """At some weights. Cost O(s p) for s points, unless the weights are zero.

        Args:
            basis: Of a frozen kernel.
            X: ``s x d``.
            targets: ``m x s``.
            posterior: Whose weights.
        """
        shape = (*targets.shape, 1 + posterior.columns)
        points = cls(basis, X, targets, targets.new_zeros(shape), _root(basis, X))
        chunk = max(1, _CHUNK // max(1, len(X)))
        for index in torch.arange(posterior.size, device=X.device).split(chunk):
            weights = posterior.dense_columns(index)
            if bool(weights.any()):
                points.follow(points.functions(index), weights)
        return points

    def functions(self, index: Tensor) -> Tensor:
        """``Φ_p`` of some functions, ``m x s x k``. Cost O(s k d)."""
        with torch.no_grad():
            return self.basis.functions(self.X, index).to(self.X)

    def follow(self, functions: Tensor, moves: Tensor) -> None:
        """Take over moves of some weights, in place. Cost O(s k). [Evans2020, proposition 3].

        Args:
            functions: At the points, ``m x s x k``.
            moves: Of weights and dense columns, ``m x k x (1 + columns)``.
        """
        self.values.add_(functions @ moves)

    def control(self, count: float, mean: Tensor) -> Control:
        """The control variate.

        Args:
            count: Number of all data.
            mean: The prior mean, ``m x 1``.
        """
        residual = self.targets - mean
        return Control(self.values.clone(), residual, count / len(self.X), self.prior_root)

    def clone(self) -> ControlPoints:
        """With values of its own."""
        return replace(self, values=self.values.clone())


def _root(basis: SampledBasis, X: Tensor) -> Tensor | None:
    if not isinstance(basis, PointBasis):
        return None
    K = kernel_matrix(basis.kernel, X.double(), X.double(), basis.outputs)
    return inverse_lower(safe_cholesky(K)).to(X)
