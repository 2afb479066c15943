"""The log marginal likelihood of a stream from its statistics, with exact gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bo_stream.linalg import (
    cholesky_with_jitter,
    safe_cholesky,
    solve_one_plus_product,
)
from bo_stream.tensors import first_derivatives_only
from bo_stream.weights import (
    InformationForm,
    SufficientStatistics,
    at_noise,
    evidence_of,
    log_marginal_likelihood,
    weight_precision,
)


@dataclass(frozen=True)
class SubspacePosterior:
    """The posterior of weights with prior N(0, P): mean ``P u``, covariance ``P − P K P``.

    P need not be inverted: with A the evidence's gram, ``K = (I + A P)⁻¹ A`` and ``u = (I + A P)⁻¹
    moment``.

    Attributes:
        K: ``... x m x r x r``.
        u: ``... x m x r x 1``.
        log_determinant: ``log |I + A P|``, ``... x m``.
    """

    K: Tensor
    u: Tensor
    log_determinant: Tensor


def subspace_posterior(evidence: InformationForm, prior: Tensor) -> SubspacePosterior:
    """Solve by one LU factor for the prior covariance P, ``... x m x r x r``. Cost O(r³).

    Raises:
        NotPSDError: Hyperparameters are NaN or infinite.
    """
    gain, log_determinant = solve_one_plus_product(
        evidence.gram, prior, torch.cat((evidence.gram, evidence.moment), -1)
    )
    return SubspacePosterior(gain[..., :-1], gain[..., -1:], log_determinant)


@dataclass(frozen=True)
class NoiseGroup:
    """Whitened statistics of the observations that share one noise level.

    Attributes:
        statistics: Statistics in whitened weights.
        level: Factor from relative to actual noise, ``... x m``, differentiable.
    """

    statistics: SufficientStatistics[Tensor]
    level: Tensor


def combine(groups: Sequence[NoiseGroup], residual: Tensor) -> InformationForm:
    """Add the information of all groups for the residual targets ``[Y, 1] @ residual``."""
    first, *others = (at_noise(group.statistics, group.level, residual) for group in groups)
    return sum(others, start=first)


def dense_log_marginal_likelihood(covariance: Tensor, residual: Tensor, noise: Tensor) -> Tensor:
    """Compute ``log N(residual; 0, covariance + diag(noise))``, ``... x m``, and exact gradients.

    First derivatives only. Cost O(n³), for the value a third of what it is with gradients.

    Args:
        covariance: Prior covariance at n observations, ``... x m x n x n``; may require gradients.
        residual: Outcomes less the prior mean, ``... x m x n``; may require gradients.
        noise: Variances, ``... x m x n``; may require gradients.

    Raises:
        NotPSDError: Hyperparameters are NaN or infinite.
    """
    value: Tensor = _LogNormalDensity.apply(covariance, residual, noise)  # type: ignore[no-untyped-call]
    return value


class _LogNormalDensity(torch.autograd.Function):
    """Function ``log N(y; 0, C + diag(s))``; first derivatives only.

    With ``A = (C + diag(s))⁻¹`` and ``a = A y`` the gradient in C is ``Q = ½ (a aᵀ − A)``, that in
    s its diagonal and that in y ``−a`` [Rasmussen and Williams, 2006, eq. 5.9]. A jitter of j times
    the mean of the diagonal is differentiated, too: it adds ``j tr(Q) / n`` to the diagonal of Q.
    """

    @staticmethod
    def forward(ctx: Any, covariance: Tensor, residual: Tensor, noise: Tensor) -> Tensor:
        matrix = covariance.clone(memory_format=torch.contiguous_format)
        matrix.diagonal(dim1=-2, dim2=-1).add_(noise)
        factor, ctx.jitter = cholesky_with_jitter(matrix, is_new=True)
        weights = torch.cholesky_solve(residual.unsqueeze(-1), factor).squeeze(-1)
        ctx.save_for_backward(factor, weights)
        logs = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        constant = 0.5 * residual.shape[-1] * math.log(2.0 * math.pi)
        return -0.5 * (weights * residual).sum(-1) - logs - constant

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        factor, weights = ctx.saved_tensors
        of_residual = -slope.unsqueeze(-1) * weights
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[2]):
            return None, of_residual, None
        half = 0.5 * slope[..., None, None]
        Q = torch.cholesky_inverse(factor).mT.mul_(-half)  # symmetric, and by rows as C is
        Q.addcmul_(half * weights.unsqueeze(-1), weights.unsqueeze(-2))
        diagonal = Q.diagonal(dim1=-2, dim2=-1)
        if ctx.jitter > 0.0:
            diagonal += ctx.jitter * diagonal.mean(-1, keepdim=True)
        return Q, of_residual, diagonal.clone()


def subspace_log_marginal_likelihood(
    groups: Sequence[NoiseGroup], residual: Tensor, prior: Tensor
) -> Tensor:
    """Return the log marginal likelihood for weights with prior N(0, prior), ``... x m``.

    Cost O(r³). [Stanton2021, section 4.3; its derivatives: Galy-Fajou2021, A.2]

    Exact with its gradient, and smooth in the hyperparameters because the basis stays the same:
    ``∂/∂P = −½ (K − u uᵀ)``, see :class:`SubspacePosterior`, whose ``log_determinant`` enters the
    likelihood.

    Args:
        groups: Noise groups in one basis; their levels may require gradients.
        residual: Combination of [Y, 1] to explain, ``... x m x 2 x 1``; may require gradients.
        prior: Covariance of the weights, ``... x m x r x r``; may require gradients.

    Raises:
        NotPSDError: Hyperparameters are NaN or infinite.
    """
    with torch.no_grad():
        evidence = combine(groups, residual)
        posterior = subspace_posterior(evidence, prior)
        K, u = posterior.K, posterior.u
        mean = prior @ u
        value = log_marginal_likelihood(evidence, mean, posterior.log_determinant)
        # `tr(gram E[w wᵀ])` of each group, with `Cov[w] = P − P K P`; cheap for one group
        grams = [group.statistics.gram for group in groups]
        if len(groups) == 1:
            traces = [groups[0].level * (prior * K).sum((-2, -1))]
        else:
            covariance = prior - prior @ K @ prior
            traces = [(gram * covariance).sum((-2, -1)) for gram in grams]
        explained = [(mean.mT @ gram @ mean)[..., 0, 0] for gram in grams]
        spreads = [trace + part for trace, part in zip(traces, explained, strict=True)]
        sensitivity = 0.5 * (K - u @ u.mT)
    expected = (sensitivity * prior).sum((-2, -1))
    for group, spread in zip(groups, spreads, strict=True):
        expected = expected + expected_misfit(group, residual, mean, spread)
    return value - (expected - expected.detach())


def expected_misfit(group: NoiseGroup, residual: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    """Compute −E log p(y | w) up to a constant, ``... x m``, given ``tr(gram E[w wᵀ])``."""
    statistics = group.statistics
    quadratic = (residual.mT @ statistics.energy @ residual)[..., 0, 0]
    linear = (mean.mT @ statistics.moment @ residual)[..., 0, 0]
    misfit = (quadratic - 2.0 * linear + spread) / group.level
    return 0.5 * (misfit + statistics.count * group.level.log())


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


def solved_moments(evidence: InformationForm) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log marginal likelihood, the weights' posterior mean and ``E[w wᵀ]``."""
    factor = safe_cholesky(weight_precision(evidence.gram))
    mean = torch.cholesky_solve(evidence.moment, factor)
    log_precision = 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    value = log_marginal_likelihood(evidence, mean, log_precision)
    moment = torch.cholesky_inverse(factor)
    columns = mean.reshape(-1, mean.shape[-2], 1)
    moment.view(-1, *moment.shape[-2:]).baddbmm_(columns, columns.mT)  # it is read once
    return value, mean, moment


