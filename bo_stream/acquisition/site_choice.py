"""Choose a round of sites from a list, by a criterion and under constraints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

from bo_stream.acquisition.constraints import Round, SiteConstraints
from bo_stream.acquisition.criteria import Criterion, sites
from bo_stream.acquisition.feature_nipv import (
    PointMeasure,
    box_of,
    checked_weights,
    explained,
    in_weight_space,
    listed_inputs,
    weight_space,
)
from bo_stream.acquisition.gains import (
    CriterionGains,
    FeatureGains,
    Gains,
    JointGains,
    JointTargetGains,
    per_cost,
)
from bo_stream.acquisition.lookahead import LinearLookahead, Lookahead
from bo_stream.acquisition.pool import check_no_batch, checked_indices
from bo_stream.bases.inducing import InducingBasis
from bo_stream.likelihoods.outcome_model import LogisticLikelihood
from bo_stream.linalg import pivot_rows
from bo_stream.models.base import StreamingGP
from bo_stream.models.checks import check_instance
from bo_stream.models.wiski.dirichlet import DirichletWISKI
from bo_stream.process import PosteriorProcess, WeightSpaceProcess
from bo_stream.weights import WeightPosterior

_LABELS = (BernoulliLikelihood, LogisticLikelihood)
"""Likelihoods of class labels."""

MOST_TARGETS = 2048
"""Of a larger pool this many candidates, drawn at random, are the targets unless given."""

MOST_PAIRS = 32_000_000
"""Pairs of a candidate and a target up to which the gains of all candidates are exact."""


@dataclass(frozen=True, eq=False)
class SiteChoice:
    """Sites chosen for a round.

    Attributes:
        indices: Into the pool, in the order of choice, ``k``; k <= q.
        gains: Expected fall of the criterion's weighted sum by each site, given the earlier ones,
            ``k``.
        costs: Cost of each site, travel included, ``k``; zeros where nothing costs anything.
        before: Weighted sum of the criterion, expected after pending sites.
        after: Weighted sum expected after the round.
    """

    indices: Tensor
    gains: Tensor
    costs: Tensor
    before: float
    after: float


@torch.no_grad()
def select_sites(
    model: StreamingGP,
    pool: Tensor,
    q: int,
    criterion: Criterion,
    mc_points: Tensor | None = None,
    weights: Tensor | None = None,
    exclude: Tensor | None = None,
    pending: Tensor | None = None,
    trials: int | Tensor | None = None,
    constraints: SiteConstraints | None = None,
    settles: bool = False,
) -> SiteChoice:
    """Choose up to q of N candidates, one after the other, that lower a criterion most.

    Each pick has the largest expected fall of ``Σ_j w_j U_j`` over target points j, given the picks
    before it. Mean and variance before the round stay as they are,
    and the variance that observations remove adds up. Where sites have costs, a pick has the
    largest fall per cost; under a budget the better of that round and the one that only heeds the
    budget is taken (Leskovec et al., 2007, section 3.2).

    Args:
        model: Of one output and without batch shape. A count is taken for an observation of its
            logit, with the noise of its expected information.
        pool: Candidates, ``N x d``.
        q: Most to choose; fewer where constraints allow no more.
        criterion: U, such as ``Misclassification(0.1, "prevalence")``.
        mc_points: Targets, ``M x d``. Default: the pool, or 2,048 that are drawn from a larger
            one, whose weights have the same sum as all weights.
        weights: Of the targets, zero or more; default: 1 each.
        exclude: Candidates not to choose: a boolean mask, ``N``, or indices, ``n``.
        pending: Candidates that were requested and are not observed yet, as ``exclude``: not
            chosen, and counted as observed before the round.
        trials: Examined at a site, of a model of counts: a number, or one each, ``N``. Default: the
            likelihood's, else the rounded mean of the observed ones.
        constraints: On the sites of the round.
        settles: Whether an observation settles its site, whose class is then known, so that only
            the other sites are targets: all that are not excluded, pending or chosen. Without
            ``mc_points``.

    Raises:
        BotorchTensorDimensionError: Shapes do not fit together.
        InputDataError: Values that are not finite or out of range, or no site that may be chosen,
            such as for a budget that pays for none.
        UnsupportedError: A model that is none of this package's, of labels, of several outputs,
            with a batch shape or an outcome transform other than ``Standardize``; ``trials`` of a
            model that is not of counts.
        ValueError: q is less than one, or targets of their own are given to sites that settle.
    """
    if q < 1:
        raise ValueError(f"Expected q of 1 or more, got {q}.")
    if settles and mc_points is not None:
        raise ValueError(
            "Expected no mc_points with settles=True, which makes candidates of the pool the "
            "targets. Leave them out, and give weights for the candidates."
        )
    _check_model(model)
    candidates = listed_inputs(model, "pool", pool)
    excluded = checked_indices("exclude", exclude, candidates).unique()
    waiting = checked_indices("pending", pending, candidates).unique()
    available = torch.ones(len(candidates), dtype=torch.bool, device=candidates.device)
    available[excluded] = False
    available[waiting] = False
    limits = SiteConstraints() if constraints is None else constraints
    start = Round.begin(limits, available, waiting, candidates)
    if not bool(available.any()):
        raise InputDataError(
            f"Expected a candidate that may be chosen, got {len(available)} that are all excluded "
            "or pending."
        )
    if not bool(start.allowed.any()):
        raise InputDataError(
            f"Expected a candidate that the constraints allow, got {int(available.sum())} that are "
            "unreachable, too near to pending or earlier sites, or of strata whose quota is 0."
        )
    costs, feasible = start.offers()
    if costs is not None and not bool(feasible.any()):
        least = float(costs[start.allowed].min())
        raise InputDataError(
            f"Expected a budget that pays for a site, got {limits.budget:g}: the cheapest costs "
            f"{least:g}, travel included."
        )
    targets, own = _targets(model, candidates, mc_points, weights, available if settles else None)
    gains = gains_before(model, SiteNoise.of(model, candidates, trials), targets, criterion, own)
    for i in waiting.tolist():
        gains = gains.observing(i)
    choice = _greedy(gains, start, q, per_cost=True)
    if limits.budget is None:
        return choice
    return min(choice, _greedy(gains, start, q, per_cost=False), key=lambda each: each.after)


def _greedy(gains: CriterionGains, allowed: Round, q: int, per_cost: bool) -> SiteChoice:
    """Pick the candidate of the largest gain, or gain per cost, up to q times."""
    picks: list[int] = []
    falls: list[float] = []
    paid: list[float] = []
    before = gains.total
    for _ in range(q):
        costs, feasible = allowed.offers()
        if not bool(feasible.any()):
            break
        pick, fall = gains.best(feasible, costs if per_cost else None)
        cost = 0.0 if costs is None else float(costs[pick])
        picks, falls, paid = [*picks, pick], [*falls, fall], [*paid, cost]
        gains, allowed = gains.observing(pick), allowed.visiting(pick, cost)
    like = torch.zeros(0, dtype=torch.float64, device=allowed.allowed.device)
    return SiteChoice(
        torch.tensor(picks, dtype=torch.long, device=like.device),
        like.new_tensor(falls),
        like.new_tensor(paid),
        before,
        gains.total,
    )


def gains_before(
    model: StreamingGP,
    noise: SiteNoise,
    targets: PointMeasure,
    criterion: Criterion,
    own: Tensor | None = None,
) -> CriterionGains:
    """Return the gains before the round: exact in feature space, or exact, or of a shortlist."""
    process = model.feature_process(box_of(torch.cat((noise.X, targets.points))))
    offset, scale = (float(value) for value in model._offset_and_scale())
    mean, variance = (moment[0] for moment in process.marginals(targets.points))
    if not bool(mean.isfinite().all() & variance.isfinite().all()):
        raise InputDataError(
            "Expected a model with a finite posterior at all targets, got one that is not at "
            f"{int((~mean.isfinite() | ~variance.isfinite()).sum())} of {len(mean)}. Fit it again, "
            "and look at its hyperparameters."
        )
    variance = variance.clamp_min(0.0)
    lookahead = criterion.lookahead(offset + scale * mean, scale**2 * variance)
    to_process = scale**-2  # from variances in the units of the outcomes
    if isinstance(lookahead, LinearLookahead):
        lookahead = replace(lookahead, slope=lookahead.slope / to_process)
    lookahead = replace(lookahead, variance=lookahead.variance * to_process)
    removed = torch.zeros_like(variance)
    total = float(lookahead(removed) @ targets.weights)
    in_features = isinstance(lookahead, LinearLookahead) and in_weight_space(process)
    in_features = in_features and own is None
    if not in_features and len(noise.X) * len(targets.points) > MOST_PAIRS:
        ranking = ranked(process, noise, targets, lookahead)
        given = process, process, noise, targets, lookahead, removed, ranking
        return ShortlistGains(total, *given, own=own)
    index = torch.arange(len(noise.X), device=mean.device)
    variances = noise.at(index, *(moment[0] for moment in process.marginals(noise.X)))
    if isinstance(lookahead, LinearLookahead) and in_features:
        space = weight_space(process)
        weighted = PointMeasure(targets.points, targets.weights * lookahead.slope)
        gains = Gains.of(sites(space.basis, noise.X), weighted.gram(space.basis), space.weights)
        return FeatureGains(total, gains, variances)
    joint = JointGains.of(process, noise.X, targets)
    return JointTargetGains(total, joint, variances, lookahead, targets.weights, removed, own)


def _targets(
    model: StreamingGP,
    candidates: Tensor,
    mc_points: Tensor | None,
    weights: Tensor | None,
    unsettled: Tensor | None,
) -> tuple[PointMeasure, Tensor | None]:
    """Return the targets of positive weight and their weights; of a large pool a random sample.

    Args:
        model: Whose inputs they are.
        candidates: The pool, ``N x d``.
        mc_points: Targets, if given.
        weights: Of the targets, if given.
        unsettled: Candidates that are targets, ``N`` bools; None: an observation settles nothing.

    Returns:
        The targets, and which of them is each candidate's own, ``N``; None if they have none.
    """
    points = candidates if mc_points is None else listed_inputs(model, "mc_points", mc_points)
    weights = checked_weights("pool" if mc_points is None else "mc_points", points, weights)
    wanted = weights > 0.0 if unsettled is None else unsettled & (weights > 0.0)
    index = wanted.nonzero().flatten()
    if len(index) == 0:
        raise InputDataError(
            "Expected a positive weight of a candidate that may be chosen, for these are the "
            "targets where a survey settles its own site, got none."
        )
    chosen = index
    if mc_points is None and len(index) > MOST_TARGETS:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randperm(len(index), generator=generator)[:MOST_TARGETS]
        chosen = index[drawn.to(index.device)]
    share = weights[index].sum() / weights[chosen].sum()
    own = None
    if unsettled is not None:
        own = torch.full_like(weights, -1, dtype=torch.long)
        own[chosen] = torch.arange(len(chosen), device=chosen.device)
    return PointMeasure(points[chosen], weights[chosen] * share), own


def _check_model(model: StreamingGP) -> None:
    """Check that a model has one output whose process is observed with noise."""
    check_instance("model", model, StreamingGP, "AutoGP(X, Y)")
    name = type(model).__name__
    check_no_batch(model.batch_shape)
    if isinstance(model, DirichletWISKI) or isinstance(model.likelihood, _LABELS):
        raise UnsupportedError(
            f"Expected a model of real outcomes or of counts, got a {name} of class labels, whose "
            "noise is not Gaussian. Use select_labels_from_pool, or give outcomes as counts, "
            "[positives, examined] with a BinomialLikelihood."
        )
    if model.num_outputs > 1:
        raise UnsupportedError(
            f"Expected a model of one output, got {model.num_outputs}. Pass "
            "model.subset_output([i])."
        )
    if model.prior.chain.fixed:
        names = ", ".join(type(step).__name__ for step in model.prior.chain.fixed)
        raise UnsupportedError(
            f"Expected a model whose outcome_transform is Standardize or None, got {names}: "
            "criteria are in the units of the outcomes. Transform Y yourself instead."
        )


# --- gains in large pools, with too many covariances of candidates and targets to store ----------


SHORTLIST = 256
"""Candidates by rank, and as many at random, whose gains are computed exactly at each pick."""

_SHARE = 0.5
"""Share of a target's variance whose removal weighs the target in the ranking."""

