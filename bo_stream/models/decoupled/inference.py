"""Variational inference with one basis for the mean and another for the covariance [Cheng2017]."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import reduce
from typing import ClassVar, Literal, NoReturn, get_args

import torch
from botorch.exceptions.errors import ModelFittingError, UnsupportedError
from botorch.exceptions.warnings import BotorchWarning
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from bo_stream.bases.inducing import InducingFunctions, frozen, in_dtype
from bo_stream.errors import check_one_of, check_whole
from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.models.decoupled.collapse import (
    Growth,
    between,
    optimum,
    with_eigenfunctions,
)
from bo_stream.models.decoupled.learner import INPUTS, DecoupledLearner, DecoupledSchedule
from bo_stream.models.decoupled.posterior import (
    DecoupledMemory,
    DecoupledPosterior,
    DirectCovariance,
    Draw,
    Expanded,
    HybridCovariance,
    KernelExpansion,
    ShiftedProcess,
    SpectralCovariance,
    VariationalCovariance,
    bound_terms,
    drawn_columns,
)
from bo_stream.models.inference import Hyperparameters, Inference, KeptProcess, Prior
from bo_stream.models.memory import Observations
from bo_stream.models.stochastic.budget import SEARCH_SHARE, START_SHARE, Budget, JudgedRows, Scores
from bo_stream.models.stochastic.replay import ROWS, Batch, StreamReplay, generator_at
from bo_stream.models.stochastic.start import (
    agree,
    input_scale,
    learn_first_hyperparameters,
    set_scales,
)
from bo_stream.models.stochastic.training import ShardedReplay, tracked, train, waiting
from bo_stream.process import PosteriorProcess, WeightSpaceProcess
from bo_stream.weights import WeightPosterior

Parametrization = Literal["spectral", "hybrid", "direct"]

YOUNG = 100
"""Steps after which hyperparameters that were learned from a stream are not begun again."""

BEFORE_STEPS = 2**32
"""Place of the random numbers before the first step, far from those of steps."""

LOOKED_AT = 4096
"""Observations that the first output scale and noise are chosen by."""

FIRST_STEPS = 50
"""Of L-BFGS on the exact process: it need not converge."""

HALVINGS = 6
"""Shorter Newton steps that are tried."""


@dataclass(frozen=True)
class DecoupledInference(Inference[DecoupledMemory, KeptProcess]):
    """Steps on an unbiased estimate of the bound, and the bound's optimum for all data at once.

    What steps learned, their count and the moments of their optimisers are part of the memory, so
    that a training goes on where the last one ended.

    Attributes:
        growth: Caps of the bases.
        schedule: Of steps.
        parametrization: Of the covariance.
        jacobi: Whether the mean's coefficients are preconditioned by the diagonal of K_α.
        factors: Whether inducing functions have lengthscale factors.
        update_steps: Steps of an update.
        max_rows: Most observations to hold.
        initial_points: Of the exact process before the first step of a fit; 0: none.
    """

    restarts: ClassVar[bool] = False

    growth: Growth
    schedule: DecoupledSchedule
    parametrization: Parametrization
    jacobi: bool
    factors: bool
    update_steps: int
    max_rows: int | None
    initial_points: int

    def __post_init__(self) -> None:
        schedule = self.schedule
        check_whole("update_steps", self.update_steps, 0)
        check_whole("initial_points", self.initial_points, 0)
        check_whole("num_columns", schedule.columns)
        for name, number in (("batch_size", schedule.batch_size), ("max_rows", self.max_rows)):
            if number is not None:
                check_whole(name, number)
        if schedule.columns > max(self.growth.mean, 1):
            raise ValueError(
                f"Expected num_columns of at most num_mean = {self.growth.mean}, got "
                f"{schedule.columns}: a step cannot visit more columns than there are."
            )
        if self.max_rows is not None and (schedule.batch_size or 0) > self.max_rows:
            raise ValueError(
                f"Expected batch_size of at most max_rows = {self.max_rows}, got "
                f"{schedule.batch_size}."
            )
        if not schedule.learning_rate >= 0.0:
            raise ValueError(f"Expected learning_rate of at least 0, got {schedule.learning_rate}.")
        rates = {"natural_rate": schedule.natural_rate, "mean_rate": schedule.mean_rate}
        for name, rate in rates.items():
            if rate is not None and not 0.0 < rate <= 1.0:
                raise ValueError(f"Expected {name} in (0, 1], got {rate}.")
        check_one_of("parametrization", self.parametrization, get_args(Parametrization))
        if self.factors and self.parametrization == "spectral" and not schedule.mean_points:
            raise ValueError(
                "Expected learn_mean_points with lengthscale_factors, got False: the functions of "
                "a spectral parametrization combine the mean's, which would stay as they are. "
                "Give it, or the parametrization 'hybrid'."
            )

    # --- memory -------------------------------------------------------------------------------

    def empty(self, X: Tensor, prior: Prior) -> DecoupledMemory:
        """Return a memory without functions or observations.

        What the first inputs, ``... x n x d``, vary by is the unit of steps.
        """
        like = X[..., :0, :].double()
        posterior = self._without_functions(prior.shape, like)
        width = prior.num_outputs * prior.outcomes.columns
        outcomes = like.new_zeros(*prior.batch_shape, 0, width)
        replay = StreamReplay.empty(Batch(like, outcomes), self.max_rows, self.schedule.seed)
        return DecoupledMemory(posterior, replay, 0, float(input_scale(X.double()).mean()))

    def _without_functions(self, batch: torch.Size, like: Tensor) -> DecoupledPosterior:
        none = like.new_zeros(*batch, 0, like.shape[-1])
        functions = InducingFunctions(none, none if self.factors else None)
        moment, square = like.new_zeros(*batch, 0, 1), like.new_zeros(*batch, 0, 0)
        covariance: VariationalCovariance = SpectralCovariance(moment, square, square)
        if self.parametrization == "direct":
            covariance = DirectCovariance(square, self.jacobi)
        elif self.parametrization == "hybrid":
            covariance = HybridCovariance(moment, square)
        return DecoupledPosterior(functions, none[..., 0], functions, covariance, self.jacobi)

    def observe(
        self,
        memory: DecoupledMemory,
        cache: KeptProcess | None,
        data: Observations,
        prior: Prior,
    ) -> tuple[DecoupledMemory, None]:
        """Put a batch beside the others, let it become functions, and take steps.

        Hyperparameters that learn have moved afterwards.

        Raises:
            ModelFittingError: A step diverged.
            UnsupportedError: The batch is to be taken out.
            ValueError: Fewer observations are stored than ``batch_size``.
        """
        if data.sign < 0.0:
            raise UnsupportedError(
                "A DecoupledGP cannot retract observations: its steps have learned from them. "
                "Build it again without them."
            )
        replay = memory.replay.plus(Batch(data.X, data.targets.mT))
        after = replace(memory, replay=replay)
        learner = DecoupledLearner(after, prior, self.growth, self.schedule, growing=False)
        learner.grow(replay.collective.first(data.X, 4 * self.growth.step))
        train(learner, self.update_steps, None, progress=False)
        prior.take_over(learner.hyper)
        return learner.memory, None

    def merged(
        self,
        memory: DecoupledMemory,
        cache: KeptProcess | None,
        other: DecoupledMemory,
        prior: Prior,
    ) -> NoReturn:
        """Refuse.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "DecoupledGPs cannot be merged: their posteriors are not sums over data. Update one "
            "with the other's data."
        )

    def cleared(self, memory: DecoupledMemory, prior: Prior) -> DecoupledMemory:
        """Keep the functions, of which nothing is known, and what inputs vary by."""
        posterior = self._anew(memory.posterior, prior.copied().covar_module)
        points = posterior.alpha.points
        nothing = points.new_zeros(*prior.batch_shape, 0, points.shape[-1])
        empty = replace(self.empty(nothing, prior), posterior=posterior, unit=memory.unit)
        if isinstance(memory.replay, ShardedReplay):  # the processes go on together
            empty = replace(empty, replay=memory.replay.emptied())
        return empty

    def _anew(self, before: DecoupledPosterior, kernel: Kernel) -> DecoupledPosterior:
        """Keep the functions, but nothing that is known of them; spectral ones come later."""
        batch = before.coefficients.shape[:-1]
        nothing = self._without_functions(batch, before.alpha.points)
        if self.parametrization != "spectral":
            nothing = nothing.with_covariance_values(before.beta.points, kernel, batch[-1])
        return nothing.with_mean_values(before.alpha.points)

    # --- the posterior, and the bound ---------------------------------------------------------

    @torch.no_grad()
    def process(
        self,
        memory: DecoupledMemory,
        cache: KeptProcess | None,
        prior: Prior,
        X: Tensor | None = None,
    ) -> tuple[PosteriorProcess, KeptProcess]:
        """Put the process together, in O(M_α S d + S³), unless kept."""
        if cache is None or not prior.is_in(cache.state):
            cache = KeptProcess(prior.state(), self._process(memory.posterior, prior))
        return cache.process, cache

    def _process(self, posterior: DecoupledPosterior, prior: Prior) -> PosteriorProcess:
        kernel, constant = frozen(prior.kernel), prior.mean.clone()
        now = Expanded(posterior, kernel, constant, prior.num_outputs)
        weights = WeightPosterior.of(now.remaining, now.weights[1])
        base = WeightSpaceProcess(now.basis, weights, constant.unsqueeze(-1))
        return ShiftedProcess(base, KernelExpansion(kernel, posterior.alpha, now.coefficients))

    def objective(
        self, memory: DecoupledMemory, cache: KeptProcess | None, prior: Prior
    ) -> tuple[Tensor, KeptProcess | None]:
        """Return the bound at the variational parameters as they are, [Cheng2017, eq. 9 and 10].

        Exact for the observations that are stored; of a sample its unbiased scaling to all n. Cost
        O(n (M_α d + M_β²) + M_α² d + M_β³).
        """
        own = Hyperparameters.shared(prior.kernel, prior.mean_module, prior.likelihood)
        return in_dtype(own, torch.float64, lambda h: self._bound(memory, prior, h)), cache

    def _bound(self, memory: DecoupledMemory, prior: Prior, hyper: Hyperparameters) -> Tensor:
        replay, now = memory.replay, Expanded.of(memory.posterior, hyper)
        collective, data = replay.collective, replay.outcomes(prior, hyper.likelihood)
        terms = bound_terms(data, replay.weight, collective.share)
        return collective.sum(reduce(torch.add, (term(now) for term in terms)))

    def estimate(self, memory: DecoupledMemory, prior: Prior, generator: torch.Generator) -> Tensor:
        """Draw an unbiased estimate of the bound, ``batch_shape x m``, at the cost of a step.

        Raises:
            ValueError: Fewer observations are stored than ``batch_size``.
        """
        replay, schedule = memory.replay, self.schedule
        size, collective = schedule.size(replay.held), replay.collective
        data = replay.sample(size, generator, prior)
        index = drawn_columns(memory.posterior, schedule.columns, generator)
        weight = replay.count / size

        def draw(hyper: Hyperparameters) -> Tensor:
            outcomes = OutcomeModel(hyper.likelihood, prior.num_outputs)
            expected = outcomes.expected_log_prob(data.targets)
            now = Expanded.of(memory.posterior, hyper)
            drawn = Draw.of(now, data.X, expected, weight, index, collective)
            return collective.sum(drawn.value)

        own = Hyperparameters.shared(prior.kernel, prior.mean_module, prior.likelihood)
        return in_dtype(own, torch.float64, draw)

    # --- trainings ----------------------------------------------------------------------------

    def begun(
        self, memory: DecoupledMemory, prior: Prior, budget: Budget, progress: bool
    ) -> DecoupledMemory:
        """Begin with the hyperparameters of an exact process, where little was learned before.

        From the median trick alone steps find lengthscales slowly: the mean has to follow each move
        of theirs before the next one pays. Scales are then those of a sparse process. The functions
        stay, but are known nothing of then. Of a limited budget the search takes at most
        ``SEARCH_SHARE``; where nothing is left, nothing is begun. Cost O(k³) for each of some steps
        on k data.

        Raises:
            ValueError: Fewer observations are stored than ``batch_size``.
        """
        if memory.begun:
            return memory
        replay, schedule, hyper = memory.replay, self.schedule, prior.copied()
        generator = generator_at(schedule.seed, BEFORE_STEPS)
        replay.places(schedule.size(replay.held), generator)  # checks that there are as many
        learns = schedule.learning_rate > 0.0 and len(hyper.moving) > 0
        if not learns or self.initial_points == 0 or replay.held < 2 or memory.steps >= YOUNG:
            return replace(memory, begun=True)
        if budget.left(SEARCH_SHARE) == 0.0:
            return memory
        generator = generator_at(schedule.seed, BEFORE_STEPS)
        with waiting("an exact GP of some observations", progress):
            few, more = (
                replay.whole_sample(min(size, replay.held), generator, prior)
                for size in (self.initial_points, LOOKED_AT)
            )
            modules = hyper.covar_module, hyper.mean_module, hyper.likelihood
            try:
                learn_first_hyperparameters(*modules, few, FIRST_STEPS, budget.left(SEARCH_SHARE))
            except ModelFittingError as error:
                message = f"Lengthscales begin by the median trick: an exact GP failed: {error}"
                warnings.warn(message, BotorchWarning, stacklevel=2)
            if budget.left(START_SHARE) != 0.0:
                set_scales(hyper, more, self.growth.span, self.growth.covariance, replay.count)
            agree(modules, replay.collective)
        prior.take_over(hyper)
        posterior = self._anew(memory.posterior, hyper.covar_module)
        fresh = replace(memory, hyper_moments=None, variational_moments=None)
        return replace(fresh, posterior=posterior, begun=True)

    @torch.no_grad()
    def scores(self, rows: JudgedRows, memory: DecoupledMemory, prior: Prior) -> Scores:
        """Predict rows by the posterior as it is. Cost O(n (M_α d + S M_β) + M_α S d + S³)."""
        return rows.scores(self._process(memory.posterior, prior), prior)

    @torch.no_grad()
    def optimized(
        self, memory: DecoupledMemory, prior: Prior, progress: bool
    ) -> DecoupledPosterior:
        """Move mean and variance to their best for all data, or by a Newton step towards it."""
        replay, hyper = memory.replay, prior.copied()
        before, weight = Expanded.of(memory.posterior, hyper), replay.weight
        collective = replay.collective
        chunks = -(-replay.held // ROWS)
        batches = tracked(replay.outcomes(prior, hyper.likelihood), chunks, progress)
        if isinstance(hyper.likelihood, GaussianLikelihood):
            return optimum(before, batches, weight, self.growth.covariance, collective)
        now, p = before, before.posterior
        if isinstance(p.covariance, SpectralCovariance) and len(p.beta) < len(p.alpha):
            # let covariance functions combine all of the mean's
            most = min(INPUTS * len(p.alpha), replay.held)
            some = replay.sample(most, generator_at(self.schedule.seed, BEFORE_STEPS), prior)
            sizes = len(p.alpha), self.growth.covariance
            now = replace(now, posterior=with_eigenfunctions(now, some.X, *sizes, collective))
        best = optimum(now, batches, weight, None, collective)
        bound = self._bound(memory, prior, hyper)
        for halvings in range(HALVINGS):
            tried = between(now.posterior, best, 0.5**halvings)
            there = self._bound(replace(memory, posterior=tried), prior, hyper)
            if bool((there >= bound).all()):
                return tried
        return memory.posterior
