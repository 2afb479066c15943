"""Inference by steps on few data and few of very many functions [Evans2020]."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
)
from torch import Tensor

from bo_stream.bases.inducing import frozen
from bo_stream.bases.sampled import SampledBasis
from bo_stream.likelihoods.outcome_model import LogisticLikelihood
from bo_stream.models.inference import Inference, KeptProcess
from bo_stream.models.memory import Observations
from bo_stream.models.prior import Prior
from bo_stream.models.quadruply_stochastic.control_variate import SAMPLE, ControlPoints
from bo_stream.models.quadruply_stochastic.estimator import (
    Estimator,
    Minibatch,
    SampledGradient,
    measured_scale,
)
from bo_stream.models.quadruply_stochastic.function_process import (
    Augmentation,
    FunctionProcess,
    WeightMoments,
)
from bo_stream.models.quadruply_stochastic.memory import (
    Layout,
    Progress,
    QuadruplyStochasticMemory,
)
from bo_stream.models.quadruply_stochastic.steps import Schedule, Steps
from bo_stream.models.quadruply_stochastic.weight_posterior import (
    ChevronPosterior,
    full_bound,
    full_divergence,
    log_precision,
    proposition_1,
)
from bo_stream.models.stochastic.replay import Batch, StreamReplay, generator_at
from bo_stream.models.stochastic.start import learn_first_hyperparameters
from bo_stream.models.stochastic.training import Training, train
from bo_stream.process.process import PosteriorProcess
from bo_stream.tensors import is_same, state_of

SUPPORT_PLACE = 2**40
"""Of the random numbers that choose support points, beyond those of all steps."""

_FIRST_ROWS = 64
"""Inputs at which functions are squared for a first guess."""

Memory = QuadruplyStochasticMemory


@dataclass(frozen=True)
class QuadruplyStochasticInference(Inference[Memory, KeptProcess]):
    """Weights of functions as a normal distribution, for any basis and likelihood.

    Steps move the tensors of a memory in place: :meth:`observe` gives them a copy.

    Attributes:
        schedule: Of steps.
        columns: Dense columns k of the root of the weights' covariance.
        arithmetic: Dtype of steps, and of what is stored of weights.
        max_rows: Most observations to hold; None: all.
        empirical_bayes: Whether a fit learns hyperparameters.
        relevance: Whether each weight has a prior precision of its own, which steps learn.
    """

    schedule: Schedule
    columns: int
    arithmetic: torch.dtype
    max_rows: int | None
    empirical_bayes: bool
    relevance: bool

    # --- memory -------------------------------------------------------------------------------

    def empty(self, layout: Layout, X: Tensor, prior: Prior) -> Memory:
        """Return a memory of no observations, and of no weights for the functions yet.

        Args:
            layout: The functions.
            X: Inputs like those to come, ``n x d``, float64.
            prior: The hyperparameters.
        """
        like = Batch(X[:0], X.new_zeros(0, prior.num_outputs))
        replay = StreamReplay.empty(like, self.max_rows, self.schedule.seed)
        return Memory(replay, layout, self._no_weights(X, prior))

    def _no_weights(self, X: Tensor, prior: Prior) -> Progress:
        like = X.new_empty(0, dtype=self.arithmetic)
        outputs, measured = prior.num_outputs, prior.is_gaussian
        return Progress.start(ChevronPosterior.empty(outputs, self.columns, measured, like))

    @torch.no_grad()
    def filled(self, memory: Memory, X: Tensor, prior: Prior) -> Memory:
        """Give weights as in the prior to functions that have none. Cost O(p) for p of them, once.

        Args:
            memory: Of functions and observations.
            X: Inputs at which a first guess squares the functions, ``n x d``, float64.
            prior: The hyperparameters.
        """
        layout, size = memory.layout, memory.progress.posterior.size
        if layout.size == size:
            return memory
        first = self._first_weights(layout.since(size), X, float(memory.replay.count), prior)
        progress = memory.progress.grown(first)
        control = progress.control
        if control is not None:  # the new weights are 0: its values stay
            basis = layout.basis(control.basis.kernel, progress.precisions)
            progress = replace(progress, control=replace(control, basis=basis))
        return replace(memory, progress=progress)

    def _first_weights(self, layout: Layout, X: Tensor, count: float, prior: Prior) -> Progress:
        """Set means to 0 and scales to those of Proposition 1, or of the prior."""
        kernel, like = frozen(prior.kernel), X.new_empty(0, dtype=self.arithmetic)
        wide = torch.ones(prior.num_outputs, 1, dtype=torch.float64, device=X.device)
        precisions = wide.repeat(1, layout.size) if self.relevance else None
        basis = layout.basis(kernel, precisions)
        index = torch.arange(basis.size, device=X.device)
        scale = wide * basis.precision_diagonal(index).rsqrt()
        squares, noise = None, prior.inferred_noise
        if noise is not None:
            squares = wide * basis.mean_squares(X[:_FIRST_ROWS])
            scale = proposition_1(squares, basis.precision_diagonal(index), count, noise)
        coefficients = like.new_zeros(*scale.shape, 1 + self.columns)
        posterior = ChevronPosterior(
            coefficients, scale.log().to(like), None if squares is None else squares.to(like)
        )
        return Progress.start(posterior, None if precisions is None else precisions.to(like))

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
                "observation. Build it anew, or take a model whose memory subtracts (OSGPR, WISKI)."
            )
        after = memory.after(Batch(data.X, data.targets.mT))
        after = self.filled(replace(after, layout=after.layout.grown(data.X)), data.X, prior)
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
        """Refuse: weights that learned from different data cannot be added.

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
        return self.filled(self.empty(memory.layout, points, prior), points, prior)

    # --- the posterior, and the bound ---------------------------------------------------------

    def process(
        self,
        memory: Memory,
        cache: KeptProcess | None,
        prior: Prior,
        X: Tensor | None = None,
    ) -> tuple[PosteriorProcess, KeptProcess]:
        """Put the process together with a copy of the weights, in O(p), unless kept."""
        if cache is None or not prior.is_in(cache.state):
            cache = KeptProcess(prior.state(), self._process(memory, prior))
        return cache.process, cache

    @torch.no_grad()
    def _process(self, memory: Memory, prior: Prior) -> FunctionProcess:
        kernel = frozen(prior.kernel)
        process = self._weighted(memory, prior, kernel, prior.mean.clone())
        if process.basis.is_diagonal:
            return process
        noise = site_noise(prior.likelihood).double().clone().unsqueeze(-1)
        return replace(process, augmentation=Augmentation(kernel, prior.num_outputs, noise))

    def _weighted(
        self, memory: Memory, prior: Prior, kernel: Kernel, prior_mean: Tensor
    ) -> FunctionProcess:
        """Copy the weights; differentiable in the kernel and the prior mean, ``m``."""
        basis = memory.basis(kernel)
        return FunctionProcess(basis, self.moments(memory, prior, basis), prior_mean.unsqueeze(-1))

    @torch.no_grad()
    def moments(self, memory: Memory, prior: Prior, basis: SampledBasis) -> WeightMoments:
        """Return the distribution of all weights, a copy. Cost O(p)."""
        posterior = memory.progress.posterior
        index = torch.arange(posterior.size, device=posterior.coefficients.device)
        scale = _diagonal(memory, prior, basis, index)
        if scale is None:
            scale = posterior.log_scale.exp()
        scale = scale * (index >= posterior.columns)
        columns = posterior.dense_columns(index)
        return WeightMoments(columns[..., 0].clone(), columns[..., 1:].clone(), scale)

    def objective(
        self, memory: Memory, cache: KeptProcess | None, prior: Prior
    ) -> tuple[Tensor, KeptProcess | None]:
        """Return the bound at the weights as they are, for all data that are held. Cost O(n p)."""
        posterior, replay = memory.progress.posterior, memory.replay
        process = self._weighted(memory, prior, prior.kernel, prior.mean)
        index = torch.arange(posterior.size)
        measured = _diagonal(memory, prior, process.basis, index)
        apart = full_divergence(process.basis, posterior, measured)
        batches = replay.outcomes(prior, prior.likelihood)
        return full_bound(process, batches, replay.weight, apart), cache

    def estimate(self, memory: Memory, prior: Prior, generator: torch.Generator | None) -> Tensor:
        """Draw an unbiased estimate of the bound, ``m``, from the data and functions of a step.

        Raises:
            InputDataError: There are no data.
            ValueError: More data or functions for a step than there are.
        """
        generator = self._checked_generator(memory, generator)
        data, estimator = self.data(memory, prior, generator), self.estimator(memory, prior)
        evaluated = estimator.evaluated(estimator.draws(generator), data, learns=False)
        return estimator.value(evaluated, data, learns=False).double()

    def gradient_estimate(
        self, memory: Memory, prior: Prior, generator: torch.Generator | None
    ) -> tuple[Tensor, SampledGradient]:
        """Draw the bound, ``m``, and its gradient in the weights; errors as :meth:`estimate`."""
        generator = self._checked_generator(memory, generator)
        estimator = self.estimator(memory, prior)
        return estimator.sampled(self.data(memory, prior, generator), generator)

    def _checked_generator(
        self, memory: Memory, generator: torch.Generator | None
    ) -> torch.Generator:
        if memory.replay.count == 0:
            raise InputDataError("Expected data to draw from, got an empty stream.")
        self.check_sizes(memory)
        if generator is not None:
            return generator
        return torch.Generator().manual_seed(int(torch.randint(2**62, ())))

    def estimator(self, memory: Memory, prior: Prior) -> Estimator:
        """Return what estimates the bound and its gradient in the weights."""
        progress, hyper = memory.progress, prior.copied().requires_grad_(False)
        return Estimator(
            progress.posterior,
            progress.control,
            hyper,
            lambda hyper: memory.basis(hyper.covar_module),
            self.schedule.drawn(progress.posterior.size),
            _determinant(memory, prior, exact=True),
        )

    # --- what a step draws --------------------------------------------------------------------

    def check_sizes(self, memory: Memory) -> None:
        """Check that there are as many data and functions as a step draws.

        Raises:
            ValueError: There are fewer.
        """
        schedule = self.schedule
        for name, asked, there in (
            ("batch_size", schedule.batch_size, memory.replay.held),
            ("functions", schedule.functions, memory.progress.posterior.size),
        ):
            if asked is not None and asked > there:
                raise ValueError(
                    f"Expected {name}, drawn in a step, to be at most the {there} that there are, "
                    f"got {asked}."
                )

    def data(self, memory: Memory, prior: Prior, generator: torch.Generator) -> Minibatch:
        """Draw a minibatch."""
        replay = memory.replay
        rows = replay.in_units(replay.draw(self.schedule.rows(replay.held), generator), prior)
        X, targets = rows.X.to(self.arithmetic), rows.targets.to(self.arithmetic)
        return Minibatch(X, targets, float(replay.count))

    def _some_rows(self, memory: Memory, prior: Prior, most: int) -> Batch:
        """Draw rows to look at before there are steps, the same while they are held."""
        replay, generator = memory.replay, generator_at(self.schedule.seed, SUPPORT_PLACE)
        return replay.in_units(replay.draw(min(most, replay.held), generator), prior)

    # --- trainings ----------------------------------------------------------------------------

    def begun(self, memory: Memory, prior: Prior) -> Memory:
        """Learn hyperparameters by an exact process, and begin the weights anew, the first time.

        Args:
            memory: Of observations.
            prior: The hyperparameters, which change.
        """
        if memory.begun:
            return memory
        if self.schedule.initial_points > 0 and self.empirical_bayes:
            rows = self._some_rows(memory, prior, self.schedule.initial_points)
            learn_first_hyperparameters(prior.kernel, prior.mean_module, prior.likelihood, rows)
            progress = self._no_weights(rows.X, prior)
            memory = self.filled(replace(memory, progress=progress), rows.X, prior)
        return replace(memory, begun=True)

    @torch.no_grad()
    def supported(self, memory: Memory, prior: Prior) -> Memory:
        """Place support points of the control variate, if draws leave functions out.

        Anew when the kernel has moved, or they would be of ever less use. Cost O(s p) then for s
        points, unless the weights are zero.
        """
        progress, points = memory.progress, self.schedule.control_points
        wanted = points > 0 and prior.is_gaussian
        size = progress.posterior.size
        if not wanted or self.schedule.drawn(size) >= size:
            return replace(memory, progress=replace(progress, control=None))
        kernel, control = frozen(prior.kernel), progress.control
        if control is None or not is_same(state_of(kernel), state_of(control.basis.kernel)):
            rows = self._some_rows(memory, prior, SAMPLE * points)
            sample = rows.X.to(self.arithmetic), rows.targets.to(self.arithmetic)
            basis, count = memory.basis(kernel), memory.replay.count
            control = ControlPoints.of(basis, points, sample, count, progress.posterior)
        return replace(memory, progress=replace(progress, control=control))

    def learner(self, memory: Memory, prior: Prior, learns: bool, exact: bool) -> Steps:
        """Return what takes steps; it moves the weights in place.

        Args:
            memory: Where to begin.
            prior: The hyperparameters, of which steps move copies.
            learns: Whether hyperparameters are learned too.
            exact: Whether its bounds include ``log |S|`` where S is not diagonal.
        """
        hyper = prior.copied()
        learned = hyper.moving if learns else []
        return Steps(
            memory.progress,
            hyper if learns else hyper.requires_grad_(False),
            memory.layout,
            lambda generator: self.data(memory, prior, generator),
            memory.replay.count,
            self.schedule,
            learned,
            _determinant(memory, prior, exact),
        )


