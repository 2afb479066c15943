"""One batch of outcomes under any likelihood, at inducing points that remember earlier ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from bo_stream.bases.inducing import InducingBasis, kernel_matrix
from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.likelihoods.sites import ExpectedLogProb, Fit, Prior, Sites, fit_sites
from bo_stream.linalg import safe_cholesky
from bo_stream.models.hyperparameters import Hyperparameters
from bo_stream.models.inducing.memory import InducingMemory, Missed
from bo_stream.models.memory import Observations, Whitened, WhitenedMemory
from bo_stream.models.objective import NoiseGroup, expected_misfit
from bo_stream.models.stochastic.optimisers import Ascent
from bo_stream.sufficient_statistics import SufficientStatistics, target_columns
from bo_stream.weights import WeightPosterior, at_noise, solve


def site_statistics(features: Tensor, fit: Fit, targets: Tensor) -> Whitened:
    """Statistics whose likelihood is the product of sites at their scales. Cost O(n M²).

    A site is a Gaussian observation of ``shift / precision`` with variance ``1 / precision``, so
    that a constant mean may change after the data are gone. The energy holds the scales too: the
    collapsed bound of the statistics is the online bound. The noise is all in the columns.

    Args:
        features: Whitened, ``... x m x n x M``.
        fit: Of the sites, ``... x m x n``.
        targets: Outcomes, ``... x m x n``.
    """
    precision, shift = fit.sites.precision, fit.sites.shift
    columns = torch.stack((shift, precision), -1)
    outcomes = target_columns(targets)
    first = -2.0 * fit.log_scale.sum(-1) - math.log(2.0 * math.pi) * targets.shape[-1]
    cross, last = shift.sum(-1), precision.sum(-1)
    zero = torch.zeros_like(cross)
    return SufficientStatistics(
        features.mT @ (features * precision.unsqueeze(-1)),
        features.mT @ columns,
        torch.stack((torch.stack((first, cross), -1), torch.stack((cross, last), -1)), -2),
        outcomes.mT @ outcomes,
        zero,
        zero,
    )


def with_sites(
    memory: InducingMemory,
    features: Tensor,
    residual: Tensor,
    fit: Fit,
    targets: Tensor,
    sign: float,
) -> InducingMemory:
    """A memory with a batch of sites more, or less.

    Args:
        memory: In the basis of the features.
        features: Whitened, ``... x m x n x M``.
        residual: Variance that these miss, ``... x m x n``.
        fit: Of the sites.
        targets: Outcomes, ``... x m x n``.
        sign: 1 to add, −1 to take out.
    """
    batch = site_statistics(features, fit, targets).scale(sign)
    missed = sign * (residual * fit.sites.precision).sum(-1)
    return replace(
        memory,
        statistics=WhitenedMemory(memory.statistics.learned + batch, None),
        missed=memory.missed + Missed(missed, torch.zeros_like(missed)),
    )


WARM_STEPS = 3
"""Most natural-gradient steps after one step of the hyperparameters."""


@dataclass(frozen=True)
class Natural:
    """How natural-gradient steps are taken.

    Attributes:
        beta: Weight of the divergences in the bound.
        steps: Most steps for a batch.
        rate: Of a step, in (0, 1].
    """

    beta: float
    steps: int
    rate: float


def unit_noise(statistics: Whitened) -> NoiseGroup:
    """Sites as a group of observations: their noise is in the statistics."""
    return NoiseGroup(statistics, torch.ones_like(statistics.count))


@dataclass(frozen=True)
class _View:
    """A batch as hyperparameters have it.

    Attributes:
        mean: The prior mean, ``... x m x 1``.
        targets: ``[Y, 1] @ targets`` are pseudo-outcomes less the mean, ``... x m x 2 x 1``.
        features: Whitened, ``... x m x n x M``.
        residual: Variance that these miss, ``... x m x n``.
    """

    mean: Tensor
    targets: Tensor
    features: Tensor
    residual: Tensor

    def predicted(self, weights: WeightPosterior) -> Tensor:
        """Mean of the process, ``... x m x n``."""
        return self.mean + (self.features @ weights.mean).squeeze(-1)


@dataclass(frozen=True)
class OnlineUpdate:
    """The online bound of a batch after a memory, at some hyperparameters.

    ``Σ E_q log p(y | f) + β (E_q log old sites − KL(q ‖ prior))``: the old posterior over the old
    prior is the old sites, so that two of the paper's three divergences are one expectation.
    Divided by β: the likelihood of the batch has the power 1 / β. [Bui2017, eq. 5; Stanton2021,
    eq. A.8]

    Attributes:
        memory: Of earlier batches, in the basis.
        basis: Of the hyperparameters; differentiable in them where they are to be learned.
        hyper: Mean and likelihood.
        data: The batch.
        natural: How to step.
    """

    memory: InducingMemory
    basis: InducingBasis
    hyper: Hyperparameters
    data: Observations
    natural: Natural

    @property
    def _batch(self) -> torch.Size:
        return self.data.targets.shape[:-1]

    @cached_property
    @torch.enable_grad()
    def _view(self) -> _View:
        """The same for fits and for gradients, whoever asks first."""
        mean = self.hyper.constant(self._batch)
        targets = torch.stack((torch.ones_like(mean), -mean), -1).unsqueeze(-1)
        features = self.basis.features(self.data.X).expand(*self._batch, -1, -1)
        residual = self.basis.residual_variance(self.data.X, features)
        return _View(mean.unsqueeze(-1), targets, features, residual)

    def _weights(self, statistics: Whitened) -> WeightPosterior:
        group = unit_noise(statistics)
        return solve(at_noise(group.statistics, group.level, self._view.targets))

    def _outcomes(self) -> ExpectedLogProb:
        model = OutcomeModel(self.hyper.likelihood, self._batch[-1])
        return model.expected_log_prob(self.data.targets)

    @torch.no_grad()
    def fit(self, start: Sites | None = None) -> Fit:
        """The batch's sites at the optimum of the bound. Cost O(n M² + M³) a step, at most.

        Args:
            start: Sites near it: few steps are taken then.
        """
        view, natural = self._view, self.natural
        weights = self._weights(self.memory.statistics.learned)
        prior = Prior(view.predicted(weights), view.features @ weights.root, view.residual)
        steps = natural.steps if start is None else min(natural.steps, WARM_STEPS)
        power = 1.0 / natural.beta
        return fit_sites(prior, self._outcomes(), power, steps, natural.rate, start=start)

    def remembered(self, fit: Fit) -> InducingMemory:
        """The memory with the batch's sites. Cost O(n M²)."""
        data, view = self.data, self._view
        return with_sites(self.memory, view.features, view.residual, fit, data.targets, data.sign)

    def bound(self, fit: Fit) -> Tensor:
        """The bound, up to a constant, differentiable in the hyperparameters, ``... x m``.

        At the q of some sites, held in whitened weights: where they are optimal its gradient is
        that of the optimal bound.
        """
        view = self._view
        with torch.no_grad():
            batch = site_statistics(view.features, fit, self.data.targets)
            weights = self._weights(self.memory.statistics.learned + batch)
        variance = (view.features @ weights.root).square().sum(-1) + view.residual
        new = self._outcomes()(view.predicted(weights), variance).sum(-1)
        return new + self.natural.beta * self._expected_old(weights)

    def _expected_old(self, weights: WeightPosterior) -> Tensor:
        """``E_q log`` of the old sites, up to a constant."""
        old = self.memory.statistics.learned
        second_moment = weights.covariance() + weights.mean @ weights.mean.mT
        spread = (old.gram * second_moment).sum((-2, -1))
        misfit = expected_misfit(unit_noise(old), self._view.targets, weights.mean, spread)
        return -misfit - 0.5 * self.memory.missed.learned

    def at(self, hyper: Hyperparameters, basis: InducingBasis) -> OnlineUpdate:
        """The same at other hyperparameters, and in their basis."""
        return replace(self, memory=self.memory.in_basis(basis), basis=basis, hyper=hyper)

    def _differentiable(self) -> InducingBasis:
        """The basis of the hyperparameters, at the same points."""
        Z, outputs, kernel = self.basis.Z, self.basis.outputs, self.hyper.covar_module
        return InducingBasis(
            kernel, Z, outputs, safe_cholesky(kernel_matrix(kernel, Z, Z, outputs))
        )

    def learn(self, ascent: Ascent, steps: int) -> None:
        """Move the hyperparameters up the bound and their priors, q at its optimum for each step.

        Cost O(n M² + M³) a step, and that of the natural gradients between them.
        """
        sites = None
        for _ in range(steps):
            with torch.enable_grad():
                update = self.at(self.hyper, self._differentiable())
                fit = update.fit(sites)
                ascent.ascend(update.bound(fit).sum() + self.hyper.log_prior())
            sites = fit.sites
