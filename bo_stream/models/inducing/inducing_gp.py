"""A model with inducing points: where they go, the posterior, the bound, and memories that add."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import replace
from typing import Generic, Protocol, Self, TypeVar

import torch
from botorch.utils.types import _DefaultType
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream.allocation.allocator import Allocator, checked_number
from bo_stream.allocation.novelty import Novelty
from bo_stream.allocation.selection import capped
from bo_stream.bases.differentiable_kernel import prior_of_values
from bo_stream.bases.inducing import InducingBasis, KnownValues, members
from bo_stream.models.base import StreamingGP
from bo_stream.models.caches import Solved
from bo_stream.models.inducing.memory import InducingMemory, Missed
from bo_stream.models.inducing.points import (
    basis_of_independent,
    check_allocator,
    check_points_fit,
    checked_allocation,
    checked_cap,
    first_points,
    log_basis,
)
from bo_stream.models.memory import Memory, WhitenedMemory
from bo_stream.models.objective import (
    NoiseGroup,
    subspace_log_marginal_likelihood,
)
from bo_stream.models.remainder import never_in
from bo_stream.models.warnings import (
    MOST_ERROR,
    ProjectionWarning,
    error_of_rounding,
    users_stack_level,
    warn_of_coarse_points,
    warn_of_rounding,
)
from bo_stream.process.process import WeightSpaceProcess
from bo_stream.tensors import State, is_in, keeps_tensors, state_of
from bo_stream.weights import solve, weight_precision

MAX_POINTS = 512

COARSE, ROUNDING = "coarse points", "rounding"
"""What a model says once."""


class PointMemory(Memory, Protocol):
    """A memory of the process's values at inducing points."""

    @property
    def values(self) -> KnownValues:
        """The points, and the root of the kernel at them when last expressed."""
        ...

    def as_statistics(self) -> InducingMemory:
        """All observations as statistics at the inducing points."""
        ...

    def as_values(self) -> InducingMemory:
        """All observations as they serve best to learn hyperparameters."""
        ...

    def in_basis(self, basis: InducingBasis, /) -> Self:
        """Expressed by other points and another kernel."""
        ...

    def grown(self, basis: InducingBasis, /) -> Self:
        """Expressed by points more, after its own, and the same kernel."""
        ...

    def plus(self, other: InducingMemory, /) -> Self:
        """With another memory's statistics, of the same basis."""
        ...


M = TypeVar("M", bound=PointMemory)


