"""From statistics at inducing points to a posterior, and to where the points go next."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError
from gpytorch.kernels import Kernel
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream.allocation.allocator import Allocator, capped
from bo_stream.bases.inducing import (
    InducingBasis,
    as_read,
    differentiable_matrix,
    kernel_matrix,
    members,
)
from bo_stream.linalg import check_memory, independent_rows
from bo_stream.marginal_likelihood import (
    NoiseGroup,
    subspace_log_marginal_likelihood,
)
from bo_stream.models.base import StreamingGP
from bo_stream.models.checks import check_finite, check_type
from bo_stream.models.inducing.memory import InducingMemory, PointStatistics, Rows, TraceTerm
from bo_stream.models.inference import Inference, Prior, SolvedWeights
from bo_stream.models.memory import Observations, WhitenedMemory, check_outcomes, never_in
from bo_stream.models.stochastic.budget import maximise
from bo_stream.process import PosteriorProcess, WeightSpaceProcess
from bo_stream.tensors import State, is_in, state_of
from bo_stream.warnings import (
    MOST_ERROR,
    ProjectionWarning,
    error_of_rounding,
    users_stack_level,
    warn_of_coarse_points,
    warn_of_rounding,
)
from bo_stream.weights import log_marginal_likelihood, solve, weight_precision

MAX_POINTS = 512

MEMORY_LIMIT_GIB = 4.0
"""Of all matrices over the inducing points together."""

MATRICES = 3
"""As many of them are stored for each output: the kernel's root, the gram, the posterior's root."""

COARSE, ROUNDING = "coarse points", "rounding"
"""What a model says once."""


@dataclass(frozen=True)
class Settled:
    """What does not depend on the sites of the outcomes that a memory holds.

    Attributes:
        solved: The posterior given all that it does not hold.
        rows: The outcomes that it holds, with their features.
    """

    solved: SolvedWeights
    rows: Rows


@dataclass(frozen=True)
class InducingCache:
    """The memory in the basis of the kernel as it is, and the posterior that was solved in it.

    Hyperparameters may be tried: a model's own memory stays as it was until something is observed.

    Attributes:
        state: Of the kernel.
        memory: In the basis.
        basis: Of the kernel in this state.
        solved: The posterior, if known.
        settled: Of outcomes with sites, what a next update begins from, if known.
    """

    state: State
    memory: InducingMemory
    basis: InducingBasis
    solved: SolvedWeights | None = None
    settled: Settled | None = None


Cached = InducingCache | None


@dataclass(frozen=True)
class InducingInference(Inference[InducingMemory, InducingCache]):
    """The process's values at M inducing points Z, from the statistics of all observations.

    Attributes:
        max_points: Cap on M.
    """

    defers_reads: ClassVar[bool] = True

    max_points: int

    @abstractmethod
    def noise_groups(self, statistics: WhitenedMemory, prior: Prior) -> list[NoiseGroup]:
        """Return the statistics with their noise variances."""

    @abstractmethod
    def trace_term(self, trace: TraceTerm, prior: Prior) -> Tensor:
        """Return the trace term in units of the noise, ``batch_shape x m``."""

    # --- the posterior, and the bound ----------------------------------------------------------

    def process(
        self, memory: InducingMemory, cache: Cached, prior: Prior, X: Tensor | None = None
    ) -> tuple[PosteriorProcess, InducingCache]:
        """Solve for the weights in O(M³), unless cached."""
        if cache is not None and cache.solved is not None and prior.is_in(cache.solved.state):
            return cache.solved.process, cache
        cache = self.current(memory, cache, prior)
        solved = self.solved(cache.memory.whole, cache.basis, prior)
        return solved.process, replace(cache, solved=solved)

    def solved(self, known: PointStatistics, basis: InducingBasis, prior: Prior) -> SolvedWeights:
        """Solve for the weights of a basis from statistics in it; warn once of rounding. O(M³)."""
        groups = self.noise_groups(known.statistics, prior)
        weights = solve(prior.evidence_of(groups))
        total = torch.stack([g.statistics.energy[..., 1, 1] / g.level for g in groups]).sum(0)
        mean_square = total / known.counts.clamp_min(1.0)
        error, model = error_of_rounding(weights.mean, mean_square), prior.model
        if error > MOST_ERROR and not model.has_said(ROUNDING):
            model.says(ROUNDING)
            warn_of_rounding(error)
        process = WeightSpaceProcess(basis, weights, prior.mean.unsqueeze(-1).clone())
        return SolvedWeights(prior.state(), process)

    def current(self, memory: InducingMemory, cache: Cached, prior: Prior) -> InducingCache:
        """Express the memory in the basis of the kernel as it is, in O(M³), unless cached."""
        if cache is not None and is_in(prior.kernel, cache.state):
            if cache.memory.allocator is not memory.allocator:  # for it was set since
                cache = replace(cache, memory=replace(cache.memory, allocator=memory.allocator))
            return cache
        return self._expressed(memory, prior, memory.values.Z)

    def _expressed(self, memory: InducingMemory, prior: Prior, Z: Tensor) -> InducingCache:
        basis = basis_of_independent(prior.kernel, Z, prior.num_outputs)
        log_basis(prior.model, basis, memory)
        return InducingCache(state_of(prior.kernel), memory.in_basis(basis), basis)

    def objective(
        self, memory: InducingMemory, cache: Cached, prior: Prior
    ) -> tuple[Tensor, Cached]:
        """Return the online bound; rows of the window enter with their full covariance.

        That of batch SGPR for what is in the statistics. Cost O((M + window)³). [Bui2017, eq. 7;
        Titsias2009, eq. 9; Galy-Fajou2021, A.1] While the window holds all observations it is that
        of a dense exact process, which takes no difference of numbers as large as the outcomes over
        the noise.
        """
        rows = memory.rows.data
        if len(rows) > 0 and bool((memory.counts == len(rows)).all()):
            covariance = differentiable_matrix(prior.kernel, rows.X, rows.X, prior.num_outputs)
            return prior.log_evidence_of_rows(rows, covariance), cache
        told = memory.as_values
        covariance = told.values.prior(prior.kernel, prior.num_outputs)
        groups = self.noise_groups(told.statistics, prior)
        bound = subspace_log_marginal_likelihood(groups, prior.target_map(), covariance)
        return bound - 0.5 * self.trace_term(told.trace, prior), cache

    # --- memory --------------------------------------------------------------------------------

    def merged(
        self, memory: InducingMemory, cache: Cached, other: InducingMemory, prior: Prior
    ) -> tuple[InducingMemory, Cached]:
        """Let the allocator, if any, take the other's points; project its statistics onto these."""
        before = self.current(memory, cache, prior)
        basis, theirs, allocator = before.basis, other.whole, copy(memory.allocator)
        if allocator is not None and not torch.equal(theirs.values.Z, basis.Z):
            Z = self._allocated(allocator, basis, theirs.values.Z, prior)
            basis = basis_of_independent(prior.kernel, Z, prior.num_outputs)
        if not bool(members(theirs.values.Z, basis.Z).all()):
            warnings.warn(
                "merge projects the other model's memory onto this one's inducing points, for they "
                "are not the same: an approximation. Give both the same inducing_points.",
                ProjectionWarning,
                stacklevel=users_stack_level(),
            )
        both = before.memory.in_basis(basis)
        whole = both.whole + theirs.in_basis(basis)
        both = replace(both, whole=whole, allocator=allocator, held=None)
        return self.remembered(before, InducingCache(before.state, both, basis), prior)

    def cleared(self, memory: InducingMemory, prior: Prior) -> InducingMemory:
        """Keep the points, and what places them."""
        empty = InducingMemory.empty(memory.values, prior.shape, memory.allocator)
        return replace(empty, moments=memory.moments)

    def moved(
        self, memory: InducingMemory, cache: Cached, device: torch.device
    ) -> tuple[InducingMemory, Cached]:
        """Keep the basis, for one that is made again differs by rounding or a jitter."""
        after = memory.to(device)
        if cache is None:
            return after, None
        present = after if memory.is_in(cache.basis) else cache.memory.to(device)
        basis = replace(cache.basis.to(device), root=present.values.root)
        return after, InducingCache(tuple(t.to(device) for t in cache.state), present, basis)

    # --- inducing points -----------------------------------------------------------------------

    def placed(self, cache: InducingCache, X: Tensor, prior: Prior) -> InducingCache:
        """Express the memory at the points that its allocator, copied, wants for inputs X."""
        basis, allocator = cache.basis, copy(cache.memory.allocator)
        if allocator is None:
            return cache
        Z, M = self._allocated(allocator, basis, X.flatten(0, -2), prior), basis.rank
        memory = replace(cache.memory, allocator=allocator)
        if torch.equal(Z, basis.Z):
            return replace(cache, memory=memory)
        if M > 0 and torch.equal(Z[:M], basis.Z):
            with suppress(NotPSDError):  # then some are left out
                basis = basis.grown(Z[M:])
                return InducingCache(cache.state, memory.grown(basis), basis)
        basis = basis_of_independent(basis.kernel, Z, prior.num_outputs)
        return InducingCache(cache.state, memory.in_basis(basis), basis)

    def _allocated(
        self, allocator: Allocator, basis: InducingBasis, X: Tensor, prior: Prior
    ) -> Tensor:
        """Ask the allocator for points, as many as there may be, and check what it returns."""
        Z: object = allocator.update(basis.Z, X, basis.kernel)
        fits = isinstance(Z, Tensor) and Z.ndim == 2 and Z.shape[-1] == X.shape[-1] and len(Z) > 0
        if not isinstance(Z, Tensor) or not fits or not bool(torch.isfinite(Z).all()):
            shape = tuple(Z.shape) if isinstance(Z, Tensor) else Z
            raise InputDataError(
                f"Expected allocator to return finite inducing points of shape `M x {X.shape[-1]}`,"
                f" at least one, got {shape}."
            )
        wanted = Z.detach().to(X)
        check_points_fit(min(len(wanted), self.max_points), prior.shape.numel())
        return capped(basis.Z, wanted, basis.kernel, self.max_points)

    def remembered(
        self, before: InducingCache, after: InducingCache, prior: Prior
    ) -> tuple[InducingMemory, InducingCache]:
        """Return the memory that a cache has, to be kept; look at its points if they have moved."""
        if after.basis is not before.basis:
            log_basis(prior.model, after.basis, after.memory)
            self.warn_of_coarse_points(after.memory, prior)
        return after.memory, after

    def warn_of_coarse_points(self, memory: InducingMemory, prior: Prior) -> None:
        """Warn once, if the points place themselves, and not before a first training has ended."""
        model = prior.model
        if model.training or model.has_said(COARSE) or memory.allocator is None:
            return
        total = self.trace_term(memory.whole.trace, prior)
        ratio = float((total / memory.counts.clamp_min(1.0)).max())
        if ratio > 1.0:
            model.says(COARSE)
            warn_of_coarse_points(ratio, len(memory.values.Z), self.max_points)

    def check_solvable(self, memory: InducingMemory, prior: Prior) -> None:
        """Check that a memory from which observations were taken out has a posterior, in O(M³)."""
        gram = prior.evidence_of(self.noise_groups(memory.whole.statistics, prior)).gram
        if bool(torch.linalg.cholesky_ex(weight_precision(gram))[1].any()):
            raise never_in()


