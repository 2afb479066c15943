"""The memory of a clustered model, and the posterior from it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache as cached
from functools import partial
from typing import Literal

import torch
from botorch.exceptions.errors import InputDataError
from gpytorch.kernels import Kernel
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from bo_stream.allocation.cover_tree import CoverTree
from bo_stream.bases.inducing import as_read, frozen, in_dtype, kernel_variance
from bo_stream.linalg import check_memory, inverse_root, product_of_triangular_root
from bo_stream.marginal_likelihood import NoiseGroup, combine, expected_misfit
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
from bo_stream.models.inference import Inference, Prior
from bo_stream.models.memory import HoldsStatistics, Observations, WhitenedMemory, check_remainder
from bo_stream.process import PosteriorProcess
from bo_stream.warnings import ProjectionWarning, users_stack_level, warn_of_coarse_centres
from bo_stream.weights import InformationForm, Regrouping, grouped_statistics

EMPTY = 1e-6
"""A cluster from which observations were taken out is empty when fewer than this are left."""


@dataclass(frozen=True)
class ClusterMemory(HoldsStatistics):
    """Statistics of all observations in the values of the process at the centres.

    The feature of an observation is the indicator of its cluster, hence the gram is diagonal: the
    sums of precisions, kept as a column. Sums are in float64 whatever the dtype of the centres.
    [Terenin2024, eq. 22 and 23]

    Attributes:
        tree: Finds centres; never changed in place.
        centres: Its finest, ``M x d``.
        statistics: Grams ``... x m x M x 1``, moments ``... x m x M x 2``.
        sizes: Number of observations in each cluster, ``... x M x 1``.
        moves: Squared distances from the observations' inputs to where they act, summed, for each
            dimension of the inputs, ``... x d``.
    """

    tree: CoverTree
    centres: Tensor
    statistics: WhitenedMemory
    sizes: Tensor
    moves: Tensor

    @classmethod
    def empty(cls, tree: CoverTree, like: Tensor, batch: torch.Size) -> ClusterMemory:
        """Begin without observations, for ``batch_shape x m`` and centres like ``... x d``."""
        centres = tree.centres if tree.levels else like.new_zeros(0, like.shape[-1])
        none = torch.zeros(*batch, 0, dtype=torch.float64, device=like.device)
        nobody = none[..., 0, :].long()
        statistics = grouped_statistics(nobody, len(centres), none, none, none)
        sizes = none.new_zeros(*batch[:-1], len(centres), 1)
        moves = none.new_zeros(*batch[:-1], like.shape[-1])
        return cls(tree, centres, WhitenedMemory(statistics), sizes, moves)

    def grown(self, tree: CoverTree) -> ClusterMemory:
        """Take a tree that has the same centres first; exact."""
        if not tree.levels or len(tree.centres) == len(self.centres):
            return replace(self, tree=tree)
        index = torch.arange(len(self.centres), device=self.centres.device)
        return self.regrouped(tree, index)

    def regrouped(self, tree: CoverTree, index: Tensor) -> ClusterMemory:
        """Move clusters to a tree's centres of an ``index``, ``M``, and add sums. Cost O(M)."""
        T = Regrouping(index, len(tree.centres))
        statistics = self.statistics.map(lambda s: s.pull_back(T))
        steps = (tree.centres[index] - self.centres).double().square()
        moves = self.moves + (self.sizes * steps).sum(-2)
        return ClusterMemory(tree, tree.centres, statistics, T.transpose(self.sizes), moves)

    def after(self, data: Observations, clusters: Tensor) -> ClusterMemory:
        """Add or take out a batch in clusters ``... x n``. Cost O(n + M).

        Raises:
            InputDataError: A cluster would hold fewer than no observation, or sums of none.
        """
        rule = partial(grouped_statistics, clusters, len(self.centres))
        statistics = self.statistics.observed_by(rule, data)
        one = torch.full_like(clusters, data.sign, dtype=torch.float64)
        sizes = self.sizes.squeeze(-1).scatter_add(-1, clusters, one).unsqueeze(-1)
        steps = (data.X - self.centres[clusters]).square().sum(-2)
        moves = self.moves + data.sign * steps
        if data.sign > 0:
            return replace(self, statistics=statistics, sizes=sizes, moves=moves)
        if bool((sizes < -EMPTY).any()):
            raise InputDataError(
                "Expected X of observations in memory, got more in one cluster than it holds: they "
                "were never put in, or forgotten, or centres nearer to them have been added since."
            )
        check_remainder(statistics, self.statistics)
        held = (sizes > EMPTY).to(sizes)  # of empty clusters rounding errors may be left
        there = held.unsqueeze(-3)
        statistics = statistics.map(
            lambda s: replace(s, gram=s.gram * there, moment=s.moment * there)
        )
        return replace(self, statistics=statistics, sizes=sizes * held, moves=moves)

    def joined(self, other: ClusterMemory) -> tuple[ClusterMemory, bool]:
        """Join two memories at the union of their centres; say whether all clusters stayed.

        A centre of the other tree within the resolution of one of this tree's is no new centre.
        """
        Z = other.centres.to(self.centres)
        if len(Z) == 0:
            return self, True
        tree = copy(self.tree)
        tree.average = False  # new centres are at such points
        tree.insert(Z)
        tree.average = self.tree.average
        index = tree.assign(Z)
        mine, theirs = self.grown(tree), other.regrouped(tree, index)
        moved = (tree.centres[index] != Z).any(-1)
        held = (other.sizes != 0).reshape(-1, len(Z)).any(0)
        both = replace(
            mine,
            statistics=mine.statistics + theirs.statistics,
            sizes=mine.sizes + theirs.sizes,
            moves=mine.moves + theirs.moves,
        )
        return both, not bool((moved & held).any())

    def typical_move(self) -> Tensor:
        """Compute the root mean square move of inputs to where they act, ``... x d``."""
        return (self.moves / self.sizes.sum(-2).clamp_min(1.0)).clamp_min(0.0).sqrt()

    def at_resolution(self, resolution: float) -> ClusterMemory:
        """Cut the tree's levels at a resolution; a finer one is for what comes from now on."""
        if not self.tree.levels:
            tree = copy(self.tree)
            tree.resolution = resolution
            return replace(self, tree=tree)
        if resolution >= self.tree.resolution:
            tree = self.tree.coarsened(resolution)
            return self.regrouped(tree, tree.assign(self.centres))
        tree = copy(self.tree)
        while tree.resolution > resolution:
            tree.refine()
        return replace(self, tree=tree)

    def scale(self, factor: float) -> ClusterMemory:
        """Let every observation count ``factor`` times."""
        scaled = super().scale(factor)
        return replace(scaled, sizes=self.sizes * factor, moves=self.moves * factor)

    def to(self, device: torch.device) -> ClusterMemory:
        """Move the memory to another device."""
        moved = super().to(device)
        return replace(moved, tree=self.tree.to(moved.centres))