def fit(
    inference: QuadruplyStochasticInference,
    memory: Memory,
    prior: Prior,
    steps: int | None,
    seconds: float | None,
    progress: bool,
    keep: Callable[[Memory], None],
) -> Training:
    """Take steps from a memory; see :meth:`~bo_stream.QSGP.fit`, also for the errors.

    Args:
        inference: Of the model.
        memory: Where to begin; its weights are moved in place.
        prior: The hyperparameters, which change where they are learned.
        steps: Most steps to take.
        seconds: Begin no step after so many.
        progress: Whether to draw a bar on a terminal.
        keep: Takes the memory of the last good step, also where an error ends the training.
    """
    if memory.replay.count == 0:
        raise InputDataError("Expected data to fit, got an empty stream: call update first.")
    inference.check_sizes(memory)
    memory = inference.begun(memory, prior)
    keep(memory)
    memory = inference.supported(memory, prior)
    learner = inference.learner(memory, prior, inference.empirical_bayes, exact=True)
    try:
        return train(learner, steps, seconds, progress=progress)
    finally:
        prior.take_over(learner.hyper)
        keep(replace(memory, progress=replace(learner.progress, moments=learner.moments)))


def _diagonal(memory: Memory, prior: Prior, basis: SampledBasis, index: Tensor) -> Tensor | None:
    posterior, count = memory.progress.posterior, float(memory.replay.count)
    return measured_scale(posterior, basis, index, count, prior.likelihood)


@torch.no_grad()
def _determinant(memory: Memory, prior: Prior, exact: bool) -> Tensor | None:
    """Compute ``log |S|`` where S is not diagonal, or 0 for it."""
    basis = memory.basis(frozen(prior.kernel))
    if basis.is_diagonal or exact:
        return log_precision(basis)
    device = memory.progress.posterior.coefficients.device
    return torch.zeros(1, dtype=torch.float64, device=device)


def site_noise(likelihood: Likelihood) -> Tensor:
    """Return the noise variance of a Gaussian likelihood about as sharp as another, ``m`` or 1.

    Its own variance, that of a Laplace outcome, or one over the largest curvature, which is at
    f = 0: 1/4 for the logistic likelihood, 2/π for the probit. For counts it grows with the count;
    1 is that of a count of about five.
    """
    if isinstance(likelihood, GaussianLikelihood):
        return likelihood.noise.reshape(-1)
    if isinstance(likelihood, LaplaceLikelihood):
        return 2.0 * likelihood.noise.reshape(-1)
    curved = {LogisticLikelihood: 4.0, BernoulliLikelihood: 0.5 * math.pi}
    return curved.get(type(likelihood), 1.0) * torch.ones(1)
