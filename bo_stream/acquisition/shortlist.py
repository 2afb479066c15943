"""Gains of a criterion in pools whose covariances with all targets are too many to hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from bo_stream.acquisition.feature_nipv import PointMeasure
from bo_stream.acquisition.lookahead import Lookahead
from bo_stream.acquisition.pool import Gains, JointGains
from bo_stream.acquisition.site_noise import SiteNoise
from bo_stream.acquisition.sites import kept_sites
from bo_stream.acquisition.target_gains import (
    CriterionGains,
    JointTargetGains,
    per_cost,
    without_own,
)
from bo_stream.acquisition.weight_space import explained
from bo_stream.bases.inducing import InducingBasis
from bo_stream.linalg import pivot_rows
from bo_stream.process.process import PosteriorProcess, WeightSpaceProcess
from bo_stream.weights import WeightPosterior

SHORTLIST = 256
"""Candidates by rank, and as many at random, whose gains are computed exactly at each pick."""

SHARE = 0.5
"""Share of a target's variance whose removal weighs the target in the ranking."""

ADDED = 100
"""Targets that are added to the inducing points of a ranking."""

LEAST_PIVOT = 1e-4
"""Residual variance, relative to the largest, below which a target is not added."""


@dataclass(frozen=True)
class Ranking:
    """Guesses of the gains of all N candidates, by features, in float32.

    They are gains of the criterion made linear in the variance, a target's slope being the mean one
    until ``SHARE`` of its variance is removed. Of covariances they know what features explain.
    Cost O(N r) for each candidate observed.

    Attributes:
        gains: Of the linear criterion in feature space.
        noise: Noise variance of each candidate and what its features leave of its own, ``1 x N``.
    """

    gains: Gains
    noise: Tensor

    @classmethod
    def of(
        cls,
        process: PosteriorProcess,
        noise: SiteNoise,
        targets: PointMeasure,
        lookahead: Lookahead,
    ) -> Ranking | None:
        """Rank by a process, None where it has no features. Cost O(N r²)."""
        space = explained(process)
        if space is None:
            return None
        gone = SHARE * lookahead.variance
        slope = (lookahead(torch.zeros_like(gone)) - lookahead(gone)) / gone.clamp_min(1e-300)
        weighted = PointMeasure(targets.points, targets.weights * slope)
        space = with_targets(space, weighted)
        at = kept_sites(space.basis, noise.X)
        gains = Gains.of(at, weighted.gram(space.basis), space.weights)
        mean = (space.prior_mean + at.linear(space.weights.mean)[:, 0])[0]
        residual = at.residual()
        variance = (gains.variance[0] + residual).clamp_min(0.0)
        index = torch.arange(len(mean), device=mean.device)
        return cls(gains, noise.at(index, mean, variance) + residual)

    def values(self) -> Tensor:
        """Return the linear gains, ``N``."""
        return self.gains.value(self.noise)[0]

    def observing(self, i: int) -> Ranking:
        """Return the guesses after the i-th candidate."""
        return replace(self, gains=self.gains.observing(i, self.noise[:, i, None]))


def with_targets(space: WeightSpaceProcess, targets: PointMeasure) -> WeightSpaceProcess:
    """Add targets to the inducing points of a process, those of the largest weighted residual.

    Exact: what the features left of the process at these points had its prior covariance, and
    becomes weights of unit covariance. A process on another basis stays as it is. Cost O(M³).

    Args:
        space: A process of one output.
        targets: M points and their weights.
    """
    basis = space.basis
    if not isinstance(basis, InducingBasis):
        return space
    points, scale = targets.points, targets.weights.sqrt()
    features = basis.features(points)
    residual = basis.residual_covariance(points, points, features, features)[0]
    weighted = scale * residual * scale.unsqueeze(-1)
    chosen = pivot_rows(weighted, LEAST_PIVOT * float(weighted.diagonal().max()))[:ADDED]
    if len(chosen) == 0:
        return space
    old, new = basis.rank, len(chosen)
    mean = torch.nn.functional.pad(space.weights.mean, (0, 0, 0, new))
    root = torch.nn.functional.pad(space.weights.root, (0, new, 0, new))
    root[..., old:, old:] = torch.eye(new).to(root)
    grown = basis.grown(points[chosen], features[:, chosen])
    return replace(space, basis=grown, weights=WeightPosterior.of(mean, root))


