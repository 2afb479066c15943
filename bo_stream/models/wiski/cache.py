"""What is derived from a grid model's memory under one state of the hyperparameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from bo_stream.bases.grid.contraction import (
    Rewhitening,
    expected_log_prior,
    expected_log_prior_at_rows,
    node_variances,
    prior_covariance,
    prior_variance,
    variance_outside,
)
from bo_stream.bases.grid.interpolation import GridBasis, grid_basis
from bo_stream.bases.grid.kernel import GridKernel
from bo_stream.bases.grid.mesh import Mesh
from bo_stream.linalg import safe_cholesky, solve_lower
from bo_stream.marginal_likelihood import (
    BatchGradient,
    NoiseGroup,
    combine,
    solved_moments,
    subspace_log_marginal_likelihood,
    subspace_posterior,
    with_gradient_of,
)
from bo_stream.models.inference import Prior, Solved, SolvedWeights
from bo_stream.models.memory import Observations, WhitenedMemory
from bo_stream.models.wiski.memory import StreamMemory, WiskiMemory
from bo_stream.observation_space import ObservationSpaceProcess
from bo_stream.process import WeightSpaceProcess
from bo_stream.tensors import State, is_in, none_set, state_of
from bo_stream.weights import MOST_ROWS, log_marginal_likelihood, weight_precision

WHITENED_ROWS = 512
"""Larger updates drop what was whitened, which is then pulled back from the grid again."""

_ROUNDING = 1e-12


@dataclass(frozen=True)
class Subspace:
    """The largest eigenvectors of the kernel at some hyperparameters, with the memory in them.

    Attributes:
        basis: At those hyperparameters.
        memory: In its weights.
        node_variances: Mean prior variance over the nodes that each feature carries there,
            ``... x m x r``.
        missed: What all of them miss there, or its rounding error, ``... x m``.
    """

    basis: GridBasis
    memory: WhitenedMemory
    node_variances: Tensor
    missed: Tensor

    @classmethod
    @torch.no_grad()
    def around(
        cls, factors: GridKernel, memory: WiskiMemory, tolerance: float, max_rank: int
    ) -> Subspace:
        """Centre at a kernel's present parameters. Cost as a solve after they have changed."""
        basis = spread_basis(factors, memory, tolerance, max_rank)
        variances = node_variances(basis)
        missed = (basis.scale - variances.sum(-1)).maximum(_ROUNDING * basis.scale)
        return cls(basis, memory.whitened(basis), variances, missed)

    def outside(self, variance: Tensor, scale: Tensor) -> Tensor:
        """Compute the mean over the nodes of a kernel's variance that the features miss.

        Args:
            variance: Variances of the weights under that kernel, ``... x m x r``.
            scale: Its prior variance, ``... x m``.
        """
        return scale - (self.node_variances * variance).sum(-1)


@dataclass(frozen=True)
class SubspacePrior:
    """Few features at other hyperparameters than those they were chosen at: another prior.

    Attributes:
        memory: In the weights of the features.
        covariance: Prior covariance P of the weights, differentiable, ``... x m x r x r``.
    """

    memory: WhitenedMemory
    covariance: Tensor

    def at(self, features: Tensor, prior: Prior) -> tuple[Tensor, Tensor]:
        """Compute what :meth:`SolvedSubspace.at` does. Cost O(r³ + q r²)."""
        P = self.covariance.detach()
        with torch.no_grad():
            posterior = subspace_posterior(prior.evidence(self.memory), P)
        projected = features @ P
        covariance = projected @ features.mT - projected @ posterior.K @ projected.mT
        return (projected @ posterior.u).squeeze(-1), covariance

    def log_marginal_likelihood(self, kernel: GridKernel, prior: Prior) -> Tensor:
        """Return what :meth:`SolvedSubspace.log_marginal_likelihood` does. Cost O(r³)."""
        groups = prior.noise_groups(self.memory)
        return subspace_log_marginal_likelihood(groups, prior.target_map(), self.covariance)