class InducingGP(StreamingGP, Generic[M]):
    """A model whose memory is of the process's values at inducing points."""

    _memory: M
    _allocator: Allocator | None
    _present: tuple[State, M, InducingBasis] | None
    max_points: int

    @abstractmethod
    def _nothing_in(self, basis: InducingBasis) -> M:
        """A memory of no observations."""

    @abstractmethod
    def _groups(self, memory: WhitenedMemory) -> list[NoiseGroup]:
        """What is remembered, at its actual noise."""

    @abstractmethod
    def _missed_variance(self, missed: Missed) -> Tensor:
        """Prior variance at the data that the inducing points miss, in units of the noise."""

    def _begin_points(
        self,
        inducing_points: Tensor | None,
        allocator: Allocator | _DefaultType | None,
        max_points: int,
        X: Tensor,
    ) -> None:
        """The first inducing points, and an empty memory at them, on the device of X."""
        self.to(X)
        default = Novelty(checked_number("max_points", max_points))
        Z, self._allocator = first_points(inducing_points, allocator, default, X)
        self.max_points = checked_cap(max_points, Z)
        check_points_fit(len(Z), self._output_batch.numel())
        self._solved = self._present = None
        Z = self.coordinates(Z) if len(Z) > 0 else Z.new_zeros(0, self._process_dim)
        basis = self._basis_at(Z.to(torch.float64))
        self._memory = self._nothing_in(basis)
        log_basis(self, basis)

    @property
    def allocator(self) -> Allocator | None:
        """Where the points go as the stream goes by; None: they stay. Any other may be set."""
        return self._allocator

    @allocator.setter
    def allocator(self, allocator: Allocator | None) -> None:
        check_allocator(allocator)
        self._allocator = deepcopy(allocator)

    def _move(self, device: torch.device) -> None:
        """Bring the memory, its basis and the allocator along: the points stay in one basis."""
        former, present = self._memory, self._present
        super()._move(device)
        if self._allocator is not None:
            self._allocator = self._allocator.to(self._units.shift)
        if present is not None:
            state, memory, basis = present
            memory = self._memory if memory is former else memory.to(device)
            basis = replace(basis.to(device), root=memory.values.root)
            self._present = tuple(tensor.to(device) for tensor in state), memory, basis

    @property
    def inducing_points(self) -> Tensor:
        """Z, ``M x d``, in transformed inputs: a copy."""
        return self._memory.values.Z.to(self.train_targets, copy=True)

    @torch.no_grad()
    def _basis_at(self, Z: Tensor) -> InducingBasis:
        return basis_of_independent(self.covar_module, Z, self._num_outputs)

    @torch.no_grad()
    def _current(self) -> tuple[M, InducingBasis]:
        """The memory expressed with the present kernel, and its basis. Kept until either moves."""
        if self._present is None or not is_in(self.covar_module, self._present[0]):
            basis = self._basis_at(self._memory.values.Z)
            log_basis(self, basis)
            self._present = (state_of(self.covar_module), self._memory.in_basis(basis), basis)
        return self._present[1:]

    @torch.no_grad()
    def _solve(self, state: State) -> Solved:
        memory, basis = self._current()
        statistics = memory.as_statistics().statistics
        groups = self._groups(statistics)
        weights = solve(self._prior.evidence_of(groups))
        self._warn_of_rounding(weights.mean, groups)
        mean = self._prior.mean.unsqueeze(-1).clone()
        return Solved(state, WeightSpaceProcess(basis, weights, mean))

    def _warn_of_rounding(self, weights: Tensor, groups: list[NoiseGroup]) -> None:
        """Once, where outcomes are too far out for float64."""
        total = torch.stack([g.statistics.energy[..., 1, 1] / g.level for g in groups]).sum(0)
        error = error_of_rounding(weights, total / self._counts().clamp_min(1.0))
        if error > MOST_ERROR and not self.has_said(ROUNDING):
            self.says(ROUNDING)
            warn_of_rounding(error)

    def _placed(
        self, allocator: Allocator, memory: M, basis: InducingBasis, X: Tensor
    ) -> tuple[M, InducingBasis]:
        """The memory at the points that an allocator wants for some inputs, and their basis."""
        Z, M = self._allocated(allocator, basis, X.flatten(0, -2)), basis.rank
        if _same_points(Z, basis.Z):
            return memory, basis
        if M > 0 and _same_points(Z[:M], basis.Z):
            with suppress(NotPSDError):  # then some are left out
                basis = basis.grown(Z[M:])
                return memory.grown(basis), basis
        basis = basis_of_independent(basis.kernel, Z, self._num_outputs)
        return memory.in_basis(basis), basis

    def _allocated(self, allocator: Allocator, basis: InducingBasis, X: Tensor) -> Tensor:
        wanted = checked_allocation(allocator.update(basis.Z, X, basis.kernel), X)
        check_points_fit(min(len(wanted), self.max_points), self._output_batch.numel())
        return capped(basis.Z, wanted, basis.kernel, self.max_points)

    def _remember(self, memory: M, basis: InducingBasis, allocator: Allocator | None) -> None:
        """Take over a memory that is expressed with the present kernel."""
        moved = self._present is None or self._present[2] is not basis
        self._memory, self._allocator = memory, allocator
        self._present = (state_of(self.covar_module), memory, basis)
        self._solved = None
        if moved:
            log_basis(self, basis)
            self._warn_of_coarse_points()

    @torch.no_grad()
    def _warn_of_coarse_points(self) -> None:
        """Once, if the points place themselves, and not before a first training has ended."""
        if self.training or self.has_said(COARSE) or self._allocator is None:
            return
        memory = self._memory.as_statistics()
        missed = self._missed_variance(memory.missed) / memory.counts.clamp_min(1.0)
        if float(missed.max()) > 1.0:
            self.says(COARSE)
            warn_of_coarse_points(float(missed.max()), len(memory.values.Z), self.max_points)

    def _check_solvable(self, memory: InducingMemory) -> None:
        """Check that a memory from which observations were taken out has a posterior. Cost O(M³).

        Raises:
            InputDataError: It has none, so they were not in it.
        """
        gram = self._prior.evidence_of(self._groups(memory.statistics)).gram
        if bool(torch.linalg.cholesky_ex(weight_precision(gram))[1].any()):
            raise never_in()

    def _set_memory(self, memory: M) -> None:
        self._memory = memory
        self._present = self._solved = None

    @keeps_tensors
    def merge(self, other: Self) -> Self:
        """Add another model's memory to this one's, in place; hyperparameters stay as they are.

        Exact for equal inducing points: equal to one stream of both models' data. Other points
        join by this model's allocator (none: they do not), and what they carry beyond is lost,
        with a :class:`ProjectionWarning`.

        Raises:
            UnsupportedError: Another class, shape, transform, or a model that supposes data.
        """
        matrix = self._targets_of(other)
        theirs = other._memory.as_statistics().map_targets(matrix)
        memory, basis, allocator = self._merged_memory(theirs)
        self._refer_to_both(other)
        self._remember(memory, basis, allocator)
        self._refresh_fixed_noise()
        return self

    @torch.no_grad()
    def _merged_memory(self, theirs: InducingMemory) -> tuple[M, InducingBasis, Allocator | None]:
        mine, basis = self._current()
        Z, allocator = basis.Z, copy(self._allocator)
        if not _same_points(theirs.values.Z, Z) and allocator is not None:
            Z = self._allocated(allocator, basis, theirs.values.Z)
            basis = self._basis_at(Z)
        if not bool(members(theirs.values.Z, Z).all()):
            warnings.warn(
                "merge projects the other model's memory onto this one's inducing points, for they "
                "are not the same: an approximation. Give both the same inducing_points.",
                ProjectionWarning,
                stacklevel=users_stack_level(),
            )
        return mine.in_basis(basis).plus(theirs.in_basis(basis)), basis, allocator

    @keeps_tensors
    def clear(self) -> Self:
        """Drop all observations; hyperparameters, inducing points and standardisation stay.

        Raises:
            UnsupportedError: The model supposes data.
        """
        self._begin_to_clear()
        _, basis = self._current()
        self._set_memory(self._nothing_in(basis))
        return self

    def _log_marginal_likelihood(self) -> Tensor:
        return self._learning_objective()

    def elbo(self) -> Tensor:
        """The online bound on the log marginal likelihood, ``batch_shape x m``, without m if 1.

        That of batch SGPR for what is in the statistics; the rows of the window enter with their
        full covariance. Never more than the exact log marginal likelihood where Z and
        hyperparameters have stayed. [Bui2017, eq. 7; Titsias2009, eq. 9].
        """
        return self.log_marginal_likelihood()

    def _learning_objective(self) -> Tensor:
        memory = self._memory.as_values()
        prior = prior_of_values(self.covar_module, memory.values, self._num_outputs)
        groups = self._groups(memory.statistics)
        bound = subspace_log_marginal_likelihood(groups, self._prior.target_map(), prior)
        return bound - 0.5 * self._missed_variance(memory.missed)


def _same_points(A: Tensor, B: Tensor) -> bool:
    return A.shape == B.shape and torch.equal(A, B)
