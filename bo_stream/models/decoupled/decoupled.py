"""Decoupled Gaussian processes: many basis functions for the mean, a few for the covariance."""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal, Self, get_args

import torch
from botorch.exceptions.errors import ModelFittingError, UnsupportedError
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import Mean
from torch import Tensor
from torch.utils.data import Dataset

from bo_stream.bases.inducing import check_factors
from bo_stream.errors import check_one_of, check_whole
from bo_stream.likelihoods.outcome_model import check_likelihood
from bo_stream.models.base import StreamingGP, keeps_tensors
from bo_stream.models.construction import latent_kernel
from bo_stream.models.decoupled.collapse import CollapsedBound, Growth, maximise_collapsed
from bo_stream.models.decoupled.inference import DecoupledInference, Parametrization
from bo_stream.models.decoupled.learner import DecoupledLearner, DecoupledSchedule
from bo_stream.models.decoupled.posterior import DecoupledMemory
from bo_stream.models.inference import Hyperparameters
from bo_stream.models.outcomes.likelihood import check_transform, latent_columns, outcomes_of
from bo_stream.models.stochastic.budget import Budget, JudgedRows, Scores, judged, judgement_said
from bo_stream.models.stochastic.replay import build_from
from bo_stream.models.stochastic.start import guess
from bo_stream.models.stochastic.training import Training, check_limits, train

Preconditioner = Literal["block", "jacobi"]

_Before = tuple[DecoupledMemory, Hyperparameters, JudgedRows, Scores | None]
"""A model before a training: with rows that judge it, and how well it predicted them, if it can go
back."""


