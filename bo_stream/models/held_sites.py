"""Sites of rows that a memory holds: found together, and again whenever something has changed."""

from __future__ import annotations

import torch
from botorch.exceptions.errors import UnsupportedError
from torch import Tensor

from bo_stream.collective import ALONE, Collective
from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.likelihoods.sites import ExpectedLogProb, Fit, JointPrior, RootPrior, fit_sites
from bo_stream.likelihoods.sites import SitePrior as Marginal
from bo_stream.marginal_likelihood import dense_log_marginal_likelihood
from bo_stream.models.inference import Prior
from bo_stream.models.memory import Observations, staying
from bo_stream.weights import WeightPosterior

WINDOW = 300
"""So many of the latest outcomes are held by default, of counts, beside statistics of those before.

Measured, of 400 surveys of at most 5 examined in tens: 0.003 posterior standard deviations off
their batch, where a window of 100 leaves 0.08 and none 0.8. One row more costs one and a half to
three times as much as with 100.
"""

STEPS = 100
"""Most natural-gradient steps; from sites near the optimum a few are enough."""


def marginal(
    weights: WeightPosterior,
    prior_mean: Tensor,
    features: Tensor,
    rest: Tensor,
    collective: Collective = ALONE,
) -> Marginal:
    """Return the joint distribution of a process at n inputs, in the smaller of two forms.

    Cost O(n r²).

    Args:
        weights: Of r features.
        prior_mean: ``... x m x 1``.
        features: Whitened, ``... x m x n x r``.
        rest: Prior variance that the features leave out, ``... x m x n``; taken for independent.
        collective: Processes of which each has some of the inputs.
    """
    mean = prior_mean + (features @ weights.mean).squeeze(-1)
    n, rank = features.shape[-2:]
    if n > rank or not collective.is_alone:
        return RootPrior(mean, features @ weights.root, rest.expand_as(mean), collective)
    root = features @ weights.base_root
    covariance = root @ root.mT
    if weights.observed:
        downdate = root @ weights.downdate
        covariance = covariance - downdate @ downdate.mT
    return JointPrior(mean, covariance, rest.expand_as(mean))


@torch.no_grad()
def fit_held(
    rows: Observations, covariance: Tensor, prior: Prior, weight: Tensor | None = None
) -> Fit:
    """Maximise ``Σ w E log p(y | f) − KL(q ‖ p)`` over normal q for all rows at once.

    For a log-concave likelihood the optimum is unique: it depends on the rows, not on their order,
    nor on the sites that the steps start from. With outliers it need not be: the steps always start
    from the optimum without them. Cost O(n³) a step.

    Args:
        rows: n outcomes, with their sites so far, if there are any.
        covariance: Of the process at them before any outcome, ``... x m x n x n``.
        prior: Mean and likelihood.
        weight: How many times each row counts, w, ``... x n``; default once.
    """
    shape = rows.noise.shape
    process = JointPrior.of(prior.mean.unsqueeze(-1), covariance.detach(), shape)
    model = OutcomeModel.of(prior.likelihood, prior.num_outputs)
    expected = _weighted(model.expected_log_prob(rows.targets), weight)
    ordinary = model.ordinary_log_prob(rows.targets)
    if ordinary is None:
        return fit_sites(process, expected, steps=STEPS, start=rows.sites)
    return fit_sites(process, expected, steps=STEPS, begin=_weighted(ordinary, weight))


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
        model = OutcomeModel(prior.likelihood, prior.num_outputs)
        expected = _weighted(model.expected_log_prob(rows.targets), weight)
        learned = expected(fit.mean, fit.variance).sum(-1)
        value = value + learned - learned.detach()
    return value


def with_held(held: Observations | None, data: Observations, prior: Prior) -> Observations:
    """Return all outcomes whose sites are to be found: those held, with a batch or without it.

    Args:
        held: The latest outcomes, in a window alongside statistics of those before; None: none.
        data: Is added, or taken out if its sign is negative.
        prior: The hyperparameters.

    Raises:
        UnsupportedError: Some of a batch that is to be taken out are not held.
    """
    if data.sign > 0.0:
        return data if held is None else Observations.joined((held, data))
    if held is not None:
        stay = staying(held, data)
        if int((~stay).sum()) == len(data):
            return held.rows(stay)
    raise UnsupportedError(
        f"retract needs a Gaussian likelihood, got {type(prior.likelihood).__name__}, or outcomes "
        "in the model's window: what an earlier one left in memory depends on all that was there "
        "when it came. Build the model anew, or forget."
    )


def _weighted(expected: ExpectedLogProb, weight: Tensor | None) -> ExpectedLogProb:
    """Return ``w E log p(y | f)`` of the marginals."""
    if weight is None:
        return expected
    return lambda mean, variance: weight.unsqueeze(-2) * expected(mean, variance)
