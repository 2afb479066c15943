"""Inference by steps on few data and few of very many functions [Evans2020]."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, NoReturn

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
)
from torch import Tensor

from bo_stream.bases.inducing import frozen
from bo_stream.bases.spectral import PointBasis, SampledBasis
from bo_stream.likelihoods.binomial import BinomialLikelihood
from bo_stream.likelihoods.outcome_model import LogisticLikelihood
from bo_stream.models.inference import Inference, KeptProcess, Prior
from bo_stream.models.memory import Observations
from bo_stream.models.outcomes.likelihood import CountOutcomes
from bo_stream.models.quadruply_stochastic.function_process import (
    SAMPLE,
    ControlPoints,
    FunctionProcess,
    WeightMoments,
)
from bo_stream.models.quadruply_stochastic.memory import (
    Layout,
    Progress,
    QuadruplyStochasticMemory,
    Schedule,
    Slice,
    proposition_1,
)
from bo_stream.models.quadruply_stochastic.steps import (
    BATCH_SIZE,
    Steps,
    drawn_functions,
    log_precision,
)
from bo_stream.models.stochastic.budget import (
    JUDGED,
    LEAST_JUDGED,
    SEARCH_SHARE,
    Budget,
    JudgedRows,
    Scores,
)
from bo_stream.models.stochastic.replay import Batch, StreamReplay, generator_at
from bo_stream.models.stochastic.start import agree, learn_first_hyperparameters, set_noise
from bo_stream.models.stochastic.training import ShardedReplay, train
from bo_stream.process import PosteriorProcess
from bo_stream.tensors import is_same, state_of

SUPPORT_PLACE = 2**40
"""Of the random numbers that choose support points, beyond those of all steps."""

_FIRST_ROWS = 64
"""Inputs at which functions are squared for a first guess."""

_PART = 4096

_JUDGING_STEPS = 5
"""Steps whose cost the prediction of the rows that judge a training may have."""

_SPREAD_ROWS = 250
"""Rows whose mean variance is computed for each noise that :meth:`raise_noise` tries."""

_HALVINGS = 7
"""Of the interval in which it looks for the logarithm of the noise."""

Memory = QuadruplyStochasticMemory


@dataclass(frozen=True)
class QuadruplyStochasticInference(Inference[Memory, KeptProcess]):
    """Weights of functions as a normal distribution, for any basis and likelihood.

    Steps move the tensors of a memory in place: :meth:`observe` gives them a copy.

    Attributes:
        schedule: Of steps.
        columns: Dense columns k of the root of the weights' covariance.
        max_rows: Most observations to hold; None: all.
        empirical_bayes: Whether a fit learns hyperparameters.
        relevance: Whether each weight has a prior precision of its own, which steps learn.
    """

    restarts: ClassVar[bool] = False

    schedule: Schedule
    columns: int
    max_rows: int | None
    empirical_bayes: bool
    relevance: bool

    # --- memory -------------------------------------------------------------------------------

    def empty(self, layout: Layout, X: Tensor, prior: Prior) -> Memory:
        """Return a memory of no observations, for inputs like X, and of no weights yet."""
        like = Batch(X[:0], X.new_zeros(0, prior.num_outputs * prior.outcomes.columns))
        replay = StreamReplay.empty(like, self.max_rows, self.schedule.seed)
        return Memory(replay, layout, self._no_weights(X, prior))

    def _no_weights(self, X: Tensor, prior: Prior) -> Progress:
        like, measured = X.new_empty(0, dtype=self.schedule.arithmetic), prior.is_gaussian
        coefficients = like.new_zeros(prior.num_outputs, 0, 1 + self.columns)
        scales = like.new_zeros(prior.num_outputs, self.columns if measured else 0)
        return Progress.start(coefficients, scales, coefficients[..., 0] if measured else None)

    @torch.no_grad()
    def filled(self, memory: Memory, X: Tensor, prior: Prior) -> Memory:
        """Give weights as in the prior to functions that have none. Cost O(p) for p of them, once.

        A first guess squares them at some of the inputs X, ``n x d``, float64.
        """
        layout, size = memory.layout, memory.progress.coefficients.shape[1]
        if layout.size == size:
            return memory
        new = replace(layout, points=layout.points[size:])
        wide = torch.ones(prior.num_outputs, 1, dtype=torch.float64, device=X.device)
        precisions = wide.repeat(1, new.size) if self.relevance else None
        basis = new.basis(frozen(prior.kernel), precisions)
        precision = basis.precision_diagonal(torch.arange(basis.size, device=X.device))
        scale, squares, noise = wide * precision.rsqrt(), None, prior.inferred_noise
        if noise is not None:  # scales of Proposition 1, else of the prior
            squares = wide * basis.mean_squares(X[:_FIRST_ROWS])
            scale = proposition_1(squares, precision, float(memory.replay.count), noise)
        like = X.new_empty(0, dtype=self.schedule.arithmetic)
        first = Progress.start(
            like.new_zeros(*scale.shape, 1 + self.columns),
            scale.log().to(like),
            None if squares is None else squares.to(like),
            None if precisions is None else precisions.to(like),
        )
        progress = memory.progress.grown(first)
        control = progress.control
        if control is not None:  # the new weights are 0: its values stay
            basis = layout.basis(control.basis.kernel, progress.precisions)
            progress.control = replace(control, basis=basis)
        return replace(memory, progress=progress)

    def observe(
        self, memory: Memory, cache: KeptProcess | None, data: Observations, prior: Prior
    ) -> tuple[Memory, None]:
        """Put a batch beside the others, add functions for its inputs, and take steps.

        Raises:
            ModelFittingError: A step diverged.
            UnsupportedError: The batch is to be taken out.
            ValueError: More data or functions for a step than there are.
        """
        if data.sign < 0:
            raise UnsupportedError(
                f"{type(prior.model).__name__} cannot retract: its weights have learned from the "
                "observation. Build it again, or take a model that can retract (OSGPR, WISKI)."
            )
        replay = memory.replay.plus(Batch(data.X, data.targets.mT))
        first = data.X
        if not replay.collective.is_alone:  # the first inputs of all processes
            first = replay.collective.first(first, max(_FIRST_ROWS, memory.layout.room))
        layout, progress = memory.layout.grown(first), memory.progress.clone()
        after = replace(memory, replay=replay, layout=layout, progress=progress)
        after = self.filled(after, first, prior)
        steps = self.schedule.update_steps
        if steps == 0:
            return after, None
        self.check_sizes(after)
        after = self.supported(after, prior)
        learner = self.learner(after, prior, learns=False, exact=False)
        train(learner, steps, None, progress=False)
        return replace(after, progress=learner.progress), None

    def merged(
        self, memory: Memory, cache: KeptProcess | None, other: Memory, prior: Prior
    ) -> NoReturn:
        """Refuse.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            f"{type(prior.model).__name__} cannot merge: weights that learned from different data "
            "cannot be added. Update one model with the other's data, or take OSGPR or WISKI."
        )

    def cleared(self, memory: Memory, prior: Prior) -> Memory:
        """Keep the functions, with weights as in the prior."""
        points = memory.layout.points
        empty = self.empty(memory.layout, points, prior)
        if isinstance(memory.replay, ShardedReplay):  # the processes go on together
            empty = replace(empty, replay=memory.replay.emptied())
        return self.filled(empty, points, prior)

    # --- the posterior, and the bound ---------------------------------------------------------

    def process(
        self,
        memory: Memory,
        cache: KeptProcess | None,
        prior: Prior,
        X: Tensor | None = None,
    ) -> tuple[PosteriorProcess, KeptProcess]:
        """Put the process together with a copy of the weights, in O(p), unless kept."""
        if cache is not None and prior.is_in(cache.state):
            return cache.process, cache
        with torch.no_grad():
            process = self._weighted(memory, prior, frozen(prior.kernel), prior.mean.clone())
            if isinstance(process.basis, PointBasis):
                units, likelihood = prior.outcomes, prior.likelihood
                if isinstance(units, CountOutcomes):
                    likelihood = units.model(prior).likelihood
                noise = site_noise(likelihood).double().clone().unsqueeze(-1)
                process = replace(process, noise=noise)
        return process, KeptProcess(prior.state(), process)

    def _weighted(
        self, memory: Memory, prior: Prior, kernel: Kernel, prior_mean: Tensor
    ) -> FunctionProcess:
        """Copy the weights; differentiable in the kernel and the prior mean, ``m``."""
        basis = memory.basis(kernel)
        return FunctionProcess(basis, self.moments(memory, prior, basis), prior_mean.unsqueeze(-1))

    @torch.no_grad()
    def moments(self, memory: Memory, prior: Prior, basis: SampledBasis) -> WeightMoments:
        """Return the distribution of all weights, a copy. Cost O(p)."""
        progress = memory.progress
        index = torch.arange(progress.size, device=progress.coefficients.device)
        best = _best_scale(memory, prior, basis, index)
        scale = progress.log_scale.exp() if best is None else best
        columns = progress.dense_columns(index)
        scale = scale * (index >= columns.shape[-1] - 1)
        return WeightMoments(columns[..., 0].clone(), columns[..., 1:].clone(), scale)

    def objective(
        self, memory: Memory, cache: KeptProcess | None, prior: Prior
    ) -> tuple[Tensor, KeptProcess | None]:
        """Return the bound at the weights as they are, for all data that are stored. Cost O(n p).

        Differentiable in O(n + p) memory.
        """
        process = self._weighted(memory, prior, prior.kernel, prior.mean)
        total = -divergence(memory, prior, process.basis)
        replay = memory.replay
        total = replay.collective.share * total
        for X, expected in replay.outcomes(prior, prior.likelihood):
            total = total + replay.weight * expected(*process.marginals(X)).sum(-1)
        return replay.collective.sum(total), cache

    def estimator(
        self, memory: Memory, prior: Prior, generator: torch.Generator | None
    ) -> tuple[Steps, torch.Generator]:
        """Make what estimates the bound from the data and functions of a step, and its generator.

        Raises:
            InputDataError: There are no data.
            ValueError: More data or functions for a step than there are.
        """
        memory.replay.check_not_empty()
        self.check_sizes(memory)
        if generator is None:
            seed = memory.replay.collective.agreed(torch.randint(2**62, ()))
            generator = torch.Generator().manual_seed(int(seed))
        return self.learner(memory, prior, learns=False, exact=True), generator

    # --- trainings ----------------------------------------------------------------------------

    def learner(self, memory: Memory, prior: Prior, learns: bool, exact: bool) -> Steps:
        """Make the optimiser, which moves the weights, and copies of hyperparameters, in place.

        If exact, its bounds include ``log |S|`` where S is not diagonal.
        """
        hyper = prior.copied() if learns else prior.copied().requires_grad_(False)
        return Steps(memory, hyper, prior, self.schedule, learns, exact)

    def judged_rows(self, memory: Memory, prior: Prior) -> JudgedRows:
        """Draw rows to judge a training by, whose prediction costs some steps."""
        schedule, size = self.schedule, memory.progress.size
        step = (schedule.batch_size or BATCH_SIZE) * drawn_functions(schedule, size)
        most = max(min(JUDGED, _JUDGING_STEPS * step // max(size, 1)), LEAST_JUDGED)
        return JudgedRows.of(memory.replay, prior, schedule.seed, most)

    @torch.no_grad()
    def scores(self, rows: JudgedRows, memory: Memory, prior: Prior) -> Scores:
        """Predict rows by the weights as they are. Cost O(n p)."""
        return rows.scores(self._weighted(memory, prior, prior.kernel, prior.mean), prior)

    @torch.no_grad()
    def raise_noise(self, rows: JudgedRows, memory: Memory, prior: Prior) -> None:
        """Raise a noise that a fit learns to where predictions are as wrong as they say, in place.

        That is where the mean over the rows of ``(y − E f)²`` is that of ``var f + σ²``, for each
        output; a noise that is larger stays. A fit begins with the noise of an exact process of
        some rows, which is too small for weights that have not converged, and Adam moves it late.
        Cost O(n p) for n rows.
        """
        likelihood = prior.likelihood
        learns = self.empirical_bayes and self.schedule.hyper_rate > 0.0
        if not learns or not isinstance(likelihood, GaussianLikelihood):
            return
        if not likelihood.noise_covar.raw_noise.requires_grad:
            return

        def marginals(batch: Batch) -> tuple[Tensor, Tensor]:
            return self._weighted(memory, prior, prior.kernel, prior.mean).marginals(batch.X)

        mean, variance = marginals(rows.rows)
        squares = (rows.rows.targets - mean).square().mean(-1)
        before = likelihood.noise.view_as(squares).double()
        collective = memory.replay.collective
        wrong = collective.agreed((squares > variance.mean(-1) + before).double()) > 0.0
        if not bool(wrong.any()):
            return
        low, high, some = before.log(), squares.log(), rows.rows.rows(slice(0, _SPREAD_ROWS))
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            noise = torch.where(wrong, middle.exp(), before)
            set_noise(likelihood, noise.view_as(likelihood.noise))
            short = squares > marginals(some)[1].mean(-1) + noise
            low, high = torch.where(short, middle, low), torch.where(short, high, middle)
        set_noise(likelihood, collective.agreed(likelihood.noise.clone()))

    def check_sizes(self, memory: Memory) -> None:
        """Check that there are as many data and functions as a step draws."""
        schedule = self.schedule
        for name, asked, there in (
            ("batch_size", schedule.batch_size, memory.replay.held),
            ("functions", schedule.functions, memory.progress.coefficients.shape[1]),
        ):
            if asked is not None and asked > there:
                raise ValueError(
                    f"Expected {name}, drawn in a step, to be at most the {there} that there are, "
                    f"got {asked}."
                )

    def begun(self, memory: Memory, prior: Prior, budget: Budget) -> Memory:
        """Learn hyperparameters by an exact process, and restart the weights, the first time.

        Of a limited budget the search takes at most ``SEARCH_SHARE``; where nothing is left,
        nothing is begun.
        """
        if memory.begun:
            return memory
        if self.schedule.initial_points > 0 and self.empirical_bayes:
            left = budget.left(SEARCH_SHARE)
            if left == 0.0:
                return memory
            rows = self._some_rows(memory, prior, self.schedule.initial_points)
            modules = prior.kernel, prior.mean_module, prior.likelihood
            learn_first_hyperparameters(*modules, rows, seconds=left)
            agree(modules, memory.replay.collective)
            progress = self._no_weights(rows.X, prior)
            memory = self.filled(replace(memory, progress=progress), rows.X, prior)
        return replace(memory, begun=True)

    def _some_rows(self, memory: Memory, prior: Prior, most: int) -> Batch:
        """Draw rows to look at before there are steps, the same while they are stored."""
        replay, generator = memory.replay, generator_at(self.schedule.seed, SUPPORT_PLACE)
        return replay.whole_sample(min(most, replay.held), generator, prior)

    @torch.no_grad()
    def supported(self, memory: Memory, prior: Prior) -> Memory:
        """Place support points of the control variate, if draws leave functions out.

        Anew when the kernel has moved, or they would be of ever less use. Cost O(s p) then for s
        points, unless the weights are zero.
        """
        progress, schedule = memory.progress, self.schedule
        points, control = schedule.control_points, progress.control
        size = progress.coefficients.shape[1]
        is_gaussian = isinstance(prior.likelihood, GaussianLikelihood)
        if points == 0 or not is_gaussian or drawn_functions(schedule, size) == size:
            return replace(memory, progress=replace(progress, control=None))
        kernel = frozen(prior.kernel)
        if control is None or not is_same(state_of(kernel), state_of(control.basis.kernel)):
            rows = self._some_rows(memory, prior, SAMPLE * points)
            sample = rows.X.to(schedule.arithmetic), rows.Y.mT.to(schedule.arithmetic)
            basis, count = memory.basis(kernel), memory.replay.count
            control = ControlPoints.of(basis, points, sample, count, progress)
        return replace(memory, progress=replace(progress, control=control))


def divergence(memory: Memory, prior: Prior, basis: SampledBasis) -> Tensor:
    """Compute ``KL(q ‖ p)``, ``m``, in float64. Cost O(p), or O(p²) where S is not diagonal."""
    progress = memory.progress
    parts = torch.arange(progress.size, device=progress.coefficients.device).split(_PART)
    slices = []
    for index in parts:
        best = _best_scale(memory, prior, basis, index)
        own = progress.coefficients[:, index].double(), progress.learned_scale(index).double()
        slices.append((index, Slice.of(index, *own, None if best is None else best.double())))
    total = basis.precision_diagonal(parts[0][:0]).sum(-1)
    for index, weights in slices:
        precision, columns = basis.precision_diagonal(index), weights.columns
        terms = precision * weights.scale.square() - 2.0 * weights.log_diagonal - 1.0
        if isinstance(basis, PointBasis):
            applied = [basis.precision(index, others) @ one.columns for others, one in slices]
            terms = terms + (columns * torch.stack(applied).sum(0)).sum(-1)
        else:
            terms = terms + precision * columns.square().sum(-1) - precision.log()
        total = total + 0.5 * terms.sum(-1)
    return total - 0.5 * log_precision(basis) if isinstance(basis, PointBasis) else total


def _best_scale(memory: Memory, prior: Prior, basis: SampledBasis, index: Tensor) -> Tensor | None:
    """Compute the diagonal of C by Proposition 1, ``m x k``; None where it is learned."""
    squares, count = memory.progress.mean_squares, float(memory.replay.count)
    if squares is None:
        return None
    precision = basis.precision_diagonal(index)
    return proposition_1(squares[:, index], precision, count, prior.likelihood.noise)


def site_noise(likelihood: Likelihood) -> Tensor:
    """Return the noise variance of a Gaussian likelihood about as sharp as another, ``m`` or 1.

    Its own variance, that of a Laplace outcome, or one over the largest curvature, which is at
    f = 0: 1/4 for the logistic likelihood and for each trial of a binomial one, 2/π for the probit.
    For other counts it grows with the count; 1 is that of a count of about five.
    """
    if isinstance(likelihood, GaussianLikelihood):
        return likelihood.noise.reshape(-1)
    if isinstance(likelihood, LaplaceLikelihood):
        return 2.0 * likelihood.noise.reshape(-1)
    if isinstance(likelihood, BinomialLikelihood):
        return torch.full((1,), 4.0 / (likelihood.trials or 1))
    curved = {LogisticLikelihood: 4.0, BernoulliLikelihood: 0.5 * math.pi}
    return curved.get(type(likelihood), 1.0) * torch.ones(1)
