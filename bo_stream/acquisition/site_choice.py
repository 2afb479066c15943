"""Choice of the next sites: greedy rounds for a criterion, under constraints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

from bo_stream.acquisition.constraints import Round, SiteConstraints
from bo_stream.acquisition.criteria import Criterion
from bo_stream.acquisition.feature_nipv import PointMeasure, box_of, checked_weights, listed_inputs
from bo_stream.acquisition.lookahead import LinearLookahead
from bo_stream.acquisition.pool import JointGains, checked_indices
from bo_stream.acquisition.shortlist import ShortlistGains
from bo_stream.acquisition.site_noise import SiteNoise
from bo_stream.acquisition.target_gains import CriterionGains, FeatureGains, JointTargetGains
from bo_stream.acquisition.weight_space import in_weight_space, weight_space
from bo_stream.likelihoods.outcome_model import LogisticLikelihood
from bo_stream.models.base import StreamingGP
from bo_stream.models.wiski.dirichlet import DirichletWISKI

LABELS = (BernoulliLikelihood, LogisticLikelihood)
"""Likelihoods of class labels."""

MOST_TARGETS = 2048
"""Of a larger pool so many candidates, drawn at random, are the targets unless told."""

MOST_PAIRS = 32_000_000
"""Pairs of a candidate and a target up to which the gains of all candidates are exact."""


@dataclass(frozen=True, eq=False)
class SiteChoice:
    """Sites chosen for a round.

    Attributes:
        indices: Into the pool, in the order of choice, ``k``; k <= q.
        gains: Expected fall of the criterion's weighted sum by each, given those before, ``k``.
        costs: Of each, travel included, ``k``; zeros where nothing costs anything.
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
    before it, whatever will be observed there. Mean and variance before the round stay as they are,
    and the variance that observations remove adds up. Where sites have costs, a pick has the
    largest fall per cost; under a budget the better of that round and the one that only heeds the
    budget is taken (Leskovec et al., 2007, section 3.2).

    Args:
        model: Of one output and without batch shape. A count is taken for an observation of its
            logit, with the noise of its expected information.
        pool: Candidates, ``N x d``.
        q: Most to choose; fewer where constraints allow no more.
        criterion: U, such as ``Misclassification(0.1, "prevalence")``.
        mc_points: Targets, ``M x d``. Default: the pool, or of a pool of more than 2,048 as many
            drawn from it, with weights that sum to those of all.
        weights: Of the targets, zero or more; default: 1 each.
        exclude: Candidates not to choose: a boolean mask, ``N``, or indices, ``n``.
        pending: Candidates that have been asked for and are not observed yet, as ``exclude``: not
            chosen, and counted as observed before the round.
        trials: Examined at a site, of a model of counts: a number, or one each, ``N``. Default: the
            likelihood's, else the rounded mean of those observed.
        constraints: On the sites of the round.
        settles: Whether an observation settles its site, whose class is taken from there from then
            on, so that only the other sites are targets: all but those excluded, pending and
            chosen. Without ``mc_points``.

    Raises:
        BotorchTensorDimensionError: Shapes do not fit together.
        InputDataError: Values that are not finite or out of range, or no site that may be chosen,
            such as for a budget that pays for none.
        UnsupportedError: A model of labels, of several outputs, with a batch shape or an outcome
            transform other than ``Standardize``; ``trials`` of a model that is not of counts.
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
    excluded = _indices("exclude", exclude, candidates)
    waiting = _indices("pending", pending, candidates)
    available = torch.ones(len(candidates), dtype=torch.bool, device=candidates.device)
    available[excluded] = False
    available[waiting] = False
    limits = SiteConstraints() if constraints is None else constraints
    start = Round.begin(limits, available, waiting, candidates)
    _check_choice(start, available)
    targets, own = _targets(model, candidates, mc_points, weights, available if settles else None)
    gains = gains_before(model, SiteNoise.of(model, candidates, trials), targets, criterion, own)
    for i in waiting.tolist():
        gains = gains.observing(i)
    choice = _greedy(gains, start, q, per_cost=True)
    if limits.budget is None:
        return choice
    return min(choice, _greedy(gains, start, q, per_cost=False), key=lambda found: found.after)


