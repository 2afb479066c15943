"""Baseline points whose joint distribution is evaluated once, for joints with ever new points.

As BoTorch caches the root of ``X_baseline``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.linalg import stack_columns, stack_rows
from bo_stream.process.joint import Joint, Residual
from bo_stream.process.process import Points, PosteriorProcess


@dataclass(frozen=True)
class CachedBaseline:
    """Evaluated points of a process, some before all other points and the rest after them.

    Attributes:
        X: As the user gave them, ``... x k x d``.
        leading: Number of points that come first.
        process: The process that was evaluated.
        points: The evaluated inputs.
        mean: ``... x m x k``.
        covariance: ``... x m x k x k``.
    """

    X: Tensor
    leading: int
    process: PosteriorProcess
    points: Points
    mean: Tensor
    covariance: Tensor

    @classmethod
    @torch.no_grad()
    def of(
        cls, X: Tensor, leading: int, process: PosteriorProcess, inputs: Tensor
    ) -> CachedBaseline:
        """Evaluate points X, which the process takes as ``inputs``. Cost O(k r² + k² r)."""
        points = process.at(inputs)
        covariance = process.cross_covariance(points, points)
        return cls(X.detach(), leading, process, points, process.mean_at(points), covariance)

    @property
    def _trailing(self) -> int:
        return self.X.shape[-2] - self.leading

    @property
    def _rows(self) -> tuple[int, int]:
        """Number of the process's inputs that come first and last: one or several for each of X."""
        each = self.mean.shape[-1] // max(self.X.shape[-2], 1)
        return self.leading * each, self._trailing * each

    def surround(self, X: Tensor) -> bool:
        """Say whether ``... x n x d`` points begin and end with these, and others are between."""
        if X.shape[-2] <= self.X.shape[-2] or X.dim() < self.X.dim():
            return False
        before, after = X[..., : self.leading, :], X[..., X.shape[-2] - self._trailing :, :]
        first, last = self.X.split([self.leading, self._trailing], dim=-2)
        return bool((before == first).all() and (after == last).all())

    def joint(self, inputs: Tensor) -> Joint:
        """Compute the joint distribution of ``... x n x d`` inputs that begin and end with these.

        Cost O(q r² + k q r) for each batch of q others, beside O((k + q)²) to write it down.
        Differentiable in the others only.
        """
        leading, trailing = self._rows
        between = inputs[..., leading : inputs.shape[-2] - trailing, :]
        others = self.process.at(between)
        means = self._in_order(stack_columns(self.mean, self.process.mean_at(others)))
        empty = means.new_zeros(*means.shape, 0)

        def covariance() -> Tensor:
            cross = self.process.cross_covariance(others, self.points)
            own = self.process.cross_covariance(others, others)
            whole = stack_rows(stack_columns(self.covariance, cross.mT), stack_columns(cross, own))
            return self._in_order(self._in_order(whole).mT).mT

        def variance() -> Tensor:
            known = self.covariance.diagonal(dim1=-2, dim2=-1)
            return self._in_order(stack_columns(known, self.process.variance_at(others)))

        return Joint(means, empty, empty, Residual(covariance, variance))

    def _in_order(self, values: Tensor) -> Tensor:
        """Put columns of these and then of the others in the order of all."""
        leading, trailing = self._rows
        if trailing == 0:
            return values
        sizes = [leading, trailing, values.shape[-1] - leading - trailing]
        before, after, others = values.split(sizes, -1)
        return torch.cat((before, others, after), -1)


def arrangements(first: Tensor | None, last: Tensor | None) -> list[tuple[Tensor, int]]:
    """List the points that may be cached, with how many of them come before the others.

    All together, then those of each side alone, for a caller who changes the other side:
    ``first`` before the others, ``... x k x d``, and ``last`` after them, ``... x k' x d``.
    """
    if first is None:
        return [] if last is None else [(last, 0)]
    leading = first.shape[-2]
    if last is None:
        return [(first, leading)]
    return [(torch.cat((first, last), -2), leading), (first, leading), (last, 0)]
