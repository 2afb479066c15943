"""How a decoupled model learns from all data at once: its posterior, hyperparameters with it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Self

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.likelihoods import GaussianLikelihood

from bo_stream.allocation.numbers import checked_number
from bo_stream.models.decoupled_body import ROWS
from bo_stream.models.decoupled_bound import Expanded, exact_bound
from bo_stream.models.decoupled_collapse import CollapsedBound, climb_collapsed
from bo_stream.models.decoupled_fitting import BEFORE_STEPS, DecoupledFitting
from bo_stream.models.decoupled_learner import INPUTS
from bo_stream.models.decoupled_optimum import between, optimum
from bo_stream.models.decoupled_posterior import DecoupledPosterior
from bo_stream.models.decoupled_spectral import SpectralSpread, with_eigenfunctions
from bo_stream.models.replay import generator_at
from bo_stream.models.training import Training, check_limits, tracked

_HALVINGS = 6
"""Shorter Newton steps that are tried."""


class DecoupledRefinement(DecoupledFitting):
    """A decoupled model that steps have brought near to its best, and that can go there."""

    def fit_collapsed(
        self, evaluations: int = 20, seconds: float | None = None, *, progress: bool = True
    ) -> Training:
        """Learn hyperparameters from all held data at once, with the best posterior, in place.

        L-BFGS on the bound with the best mean and covariance of the functions given the
        hyperparameters, which is a closed form [Titsias2009, in two bases]. Steps of :meth:`fit`
        see hyperparameters beside a mean that lags behind them; here it does not. The functions of
        the mean first grow to ``num_mean``, if steps have not taken them there. With a direct
        parametrization the variance's stays.

        An evaluation costs little more than :meth:`optimize_posterior`; some ten after :meth:`fit`
        are most of what can be had. Ctrl-C leaves the model as it was when the climb began.

        Args:
            evaluations: Most values of the bound.
            seconds: Begin no evaluation after so many.
            progress: Whether to draw a bar on a terminal.

        Returns:
            What was done, where a step is an evaluation, with the bound, and log priors, at each.

        Raises:
            InputDataError: There are no observations.
            ModelFittingError: The bound is not finite with the present hyperparameters.
            UnsupportedError: The model supposes data, or its likelihood is not Gaussian.
            ValueError: No evaluations, or negative seconds.
        """
        self._check_not_supposed("fit_collapsed")
        if not isinstance(self.likelihood, GaussianLikelihood):
            raise UnsupportedError(
                "Expected a GaussianLikelihood, got "
                f"{type(self.likelihood).__name__}: the best posterior of others has no closed "
                "form. Call fit, then optimize_posterior."
            )
        self._check_observed()
        checked_number("evaluations", evaluations)
        check_limits(None, seconds)
        begin = time.monotonic()
        self._begin_with_all_functions(progress)
        before = time.monotonic() - begin
        left = None if seconds is None else max(seconds - before, 0.0)
        memory, hyper = self._memory, self._copied()
        bound = CollapsedBound(
            memory.posterior,
            self._batches,
            self._weight,
            memory.replay.count,
            self._options.growth.covariance,
        )
        found = climb_collapsed(bound, hyper, self._fixed, evaluations, left, progress=progress)
        self._take_over(found.hyper)
        self._set_memory(replace(memory, posterior=found.posterior, hyper_moments=None))
        return replace(found.training, seconds=before + found.training.seconds)

    def _begin_with_all_functions(self, progress: bool) -> None:
        if not self._memory.begun:
            self._begin_learning(progress)
        learner = self._learner(self._memory, growing=False)
        learner.grow_to_the_caps()
        self._set_memory(learner.memory)

    def optimize_posterior(self, rounds: int = 1, *, progress: bool = True) -> Self:
        """Let the mean and the variance be the best for all data that are held, in place.

        Of the functions and hyperparameters as they are, but that a spectral parametrization's
        covariance functions may now combine all of the mean's, where steps combine ``num_span``.
        Exact in one round for a Gaussian likelihood; for another a round is a Newton step,
        shortened until the bound is no lower. Steps come near to it, but for the noise of their
        minibatches and their last moves of the hyperparameters: call it after :meth:`fit`, or see
        :meth:`fit_collapsed`. A direct parametrization's variance stays.

        Cost O(n (M_α + M_β)² + M_α³) a round, and memory O(M_α²): with 2,048 functions the time of
        some 120 steps for 4 · 10⁴ observations.

        Args:
            rounds: At least 1.
            progress: Whether to draw a bar on a terminal.

        Raises:
            InputDataError: There are no observations.
            UnsupportedError: The model supposes data.
            ValueError: No rounds.
        """
        self._check_not_supposed("optimize_posterior")
        self._check_observed()
        for _ in range(checked_number("rounds", rounds)):
            self._set_memory(replace(self._memory, posterior=self._better(progress)))
        return self

    @torch.no_grad()
    def _better(self, progress: bool) -> DecoupledPosterior:
        hyper, weight = self._copied(), self._weight
        before, chunks = self._expanded(hyper), -(-self._memory.replay.held // ROWS)
        batches = tracked(self._batches(hyper), chunks, progress)
        if isinstance(hyper.likelihood, GaussianLikelihood):
            return optimum(before, batches, weight, self._options.growth.covariance)
        now = self._widely_spanned(before)
        best = optimum(now, batches, weight)
        bound = exact_bound(before, self._batches(hyper), weight)
        for halvings in range(_HALVINGS):
            tried = between(now.posterior, best, 0.5**halvings)
            there = exact_bound(replace(now, posterior=tried), self._batches(hyper), weight)
            if bool((there >= bound).all()):
                return tried
        return before.posterior

    def _widely_spanned(self, now: Expanded) -> Expanded:
        """With covariance functions, if spectral, that combine all of the mean's."""
        growth, p, replay = self._options.growth, now.posterior, self._memory.replay
        if not isinstance(p.spread, SpectralSpread) or len(p.beta) == len(p.alpha):
            return now
        most = min(INPUTS * len(p.alpha), replay.held)
        some = self._entered(
            replay.draw(most, generator_at(self._options.schedule.seed, BEFORE_STEPS))
        )
        wide = with_eigenfunctions(now, some.X, len(p.alpha), growth.covariance)
        return replace(now, posterior=wide)