# --- exact inference for inputs moved to the centres of clusters [Terenin2024, section 3.3] ------


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


Cached = SolvedClusters | None


@dataclass(frozen=True)
class ClusterInference(Inference[ClusterMemory, SolvedClusters]):
    """The process at M centres, from the sums of their clusters: ``Q = I + R K R`` is solved.

    The options are those of :class:`~bo_stream.ClusteredGP`; the resolution is never doubled where
    ``max_centres`` is None.
    """

    solver: Solver | None
    cg_tolerance: float | None
    arithmetic: torch.dtype
    max_centres: int | None

    # --- memory ---------------------------------------------------------------------------

    def observe(
        self, memory: ClusterMemory, cache: Cached, data: Observations, prior: Prior
    ) -> tuple[ClusterMemory, Cached]:
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
        self, memory: ClusterMemory, cache: Cached, other: ClusterMemory, prior: Prior
    ) -> tuple[ClusterMemory, Cached]:
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
        self, memory: ClusterMemory, cache: Cached, prior: Prior
    ) -> tuple[ClusterMemory, Cached]:
        """Check the centres against the new kernel."""
        self._warn_of_coarse_centres(memory, prior)
        return memory, cache

    # --- the posterior, and the likelihood --------------------------------------------------

    def process(
        self, memory: ClusterMemory, cache: Cached, prior: Prior, X: Tensor | None = None
    ) -> tuple[PosteriorProcess, SolvedClusters]:
        """Solve for the process at the centres, in O(M³) or O(M²) an iteration, unless kept."""
        if cache is None or not prior.is_in(cache.state):
            kernel, Z, K = self.frozen_prior(memory, prior)
            scaled = RootEvidence.of(prior.evidence(memory.statistics), Z.dtype)
            Q, mean = scaled.system(K), prior.mean.unsqueeze(-1).clone()
            solver: CentreSolver
            if self._factorises(len(Z)):
                solver, room = CholeskySolver(inverse_root(Q)), MOST_PENDING
            else:
                solver, room = ConjugateGradients.of(Q, self.cg_tolerance), 0
            solution, root = solver.solve(scaled.target), scaled.root.mT
            process = ClusteredProcess(kernel, Z, prior.num_outputs, root, solution, solver, mean)
            cache = SolvedClusters(prior.state(), process, room)
        return cache.process, cache

    def objective(
        self, memory: ClusterMemory, cache: Cached, prior: Prior
    ) -> tuple[Tensor, Cached]:
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
            model.log_event(IN_FLOAT64, len(Z))
        return Z.double(), covariance_at(Z.double())

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
        """Warn once, unless a first training is under way."""
        model = prior.model
        if model.training or model.has_said(COARSE) or not bool((memory.moves > 0.0).any()):
            return
        precision = precisions(memory, prior).sum(-1) / memory.counts.clamp_min(1.0)
        ratio = float((variance_between(memory, prior) * precision).max())
        if ratio > 1.0:
            model.says(COARSE)
            warn_of_coarse_centres(ratio, memory.tree.resolution, self.max_centres)


