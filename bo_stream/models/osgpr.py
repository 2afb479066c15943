"""O-SGPR: streaming sparse Gaussian process regression with a collapsed bound."""

from __future__ import annotations

import warnings
from copy import copy
from typing import Self

import torch
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import Mean
from torch import Tensor

from bo_stream.allocation.allocator import Allocator
from bo_stream.allocation.cap import capped
from bo_stream.allocation.oips import OIPS
from bo_stream.bases.inducing import InducingBasis
from bo_stream.models.caches import Solved
from bo_stream.models.compatibility import check_mergeable
from bo_stream.models.construction import warn_of_scaling
from bo_stream.models.independent_points import basis_of_independent, log_basis
from bo_stream.models.inducing_choice import checked_allocation, checked_cap, first_points
from bo_stream.models.inducing_memory import InducingMemory, Missed
from bo_stream.models.inducing_prior import prior_of_values
from bo_stream.models.marginal_likelihood import combine, subspace_log_marginal_likelihood
from bo_stream.models.memory import Observations
from bo_stream.models.point_search import moved_points
from bo_stream.models.projection_warning import ProjectionWarning
from bo_stream.models.remembering_gp import RememberingGP, shifted_targets
from bo_stream.models.validation import check_finite
from bo_stream.models.warning_level import users_stack_level
from bo_stream.models.windowed_memory import WindowedMemory
from bo_stream.module_state import State, is_same, state_of
from bo_stream.process import PosteriorProcess, WeightSpaceProcess
from bo_stream.weights import log_marginal_likelihood, solve

MAX_POINTS = 512
WINDOW = 512


