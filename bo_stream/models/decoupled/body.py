"""How a decoupled model learns from all data at once: its posterior, hyperparameters with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NoReturn, Self

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from bo_stream.allocation.allocator import checked_number
from bo_stream.bases.inducing import frozen
from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.likelihoods.sites import ExpectedLogProb
from bo_stream.models.base import StreamingGP
from bo_stream.models.decoupled.bound import Draw, Expanded, drawn_columns, exact_bound
from bo_stream.models.decoupled.choice import DecoupledOptions
from bo_stream.models.decoupled.collapse import CollapsedBound, between, climb_collapsed, optimum
from bo_stream.models.decoupled.growth import SpectralSpread, with_eigenfunctions
from bo_stream.models.decoupled.learner import INPUTS, DecoupledLearner
from bo_stream.models.decoupled.memory import DecoupledMemory
from bo_stream.models.decoupled.posterior import DecoupledPosterior
from bo_stream.models.decoupled.process import KernelExpansion, ShiftedProcess
from bo_stream.models.decoupled.start import begin_hyperparameters, input_scale
from bo_stream.models.hyperparameters import Hyperparameters
from bo_stream.models.kept_process import KeptProcess
from bo_stream.models.live_kernel import in_dtype
from bo_stream.models.memory import Observations
from bo_stream.models.stochastic.replay import Batch, DatasetReplay, StreamReplay, generator_at
from bo_stream.models.stochastic.start import Sizes
from bo_stream.models.stochastic.training import Training, check_limits, tracked, train, waiting
from bo_stream.process.process import WeightSpaceProcess
from bo_stream.tensors import State
from bo_stream.weights import WeightPosterior

ROWS = 2048
"""Observations that are visited at a time."""


class DecoupledBody(StreamingGP):
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
        options = self._options
        return DecoupledLearner(
            memory,
            self._copied(),
            self._fixed,
            self._entered,
            options.growth,
            options.schedule,
            options.learned(memory.unit),
            growing,
        )

    def _copied(self) -> Hyperparameters:
        """The model's own, to be moved apart from it."""
        return Hyperparameters(self.covar_module, self.mean_module, self.likelihood)

    @property
    def _fixed(self) -> list[str]:
        """Names of hyperparameters that stay."""
        return [name for name, p in self.named_parameters() if not p.requires_grad]

    @property
    def _weight(self) -> float:
        """Observations that came for each that is held."""
        replay = self._memory.replay
        return replay.count / max(replay.held, 1)

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
        self._targets_of(other)
        raise UnsupportedError(
            "DecoupledGPs cannot be merged: their posteriors are not sums over data. Update one "
            "with the other's data."
        )

    # --- the bound ----------------------------------------------------------------------------

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
        return exact_bound(self._expanded(hyper), self._batches(hyper), self._weight)

    def _batches(self, hyper: Hyperparameters) -> Iterator[tuple[Tensor, ExpectedLogProb]]:
        for batch in self._memory.replay.chunks(ROWS):
            data = self._entered(batch)
            yield data.X, self._expected(hyper, data)

    # --- the posterior ------------------------------------------------------------------------

    @torch.no_grad()
    def _solve(self, state: State) -> KeptProcess:
        kernel = frozen(self.covar_module)
        constant = self._prior.mean.clone()
        now = Expanded(self._memory.posterior, kernel, constant, self._num_outputs)
        weights = WeightPosterior.of(now.remaining, now.weights[1])
        base = WeightSpaceProcess(now.basis, weights, constant.unsqueeze(-1))
        expansion = KernelExpansion(kernel, self._memory.posterior.alpha, now.coefficients)
        return KeptProcess(state, ShiftedProcess(base, expansion))


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