@dataclass(frozen=True)
class SolvedSubspace:
    """The posterior in a subspace at other hyperparameters than those it was chosen at.

    In weights v that the kernel whitens again, with ``Q = I + gram`` at the start. Observations
    since then are a change of low rank: the covariance is ``Q⁻¹ − C Cᵀ``.

    Attributes:
        kernel: State of the kernel.
        noise: Noise variance of observations without a known one, ``... x m``, or None.
        scale: Standard deviation that is 1 in the process's units, ``... x m``.
        whitening: From the weights v to those of the subspace.
        memory: In the weights v.
        factor: Cholesky factor of Q, ``... x m x r x r``.
        downdate: C, ``... x m x r x k``.
        log_precision: ``−log |Q⁻¹ − C Cᵀ|``, ``... x m``.
    """

    kernel: State
    noise: Tensor | None
    scale: Tensor
    whitening: Rewhitening
    memory: WhitenedMemory
    factor: Tensor
    downdate: Tensor
    log_precision: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, subspace: Subspace, whitening: Rewhitening, prior: Prior) -> SolvedSubspace:
        """Solve at the present hyperparameters, which whiten the weights so. Cost O(r³)."""
        memory = subspace.memory.map(lambda statistics: statistics.pull_back(whitening))
        factor = safe_cholesky(weight_precision(prior.evidence(memory).gram))
        return cls(
            state_of(prior.kernel),
            None if prior.common_noise is None else prior.common_noise.clone(),
            prior.scale.clone(),
            whitening,
            memory,
            factor,
            factor[..., :0],
            2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1),
        )

    @torch.no_grad()
    def is_of(self, subspace: Subspace, prior: Prior) -> bool:
        """Say whether it is of these features, at the present hyperparameters."""
        levels = (self.noise, prior.common_noise), (self.scale, prior.scale)
        same = all(a is b or (a is not None and b is not None and a.equal(b)) for a, b in levels)
        return same and self.whitening.basis is subspace.basis and is_in(prior.kernel, self.kernel)

    def covariance_times(self, columns: Tensor) -> Tensor:
        """Compute the covariance of v times columns, ``... x m x r x n``. Cost O(n r (r + k))."""
        product = torch.cholesky_solve(columns, self.factor)
        return product - self.downdate @ (self.downdate.mT @ columns)

    def second_moment(self, mean: Tensor) -> Tensor:
        """Compute the covariance of v plus ``mean meanᵀ``, ``... x m x r x r``. Cost O(r³)."""
        inverse = torch.cholesky_inverse(self.factor)
        mean = mean.expand(*self.downdate.shape[:-1], 1)
        left, right = torch.cat((mean, self.downdate), -1), torch.cat((mean, -self.downdate), -1)
        stacks = (part.flatten(0, -3) for part in (inverse, left, right.mT))
        return torch.baddbmm(*stacks).view_as(inverse)  # in one pass over the large matrix

    def at(self, features: Tensor, prior: Prior) -> tuple[Tensor, Tensor]:
        """Compute mean and covariance at q points with features of the subspace, differentiable.

        Less the prior mean, ``... x m x q`` and ``... x m x q x q``. Cost O(q r (r + k)).
        """
        own = self.whitening.features(features)
        with torch.no_grad():
            mean = self.covariance_times(prior.evidence(_sums_of(self.memory)).moment)
        return (own @ mean).squeeze(-1), own @ self.covariance_times(own.mT)

    def after(self, features: Tensor, data: Observations, prior: Prior) -> SolvedSubspace | None:
        """Add a batch with these features of the subspace; None for a large one. Cost O(n r²)."""
        total = len(data) + self.downdate.shape[-1]
        if data.sign < 0.0 or total > max(MOST_ROWS, self.factor.shape[-1] // 4):
            return None
        own, (_, noise) = self.whitening.features(features), prior.standardized(data)
        gain = self.covariance_times(own.mT)
        inner = safe_cholesky(own @ gain + torch.diag_embed(noise))
        added = solve_lower(inner, gain.mT).mT
        growth = 2.0 * inner.diagonal(dim1=-2, dim2=-1).log().sum(-1) - noise.log().sum(-1)
        return replace(
            self,
            memory=self.memory.observed(own, data),
            downdate=torch.cat((self.downdate.expand(*added.shape[:-1], -1), added), -1),
            log_precision=self.log_precision + growth,
        )

    def log_marginal_likelihood(self, kernel: GridKernel, prior: Prior) -> Tensor:
        """Return the log marginal likelihood, ``... x m``, with its exact gradient. Cost O(r³).

        By Fisher's identity, as :func:`differentiable_log_marginal_likelihood`; for the kernel's
        present values, in the span of the features.
        """
        groups, residual = prior.noise_groups(self.memory), prior.target_map()
        with torch.no_grad():
            evidence = prior.evidence(_sums_of(self.memory))
            mean = self.covariance_times(evidence.moment)
            value = log_marginal_likelihood(evidence, mean, self.log_precision)
            second_moment = self.second_moment(mean)
        expected = expected_log_prior(self.whitening.basis, kernel, second_moment, self.whitening)
        return with_gradient_of(expected, value, groups, residual, mean, second_moment)


def _sums_of(memory: WhitenedMemory) -> WhitenedMemory:
    """Leave out the grams, which a mean and an evidence are not computed from once Q is solved."""
    return memory.map(lambda statistics: replace(statistics, gram=statistics.gram[..., :0, :0]))


def spread_basis(
    factors: GridKernel, memory: WiskiMemory, tolerance: float, max_rank: int
) -> GridBasis:
    """Build features of a kernel on a memory's grid that span its derivatives in frequencies too.

    Those of the kernel alone would make a likelihood's gradient vanish in the period of a strictly
    periodic kernel.
    """
    spread = factors.spread(memory.grid.bounds.diff(dim=0)[0].tolist())
    return grid_basis(memory.grid, spread, memory.counts.shape, tolerance, max_rank)


FEW_FEATURES = 256
"""Up to here a prior covariance in full is faster than weights that are whitened again."""

LEARNING_RANK = 640
"""Features in which hyperparameters are learned, where these carry enough of the kernel."""

LEFT_OUT = 0.02
"""Prior variance that may lie beyond them, in parts of the noise variance, as which it counts."""

MOST_LEFT_OUT = 0.05
"""The same until a space with more features is chosen."""

RADIUS = 0.25
"""How far the log of a kernel's parameter may move before the subspace is chosen again."""

MOST_OUTSIDE = 1e-4
"""Prior variance that a move may bring outside all features, in parts of the noise variance."""

MOST_OUTSIDE_GROWTH = 4.0
"""The same, in parts of what was outside at the centre: more than a log move of ``RADIUS`` brings
to a kernel with a lengthscale. But a hundredth of its period moves a periodic kernel outside."""

_LEAST_TOLERANCE = 1e-11


@dataclass(frozen=True)
class FitSubspace:
    """The largest eigenvectors of the kernel at some hyperparameters, with the memory in them.

    The kernel of other hyperparameters is restricted to this space, so that an optimiser sees a
    smooth function with its exact gradient, and the grid's statistics are visited only when the
    kernel's parameters have moved by more than ``RADIUS``, or its variance out of the features.
    What the model's posterior has beyond this space is small and of high frequency: it enters as
    white noise of the same mean variance, and is so neither lost nor taken for the noise of the
    observations.

    Attributes:
        basis: At the centre.
        memory: In its weights.
        rest: The model's further features.
        rest_squares: Mean squares of those over the observations of learned noise, ``... x m x s``.
        centre: Logs of the parameters of the kernel's factors.
        whole: All these features.
        outside: Mean prior variance over the nodes outside all these features, ``... x m``.
    """

    basis: GridBasis
    memory: WhitenedMemory
    rest: GridBasis
    rest_squares: Tensor
    centre: tuple[Tensor, ...]
    whole: GridBasis
    outside: Tensor

    @classmethod
    @torch.no_grad()
    def around(
        cls,
        factors: GridKernel,
        noise: Tensor,
        memory: StreamMemory,
        tolerance: float,
        max_rank: int,
    ) -> FitSubspace:
        """Centre at a kernel's present parameters; noise variances are ``... x m``."""
        least = max(tolerance, _LEAST_TOLERANCE)
        whole = spread_basis(factors, memory, least, max_rank)
        share = float((LEFT_OUT * noise / whole.scale).min())
        rank = max(whole.enough(max(share, least), max_rank), LEARNING_RANK)
        basis, rest = whole.between(0, rank), whole.between(rank, whole.rank)
        whitened = memory.whitened(basis)
        squares = memory.learned_squares(rest) / whitened.learned.count.clamp_min(1.0)[..., None]
        centre, outside = _log_parameters(factors), variance_outside(whole, factors)
        return cls(basis, whitened, rest, squares, centre, whole, outside)

    def log_marginal_likelihood(self, kernel: GridKernel, prior: Prior) -> Tensor:
        """Return the log marginal likelihood, ``... x m``, with its exact gradient. Cost O(r³).

        Of many features in weights that the kernel whitens, which takes half of the time.
        """
        target, left_out = prior.target_map(), self.left_out(kernel)
        if self.basis.rank <= FEW_FEATURES:
            groups = prior.noise_groups(self.memory, left_out)
            covariance = prior_covariance(self.basis, kernel)
            return subspace_log_marginal_likelihood(groups, target, covariance)
        whitening = Rewhitening.of(self.basis, kernel)
        memory = self.memory.map(lambda statistics: statistics.pull_back(whitening))
        groups = prior.noise_groups(memory, left_out)
        return differentiable_log_marginal_likelihood(groups, target, self.basis, kernel, whitening)

    @torch.no_grad()
    def holds(self, factors: GridKernel, noise: Tensor) -> bool:
        """Say whether the kernel is within ``RADIUS`` of the centre and little is left out."""
        pairs = zip(self.centre, _log_parameters(factors), strict=True)
        near = [((old - new).abs() <= RADIUS).flatten() for old, new in pairs]
        if not none_set(~torch.cat(near)):  # as where one is NaN
            return False
        most = MOST_OUTSIDE * noise + MOST_OUTSIDE_GROWTH * self.outside
        little = self.left_out(factors) <= MOST_LEFT_OUT * noise
        return none_set(~(little & (variance_outside(self.whole, factors) <= most)))

    def left_out(self, factors: GridKernel) -> Tensor:
        """Compute the mean prior variance at the observations beyond the space, ``... x m``."""
        return (prior_variance(self.rest, factors) * self.rest_squares).sum(-1)


def _log_parameters(factors: GridKernel) -> tuple[Tensor, ...]:
    parameters = (p for part in factors.parts for f in part.factors for p in f.parameters)
    return tuple(parameter.detach().log().clone() for parameter in parameters)


def differentiable_log_marginal_likelihood(
    groups: Sequence[NoiseGroup],
    residual: Tensor,
    basis: GridBasis,
    factors: GridKernel,
    whitening: Rewhitening | None = None,
) -> Tensor:
    """Return the log marginal likelihood, ``... x m``, with its exact gradient. Cost O(r³).

    [Stanton2021, eq. 13 and section 4.3]

    The gradient is that of the expected complete-data log likelihood at the present posterior
    (Fisher's identity), in which posterior and eigenvectors are constants: no factorisation is
    differentiated. It flows to the noise groups' levels, to the combination ``residual`` of [Y, 1]
    that is to be explained, ``... x m x 2 x 1``, and to the kernel, of whose present values the
    basis is, or at whose present values the statistics are whitened again.
    """
    with torch.no_grad():
        value, mean, second_moment = solved_moments(combine(groups, residual))
    expected = expected_log_prior(basis, factors, second_moment, whitening)
    return with_gradient_of(expected, value, groups, residual, mean, second_moment)


def batch_log_marginal_likelihood(
    inputs: Tensor, residual: Tensor, noise: Tensor, basis: GridBasis, factors: GridKernel
) -> Tensor:
    """Return the log marginal likelihood of a batch, ``... x m``, with its exact gradient.

    Basis and eigenvectors are constants, as in :func:`differentiable_log_marginal_likelihood`. The
    gradient flows to the inputs, ``... x n x d``, to the kernel, of whose present values the basis
    is, and to the outcomes less the prior mean and the noise variances, ``... x m x n`` each. Cost
    O(n r² + r³), or O(n² r + n³) for fewer rows than features.
    """
    values = basis.values(inputs)
    leaves = [[each.detach().requires_grad_() for each in lines] for lines in values]
    with torch.enable_grad():
        features = basis.products(leaves)
    with torch.no_grad():
        few = features.shape[-2] < features.shape[-1]
        rule = BatchGradient.by_rows if few else BatchGradient.by_weights
        gradient = rule(features, residual, noise)
        flat = torch.autograd.grad(features, list(chain(*leaves)), gradient.features)
        found = iter(flat)
        slopes = [[next(found) for _ in lines] for lines in leaves]
    change = (gradient.residual * residual + gradient.noise * noise).sum(-1)
    change = change - expected_log_prior_at_rows(basis, factors, leaves, slopes)
    for value, slope in zip(chain(*values), flat, strict=True):
        change = change + (slope * value).sum((-2, -1))
    return gradient.value + (change - change.detach())


# --- what a grid inference keeps between calls: recomputed when stale ----------------------------


WIDER_GRIDS = 4
"""Wider grids than the memory's whose posteriors are kept for queries outside the bounds."""


@dataclass(frozen=True)
class Whitening:
    """The memory in the whitened weights of the kernel at one state of its hyperparameters.

    Attributes:
        state: Of the kernel.
        basis: Its features.
        memory: Statistics in those features.
        pending: Small batches still to be added to them, with their features.
        num_pending: Number of observations in these batches.
    """

    state: State
    basis: GridBasis
    memory: WhitenedMemory
    pending: tuple[tuple[Observations, Tensor], ...] = ()
    num_pending: int = 0

    def after(self, data: Observations, features: Tensor) -> Whitening:
        """Add a batch. Cost O(n r), and O(n r²) once the statistics are needed."""
        n = features.shape[-2]
        before = self if self.num_pending + n <= WHITENED_ROWS else self.settled()
        pending = (*before.pending, (data, features))
        return Whitening(self.state, self.basis, before.memory, pending, before.num_pending + n)

    def settled(self) -> Whitening:
        """Add all that is pending: many small batches as one."""
        if not self.pending:
            return self
        memory = self.memory
        for sign in (1.0, -1.0):
            batches = [pair for pair in self.pending if pair[0].sign == sign]
            if batches:
                data = Observations.joined([batch for batch, _ in batches])
                memory = memory.observed(torch.cat([f for _, f in batches], -2), data)
        return Whitening(self.state, self.basis, memory)


@dataclass(frozen=True)
class WithHeld:
    """The posterior given statistics and, besides, outcomes that a memory holds.

    Attributes:
        before: The posterior given the statistics alone.
        held: The outcomes with their sites.
        process: The posterior given both.
    """

    before: WeightSpaceProcess
    held: Observations
    process: WeightSpaceProcess


@dataclass(frozen=True)
class GridSolution:
    """The posterior from one grid, as far as it is known: the memory's own, or a wider one.

    Of a memory that holds outcomes alongside its statistics, whitening and weights are of the
    statistics alone.

    Attributes:
        grid: Its nodes.
        whitening: The memory in the features of the kernel there.
        weights: The posterior in the weights of those features.
        rows: The posterior in observation space.
        asked: Whether it has served a query since the last update.
        whole: The posterior with the outcomes that are stored.
    """

    grid: Mesh
    whitening: Whitening | None = None
    weights: SolvedWeights | None = None
    rows: Solved[ObservationSpaceProcess] | None = None
    asked: bool = True
    whole: WithHeld | None = None

    def current(self, data: Observations, prior: Prior, holds_rows: bool) -> GridSolution:
        """Keep what a batch changes at a small cost, under the hyperparameters as they are now."""
        whitening, weights, rows = self.whitening, self.weights, self.rows
        if rows is not None and not (holds_rows and is_in(prior.model, rows.state)):
            rows = None
        if whitening is None or data.X.shape[-2] > WHITENED_ROWS:
            return GridSolution(self.grid, rows=rows, asked=False)
        if weights is not None:
            process = weights.process
            small = data.sign > 0.0 and process.weights.has_room_for(data.X.shape[-2])
            same = small and process.basis is whitening.basis
            weights = weights if same and is_in(prior.model, weights.state) else None
        if weights is None and not is_in(prior.kernel, whitening.state):
            whitening = None
        return GridSolution(self.grid, whitening, weights, rows, asked=False)

    def after(self, data: Observations, told: tuple[Tensor, Tensor] | None) -> GridSolution:
        """Add a batch to all that is kept.

        Args:
            data: The batch.
            told: Its outcomes and noise variances as the process has them; None drops posteriors.
        """
        whitening, weights, rows = self.whitening, None, None
        if self.rows is not None and told is not None:
            rows = replace(self.rows, process=self.rows.process.observe(data.X, *told))
        if whitening is not None:
            features = whitening.basis.features(data.X)
            if self.weights is not None and told is not None:
                process, (outcomes, noise) = self.weights.process, told
                posterior = process.weights.observe(features, outcomes - process.prior_mean, noise)
                process = WeightSpaceProcess(process.basis, posterior, process.prior_mean)
                weights = SolvedWeights(self.weights.state, process)
            whitening = whitening.after(data, features)
        return replace(self, whitening=whitening, weights=weights, rows=rows)


@dataclass(frozen=True)
class GridCache:
    """All that a grid inference derived from a memory.

    Attributes:
        own: The posterior from the memory's grid.
        wider: Those from wider grids, for queries outside the bounds, the latest one last.
        learning: The space in which a fit evaluates its objective.
        subspace: The features in which hyperparameters follow a stream.
        followed: The posterior in these features.
        checked: State of the kernel when the grid was last found fine enough, or was warned of.
    """

    own: GridSolution
    wider: tuple[GridSolution, ...] = ()
    learning: FitSubspace | None = None
    subspace: Subspace | None = None
    followed: SolvedSubspace | None = None
    checked: State | None = None

    @classmethod
    def of(cls, memory: WiskiMemory) -> GridCache:
        """Begin with nothing derived."""
        return cls(GridSolution(memory.grid))

    def whole(self, before: WeightSpaceProcess, held: Observations) -> WithHeld | None:
        """Return the posterior with the outcomes that are stored, if it is known."""
        for solution in (self.own, *self.wider):
            whole = solution.whole
            if whole is not None and whole.before is before and whole.held is held:
                return whole
        return None

    def with_whole(self, whole: WithHeld) -> GridCache:
        """Keep a posterior alongside that given the statistics alone."""

        def kept(solution: GridSolution) -> GridSolution:
            weights = solution.weights
            same = weights is not None and weights.process is whole.before
            return replace(solution, whole=whole) if same else solution

        return replace(self, own=kept(self.own), wider=tuple(map(kept, self.wider)))

    def of_statistics(self) -> GridCache:
        """Keep what does not depend on the outcomes that are stored."""
        own, *wider = (replace(each, whole=None) for each in (self.own, *self.wider))
        return GridCache(own, tuple(wider), checked=self.checked)

    @torch.no_grad()
    def after(self, data: Observations, prior: Prior, holds_rows: bool) -> GridCache:
        """Carry along what a batch changes at a small cost, and drop the rest.

        Of wider grids only those that were asked for since the last update; the posterior in
        observation space where the memory with the batch ``holds_rows``.
        """
        asked = (self.own, *(wider for wider in self.wider if wider.asked))
        kept = [solution.current(data, prior, holds_rows) for solution in asked]
        solved = any(one.weights is not None or one.rows is not None for one in kept)
        told = prior.standardized(data) if solved else None
        solutions = [solution.after(data, told) for solution in kept]
        subspace, followed = self.subspace, self.followed
        if data.X.shape[-2] > WHITENED_ROWS:
            subspace = followed = None
        if subspace is not None:
            features = subspace.basis.features(data.X)
            subspace = replace(subspace, memory=subspace.memory.observed(features, data))
            if followed is not None:
                current = followed.is_of(subspace, prior)
                followed = followed.after(features, data, prior) if current else None
        return GridCache(
            solutions[0],
            tuple(solutions[1:]),
            subspace=subspace,
            followed=followed,
            checked=self.checked,
        )
