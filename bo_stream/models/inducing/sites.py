"""Inference for outcomes of any likelihood: each enters the statistics as a Gaussian site."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from torch import Tensor

from bo_stream.bases.inducing import InducingBasis
from bo_stream.collective import ALONE, Collective
from bo_stream.errors import check_whole
from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.likelihoods.sites import Fit, Sites, fit_sites
from bo_stream.linalg import identity
from bo_stream.marginal_likelihood import NoiseGroup, combine, expected_misfit
from bo_stream.models.inducing.inference import (
    InducingCache,
    InducingInference,
    Settled,
    basis_of_independent,
)
from bo_stream.models.inducing.memory import (
    HeldOutcomes,
    InducingMemory,
    PointStatistics,
    Rows,
    TraceTerm,
)
from bo_stream.models.inference import Hyperparameters, Prior
from bo_stream.models.memory import Observations, WhitenedMemory, added, check_outcomes
from bo_stream.models.outcomes.likelihood import marginal, with_held
from bo_stream.models.stochastic.budget import ConstrainedAdam
from bo_stream.tensors import map_tensors, state_of
from bo_stream.weights import (
    SufficientStatistics,
    WeightPosterior,
    Whitened,
    at_noise,
    solve,
    target_columns,
)

ROUND = 20
"""Steps of the hyperparameters before the inducing points are placed again for them."""

WARM_STEPS = 3
"""Most natural-gradient steps after one step of the hyperparameters."""

EVERY = slice(None)


@dataclass(frozen=True)
class SiteInference(InducingInference):
    """Inference by sites that natural gradients find, in the uncollapsed online bound.

    The sites of the latest outcomes, ``window`` of them, are found again with those of each
    batch; then they stay. The options are those of :class:`~bo_stream.OSVGP`, and ``fixed``, the
    names of the likelihood's parameters that are not learned, and ``collective``, processes of
    which each observes some rows of every batch; none holds outcomes then.
    """

    beta: float
    natural_steps: int
    natural_rate: float
    hyper_steps: int
    learning_rate: float
    fixed: tuple[str, ...]
    window: int = 0
    collective: Collective = ALONE

    def __post_init__(self) -> None:
        for name, share in (("beta", self.beta), ("natural_rate", self.natural_rate)):
            if not 0.0 < share <= 1.0:
                raise ValueError(f"Expected {name} in (0, 1], got {share}.")
        for name, least in (("natural_steps", 1), ("hyper_steps", 0), ("window", 0)):
            number = check_whole(name, getattr(self, name), least)
            object.__setattr__(self, name, number)
        if not self.learning_rate >= 0.0:
            raise ValueError(f"Expected learning_rate of at least 0, got {self.learning_rate}.")

    def observe(
        self, memory: InducingMemory, cache: InducingCache | None, data: Observations, prior: Prior
    ) -> tuple[InducingMemory, InducingCache | None]:
        """Learn the hyperparameters, place the points, find a batch's sites. O(n M² + M³) a step.

        With a window n counts the outcomes in it, too.

        Raises:
            UnsupportedError: Sites that depend on others are to be taken out, not of the window.
        """
        before = self.current(memory, cache, prior)
        placed = data.X if data.sign > 0.0 else None
        if not prior.is_gaussian:
            held = None if memory.held is None else memory.held.data
            data = with_held(held, data, prior)
        steps = self.hyper_steps if placed is not None else 0
        if steps > 0:
            hyper, moments = self._learned(before, data, prior, placed, steps)
        else:
            hyper, moments = prior.as_read(), memory.moments
        now, update = self._begun(before, hyper, data, prior, placed, moved=steps > 0)
        if steps == 0:
            settled = self._settled(now, prior)
            if placed is None:  # some of these outcomes leave
                settled = replace(settled, rows=settled.rows[:0])
            update = replace(update, settled=settled)
        now = self._kept(now, update, 0 if prior.is_gaussian else self.window)
        if data.sign < 0.0:
            if prior.is_gaussian:  # then no sites stand for the outcomes
                left, was = now.memory.statistics, before.memory.statistics
                check_outcomes(left, was, weighted=False)
            self.check_solvable(now.memory, prior)
        now = replace(now, memory=replace(now.memory, moments=moments))
        after, kept = self.remembered(before, now, prior)
        if steps > 0:
            prior.take_over(hyper)  # last, for what raises before leaves the model as it was
            kept = replace(kept, state=state_of(prior.kernel))
        return after, kept

    def _learned(
        self,
        before: InducingCache,
        data: Observations,
        prior: Prior,
        placed: Tensor | None,
        steps: int,
    ) -> tuple[Hyperparameters, Any]:
        """Take steps of Adam on a copy of the hyperparameters; return it and Adam's moments."""
        hyper, rate = prior.copied(), self.learning_rate
        ascent = ConstrainedAdam(hyper, hyper.learned(self.fixed), rate, before.memory.moments)
        for first in range(0, steps, ROUND):
            _, update = self._begun(before, hyper, data, prior, placed, moved=first > 0)
            update.learn(ascent, min(ROUND, steps - first))
        return hyper.rounded(next(prior.kernel.parameters()).dtype), ascent.moments()

    def _begun(
        self,
        before: InducingCache,
        hyper: Hyperparameters,
        data: Observations,
        prior: Prior,
        placed: Tensor | None,
        moved: bool,
    ) -> tuple[InducingCache, OnlineUpdate]:
        """Place the points at hyperparameters that may have moved, and begin the update there.

        For inputs ``placed``, ``... x k x d``, that are new; None: there are none.
        """
        now = before
        if moved:
            basis = basis_of_independent(hyper.covar_module, before.basis.Z, prior.num_outputs)
            now = InducingCache(before.state, before.memory.in_basis(basis), basis)
        if placed is not None:
            X = placed if now.memory.allocator is None else self.collective.first(placed)
            now = self.placed(now, X, prior)
        return now, OnlineUpdate(now.memory.settled, now.basis, hyper, data, self)

    def _settled(self, now: InducingCache, prior: Prior) -> Settled:
        """Return the solved posterior before an update's rows; O(M³) unless cached."""
        if now.settled is not None and prior.is_in(now.settled.solved.state):
            return now.settled
        memory, solved = now.memory, now.solved
        if memory.held is not None or solved is None or not prior.is_in(solved.state):
            solved = self.solved(memory.settled, now.basis, prior)
        held = memory.rows.data if memory.held is None else memory.held.data
        return Settled(solved, Rows.of(held, now.basis, prior.shape))

    def _kept(self, now: InducingCache, update: OnlineUpdate, window: int) -> InducingCache:
        """Put an update into memory, hold its latest outcomes, and carry along what follows."""
        fit = update.fit()
        whole, left = update.remembered(fit), max(0, len(update.data) - window)
        settled = update.settled_after(fit, left)
        if window == 0:
            memory = replace(now.memory, whole=whole, held=None)
            solved = None if settled is None else settled.solved
            return replace(now, memory=memory, solved=solved, settled=None)
        latest = replace(update.data, sites=fit.sites).rows(slice(left, None))
        held = HeldOutcomes(latest, update.remembered(fit, slice(left)))
        memory = replace(now.memory, whole=whole, held=held)
        return replace(now, memory=memory, solved=None, settled=settled)

    def noise_groups(self, statistics: WhitenedMemory, prior: Prior) -> list[NoiseGroup]:
        """Return the sites, whose noise is in the statistics."""
        return [NoiseGroup(statistics.learned, torch.ones_like(statistics.learned.count))]

    def objective(
        self, memory: InducingMemory, cache: InducingCache | None, prior: Prior
    ) -> tuple[Tensor, InducingCache | None]:
        """Return the online bound less a penalty of means far from where sites were found. O(M³).

        A site is log p's expansion where it was found, and no lower bound of it elsewhere: far from
        an outcome that looks like an outlier its log is a line, so that the bound of fixed sites
        grows without end with the process's scale. Less ``½ δ (E f − m)²`` of each outcome, with m
        its mean then and δ the precision that its site lacks (:func:`lacking_precision`), an
        outcome's part is at most what its log density can be; where its site was found, it has the
        value and the gradient that it has in the bound.
        """
        bound, cache = super().objective(memory, cache, prior)
        whole = memory.whole
        if whole.anchors is None:
            return bound, cache
        covariance = whole.values.prior(prior.kernel, prior.num_outputs)
        residual = prior.target_map()
        evidence = combine(self.noise_groups(whole.statistics, prior), residual)
        product = evidence.gram @ covariance
        mean = covariance @ torch.linalg.solve(identity(product) + product, evidence.moment)
        spread = (mean.mT @ whole.anchors.gram @ mean)[..., 0, 0]
        group = NoiseGroup(whole.anchors, torch.ones_like(bound))
        return bound - expected_misfit(group, residual, mean, spread), cache

    def log_marginal_likelihood(
        self, memory: InducingMemory, cache: InducingCache | None, prior: Prior
    ) -> tuple[Tensor, InducingCache | None]:
        """Return the online bound, sites fixed."""
        return super().objective(memory, cache, prior)

    def trace_term(self, trace: TraceTerm, prior: Prior) -> Tensor:
        """Return the trace term itself, which is in units of the sites' noise already."""
        return trace.learned


