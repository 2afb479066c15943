"""The log marginal likelihood of statistics or rows in a grid's features, with its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from bo_stream.bases.grid.contraction import expected_log_prior, expected_log_prior_at_rows
from bo_stream.bases.grid.interpolation import GridBasis
from bo_stream.bases.grid.kernel import GridKernel
from bo_stream.linalg import safe_cholesky
from bo_stream.marginal_likelihood import NoiseGroup, combine, expected_misfit
from bo_stream.weights import (
    InformationForm,
    evidence_of,
    log_marginal_likelihood,
    weight_precision,
)


def differentiable_log_marginal_likelihood(
    groups: Sequence[NoiseGroup], residual: Tensor, basis: GridBasis, factors: GridKernel
) -> Tensor:
    """Return the log marginal likelihood, ``... x m``, with its exact gradient. Cost O(r³).

    The gradient is that of the expected complete-data log likelihood at the present posterior
    (Fisher's identity), in which posterior and eigenvectors are constants: no factorisation is
    differentiated. It flows to the noise groups' levels, to the combination ``residual`` of [Y, 1]
    that is to be explained, ``... x m x 2 x 1``, and to the kernel, of whose present values the
    basis is.
    """
    with torch.no_grad():
        value, mean, second_moment = _solved(combine(groups, residual))
    expected = expected_log_prior(basis, factors, second_moment)
    return with_gradient_of(expected, value, groups, residual, mean, second_moment)


def with_gradient_of(
    expected: Tensor,
    value: Tensor,
    groups: Sequence[NoiseGroup],
    residual: Tensor,
    mean: Tensor,
    second_moment: Tensor,
) -> Tensor:
    """Return a value with the gradient of the expected complete-data log likelihood.

    ``expected`` is its part of the weights' prior, negative.
    """
    for group in groups:
        pair = group.statistics.gram.flatten(-2), second_moment.mT.flatten(-2)  # both symmetric
        spread = (pair[0].unsqueeze(-2) @ pair[1].unsqueeze(-1))[..., 0, 0]
        expected = expected + expected_misfit(group, residual, mean, spread)
    return value - (expected - expected.detach())


def _solved(evidence: InformationForm) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log marginal likelihood, the weights' posterior mean and ``E[w wᵀ]``."""
    factor = safe_cholesky(weight_precision(evidence.gram))
    mean = torch.cholesky_solve(evidence.moment, factor)
    log_precision = 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    value = log_marginal_likelihood(evidence, mean, log_precision)
    return value, mean, torch.cholesky_inverse(factor) + mean @ mean.mT


def batch_log_marginal_likelihood(
    inputs: Tensor, residual: Tensor, noise: Tensor, basis: GridBasis, factors: GridKernel
) -> Tensor:
    """Return the log marginal likelihood of a batch, ``... x m``, with its exact gradient.

    Basis and eigenvectors are constants, as in :func:`differentiable_log_marginal_likelihood`. The
    gradient flows to the inputs, ``... x n x d``, to the kernel, of whose present values the basis
    is, and to the outcomes less the prior mean and the noise variances, ``... x m x n`` each. Cost
    O(n r² + r³), or O(n² r + n³) for fewer rows than features.
    """
    values = basis.values(inputs)
    leaves = [[each.detach().requires_grad_() for each in lines] for lines in values]
    with torch.enable_grad():
        features = basis.products(leaves)
    with torch.no_grad():
        few = features.shape[-2] < features.shape[-1]
        gradient = (_gradient_of_rows if few else _gradient_of_weights)(features, residual, noise)
        flat = torch.autograd.grad(features, list(chain(*leaves)), gradient.features)
        found = iter(flat)
        slopes = [[next(found) for _ in lines] for lines in leaves]
    change = (gradient.residual * residual + gradient.noise * noise).sum(-1)
    change = change - expected_log_prior_at_rows(basis, factors, leaves, slopes)
    for value, slope in zip(chain(*values), flat, strict=True):
        change = change + (slope * value).sum((-2, -1))
    return gradient.value + (change - change.detach())


@dataclass(frozen=True)
class _BatchGradient:
    """The log marginal likelihood of a batch and its derivatives at fixed hyperparameters.

    Attributes:
        value: ``... x m``.
        features: Derivative in the features Φ, ``... x m x n x r``.
        residual: Derivative in the outcomes, ``... x m x n``.
        noise: Derivative in the noise variances, ``... x m x n``.
    """

    value: Tensor
    features: Tensor
    residual: Tensor
    noise: Tensor


def _gradient_of_rows(features: Tensor, residual: Tensor, noise: Tensor) -> _BatchGradient:
    """Differentiate ``log N(y; 0, C)`` with ``C = Φ Φᵀ + N``. Cost O(n² r + n³).

    With ``a = C⁻¹ y`` the derivative in C is ``½ (a aᵀ − C⁻¹)`` [Rasmussen and Williams, 2006, eq.
    5.9], hence that in Φ is ``(a aᵀ − C⁻¹) Φ``.
    """
    n = features.shape[-2]
    covariance = features.new_empty(*features.shape[:-1], n)
    for begin in range(0, n, step := max(1, -(-n // 4))):  # the lower half is enough
        rows = slice(begin, begin + step)
        covariance[..., rows, : rows.stop] = (
            features[..., rows, :] @ features[..., : rows.stop, :].mT
        )
    covariance.diagonal(dim1=-2, dim2=-1).add_(noise)
    factor = safe_cholesky(covariance)
    weights = torch.cholesky_solve(residual.unsqueeze(-1), factor)
    slope = torch.cholesky_inverse(factor).neg_()
    slope.flatten(0, -3).baddbmm_(weights.flatten(0, -3), weights.flatten(0, -3).mT)
    a, logs = weights.squeeze(-1), factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    constant = 0.5 * noise.shape[-1] * math.log(2.0 * math.pi)
    value = -0.5 * (a * residual).sum(-1) - logs - constant
    return _BatchGradient(
        value, (features.mT @ slope).mT, -a, 0.5 * slope.diagonal(dim1=-2, dim2=-1).clone()
    )


def _gradient_of_weights(features: Tensor, residual: Tensor, noise: Tensor) -> _BatchGradient:
    """Differentiate the expected complete-data log likelihood. Cost O(n r² + r³)."""
    value, mean, second_moment = _solved(evidence_of(features, residual, noise))
    moved = features @ second_moment
    linear, spread = (features @ mean).squeeze(-1), (moved * features).sum(-1)
    misfit = (residual.square() - 2.0 * residual * linear + spread) / noise
    slope = (residual.unsqueeze(-1) * mean.mT - moved) / noise.unsqueeze(-1)
    of_noise = 0.5 * (misfit - 1.0) / noise
    return _BatchGradient(value, slope, (linear - residual) / noise, of_noise)