ADDED = 100
"""Targets that are added to the inducing points of a ranking."""

_LEAST_PIVOT = 1e-4
"""Residual variance, relative to the largest, below which a target is not added."""


def ranked(
    process: PosteriorProcess, noise: SiteNoise, targets: PointMeasure, lookahead: Lookahead
) -> tuple[Gains, Tensor] | None:
    """Guess the gains of all N candidates, by features, in float32; None without features.

    They are gains of the criterion made linear in the variance, a target's slope being the mean one
    until half of its variance is removed. They know the part of covariances in the features.
    Cost O(N r²), and O(N r) for each candidate observed.

    Returns:
        Gains of the linear criterion, and the noise variance of each candidate plus its variance
        outside the features, ``1 x N``.
    """
    space = explained(process)
    if space is None:
        return None
    gone = _SHARE * lookahead.variance
    slope = (lookahead(torch.zeros_like(gone)) - lookahead(gone)) / gone.clamp_min(1e-300)
    weighted = PointMeasure(targets.points, targets.weights * slope)
    space = with_targets(space, weighted)
    at = sites(space.basis, noise.X, cached=True)
    gains = Gains.of(at, weighted.gram(space.basis), space.weights)
    mean = (space.prior_mean + at.linear(space.weights.mean)[:, 0])[0]
    residual = at.residual()
    variance = (gains.variance[0] + residual).clamp_min(0.0)
    index = torch.arange(len(mean), device=mean.device)
    return gains, noise.at(index, mean, variance) + residual