@dataclass(frozen=True)
class OnlineUpdate:
    """The online bound of a batch after what is in memory, at some hyperparameters.

    ``Σ E_q log p(y | f) + β (E_q log old sites − KL(q ‖ prior))``: the old posterior over the old
    prior is the old sites, so that two of the paper's three divergences are one expectation.
    Divided by β: the likelihood of the batch has the power 1 / β. [Bui2017, eq. 5; Stanton2021,
    eq. A.8]

    Attributes:
        memory: Of earlier batches, in the basis.
        basis: Of the hyperparameters; differentiable in them where they are to be learned.
        hyper: Mean and likelihood.
        data: The batch.
        options: Of the bound and of the steps.
        settled: The posterior given the memory, and features of the first of the batch, where they
            are known; hyperparameters are not to be learned then.
    """

    memory: PointStatistics
    basis: InducingBasis
    hyper: Hyperparameters
    data: Observations
    options: SiteInference
    settled: Settled | None = None

    @cached_property
    @torch.enable_grad()  # once, for fits and for gradients, whoever asks first
    def _mean(self) -> Tensor:
        """Prior mean, ``... x m``."""
        return self.hyper.constant(self.data.noise.shape[:-1])

    @cached_property
    @torch.enable_grad()
    def _features(self) -> tuple[Tensor, Tensor]:
        """Whitened features, ``... x m x n x M``, and the prior variance that they leave out."""
        batch, X = self.data.noise.shape[:-1], self.data.X
        known = None if self.settled is None else self.settled.rows
        new = X if known is None else X[..., len(known) :, :]
        features = self.basis.features(new).expand(*batch, -1, -1)
        residual = self.basis.residual_variance(new, features)
        if known is None:
            return features, residual
        return torch.cat((known.features, features), -2), torch.cat((known.residual, residual), -1)

    @property
    def _target_map(self) -> Tensor:
        """T with ``[Y, 1] @ T`` the pseudo-outcomes less the mean, ``... x m x 2 x 1``."""
        return torch.stack((torch.ones_like(self._mean), -self._mean), -1).unsqueeze(-1)

    def _weights(self, statistics: Whitened) -> WeightPosterior:
        return solve(at_noise(statistics, torch.ones_like(statistics.count), self._target_map))

    def _outcomes(self) -> OutcomeModel:
        return OutcomeModel(self.hyper.likelihood, self.data.noise.shape[-2])

    @torch.no_grad()
    def fit(self, start: Sites | None = None) -> Fit:
        """Find the sites at the optimum, in few steps from a start near it; O(n M² + M³) each."""
        options, (features, residual) = self.options, self._features
        begin = self._outcomes().ordinary_log_prob(self.data.targets)
        if self.settled is None:
            weights = self._weights(self.memory.statistics.learned)
        else:
            weights = self.settled.solved.process.weights
        collective = options.collective
        prior = marginal(weights, self._mean.unsqueeze(-1), features, residual, collective)
        most = options.natural_steps
        steps, power = most if start is None else min(most, WARM_STEPS), 1.0 / options.beta
        expected = self._outcomes().expected_log_prob(self.data.targets)
        if start is None and begin is None:
            start = self.data.sites
        return fit_sites(prior, expected, power, steps, options.natural_rate, start, begin)

    def settled_after(self, fit: Fit, left: int) -> Settled | None:
        """Carry along what is settled as the first of the batch enter it; None: begin again."""
        if self.settled is None or not self.options.collective.is_alone or self.data.sign < 0.0:
            return None
        solved, (features, residual) = self.settled.solved, self._features
        if left > 0:
            if not solved.process.weights.has_room_for(left):
                return None
            first = map_tensors(fit.sites, lambda values: values[..., :left])
            solved = solved.after(features[..., :left, :], *first.pseudo_observations())
        latest = Rows(self.data, features, residual)[slice(left, None)]
        return Settled(solved, latest)

    def remembered(self, fit: Fit, rows: slice = EVERY) -> PointStatistics:
        """Add the sites of some of the batch to the statistics, or take them out. O(n M²)."""
        memory, sign, residual = self.memory, self.data.sign, self._features[1][..., rows]
        batch = self._statistics(fit, rows).scale(sign)
        truncated = (residual * fit.sites.precision[..., rows]).sum(-1)
        truncated = sign * self.options.collective.sum(truncated)
        statistics = WhitenedMemory(memory.statistics.learned + batch)
        trace = memory.trace + TraceTerm(truncated, torch.zeros_like(truncated))
        anchors = memory.anchors
        if not isinstance(self.hyper.likelihood, _GaussianLikelihoodBase):
            lacking = lacking_precision(self._outcomes(), self.data.targets, fit)[..., rows]
            own = anchor_statistics(self._features[0][..., rows, :], fit.mean[..., rows], lacking)
            own = map_tensors(own.scale(sign), self.options.collective.sum)
            anchors = added(anchors, own)
        return PointStatistics(self.basis.values, statistics, trace, anchors)

    def bound(self, fit: Fit) -> Tensor:
        """Compute the bound up to a constant, differentiable in hyperparameters, ``... x m``.

        At the q of sites, fixed in whitened weights: its gradient is that of the optimal bound
        where they are optimal. Of several processes this one's part: that of its rows, and a share
        of that of the memory.
        """
        features, residual = self._features
        old, trace = self.memory.statistics.learned, self.memory.trace.learned
        with torch.no_grad():
            weights = self._weights(old + self._statistics(fit))
        variance = (features @ weights.root).square().sum(-1) + residual
        predicted = self._mean.unsqueeze(-1) + (features @ weights.mean).squeeze(-1)
        expected = self._outcomes().expected_log_prob(self.data.targets)
        new = expected(predicted, variance).sum(-1)
        second_moment = weights.covariance() + weights.mean @ weights.mean.mT
        spread = (old.gram * second_moment).sum((-2, -1))
        group = NoiseGroup(old, torch.ones_like(old.count))
        misfit = expected_misfit(group, self._target_map, weights.mean, spread)
        share = self.options.collective.share * self.options.beta
        return new + share * (-misfit - 0.5 * trace)

    def _statistics(self, fit: Fit, rows: slice = EVERY) -> Whitened:
        """Return the statistics of some of the batch's sites, of all processes. Cost O(n M²)."""
        sites, log_scale = map_tensors((fit.sites, fit.log_scale), lambda t: t[..., rows])
        some = replace(fit, sites=sites, log_scale=log_scale)
        features, targets = self._features[0][..., rows, :], self.data.rows(rows).targets
        return map_tensors(site_statistics(features, some, targets), self.options.collective.sum)

    def learn(self, ascent: ConstrainedAdam, steps: int) -> None:
        """Move the hyperparameters up the bound and their priors, q at its optimum each time.

        The bound is that of all observations in kernel and mean, but in the likelihood's parameters
        of the batch alone: the sites of earlier ones stay as they were found. So does the share of
        their prior that these had.
        """
        sites, collective, Z = None, self.options.collective, self.basis.Z
        X, earlier = self.data.X, self.memory.statistics.learned.count
        rows = collective.total(X.shape[-2], X.device)
        share = rows / (rows + earlier.max())
        for _ in range(steps):
            with torch.enable_grad():
                basis = InducingBasis.of(self.hyper.covar_module, Z, self.basis.outputs, live=True)
                update = replace(self, memory=self.memory.in_basis(basis), basis=basis)
                fit = update.fit(sites)
                log_prior = collective.share * self.hyper.log_prior(share)
                ascent.ascend(update.bound(fit).sum() + log_prior, collective)
            sites = fit.sites


