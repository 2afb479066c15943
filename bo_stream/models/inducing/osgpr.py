"""O-SGPR: streaming sparse Gaussian process regression with a collapsed bound."""

from __future__ import annotations

from typing import Self

import torch
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import Mean
from torch import Tensor

from bo_stream.allocation.allocator import Allocator, checked_number
from bo_stream.models.inducing.inducing_model import InducingModel
from bo_stream.models.inducing.inference import (
    MAX_POINTS,
    CollapsedInference,
    check_points,
)
from bo_stream.models.inducing.memory import InducingMemory
from bo_stream.models.inference import InferenceOption

WINDOW = 512
"""Rows that are held beside the statistics."""


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
                ``Novelty(max_points)``, or None where inducing points are given: every distinct
                input is an inducing point, which is the exact GP, until there are ``max_points``;
                then they are thinned by greedy variance. It is copied. Where its points leave more
                of the process unknown at the observations than the noise's variance, in mean, the
                model says so once, after a fit or in the stream (``CoarsePointsWarning``).
            max_points: Cap on M. Where another allocator wants more, a new point enters in place of
                the one that the others explain best, if it is itself explained less than half as
                well.
            window: How many of the latest observations to hold as rows beside the statistics. They
                are expressed exactly when points or hyperparameters move; hyperparameters are
                learned from their full covariance, and points placed anew among them. 0: none.

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
        window = checked_number("window", window, least=0)
        self._memory = self._first_memory(inducing_points, allocator, max_points, train_X)
        self._inference = CollapsedInference(max_points, window)
        self._take_first(train_X, train_Y, train_Yvar, inputs, covar_module is not None)

    def elbo(self) -> Tensor:
        """Compute the online bound on the log marginal likelihood, ``batch_shape x m``, no m if 1.

        The rows of the window enter with their full covariance. Never more than the exact log
        marginal likelihood where Z and hyperparameters have stayed. [Bui2017, eq. 7]
        """
        return self.log_marginal_likelihood()

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