def with_targets(space: WeightSpaceProcess, targets: PointMeasure) -> WeightSpaceProcess:
    """Add the targets of the largest weighted residual to the inducing points of a process.

    Exact: the residual of the process at these points had its prior covariance, and becomes weights
    of unit covariance. A process on another basis stays as it is. Cost O(M³).

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
    chosen = pivot_rows(weighted, _LEAST_PIVOT * float(weighted.diagonal().max()))[:ADDED]
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
        ranking: Guesses of all gains and the noise for them, see :func:`ranked`.
        observed: Number of candidates observed so far.
        own: Targets that candidates settle, as in :class:`JointTargetGains`.
    """

    process: PosteriorProcess
    before: PosteriorProcess
    noise: SiteNoise
    targets: PointMeasure
    lookahead: Lookahead
    removed: Tensor
    ranking: tuple[Gains, Tensor] | None
    observed: int = 0
    own: Tensor | None = None

    def best(self, feasible: Tensor, costs: Tensor | None) -> tuple[int, float]:
        """Find the best of the candidates on the list; see :class:`CriterionGains`."""
        allowed = feasible.nonzero().flatten()
        generator = torch.Generator().manual_seed(self.observed)
        drawn = torch.randperm(len(allowed), generator=generator)[:SHORTLIST]
        listed = allowed[drawn.to(allowed.device)]
        if self.ranking is not None:
            gains, noise = self.ranking
            of_allowed = None if costs is None else costs[allowed]
            worth = per_cost(gains.value(noise)[0][allowed], of_allowed)
            highest = worth.topk(min(SHORTLIST, len(allowed))).indices
            listed = torch.cat((listed, allowed[highest])).unique()
        listed = listed.sort().values
        among = torch.ones_like(listed, dtype=torch.bool)
        prices = None if costs is None else costs[listed]
        pick, gain = self.exact(listed).best(among, prices)
        return int(listed[pick]), gain

    def observing(self, i: int) -> Self:
        """Return the gains after the i-th candidate."""
        one = torch.tensor([i], device=self.removed.device)
        exact, X = self.exact(one), self.noise.X[one]
        after = exact.observing(0)
        ranking = self.ranking
        if ranking is not None:
            gains, noise = ranking
            ranking = gains.observing(i, noise[:, i, None]), noise
        return replace(
            self,
            total=after.total,
            process=self.process.condition(X, self.process.mean(X), exact.noise),
            removed=after.removed,
            targets=replace(self.targets, weights=after.weights),
            ranking=ranking,
            observed=self.observed + 1,
        )

    def exact(self, listed: Tensor) -> JointTargetGains:
        """Return the gains of some candidates, by index."""
        X = self.noise.X[listed]
        joint = JointGains.of(self.process, X, self.targets)
        mean, variance = (moment[0] for moment in self.before.marginals(X))
        noise = self.noise.at(listed, mean, variance)
        own = None if self.own is None else self.own[listed]
        weights = self.targets.weights
        given = joint, noise, self.lookahead, weights, self.removed, own
        return JointTargetGains(self.total, *given)


