"""Distributions of outcomes, as BoTorch takes them, from those of a process."""

from __future__ import annotations

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
from bo_stream.process.process import Joint

DENSE_LIMIT = 512
"""Up to this many points a joint posterior has a dense covariance, beyond it a lazy one."""


@dataclass(frozen=True)
class Predictive:
    """Mean and variance of outcomes at single points, ``... x q x m`` each.

    Attributes:
        mean: Of a label, its probability.
        variance: Of the outcome, noise included.
    """

    mean: Tensor
    variance: Tensor


def outcome_distribution(
    joint: Joint, offset: Tensor, scale: Tensor, noise: Tensor | None, dtype: torch.dtype
) -> MultivariateNormal:
    """Return the normal ``offset + scale · joint``, with ``noise`` on the joint's diagonal."""
    if joint.mean.shape[-2] == 1:
        joint, offset, scale = joint.only_output(), offset.squeeze(-2), scale.squeeze(-2)
        noise = None if noise is None else noise.squeeze(-2)
        return _normal(joint, offset, scale, noise, dtype)
    return IndependentOutputs.of(_normal(joint, offset, scale, noise, dtype))


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


def leave_one_out(
    outcomes: Tensor, mean: Tensor, variance: Tensor, noise: Tensor, least_share: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Mean and variance at each observation, had it not been observed.

    Of the posterior variance v and the noise variance s, the share ``(s − v) / s`` is what the
    others leave to the observation itself: ``v / share`` is the variance without it, and
    ``y − (y − mean) / share`` the mean.

    Args:
        outcomes: What was observed, ``...``.
        mean: Posterior mean there, given all.
        variance: Posterior variance there, given all.
        noise: Of the observations.
        least_share: What smaller shares are raised to.
    """
    share = (1.0 - variance / noise).clamp_min(least_share)
    return outcomes - (outcomes - mean) / share, variance / share