@dataclass(frozen=True)
class CollapsedInference(InducingInference):
    """Inference for Gaussian noise: observations enter the statistics as they are.

    The bound is collapsed: the optimal posterior of the values at the points is solved for (Bui,
    Nguyen and Turner, 2017).

    Attributes:
        window: How many of the latest observations are stored as rows.
    """

    window: int

    def observe(
        self, memory: InducingMemory, cache: Cached, data: Observations, prior: Prior
    ) -> tuple[InducingMemory, Cached]:
        """Place the points, then add the batch to the statistics in O(n M²)."""
        now = before = self.current(memory, cache, prior)
        if data.sign > 0.0:
            moved = not memory.is_in(before.basis)  # then rows are placed as if they came now
            X = torch.cat((before.memory.rows.data.X, data.X), -2) if moved else data.X
            now = self.placed(before, X, prior)
        rows = Rows.of(data, now.basis, prior.shape)
        after, solved = now.memory.after(rows, self.window), before.solved
        if data.sign < 0.0:
            check_outcomes(after.statistics, now.memory.statistics)
            self.check_solvable(after, prior)
            if not bool(after.counts.any()):
                after, solved = self.cleared(after, prior), None  # without rounding errors
        if solved is not None:
            follows = prior.is_in(solved.state) and solved.can_take(data, now.basis)
            solved = solved.after(rows.features, *prior.standardized(data)) if follows else None
        return self.remembered(before, InducingCache(now.state, after, now.basis, solved), prior)

    def refitted(
        self, memory: InducingMemory, cache: Cached, prior: Prior
    ) -> tuple[InducingMemory, Cached]:
        """Place the points again for the new kernel, among the rows of the window."""
        now = before = self.current(memory, cache, prior)
        if memory.is_in(before.basis):
            return memory, before
        if len(memory.rows.data) > 0:
            now = self.placed(before, memory.rows.data.X, prior)
        self.warn_of_coarse_points(now.memory, prior)
        return self.remembered(before, now, prior)

    def noise_groups(self, statistics: WhitenedMemory, prior: Prior) -> list[NoiseGroup]:
        """Return observations with inferred and with known noise."""
        return prior.noise_groups(statistics)

    def trace_term(self, trace: TraceTerm, prior: Prior) -> Tensor:
        """Divide by the noise variance where that is inferred."""
        total, level = trace.known * prior.scale.square(), prior.common_noise
        return total if level is None else total + trace.learned / level

    # --- points that move by the bound ---------------------------------------------------------

    def at_points(
        self, memory: InducingMemory, prior: Prior, Z: Tensor
    ) -> tuple[InducingMemory, InducingCache]:
        """Put the inducing points elsewhere, to Z, ``M x d``; the window's rows stay exact."""
        check_points_fit(len(Z), prior.shape.numel())
        moved = self._expressed(memory, prior, Z)
        self.warn_of_coarse_points(moved.memory, prior)
        return moved.memory, moved

    def bound_at(self, memory: InducingMemory, prior: Prior, kernel: Kernel, Z: Tensor) -> Tensor:
        """Return the bound with the points at Z and all observations as statistics, ``batch x m``.

        Differentiable in Z, in mean and noise, and in the kernel unless that is frozen.
        """
        moved = memory.in_basis(InducingBasis.of(kernel, Z, prior.num_outputs, live=True)).whole
        evidence = prior.evidence_of(self.noise_groups(moved.statistics, prior))
        weights = solve(evidence)
        value = log_marginal_likelihood(evidence, weights.mean, weights.log_precision())
        return value - 0.5 * self.trace_term(moved.trace, prior)

    def optimized_points(
        self, memory: InducingMemory, cache: Cached, prior: Prior, maxiter: int
    ) -> Tensor:
        """Move the points up the bound by L-BFGS; return those before if they are no better."""
        cache = self.current(memory, cache, prior)
        now, kernel, start = cache.memory, cache.basis.kernel, cache.basis.Z
        points = start.clone().requires_grad_(True)

        def bound(Z: Tensor) -> Tensor:
            return self.bound_at(now, prior, kernel, Z).sum()

        with torch.enable_grad():
            maximise(lambda: bound(points), [points], maxiter)
        reached = points.detach()
        with torch.no_grad():
            better = bool(reached.isfinite().all()) and bool(bound(reached) >= bound(start))
        return reached if better else start


