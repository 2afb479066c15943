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
from bo_stream.models.inducing_choice import checked_allocation, checked_cap, first_points
from bo_stream.models.inducing_memory import InducingMemory
from bo_stream.models.inducing_prior import prior_of_values
from bo_stream.models.marginal_likelihood import combine, subspace_log_marginal_likelihood
from bo_stream.models.memory import Observations
from bo_stream.models.projection_warning import ProjectionWarning
from bo_stream.models.remembering_gp import RememberingGP, shifted_targets
from bo_stream.models.validation import check_finite
from bo_stream.models.warning_level import users_stack_level
from bo_stream.module_state import State, is_same, state_of
from bo_stream.process import PosteriorProcess, WeightSpaceProcess
from bo_stream.weights import solve

MAX_POINTS = 512


class OSGPR(RememberingGP):
    """Streaming sparse regression at inducing points, for any kernel and any number of inputs.

    The memory are the data's sufficient statistics in the process's values at M inducing points Z.
    A move of Z or of the hyperparameters is a congruence of them: what was observed acts as
    observations of the process at the old points (Bui, Nguyen and Turner, 2017, collapsed).

    - Memory: O(M²), and Z. Data are not kept.
    - Update: O(n M²) for n observations, O(M³) when Z or a hyperparameter has changed since the
      last one; the next posterior solves once in O(M³).
    - A fantasy: O(q M) cross-covariances and one q x q factor; it conditions the process, residual
      included, and so knows what is supposed far from every inducing point.
    - Exact: with Z and hyperparameters fixed, any stream equals batch SGPR (Titsias, 2009) on all
      data, and updates, merges and retractions are exact; with Z the observed inputs it is the
      exact GP. Noise level, mean and standardisation of outcomes may change exactly at any time.
    - Approximate: the past after Z or the kernel has moved; the residual prior variance at the
      data is not explained by them (it is in the predictive variance).
    - Learned: hyperparameters by the online bound, from memory alone.
    - When: more inputs than a grid can take (WISKI: four), and no projection wanted.

    Example:
        >>> model = OSGPR(train_X, train_Y)
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> model.update(new_X, new_Y).posterior(test_X).mean
    """

    _memory: InducingMemory

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
        self._present: tuple[State, InducingMemory, InducingBasis] | None = None
        Z = self.coordinates(Z).to(torch.float64) if len(Z) > 0 else Z.to(torch.float64)
        basis = self._basis_at(Z)
        self._memory = InducingMemory.empty(basis, self._output_batch)
        self._standardize_first(train_X, train_Y, train_Yvar)
        if train_X.shape[-2] > 0:
            self._observe(train_X, train_Y, train_Yvar, 1.0)
        warn_of_scaling(inputs, self._standardized(train_Y.double()), covar_module is not None)

    def _projected(self, inputs: Tensor) -> Tensor:
        return inputs

    @property
    def inducing_points(self) -> Tensor:
        """Z, ``M x d``, in transformed inputs."""
        return self._memory.values.Z.to(self.train_targets)

    @torch.no_grad()
    def _basis_at(self, Z: Tensor) -> InducingBasis:
        return InducingBasis.of(self.covar_module, Z, self._num_outputs)

    @torch.no_grad()
    def _current(self) -> tuple[InducingMemory, InducingBasis]:
        """The memory expressed with the present kernel, and its basis. Kept until either moves."""
        state = state_of(self.covar_module)
        if self._present is None or not is_same(state, self._present[0]):
            basis = self._basis_at(self._memory.values.Z)
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
        evidence = combine(self._noise_groups(memory.statistics), self._residual())
        return WeightSpaceProcess(basis, solve(evidence), self._prior_mean().unsqueeze(-1).clone())

    @torch.no_grad()
    def _take(self, data: Observations) -> None:
        memory, basis = self._current()
        allocator = copy(self._allocator)
        if allocator is not None and data.sign > 0:
            Z = self._allocated(allocator, basis, data.X.flatten(0, -2))
            if Z.shape != basis.Z.shape or not torch.equal(Z, basis.Z):
                basis = self._basis_at(Z)
                memory = memory.in_basis(basis)
        features = basis.features(data.X).expand(*self._output_batch, -1, -1)
        residual = basis.residual_variance(data.X)
        new = memory.after(data, features, residual)
        solved = self._solved_after(data, features)
        self._memory, self._allocator = new, allocator
        self._present = (state_of(self.covar_module), new, basis)
        self._solved = solved if solved is None or solved.process.basis is basis else None
        self._refresh_fixed_noise()

    def _allocated(self, allocator: Allocator, basis: InducingBasis, X: Tensor) -> Tensor:
        wanted = checked_allocation(allocator.update(basis.Z, X, basis.kernel), X)
        return capped(basis.Z, wanted, basis.kernel, self.max_points)

    def _solved_after(self, data: Observations, features: Tensor) -> Solved | None:
        solved = self._solved
        if solved is None or self._present is None:
            return None
        same = is_same(state_of(self), solved.state)
        if not same or not solved.can_take(data, self._present[2]):
            return None
        if features.shape[-1] != self._present[2].rank:
            return None
        outcomes, noise = self._as_outcomes(data.targets, data.noise, data.known)
        return solved.after(features, outcomes, noise)

    def _set_memory(self, memory: InducingMemory) -> None:
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
        self._merge(other._memory.map_targets(shifted_targets(other._shift - self._shift)))
        self._refresh_fixed_noise()
        return self

    @torch.no_grad()
    def _merge(self, theirs: InducingMemory) -> None:
        mine, basis = self._current()
        Z, allocator = basis.Z, copy(self._allocator)
        if not _same_points(theirs.values.Z, Z) and allocator is not None:
            Z = self._allocated(allocator, basis, theirs.values.Z)
            basis = self._basis_at(Z)
        if not _contains(Z, theirs.values.Z):
            warnings.warn(
                "merge projects the other model's memory onto this one's inducing points, for they "
                "are not the same: an approximation. Give both the same inducing_points.",
                ProjectionWarning,
                stacklevel=users_stack_level(),
            )
        self._allocator = allocator
        self._set_memory(mine.in_basis(basis).plus(theirs.in_basis(basis)))

    def clear(self) -> Self:
        """Drop all observations; hyperparameters, inducing points and standardisation stay.

        Raises:
            UnsupportedError: The model supposes data.
        """
        self._check_not_supposed("clear")
        _, basis = self._current()
        self._set_memory(InducingMemory.empty(basis, self._output_batch))
        return self

    def _log_marginal_likelihood(self) -> Tensor:
        return self._learning_objective()

    def elbo(self) -> Tensor:
        """The online bound on the log marginal likelihood; see :meth:`log_marginal_likelihood`."""
        return self.log_marginal_likelihood()

    def _learning_objective(self) -> Tensor:
        """Collapsed bound of what is in memory. [Bui2017, eq. 7; Titsias2009, eq. 9]."""
        memory = self._memory
        prior = prior_of_values(self.covar_module, memory.values, self._num_outputs)
        groups = self._noise_groups(memory.statistics)
        bound = subspace_log_marginal_likelihood(groups, self._residual(), prior)
        return bound - 0.5 * self._missed_variance()

    def _missed_variance(self) -> Tensor:
        """Prior variance at the data that the inducing points miss, in units of the noise."""
        missed = self._memory.missed
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
