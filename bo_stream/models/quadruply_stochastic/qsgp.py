"""Quadruply stochastic Gaussian processes and relevance vector machines."""

from __future__ import annotations

import math
import time
import warnings
from abc import ABC
from copy import deepcopy
from dataclasses import replace
from typing import Any, Self

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    PoissonLikelihood,
)
from gpytorch.means import Mean
from torch import Tensor
from torch.utils.data import Dataset

from bo_stream.bases.spectral import check_spectral
from bo_stream.likelihoods.binomial import BinomialLikelihood
from bo_stream.likelihoods.outcome_model import LogisticLikelihood, check_likelihood
from bo_stream.models.base import StreamingGP, keeps_tensors
from bo_stream.models.checks import check_instance
from bo_stream.models.construction import latent_kernel
from bo_stream.models.outcomes.likelihood import REAL, check_transform, latent_columns, outcomes_of
from bo_stream.models.quadruply_stochastic.inference import (
    SUPPORT_PLACE,
    QuadruplyStochasticInference,
)
from bo_stream.models.quadruply_stochastic.memory import (
    Chevron,
    FourierFeatures,
    InducingAtData,
    Layout,
    MeanField,
    QuadruplyStochasticMemory,
    Schedule,
)
from bo_stream.models.quadruply_stochastic.steps import SampledGradient
from bo_stream.models.stochastic.budget import Budget, judged, judgement_said
from bo_stream.models.stochastic.replay import build_from
from bo_stream.models.stochastic.training import Training, check_limits, train
from bo_stream.warnings import WideVarianceWarning, users_stack_level

LOG_CONCAVE = (
    GaussianLikelihood,
    LaplaceLikelihood,
    BernoulliLikelihood,
    LogisticLikelihood,
    PoissonLikelihood,
    BinomialLikelihood,
)
"""Likelihoods whose logarithm is concave in the function value. [Evans2020, theorem 3, H]"""

MOST_COVERAGE = 0.97
"""Coverage of 90 % intervals above which variances are too large.

Measured on powerplant (7,655 rows, 25 s): 0.994, 0.979, 0.941, 0.921 with 20,000, 5,000, 1,000 and
300 Fourier features, and negative log densities of 0.18, 0.10, 0.05, 0.04.
"""

LEAST_COVERED = 100
"""Rows whose coverage says so."""


