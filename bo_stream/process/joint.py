"""The joint distribution of points under a process, and that of their outcomes for BoTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from bo_stream.process.distributions import (
    DowndatedRootOperator,
    IndependentOutputs,
    LazyCovariance,
)

DENSE_LIMIT = 512
"""Up to this many points a joint posterior has a dense covariance, beyond it a lazy one."""


@dataclass(frozen=True)
class Joint:
    """Joint distribution of n points: mean and covariance ``Z Zᵀ − B Bᵀ + residual``.

    Attributes:
        mean: ``... x m x n``.
        root: Z, ``... x m x n x r``.
        downdate: B, ``... x m x n x q``.
        residual: Residual covariance of the basis, or None where it is zero.
    """

    mean: Tensor
    root: Tensor
    downdate: Tensor
    residual: Residual | None

    def select(self, outputs: Sequence[int]) -> Joint:
        """Select some of the outputs."""
        if list(outputs) == list(range(self.mean.shape[-2])):
            return self
        chosen = torch.tensor(list(outputs), device=self.mean.device)
        return self._map(lambda tensor, after: tensor.index_select(-1 - after, chosen))

    def distribution(
        self, offset: Tensor, scale: Tensor, noise: Tensor | None, dtype: torch.dtype
    ) -> MultivariateNormal:
        """Return the normal ``offset + scale · joint``, with noise on the joint's diagonal.

        Args:
            offset: ``... x m x 1``.
            scale: Shaped as offset.
            noise: Variances, broadcastable to ``... x m x n``, or None.
            dtype: Of the normal.
        """
        if self.mean.shape[-2] > 1:
            return IndependentOutputs.of(_normal(self, offset, scale, noise, dtype))
        only = self._map(lambda tensor, after: tensor.squeeze(-1 - after))
        noise = None if noise is None else noise.squeeze(-2)
        return _normal(only, offset.squeeze(-2), scale.squeeze(-2), noise, dtype)

    def _map(self, rule: Callable[[Tensor, int], Tensor]) -> Joint:
        return Joint(
            rule(self.mean, 1),
            rule(self.root, 2),
            rule(self.downdate, 2),
            None if self.residual is None else self.residual.map(rule),
        )

    def covariance(self) -> Tensor:
        """Compute the dense covariance, ``... x m x n x n``."""
        covariance = self.root @ self.root.mT
        if self.downdate.shape[-1] > 0:
            covariance = covariance - self.downdate @ self.downdate.mT
        return covariance if self.residual is None else covariance + self.residual.covariance()

    def without_root(self) -> Residual | None:
        """Return covariance and variance to evaluate, or None if the root is not empty."""
        residual = self.residual
        if residual is None or self.root.shape[-1] > 0:
            return None
        explained = self.downdate.square().sum(-1)
        return Residual(self.covariance, lambda: residual.variance() - explained)


@dataclass(frozen=True)
class Residual:
    """Covariance outside the factors of a :class:`Joint`, evaluated when it is asked for.

    Attributes:
        covariance: Evaluates ``... x m x n x n``.
        variance: Evaluates its diagonal, ``... x m x n``, at less cost.
    """

    covariance: Callable[[], Tensor]
    variance: Callable[[], Tensor]

    def map(self, rule: Callable[[Tensor, int], Tensor]) -> Residual:
        """Apply a rule for a tensor and its number of dimensions after m to what is evaluated."""
        return Residual(lambda: rule(self.covariance(), 2), lambda: rule(self.variance(), 1))


def _normal(
    joint: Joint, offset: Tensor, scale: Tensor, noise: Tensor | None, dtype: torch.dtype
) -> MultivariateNormal:
    mean = (offset + scale * joint.mean).to(dtype)
    return MultivariateNormal(mean, _covariance(joint, scale, noise, mean.shape, dtype))


def _covariance(
    joint: Joint, scale: Tensor, noise: Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> LinearOperator:
    if shape[-1] > DENSE_LIMIT:
        return _lazy_covariance(joint, scale, noise, shape, dtype)
    dense = joint.covariance()
    if noise is not None:
        dense = dense + torch.diag_embed(noise.expand(torch.broadcast_shapes(noise.shape, shape)))
    scaled = (dense * scale.square().unsqueeze(-1)).to(dtype)
    return to_linear_operator(scaled.expand(*shape, shape[-1]))


def _lazy_covariance(
    joint: Joint, scale: Tensor, noise: Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> LinearOperator:
    factor, square = scale.unsqueeze(-1), scale.square()
    rootless = joint.without_root()
    residual = joint.residual if rootless is None else rootless
    lazy: LinearOperator | None = None
    if residual is not None:
        like = torch.zeros(shape, dtype=dtype, device=joint.mean.device)
        lazy = LazyCovariance(
            like,
            lambda: residual.covariance() * square.unsqueeze(-1),
            lambda: residual.variance() * square,
        )
    if lazy is None or rootless is None:
        root: LinearOperator = DowndatedRootOperator(
            (joint.root * factor).to(dtype), (joint.downdate * factor).to(dtype)
        ).expand(*shape, shape[-1])
        lazy = root if lazy is None else root + lazy
    if noise is None:
        return lazy
    return lazy + DiagLinearOperator((noise * square).expand(shape).to(dtype))
