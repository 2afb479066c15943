"""Sites of rows that a memory holds: found together, and anew whenever something has changed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.likelihoods.sites import ExpectedLogProb, Fit, Sites, fit_sites
from bo_stream.likelihoods.sites import Prior as Marginal
from bo_stream.marginal_likelihood import dense_log_marginal_likelihood
from bo_stream.models.memory import Observations
from bo_stream.models.prior import Prior

STEPS = 100
"""Most natural-gradient steps; from sites near the optimum a few are enough."""


@torch.no_grad()
def fit_held(
    rows: Observations, covariance: Tensor, prior: Prior, weight: Tensor | None = None
) -> Fit:
    """Maximise ``Σ w E log p(y | f) − KL(q ‖ p)`` over normal q for all rows at once.

    For a log-concave likelihood the optimum is unique: it depends on the rows, not on their order,
    nor on the sites that the steps start from. Cost O(n³) a step.

    Args:
        rows: n outcomes, with their sites so far, if there are any.
        covariance: Of the process at them before any outcome, ``... x m x n x n``.
        prior: Mean and likelihood.
        weight: How many times each row counts, w, ``... x n``; default once.
    """
    shape = rows.noise.shape
    start = Sites.none(rows.noise) if rows.sites is None else rows.sites
    process = Marginal.of(prior.mean.unsqueeze(-1), covariance.detach(), shape)
    return fit_sites(process, _expected(rows, prior, weight), steps=STEPS, start=start)


def with_sites(rows: Observations, covariance: Tensor, prior: Prior) -> Observations:
    """Return the rows with the sites of :func:`fit_held`. Cost O(n³) a step."""
    if len(rows) == 0:
        return rows
    return replace(rows, sites=fit_held(rows, covariance, prior).sites)


def held_bound(
    rows: Observations, covariance: Tensor, prior: Prior, weight: Tensor | None = None
) -> Tensor:
    """Compute the largest ``Σ w E log p(y | f) − KL(q ‖ p)`` of the rows, ``... x m``.

    Differentiable in the hyperparameters of kernel and mean and in the likelihood's. At the optimum
    the bound does not change with the sites to first order, so that its gradient is that of the log
    marginal likelihood of the Gaussian observations that the sites are, and of
    ``w E log p(y | f)``, at this q. Cost O(n³) a step. Arguments as for :func:`fit_held`.
    """
    if len(rows) == 0:
        return prior.mean * 0.0
    fit = fit_held(rows, covariance, prior, weight)
    targets, noise = fit.sites.pseudo_observations()
    gaussian = dense_log_marginal_likelihood(
        covariance.expand(*targets.shape, targets.shape[-1]),
        targets - prior.mean.unsqueeze(-1),
        noise,
    )
    value = fit.bound + gaussian - gaussian.detach()
    if any(parameter.requires_grad for parameter in prior.likelihood.parameters()):
        expected = _expected(rows, prior, weight, learned=True)(fit.mean, fit.variance).sum(-1)
        value = value + expected - expected.detach()
    return value


def _expected(
    rows: Observations, prior: Prior, weight: Tensor | None, learned: bool = False
) -> ExpectedLogProb:
    """Return ``w E log p(y | f)`` of the marginals; of a copy of the likelihood unless learned."""
    outputs = prior.num_outputs
    copied = OutcomeModel.of(prior.likelihood, outputs)
    model = OutcomeModel(prior.likelihood, outputs) if learned else copied
    expected = model.expected_log_prob(rows.targets)
    if weight is None:
        return expected
    return lambda mean, variance: weight.unsqueeze(-2) * expected(mean, variance)