class DecoupledGP(StreamingGP):
    """A variational Gaussian process with thousands of basis functions for its mean.

    The mean is ``k(x, α) a`` and the covariance ``k − k_xβ (B⁻¹ + K_β)⁻¹ k_βx``, in two bases α and
    β of their own (Cheng and Boots, 2017): a step of learning costs O(M_α) in the mean's functions,
    where every model with one basis pays O(M³). Learned by steps on minibatches, hyperparameters
    included; :meth:`fit` takes many, :meth:`update` a few.

    - Memory: O(M_α d + S M_β), and the observations that steps draw from: all of them, O(n d), or a
      uniform sample of ``max_rows``. The bound is of all n that ever came, either way.
    - Update: O(k) for k observations and ``update_steps`` steps, each O((b + c + S) M_α d + (b + c
      + S) S M_β + b c² + c³) for a minibatch of b, c columns of K_α and S values that the
      covariance's functions combine, and O(S³) every tenth, whatever n.
    - A fantasy: O(q M_α d + q S M_β) and one q x q factor.
    - Exact: conditioning the posterior process, so fantasies; the bound and its gradients are
      estimated without bias.
    - Approximate: the posterior is what steps have found so far, or, by :meth:`optimize_posterior`,
      the best of its functions. The variance is that of M_β functions: with few, too large, except
      that close to a single point of β of a direct or hybrid parametrization it can be too small.
    - Learned: everything by :meth:`fit`; of real outcomes better still by :meth:`fit_collapsed`
      after it, from all data at once. ``fit_gpytorch_mll`` can move the hyperparameters alone, on
      the exact bound at the present variational parameters, at the cost of all data a step.
    - When: from some 10⁴ observations, of a function too rough for a few hundred inducing points.
      For smooth ones OSGPR or OSVGP, whose updates are exact.

    ``posterior`` is that of the latent process; :meth:`predictive` and :meth:`log_predictive` are
    of outcomes under any likelihood.

    Example:
        >>> model = DecoupledGP(train_X, train_Y, num_mean=2048, num_covar=128)
        >>> model.fit(steps=2000)
        >>> model.fit_collapsed(evaluations=10)
        >>> model.update(new_X, new_Y).posterior(test_X).mean
    """

    _memory: DecoupledMemory
    _inference: DecoupledInference

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        likelihood: Likelihood | None = None,
        covar_module: Kernel | None = None,
        mean_module: Mean | None = None,
        outcome_transform: OutcomeTransform | None = None,
        input_transform: InputTransform | None = None,
        num_mean: int = 2048,
        num_covar: int = 128,
        num_added: int = 128,
        batch_size: int | None = None,
        num_columns: int | None = None,
        num_span: int | None = None,
        learning_rate: float = 0.1,
        natural_rate: float = 0.3,
        mean_rate: float = 0.15,
        update_steps: int = 1,
        max_rows: int | None = None,
        initial_points: int | None = None,
        parametrization: Parametrization = "spectral",
        preconditioner: Preconditioner | None = "block",
        lengthscale_factors: bool = False,
        learn_mean_points: bool = False,
        fantasy_steps: int = 1,
        seed: int = 0,
    ) -> None:
        """Build the model and take the first outcomes, as :meth:`update` does.

        Hyperparameters that are not given begin by the median trick on the first outcomes: the
        median distance of inputs, the mean and variance of outcomes, the latter as noise too.

        Args:
            train_X: ``batch_shape x n x d``; n may be 0, which gives the prior.
            train_Y: ``batch_shape x n x m``, in the likelihood's support.
            likelihood: As for :class:`~bo_stream.OSVGP`; learned. Copied.
            covar_module: Any of gpytorch's kernels, of batch shape ``batch_shape x m`` (without m
                if that is 1) or none. Default: BoTorch's squared-exponential one with an output
                scale.
            mean_module: ``ConstantMean`` (default) or ``ZeroMean``.
            outcome_transform: None, or ``Standardize`` for a likelihood of real outcomes: by the
                first ones (train_Y), for good; by none in a model built empty.
            input_transform: Any without parameters to learn; with them (``Warp``) see OSVGP.
            num_mean: Most functions M_α of the mean.
            num_covar: Most functions M_β of the covariance.
            num_added: Most functions N_Δ that a minibatch adds to each until then.
            batch_size: Observations b of a minibatch; default 1024, or as many as are stored.
            num_columns: Most columns c of K_α that a step visits; default 512, or all.
            num_span: Functions S of the mean that the covariance's combine, if ``parametrization``
                is "spectral"; default ``4 num_covar``, or all.
            learning_rate: Of Adam; a step t has ``1 / (1 + 0.1 √t)`` of it.
            natural_rate: Of natural-gradient steps of β's weights, in (0, 1], decaying alike.
            mean_rate: Of Newton steps of the mean's coefficients, likewise.
            update_steps: Steps that an update takes.
            max_rows: Most observations to hold, a uniform sample of all; None: all.
            initial_points: Observations of an exact GP that hyperparameters are learned by before
                the first step of :meth:`fit`, output scale and noise then as suits ``num_covar``
                functions; 0: the median trick's stay. Default: 1000, or 0 with
                ``lengthscale_factors``, whose first steps undo what so good a start knows.
            parametrization: ``"direct"``: ``B = L Lᵀ``, L by Adam [Cheng2017, eq. 7 to 10].
                ``"hybrid"``: the values at β have a mean and covariance of their own [Cheng2017,
                A.3], which follow natural gradients, and α models what they leave.
                ``"spectral"``: like it, but that β's functions are the kernel's leading
                eigenfunctions in the span of S of the mean's, computed again every ten steps: of
                all that M_β functions can, they leave the least variance. Their points stay.
            preconditioner: Of a. ``"block"``: Newton steps in the block of the sampled columns.
                ``"jacobi"``: Adam on ``diag(K_α) a`` and ``diag(K_β) L`` [Cheng2017, A.1]. None:
                Adam on a.
            lengthscale_factors: Whether inducing functions have lengthscale factors to learn
                [Cheng2017, eq. 19]; for squared-exponential kernels.
            learn_mean_points: Whether α moves by Adam too; β does where it has points of its own.
            fantasy_steps: As for :class:`~bo_stream.OSVGP`.
            seed: Of minibatches and columns.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit together.
            InputDataError: Wrong dtypes or devices, NaN, infinities; outcomes that the likelihood
                cannot have.
            UnsupportedError: A mean, likelihood, transform or kernel that the model cannot have.
            ValueError: An option is out of range.
        """
        check_transform(outcome_transform, likelihood)
        growth = Growth.checked(num_mean, num_covar, num_added, num_span)
        schedule = DecoupledSchedule(
            batch_size,
            max(min(512, num_mean), 1) if num_columns is None else num_columns,
            learning_rate,
            natural_rate,
            mean_rate if preconditioner == "block" else None,
            learn_mean_points,
            seed,
        )
        if initial_points is None:
            initial_points = 0 if lengthscale_factors else 1000
        latent_Y = latent_columns(train_Y, likelihood)
        self._begin(train_X, latent_Y, None, outcome_transform)
        check_one_of("preconditioner", preconditioner, (*get_args(Preconditioner), None))
        self._inference = DecoupledInference(
            growth,
            schedule,
            parametrization,
            preconditioner == "jacobi",
            lengthscale_factors,
            update_steps,
            max_rows,
            initial_points,
        )
        self._outcomes = outcomes_of(likelihood, self._outcomes.shift, fantasy_steps=fantasy_steps)
        inputs = self._first_inputs(train_X, input_transform)
        kernel = covar_module
        if kernel is None:
            kernel = latent_kernel(inputs.shape[-1], self._parameter_shape)
        self._set_modules(inputs.shape[-1], None, None, kernel, mean_module)
        if likelihood is not None:
            check_likelihood(likelihood, self._parameter_shape)
            self.likelihood = deepcopy(likelihood)
        if lengthscale_factors:
            check_factors(self.covar_module)
        self._memory = self._inference.empty(inputs, self.prior)
        self._standardize_first(train_X, latent_Y, None)
        guess(
            self.covar_module if covar_module is None else None,
            self.mean_module if mean_module is None else None,
            self.likelihood if likelihood is None else None,
            inputs.double(),
            self._standardized(latent_Y.double()),
            real=isinstance(self.likelihood, GaussianLikelihood),
        )
        if train_X.shape[-2] > 0:
            self._observe(train_X, train_Y, None, 1.0)

    @classmethod
    def from_dataset(cls, dataset: Dataset[Any], **options: Any) -> Self:
        """Build a model that learns from a ``torch.utils.data.Dataset``, a minibatch at a time.

        It begins with a minibatch of it; its n is the data set's length. It takes no updates.

        Args:
            dataset: Has a length; items are pairs of an input, ``d``, and an outcome, ``m``.
            options: The constructor's.

        Raises:
            InputDataError: It is empty, or its items are no pairs.
            UnsupportedError: It can only be iterated.
        """
        return build_from(cls, dataset, options, 2**31 - 1)

    @keeps_tensors
    def fit(
        self,
        steps: int | None = None,
        seconds: float | None = None,
        *,
        settle: bool = False,
        progress: bool = True,
    ) -> Training:
        """Take steps of learning, in place; another call goes on where the last one ended.

        Each step draws a minibatch, adds basis functions from it up to the caps, and moves
        everything once. [Cheng2017, algorithm 1] Ctrl-C leaves a model that can be used.

        The first call, of a model that has taken fewer than 100 steps, learns hyperparameters by an
        exact GP of ``initial_points`` observations, and begins again with them. With ``seconds``,
        it goes back to what the model was where that then predicts rows that no step has drawn
        worse than before the call, by their log predictive density. With ``steps`` alone it does
        not: many calls of a step each would never leave the start.

        Args:
            steps: Most steps; where neither limit is given 2000.
            seconds: Begin no step after so many, counted from the call; the search for first
                hyperparameters takes at most a third of them.
            settle: Whether all rates fall linearly to zero over the last quarter of the limit, so
                that the model ends without the noise of minibatches and of Adam, which near an
                optimum takes a far step now and then. For the last call of a training: of two that
                settle the first one has learned a little less than steps at full rates would have.
            progress: Whether to draw a bar on a terminal.

        Returns:
            What was done, with the trace of the bound, and what the time went into. A
            ``ShortTrainingWarning`` says where it has not come far.

        Raises:
            InputDataError: There are no observations.
            ModelFittingError: It diverged; the model is as it was when it was still good.
            UnsupportedError: The model is conditioned on hypothetical data.
            Exception: A data set raises it, or gives items that cannot be learned from; first
                hyperparameters and steps before it stay, and another call goes on from there.
            ValueError: A limit is negative; fewer observations are stored than ``batch_size``.
        """
        self._check_not_conditioned("fit")
        inference, prior, replay = self._inference, self.prior, self._memory.replay
        replay.check_not_empty()
        check_limits(steps, seconds)
        budget = Budget(seconds, replay.collective)
        before = self._begun(budget, progress)
        sizes = inference.growth, inference.schedule
        learner = DecoupledLearner(self._memory, prior, *sizes, growing=True)
        try:
            try:
                training = train(
                    learner,
                    steps,
                    seconds,
                    progress=progress,
                    started=budget.began,
                    collective=replay.collective,
                    before_step=learner.settle if settle else None,
                )
            finally:
                prior.take_over(learner.hyper)
                self._set_memory(learner.memory)
        except ModelFittingError:
            self._judged(Training(0, 0.0, ()), before)
            raise
        return judgement_said(self._judged(training, before), seconds)

    def _begun(self, budget: Budget, progress: bool) -> _Before:
        """Begin a training; return memory and hyperparameters before it, rows and their scores."""
        inference, memory, prior = self._inference, self._memory, self.prior
        rows = JudgedRows.of(memory.replay, prior, inference.schedule.seed)
        starts = budget.seconds is not None and not memory.begun
        scores = inference.scores(rows, memory, prior) if starts else None
        hyper = prior.copied()
        self._set_memory(inference.begun(memory, prior, budget, progress))
        return memory, hyper, rows, scores

    def _judged(self, training: Training, before: _Before) -> Training:
        """Predict rows that no step has drawn; go back where the model has become worse."""
        inference, memory, ended = self._inference, self._memory, time.monotonic()
        former, hyper, rows, scores = before
        size, seed = inference.schedule.size(memory.replay.held), inference.schedule.seed
        free = rows.undrawn(memory.replay, size, seed, range(former.steps, memory.steps))
        after = inference.scores(rows, memory, self.prior)
        training = judged(training, scores, after, free, ended)
        if not training.is_kept:
            self.prior.take_over(hyper)
            self._set_memory(former)
        return training

    @keeps_tensors
    def fit_collapsed(
        self, evaluations: int = 20, seconds: float | None = None, *, progress: bool = True
    ) -> Training:
        """Learn hyperparameters from all stored data at once, with the best posterior, in place.

        L-BFGS on the bound with the best mean and covariance of the functions given the
        hyperparameters, which is a closed form [Titsias2009, in two bases]. Steps of :meth:`fit`
        see hyperparameters beside a mean that lags behind them; here it does not. The functions of
        the mean first grow to ``num_mean``, if steps have not taken them there. With a direct
        parametrization the variance's stays.

        An evaluation costs little more than :meth:`optimize_posterior`; some ten after :meth:`fit`
        are most of what can be had. Ctrl-C leaves the model as it was when L-BFGS began.

        Args:
            evaluations: Most values of the bound.
            seconds: Begin no evaluation after so many, counted from the call.
            progress: Whether to draw a bar on a terminal.

        Returns:
            What was done, where a step is an evaluation, with the bound, and log priors, at each.

        Raises:
            InputDataError: There are no observations.
            ModelFittingError: The bound is not finite with the present hyperparameters.
            UnsupportedError: The model is conditioned on hypothetical data, or its likelihood is
                not Gaussian.
            ValueError: No evaluations, or negative seconds.
        """
        self._check_not_conditioned("fit_collapsed")
        if not isinstance(self.likelihood, GaussianLikelihood):
            raise UnsupportedError(
                "Expected a GaussianLikelihood, got "
                f"{type(self.likelihood).__name__}: the best posterior of others has no closed "
                "form. Call fit, then optimize_posterior."
            )
        inference, prior, replay = self._inference, self.prior, self._memory.replay
        replay.check_not_empty()
        check_whole("evaluations", evaluations)
        check_limits(None, seconds)
        budget = Budget(seconds, replay.collective)
        before = self._begun(budget, progress)
        if budget.left() == 0.0:
            training = Training(0, time.monotonic() - budget.began, ())
        else:
            sizes = inference.growth, inference.schedule
            learner = DecoupledLearner(self._memory, prior, *sizes, growing=False)
            learner.grow_to_the_caps()
            self._set_memory(learner.memory)
            hyper, functions = prior.copied(), self._memory.posterior
            bound = CollapsedBound(functions, replay, prior, inference.growth.covariance)
            posterior, training = maximise_collapsed(
                bound, hyper, evaluations, seconds, budget.began, progress
            )
            prior.take_over(hyper)
            self._set_memory(replace(self._memory, posterior=posterior, hyper_moments=None))
        return judgement_said(self._judged(training, before), seconds)

    @keeps_tensors
    def optimize_posterior(self, rounds: int = 1, *, progress: bool = True) -> Self:
        """Let the mean and the variance be the best for all data that are stored, in place.

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
            UnsupportedError: The model is conditioned on hypothetical data.
            ValueError: No rounds.
        """
        self._check_not_conditioned("optimize_posterior")
        self._memory.replay.check_not_empty()
        for _ in range(check_whole("rounds", rounds)):
            best = self._inference.optimized(self._memory, self.prior, progress)
            self._set_memory(replace(self._memory, posterior=best))
        return self

    @property
    def num_steps(self) -> int:
        """Steps taken so far, by updates and fits."""
        return self._memory.steps

    @torch.no_grad()
    def elbo(self) -> Tensor:
        """Compute the bound on the log marginal likelihood, ``batch_shape x m``, without m if 1.

        Exact for the observations that are stored; of a sample its unbiased scaling to all n. Cost
        O(n (M_α d + M_β²) + M_α² d + M_β³). [Cheng2017, eq. 9 and 10]
        """
        return self.log_marginal_likelihood()

    def elbo_estimate(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw an unbiased estimate of :meth:`elbo`, at the cost of a step.

        Args:
            generator: Of minibatch and columns, on the CPU; torch's own if omitted.

        Raises:
            InputDataError: There are no observations.
            ValueError: Fewer are stored than ``batch_size``.
        """
        replay = self._memory.replay
        replay.check_not_empty()
        if generator is None:
            seed = replay.collective.agreed(torch.randint(2**31, ()))
            generator = torch.Generator().manual_seed(int(seed))
        estimate = self._inference.estimate(self._memory, self.prior, generator)
        return self._from_per_output(estimate)
