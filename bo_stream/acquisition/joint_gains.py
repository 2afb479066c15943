"""Gains of candidates by their covariances, for processes that are more than their features."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.acquisition.measures import PointMeasure
from bo_stream.process import PosteriorProcess


@dataclass(frozen=True)
class JointGains:
    """What observing each of N candidates takes off the mean variance at M points.

    ``Σ w_j c_ij² / (v_i + noise)`` with c the covariances of candidates with points and v the
    variances of candidates, given the candidates observed so far. Memory O(N M).

    Attributes:
        process: Before any of them.
        pool: Candidates in transformed inputs, ``N x d``.
        weights: Of the points, ``M``.
        covariance: ``m x N x M``.
        variance: ``m x N``.
        columns: ``L`` with ``L Lᵀ`` what the observed ones took off the candidates' covariance,
            ``m x N x k``.
    """

    process: PosteriorProcess
    pool: Tensor
    weights: Tensor
    covariance: Tensor
    variance: Tensor
    columns: Tensor

    @classmethod
    def of(cls, process: PosteriorProcess, pool: Tensor, points: PointMeasure) -> JointGains:
        """Of a process as it is. Cost O(N M r) for its r features."""
        covariance = process.covariance(pool, points.points)
        variance = process.marginals(pool)[1].expand(covariance.shape[:-1])
        columns = covariance[..., :0]
        return cls(process, pool, points.weights, covariance, variance, columns)

    def value(self, noise: Tensor) -> Tensor:
        """The gains, ``m x N``, where observations have noise variances ``m x N``. Cost O(N M)."""
        return (self.covariance.square() @ self.weights) / (self.variance + noise)

    def observing(self, i: int, noise: Tensor) -> JointGains:
        """After the i-th candidate, with noise variance ``m x 1``. Cost O(N (M + r² + k))."""
        fresh = self.process.covariance(self.pool, self.pool[i : i + 1])
        spread = (self.variance[..., i : i + 1] + noise).sqrt().unsqueeze(-1)
        column = (fresh - self.columns @ self.columns[..., i : i + 1, :].mT) / spread
        row = self.covariance[..., i : i + 1, :] / spread
        return replace(
            self,
            covariance=self.covariance - column @ row,
            variance=(self.variance - column.squeeze(-1).square()).clamp_min(0.0),
            columns=torch.cat((self.columns, column), -1),
        )
