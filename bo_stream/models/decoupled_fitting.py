"""How a decoupled model is fitted: its start, its steps, and the best posterior after them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Self

import torch
from gpytorch.likelihoods import GaussianLikelihood

from bo_stream.allocation.numbers import checked_number
from bo_stream.models.decoupled_body import ROWS, DecoupledBody
from bo_stream.models.decoupled_bound import exact_bound
from bo_stream.models.decoupled_memory import DecoupledMemory
from bo_stream.models.decoupled_optimum import between, optimum
from bo_stream.models.decoupled_posterior import DecoupledPosterior
from bo_stream.models.decoupled_start import begin_hyperparameters
from bo_stream.models.first_scales import Sizes
from bo_stream.models.hyperparameters import Hyperparameters
from bo_stream.models.replay import generator_at
from bo_stream.models.training import Training, check_limits, tracked, train, waiting

_YOUNG = 100
"""Steps after which hyperparameters that were learned from a stream are not begun anew."""

_BEFORE = 2**32
"""Place of the random numbers before the first step, far from those of steps."""

_LOOKED_AT = 4096
"""Observations that the first output scale and noise are chosen by."""

_HALVINGS = 6
"""Shorter Newton steps that are tried."""


class DecoupledFitting(DecoupledBody):
    """A decoupled model that can be fitted."""

    def fit(
        self, steps: int | None = None, seconds: float | None = None, *, progress: bool = True
    ) -> Training:
        """Take steps of learning, in place; another call goes on where the last one ended.

        Each step draws a minibatch, adds basis functions from it up to the caps, and moves
        everything once. [Cheng2017, algorithm 1] Ctrl-C leaves a model that can be used.

        The first call, of a model that has taken fewer than 100 steps, learns hyperparameters by an
        exact GP of ``initial_points`` observations, and begins anew with them.

        Args:
            steps: Most steps; where neither limit is given 2000.
            seconds: Begin no step after so many.
            progress: Whether to draw a bar on a terminal.

        Returns:
            What was done, with the trace of the bound.

        Raises:
            InputDataError: There are no observations.
            ModelFittingError: It diverged; the model is as it was when it was still good.
            UnsupportedError: The model supposes data.
            ValueError: A limit is negative; fewer observations are held than ``batch_size``.
        """
        self._check_not_supposed("fit")
        self._check_observed()
        check_limits(steps, seconds)
        begin = time.monotonic()
        if not self._memory.begun:
            self._begin_learning(progress)
        before = time.monotonic() - begin
        left = None if seconds is None else max(seconds - before, 0.0)
        learner = self._learner(self._memory, growing=True)
        try:
            training = train(learner, steps, left, progress=progress)
        finally:
            self._adopt(learner)
        return replace(training, seconds=before + training.seconds)

    def _begin_learning(self, progress: bool) -> None:
        """From the hyperparameters of an exact GP, where nothing or little was learned before."""
        memory, options = self._memory, self._options
        replay, schedule = memory.replay, options.schedule
        replay.draw(schedule.size(replay.held), generator_at(schedule.seed, _BEFORE))
        learns = schedule.learning_rate > 0.0 and any(p.requires_grad for p in self.parameters())
        if learns and options.initial_points > 0 and replay.held > 1 and memory.steps < _YOUNG:
            with waiting("an exact GP of some observations", progress):
                memory = self._with_first_hyperparameters(memory)
        self._set_memory(replace(memory, begun=True))

    def _with_first_hyperparameters(self, memory: DecoupledMemory) -> DecoupledMemory:
        options, replay, before = self._options, memory.replay, memory.posterior
        generator = generator_at(options.schedule.seed, _BEFORE)
        few, more = (
            self._entered(replay.draw(min(size, replay.held), generator))
            for size in (options.initial_points, _LOOKED_AT)
        )
        hyper = Hyperparameters(self.covar_module, self.mean_module, self.likelihood)
        size = Sizes(options.growth.span, options.growth.covariance)
        begin_hyperparameters(hyper, few, more, size, replay.count)
        self._take_over(hyper)
        nothing = options.start(self._output_batch, before.alpha.points)
        posterior = options.growth.anew(nothing, before, hyper.covar_module, self._num_outputs)
        return replace(memory, posterior=posterior, hyper_moments=None, leaf_moments=None)

    def optimize_posterior(self, rounds: int = 1, *, progress: bool = True) -> Self:
        """Let the mean and the variance be the best for all data that are held, in place.

        Of the functions and hyperparameters as they are. Exact in one round for a Gaussian
        likelihood; for another a round is a Newton step, shortened until the bound is no lower.
        Steps come near to it, but for the noise of their minibatches and their last moves of the
        hyperparameters: call it after :meth:`fit`. A direct parametrization's variance stays.

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
        hyper = Hyperparameters(self.covar_module, self.mean_module, self.likelihood)
        now, replay = self._expanded(hyper), self._memory.replay
        weight = replay.count / replay.held
        batches = self._batches(hyper)
        best = optimum(now, tracked(batches, -(-replay.held // ROWS), progress), weight)
        if isinstance(hyper.likelihood, GaussianLikelihood):
            return best
        bound = exact_bound(now, self._batches(hyper), weight)
        for halvings in range(_HALVINGS):
            tried = between(now.posterior, best, 0.5**halvings)
            there = exact_bound(replace(now, posterior=tried), self._batches(hyper), weight)
            if bool((there >= bound).all()):
                return tried
        return now.posterior
