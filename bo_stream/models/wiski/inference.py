"""From the memory of a grid model to its posterior and its evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from torch import Tensor

from bo_stream.bases.grid.interpolation import GridBasis, grid_basis
from bo_stream.bases.grid.kernel import GridKernel, kernel_factors
from bo_stream.bases.grid.mesh import Mesh
from bo_stream.bases.grid.statistics import NodeStatistics, check_room
from bo_stream.models.inference import Inference, Prior, Solved, SolvedWeights
from bo_stream.models.memory import Measured, Observations, check_remainder
from bo_stream.models.outcomes.gaussian import DirichletScores, LabelOutcomes
from bo_stream.models.outcomes.noise import NOISE_FLOOR
from bo_stream.models.wiski import memory as row_memory
from bo_stream.models.wiski.cache import (
    WHITENED_ROWS,
    WIDER_GRIDS,
    FitSubspace,
    GridCache,
    GridSolution,
    Subspace,
    Whitening,
    batch_log_marginal_likelihood,
    differentiable_log_marginal_likelihood,
)
from bo_stream.models.wiski.memory import (
    GridMemory,
    GridPrior,
    RowMemory,
    StreamMemory,
    WiskiMemory,
)
from bo_stream.models.wiski.resolution import (
    GridSize,
    choose_grid_size,
    warn_of_coarse_grid,
    warn_of_resolution,
    warn_of_truncation,
)
from bo_stream.observation_space import ObservationSpaceProcess
from bo_stream.process import (
    ConditionedProcess,
    PosteriorProcess,
    SelectedProcess,
    WeightSpaceProcess,
)
from bo_stream.tensors import is_in, map_tensors, state_of, zip_tensors
from bo_stream.weights import solve


def with_unseen_classes(memory: WiskiMemory, classes: int, scores: DirichletScores) -> WiskiMemory:
    """Add outputs to a memory: classes that none of the observations had.

    To such a class every observation is a miss. Those statistics need not be kept in advance: each
    observation is a hit of one class and a miss of the m - 1 others, so summed over the known
    classes its precision is ``1/hit + (m-1)/miss`` whatever its label, and the sums of all
    observations are those over classes divided by that. Exact, and additive like the memory itself,
    hence equal to having known the classes from the start. Cost O(7^d p), or O(n) for rows.

    Args:
        memory: Of all the known classes, at least one.
        classes: How many there are to be.
        scores: Of labels; the targets of new outputs are shifted to zero.
    """
    if isinstance(memory, RowMemory):
        rows, (known, n) = memory.rows, memory.rows.targets.shape
        targets = torch.cat((rows.targets, rows.targets.new_zeros(classes - known, n)))
        missed = rows.noise.new_full((classes - known, n), scores.miss_noise)
        noise = torch.cat((rows.noise, missed))
        return replace(memory, rows=replace(rows, targets=targets, noise=noise))
    return memory.each(lambda part: _extended(part, classes, scores))


def _extended(memory: GridMemory, classes: int, scores: DirichletScores) -> GridMemory:
    empty, known = memory.learned, memory.known
    more = classes - empty.moment.shape[0]
    padded = _appended(empty, map_tensors(empty.scale(0.0), lambda value: value[:1]), more)
    # its one gram is that of all outputs
    return replace(
        memory,
        learned=replace(padded, gram=empty.gram),
        known=None if known is None else _appended(known, _missed(known, scores), more),
    )


def _missed(statistics: NodeStatistics, scores: DirichletScores) -> NodeStatistics:
    """Compute statistics of an output that all observations miss, with targets of zero."""
    known = statistics.moment.shape[0]
    precision = 1.0 / scores.hit_noise + (known - 1) / scores.miss_noise
    factor = 1.0 / (precision * scores.miss_noise)
    shared = map_tensors(statistics, lambda value: value.sum(0, keepdim=True) * factor)
    count = statistics.count[:1]
    one = torch.zeros(2, 2).to(count)
    one[1, 1] = 1.0
    return replace(
        shared,
        moment=shared.moment * one[1],
        energy=shared.energy * one,
        totals=count[..., None, None] * one,
        log_noise=count * math.log(scores.miss_noise),
        noise_sum=count * scores.miss_noise,
    )


def _appended(first: NodeStatistics, last: NodeStatistics, copies: int) -> NodeStatistics:
    """Append so many copies of one output's statistics to those of others."""
    return zip_tensors(lambda a, b: torch.cat((a, *[b] * copies)), first, last)


# --- inference on a grid: exact for an interpolated kernel ---------------------------------------


COARSE = "coarse grid"

_LARGEST_TOLERANCE = 0.5


