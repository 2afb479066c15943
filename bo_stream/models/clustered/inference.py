"""Exact inference for inputs moved to the centres of clusters [Terenin2024, section 3.3]."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cache as cached
from functools import partial
from typing import Literal

import torch
from gpytorch.kernels import Kernel
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from bo_stream.bases.inducing import frozen, in_dtype, kernel_variance
from bo_stream.linalg import check_memory, inverse_root
from bo_stream.models.clustered.memory import ClusterMemory
from bo_stream.models.clustered.objective import clustered_log_marginal_likelihood
from bo_stream.models.clustered.solver import (
    MOST_PENDING,
    CentreSolver,
    CholeskySolver,
    ClusteredProcess,
    ConjugateGradients,
    RootEvidence,
    SolvedClusters,
    cross_matrix,
)
from bo_stream.models.inference import Inference
from bo_stream.models.memory import Observations
from bo_stream.models.prior import Prior
from bo_stream.process.process import PosteriorProcess
from bo_stream.warnings import ProjectionWarning, users_stack_level, warn_of_coarse_centres

Solver = Literal["cholesky", "cg"]

CHOLESKY_CENTRES = 4000
"""Up to this many centres are solved by a Cholesky factor unless told otherwise."""

PROBED_CENTRES = 64
"""Most centres at which it is asked how much the process differs from that at its inputs."""

MEMORY_LIMIT_GIB = 4.0
"""Of all matrices over the centres together."""

FLOAT32_LIMIT = 0.1 / torch.finfo(torch.float32).eps
"""Norm of Q, whose least eigenvalue is 1 or more, up to which float32 solves with it. A variance is
then right to about a tenth of itself.
"""

IN_FLOAT64 = "solved in float64 instead of float32"
COARSE = "coarse centres"


@dataclass(frozen=True)
class ClusterInference(Inference[ClusterMemory, SolvedClusters]):
    """The process at M centres, from the sums of their clusters: ``Q = I + R K R`` is solved.

    Attributes:
        solver: By a Cholesky factor, by conjugate gradients, or None for the choice by M.
        cg_tolerance: Relative residual at which conjugate gradients stop; None: by dtype.
        arithmetic: Dtype of centres and covariances.
        max_centres: Number of centres beyond which the resolution is doubled; None: never.
    """

    solver: Solver | None
    cg_tolerance: float | None
    arithmetic: torch.dtype
    max_centres: int | None

    # --- memory ---------------------------------------------------------------------------

    def observe(
        self, memory: ClusterMemory, cache: SolvedClusters | None, data: Observations, prior: Prior
    ) -> tuple[ClusterMemory, SolvedClusters | None]:
        """Add a batch to the sums of its clusters; cost O(n log M + M) beside the cache's."""
        X = data.X.to(memory.centres)
        points = X.flatten(0, -2)
        covering = memory.grown(copy(memory.tree).insert(points)) if data.sign > 0 else memory
        capped = self._capped(covering)
        self._check_size(capped, prior)
        clusters = capped.tree.assign(points).view(X.shape[:-1])
        after = capped.after(data, clusters)
        if capped is not covering:
            self._warn_of_coarse_centres(after, prior)
            return after, None
        if cache is None or data.sign < 0 or len(data) > cache.room or not prior.is_in(cache.state):
            return after, None
        centres, room = after.centres[clusters], cache.room - len(data)
        process = cache.process.condition(centres, *prior.standardized(data))
        return after, SolvedClusters(cache.state, process, room)

    def _capped(self, memory: ClusterMemory) -> ClusterMemory:
        """Double the resolution as often as needed for no more than ``max_centres``."""
        while self.max_centres is not None and len(memory.centres) > self.max_centres:
            memory = memory.at_resolution(2.0 * memory.tree.resolution)
        return memory

    def merged(
        self,
        memory: ClusterMemory,
        cache: SolvedClusters | None,
        other: ClusterMemory,
        prior: Prior,
    ) -> tuple[ClusterMemory, SolvedClusters | None]:
        """Unite the trees; a cluster within the resolution of another's centre moves there."""
        both, exact = memory.joined(other)
        both = self._capped(both)
        self._check_size(both, prior)
        if not exact:
            warnings.warn(
                "merge moves clusters of the other model to this one's nearest centres, for they "
                "are not the same: an approximation. Give both the same tree.",
                ProjectionWarning,
                stacklevel=users_stack_level(),
            )
        return both, None

    def cleared(self, memory: ClusterMemory, prior: Prior) -> ClusterMemory:
        """Keep the tree and its centres."""
        return ClusterMemory.empty(memory.tree, memory.centres, prior.shape)

    def refitted(
        self, memory: ClusterMemory, cache: SolvedClusters | None, prior: Prior
    ) -> tuple[ClusterMemory, SolvedClusters | None]:
        """Check the centres against the new kernel."""
        self._warn_of_coarse_centres(memory, prior)
        return memory, cache

    # --- the posterior, and the likelihood --------------------------------------------------

    def process(
        self,
        memory: ClusterMemory,
        cache: SolvedClusters | None,
        prior: Prior,
        X: Tensor | None = None,
    ) -> tuple[PosteriorProcess, SolvedClusters]:
        """Solve for the process at the centres, in O(M³) or O(M²) an iteration, unless kept."""
        if cache is None or not prior.is_in(cache.state):
            process = self._solve(memory, prior)
            room = MOST_PENDING if isinstance(process.solver, CholeskySolver) else 0
            cache = SolvedClusters(prior.state(), process, room)
        return cache.process, cache

    def _solve(self, memory: ClusterMemory, prior: Prior) -> ClusteredProcess:
        kernel, Z, K = self.frozen_prior(memory, prior)
        scaled = RootEvidence.of(prior.evidence(memory.statistics), Z.dtype)
        solver, mean = self.solver_for(scaled.system(K)), prior.mean.unsqueeze(-1).clone()
        solution = solver.solve(scaled.target)
        return ClusteredProcess(
            kernel, Z, prior.num_outputs, scaled.root.mT, solution, solver, mean
        )

    def objective(
        self, memory: ClusterMemory, cache: SolvedClusters | None, prior: Prior
    ) -> tuple[Tensor, SolvedClusters | None]:
        """Return the log marginal likelihood of observations at their centres, exact, in O(M³)."""
        kernel, outputs = prior.kernel, prior.num_outputs
        _, K = self.centres_and_prior(
            memory,
            prior,
            lambda Z: in_dtype(kernel, Z.dtype, lambda k: cross_matrix(k, Z, Z, outputs)),
        )
        groups = prior.noise_groups(memory.statistics)
        return clustered_log_marginal_likelihood(groups, prior.target_map(), K), cache

    def frozen_prior(self, memory: ClusterMemory, prior: Prior) -> tuple[Kernel, Tensor, Tensor]:
        """Return the kernel without gradients, and the centres and their covariance by it."""
        kernel_in, outputs = cached(partial(frozen, prior.kernel)), prior.num_outputs
        Z, K = self.centres_and_prior(
            memory, prior, lambda Z: cross_matrix(kernel_in(Z.dtype), Z, Z, outputs)
        )
        return kernel_in(Z.dtype), Z, K

    def centres_and_prior(
        self, memory: ClusterMemory, prior: Prior, covariance_at: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return centres Z and their prior covariance K in a dtype that can solve for them.

        The dtype is ``arithmetic``, but float64 where ``‖Q‖ ≤ 1 + max_i Σ_j |K_ij| R_jj²``, a bound
        on the condition number of ``Q = I + R K R``, is above ``FLOAT32_LIMIT``. Cost O(M²), and
        that of ``covariance_at``, which maps Z to K in the dtype of Z.
        """
        Z = memory.centres
        K = covariance_at(Z)
        if Z.dtype == torch.float64 or len(Z) == 0:
            return Z, K
        precision = precisions(memory, prior).unsqueeze(-1).to(K)
        norm = 1.0 + float((K.detach().abs() @ precision).max())
        if norm <= FLOAT32_LIMIT:
            return Z, K
        self._say_that_float64_solves(norm, memory, prior)
        return Z.double(), covariance_at(Z.double())

    def _say_that_float64_solves(self, norm: float, memory: ClusterMemory, prior: Prior) -> None:
        self._check_size(memory, prior, torch.float64)
        model = prior.model
        is_new = not any(event.what == IN_FLOAT64 for event in model.numerical_log)
        if is_new:
            warnings.warn(
                f"Expected a condition number of at most {FLOAT32_LIMIT:.1e} for arithmetic in "
                f"float32, got up to {norm:.1e}: the observations in reach of a lengthscale are "
                "too many over the noise variance. The model solves in float64 while that is so. "
                "Pass arithmetic=torch.float64, or bound the noise variance from below.",
                NumericalWarning,
                stacklevel=users_stack_level(),
            )
        if is_new or not model.training:  # a fit's steps are not counted one by one
            model.log_event(IN_FLOAT64, len(memory.centres))

    def solver_for(self, Q: Tensor) -> CentreSolver:
        """Factorise Q, ``... x M x M``, or prepare conjugate gradients."""
        if self._factorises(Q.shape[-1]):
            return CholeskySolver(inverse_root(Q))
        return ConjugateGradients.of(Q, self.cg_tolerance)

    def _factorises(self, centres: int) -> bool:
        few = centres == 0 or (self.solver is None and centres <= CHOLESKY_CENTRES)
        return few or self.solver == "cholesky"

    def _check_size(
        self, memory: ClusterMemory, prior: Prior, dtype: torch.dtype | None = None
    ) -> None:
        M = len(memory.centres)
        matrices = 3 if self._factorises(M) else 2
        check_memory(
            f"Solving for {M:,} centres at a resolution of {memory.tree.resolution:g}",
            prior.shape.numel() * matrices * M * M,
            MEMORY_LIMIT_GIB,
            "Take a coarser resolution.",
            dtype or self.arithmetic,
        )

    # --- is the resolution fine enough? -------------------------------------------------------

    @torch.no_grad()
    def _warn_of_coarse_centres(self, memory: ClusterMemory, prior: Prior) -> None:
        """Warn once, if the model chooses its resolution and no first training is under way."""
        most, model = self.max_centres, prior.model
        if most is None or model.training or model.has_said(COARSE):
            return
        precision = precisions(memory, prior).sum(-1) / memory.counts.clamp_min(1.0)
        ratio = float((variance_between(memory, prior) * precision).max())
        if ratio > 1.0:
            model.says(COARSE)
            warn_of_coarse_centres(ratio, memory.tree.resolution, most)


@torch.no_grad()
def precisions(memory: ClusterMemory, prior: Prior) -> Tensor:
    """Sum the precisions of each cluster's observations, ``batch_shape x m x M``."""
    return prior.evidence(memory.statistics).gram.squeeze(-1)


def variance_between(memory: ClusterMemory, prior: Prior) -> Tensor:
    """Return the prior variance of the process between an input and its centre, ``batch x m``.

    At the root mean square distance of the inputs from their centres.
    """
    Z = memory.centres[:PROBED_CENTRES].double()
    moved = Z + memory.typical_move().unsqueeze(-2)
    kernel, outputs = frozen(prior.kernel, torch.float64), prior.num_outputs
    between = cross_matrix(kernel, Z.expand_as(moved), moved, outputs)
    own = kernel_variance(kernel, Z, outputs) + kernel_variance(kernel, moved, outputs)
    return (own - 2.0 * between.diagonal(dim1=-2, dim2=-1)).mean(-1)
