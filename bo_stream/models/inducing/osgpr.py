"""OSGPR and OSVGP: streaming sparse Gaussian processes, by a collapsed bound and by sites."""

from __future__ import annotations

from abc import ABC
from copy import deepcopy
from dataclasses import replace
from typing import Self

import torch
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import Mean
from torch import Tensor

from bo_stream.allocation.allocator import Allocator
from bo_stream.allocation.oips import Novelty
from bo_stream.errors import check_whole
from bo_stream.likelihoods.binomial import BinomialLikelihood
from bo_stream.likelihoods.outcome_model import check_likelihood
from bo_stream.models.base import StreamingGP, keeps_tensors
from bo_stream.models.checks import check_type
from bo_stream.models.construction import latent_kernel, split_transform
from bo_stream.models.inducing.inference import (
    MAX_POINTS,
    CollapsedInference,
    check_allocator,
    check_points,
    check_points_fit,
    empty_memory,
)
from bo_stream.models.inducing.memory import InducingMemory
from bo_stream.models.inducing.sites import SiteInference
from bo_stream.models.inference import Hyperparameters, InferenceOption
from bo_stream.models.outcomes.likelihood import WINDOW as SITE_WINDOW
from bo_stream.models.outcomes.likelihood import (
    LikelihoodOutcomes,
    check_transform,
    latent_columns,
    outcomes_of,
)


class InducingModel(StreamingGP, ABC):
    """A streaming Gaussian process whose memory is at M inducing points Z, ``M x d``. Abstract."""

    _memory: InducingMemory

    @property
    def inducing_points(self) -> Tensor:
        """Inducing points Z, ``M x d``, in transformed inputs: a copy."""
        return self._memory.values.Z.to(self.train_targets, copy=True)

    @property
    def allocator(self) -> Allocator | None:
        """Allocator that places the points as the stream goes by; None: they stay. May be set."""
        return self._memory.allocator

    @allocator.setter
    def allocator(self, allocator: Allocator | None) -> None:
        check_allocator(allocator)
        self._memory = replace(self._memory, allocator=deepcopy(allocator))

    def elbo(self) -> Tensor:
        """Compute the online bound on the log marginal likelihood, ``batch_shape x m``, no m if 1.

        Of :class:`OSGPR` the rows of the window enter with their full covariance: never more than
        the exact log marginal likelihood where Z and hyperparameters have stayed. [Bui2017, eq. 7]
        Of :class:`OSVGP` it is that of the last batch times the sites of earlier ones. [Bui2017,
        eq. 5] With ``beta`` below 1 it is divided by it: no bound, and not to be compared between
        values of ``beta``.
        """
        return self.log_marginal_likelihood()

    def _first_memory(
        self,
        inducing_points: Tensor | None,
        allocator: Allocator | _DefaultType | None,
        max_points: int,
        X: Tensor,
    ) -> InducingMemory:
        """Move to the device of X, and make an empty memory; arguments as of :class:`OSGPR`."""
        self.to(X)
        default = Novelty(check_whole("max_points", max_points))
        if isinstance(allocator, _DefaultType):
            allocator = default if inducing_points is None else None
        check_allocator(allocator)
        if inducing_points is not None:
            check_points("inducing_points", inducing_points, X.shape[-1], max_points)
            check_type("inducing_points", inducing_points, X)
        elif allocator is None:
            raise ValueError(
                "Expected inducing_points or an allocator, got neither: nothing could be learned."
            )
        Z, prior = X.new_zeros(0, self._process_dim), self.prior
        if inducing_points is not None and len(inducing_points) > 0:
            check_points_fit(len(inducing_points), prior.shape.numel())
            Z = self.coordinates(inducing_points.detach().clone())
        return empty_memory(Z, prior, deepcopy(allocator))


# --- OSGPR: a collapsed bound --------------------------------------------------------------------


WINDOW = 512
"""Rows that are stored alongside the statistics."""