@torch.no_grad()
def precisions(memory: ClusterMemory, prior: Prior) -> Tensor:
    """Sum the precisions of each cluster's observations, ``batch_shape x m x M``."""
    return prior.evidence(memory.statistics).gram.squeeze(-1)


@torch.no_grad()
def variance_between(memory: ClusterMemory, prior: Prior) -> Tensor:
    """Return the prior variance of the process between an input and its centre, ``batch x m``.

    At the root mean square distance of the inputs from their centres.
    """
    Z = memory.centres[:PROBED_CENTRES].double()
    moved = Z + memory.typical_move().unsqueeze(-2)
    kernel, outputs = as_read(prior.kernel), prior.num_outputs
    between = cross_matrix(kernel, Z.expand_as(moved), moved, outputs)
    own = kernel_variance(kernel, Z, outputs) + kernel_variance(kernel, moved, outputs)
    return (own - 2.0 * between.diagonal(dim1=-2, dim2=-1)).mean(-1)


@dataclass(frozen=True)
class _Solution:
    """What the likelihood and its gradient are made of, constants of hyperparameters.

    Attributes:
        log_determinant: ``log |Q|``, ``... x m``.
        inverse: ``Q⁻¹``, ``... x m x M x M``.
        representer: ``v = (K + Λ)⁻¹ u``, ``... x m x M x 1``.
        mean: Posterior mean at the centres, ``u − Λ v``, 0 at those without data, float64.
        misfit: ``uᵀ (K + Λ)⁻¹ u``, ``... x m``, float64.
    """

    log_determinant: Tensor
    inverse: Tensor
    representer: Tensor
    mean: Tensor
    misfit: Tensor

    @classmethod
    def of(cls, evidence: InformationForm, K: Tensor) -> _Solution:
        """Cost O(M³). No difference of large numbers is taken, however small Λ is.

        The mean is not ``K v``, whose rounding errors are those of numbers as large as v.
        """
        scaled = RootEvidence.of(evidence, K.dtype)
        solver = CholeskySolver(inverse_root(scaled.system(K)))
        whitened = solver.root.mT @ scaled.target
        v = scaled.root * (solver.root @ whitened)
        roots = solver.root.diagonal(dim1=-2, dim2=-1).double()
        inverse = product_of_triangular_root(solver.root)
        gram = evidence.gram
        mean = torch.where(gram > 0.0, (evidence.moment - v.double()) / gram, 0.0)
        misfit = whitened.double().square().sum((-2, -1))
        return cls(-2.0 * roots.log().sum(-1), inverse, v, mean, misfit)

    @property
    def certainty(self) -> Tensor:
        """``1 − diag Q⁻¹``: what part of the prior is explained, ``... x m x M x 1``, float64."""
        return 1.0 - self.inverse.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).double()