@dataclass(frozen=True)
class BatchGradient:
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

    @classmethod
    def by_rows(cls, features: Tensor, residual: Tensor, noise: Tensor) -> BatchGradient:
        """Differentiate ``log N(y; 0, C)`` with ``C = Φ Φᵀ + N``. Cost O(n² r + n³).

        With ``a = C⁻¹ y`` the derivative in C is ``½ (a aᵀ − C⁻¹)`` [Rasmussen and Williams, 2006,
        eq. 5.9], hence that in Φ is ``(a aᵀ − C⁻¹) Φ``.
        """
        n = features.shape[-2]
        covariance = features.new_zeros(*features.shape[:-1], n)
        for begin in range(0, n, step := max(1, -(-n // 4))):  # the lower half is enough
            rows = slice(begin, begin + step)
            covariance[..., rows, : rows.stop] = (
                features[..., rows, :] @ features[..., : rows.stop, :].mT
            )
        covariance.diagonal(dim1=-2, dim2=-1).add_(noise)
        factor = safe_cholesky(covariance)
        weights = torch.cholesky_solve(residual.unsqueeze(-1), factor)
        slope = weights @ weights.mT - torch.cholesky_inverse(factor)
        a, logs = weights.squeeze(-1), factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        constant = 0.5 * noise.shape[-1] * math.log(2.0 * math.pi)
        value = -0.5 * (a * residual).sum(-1) - logs - constant
        return cls(
            value, (features.mT @ slope).mT, -a, 0.5 * slope.diagonal(dim1=-2, dim2=-1).clone()
        )

    @classmethod
    def by_weights(cls, features: Tensor, residual: Tensor, noise: Tensor) -> BatchGradient:
        """Differentiate the expected complete-data log likelihood. Cost O(n r² + r³)."""
        value, mean, second_moment = solved_moments(evidence_of(features, residual, noise))
        moved = features @ second_moment
        linear, spread = (features @ mean).squeeze(-1), (moved * features).sum(-1)
        misfit = (residual.square() - 2.0 * residual * linear + spread) / noise
        slope = (residual.unsqueeze(-1) * mean.mT - moved) / noise.unsqueeze(-1)
        of_noise = 0.5 * (misfit - 1.0) / noise
        return cls(value, slope, (linear - residual) / noise, of_noise)