@dataclass(frozen=True)
class GridInference(Inference[WiskiMemory, GridCache]):
    """The exact posterior for the kernel ``w(x)ᵀ K w(x')`` that is interpolated from a grid.

    In the space of the observations while the memory holds these as rows, else in the weights of
    the kernel's r largest eigenvectors.

    Attributes:
        dim: Number of inputs that the grid covers.
        tolerance: Part of the kernel's trace that may be left out.
        max_rank: Cap on r.
        chose_grid: Whether the grid's size is the default.
        window: How many of the latest outcomes are stored on the grid, of counts.
    """

    on_grid: ClassVar[bool] = True
    defers_reads: ClassVar[bool] = True
    least_noise: ClassVar[float] = NOISE_FLOOR

    dim: int
    tolerance: float
    max_rank: int
    chose_grid: bool
    window: int = 0

    @classmethod
    def start(
        cls, prior: Prior, box: Tensor, size: GridSize | None, rank: tuple[float, int], like: Tensor
    ) -> tuple[Self, WiskiMemory]:
        """Build the inference, and a memory of no observations.

        Args:
            prior: The hyperparameters.
            box: That the grid covers, ``2 x d``.
            size: Nodes per dimension; None: by the kernel.
            rank: ``tolerance`` and ``max_rank``.
            like: Inputs, of whose dtype and on whose device observations will be.

        Raises:
            ValueError: The size is out of range, or the grid too large for memory.
        """
        inference = cls(box.shape[-1], *rank, size is None)
        kernel = inference.kernel(prior)
        sizes = choose_grid_size(size, kernel, inference.dim)
        grid = Mesh.over(box, kernel.groups(inference.dim), sizes)
        return inference, inference._empty(grid, prior, like.device, torch.finfo(like.dtype).eps)

    def kernel(self, prior: Prior) -> GridKernel:
        """Return the kernel before it is interpolated, differentiable in the hyperparameters."""
        kernel = kernel_factors(prior.kernel, self.dim)
        return kernel.for_single_output() if prior.num_outputs == 1 else kernel

    def part(self, memory: WiskiMemory, cache: GridCache | None) -> Part:
        """Return inference, memory and cache of the process, without those of a noise model."""
        return self, memory, cache

    def with_part(self, of: Part, memory: WiskiMemory, cache: GridCache | None) -> Part:
        """Return inference, memory and cache with another :meth:`part`."""
        return of

    # --- memory -------------------------------------------------------------------------------

    def _empty(
        self, grid: Mesh, prior: Prior, device: torch.device, rounding: float
    ) -> WiskiMemory:
        """Make a memory of no observations, which holds rows while they are few."""
        shape, most = (prior.batch_shape, prior.num_outputs), row_memory.MOST_ROWS
        if most == 0 or self.max_rank < most:  # features are wanted that leave a part out
            return replace(StreamMemory.empty(grid, *shape, device), rounding=rounding)
        columns = prior.outcomes.columns
        return replace(RowMemory.empty(grid, *shape, device, most, columns), rounding=rounding)

    def cleared(self, memory: WiskiMemory, prior: Prior) -> WiskiMemory:
        """Drop the observations; the grid stays."""
        return self._empty(memory.grid, prior, memory.counts.device, memory.rounding)

    def observe(
        self,
        memory: WiskiMemory,
        cache: GridCache | None,
        data: Observations,
        prior: Prior,
        is_known: bool = False,
    ) -> tuple[WiskiMemory, GridCache | None]:
        """Add to the rows, or to the statistics at the nodes around each input, in place.

        The grid grows first where that is needed. Cost O(n 7^d) on the grid, to take observations
        out O(n r² + r³) besides. With ``is_known`` observations to take out are known to be in
        memory, and this is not checked.
        """
        if data.sign < 0.0:
            if not is_known and isinstance(memory, StreamMemory):
                cache = self._check_holds(memory, cache, data, prior)
            if isinstance(memory, RowMemory) or not memory.all_on_current:
                return memory.without(data), None
        roomy, rows = memory.covering(data.X), None
        if roomy is not memory:
            cache = None
        if isinstance(roomy, RowMemory):
            rows = roomy.observed(data)
            roomy = roomy.on_grid() if rows is None else rows
        if cache is not None:
            cache = cache.after(data, prior, holds_rows=rows is not None)
        if isinstance(roomy, StreamMemory):
            roomy = roomy.observed(data)
        return roomy, cache

    @torch.no_grad()
    def _check_holds(
        self, memory: StreamMemory, cache: GridCache | None, data: Observations, prior: Prior
    ) -> GridCache:
        """Check that without observations the memory is one of observations."""
        memory.check_holds(data.X)
        whitening, cache = self.whitened(memory, cache, prior)
        if memory.all_on_current and len(data) <= WHITENED_ROWS:
            left = whitening.after(data, whitening.basis.features(data.X)).settled().memory
        else:
            left = memory.without(data).whitened(whitening.basis)
        check_remainder(left, whitening.memory)
        return cache

    def replaced(
        self,
        memory: WiskiMemory,
        cache: GridCache | None,
        old: Observations,
        new: Observations,
        prior: Prior,
    ) -> tuple[WiskiMemory, GridCache | None]:
        """Take observations out, which are not looked for on a grid, and put others in.

        Raises:
            InputDataError: One is outside the bounds, or not among the rows.
            UnsupportedError: There are observations on several grids.
        """
        if isinstance(memory, StreamMemory):
            memory.check_holds(old.X)
        memory, cache = self.observe(memory, cache, old, prior, is_known=True)
        return self.observe(memory, cache, new, prior)

    def merged(
        self, memory: WiskiMemory, cache: GridCache | None, other: WiskiMemory, prior: Prior
    ) -> tuple[WiskiMemory, GridCache | None]:
        """Join rows while they are few, else statistics; a different grid is kept alongside.

        Raises:
            UnsupportedError: The grids are of other groups of inputs.
            InputDataError: The common grid would become too wide.
        """
        if memory.grid.groups != other.grid.groups:
            raise UnsupportedError(
                "Cannot merge models whose covar_module is a sum over different groups of inputs: "
                f"{memory.grid.groups} and {other.grid.groups}."
            )
        other = other.aligned(memory.grid, max(memory.rounding, other.rounding))
        if isinstance(memory, RowMemory):
            if isinstance(other, RowMemory):
                both = memory.covering(other.grid.bounds).observed(other.rows)
                if both is not None:
                    return both, None
            memory = memory.on_grid()
        return memory.absorb(other.on_grid() if isinstance(other, RowMemory) else other), None

    def refined(
        self, memory: WiskiMemory, grid_size: GridSize, prior: Prior
    ) -> tuple[GridInference, WiskiMemory]:
        """Return the inference and the memory with another grid over the same box."""
        sizes = choose_grid_size(grid_size, self.kernel(prior), self.dim)
        return replace(self, chose_grid=False), memory.refined(memory.grid.resized(sizes))

    def grown(self, memory: WiskiMemory, prior: Prior, outputs: int) -> WiskiMemory:
        """Return the memory with classes that every label has missed; see :class:`Inference`."""
        if not isinstance(prior.outcomes, LabelOutcomes):
            return super().grown(memory, prior, outputs)
        check_room(memory.grid, outputs)
        return with_unseen_classes(memory, outputs, prior.outcomes.scores)

    # --- the posterior ------------------------------------------------------------------------

    def process(
        self,
        memory: WiskiMemory,
        cache: GridCache | None,
        prior: Prior,
        X: Tensor | None = None,
        in_features: bool = False,
    ) -> tuple[PosteriorProcess, GridCache]:
        """Solve in the space of the rows, or in the weights of features, unless cached.

        Inputs outside the bounds are predicted from a wider grid, whose kernel is the same, with
        features of its own; what the model predicts inside the bounds stays as it is.
        """
        cache = GridCache.of(memory) if cache is None else cache
        in_rows = isinstance(memory, RowMemory) and not in_features
        own, solution = cache.own, cache.own
        if X is not None and not own.grid.contains(X):
            grid = memory.grid_past(X)
            kept = (wider for wider in cache.wider if wider.grid == grid)
            solution = next(kept, GridSolution(grid))
        solved = solution.rows if in_rows else solution.weights
        if solved is None or not is_in(prior.model, solved.state):
            solution, solved = self._solve(solution, memory, prior, in_rows)
        if solution.grid is own.grid:
            return solved.process, cache if solution is own else replace(cache, own=solution)
        others = (wider for wider in cache.wider if wider.grid != solution.grid)
        wider = (*others, replace(solution, asked=True))[-WIDER_GRIDS:]
        return solved.process, replace(cache, wider=wider)

    def feature_process(
        self, memory: WiskiMemory, cache: GridCache | None, prior: Prior, X: Tensor | None = None
    ) -> tuple[PosteriorProcess, GridCache]:
        """Solve in the weights of features, however many rows there are."""
        return self.process(memory, cache, prior, X, in_features=True)

    def _solve(
        self, solution: GridSolution, memory: WiskiMemory, prior: Prior, in_rows: bool
    ) -> tuple[GridSolution, Solved[ObservationSpaceProcess] | SolvedWeights]:
        state = prior.state()
        if in_rows and isinstance(memory, RowMemory):
            rows = Solved(state, self.solve_rows(memory, prior, solution.grid))
            return replace(solution, rows=rows), rows
        whitening = self._whitening(solution, memory, prior)
        mean = prior.mean.unsqueeze(-1).clone()
        process = WeightSpaceProcess(whitening.basis, solve(prior.evidence(whitening.memory)), mean)
        weights = SolvedWeights(state, process)
        return replace(solution, whitening=whitening, weights=weights), weights

    @torch.no_grad()
    def solve_rows(
        self, memory: RowMemory, prior: Prior, grid: Mesh | None = None
    ) -> ObservationSpaceProcess:
        """Solve in the space of the rows, on their own grid if none is given. Cost O(n³)."""
        kernel, grid = self.kernel(prior).detached(), memory.grid if grid is None else grid
        mean = prior.mean.unsqueeze(-1).clone()
        before = GridPrior(kernel, grid, mean, self.tolerance, self.max_rank)
        return prior.given_rows(before, memory.rows)

    @torch.no_grad()
    def whitened(
        self, memory: WiskiMemory, cache: GridCache | None, prior: Prior
    ) -> tuple[Whitening, GridCache]:
        """Return the memory in the features of the present kernel, and the cache that has it."""
        cache = GridCache.of(memory) if cache is None else cache
        whitening = self._whitening(cache.own, memory, prior)
        if whitening is not cache.own.whitening:
            cache = replace(cache, own=replace(cache.own, whitening=whitening))
        return whitening, cache

    def _whitening(self, solution: GridSolution, memory: WiskiMemory, prior: Prior) -> Whitening:
        whitening = solution.whitening
        if whitening is None or not is_in(prior.kernel, whitening.state):
            basis = self.basis(solution.grid, prior)
            warn_of_truncation(basis, self.max_rank)
            whitening = Whitening(state_of(prior.kernel), basis, memory.whitened(basis))
        return whitening.settled()

    @torch.no_grad()
    def basis(self, grid: Mesh, prior: Prior) -> GridBasis:
        """Return the features of the present kernel on a grid."""
        kernel = self.kernel(prior)
        return grid_basis(grid, kernel, prior.shape, self.tolerance, self.max_rank)

    def check_reach(self, process: PosteriorProcess, X: Tensor | None) -> None:
        """Check that inputs are inside the grid of a conditioned process."""
        check_in_grid(process, X)

    # --- learning -----------------------------------------------------------------------------

    def objective(
        self, memory: WiskiMemory, cache: GridCache | None, prior: Prior
    ) -> tuple[Tensor, GridCache | None]:
        """Return the log marginal likelihood, on a grid in a subspace that is kept for a while.

        See :class:`~bo_stream.models.wiski.cache.FitSubspace`.
        """
        kernel = self.kernel(prior)
        if isinstance(memory, RowMemory):
            return self.log_marginal_likelihood_of_rows(memory, kernel, prior), cache
        cache, noise = cache or GridCache.of(memory), prior.outcomes.noise_level(prior, memory)
        space = cache.learning
        if space is None or not space.holds(kernel, noise):
            space = FitSubspace.around(kernel, noise, memory, self.tolerance, self.max_rank)
            cache = replace(cache, learning=space)
        return space.log_marginal_likelihood(kernel, prior), cache

    def log_marginal_likelihood(
        self, memory: WiskiMemory, cache: GridCache | None, prior: Prior
    ) -> tuple[Tensor, GridCache | None]:
        """Return the log evidence, exact where no feature is left out."""
        kernel = self.kernel(prior)
        if isinstance(memory, RowMemory):
            return self.log_marginal_likelihood_of_rows(memory, kernel, prior), cache
        whitening, cache = self.whitened(memory, cache, prior)
        groups = prior.noise_groups(whitening.memory)
        value = differentiable_log_marginal_likelihood(
            groups, prior.target_map(), whitening.basis, kernel
        )
        return value, cache

    def log_marginal_likelihood_of_rows(
        self, memory: RowMemory, kernel: GridKernel, prior: Prior
    ) -> Tensor:
        """Return the log evidence of stored rows, ``batch_shape x m``. Differentiable, O(n³)."""
        return prior.log_evidence_of_rows(memory.rows, memory.covariance(kernel))

    def batch_log_marginal_likelihood(
        self, grid: Mesh, inputs: Tensor, data: Measured, prior: Prior
    ) -> Tensor:
        """Return the log evidence of other observations than the memory's, ``batch_shape x m``.

        Differentiable in the hyperparameters and the inputs, which are ``batch_shape x n x d`` as
        the process takes them. Cost O(n r² + r³).
        """
        outcomes, noise = prior.standardized(data)
        basis = self.basis(grid, prior)
        return batch_log_marginal_likelihood(
            inputs.double(),
            outcomes - prior.mean.unsqueeze(-1),
            noise,
            basis,
            self.kernel(prior),
        )

    def refitted(
        self, memory: WiskiMemory, cache: GridCache | None, prior: Prior
    ) -> tuple[WiskiMemory, GridCache]:
        """Check the grid against the new kernel; a fit's space is no longer needed."""
        cache = GridCache.of(memory) if cache is None else replace(cache, learning=None)
        if cache.checked is not None and is_in(prior.kernel, cache.checked):
            return memory, cache
        if not warn_of_resolution(self.kernel(prior), memory.grid):
            self.warn_of_coarse_grid(memory, prior)
        return memory, replace(cache, checked=state_of(prior.kernel))

    def warn_of_coarse_grid(self, memory: WiskiMemory, prior: Prior) -> None:
        """Warn once, if the grid's size is the default."""
        vouches = self.chose_grid and not prior.model.has_said(COARSE)
        if vouches and bool((memory.counts > 0.0).any()):
            noise = self.typical_noise(memory, prior)
            if warn_of_coarse_grid(self.kernel(prior), memory.grid, noise):
                prior.model.says(COARSE)

    # --- as few features as the noise asks for ------------------------------------------------

    def truncated(self, left_out: float, memory: WiskiMemory, prior: Prior) -> GridInference:
        """Return the inference with the tolerance that :meth:`share_of_noise` says."""
        if not 0.0 <= left_out < 1.0:
            raise ValueError(f"Expected left_out in [0, 1), got {left_out}.")
        return replace(self, tolerance=self.share_of_noise(left_out, memory, prior))

    def share_of_noise(self, left_out: float, memory: WiskiMemory, prior: Prior) -> float:
        """Return ``left_out`` of the noise variance in parts of the prior variance, the least."""
        return min(left_out * self.typical_noise(memory, prior), _LARGEST_TOLERANCE)

    @torch.no_grad()
    def typical_noise(self, memory: WiskiMemory, prior: Prior) -> float:
        """Return the noise variance in parts of the prior variance, the least one of the outputs.

        Of known noise variances the harmonic mean counts: precise observations tell small
        differences apart however imprecise others are.
        """
        noise, known = prior.outcomes.noise_level(prior, memory), memory.typical_known_noise()
        if known is not None:
            precise = (known / prior.scale.square()).clamp_min(NOISE_FLOOR)
            noise = noise.minimum(precise)
        if prior.outcomes.floor.any_zero:
            noise = noise.minimum(prior.zero_noise.clamp_min(NOISE_FLOOR))
        return float((noise / self.kernel(prior).scale()).min())

    def following(
        self, memory: WiskiMemory, cache: GridCache | None, prior: Prior, left_out: float
    ) -> tuple[Subspace, GridCache]:
        """Choose features for hyperparameters that move with a stream.

        They leave out ``left_out`` of the noise variance.
        """
        share = self.share_of_noise(left_out, memory, prior)
        subspace = Subspace.around(self.kernel(prior), memory, share, self.max_rank)
        return subspace, replace(cache or GridCache.of(memory), subspace=subspace, followed=None)


Part = tuple[GridInference, WiskiMemory, GridCache | None]
"""Inference, memory and cache of a model's process, without those of a model of its noise."""


def check_in_grid(process: PosteriorProcess, X: Tensor | None) -> None:
    """Check that inputs are inside the grid, if there is one, of a conditioned process.

    Raises:
        InputDataError: They are not.
    """
    grid = grid_of(process)
    if X is not None and grid is not None and not grid.contains(X):
        raise InputDataError(
            "X lies outside the bounds of a model that is conditioned on hypothetical data, "
            "whose grid cannot grow. "
            f"Build the model with wider bounds than {grid.bounds.tolist()}."
        )


def grid_of(process: PosteriorProcess) -> Mesh | None:
    """Return the grid of a grid model's process, before it was conditioned; None: of no grid."""
    while isinstance(process, ConditionedProcess | SelectedProcess):
        process = process.base
    if isinstance(process, ObservationSpaceProcess):
        return process.prior.mesh if isinstance(process.prior, GridPrior) else None
    basis = process.basis if isinstance(process, WeightSpaceProcess) else None
    return basis.grid if isinstance(basis, GridBasis) else None
