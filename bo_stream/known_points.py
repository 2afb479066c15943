"""Points whose joint distribution is evaluated once, with others beside them again and again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.linalg import stack_columns, stack_rows
from bo_stream.process import Joint, Points, PosteriorProcess, Residual


@dataclass(frozen=True)
class KnownPoints:
    """k points of a process, as constants.

    Attributes:
        X: As the user gave them, ``... x k x d``.
        process: Whose points they are.
        points: Evaluated.
        mean: ``... x m x k``.
        covariance: ``... x m x k x k``.
    """

    X: Tensor
    process: PosteriorProcess
    points: Points
    mean: Tensor
    covariance: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, X: Tensor, process: PosteriorProcess, inputs: Tensor) -> KnownPoints:
        """Evaluate points. Cost O(k r² + k² r).

        Args:
            X: ``... x k x d``.
            process: Of a model.
            inputs: X as the process takes it.
        """
        points = process.at(inputs)
        covariance = process.cross_covariance(points, points)
        return cls(X.detach(), process, points, process.mean_at(points), covariance)

    def lead(self, X: Tensor) -> bool:
        """Whether the first k of ``... x n x d`` points are these, and others follow."""
        count = self.X.shape[-2]
        if X.shape[-2] <= count or X.dim() < self.X.dim():
            return False
        return bool((X[..., :count, :] == self.X).all())

    def joint(self, inputs: Tensor) -> Joint:
        """The joint distribution of n inputs of which these are the first k.

        Cost O(q r² + k q r) for each batch of q others, beside O((k + q)²) to write it down.
        Differentiable in the others only.

        Args:
            inputs: As the process takes them, ``... x n x d``.
        """
        others = self.process.at(inputs[..., self.X.shape[-2] :, :])
        means = stack_columns(self.mean, self.process.mean_at(others))
        empty = means.new_zeros(*means.shape, 0)
        residual = Residual(
            lambda: self._covariance_with(others),
            lambda: stack_columns(
                self.covariance.diagonal(dim1=-2, dim2=-1), self.process.variance_at(others)
            ),
        )
        return Joint(means, empty, empty, residual)

    def _covariance_with(self, others: Points) -> Tensor:
        cross = self.process.cross_covariance(others, self.points)
        own = self.process.cross_covariance(others, others)
        return stack_rows(stack_columns(self.covariance, cross.mT), stack_columns(cross, own))