def clustered_log_marginal_likelihood(
    groups: Sequence[NoiseGroup], residual: Tensor, prior: Tensor
) -> Tensor:
    """Return the log marginal likelihood of all observations at their centres, ``... x m``: O(M³).

    [Terenin2024, eq. 23]

    Exact with its gradient, that of the expected complete-data log likelihood (Fisher's identity);
    ``∂/∂K = ½ (v vᵀ − R Q⁻¹ R)``: no factorisation is differentiated.

    Args:
        groups: Their grams are diagonals kept as columns.
        residual: Combination of [Y, 1] to explain, ``... x m x 2 x 1``.
        prior: K, ``... x m x M x M``, in the dtype to compute in.
    """
    with torch.no_grad():
        evidence = combine(groups, residual)
        solution = _Solution.of(evidence, prior)
        logs = evidence.count * math.log(2.0 * math.pi) + evidence.log_noise
        # the energy of the observations about the means of their clusters, and of the means
        gram = evidence.gram
        of_means = torch.where(gram > 0.0, evidence.moment.square() / gram, 0.0)
        misfit = evidence.energy - of_means.sum((-2, -1)) + solution.misfit
        value = -0.5 * (logs + solution.log_determinant + misfit)
        v, root = solution.representer, RootEvidence.of(evidence, prior.dtype).root
        sensitivity = 0.5 * (root * solution.inverse * root.mT - v @ v.mT)
        certainty = solution.certainty
    expected = (sensitivity * prior).sum((-2, -1)).double()
    expected = expected + _misfit(groups, residual, gram, solution.mean, certainty)
    return value - (expected - expected.detach())


def _misfit(
    groups: Sequence[NoiseGroup], residual: Tensor, precision: Tensor, mean: Tensor, share: Tensor
) -> Tensor:
    """Sum the groups' expected misfits, for ``Var[f(Z)]`` the ``share`` of ``1 / precision``."""
    total = []
    for group in groups:
        gram = group.statistics.gram
        part = torch.where(precision > 0.0, gram / precision, 0.0)
        spread = (part * share + gram * mean.square()).sum((-2, -1))
        total.append(expected_misfit(group, residual, mean, spread))
    return torch.stack(total).sum(0)


def clustered_kl_divergence(evidence: InformationForm, prior: Tensor) -> Tensor:
    """Compute ``½ (log |K + Λ| / |Λ| − tr((K + Λ)⁻¹ K) + vᵀ K v)`` for K the prior, ``... x m``.

    [Terenin2024, eq. 24]
    """
    solution = _Solution.of(evidence, prior)
    energy = (solution.representer.double() * solution.mean).sum((-2, -1))
    return 0.5 * (solution.log_determinant - solution.certainty.sum((-2, -1)) + energy)


def stochastic_objective(
    groups: Sequence[NoiseGroup],
    residual: Tensor,
    prior: Tensor,
    kernel_rows: Callable[[Tensor], Tensor],
    make_solver: Callable[[Tensor], CentreSolver],
    signs: Tensor,
    rows: Tensor,
) -> Tensor:
    """Return a number whose gradient estimates that of the log marginal likelihood, ``... x m``.

    See :meth:`ClusteredGP.stochastic_objective`: traces by Hutchinson's probes, sums over pairs of
    centres by a minibatch of rows. [Terenin2024, eq. 85 to 87]

    Args:
        groups: As of :func:`clustered_log_marginal_likelihood`.
        residual: As there.
        prior: As there, without gradients.
        kernel_rows: Maps ``rows`` to those of K, ``... x m x b x M``, differentiable.
        make_solver: Of a matrix Q.
        signs: Hutchinson's probes, ±1, ``... x m x M x l``.
        rows: Centres whose rows of K are visited, ``b``, without repetition.
    """
    with torch.no_grad():
        evidence = combine(groups, residual)
        scaled = RootEvidence.of(evidence, prior.dtype)
        solver = make_solver(scaled.system(prior))
        solved = solver.solve(torch.cat((scaled.target, signs), -1))
        certainty = 1.0 - (signs * solved[..., 1:]).mean(-1, keepdim=True).double()
        left = scaled.root * solved
        right = torch.cat((left[..., :1], scaled.root * signs), -1)
        mean = (prior @ left[..., :1]).double()
    count = signs.shape[-1]
    weight = torch.tensor([1.0] + [-1.0 / count] * count).to(left)
    fraction = len(rows) / prior.shape[-1]
    products = left[..., rows, :] * (kernel_rows(rows) @ right)
    pull = 0.5 / fraction * (products.sum(-2) * weight).sum(-1).double()
    return pull - _misfit(groups, residual, evidence.gram, mean, certainty)