def site_statistics(features: Tensor, fit: Fit, targets: Tensor) -> Whitened:
    """Return statistics whose likelihood is the product of sites at their scales. Cost O(n M²).

    A site is a Gaussian observation of ``shift / precision`` with variance ``1 / precision``, so
    that a constant mean may change after the data are gone. Of counts the totals are those of the
    positives. The energy holds the scales too: the
    collapsed bound of the statistics is the online bound. The noise is all in the columns.
    """
    precision, shift = fit.sites.precision, fit.sites.shift
    outcomes = target_columns(targets[..., : precision.shape[-2], :])
    first = -2.0 * fit.log_scale.sum(-1) - math.log(2.0 * math.pi) * targets.shape[-1]
    cross, last = shift.sum(-1), precision.sum(-1)
    gram = features.mT @ (features * precision.unsqueeze(-1))
    moment = features.mT @ torch.stack((shift, precision), -1)
    energy = torch.stack((torch.stack((first, cross), -1), torch.stack((cross, last), -1)), -2)
    zero = torch.zeros_like(cross)
    return SufficientStatistics(gram, moment, energy, outcomes.mT @ outcomes, zero, zero)


def lacking_precision(outcomes: OutcomeModel, targets: Tensor, fit: Fit) -> Tensor:
    """Return what precisions lack of :meth:`OutcomeModel.bounded_precision`, ``... x m x n``.

    It is 0 for a Gaussian likelihood, and near an outcome's mode.
    """
    sites, target, mean, variance = fit.sites, fit.target, fit.mean, fit.variance
    slope = target.shift - target.precision * mean
    own = sites.shift * mean - 0.5 * sites.precision * (mean.square() + variance)
    wanted = outcomes.bounded_precision(targets, mean, variance, slope, fit.log_scale + own)
    return (wanted - sites.precision).clamp_min(0.0)


def anchor_statistics(features: Tensor, mean: Tensor, precision: Tensor) -> Whitened:
    """Return statistics of means as observations with these precisions, which count as none.

    Cost O(n M²).
    """
    weighted, columns = features * precision.unsqueeze(-1), target_columns(mean)
    energy = columns.mT @ (columns * precision.unsqueeze(-1))
    zero = torch.zeros_like(energy[..., 0, 0])
    moment = weighted.mT @ columns
    return SufficientStatistics(
        features.mT @ weighted, moment, energy, torch.zeros_like(energy), zero, zero
    )