def empty_memory(Z: Tensor, prior: Prior, allocator: Allocator | None) -> InducingMemory:
    """Make a memory of no observations at points Z, ``M x d``, in transformed inputs."""
    basis = basis_of_independent(prior.kernel, Z.to(torch.float64), prior.num_outputs)
    memory = InducingMemory.empty(basis.values, prior.shape, allocator)
    log_basis(prior.model, basis, memory)
    return memory


def log_basis(model: StreamingGP, basis: InducingBasis, memory: InducingMemory) -> None:
    """Put on a model's record what a basis of a memory took."""
    count = float(memory.counts.reshape(-1)[0])
    if basis.left_out > 0:
        points = basis.rank + basis.left_out
        model.log_event("inducing points left out", points, observations=count)
    if basis.jitter > 0.0:
        what = "jitter on the kernel matrix of inducing points"
        model.log_event(what, basis.rank, basis.jitter, count)


@torch.no_grad()
def basis_of_independent(kernel: Kernel, Z: Tensor, outputs: int) -> InducingBasis:
    """Return the basis at Z, or at fewer points where even the largest jitter gives none.

    Those that the others determine go, by the kernel's values, however wrong these are.
    NotPSDError: the values are NaN or infinite.
    """
    try:
        return InducingBasis.of(kernel, Z, outputs)
    except NotPSDError:
        matrix = kernel_matrix(as_read(kernel), Z, Z, outputs)
        if not bool(matrix.isfinite().all()):
            raise
        basis = InducingBasis.of(kernel, Z[independent_rows(matrix)], outputs)
    return replace(basis, left_out=len(Z) - basis.rank)


