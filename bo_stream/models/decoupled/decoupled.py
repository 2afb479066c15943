"""Decoupled Gaussian processes: many basis functions for the mean, a few for the covariance."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any, Self

import torch
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import Mean
from torch import Tensor
from torch.utils.data import Dataset

from bo_stream.bases.functions import check_factors
from bo_stream.likelihoods.outcome_model import check_likelihood
from bo_stream.models.decoupled.body import DecoupledRefinement
from bo_stream.models.decoupled.choice import DecoupledOptions, Parametrization, Preconditioner
from bo_stream.models.decoupled.growth import Growth
from bo_stream.models.decoupled.learner import Schedule
from bo_stream.models.decoupled.start import set_kernel, set_outcomes
from bo_stream.models.latent_choice import check_transform, latent_kernel
from bo_stream.models.outcomes.likelihood import LikelihoodOutcomes
from bo_stream.models.stochastic.replay import DatasetReplay, generator_at


class DecoupledGP(DecoupledRefinement):
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
      the best of its functions. The variance is that of M_β functions: with few, too large, never
      too small.
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
                first ones (train_Y), for good.
            input_transform: Any without parameters to learn; with them (``Warp``) see OSVGP.
            num_mean: Most functions M_α of the mean.
            num_covar: Most functions M_β of the covariance.
            num_added: Most functions N_Δ that a minibatch adds to each until then.
            batch_size: Observations b of a minibatch; default 1024, or as many as are held.
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
            parametrization: ``"direct"``: ``B = L Lᵀ``, L by Adam [eq. 7 to 10]. ``"hybrid"``: the
                values at β have a mean and covariance of their own [appendix A.3], which follow
                natural gradients, and α models what they leave. ``"spectral"``: like it, but that
                β's functions are the kernel's leading eigenfunctions in the span of S of the
                mean's, sought anew every ten steps: of all that M_β functions can, they leave the
                least variance. Their points stay.
            preconditioner: Of a. ``"block"``: Newton steps in the block of the sampled columns.
                ``"jacobi"``: Adam on ``diag(K_α) a`` and ``diag(K_β) L`` [A.1]. None: Adam on a.
            lengthscale_factors: Whether inducing functions have lengthscale factors to learn
                [eq. 19]; for squared-exponential kernels.
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
        newton = mean_rate if preconditioner == "block" else None
        columns = max(min(512, num_mean), 1) if num_columns is None else num_columns
        if initial_points is None:
            initial_points = 0 if lengthscale_factors else 1000
        schedule = Schedule(batch_size, columns, learning_rate, natural_rate, newton, seed)
        self._begin(train_X, train_Y, None, outcome_transform)
        self._options = DecoupledOptions(
            growth,
            schedule,
            parametrization,
            preconditioner,
            lengthscale_factors,
            learn_mean_points,
            update_steps,
            max_rows,
            initial_points,
        ).checked()
        self._units = LikelihoodOutcomes.of(self._units.shift, fantasy_steps=fantasy_steps)
        inputs = self._first_inputs(train_X, input_transform)
        given = (likelihood is not None, covar_module is not None, mean_module is not None)
        if covar_module is None:
            covar_module = latent_kernel(inputs.shape[-1], self._parameter_shape)
        self._set_modules(inputs.shape[-1], None, None, covar_module, mean_module)
        if likelihood is not None:
            check_likelihood(likelihood, self._parameter_shape)
            self.likelihood = deepcopy(likelihood)
        if lengthscale_factors:
            check_factors(self.covar_module)
        self._solved = None
        self._set_memory(self._nothing(inputs))
        self._standardize_first(train_X, train_Y, None)
        self._check_observations(train_X, train_Y, None)
        self._guess(inputs, train_Y, *given)
        if train_X.shape[-2] > 0:
            self._observe(train_X, train_Y, None, 1.0)

    @classmethod
    def from_dataset(cls, dataset: Dataset[Any], **options: Any) -> Self:
        """A model that learns from a ``torch.utils.data.Dataset``, read a minibatch at a time.

        It begins with a minibatch of it; its n is the data set's length. It takes no updates.

        Args:
            dataset: Has a length; items are pairs of an input, ``d``, and an outcome, ``m``.
            options: The constructor's.

        Raises:
            InputDataError: It is empty, or its items are no pairs.
            UnsupportedError: It can only be iterated.
        """
        replay = DatasetReplay.of(dataset)
        size = min(options.get("batch_size") or 1024, replay.held)
        first = replay.draw(size, generator_at(options.get("seed", 0), -1 % 2**31))
        model = cls(first.X, first.Y, **options)
        model._set_memory(replace(model._memory, replay=replay))
        return model

    @torch.no_grad()
    def _guess(self, inputs: Tensor, Y: Tensor, likelihood: bool, kernel: bool, mean: bool) -> None:
        """Let hyperparameters begin by the first outcomes, but those that were given."""
        targets = self._standardized(Y.double())
        real = isinstance(self.likelihood, GaussianLikelihood)
        if not kernel:
            set_kernel(self.covar_module, inputs.double(), targets, real)
        set_outcomes(
            None if likelihood else self.likelihood,
            None if mean or not real else self.mean_module,
            targets,
        )
