"""Expected falls of a criterion by each candidate of a pool, given the candidates chosen so far."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from bo_stream.acquisition.lookahead import Lookahead
from bo_stream.acquisition.pool import TIE, Gains, JointGains

_BLOCK = 100_000
"""Pairs of a candidate and a target that are valued together: they fit in a processor's cache."""

_LEAST_COST = 1e-6
"""Least cost that gains are divided by, as a fraction of the largest: a detour may be free."""


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
        step = max(1, _BLOCK // len(worth))
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
    worth = per_cost(gains, costs).masked_fill(~feasible, -torch.inf)
    largest = worth.max()
    pick = int((worth >= largest - TIE * largest.abs()).to(torch.uint8).argmax())
    return pick, float(gains[pick])


def per_cost(gains: Tensor, costs: Tensor | None) -> Tensor:
    """Divide gains by costs, ``N``; tiny costs count as a millionth of the largest cost."""
    if costs is None:
        return gains
    return gains / costs.clamp_min(_LEAST_COST * float(costs.max()))
