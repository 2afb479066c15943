"""Choose the next sites of a survey."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bo_stream.acquisition.constraints import Round, SiteConstraints
from bo_stream.acquisition.criteria import (
    Criterion,
    ExceedanceEntropy,
    ExpectedLoss,
    IntegratedVariance,
    Misclassification,
    TargetedVariance,
)
from bo_stream.acquisition.site_choice import SiteChoice, select_sites
from bo_stream.errors import UsageError
from bo_stream.loops.models import import_function
from bo_stream.loops.survey.ledger import SurveyFacts
from bo_stream.loops.survey.settings import DEGREES, Coordinates, SurveySettings
from bo_stream.loops.survey.sites import SurveySites
from bo_stream.mapping import kilometres
from bo_stream.models.base import StreamingGP

Chosen: TypeAlias = tuple[int, float | None, float]
"""A site that is chosen for a round: its position in the list; the expected fall of the criterion's
total, None in a first round; the cost of the survey and of the travel that it adds."""


class Choice:
    """The sites that may be asked for next, and how they are chosen.

    Args:
        sites: The list.
        facts: What is known.
        settings: Of the survey.
        criterion: Uncertainty to be reduced; None: the settings' one.
        trusted: Functions of others that may be imported; None: any that the settings name.
    """

    def __init__(
        self,
        sites: SurveySites,
        facts: SurveyFacts,
        settings: SurveySettings,
        criterion: Criterion | None = None,
        trusted: Collection[str] | None = None,
    ) -> None:
        self._sites, self._facts, self._settings = sites, facts, settings
        self._given, self._trusted = criterion, trusted
        self._surveyed = _positions(sites, list(facts.results))
        self._pending = _positions(sites, list(facts.pending))
        # Constraints of a round: those of the settings, and sites that were given up.
        strata, quotas, base = None, None, None
        if sites.strata is not None:
            labels, strata_numbers = np.unique(sites.strata.astype(str), return_inverse=True)
            strata = torch.from_numpy(strata_numbers)
            number = {label: index for index, label in enumerate(labels.tolist())}
            quotas = {number[label]: most for label, most in settings.quotas.items()}
        if settings.base is not None:
            base = sites.plane.transform(torch.tensor([settings.base], dtype=sites.X.dtype))[0]
        unreachable = torch.from_numpy(~sites.reachable)
        unreachable[_positions(sites, list(facts.given_up))] = True
        self._constraints = SiteConstraints(
            costs=sites.costs,
            budget=settings.budget,
            positions=sites.kilometres,
            minimum_distance=settings.minimum_distance,
            earlier=sites.plane.transform(facts.inputs(facts.surveyed)[:, :2]),
            strata=strata,
            quotas=quotas,
            unreachable=unreachable,
            base=base,
            cost_per_km=settings.cost_per_km,
        )

    def check(self) -> None:
        """Check that a site may be chosen, and by what.

        Raises:
            UsageError: There is none, or the loss cannot be imported or is no loss.
        """
        self._begin(self._pending)
        if self._trusted is not None:
            return
        criterion, mean = self._criterion, torch.linspace(-3.0, 3.0, 7, dtype=torch.float64)
        try:  # it out, for a loss may be any function
            criterion.current(mean, torch.ones_like(mean))
        except Exception as error:
            if self._settings.loss is None:
                raise
            raise UsageError(
                f"The loss {self._settings.loss} does not map probabilities to losses, elementwise "
                f"by torch: {error}"
            ) from error

    @cached_property
    def _criterion(self) -> Criterion:
        if self._given is not None:
            return self._given
        if self._trusted is not None:
            check_loss(self._settings, self._trusted)
        return criterion_of(self._settings)

    def first(self, q: int) -> list[Chosen]:
        """Choose up to q sites that are spread out, for lack of results.

        Raises:
            UsageError: No site may be chosen.
        """
        start = self._begin(self._pending)
        points = spread_coordinates(self._sites.X, self._sites.coordinates)
        picks = spread_out(points, q, points[self._pending], start)
        return [(index, None, cost) for index, cost in picks]

    def next(self, model: StreamingGP, q: int, trials: int) -> tuple[list[Chosen], float]:
        """Choose up to q sites that reduce the criterion most, once all pending ones are surveyed.

        Args:
            model: Of all results.
            q: Most sites.
            trials: Number of people that a site is expected to examine.

        Returns:
            The sites, and the criterion's total before them, once all pending ones are surveyed.

        Raises:
            UsageError: No site may be chosen.
        """
        choice = self._select(model, q, trials, self._pending, self._criterion)
        values = (choice.indices.tolist(), choice.gains.tolist(), choice.costs.tolist())
        return list(zip(*values, strict=True)), choice.before

    def forecast(self, model: StreamingGP, rounds: int, q: int, trials: int) -> pd.DataFrame:
        """Predict the criterion's total after further rounds; arguments as :meth:`next`.

        Each round is chosen as if the rounds before it, and the pending sites, were surveyed. The
        table ends where no site is left; the total is NaN if none is left now.

        Raises:
            UsageError: The settings' loss is not trusted, or cannot be imported.
        """
        criterion, waiting = self._criterion, self._pending
        lines: list[tuple[int, int, float, float]] = []
        for number in range(1, rounds + 1):
            try:
                choice = self._select(model, q, trials, waiting, criterion)
            except UsageError:
                break
            if not lines:
                lines.append((0, 0, choice.before, 0.0))
            _, sites, _, cost = lines[-1]
            sites, cost = sites + len(choice.indices), cost + float(choice.costs.sum())
            lines.append((number, sites, choice.after, cost))
            waiting = torch.cat((waiting, choice.indices))
        columns = ["round", "sites", "total", "cost"]
        return pd.DataFrame(lines or [(0, 0, np.nan, 0.0)], columns=columns)

    def _select(
        self, model: StreamingGP, q: int, trials: int, pending: Tensor, criterion: Criterion
    ) -> SiteChoice:
        self._begin(pending)
        return select_sites(
            model,
            self._sites.X,
            q,
            criterion,
            exclude=self._surveyed,
            pending=pending,
            trials=trials,
            constraints=self._constraints,
            settles=self._settings.goal == "exceedance",
        )

    def _begin(self, pending: Tensor) -> Round:
        """Begin a round, and check that a site may be chosen."""
        available = torch.ones(len(self._sites), dtype=torch.bool)
        available[self._surveyed] = False
        available[pending] = False
        start = Round.begin(self._constraints, available, pending, self._sites.X)
        if not bool(start.allowed.any()):
            counts = {
                "surveyed": len(self._surveyed),
                "pending": len(self._pending),
                "given up": len(self._facts.given_up),
                "not reachable": int((~self._sites.reachable).sum()),
            }
            known = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
            others = ""
            if self._settings.minimum_distance or self._settings.quotas:
                others = (
                    ". Any others are nearer to surveyed or pending ones than the minimum "
                    "distance, or in strata with a quota of 0"
                )
            raise UsageError(
                f"No site is left to ask for: of {len(self._sites):,} sites, {known}{others}."
            )
        costs, feasible = start.offers()
        if costs is not None and not bool(feasible.any()):
            least = int(costs.masked_fill(~start.allowed, torch.inf).argmin())
            raise UsageError(
                f"The budget of {self._settings.budget:g} pays for no site: the cheapest one, "
                f"{self._sites.ids[least]}, costs {float(costs[least]):.4g}, travel included. "
                "Raise the budget."
            )
        return start


def check_loss(settings: SurveySettings, trusted: Collection[str]) -> None:
    """Check that the loss of a folder's settings, if they name one, is among those trusted.

    Raises:
        UsageError: It is not.
    """
    loss = settings.loss
    if loss is not None and loss not in trusted:
        raise UsageError(
            f"The survey names the loss {loss}, which would be imported and called. If you "
            f"trust it, name it too: --loss {loss}, or trusted=[...]."
        )


def criterion_of(settings: SurveySettings) -> Criterion:
    """Build the criterion that settings name; thresholds and variances are of prevalence.

    Raises:
        UsageError: It is a loss that cannot be imported.
    """
    name, threshold = settings.chosen_criterion, settings.threshold
    if settings.loss is not None and threshold is not None:
        return ExpectedLoss(import_function(settings.loss, "loss"), threshold, "prevalence")
    if name == "variance" or threshold is None:
        return IntegratedVariance(scale="prevalence")
    if name == "misclassification":
        return Misclassification(threshold, "prevalence", settings.miss_cost)
    kind = {"entropy": ExceedanceEntropy, "targeted": TargetedVariance}[name]
    return kind(threshold=threshold, scale="prevalence")


def _positions(sites: SurveySites, ids: Sequence[str]) -> Tensor:
    """Return the positions in the list of sites, of those that are in it."""
    positions = sites.positions(ids)
    return torch.from_numpy(positions[positions >= 0])


# --- first sites of a survey: spread out over the map and over the covariates --------------------


def spread_coordinates(X: Tensor, coordinates: Coordinates = DEGREES) -> Tensor:
    """Map sites to coordinates in which position and covariates weigh the same, ``n x d``.

    Positions are in units of the root mean square distance of the sites from their middle. A
    covariate is replaced by its rank among the sites, so that a few extreme values do not draw all
    choices; all covariates together have the mean square of the position.

    Args:
        X: Positions and covariates without missing values, ``n x d``.
        coordinates: Units of positions.
    """
    places = kilometres(X, units=coordinates.mapping_units).transform(X)[:, :2]
    offsets = places - places.mean(0)
    columns = [offsets / offsets.square().sum(-1).mean().sqrt().clamp_min(1e-9)]
    for values in X[:, 2:].T.contiguous():
        ordered = values.sort().values
        low = torch.searchsorted(ordered, values, right=False)
        high = torch.searchsorted(ordered, values, right=True)
        # From -1/2 to 1/2; all ranks among equal values are 0.
        ranks = 0.5 * (low + high).to(values) / len(X) - 0.5
        columns.append((12.0 / (X.shape[-1] - 2)) ** 0.5 * ranks.unsqueeze(-1))
    return torch.cat(columns, -1)


def spread_out(points: Tensor, q: int, taken: Tensor, start: Round) -> list[tuple[int, float]]:
    """Choose points one after the other, each the farthest from all others chosen and taken.

    The first one is the nearest to the mean if none is taken. Greedy maximin: without constraints
    the least distance is at least half of the largest possible one [Gonzalez, 1985, Clustering to
    minimize the maximum intercluster distance]. Costs O(N d) a point.

    Args:
        points: Candidates, ``N x d``.
        q: How many to choose at most.
        taken: Points that are taken already, ``k x d``.
        start: A round without sites, which says which candidates may be chosen.

    Returns:
        Positions in ``points`` and costs; fewer than q where no other point may be chosen.
    """
    distance = torch.full_like(points[:, 0], torch.inf)
    for point in taken:
        distance = torch.minimum(distance, (points - point).square().sum(-1))
    priority = distance if len(taken) else -(points - points.mean(0)).square().sum(-1)
    chosen: list[tuple[int, float]] = []
    while len(chosen) < q:
        costs, feasible = start.offers()
        if not bool(feasible.any()):
            break
        pick = int(priority.masked_fill(~feasible, -torch.inf).argmax())
        cost = 0.0 if costs is None else float(costs[pick])
        chosen.append((pick, cost))
        start = start.visiting(pick, cost)
        apart = (points - points[pick]).square().sum(-1)
        priority = distance = torch.minimum(distance, apart)
    return chosen