def check_points(name: str, Z: Tensor, dim: int, most: int) -> None:
    """Check that a tensor holds finite points of ``dim`` inputs, ``most`` of them or fewer."""
    check_type(name, Z)
    if Z.ndim != 2 or Z.shape[-1] != dim:
        raise BotorchTensorDimensionError(
            f"Expected {name} of shape `M x {dim}`, shared by batch elements and outputs, got "
            f"{tuple(Z.shape)}."
        )
    check_finite(name, Z)
    if most < len(Z):
        raise ValueError(
            f"Expected max_points of at least {len(Z)}, the inducing points given, got {most}."
        )


def check_allocator(allocator: object) -> None:
    """Check that an allocator is one of a stream, or None."""
    if allocator is not None and not isinstance(allocator, Allocator):
        name = getattr(allocator, "__name__", type(allocator).__name__)
        raise UnsupportedError(
            "Expected allocator to be one of bo_stream.allocation, such as OIPS(0.8), or None, got "
            f"{name}. BoTorch's allocators know no stream: for its GreedyVarianceReduction take "
            "GreedyVariance(max_points)."
        )


def check_points_fit(points: int, outputs: int) -> None:
    """Check that matrices over M points fit into memory, for outputs of all batch elements."""
    check_memory(
        f"{points:,} inducing points",
        MATRICES * outputs * points**2,
        MEMORY_LIMIT_GIB,
        "Take a smaller max_points, or an allocator that takes fewer.",
    )
