"""What a decoupled model remembers, how it learns and what it predicts: the body of the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NoReturn, Self

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from bo_stream.allocation.numbers import checked_number
from bo_stream.bases.inducing import frozen
from bo_stream.models.dataset_replay import DatasetReplay
from bo_stream.models.decoupled_bound import Draw, Expanded, drawn_columns, exact_bound
from bo_stream.models.decoupled_choice import DecoupledOptions
from bo_stream.models.decoupled_learner import DecoupledLearner
from bo_stream.models.decoupled_memory import DecoupledMemory
from bo_stream.models.decoupled_optimum import between, optimum
from bo_stream.models.decoupled_posterior import DecoupledPosterior
from bo_stream.models.decoupled_process import KernelExpansion, ShiftedProcess
from bo_stream.models.decoupled_start import begin_hyperparameters, input_scale
from bo_stream.models.first_scales import Sizes
from bo_stream.models.hyperparameters import Hyperparameters
from bo_stream.models.kept_process import KeptProcess
from bo_stream.models.kernel_copy import in_dtype
from bo_stream.models.latent_outcomes import LatentOutcomes
from bo_stream.models.memory import Observations
from bo_stream.models.outcome_model import OutcomeModel
from bo_stream.models.replay import Batch, StreamReplay, generator_at
from bo_stream.models.solved_gp import SolvedGP
from bo_stream.models.training import Training, check_limits, tracked, train
from bo_stream.module_state import State
from bo_stream.process import WeightSpaceProcess
from bo_stream.variational import ExpectedLogProb
from bo_stream.weights import WeightPosterior

_ROWS = 2048
"""Observations that the exact bound visits at a time."""

_YOUNG = 100
"""Steps after which hyperparameters that were learned from a stream are not begun anew."""

_BEFORE = 2**32
"""Place of the random numbers before the first step, far from those of steps."""

_LOOKED_AT = 4096
"""Observations that the first output scale and noise are chosen by."""

_HALVINGS = 6
"""Shorter Newton steps that are tried."""


class DecoupledBody(LatentOutcomes, SolvedGP[KeptProcess]):
    """A variational model with one basis for its mean and another for its covariance."""

    _memory: DecoupledMemory
    _options: DecoupledOptions

    def _nothing(self, inputs: Tensor) -> DecoupledMemory:
        like = inputs[..., :0, :].double()
        posterior = self._options.start(self._output_batch, like)
        outcomes = like.new_zeros(*self._batch_shape, 0, self._num_outputs)
        replay = StreamReplay.empty(
            Batch(like, outcomes), self._options.max_rows, self._options.schedule.seed
        )
        unit = float(input_scale(inputs.double()).mean())
        return DecoupledMemory(posterior, replay, 0, unit)

    def _projected(self, inputs: Tensor) -> Tensor:
        return inputs

    # --- memory -------------------------------------------------------------------------------

    def _set_memory(self, memory: DecoupledMemory) -> None:
        self._memory, self._solved = memory, None

    def _take(self, data: Observations) -> None:
        replay = self._memory.replay.plus(Batch(data.X, data.targets.mT))
        learner = self._learner(replace(self._memory, replay=replay), growing=False)
        learner.grow(data.X)
        train(learner, self._options.update_steps, None, progress=False)
        self._adopt(learner)

    def _learner(self, memory: DecoupledMemory, growing: bool) -> DecoupledLearner:
        fixed = [name for name, p in self.named_parameters() if not p.requires_grad]
        options = self._options
        return DecoupledLearner(
            memory,
            Hyperparameters(self.covar_module, self.mean_module, self.likelihood),
            fixed,
            self._entered,
            options.growth,
            options.schedule,
            options.learned(memory.unit),
            growing,
        )

    @torch.no_grad()
    def _adopt(self, learner: DecoupledLearner) -> None:
        self._take_over(learner.hyper)
        self._set_memory(learner.memory)

    @torch.no_grad()
    def _take_over(self, hyper: Hyperparameters) -> None:
        for name, value in hyper.rounded(self._dtype).named_parameters():
            self.get_parameter(name).copy_(value)

    def _entered(self, batch: Batch) -> Observations:
        """What was drawn, in units of the process: a stream's is so already."""
        if isinstance(self._memory.replay, DatasetReplay):
            batch = batch.map(lambda tensor: tensor.to(self.train_targets))
            self._check_observations(batch.X, batch.Y, None)
            return self._observations(batch.X, batch.Y, None, 1.0)
        targets = batch.Y.mT
        unknown = torch.zeros_like(targets[..., :1, :], dtype=torch.bool)
        return Observations(batch.X, targets, torch.ones_like(targets), unknown, 1.0)

    def _check_retractable(self, X: Tensor) -> None:
        if X.shape[-2] > 0:
            raise UnsupportedError(
                "A DecoupledGP cannot retract observations: its steps have learned from them. "
                "Build it anew without them."
            )

    def merge(self, other: Self) -> NoReturn:
        """Refused: steps on one model's data cannot be added to another's.

        Raises:
            UnsupportedError: Always.
        """
        self._check_not_supposed("merge")
        other._check_not_supposed("merge")
        raise UnsupportedError(
            "DecoupledGPs cannot be merged: their posteriors are not sums over data. Update one "
            "with the other's data."
        )

    # --- learning -----------------------------------------------------------------------------

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
            self._begin_learning()
        if seconds is not None:
            seconds = max(seconds - (time.monotonic() - begin), 0.0)
        learner = self._learner(self._memory, growing=True)
        try:
            return train(learner, steps, seconds, progress=progress)
        finally:
            self._adopt(learner)

    def _begin_learning(self) -> None:
        """From the hyperparameters of an exact GP, where nothing or little was learned before."""
        memory, options = self._memory, self._options
        replay, schedule = memory.replay, options.schedule
        replay.draw(schedule.size(replay.held))
        learns = schedule.learning_rate > 0.0 and any(p.requires_grad for p in self.parameters())
        if learns and options.initial_points > 0 and replay.held > 1 and memory.steps < _YOUNG:
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

        Cost O(n (M_α + M_β)² + M_α³) a round, and memory O(M_α²): as 2,000 steps for some 10⁶
        observations and 2,000 functions.

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
        best = optimum(now, tracked(batches, -(-replay.held // _ROWS), progress), weight)
        if isinstance(hyper.likelihood, GaussianLikelihood):
            return best
        bound = exact_bound(now, self._batches(hyper), weight)
        for halvings in range(_HALVINGS):
            tried = between(now.posterior, best, 0.5**halvings)
            there = exact_bound(replace(now, posterior=tried), self._batches(hyper), weight)
            if bool((there >= bound).all()):
                return tried
        return now.posterior

    def _check_observed(self) -> None:
        if self._memory.replay.held == 0:
            raise InputDataError(
                "Expected observations to learn from, got an empty stream. Give train_X and "
                "train_Y, or update the model first."
            )

    @property
    def num_steps(self) -> int:
        """Steps taken so far, by updates and fits."""
        return self._memory.steps

    @torch.no_grad()
    def elbo(self) -> Tensor:
        """The bound on the log marginal likelihood, ``batch_shape x m``, without m if that is 1.

        Exact for the observations that are held; of a sample its unbiased scaling to all n. Cost
        O(n (M_α d + M_β²) + M_α² d + M_β³). [Cheng2017, eq. 9 and 10]
        """
        return self._from_per_output(self._of_hyperparameters(self._bound))

    def elbo_estimate(self, generator: torch.Generator | None = None) -> Tensor:
        """One unbiased draw of :meth:`elbo`, at the cost of a step.

        Args:
            generator: Of minibatch and columns, on the CPU; torch's own if omitted.

        Raises:
            InputDataError: There are no observations.
            ValueError: Fewer are held than ``batch_size``.
        """
        self._check_observed()
        if generator is None:
            generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
        replay, schedule = self._memory.replay, self._options.schedule
        data = self._entered(replay.draw(schedule.size(replay.held), generator))
        index = drawn_columns(self._memory.posterior, schedule.columns, generator)
        weight = replay.count / len(data)

        def draw(hyper: Hyperparameters) -> Tensor:
            expanded, expected = self._expanded(hyper), self._expected(hyper, data)
            return Draw.of(expanded, data.X, expected, weight, index).value

        return self._from_per_output(self._of_hyperparameters(draw))

    def _log_marginal_likelihood(self) -> Tensor:
        return self._learning_objective()

    def _learning_objective(self) -> Tensor:
        return self._of_hyperparameters(self._bound)

    def _of_hyperparameters(self, rule: Callable[[Hyperparameters], Tensor]) -> Tensor:
        """What a rule makes of them in float64, differentiable in the model's own."""
        own = Hyperparameters.shared(self.covar_module, self.mean_module, self.likelihood)
        return in_dtype(own, torch.float64, rule)

    def _expanded(self, hyper: Hyperparameters) -> Expanded:
        constant = hyper.constant(self._output_batch)
        return Expanded(self._memory.posterior, hyper.covar_module, constant, self._num_outputs)

    def _expected(self, hyper: Hyperparameters, data: Observations) -> ExpectedLogProb:
        outcomes = OutcomeModel(hyper.likelihood, self._num_outputs)
        return outcomes.expected_log_prob(data.targets)

    def _bound(self, hyper: Hyperparameters) -> Tensor:
        replay = self._memory.replay
        weight = replay.count / max(replay.held, 1)
        return exact_bound(self._expanded(hyper), self._batches(hyper), weight)

    def _batches(self, hyper: Hyperparameters) -> Iterator[tuple[Tensor, ExpectedLogProb]]:
        for batch in self._memory.replay.chunks(_ROWS):
            data = self._entered(batch)
            yield data.X, self._expected(hyper, data)

    # --- the posterior ------------------------------------------------------------------------

    @torch.no_grad()
    def _solve(self, state: State) -> KeptProcess:
        kernel = frozen(self.covar_module)
        constant = self._prior_mean().clone()
        now = Expanded(self._memory.posterior, kernel, constant, self._num_outputs)
        weights = WeightPosterior.of(now.remaining, now.weights[1])
        base = WeightSpaceProcess(now.basis, weights, constant.unsqueeze(-1))
        expansion = KernelExpansion(kernel, self._memory.posterior.alpha, now.coefficients)
        return KeptProcess(state, ShiftedProcess(base, expansion))