class OSGPR(InducingModel):
    """Streaming sparse regression at inducing points, for any kernel and any number of inputs.

    The memory are the data's sufficient statistics in the process's values at M inducing points Z.
    A move of Z or of the hyperparameters is a congruence of them: what was observed acts as
    observations of the process at the old points (Bui, Nguyen and Turner, 2017, collapsed).

    - Memory: O(M²), Z, and the ``window`` latest observations, O(window M). Others are not kept,
      but for the latest inputs in ``train_inputs``.
    - Update: O(n M²) for n observations, and O((M + window) M) for each that becomes an inducing
      point; O(M³) when points were dropped or a hyperparameter has changed since the last one. The
      next posterior solves once in O(M³).
    - A step of a refit: O((M + window)³).
    - A fantasy: O(q M) cross-covariances and one q x q factor. It conditions the process with its
      residual covariance, so that outcomes far from every inducing point count in full.
    - Exact: with Z and hyperparameters fixed, any stream equals batch SGPR (Titsias, 2009) on all
      data, and updates, merges and retractions are exact; with Z the observed inputs, as by default
      up to ``max_points`` distinct ones, it is the exact GP. Noise level, mean and standardisation
      of outcomes may change exactly at any time.
    - Approximate: what came before the window, after Z or the kernel has moved; of all data, what
      the points cannot express.
    - Learned: hyperparameters by the online bound, in which the window's rows enter exactly: with
      no more data than the window it is the exact log marginal likelihood. Points and
      hyperparameters together, from a window of thousands of rows: ``bo_stream.learn_points``. A
      move forgets some of what came before the window, so learn well while the window holds all.
    - ``merge``: equal to one stream of both models' data where the inducing points are equal. Other
      points join by this model's allocator (none: they do not), and what they carry beyond is lost,
      with a :class:`ProjectionWarning`.
    - When: more inputs than a grid can take (WISKI: four), and no projection wanted.

    Example:
        >>> model = OSGPR(train_X, train_Y)
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> model.update(new_X, new_Y).posterior(test_X).mean
    """

    _memory: InducingMemory
    _inference: CollapsedInference
    max_points = InferenceOption[int]()
    window = InferenceOption[int]()

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        likelihood: _GaussianLikelihoodBase | None = None,
        covar_module: Kernel | None = None,
        mean_module: Mean | None = None,
        outcome_transform: OutcomeTransform | _DefaultType | None = DEFAULT,
        input_transform: InputTransform | None = None,
        inducing_points: Tensor | None = None,
        allocator: Allocator | _DefaultType | None = DEFAULT,
        max_points: int = MAX_POINTS,
        window: int = WINDOW,
    ) -> None:
        """Build the model and put the first observations into memory.

        Args:
            train_X: First inputs, ``batch_shape x n x d``; n may be 0.
            train_Y: First outcomes, ``batch_shape x n x m``.
            train_Yvar: Known noise variances, shaped as train_Y; NaN in a row: unknown.
            likelihood: As for :class:`~bo_stream.WISKI`.
            covar_module: Any of gpytorch's kernels, of batch shape ``batch_shape x m`` (without m
                if that is 1) or none. Default: BoTorch's own default.
            mean_module: ``ConstantMean`` (default) or ``ZeroMean``.
            outcome_transform: As for :class:`~bo_stream.WISKI`; default ``Standardize``.
            input_transform: Any. One with parameters to learn (``Warp``) becomes a part of the
                kernel, ``covar_module.input_transform``, and is learned with it.
            inducing_points: The first Z, ``M x d``, in units of train_X, shared by batch elements
                and outputs. Default: what the allocator makes of train_X.
            allocator: Where Z goes as the stream goes by; None: it stays as given. Default:
                ``Novelty(max_points)``, or None where inducing points are given: every input is an
                inducing point that the others do not explain to rounding, which is the exact GP,
                until there are ``max_points``; then they are thinned by greedy variance. It is
                copied. Where its points leave more of the process unknown at the observations than
                the noise's variance, in mean, the model says so once, after a fit or in the stream
                (``CoarsePointsWarning``).
            max_points: Cap on M. Where another allocator wants more, a new point enters in place of
                the one that the others explain best, if it is itself explained less than half as
                well.
            window: How many of the latest observations to hold as rows beside the statistics. They
                are expressed exactly when points or hyperparameters move; hyperparameters are
                learned from their full covariance, and points placed again among them. 0: none.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit together.
            InputDataError: Wrong dtypes or devices, NaN, infinities, negative variances.
            UnsupportedError: A mean, likelihood or transform that a stream cannot represent.
            ValueError: ``max_points`` or ``window`` is out of range, there are more points than
                ``max_points`` or than memory holds, or neither inducing points nor an allocator.
        """
        self._begin(train_X, train_Y, train_Yvar, outcome_transform)
        inputs = self._set_inputs_and_modules(
            train_X, train_Yvar, input_transform, likelihood, covar_module, mean_module
        )
        window = check_whole("window", window, least=0)
        self._memory = self._first_memory(inducing_points, allocator, max_points, train_X)
        self._inference = CollapsedInference(max_points, window)
        self._take_first(train_X, train_Y, train_Yvar, inputs, covar_module is not None)

    @keeps_tensors
    def optimize_points(self, maxiter: int = 100) -> Self:
        """Move the inducing points to a local maximum of :meth:`bound_at`, in place.

        An iteration costs as much as one evaluation.

        Args:
            maxiter: Most iterations of L-BFGS; 0 changes nothing.

        Raises:
            UnsupportedError: The model is conditioned on hypothetical observations.
        """
        self._check_not_conditioned("optimize_points")
        if maxiter > 0 and len(self._memory.values.Z) > 0:
            memory, cache, prior = self._memory, self._cache, self.prior
            self.place_points(self._inference.optimized_points(memory, cache, prior, maxiter))
        return self

    def bound_at(self, Z: Tensor) -> Tensor:
        """Compute the online bound with the inducing points at Z, ``batch_shape x m``.

        Differentiable in Z and in the hyperparameters. The window's rows count as statistics: at
        the present points it is at most :meth:`elbo`. Cost O(M³ + window M²).

        Args:
            Z: ``M x d``, in transformed inputs, float64.
        """
        self._check_not_conditioned("bound_at")
        return self._inference.bound_at(self._memory, self.prior, self.covar_module, Z)

    @keeps_tensors
    @torch.no_grad()
    def place_points(self, Z: Tensor) -> Self:
        """Put the inducing points elsewhere, in place: the window's rows are expressed exactly.

        Args:
            Z: ``M x d``, in transformed inputs, at most ``max_points``.

        Raises:
            BotorchTensorDimensionError: Another shape.
            InputDataError: NaN or infinity.
            UnsupportedError: The model is conditioned on hypothetical observations.
            ValueError: Too many points.
        """
        self._check_not_conditioned("place_points")
        check_points("Z", Z, self._memory.values.Z.shape[-1], self.max_points)
        Z = Z.detach().double()
        self._memory, self._cache = self._inference.at_points(self._memory, self.prior, Z)
        return self