def _greedy(gains: CriterionGains, allowed: Round, q: int, per_cost: bool) -> SiteChoice:
    """Pick the candidate of the largest gain, or gain per cost, up to q times."""
    picks: list[int] = []
    falls: list[float] = []
    paid: list[float] = []
    before = gains.total
    for _ in range(q):
        costs = allowed.costs()
        feasible = allowed.feasible(costs)
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
            f"{int((~mean.isfinite() | ~variance.isfinite()).sum())} of {len(mean)}. Fit it anew, "
            "and look at its hyperparameters."
        )
    variance = variance.clamp_min(0.0)
    lookahead = criterion.lookahead(offset + scale * mean, scale**2 * variance)
    lookahead = lookahead.rescaled(scale**-2)
    in_features = isinstance(lookahead, LinearLookahead) and in_weight_space(process)
    in_features = in_features and own is None
    if not in_features and len(noise.X) * len(targets.points) > MOST_PAIRS:
        return ShortlistGains.of(process, noise, targets, lookahead, own)
    index = torch.arange(len(noise.X), device=mean.device)
    variances = noise.at(index, *(moment[0] for moment in process.marginals(noise.X)))
    if isinstance(lookahead, LinearLookahead) and in_features:
        return FeatureGains.of(weight_space(process), noise.X, variances, targets, lookahead)
    joint = JointGains.of(process, noise.X, targets)
    removed = torch.zeros_like(variance)
    return JointTargetGains(joint, variances, lookahead, targets.weights, removed, own)


def _targets(
    model: StreamingGP,
    candidates: Tensor,
    mc_points: Tensor | None,
    weights: Tensor | None,
    unsettled: Tensor | None,
) -> tuple[PointMeasure, Tensor | None]:
    """Return targets and their weights, without those of weight 0; a large pool's thinned out.

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
    kept = index
    if mc_points is None and len(index) > MOST_TARGETS:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randperm(len(index), generator=generator)[:MOST_TARGETS]
        kept = index[drawn.to(index.device)]
    share = weights[index].sum() / weights[kept].sum()
    own = None
    if unsettled is not None:
        own = torch.full_like(weights, -1, dtype=torch.long)
        own[kept] = torch.arange(len(kept), device=kept.device)
    return PointMeasure(points[kept], weights[kept] * share), own


def _check_model(model: StreamingGP) -> None:
    """Check that a model has one output whose process is observed with noise."""
    name = type(model).__name__
    if len(model.batch_shape) > 0:
        raise UnsupportedError(
            f"Expected a model without batch shape, got one of batch shape "
            f"{tuple(model.batch_shape)}: that of its data, or of hypothetical observations."
        )
    if isinstance(model, DirichletWISKI) or isinstance(model.likelihood, LABELS):
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
    if model._outcomes.fixed:
        names = ", ".join(type(step).__name__ for step in model._outcomes.fixed)
        raise UnsupportedError(
            f"Expected a model whose outcome_transform is Standardize or None, got {names}: "
            "criteria are in the units of the outcomes. Transform Y yourself instead."
        )


def _check_choice(start: Round, available: Tensor) -> None:
    """Check that a first site can be chosen; InputDataError."""
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
    costs = start.costs()
    if costs is not None and not bool(start.feasible(costs).any()):
        least = float(costs[start.allowed].min())
        raise InputDataError(
            f"Expected a budget that pays for a site, got {start.constraints.budget:g}: the "
            f"cheapest costs {least:g}, travel included."
        )


def _indices(name: str, given: Tensor | None, candidates: Tensor) -> Tensor:
    """Return candidates that are given as a mask or as indices, each once."""
    if given is None:
        return torch.zeros(0, dtype=torch.long, device=candidates.device)
    return checked_indices(name, given, len(candidates)).unique().to(candidates.device)
