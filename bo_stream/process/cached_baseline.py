"""Baseline points whose joint distribution is evaluated once, for joints with ever new points.

As BoTorch caches the root of ``X_baseline``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.linalg import stack_columns, stack_rows
from bo_stream.process.process import Joint, Points, PosteriorProcess, Residual


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

    def surround(self, X: Tensor) -> bool:
        """Say whether ``... x n x d`` points begin and end with these, and others are between."""
        if X.shape[-2] <= self.X.shape[-2] or X.dim() < self.X.dim():
            return False
        trailing = self.X.shape[-2] - self.leading
        before, after = X[..., : self.leading, :], X[..., X.shape[-2] - trailing :, :]
        first, last = self.X.split([self.leading, trailing], dim=-2)
        return bool((before == first).all() and (after == last).all())

    def joint(self, inputs: Tensor) -> Joint:
        """Compute the joint distribution of ``... x n x d`` inputs that begin and end with these.

        Cost O(q r² + k q r) for each batch of q others, beside O((k + q)²) to write it down.
        Differentiable in the others only.
        """
        each = self.mean.shape[-1] // max(self.X.shape[-2], 1)  # a model may make several of one X
        leading = self.leading * each
        trailing = self.mean.shape[-1] - leading
        end = inputs.shape[-2] - trailing
        others = self.process.at(inputs[..., leading:end, :])

        def in_order(values: Tensor) -> Tensor:
            """Put columns of these and then of the others in the order of all."""
            if trailing == 0:
                return values
            before, after, between = values.split([leading, trailing, end - leading], -1)
            return torch.cat((before, between, after), -1)

        def covariance() -> Tensor:
            cross = self.process.cross_covariance(others, self.points)
            own = self.process.cross_covariance(others, others)
            whole = stack_rows(stack_columns(self.covariance, cross.mT), stack_columns(cross, own))
            return in_order(in_order(whole).mT).mT

        def variance() -> Tensor:
            known = self.covariance.diagonal(dim1=-2, dim2=-1)
            return in_order(stack_columns(known, self.process.variance_at(others)))

        means = in_order(stack_columns(self.mean, self.process.mean_at(others)))
        empty = means.new_zeros(*means.shape, 0)
        return Joint(means, empty, empty, Residual(covariance, variance))


def arrangements(first: Tensor | None, last: Tensor | None) -> list[tuple[Tensor, int]]:
    """List the points that may be cached, with how many of them come before the others.

    All together, then those of each side alone, for a caller who changes the other side:
    ``first`` before the others, ``... x k x d``, and ``last`` after them, ``... x k' x d``.
    """
    sides = [] if first is None else [(first, first.shape[-2])]
    sides += [] if last is None else [(last, 0)]
    if first is None or last is None:
        return sides
    return [(torch.cat((first, last), -2), first.shape[-2]), *sides]