# --- OSVGP: sites of any likelihood --------------------------------------------------------------


class OSVGP(InducingModel):
    """Streaming sparse inference for outcomes that are not normal: labels, counts, outliers.

    An outcome enters the memory as a Gaussian *site* at its function value, found by natural
    gradients of the uncollapsed online bound (Bui, Nguyen and Turner, 2017); from then on it acts
    as a Gaussian observation, as in :class:`~bo_stream.OSGPR`, which this model equals where the
    likelihood is Gaussian.

    - Memory: O(M²) for M inducing points Z, and Z; twice that, and the latest outcomes, with a
      ``window`` of them. Else data are not kept, but for the latest inputs in ``train_inputs``.
    - Update: O(n M² + M³) for n outcomes, those of the window included, and O(k³ + n k²) for each
      natural-gradient step, up to ``natural_steps``, with k the lesser of n and M. A small one
      begins from the posterior that the one before has left, in O(n M²).
    - A fantasy: as of OSGPR, after one evaluation of the likelihood at the hypothetical outcomes.
    - Exact: with a Gaussian likelihood all that is exact in OSGPR. With any, the optimum of the
      bound for the batch, if the likelihood is log-concave (Bernoulli, binomial, Laplace, Poisson).
    - Approximate: the posterior is normal; sites of batches before the window stay as they were
      found, so that a stream differs a little from its batch: after 400 counts of at most 5
      examined by up to 0.8 of a posterior's standard deviation, with the window of 300 that counts
      have by default by 0.003; ``elbo`` bounds the likelihood of the last batch times those sites,
      not of all data; a site of negative precision (Student-t, at outliers) is set to zero. What
      is approximate in OSGPR.
    - Learned: kernel and mean from memory alone, by
      ``fit_gpytorch_mll(VariationalELBO(model.likelihood, model, num_data))``, whose ``num_data``
      does not matter: sites fixed, less a penalty of means that leave the place where their site
      approximates the likelihood; kernel, mean and the likelihood's parameters by ``hyper_steps``
      steps of Adam on the online bound in each update, in which a prior of the likelihood's
      parameters counts by the batch's share of all outcomes. A fit leaves these alone, for they
      need the outcomes, which are gone.
    - ``merge``: as of OSGPR, for models whose outcomes are standardised alike.
    - When: labels, counts, heavy tails, in any number of inputs. For Gaussian noise OSGPR.

    ``posterior`` is that of the latent process, as BoTorch's ``SingleTaskVariationalGP`` has it;
    :meth:`predictive` and :meth:`log_predictive` are of outcomes.

    Example:
        >>> model = OSVGP(train_X, labels, BernoulliLikelihood(), hyper_steps=100)
        >>> model.hyper_steps = 2
        >>> model.update(new_X, new_labels).predictive(test_X).mean
    """

    _memory: InducingMemory
    _inference: SiteInference
    _outcomes: LikelihoodOutcomes
    max_points = InferenceOption[int]()
    beta = InferenceOption[float](fixed=True)
    natural_steps = InferenceOption[int]()
    natural_rate = InferenceOption[float]()
    hyper_steps = InferenceOption[int]()
    learning_rate = InferenceOption[float]()
    window = InferenceOption[int]()

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        likelihood: Likelihood | None = None,
        covar_module: Kernel | None = None,
        mean_module: Mean | None = None,
        outcome_transform: OutcomeTransform | None = None,
        input_transform: InputTransform | None = None,
        inducing_points: Tensor | None = None,
        allocator: Allocator | _DefaultType | None = DEFAULT,
        max_points: int = MAX_POINTS,
        beta: float = 1.0,
        natural_steps: int = 20,
        natural_rate: float = 1.0,
        hyper_steps: int = 0,
        learning_rate: float = 0.02,
        fantasy_steps: int = 1,
        window: int | None = None,
    ) -> None:
        """Build the model and put the first outcomes into memory.

        Args:
            train_X: First inputs, ``batch_shape x n x d``; n may be 0.
            train_Y: ``batch_shape x n x m``, in the likelihood's support: labels 0 and 1 for a
                ``BernoulliLikelihood``, whole numbers from 0 for a ``PoissonLikelihood``; for a
                :class:`~bo_stream.BinomialLikelihood` two columns, positives and examined, of one
                output, the logit of prevalence.
            likelihood: A ``GaussianLikelihood``, or any of gpytorch's of one function value an
                outcome, of batch shape ``batch_shape x m`` (without m if that is 1) or none.
                Default: BoTorch's Gaussian one. It is copied, and the copy's parameters require no
                gradients; ``hyper_steps`` learn those that require them here.
            covar_module: As for :class:`~bo_stream.OSGPR`. Default: BoTorch's, with an output
                scale, for nothing else scales the process.
            mean_module: ``ConstantMean`` (default) or ``ZeroMean``.
            outcome_transform: None: the likelihood is of outcomes as they are. ``Standardize``, for
                a likelihood of real outcomes: by the first ones (train_Y), for good; by none in a
                model built empty.
            input_transform: As for :class:`~bo_stream.OSGPR`.
            inducing_points: As for :class:`~bo_stream.OSGPR`.
            allocator: As for :class:`~bo_stream.OSGPR`.
            max_points: As for :class:`~bo_stream.OSGPR`.
            beta: Weight of the divergences in the bound, in (0, 1]; 1 is Bui's. Less counts every
                outcome ``1 / beta`` times (so ``elbo`` is no bound then): all variances are too
                small for it, and a stream of single points forgets its prior sooner (Stanton et
                al., 2021, appendix B).
            natural_steps: Most natural-gradient steps on a batch; fewer where it has converged.
            natural_rate: Of a step, in (0, 1]; halved where one would lower the bound.
            hyper_steps: Steps of Adam in an update, on the likelihood's parameters and on those of
                kernel and mean that require gradients then; 0: they stay.
            learning_rate: Of those.
            fantasy_steps: Natural-gradient steps on hypothetical outcomes. One is within a few
                hundredths of a standard deviation of the exact posterior where the process has one
                of about 1, and rough where nothing is known of a process of large scale; three are
                enough there.
            window: How many of the latest outcomes are stored, whose sites are found again at each
                update, and which can be retracted. Default: 300 of a ``BinomialLikelihood``, whose
                rows can say little each, so that many errors add up; 0 of any other. Without
                effect on a Gaussian likelihood.

        Raises:
            InputDataError: Outcomes that the likelihood cannot have; and all errors that
                :class:`~bo_stream.OSGPR` raises.
        """
        check_transform(outcome_transform, likelihood)
        fantasy_steps = check_whole("fantasy_steps", fantasy_steps)
        if window is None:
            window = SITE_WINDOW if isinstance(likelihood, BinomialLikelihood) else 0
        latent_Y = latent_columns(train_Y, likelihood)
        self._begin(train_X, latent_Y, None, outcome_transform)
        self._outcomes = outcomes_of(likelihood, self._outcomes.shift, beta, fantasy_steps)
        input_transform, learned = split_transform(input_transform)
        inputs = self._first_inputs(train_X, input_transform)
        if covar_module is None:
            covar_module = latent_kernel(inputs.shape[-1], self._parameter_shape)
        self._set_modules(inputs.shape[-1], None, None, covar_module, mean_module)
        self._learn_transform(learned, inputs)
        if likelihood is not None:
            check_likelihood(likelihood, self._parameter_shape)
            self.likelihood = deepcopy(likelihood)
        fixed = Hyperparameters.fixed_of(self.likelihood)
        self.likelihood.requires_grad_(False)
        self._memory = self._first_memory(inducing_points, allocator, max_points, train_X)
        self._inference = SiteInference(
            max_points,
            beta,
            natural_steps,
            natural_rate,
            hyper_steps,
            learning_rate,
            fixed,
            window,
        )
        self._standardize_first(train_X, latent_Y, None)
        if train_X.shape[-2] > 0:
            self._observe(train_X, train_Y, None, 1.0)

    @property
    def fantasy_steps(self) -> int:
        """Natural-gradient steps on hypothetical outcomes."""
        return self._outcomes.fantasy_steps