class QuadruplyStochasticModel(StreamingGP, ABC):
    """A weighted sum of sampled functions that steps learn: what QSGP and QSRVM share."""

    _memory: QuadruplyStochasticMemory
    _inference: QuadruplyStochasticInference

    @classmethod
    def from_dataset(cls, dataset: Dataset[Any], **options: Any) -> Self:
        """Build a model that learns from a ``torch.utils.data.Dataset``, a minibatch at a time.

        It begins with a minibatch of it: transforms are of that, and so are functions at the data.
        Its n is the data set's length. It takes no updates.

        Args:
            dataset: Has a length; items are pairs of an input, ``d``, and an outcome, ``m``.
            options: The constructor's.

        Raises:
            InputDataError: It is empty, or its items are no pairs.
            UnsupportedError: It can only be iterated.
        """
        return build_from(cls, dataset, options, SUPPORT_PLACE)

    @keeps_tensors
    def fit(
        self, steps: int | None = None, seconds: float | None = None, progress: bool = True
    ) -> Training:
        """Learn weights, and hyperparameters where ``empirical_bayes``; another call goes on.

        A QSRVM learns precisions, too.

        The first call learns hyperparameters by an exact GP of ``initial_points`` observations, and
        begins the weights again for them. Each ends by raising the noise of real outcomes where
        predictions are more wrong than they say. After Ctrl-C the model is as it was at the
        last check. A ``ShortTrainingWarning`` says where it has not come far, and a
        ``WideVarianceWarning`` where there are more functions than the data determine.

        Args:
            steps: Most steps to take.
            seconds: Begin no step after so many, counted from the call; of both limits the first to
                be reached counts, of neither a default of steps.
            progress: Whether to draw a bar, where standard error is a terminal.

        Raises:
            InputDataError: There are no data.
            ModelFittingError: The bound diverged; the model is as it was when it was good.
            UnsupportedError: The model is conditioned on hypothetical data.
            Exception: A data set raises it, or gives items that cannot be learned from; first
                hyperparameters and steps before it stay, and another call goes on from there.
            ValueError: A limit is negative; more data or functions for a step than there are.
        """
        self._check_not_conditioned("fit")
        inference, memory, prior = self._inference, self._memory, self.prior
        memory.replay.check_not_empty()
        inference.check_sizes(memory)
        check_limits(steps, seconds)
        collective = memory.replay.collective
        budget, rows = Budget(seconds, collective), inference.judged_rows(memory, prior)
        starts = seconds is not None and not memory.begun
        scores = inference.scores(rows, memory, prior) if starts else None
        before, hyper = memory, prior.copied()
        memory = replace(memory, progress=memory.progress.clone())  # steps move it
        memory = inference.begun(memory, prior, budget)
        self._set_memory(memory)
        memory = inference.supported(memory, prior)
        learner = inference.learner(memory, prior, inference.empirical_bayes, exact=True)
        began, first = budget.began, learner.num_steps
        try:
            training = train(
                learner, steps, seconds, progress=progress, started=began, collective=collective
            )
        finally:
            prior.take_over(learner.hyper)
            memory = replace(memory, progress=replace(learner.progress, moments=learner.moments))
            self._set_memory(memory)
        ended, taken = time.monotonic(), range(first, learner.num_steps)
        free = rows.undrawn(memory.replay, learner.rows, inference.schedule.seed, taken)
        if len(taken) > 0:
            inference.raise_noise(rows, memory, prior)
        after = inference.scores(rows, memory, prior)
        training = judged(training, scores, after, free, ended)
        if not training.is_kept:
            prior.take_over(hyper)
            self._set_memory(before)
        wide = training.is_kept and (training.coverage or 0.0) > MOST_COVERAGE
        if wide and int(free.sum()) >= LEAST_COVERED:
            size = memory.progress.size
            fewer = "fewer functions"
            if isinstance(memory.layout.choice, FourierFeatures):
                fewer = f"basis=FourierFeatures({max(size // 8 * 2, 2)}), or even fewer"
            warnings.warn(
                f"{training.coverage:.0%} of outcomes are in their 90 % intervals: the data "
                f"determine fewer than {size:,} functions, of which a diagonal covariance leaves "
                "the variance too large. The mean is not the worse for it. For the density take "
                f"{fewer}, or DecoupledGP.",
                WideVarianceWarning,
                stacklevel=users_stack_level(),
            )
        return judgement_said(training, seconds)

    @property
    def num_steps(self) -> int:
        """Steps taken so far, by updates and fits."""
        return self._memory.progress.steps

    @torch.no_grad()
    def elbo(self) -> Tensor:
        """Compute the bound on the log marginal likelihood of all data, ``m``, without m if 1.

        Of all that are stored, in nats and in transformed units. Cost O(n p). Where S is not
        diagonal, and functions are more than ``DETERMINED``, it lacks ``½ log |S|``, a constant.
        """
        return self.log_marginal_likelihood()

    @torch.no_grad()
    def elbo_estimate(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw an unbiased estimate of :meth:`elbo`, from the data and functions of one step.

        For other likelihoods than the Gaussian it is on average below the bound, the less the more
        functions are drawn. [Evans2020, theorem 3]

        Args:
            generator: On the CPU; torch's own if omitted.

        Raises:
            InputDataError: There are no data.
            ValueError: More data or functions for a step than there are.
        """
        learner, generator = self._inference.estimator(self._memory, self.prior, generator)
        data = learner.data(generator)
        value = learner.value(learner.draw(data, generator, False), data, False).detach()
        return self._from_per_output(self._memory.replay.collective.sum(value).double())

    def elbo_gradient_estimate(
        self, generator: torch.Generator | None = None
    ) -> tuple[Tensor, SampledGradient]:
        """Draw unbiased estimates of :meth:`elbo`, ``m``, and of its gradient in the weights.

        The gradient is that of the functions drawn; of all others it is 0. Args and errors as
        :meth:`elbo_estimate`.
        """
        learner, generator = self._inference.estimator(self._memory, self.prior, generator)
        return learner.sampled(learner.data(generator), generator)

    def _build(
        self,
        schedule: Schedule,
        basis: FourierFeatures | InducingAtData,
        covariance: MeanField | Chevron | None,
        max_rows: int | None,
        empirical_bayes: bool,
        relevance: bool,
        data: tuple[Tensor, Tensor],
        likelihood: Likelihood | None,
        covar_module: Kernel | None,
        mean_module: Mean | None,
        outcome_transform: OutcomeTransform | _DefaultType | None,
        input_transform: InputTransform | None,
    ) -> None:
        """Build the model around its basis, and take the first steps on the data."""
        covariance = MeanField() if covariance is None else covariance
        check_instance("covariance", covariance, MeanField | Chevron, "MeanField()")
        inference = QuadruplyStochasticInference(
            schedule, covariance.columns, max_rows, empirical_bayes, relevance
        )
        train_X, train_Y = data
        most = basis.count if isinstance(basis, FourierFeatures) else basis.max_points
        if inference.columns > most:
            raise ValueError(
                f"Expected at most {most} columns of Chevron, got {inference.columns}."
            )
        if isinstance(train_X, Tensor) and train_X.ndim > 2:
            raise UnsupportedError(
                f"Expected train_X of shape `n x d`, got {tuple(train_X.shape)}: this model takes "
                "no batches. Build one for each batch element."
            )
        if not isinstance(outcome_transform, _DefaultType):
            check_transform(outcome_transform, likelihood)
        elif likelihood is not None and not isinstance(likelihood, REAL):
            outcome_transform = None
        self._inference = inference
        latent_Y = latent_columns(train_Y, likelihood)
        self._begin(train_X, latent_Y, None, outcome_transform)
        self._outcomes = outcomes_of(likelihood, self._outcomes.shift)
        inputs = self._first_inputs(train_X, input_transform)
        if covar_module is None and not inference.relevance:
            covar_module = latent_kernel(inputs.shape[-1], self._parameter_shape)
        self._set_modules(inputs.shape[-1], None, None, covar_module, mean_module)
        if likelihood is not None:
            check_likelihood(likelihood, self._parameter_shape)
            self.likelihood = deepcopy(likelihood)
        if isinstance(basis, FourierFeatures):
            check_spectral(self.covar_module)
        inputs = inputs.detach().double()
        layout = Layout(basis, inputs[:0], self.num_outputs)
        self._memory = inference.empty(layout, inputs, self.prior)
        self._standardize_first(train_X, latent_Y, None)
        inputs = self.coordinates(train_X).double()
        self._memory = inference.filled(self._memory, inputs, self.prior)
        if train_X.shape[-2] > 0:
            self._observe(train_X, train_Y, None, 1.0)


class QSGP(QuadruplyStochasticModel):
    """A weighted sum of very many functions, learned from a few of them and a few data a step.

    Weights have a normal posterior, whose bound and gradient are estimated without bias from a
    minibatch of data and two draws of functions (Evans and Nair, 2020), so that a step costs the
    same for 10⁴ functions as for 10⁷ and for 10³ observations as for 10⁶.

    - Memory: O(m p (k + 2)) for p functions, m outputs and k dense columns of the covariance's
      root, three times as much while it learns, and the observations to draw from: all of them, or
      a uniform sample of ``max_rows``, in which case n is still the number of all that came.
    - Update: ``update_steps`` steps, each O((ñ + n̄) m̃ (d + k)) for ñ data, n̄ control points and
      m̃ functions drawn, and one copy of the weights.
    - A fantasy: O(q p), by conditioning the posterior process.
    - Exact: the prior of ``InducingAtData`` at the data, and its posterior mean once converged;
      ``elbo``, and ``elbo_estimate`` on average, for a Gaussian likelihood.
    - Approximate: the kernel, by Fourier features; the covariance, diagonal (``MeanField``) or
      nearly (``Chevron``), which is off where weights are correlated; the weights, until
      they have converged. For other likelihoods the estimates are of a lower bound of the bound,
      and the mean is best for the covariance as it is: of more functions than the data determine
      ``MeanField`` leaves the process nearly the prior's variance, and draws the mean off, which no
      further steps mend, but ``Chevron`` of as many columns as functions does. Observations cannot
      be taken out or forgotten, nor models merged.
    - Learned: weights in ``update`` and ``fit``; hyperparameters in ``fit``, first by an exact GP
      of some of the data, then along the bound.
    - When: 10⁵ observations and more of a rough function in several inputs, where hundreds of
      inducing points are too few. For a good variance, or for few data, OSGPR.

    Example:
        >>> model = QSGP(train_X, train_Y, basis=FourierFeatures(100_000))
        >>> model.fit(seconds=600)
        >>> model.update(new_X, new_Y).posterior(test_X).mean
    """

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        likelihood: Likelihood | None = None,
        covar_module: Kernel | None = None,
        mean_module: Mean | None = None,
        outcome_transform: OutcomeTransform | _DefaultType | None = DEFAULT,
        input_transform: InputTransform | None = None,
        basis: FourierFeatures | InducingAtData | None = None,
        covariance: MeanField | Chevron | None = None,
        batch_size: int | None = None,
        functions: int | None = None,
        control_points: int = 300,
        learning_rate: float = 0.1,
        empirical_bayes: bool | None = None,
        hyper_rate: float = 5e-3,
        freeze_steps: int = 500,
        half_life: float = math.inf,
        update_steps: int = 10,
        initial_points: int = 1000,
        max_rows: int | None = None,
        arithmetic: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> None:
        """Build the model, and take the first steps on the first observations.

        Args:
            train_X: ``n x d``; n may be 0, which gives the prior.
            train_Y: ``n x m``, in the likelihood's support.
            likelihood: A ``GaussianLikelihood`` (default: BoTorch's), or one whose logarithm is
                concave: ``LaplaceLikelihood``, ``LogisticLikelihood``, ``BernoulliLikelihood``,
                ``PoissonLikelihood``, :class:`~bo_stream.BinomialLikelihood` without overdispersion
                (train_Y as for OSVGP). It is copied.
            covar_module: Of batch shape ``m`` (none if that is 1), or none. Default: BoTorch's
                RBF kernel with an output scale. For Fourier features RBF or Matérn.
            mean_module: ``ConstantMean`` (default) or ``ZeroMean``.
            outcome_transform: ``Standardize``, by the first outcomes (train_Y) and for good, by
                none in a model built empty (default for real outcomes), or None (for others).
            input_transform: Any without parameters to learn; with them (``Warp``) see OSVGP.
            basis: ``FourierFeatures`` (default) or ``InducingAtData``.
            covariance: Of the weights: ``MeanField`` (default) or ``Chevron``.
            batch_size: Observations ñ of a step; default: 500, or as many as are stored.
            functions: Functions m̃ of a draw; default: 20,000, or all. A step with all of them is
                less noisy for its cost; draw fewer only where there are too many.
            control_points: Support points n̄ of the control variate, of which there is need where
                not all functions are drawn; 0: none.
            learning_rate: Of AdaGrad on the weights.
            empirical_bayes: Whether ``fit`` learns hyperparameters; default: where S is diagonal.
            hyper_rate: Of Adam on them; 0: they stay where the exact GP has put them.
            freeze_steps: Steps before they move; the noise may be raised at the end of each fit.
            half_life: Steps in which both rates fall to half.
            update_steps: Steps of an update, hyperparameters fixed.
            initial_points: Observations of the exact GP before the first step of ``fit``; 0: none.
            max_rows: Most observations to hold; None: all.
            arithmetic: Of steps, and of what is stored of weights; posteriors are summed in
                float64. Single precision takes half the memory and about half the time.
            seed: Of minibatches and draws.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit together.
            InputDataError: Wrong dtypes or devices, NaN, infinities; outcomes that the likelihood
                cannot have.
            UnsupportedError: A kernel, likelihood, transform or batch that the model has no way to
                deal with.
            ValueError: An option is out of range.
        """
        basis = FourierFeatures() if basis is None else basis
        check_instance("basis", basis, FourierFeatures | InducingAtData, "FourierFeatures(1000)")
        diagonal = isinstance(basis, FourierFeatures)
        if empirical_bayes and not diagonal:
            raise UnsupportedError(
                "empirical_bayes needs a diagonal prior precision, but that of InducingAtData is "
                "the kernel's matrix, whose determinant cannot be estimated from a few functions. "
                "Take basis=FourierFeatures(), or QSRVM, or fit the hyperparameters of an exact GP "
                "on some of the data and give its covar_module and likelihood."
            )
        learns = diagonal if empirical_bayes is None else empirical_bayes
        dispersed = isinstance(likelihood, BinomialLikelihood) and (
            likelihood.overdispersion or likelihood.outliers > 0.0
        )
        if dispersed or not (likelihood is None or isinstance(likelihood, LOG_CONCAVE)):
            names = ", ".join(one.__name__ for one in LOG_CONCAVE)
            kind, remedy = type(likelihood).__name__, "For outliers take LaplaceLikelihood"
            if dispersed:
                kind = f"an overdispersed or contaminated {kind}"
                remedy = (
                    "Take BinomialLikelihood() without overdispersion and outliers, or DecoupledGP"
                )
            raise UnsupportedError(
                f"Expected a likelihood whose logarithm is concave ({names}), got {kind}: "
                "with a few functions drawn, Jensen's inequality would not make the estimate a "
                f"lower bound. {remedy}; for any likelihood OSVGP."
            )
        sizes = batch_size, functions, control_points, update_steps, initial_points, freeze_steps
        rates = learning_rate, hyper_rate, half_life
        schedule = Schedule(*sizes, *rates, arithmetic, seed)
        options = schedule, basis, covariance, max_rows, learns, False
        modules = likelihood, covar_module, mean_module, outcome_transform, input_transform
        self._build(*options, (train_X, train_Y), *modules)


# --- qSRVM ---------------------------------------------------------------------------------------


RELEVANT = 1e4
"""Precisions below it are finite. [Evans2020, section I.3]"""


class QSRVM(QuadruplyStochasticModel):
    """A weighted sum of kernel functions at the data, of which most weights become zero.

    Each weight has a prior precision of its own, which is learned; where it goes to infinity the
    function is no part of the model (Tipping, 2001). Steps are those of :class:`~bo_stream.QSGP`
    (Evans and Nair, 2020, section I.3), and each gives the functions drawn their best precisions
    for what the weights are.

    - Memory, update and fantasy: as of :class:`~bo_stream.QSGP` with ``InducingAtData``, and one
      number more for each function.
    - Exact: the bound's optimum in each precision and its weight's variance, the mean fixed.
    - Approximate: as there. The prior is degenerate: far from all relevance vectors the variance is
      that of the noise alone.
    - When: a sparse model of very many data is wanted, not a good variance.

    Example:
        >>> model = QSRVM(train_X, train_Y)
        >>> model.fit(steps=2000)
        >>> model.relevance_vectors
    """

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        likelihood: GaussianLikelihood | None = None,
        covar_module: Kernel | None = None,
        mean_module: Mean | None = None,
        outcome_transform: OutcomeTransform | _DefaultType | None = DEFAULT,
        input_transform: InputTransform | None = None,
        max_points: int = 100_000,
        covariance: MeanField | Chevron | None = None,
        batch_size: int | None = None,
        functions: int | None = None,
        control_points: int = 300,
        learning_rate: float = 0.1,
        empirical_bayes: bool = True,
        hyper_rate: float = 5e-3,
        freeze_steps: int = 200,
        half_life: float = math.inf,
        update_steps: int = 10,
        initial_points: int = 1000,
        max_rows: int | None = None,
        arithmetic: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> None:
        """Build the model, and take the first steps on the first observations.

        Arguments and errors are those of :class:`~bo_stream.QSGP`, but that the likelihood is
        Gaussian, the kernel any of gpytorch's (default: BoTorch's RBF kernel), and the basis that
        of at most ``max_points`` data. ``empirical_bayes`` says whether ``fit`` learns the kernel,
        the mean and the noise too; precisions are learned in any case, once ``freeze_steps`` are
        taken.
        """
        if likelihood is not None and not isinstance(likelihood, GaussianLikelihood):
            raise UnsupportedError(
                "Expected likelihood to be a GaussianLikelihood, got "
                f"{type(likelihood).__name__}: precisions are learned for that alone. For other "
                "likelihoods take QSGP."
            )
        sizes = batch_size, functions, control_points, update_steps, initial_points, freeze_steps
        rates = learning_rate, hyper_rate, half_life
        schedule = Schedule(*sizes, *rates, arithmetic, seed)
        options = schedule, InducingAtData(max_points), covariance, max_rows, empirical_bayes, True
        modules = likelihood, covar_module, mean_module, outcome_transform, input_transform
        self._build(*options, (train_X, train_Y), *modules)

    @property
    def precisions(self) -> Tensor:
        """S of the functions, ``p``, or ``m x p`` for m > 1 outputs."""
        precisions = self._memory.progress.precisions
        assert precisions is not None  # noqa: S101
        own = precisions.to(self.train_targets, copy=True)
        return own.squeeze(0) if self._num_outputs == 1 else own

    @property
    def relevance_vectors(self) -> Tensor:
        """Points, in transformed inputs, whose function any output has use for, ``k x d``."""
        relevant = (self.precisions < RELEVANT).reshape(self._num_outputs, -1).any(0)
        return self._memory.layout.points[relevant].to(self.train_targets)
