"""How a decoupled model is fitted: its start, and its steps."""

from __future__ import annotations

import time
from dataclasses import replace

from bo_stream.models.decoupled_body import DecoupledBody
from bo_stream.models.decoupled_memory import DecoupledMemory
from bo_stream.models.decoupled_start import begin_hyperparameters
from bo_stream.models.first_scales import Sizes
from bo_stream.models.replay import generator_at
from bo_stream.models.training import Training, check_limits, train, waiting

_YOUNG = 100
"""Steps after which hyperparameters that were learned from a stream are not begun anew."""

BEFORE_STEPS = 2**32
"""Place of the random numbers before the first step, far from those of steps."""

_LOOKED_AT = 4096
"""Observations that the first output scale and noise are chosen by."""


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
        replay.draw(schedule.size(replay.held), generator_at(schedule.seed, BEFORE_STEPS))
        learns = schedule.learning_rate > 0.0 and any(p.requires_grad for p in self.parameters())
        if learns and options.initial_points > 0 and replay.held > 1 and memory.steps < _YOUNG:
            with waiting("an exact GP of some observations", progress):
                memory = self._with_first_hyperparameters(memory)
        self._set_memory(replace(memory, begun=True))

    def _with_first_hyperparameters(self, memory: DecoupledMemory) -> DecoupledMemory:
        options, replay, before = self._options, memory.replay, memory.posterior
        generator = generator_at(options.schedule.seed, BEFORE_STEPS)
        few, more = (
            self._entered(replay.draw(min(size, replay.held), generator))
            for size in (options.initial_points, _LOOKED_AT)
        )
        hyper = self._copied()
        size = Sizes(options.growth.span, options.growth.covariance)
        begin_hyperparameters(hyper, few, more, size, replay.count)
        self._take_over(hyper)
        nothing = options.start(self._output_batch, before.alpha.points)
        posterior = options.growth.anew(nothing, before, hyper.covar_module, self._num_outputs)
        return replace(memory, posterior=posterior, hyper_moments=None, leaf_moments=None)
