"""The log marginal likelihood of a stream from its statistics, with exact gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.bases.interpolation import InterpolationBasis
from bo_stream.bases.kernel_factors import KernelFactors
from bo_stream.bases.kernel_sensitivity import expected_log_prior
from bo_stream.linalg import inverse_lower, product_of_triangular_root, safe_cholesky
from bo_stream.sufficient_statistics import MatrixMap, SufficientStatistics
from bo_stream.weights import GaussianEvidence, at_noise, log_marginal_likelihood, solve


@dataclass(frozen=True)
class NoiseGroup:
    """Whitened statistics of the observations that share one noise level.

    Attributes:
        statistics: In whitened weights.
        level: Factor from relative to actual noise, ``... x m``, differentiable.
    """

    statistics: SufficientStatistics[Tensor]
    level: Tensor


def combine(groups: Sequence[NoiseGroup], residual: Tensor) -> GaussianEvidence:
    """Evidence of all groups for the residual targets ``[Y, 1] @ residual``."""
    parts = [at_noise(group.statistics, group.level, residual) for group in groups]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def differentiable_log_marginal_likelihood(
    groups: Sequence[NoiseGroup],
    residual: Tensor,
    basis: InterpolationBasis,
    factors: KernelFactors,
) -> Tensor:
    """The log marginal likelihood, ``... x m``, with its exact gradient. Cost O(r³).

    The gradient is that of the expected complete-data log likelihood at the present posterior
    (Fisher's identity), in which posterior and eigenvectors are constants: no factorisation is
    differentiated.

    Args:
        groups: Noise groups; their levels may require gradients.
        residual: Combination of [Y, 1] to explain, ``... x m x 2 x 1``; may require gradients.
        basis: Built from ``factors`` at their present values.
        factors: The kernel, differentiable.
    """
    with torch.no_grad():
        evidence = combine(groups, residual)
        posterior = solve(evidence)
        value = log_marginal_likelihood(evidence, posterior)
        covariance = product_of_triangular_root(posterior.root)
        second_moment = covariance + posterior.mean @ posterior.mean.mT
    expected = expected_log_prior(basis, factors, second_moment)
    for group in groups:
        expected = expected + _expected_misfit(group, residual, posterior.mean, second_moment)
    return value - (expected - expected.detach())


def subspace_log_marginal_likelihood(
    groups: Sequence[NoiseGroup], residual: Tensor, prior: Tensor
) -> Tensor:
    """The log marginal likelihood for weights with prior N(0, prior), ``... x m``. Cost O(r³).

    Exact with its gradient, as :func:`differentiable_log_marginal_likelihood`, and smooth in the
    hyperparameters because the basis stays the same.

    Args:
        groups: Noise groups in one basis; their levels may require gradients.
        residual: Combination of [Y, 1] to explain, ``... x m x 2 x 1``; may require gradients.
        prior: Covariance of the weights, ``... x m x r x r``; may require gradients.
    """
    with torch.no_grad():
        factor = safe_cholesky(prior)
        T = MatrixMap(factor)
        moved = [NoiseGroup(group.statistics.pull_back(T), group.level) for group in groups]
        evidence = combine(moved, residual)
        posterior = solve(evidence)
        value = log_marginal_likelihood(evidence, posterior)
        covariance = product_of_triangular_root(posterior.root)
        second_moment = covariance + posterior.mean @ posterior.mean.mT
        whitening = inverse_lower(factor)
        identity = torch.eye(factor.shape[-1]).to(factor)
        sensitivity = 0.5 * whitening.mT @ (identity - second_moment) @ whitening
    expected = (sensitivity * prior).sum((-2, -1))
    for group in moved:
        expected = expected + _expected_misfit(group, residual, posterior.mean, second_moment)
    return value - (expected - expected.detach())


def _expected_misfit(
    group: NoiseGroup, residual: Tensor, mean: Tensor, second_moment: Tensor
) -> Tensor:
    """−E log p(y | w) up to a constant, ``... x m``."""
    statistics = group.statistics
    quadratic = (residual.mT @ statistics.energy @ residual)[..., 0, 0]
    linear = (mean.mT @ statistics.moment @ residual)[..., 0, 0]
    spread = (statistics.gram * second_moment).sum((-2, -1))
    misfit = (quadratic - 2.0 * linear + spread) / group.level
    return 0.5 * (misfit + statistics.count * group.level.log())
