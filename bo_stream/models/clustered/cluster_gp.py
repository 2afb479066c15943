"""A model's clusters as a stream changes them, and the posterior that they give."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Literal, Self

import torch
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from bo_stream.bases.inducing import frozen, kernel_variance
from bo_stream.linalg import check_memory
from bo_stream.models.clustered.memory import ClusterMemory
from bo_stream.models.clustered.solver import (
    CentreSolver,
    CholeskySolver,
    ClusteredProcess,
    ConjugateGradients,
    RootEvidence,
    SolvedClusters,
    centre_matrix,
    cross_matrix,
)
from bo_stream.models.memory import Observations
from bo_stream.models.objective import combine
from bo_stream.models.solved_gp import SolvedGP
from bo_stream.models.warnings import ProjectionWarning, users_stack_level, warn_of_coarse_centres
from bo_stream.tensors import State, is_in, keeps_tensors
from bo_stream.weights import GaussianEvidence

Solver = Literal["cholesky", "cg"]

CHOLESKY_CENTRES = 4000
"""Up to this many centres are solved by a Cholesky factor unless told otherwise."""

MAX_CENTRES = 1024
"""Most centres where the model chooses its resolution."""

PROBED_CENTRES = 64
"""Most centres at which it is asked how much the process differs from that at its inputs."""

MEMORY_LIMIT_GIB = 4.0
"""Of all matrices over the centres together."""

FLOAT32_LIMIT = 0.1 / torch.finfo(torch.float32).eps
"""Norm of Q, whose least eigenvalue is 1 or more, up to which float32 solves with it. A variance is
then right to about a tenth of itself.
"""


class ClusterGP(SolvedGP[SolvedClusters]):
    """A streaming Gaussian process on clusters: the body of the model."""

    _memory: ClusterMemory
    solver: Solver | None
    cg_tolerance: float | None
    arithmetic: torch.dtype
    max_centres: int | None = None
    _told_of_coarse_centres: bool = False

    def _projected(self, inputs: Tensor) -> Tensor:
        return inputs

    @property
    def centres(self) -> Tensor:
        """Of the clusters, ``M x d``, in transformed inputs: a copy."""
        return self._memory.centres.to(self.train_targets, copy=True)

    @property
    def cluster_sizes(self) -> Tensor:
        """Observations in each cluster, ``batch_shape x M``; not whole after :meth:`forget`."""
        return self._memory.sizes.squeeze(-1).clone()

    @property
    def resolution(self) -> float:
        """Largest distance of a new input from its cluster's centre."""
        return self._memory.tree.resolution

    @torch.no_grad()
    def _solve(self, state: State) -> SolvedClusters:
        kernel_in = cache(partial(frozen, self.covar_module))
        Z, K = self._centres_and_prior(
            lambda Z: centre_matrix(kernel_in(Z.dtype), Z, self._num_outputs)
        )
        scaled = RootEvidence.of(self._evidence(), Z.dtype)
        solver = self._solver_for(scaled.system(K))
        base = ClusteredProcess(
            kernel_in(Z.dtype),
            Z,
            self._num_outputs,
            scaled.root.mT,
            solver.solve(scaled.target),
            solver,
            self._prior_mean().unsqueeze(-1).clone(),
        )
        return SolvedClusters(state, base, base)

    def _frozen_prior(self, Z: Tensor) -> Tensor:
        return centre_matrix(frozen(self.covar_module, Z.dtype), Z, self._num_outputs)

    def _centres_and_prior(self, prior_at: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return centres Z and their prior covariance K in a dtype that can solve for them.

        The dtype is ``arithmetic``, but float64 where ``‖Q‖ ≤ 1 + max_i Σ_j |K_ij| R_jj²``, a bound
        on the condition number of ``Q = I + R K R``, is above ``FLOAT32_LIMIT``. Cost O(M²).

        Args:
            prior_at: Maps centres, ``M x d``, to K, ``... x m x M x M``, in the dtype of Z.

        Raises:
            ValueError: Float64 takes more memory than there may be.
        """
        Z = self._memory.centres
        K = prior_at(Z)
        if Z.dtype == torch.float64 or len(Z) == 0:
            return Z, K
        norm = 1.0 + float((K.detach().abs() @ self.cluster_precision().unsqueeze(-1).to(K)).max())
        if norm <= FLOAT32_LIMIT:
            return Z, K
        self._say_that_float64_solves(norm)
        return Z.double(), prior_at(Z.double())

    def _say_that_float64_solves(self, norm: float) -> None:
        self._check_size(self._memory, torch.float64)
        what = "solved in float64 instead of float32"
        is_new = not any(event.what == what for event in self.numerical_log)
        if is_new:
            warnings.warn(
                f"Expected a condition number of at most {FLOAT32_LIMIT:.1e} for arithmetic in "
                f"float32, got up to {norm:.1e}: the observations in reach of a lengthscale are "
                "too many over the noise variance. The model solves in float64 while that is so. "
                "Pass arithmetic=torch.float64, or bound the noise variance from below.",
                NumericalWarning,
                stacklevel=users_stack_level(),
            )
        if is_new or not self.training:  # a fit's steps are not counted one by one
            self.log_event(what, len(self._memory.centres))

    @torch.no_grad()
    def cluster_precision(self) -> Tensor:
        """Sums of the precisions of each cluster's observations, ``batch_shape x m x M``."""
        return self._evidence().gram.squeeze(-1)

    def _evidence(self) -> GaussianEvidence:
        return combine(self._noise_groups(self._memory.statistics), self._residual())

    def _solver_for(self, Q: Tensor) -> CentreSolver:
        if self._method(Q.shape[-1]) == "cholesky":
            return CholeskySolver.of(Q)
        return ConjugateGradients.of(Q, self.cg_tolerance)

    def _method(self, centres: int) -> Solver:
        if centres == 0:
            return "cholesky"
        return self.solver or ("cholesky" if centres <= CHOLESKY_CENTRES else "cg")

    @torch.no_grad()
    def _take(self, data: Observations) -> None:
        X = data.X.to(self._memory.centres)
        points = X.flatten(0, -2)
        memory = self._memory.covering(points) if data.sign > 0 else self._memory
        joined = self._capped(memory)
        moved, memory = joined is not memory, joined
        self._check_size(memory)
        clusters = memory.tree.assign(points).view(X.shape[:-1])
        memory = memory.after(data, clusters)
        self._solved = None if moved else self._solved_after(data, memory.centres[clusters])
        self._memory = memory
        self._refresh_fixed_noise()
        if moved:
            self._warn_of_coarse_centres()

    def _finish_refit(self) -> None:
        """Check the centres against the new kernel."""
        self._warn_of_coarse_centres()

    @torch.no_grad()
    def _warn_of_coarse_centres(self) -> None:
        """Once, if the model chooses its resolution, and not before a first training has ended."""
        most = self.max_centres
        if self.training or self._told_of_coarse_centres or most is None:
            return
        precision = self.cluster_precision().sum(-1) / self._memory.counts.clamp_min(1.0)
        ratio = float((self._variance_between() * precision).max())
        if ratio > 1.0:
            self._told_of_coarse_centres = True
            warn_of_coarse_centres(ratio, self.resolution, most)

    def _variance_between(self) -> Tensor:
        """Prior variance of the process between an input and its centre, ``batch_shape x m``.

        At the root mean square distance of the inputs from their centres.
        """
        memory = self._memory
        Z = memory.centres[:PROBED_CENTRES].double()
        moved = Z + memory.typical_move().unsqueeze(-2)
        kernel, outputs = frozen(self.covar_module, torch.float64), self._num_outputs
        between = cross_matrix(kernel, Z.expand_as(moved), moved, outputs)
        own = kernel_variance(kernel, Z, outputs) + kernel_variance(kernel, moved, outputs)
        return (own - 2.0 * between.diagonal(dim1=-2, dim2=-1)).mean(-1)

    def _capped(self, memory: ClusterMemory) -> ClusterMemory:
        """With no more than ``max_centres``: the resolution is doubled as often as needed."""
        while self.max_centres is not None and len(memory.centres) > self.max_centres:
            memory = memory.at_resolution(2.0 * memory.tree.resolution)
        return memory

    def _check_size(self, memory: ClusterMemory, dtype: torch.dtype | None = None) -> None:
        M = len(memory.centres)
        matrices = 3 if self._method(M) == "cholesky" else 2
        check_memory(
            f"Solving for {M:,} centres at a resolution of {memory.tree.resolution:g}",
            math.prod(self._output_batch) * matrices * M * M,
            MEMORY_LIMIT_GIB,
            "Take a coarser resolution.",
            dtype or self.arithmetic,
        )

    def _solved_after(self, data: Observations, X: Tensor) -> SolvedClusters | None:
        solved = self._solved
        if solved is None or data.sign < 0 or not solved.can_take(X.shape[-2]):
            return None
        if not is_in(self, solved.state):
            return None
        return solved.after(X, *self._as_outcomes(data.targets, data.noise, data.known))

    def _set_memory(self, memory: ClusterMemory) -> None:
        self._memory, self._solved = memory, None

    @keeps_tensors
    def merge(self, other: Self) -> Self:
        """Add another model's memory to this one's, in place; hyperparameters stay as they are.

        The trees are united: the other's centres become centres, those within the resolution of
        one of this model's give their clusters to it. Exact where they coincide with it; else those
        clusters are moved twice, with a :class:`ProjectionWarning`.

        Raises:
            UnsupportedError: Another class, shape, transform, or a model that supposes data.
            ValueError: More centres than memory can hold.
        """
        matrix = self._targets_of(other)
        memory, exact = self._memory.joined(other._memory.map_targets(matrix))
        memory = self._capped(memory)
        self._check_size(memory)
        if not exact:
            warnings.warn(
                "merge moves clusters of the other model to this one's nearest centres, for they "
                "are not the same: an approximation. Give both the same tree.",
                ProjectionWarning,
                stacklevel=users_stack_level(),
            )
        self._set_merged(memory, other)
        return self

    @keeps_tensors
    def resolve(self, resolution: float) -> Self:
        """Change the resolution, in place, for what is in memory as far as that is possible.

        Levels of the tree differ by factors of two: the coarsest that is fine enough is taken.
        Coarser: clusters join, their sums are added, and the posterior is exactly that of inputs
        moved twice, to their old and to their new centre. Finer: clusters stay exactly as they are;
        observations from now on get centres closer by.

        Raises:
            ValueError: The resolution is not positive and finite.
            UnsupportedError: The model supposes data.
        """
        self._check_not_supposed("resolve")
        if not (math.isfinite(resolution) and resolution > 0.0):
            raise ValueError(f"Expected resolution to be positive and finite, got {resolution}.")
        self._set_memory(self._memory.at_resolution(resolution))
        return self

    @keeps_tensors
    def clear(self) -> Self:
        """Drop all observations; hyperparameters, centres and standardisation stay.

        Raises:
            UnsupportedError: The model supposes data.
        """
        self._begin_to_clear()
        memory = self._memory
        self._set_memory(ClusterMemory.empty(memory.tree, memory.centres, self._output_batch))
        return self