@dataclass(frozen=True)
class ShortlistGains(CriterionGains):
    """Gains of any criterion for some of the candidates, computed exactly.

    Each pick is the best of the ``SHORTLIST`` feasible candidates that rank highest, per cost where
    there are costs, and of as many drawn at random.

    Attributes:
        process: The process given the candidates observed so far.
        before: The process before the round, which the noise is of.
        noise: Of the candidates.
        targets: Points and weights.
        lookahead: The criterion at the targets, of variances in units of the process.
        removed: Variance removed from the targets so far, ``M``.
        ranking: Guesses of all gains; None where the process has no features.
        observed: Number of candidates observed so far.
        own: Targets that candidates settle, as of :class:`JointTargetGains`.
    """

    process: PosteriorProcess
    before: PosteriorProcess
    noise: SiteNoise
    targets: PointMeasure
    lookahead: Lookahead
    removed: Tensor
    ranking: Ranking | None
    observed: int = 0
    own: Tensor | None = None

    @classmethod
    def of(
        cls,
        process: PosteriorProcess,
        noise: SiteNoise,
        targets: PointMeasure,
        lookahead: Lookahead,
        own: Tensor | None = None,
    ) -> Self:
        """Rank all candidates before a round."""
        ranking = Ranking.of(process, noise, targets, lookahead)
        removed = torch.zeros_like(lookahead.variance)
        return cls(process, process, noise, targets, lookahead, removed, ranking, own=own)

    @property
    def total(self) -> float:
        """Expected weighted sum after the candidates observed so far."""
        return float(self.lookahead(self.removed) @ self.targets.weights)

    def best(self, feasible: Tensor, costs: Tensor | None) -> tuple[int, float]:
        """Find the best of those on the list; see :class:`CriterionGains`."""
        listed = self._listed(feasible, costs)
        among = torch.ones_like(listed, dtype=torch.bool)
        prices = None if costs is None else costs[listed]
        pick, gain = self.exact(listed).best(among, prices)
        return int(listed[pick]), gain

    def observing(self, i: int) -> Self:
        """Return the gains after the i-th candidate."""
        one = torch.tensor([i], device=self.removed.device)
        exact, X = self.exact(one), self.noise.X[one]
        return replace(
            self,
            process=self.process.condition(X, self.process.mean(X), exact.noise),
            removed=exact.observing(0).removed,
            targets=replace(self.targets, weights=without_own(self.targets.weights, self.own, i)),
            ranking=None if self.ranking is None else self.ranking.observing(i),
            observed=self.observed + 1,
        )

    def _listed(self, feasible: Tensor, costs: Tensor | None) -> Tensor:
        """Return the indices of the candidates to look at, ascending."""
        allowed = feasible.nonzero().flatten()
        generator = torch.Generator().manual_seed(self.observed)
        drawn = torch.randperm(len(allowed), generator=generator)[:SHORTLIST]
        listed = allowed[drawn.to(allowed.device)]
        if self.ranking is not None:
            worth = per_cost(self.ranking.values(), costs)[allowed]
            highest = worth.topk(min(SHORTLIST, len(allowed))).indices
            listed = torch.cat((listed, allowed[highest])).unique()
        return listed.sort().values

    def exact(self, listed: Tensor) -> JointTargetGains:
        """Return the gains of some candidates, by index."""
        X = self.noise.X[listed]
        joint = JointGains.of(self.process, X, self.targets)
        mean, variance = (moment[0] for moment in self.before.marginals(X))
        noise = self.noise.at(listed, mean, variance)
        own = None if self.own is None else self.own[listed]
        weights = self.targets.weights
        return JointTargetGains(joint, noise, self.lookahead, weights, self.removed, own)
