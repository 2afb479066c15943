"""O-SGPR: streaming sparse Gaussian process regression with a collapsed bound."""

from __future__ import annotations

from copy import copy
from functools import partial
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
from bo_stream.bases.inducing import InducingBasis
from bo_stream.models.caches import Solved
from bo_stream.models.construction import warn_of_scaling
from bo_stream.models.inducing.inducing_gp import MAX_POINTS, InducingGP
from bo_stream.models.inducing.memory import Missed, WindowedMemory
from bo_stream.models.inducing.points import (
    check_points,
    check_points_fit,
    checked_cap,
    moved_points,
)
from bo_stream.models.input_transforms import split_transform
from bo_stream.models.memory import Observations, WhitenedMemory
from bo_stream.models.objective import NoiseGroup
from bo_stream.tensors import is_in
from bo_stream.weights import log_marginal_likelihood, solve

WINDOW = 512
"""Rows that are held beside the statistics."""


class OSGPR(InducingGP[WindowedMemory]):
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
    - A fantasy: O(q M) cross-covariances and one q x q factor; it conditions the process, residual
      included, and so knows what is supposed far from every inducing point.
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
    - When: more inputs than a grid can take (WISKI: four), and no projection wanted.

    Example:
        >>> model = OSGPR(train_X, train_Y)
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> model.update(new_X, new_Y).posterior(test_X).mean
    """

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
            train_X: ``batch_shape x n x d``; n may be 0, which gives the prior.
            train_Y: ``batch_shape x n x m``.
            train_Yvar: Known noise variances, ``batch_shape x n x m``; NaN in a row: unknown,
                learned.
            likelihood: A ``GaussianLikelihood``; default: BoTorch's with a log-normal prior, or
                fixed noise where every variance is known.
            covar_module: Any of gpytorch's kernels, of batch shape ``batch_shape x m`` (without m
                if that is 1) or none. Default: BoTorch's own default.
            mean_module: ``ConstantMean`` (default) or ``ZeroMean``.
            outcome_transform: As for :class:`WISKI`; default ``Standardize``.
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
        input_transform, learned = split_transform(input_transform)
        inputs = self._first_inputs(train_X, input_transform)
        self._set_modules(inputs.shape[-1], train_Yvar, likelihood, covar_module, mean_module)
        inputs = self._learn_transform(learned, inputs)
        self.window = checked_number("window", window, least=0)
        self._begin_points(inducing_points, allocator, max_points, train_X)
        self._standardize_first(train_X, train_Y, train_Yvar)
        if train_X.shape[-2] > 0:
            self._observe(train_X, train_Y, train_Yvar, 1.0)
        warn_of_scaling(inputs, self._standardized(train_Y.double()), covar_module is not None)

    def _nothing_in(self, basis: InducingBasis) -> WindowedMemory:
        return WindowedMemory.empty(basis, self._batch_shape, self._num_outputs, self.window)

    @torch.no_grad()
    def _take(self, data: Observations) -> None:
        memory, basis = self._current()
        allocator = copy(self._allocator)
        if allocator is not None and data.sign > 0:
            seen = (data.X,) if self._memory.is_in(basis) else (memory.recent.X, data.X)
            memory, basis = self._placed(allocator, memory, basis, torch.cat(seen, -2))
        features = basis.features(data.X).expand(*self._output_batch, -1, -1)
        new = memory.after(data, basis, features)
        if data.sign < 0.0:
            self._check_solvable(new.whole)
        solved = self._solved_after(data, basis, features)
        self._remember(new, basis, allocator)
        self._solved = solved
        self._refresh_fixed_noise()

    @torch.no_grad()
    def _finish_refit(self) -> None:
        """Place the points anew for the new kernel."""
        memory, basis = self._current()
        allocator = copy(self._allocator)
        moved = not self._memory.is_in(basis)
        if moved and allocator is not None and len(memory.recent) > 0:
            memory, basis = self._placed(allocator, memory, basis, memory.recent.X)
        if moved:
            self._remember(memory, basis, allocator)
            self._warn_of_coarse_points()

    def _solved_after(
        self, data: Observations, basis: InducingBasis, features: Tensor
    ) -> Solved | None:
        """The posterior after a batch, where it was solved in the same basis."""
        solved = self._solved
        if solved is None or not is_in(self, solved.state):
            return None
        if not solved.can_take(data, basis):
            return None
        outcomes, noise = self._prior.standardized(data)
        return solved.after(features, outcomes, noise)

    def optimize_points(self, maxiter: int = 100) -> Self:
        """Move the inducing points to a local maximum of the online bound, in place.

        What it knows of the data are the statistics and the rows of the window: points do not move
        to where the memory knows nothing. An iteration costs O(M³ + window M²).

        Args:
            maxiter: Most iterations of L-BFGS; 0 changes nothing.

        Raises:
            UnsupportedError: The model supposes data.
        """
        self._check_not_supposed("optimize_points")
        memory, basis = self._current()
        if maxiter > 0 and basis.rank > 0:
            with torch.enable_grad():
                Z = moved_points(partial(self._bound_in_all, memory, basis), basis.Z, maxiter)
            self.place_points(Z)
        return self

    def bound_at(self, Z: Tensor) -> Tensor:
        """The online bound with the inducing points at Z, ``batch_shape x m``.

        Differentiable in Z and in the hyperparameters; with the present ones and Z where the points
        are it is that of all observations as statistics, hence at most :meth:`elbo`, in which the
        window's rows have their full covariance. Cost O(M³ + window M²).

        Args:
            Z: ``M x d``, in transformed inputs, float64.
        """
        self._check_not_supposed("bound_at")
        return self._bound_at(self._memory, self.covar_module, Z)

    @torch.no_grad()
    def place_points(self, Z: Tensor) -> Self:
        """Put the inducing points elsewhere, in place: the window's rows are expressed exactly.

        Args:
            Z: ``M x d``, in transformed inputs, at most ``max_points``.

        Raises:
            BotorchTensorDimensionError: Another shape.
            InputDataError: NaN or infinity.
            UnsupportedError: The model supposes data.
            ValueError: Too many points.
        """
        self._check_not_supposed("place_points")
        check_points("Z", Z, self.inducing_points.shape[-1])
        checked_cap(self.max_points, Z)
        check_points_fit(len(Z), self._output_batch.numel())
        moved = self._basis_at(Z.detach().double())
        self._remember(self._memory.in_basis(moved), moved, self._allocator)
        return self

    def _bound_in_all(self, memory: WindowedMemory, basis: InducingBasis, Z: Tensor) -> Tensor:
        """The bound with other points, summed over outputs, differentiable in them alone."""
        return self._bound_at(memory, basis.kernel, Z).sum()

    def _bound_at(self, memory: WindowedMemory, kernel: Kernel, Z: Tensor) -> Tensor:
        moved = memory.in_basis(InducingBasis.live(kernel, Z, self._num_outputs)).whole
        evidence = self._prior.evidence_of(self._groups(moved.statistics))
        posterior = solve(evidence)
        value = log_marginal_likelihood(evidence, posterior.mean, posterior.log_precision())
        return value - 0.5 * self._missed_variance(moved.missed)

    def _groups(self, memory: WhitenedMemory) -> list[NoiseGroup]:
        return self._prior.noise_groups(memory)

    def _missed_variance(self, missed: Missed) -> Tensor:
        total = missed.known * self.outcome_scale().square()
        level = self._prior.common_noise
        return total if level is None else total + missed.learned / level
