"""Expected gains by each candidate of a pool, given the candidates chosen so far.

Of the integrated variance in the space of features (:class:`Gains`) or from covariances with points
(:class:`VarianceGains`), and of any criterion (:class:`CriterionGains`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from bo_stream.acquisition.criteria import FeatureSites
from bo_stream.acquisition.feature_nipv import PointMeasure
from bo_stream.acquisition.lookahead import Lookahead
from bo_stream.process import Points, PosteriorProcess
from bo_stream.weights import WeightPosterior

TIE = 1e-10
"""Gains that differ from the largest by this fraction tie with it; the lowest index is picked."""

_AGREEMENT = 1e-10
"""Frobenius norm of a difference, per square root of the rank r, that counts as rounding error."""

_SPARE = 8
_PROBES = 4

_BLOCK = 256
"""Candidates whose covariances with all points are computed at a time: they fit in a cache."""

_MANY = 1_000_000
"""Covariances from which on bounds spare reading all of them for each candidate observed."""

_EVALUATED = 128
"""Candidates whose gains are evaluated at a time, while bounds of theirs are the largest."""

_FOLDED = 32
"""Candidates observed after which the reductions of all covariances are subtracted from them."""

_PAIRS = 100_000
"""Pairs of a candidate and a target that are valued together: they fit in a processor's cache."""

_ROOM = 1e30
"""Least cost in units of the largest, in smallest numbers: gains per cost are finite from there."""

_LEAST_COST = 1e-6
"""Least cost that gains are divided by, as a fraction of the largest: a detour may be free."""

Site = int | Tensor
"""Index of a candidate; of shape ``1`` where it is on a device, which nothing then waits for."""


@dataclass(frozen=True)
class Worth:
    """What a candidate is chosen for: its gain per cost, summed over outputs.

    Costs are in units of the largest of those available: in those of the user gains per cost may be
    infinite.

    Attributes:
        noise: Noise variance of each candidate, ``m x N``.
        factors: Weights of the outputs' gains, ``m x 1``.
        costs: Positive, ``N``.
        available: Which candidates may be chosen, ``N`` bools.
    """

    noise: Tensor
    factors: Tensor
    costs: Tensor
    available: Tensor

    def of(self, numerator: Tensor, variance: Tensor) -> Tensor:
        """Compute the worth, ``N``; −∞ where it may not be chosen.

        Args:
            numerator: Of the gains, ``m x N``; see :class:`Gains`.
            variance: Of the candidates, ``m x N``.
        """
        gains = reductions(numerator, variance, self.noise)
        largest = self.costs.masked_fill(~self.available, 0.0).max()
        least = min(_LEAST_COST, _ROOM * torch.finfo(self.costs.dtype).tiny)
        worth = (self.factors * gains).sum(0) / (self.costs / largest).clamp_min(least)
        return worth.masked_fill(~self.available, -torch.inf)

    def without(self, pick: Tensor) -> Worth:
        """Make a candidate, an index of shape ``1``, no longer available."""
        return replace(self, available=self.available.index_fill(0, pick, False))