# --- noise of the observations at candidates, in the units of the process ------------------------


_ROWS = 16_384
"""Candidates whose noise is computed together."""


@dataclass(frozen=True)
class SiteNoise:
    """Noise variances of observations at N candidates, given the posterior before the round.

    For counts the noise of observations of the logit with the same expected information; else the
    model's own noise.

    Attributes:
        model: The model.
        X: Candidates in transformed inputs, ``N x d``.
        trials: Examined at each, ``N``; None: as the model has it, or no counts.
    """

    model: StreamingGP
    X: Tensor
    trials: Tensor | None

    @classmethod
    def of(cls, model: StreamingGP, X: Tensor, trials: int | Tensor | None) -> Self:
        """Check the number of trials, one or one each.

        Raises:
            BotorchTensorDimensionError: Another number of trials than of candidates.
            InputDataError: One is less than 1.
        """
        if trials is None:
            return cls(model, X, None)
        examined = torch.as_tensor(trials).to(X)
        if examined.shape not in (torch.Size(), torch.Size((len(X),))):
            raise BotorchTensorDimensionError(
                f"Expected trials as a number or of shape `{len(X)}`, one for each candidate of "
                f"pool, got {tuple(examined.shape)}."
            )
        if not bool((examined >= 1.0).all() & examined.isfinite().all()):
            raise InputDataError(f"Expected trials of 1 or more, got {float(examined.min()):g}.")
        return cls(model, X, examined.expand(len(X)))

    def at(self, index: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Compute the noise variances of some candidates, ``1 x n``.

        Args:
            index: Indices of the candidates, ``n``.
            mean: Mean of the process there, ``n``.
            variance: Variance of the process there, ``n``; negative rounding errors count as 0.

        Raises:
            UnsupportedError: There are trials, and the model is not of counts.
        """
        parts = []
        columns = (t.split(_ROWS) for t in (index, mean, variance.clamp_min(0.0)))
        for some, center, spread in zip(*columns, strict=True):
            trials = None if self.trials is None else self.trials[some]
            noise = self.model.noise_given(self.X[some], center, spread, trials)
            parts.append(noise.expand(1, len(some)))
        return torch.cat(parts, -1)