class OSGPR(RememberingGP):
    """Streaming sparse regression at inducing points, for any kernel and any number of inputs.

    The memory are the data's sufficient statistics in the process's values at M inducing points Z.
    A move of Z or of the hyperparameters is a congruence of them: what was observed acts as
    observations of the process at the old points (Bui, Nguyen and Turner, 2017, collapsed).

    - Memory: O(M²), Z, and the ``window`` latest observations. Others are not kept.
    - Update: O(n M²) for n observations, O(M³) when Z or a hyperparameter has changed since the
      last one; the next posterior solves once in O(M³).
    - A step of a refit: O((M + window)³).
    - A fantasy: O(q M) cross-covariances and one q x q factor; it conditions the process, residual
      included, and so knows what is supposed far from every inducing point.
    - Exact: with Z and hyperparameters fixed, any stream equals batch SGPR (Titsias, 2009) on all
      data, and updates, merges and retractions are exact; with Z the observed inputs it is the
      exact GP. Noise level, mean and standardisation of outcomes may change exactly at any time.
    - Approximate: what came before the window, after Z or the kernel has moved; of all data, what
      the points cannot express.
    - Learned: hyperparameters by the online bound, in which the window's rows enter exactly: with
      no more data than the window it is the exact log marginal likelihood.
    - When: more inputs than a grid can take (WISKI: four), and no projection wanted.

    Example:
        >>> model = OSGPR(train_X, train_Y)
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> model.update(new_X, new_Y).posterior(test_X).mean
    """

    _memory: WindowedMemory

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
            input_transform: Any without parameters to learn.
            inducing_points: The first Z, ``M x d``, in units of train_X, shared by batch elements
                and outputs. Default: what the allocator makes of train_X.
            allocator: Where Z goes as the stream goes by; None: it stays as given. Default:
                ``OIPS(0.8)``, or None where inducing points are given. It is copied.
            max_points: Cap on M. Once it binds, a new point enters in place of the one that the
                others explain best, if it is itself explained less than half as well.
            window: How many of the latest observations to hold as rows beside the statistics. They
                are expressed exactly when points or hyperparameters move; hyperparameters are
                learned from their full covariance, and points placed anew among them. 0: none.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit together.
            InputDataError: Wrong dtypes or devices, NaN, infinities, negative variances.
            UnsupportedError: A mean, likelihood or transform that a stream cannot represent.
            ValueError: ``max_points`` is out of range, fewer than the points given, or there are
                neither inducing points nor an allocator.
        """
        self._begin(train_X, train_Y, train_Yvar, outcome_transform)
        inputs = self._first_inputs(train_X, input_transform)
        self._set_modules(inputs.shape[-1], train_Yvar, likelihood, covar_module, mean_module)
        Z, self._allocator = first_points(inducing_points, allocator, OIPS(0.8), train_X)
        self.max_points = checked_cap(max_points, Z)
        self._solved: Solved | None = None
        self._present: tuple[State, WindowedMemory, InducingBasis] | None = None
        Z = self.coordinates(Z).to(torch.float64) if len(Z) > 0 else Z.to(torch.float64)
        basis = self._basis_at(Z)
        self._memory = self._nothing_in(basis, window)
        log_basis(self, basis)
        self._standardize_first(train_X, train_Y, train_Yvar)
        if train_X.shape[-2] > 0:
            self._observe(train_X, train_Y, train_Yvar, 1.0)
        warn_of_scaling(inputs, self._standardized(train_Y.double()), covar_module is not None)

    @property
    def _output_batch(self) -> torch.Size:
        return torch.Size((*self._batch_shape, self._num_outputs))

    def _projected(self, inputs: Tensor) -> Tensor:
        return inputs

    def _nothing_in(self, basis: InducingBasis, window: int) -> WindowedMemory:
        return WindowedMemory.empty(basis, self._batch_shape, self._num_outputs, window)

    @property
    def inducing_points(self) -> Tensor:
        """Z, ``M x d``, in transformed inputs."""
        return self._memory.whole.values.Z.to(self.train_targets)

    @torch.no_grad()
    def _basis_at(self, Z: Tensor) -> InducingBasis:
        return basis_of_independent(self.covar_module, Z, self._num_outputs)

    @torch.no_grad()
    def _current(self) -> tuple[WindowedMemory, InducingBasis]:
        """The memory expressed with the present kernel, and its basis. Kept until either moves."""
        state = state_of(self.covar_module)
        if self._present is None or not is_same(state, self._present[0]):
            basis = self._basis_at(self._memory.whole.values.Z)
            log_basis(self, basis)
            self._present = (state, self._memory.in_basis(basis), basis)
        return self._present[1:]

    def process(self, X: Tensor | None = None) -> PosteriorProcess:
        """The posterior as a process; see :class:`StreamingGP`. Solved once, then kept."""
        if X is not None:
            check_finite("X", X)
        if self._supposed is not None:
            return self._supposed
        state = state_of(self)
        if self._solved is None or not is_same(state, self._solved.state):
            self._solved = Solved(state, self._solve())
        return self._solved.process

    @torch.no_grad()
    def _solve(self) -> WeightSpaceProcess:
        memory, basis = self._current()
        evidence = combine(self._noise_groups(memory.whole.statistics), self._residual())
        return WeightSpaceProcess(basis, solve(evidence), self._prior_mean().unsqueeze(-1).clone())

    @torch.no_grad()
    def _take(self, data: Observations) -> None:
        memory, basis = self._current()
        allocator = copy(self._allocator)
        if allocator is not None and data.sign > 0:
            seen = (data.X,) if self._memory.whole.is_in(basis) else (memory.recent.X, data.X)
            memory, basis = self._placed(allocator, memory, basis, torch.cat(seen, -2))
        features = basis.features(data.X).expand(*self._output_batch, -1, -1)
        new = memory.after(data, basis, features)
        solved = self._solved_after(data, basis, features)
        self._keep(new, basis, allocator)
        self._solved = solved
        self._refresh_fixed_noise()

    def _placed(
        self, allocator: Allocator, memory: WindowedMemory, basis: InducingBasis, X: Tensor
    ) -> tuple[WindowedMemory, InducingBasis]:
        """The memory at the points that an allocator wants for some inputs, and their basis."""
        Z = self._allocated(allocator, basis, X.flatten(0, -2))
        if _same_points(Z, basis.Z):
            return memory, basis
        basis = self._basis_at(Z)
        return memory.in_basis(basis), basis

    def _keep(
        self, memory: WindowedMemory, basis: InducingBasis, allocator: Allocator | None
    ) -> None:
        if self._present is None or self._present[2] is not basis:
            log_basis(self, basis)
        self._memory, self._allocator = memory, allocator
        self._present = (state_of(self.covar_module), memory, basis)
        self._solved = None

    def train(self, mode: bool = True) -> Self:
        """Training mode begins a refit; leaving it places the points anew for the new kernel."""
        was_training = self.training
        super().train(mode)
        if was_training and not mode and self._supposed is None:
            self._place_anew()
        return self

    @torch.no_grad()
    def _place_anew(self) -> None:
        memory, basis = self._current()
        allocator = copy(self._allocator)
        moved = not self._memory.whole.is_in(basis)
        if moved and allocator is not None and len(memory.recent) > 0:
            self._keep(*self._placed(allocator, memory, basis, memory.recent.X), allocator)

    def _allocated(self, allocator: Allocator, basis: InducingBasis, X: Tensor) -> Tensor:
        wanted = checked_allocation(allocator.update(basis.Z, X, basis.kernel), X)
        return capped(basis.Z, wanted, basis.kernel, self.max_points)

    def _solved_after(
        self, data: Observations, basis: InducingBasis, features: Tensor
    ) -> Solved | None:
        """The posterior after a batch, where it was solved in the same basis."""
        solved = self._solved
        if solved is None or not is_same(state_of(self), solved.state):
            return None
        if not solved.can_take(data, basis):
            return None
        outcomes, noise = self._as_outcomes(data.targets, data.noise, data.known)
        return solved.after(features, outcomes, noise)

    def _set_memory(self, memory: WindowedMemory) -> None:
        self._memory = memory
        self._present = self._solved = None

    def merge(self, other: Self) -> Self:
        """Add another model's memory to this one's, in place; hyperparameters stay as they are.

        Exact for equal inducing points: equal to one stream of both models' data. Other points
        join by this model's allocator (none: they do not), and what they carry beyond is lost,
        with a :class:`ProjectionWarning`.

        Raises:
            UnsupportedError: Another class, shape, transform, or a model that supposes data.
        """
        check_mergeable(self, other)
        self._check_not_supposed("merge")
        other._check_not_supposed("merge")
        self._merge(other._memory.whole.map_targets(shifted_targets(other._shift - self._shift)))
        self._refresh_fixed_noise()
        return self

    @torch.no_grad()
    def _merge(self, theirs: InducingMemory) -> None:
        mine, basis = self._current()
        Z, allocator = basis.Z, copy(self._allocator)
        if not _same_points(theirs.values.Z, Z) and allocator is not None:
            Z = self._allocated(allocator, basis, theirs.values.Z)
            basis = self._basis_at(Z)
            log_basis(self, basis)
        if not _contains(basis.Z, theirs.values.Z):
            warnings.warn(
                "merge projects the other model's memory onto this one's inducing points, for they "
                "are not the same: an approximation. Give both the same inducing_points.",
                ProjectionWarning,
                stacklevel=users_stack_level(),
            )
        self._allocator = allocator
        self._set_memory(mine.in_basis(basis).plus(theirs.in_basis(basis)))

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
                Z = moved_points(
                    lambda points: self._bound_at(memory, basis, points), basis.Z, maxiter
                )
            moved = self._basis_at(Z)
            self._keep(memory.in_basis(moved), moved, self._allocator)
        return self

    def _bound_at(self, memory: WindowedMemory, basis: InducingBasis, Z: Tensor) -> Tensor:
        """The bound with other points, summed over outputs, differentiable in them."""
        moved = memory.in_basis(InducingBasis.of(basis.kernel, Z, basis.outputs)).whole
        evidence = combine(self._noise_groups(moved.statistics), self._residual().detach())
        posterior = solve(evidence)
        value = log_marginal_likelihood(evidence, posterior.mean, posterior.log_precision())
        return (value - 0.5 * self._missed_variance(moved.missed)).sum()

    def clear(self) -> Self:
        """Drop all observations; hyperparameters, inducing points and standardisation stay.

        Raises:
            UnsupportedError: The model supposes data.
        """
        self._check_not_supposed("clear")
        _, basis = self._current()
        self._set_memory(self._nothing_in(basis, self._memory.window))
        return self

    def elbo(self) -> Tensor:
        """The online bound on the log marginal likelihood, ``batch_shape x m``, without m if 1.

        That of batch SGPR for what is in the statistics; the rows of the window enter with their
        full covariance. Never more than the exact log marginal likelihood where Z and
        hyperparameters have stayed. [Bui2017, eq. 7; Titsias2009, eq. 9].
        """
        return self.log_marginal_likelihood()

    def _log_marginal_likelihood(self) -> Tensor:
        return self._learning_objective()

    def _learning_objective(self) -> Tensor:
        memory = self._memory.as_values()
        prior = prior_of_values(self.covar_module, memory.values, self._num_outputs)
        groups = self._noise_groups(memory.statistics)
        bound = subspace_log_marginal_likelihood(groups, self._residual(), prior)
        return bound - 0.5 * self._missed_variance(memory.missed)

    def _missed_variance(self, missed: Missed) -> Tensor:
        """Prior variance at the data that the inducing points miss, in units of the noise."""
        total = missed.known * self.outcome_scale().square()
        if isinstance(self.likelihood, GaussianLikelihood):
            total = total + missed.learned / self.noise_level()
        return total


def _same_points(A: Tensor, B: Tensor) -> bool:
    return A.shape == B.shape and torch.equal(A, B)


def _contains(Z: Tensor, others: Tensor) -> bool:
    """Whether all of some points are among Z."""
    if len(others) == 0:
        return True
    return len(Z) > 0 and bool((others.unsqueeze(-2) == Z).all(-1).any(-1).all())