def reductions(numerator: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """Divide numerators by the variances of observations, ``m x N`` each; rounding aside, ≥ 0."""
    return numerator.clamp_min(0.0) / (variance.clamp_min(0.0) + noise)


def first_of_largest(worth: Tensor) -> Tensor:
    """Return the lowest index of those that tie with the largest, ``1``; it is not read."""
    tied = worth >= least_of_ties(worth.max())
    return tied.to(torch.uint8).argmax(0, keepdim=True)


def least_of_ties(largest: Tensor) -> Tensor:
    """Return the least worth that ties with the largest; itself where that is infinite."""
    return largest * (1.0 - TIE * largest.sign())


@dataclass(frozen=True)
class Gains:
    """Reductions of the integrated variance ``tr(G Σ)`` by each of N candidates.

    An observation with noise σ² at z takes ``Σ z zᵀ Σ / (zᵀ Σ z + σ²)`` from Σ, hence
    ``zᵀ Σ G Σ z / (zᵀ Σ z + σ²)`` from the integrated variance.

    Attributes:
        sites: The candidates.
        gram: G, ``m x r x r``.
        covariance: Σ.
        numerator: ``zᵀ Σ G Σ z``, ``m x N``.
        variance: ``zᵀ Σ z``, ``m x N``.
    """

    sites: FeatureSites
    gram: Tensor
    covariance: WeightCovariance
    numerator: Tensor
    variance: Tensor

    @classmethod
    def of(cls, sites: FeatureSites, gram: Tensor, weights: WeightPosterior) -> Gains:
        """Compute all gains. Cost O(r³) and two quadratic forms at all candidates."""
        covariance = weights.covariance()
        forms = torch.stack((covariance @ gram @ covariance, covariance))
        numerator, variance = sites.quadratic(forms)
        return cls(sites, gram, WeightCovariance.of(weights), numerator, variance)

    def value(self, noise: Tensor) -> Tensor:
        """Return the reduction per output, ``m x N``, for noise variances ``m x N``."""
        return reductions(self.numerator, self.variance, noise)

    def best(self, worth: Worth) -> tuple[Tensor, Gains]:
        """Find the candidate of most worth, an index of shape ``1``, and return these gains."""
        return first_of_largest(worth.of(self.numerator, self.variance)), self

    def observing(self, site: Site, noise: Tensor) -> Gains:
        """Return the gains after an observation at a candidate, with noise variance ``m x 1``.

        A rank-one change: cost O(r²) and two functions at all candidates.
        """
        feature = self.sites.basis.features(_row(self.sites.X, site)).mT
        image = self.covariance.times(feature)
        total = (feature * image).sum(-2) + noise
        direction = image / total.sqrt().unsqueeze(-1)
        downdate = torch.cat((self.covariance.downdate, direction), -1)
        covariance = replace(self.covariance, downdate=downdate)
        return self.changed(direction, torch.ones_like(total), covariance)

    def changed(self, directions: Tensor, amounts: Tensor, covariance: WeightCovariance) -> Gains:
        """Return the gains after a change of rank k. Cost O(k r²) and 2k functions.

        ``zᵀ Σ' G Σ' z`` and ``zᵀ Σ' z`` for the covariance ``Σ' = Σ − U diag(λ) Uᵀ``, multiplied
        out.
        """
        integrated = self.gram @ directions
        columns = torch.cat((directions, self.covariance.times(integrated)), -1)
        own, cross = self.sites.linear(columns).chunk(2, dim=-2)
        weighted = own * amounts.unsqueeze(-1)
        inner = directions.mT @ integrated
        return replace(
            self,
            covariance=covariance,
            numerator=self.numerator - (weighted * (2.0 * cross - inner @ weighted)).sum(-2),
            variance=self.variance - (weighted * own).sum(-2),
        )


def _row(values: Tensor, site: Site) -> Tensor:
    """Select a row, ``... x N x k -> ... x 1 x k``."""
    if isinstance(site, int):
        return values[..., site : site + 1, :]
    return values.index_select(-2, site)


@dataclass(frozen=True)
class WeightCovariance:
    """A covariance ``Σ − V Vᵀ`` of weights, never formed.

    Attributes:
        weights: Posterior with covariance Σ, ``m x r x r``.
        downdate: V, ``m x r x k``.
    """

    weights: WeightPosterior
    downdate: Tensor

    @classmethod
    def of(cls, weights: WeightPosterior) -> WeightCovariance:
        """Return Σ alone."""
        return cls(weights, weights.downdate[..., :0])

    def times(self, columns: Tensor) -> Tensor:
        """Multiply by columns, ``m x r x k``. Cost O(k r²)."""
        explained = columns.mT @ self.downdate @ self.downdate.mT
        return self.weights.covariance_times(columns) - explained.mT


def same(
    old: WeightCovariance, new: WeightCovariance, change: tuple[Tensor, Tensor] | None = None
) -> bool:
    """Tell whether two covariances agree to rounding but for the change between them, if given.

    By random probes: the mean square of their images is the squared norm. Cost O(r²).
    """
    probes = _columns(old.downdate, _PROBES, seed=1)
    images = old.times(probes) - new.times(probes)
    if change is not None:
        directions, amounts = change
        images = images - directions @ (amounts.unsqueeze(-1) * (directions.mT @ probes))
    return bool(images.square().mean() <= _AGREEMENT**2)


def low_rank_change(
    old: WeightCovariance, new: WeightCovariance, rank: int
) -> tuple[Tensor, Tensor] | None:
    """Find the change ``− U diag(λ) Uᵀ`` of a covariance, None where its rank is much larger.

    U is ``m x r x k``, and λ, ``m x k``, positive where the variance becomes smaller. A randomised
    range finder and a check with fresh probes; exact to rounding. Cost O(r² rank). Source: Halko,
    Martinsson and Tropp (2011), algorithms 4.1 and 5.3.
    """
    width = rank + _SPARE
    if 4 * width > old.downdate.shape[-2]:
        return None
    columns = _columns(old.downdate, width, seed=2)
    basis = torch.linalg.qr(old.times(columns) - new.times(columns)).Q
    inner = basis.mT @ (old.times(basis) - new.times(basis))
    amounts, vectors = torch.linalg.eigh(0.5 * (inner + inner.mT))
    change = basis @ vectors, amounts
    return change if same(old, new, change) else None


def _columns(like: Tensor, count: int, seed: int) -> Tensor:
    """Draw standard normal columns, ``r x count``, equal at every call."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(like.shape[-2], count, generator=generator, dtype=like.dtype)
    return columns.to(like.device)


@dataclass(frozen=True)
class JointGains:
    """Covariances of N candidates with M points, with a residual.

    An observation at candidate i takes ``c_ij² / (v_i + noise)`` from the variance of point j, with
    c the covariances of candidates with points and v the variances of candidates, given the
    candidates observed so far. Memory O(N (M + r)).

    Attributes:
        process: The process before any of them.
        X: Candidates in transformed inputs, ``N x d``.
        pool: The process's features at the candidates.
        weights: Weights w of the points, ``M``.
        covariance: c, ``m x N x M``.
        variance: v, ``m x N``.
        columns: L with ``L Lᵀ`` the reduction of the candidates' covariance by the k observed ones,
            ``m x N x k``.
    """

    process: PosteriorProcess
    X: Tensor
    pool: Points
    weights: Tensor
    covariance: Tensor
    variance: Tensor
    columns: Tensor

    @classmethod
    def of(cls, process: PosteriorProcess, pool: Tensor, points: PointMeasure) -> JointGains:
        """Compute the covariances under a process with r features. Cost O(N M r).

        Some candidates at a time: what a kernel computes on its way then takes little memory.
        """
        at, others = process.at(pool), process.at(points.points)
        tensors = (tensor.split(_BLOCK, -2) for tensor in (at.X, at.prior, at.posterior))
        covariance = at.X.new_empty(0)
        for i, block in enumerate(zip(*tensors, strict=True)):
            rows = process.cross_covariance(Points(*block), others)
            if i == 0:
                covariance = rows.new_empty(*rows.shape[:-2], len(pool), rows.shape[-1])
            covariance[..., i * _BLOCK : (i + 1) * _BLOCK, :] = rows
        variance = process.variance_at(at).expand(covariance.shape[:-1])
        return cls(process, pool, at, points.weights, covariance, variance, covariance[..., :0])

    def observing(self, i: int, noise: Tensor) -> JointGains:
        """Return the covariances after the i-th candidate, with noise variance ``m x 1``.

        Cost O(N (M + r + k)).
        """
        fresh = self.process.cross_covariance(self.pool, self.process.at(self.X[i : i + 1]))
        spread = (self.variance[..., i : i + 1] + noise).sqrt().unsqueeze(-1)
        column = (fresh - self.columns @ self.columns[..., i : i + 1, :].mT) / spread
        row = self.covariance[..., i : i + 1, :] / spread
        return replace(
            self,
            covariance=self.covariance - column @ row,
            variance=(self.variance - column.squeeze(-1).square()).clamp_min(0.0),
            columns=torch.cat((self.columns, column), -1),
        )


@dataclass(frozen=True)
class VarianceGains:
    """Reductions of the mean variance at M points by each of N candidates, with a residual.

    ``Σ_j w_j c_ij² / (v_i + noise)``: c are the covariances of candidates with points and v the
    variances of candidates, given the k that were observed so far: ``c = C − A R``, which is never
    formed. With the i-th row less ``a_i r`` the sums ``s_i = Σ_j w_j c_ij²`` become
    ``s_i − 2 a_i Σ_j w_j c_ij r_j + a_i² t`` with ``t = Σ_j w_j r_j²``, which takes reading all N x
    M numbers. On the host, where these are many, they are bounded instead, by
    ``(√s_i + |a_i| √t)²`` (Cauchy and Schwarz), and :meth:`best` evaluates those that may be the
    largest: few, for a candidate far from the one observed has an a_i near zero. Memory
    O(N (M + r + k)).

    Attributes:
        joint: Covariances C with the points and variances, before the last candidates observed.
        variance: v, ``m x N``.
        numerator: s, ``m x N``, or upper bounds.
        exact: Which numerators are no bounds, ``N`` bools; None: all.
        columns: A, ``m x N x k``; ``A Aᵀ`` is the reduction of the candidates' covariance.
        rows: R, ``m x k' x M``, of the last k' of them, which C is without.
    """

    joint: JointGains
    variance: Tensor
    numerator: Tensor
    exact: Tensor | None
    columns: Tensor
    rows: Tensor

    @classmethod
    def of(cls, process: PosteriorProcess, pool: Tensor, points: PointMeasure) -> VarianceGains:
        """Compute the gains under a process; cost as :meth:`JointGains.of`."""
        joint = JointGains.of(process, pool, points)
        blocks = joint.covariance.split(_BLOCK, -2)
        numerator = torch.cat([block.square() @ joint.weights for block in blocks], -1)
        bounded = pool.is_cpu and joint.covariance.numel() >= _MANY
        exact = torch.ones_like(pool[:, 0], dtype=torch.bool) if bounded else None
        none = joint.covariance[..., :0, :]
        return cls(joint, joint.variance, numerator, exact, joint.columns, none)

    def best(self, worth: Worth) -> tuple[Tensor, VarianceGains]:
        """Find the candidate of most worth, an index of shape ``1``.

        Cost O(n M k') for the n candidates that have to be evaluated.

        Returns:
            Its index, and these gains with what was evaluated.
        """
        gains = self
        while True:
            values = worth.of(gains.numerator, gains.variance)
            if gains.exact is None:
                return first_of_largest(values), gains
            known = values.masked_fill(~gains.exact, -torch.inf).max()
            maybe = worth.available & ~gains.exact & (values >= least_of_ties(known))
            count = int(maybe.sum())
            if count == 0:
                return first_of_largest(values), gains
            largest = values.masked_fill(~maybe, -torch.inf).topk(min(count, _EVALUATED)).indices
            gains = gains.evaluated(largest, gains.exact)

    @property
    def _recent(self) -> Tensor:
        """Columns of A that belong to R, ``m x N x k'``."""
        return self.columns[..., self.columns.shape[-1] - self.rows.shape[-2] :]

    def evaluated(self, index: Tensor, exact: Tensor) -> VarianceGains:
        """Replace bounds of n candidates by their numerators."""
        left, rows = (
            each.index_select(-2, index) for each in (self._recent, self.joint.covariance)
        )
        rows = torch.baddbmm(rows, left, self.rows, alpha=-1.0)
        return replace(
            self,
            numerator=self.numerator.index_copy(-1, index, rows.square_() @ self.joint.weights),
            exact=exact.index_fill(0, index, True),
        )

    def observing(self, site: Site, noise: Tensor) -> VarianceGains:
        """Return the gains after an observation at a candidate, with noise variance ``m x 1``.

        Cost O(N (r + k)), and O(N M) besides where the numerators are exact.
        """
        joint, own = self.joint, _row(self.columns, site)
        variance = _row(self.variance.unsqueeze(-1), site)
        spread = (variance.clamp_min(0.0) + noise.unsqueeze(-1)).sqrt()
        fresh = joint.process.cross_covariance(joint.pool, joint.process.at(_row(joint.X, site)))
        column = (fresh - self.columns @ own.mT) / spread
        row = (_row(joint.covariance, site) - _row(self._recent, site) @ self.rows) / spread
        weighted = (row * joint.weights).mT
        if self.exact is None:
            along = joint.covariance @ weighted
            along = along - self._recent @ (self.rows @ weighted)
            change = column * (2.0 * along - column * (row @ weighted))
            numerator, exact = self.numerator - change.squeeze(-1), None
        else:
            most = column.abs() * (row @ weighted).clamp_min(0.0).sqrt()
            numerator = (self.numerator.clamp_min(0.0).sqrt() + most.squeeze(-1)).square()
            exact = torch.zeros_like(self.exact)
        return replace(
            self,
            variance=self.variance - column.squeeze(-1).square(),
            numerator=numerator,
            exact=exact,
            columns=torch.cat((self.columns, column), -1),
            rows=torch.cat((self.rows, row), -2),
        )

    def folded(self) -> VarianceGains:
        """Subtract ``A R`` from C where R has many rows. Cost O(N M k')."""
        if self.rows.shape[-2] < _FOLDED:
            return self
        covariance = torch.baddbmm(self.joint.covariance, self._recent, self.rows, alpha=-1.0)
        joint = replace(self.joint, covariance=covariance)
        return replace(self, joint=joint, rows=self.rows[..., :0, :])


@dataclass(frozen=True)
class CriterionGains(ABC):
    """Expected falls of the weighted sum of a criterion over targets, for a model of one output.

    Mean and variance of the targets are from before the round. Observations in the round remove
    variance from them; the variances that several candidates remove add up.

    Attributes:
        total: Expected weighted sum after the candidates observed so far.
    """

    total: float

    @abstractmethod
    def best(self, feasible: Tensor, costs: Tensor | None) -> tuple[int, float]:
        """Find the feasible candidate of the largest gain, per cost if costs are given.

        Args:
            feasible: ``N`` bools, one of them true.
            costs: ``N``.

        Returns:
            Its index and its gain.
        """

    @abstractmethod
    def observing(self, i: int) -> Self:
        """Return the gains after the i-th candidate."""


@dataclass(frozen=True)
class FeatureGains(CriterionGains):
    """Gains of a criterion that is linear in the variance, in feature space.

    Cost O(r²) and two functions at all candidates for each one observed, for any number of targets.

    Attributes:
        gains: Of the integrated variance with the criterion's weights.
        noise: Noise variance of each candidate, ``1 x N``.
    """

    gains: Gains
    noise: Tensor

    def best(self, feasible: Tensor, costs: Tensor | None) -> tuple[int, float]:
        """Find the best of all feasible candidates; see :class:`CriterionGains`."""
        return best_of(self.gains.value(self.noise)[0], feasible, costs)

    def observing(self, i: int) -> Self:
        """Return the gains after the i-th candidate."""
        total = self.total - float(self.gains.value(self.noise)[0, i])
        gains = self.gains.observing(i, self.noise[:, i, None])
        return replace(self, gains=gains, total=total)


@dataclass(frozen=True)
class JointTargetGains(CriterionGains):
    """Gains of any criterion, from the covariances of all candidates with all targets.

    An observation at candidate i removes ``c_ij² / (v_i + noise_i)`` from the variance of target j,
    with c and v given the candidates observed so far. Cost O(N M) for each one observed.

    Attributes:
        joint: Covariances c and variances v.
        noise: Noise variance of each candidate, ``1 x N``.
        lookahead: The criterion at the targets, of variances in units of the process.
        weights: Of the targets, ``M``.
        removed: Variance removed from the targets so far, ``M``.
        own: Index of the target that each candidate settles, -1 if none, ``N``; None: they settle
            none. A target that is settled has no uncertainty left.
    """

    joint: JointGains
    noise: Tensor
    lookahead: Lookahead
    weights: Tensor
    removed: Tensor
    own: Tensor | None = None

    def best(self, feasible: Tensor, costs: Tensor | None) -> tuple[int, float]:
        """Find the best of all feasible candidates; see :class:`CriterionGains`."""
        return best_of(self.values(), feasible, costs)

    def values(self) -> Tensor:
        """Compute by how much each candidate is expected to lower the sum, ``N``."""
        covariance = self.joint.covariance[0]
        precision = (self.joint.variance + self.noise)[0].reciprocal().unsqueeze(-1)
        worth = torch.zeros_like(covariance[:, 0])
        step = max(1, _PAIRS // len(worth))
        for start in range(0, len(self.weights), step):
            part = slice(start, start + step)
            after = covariance[:, part].square() * precision + self.removed[part]
            left = self.lookahead.part(part)(after)
            if self.own is not None:
                settling = ((self.own >= start) & (self.own < start + step)).nonzero().squeeze(-1)
                left[settling, self.own[settling] - start] = 0.0
            worth -= left @ self.weights[part]
        return worth + self.total

    def observing(self, i: int) -> Self:
        """Return the gains after the i-th candidate."""
        noise = self.noise[:, i, None]
        gone = self.joint.covariance[0, i].square() / (self.joint.variance[0, i] + noise[0])
        joint = self.joint.observing(i, noise)
        weights, removed = self.weights, self.removed + gone
        if self.own is not None and int(self.own[i]) >= 0:  # it settles its own target
            weights = weights.clone()
            weights[self.own[i]] = 0.0
        total = float(self.lookahead(removed) @ weights)
        return replace(self, total=total, joint=joint, removed=removed, weights=weights)


def best_of(gains: Tensor, feasible: Tensor, costs: Tensor | None) -> tuple[int, float]:
    """Return the candidate of the largest gain, or gain per cost, and its gain.

    Of candidates that tie, the one of the lowest index.

    Args:
        gains: ``N``.
        feasible: Candidates to choose from, ``N`` bools.
        costs: ``N``, or None.
    """
    if costs is not None:
        costs = costs.masked_fill(~feasible, 0.0)
    pick = int(first_of_largest(per_cost(gains, costs).masked_fill(~feasible, -torch.inf)))
    return pick, float(gains[pick])


def per_cost(gains: Tensor, costs: Tensor | None) -> Tensor:
    """Divide gains by costs in units of the largest cost, ``N``; at least a millionth of it.

    Where nothing costs they are the gains.
    """
    if costs is None or not bool((largest := costs.max()) > 0.0):
        return gains
    return gains / (costs / largest).clamp_min(_LEAST_COST)
