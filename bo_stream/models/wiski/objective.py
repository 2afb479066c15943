"""The log marginal likelihood in the features of a grid, with exact gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bo_stream.bases.grid.interpolation import GridBasis
from bo_stream.bases.grid.kernel import GridKernel
from bo_stream.bases.grid.sensitivity import expected_log_prior
from bo_stream.linalg import product_of_triangular_root
from bo_stream.marginal_likelihood import NoiseGroup, combine, expected_misfit
from bo_stream.weights import InformationForm, evidence_of, log_marginal_likelihood, solve


def differentiable_log_marginal_likelihood(
    groups: Sequence[NoiseGroup],
    residual: Tensor,
    basis: GridBasis,
    factors: GridKernel,
) -> Tensor:
    """Return the log marginal likelihood, ``... x m``, with its exact gradient. Cost O(r³).

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
        value, mean, second_moment = _solved(combine(groups, residual))
        spreads = [(group.statistics.gram * second_moment).sum((-2, -1)) for group in groups]
    expected = expected_log_prior(basis, factors, second_moment)
    for group, spread in zip(groups, spreads, strict=True):
        expected = expected + expected_misfit(group, residual, mean, spread)
    return value - (expected - expected.detach())


def _solved(evidence: InformationForm) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log marginal likelihood, the weights' posterior mean and ``E[w wᵀ]``."""
    posterior = solve(evidence)
    value = log_marginal_likelihood(evidence, posterior.mean, posterior.log_precision())
    covariance = product_of_triangular_root(posterior.root)
    return value, posterior.mean, covariance + posterior.mean @ posterior.mean.mT


def batch_log_marginal_likelihood(
    features: Tensor,
    residual: Tensor,
    noise: Tensor,
    basis: GridBasis,
    factors: GridKernel,
) -> Tensor:
    """Return the log marginal likelihood of a batch, ``... x m``, with its exact gradient.

    By Fisher's identity, as :func:`differentiable_log_marginal_likelihood`, and in the features
    too. Cost O(n r² + r³).

    Args:
        features: Whitened, ``... x m x n x r``; may require gradients.
        residual: Outcomes less the prior mean, ``... x m x n``; may require gradients.
        noise: Actual variances, ``... x m x n``; may require gradients.
        basis: Built from ``factors`` at their present values.
        factors: The kernel, differentiable.
    """
    with torch.no_grad():
        value, mean, second_moment = _solved(evidence_of(features, residual, noise))
    linear = (features @ mean).squeeze(-1)
    spread = ((features @ second_moment) * features).sum(-1)
    misfit = (residual.square() - 2.0 * residual * linear + spread) / noise + noise.log()
    expected = expected_log_prior(basis, factors, second_moment) + 0.5 * misfit.sum(-1)
    return value - (expected - expected.detach())
