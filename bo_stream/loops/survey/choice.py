"""Choice of a survey's next sites: constraints, a first round, rounds by the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bo_stream.acquisition.constraints import Round, SiteConstraints
from bo_stream.acquisition.criteria import (
    Criterion,
    ExceedanceEntropy,
    IntegratedVariance,
    Misclassification,
    TargetedVariance,
)
from bo_stream.acquisition.site_choice import SiteChoice, select_sites
from bo_stream.errors import UsageError
from bo_stream.loops.survey.facts import SurveyFacts
from bo_stream.loops.survey.settings import SurveySettings
from bo_stream.loops.survey.sites import SurveySites
from bo_stream.loops.survey.spread import spread_coordinates, spread_out
from bo_stream.models.base import StreamingGP


@dataclass(frozen=True)
class Chosen:
    """A site that is chosen for a round.

    Attributes:
        place: Its place in the list.
        gain: Expected fall of the criterion's total, None in a first round.
        cost: Of the survey and of the travel that it adds.
    """

    place: int
    gain: float | None
    cost: float


class Choice:
    """The sites that may be asked for next, and how they are chosen.

    Args:
        sites: The list.
        facts: What is known.
        settings: Of the survey.
        criterion: Uncertainty to be reduced; None: the settings' one.
    """

    def __init__(
        self,
        sites: SurveySites,
        facts: SurveyFacts,
        settings: SurveySettings,
        criterion: Criterion | None = None,
    ) -> None:
        self._sites, self._facts, self._settings = sites, facts, settings
        self._criterion = criterion_of(settings) if criterion is None else criterion
        self._surveyed = _places(sites, list(facts.results))
        self._pending = _places(sites, list(facts.pending))
        self._constraints = constraints_of(sites, facts, settings)

    def check(self) -> None:
        """Check that a site may be chosen.

        Raises:
            UsageError: There is none.
        """
        self._begin(self._pending)

    def first(self, q: int) -> list[Chosen]:
        """Choose up to q sites that are spread out, for lack of results.

        Raises:
            UsageError: No site may be chosen.
        """
        start = self._begin(self._pending)
        points = spread_coordinates(self._sites.X, self._sites.X, self._sites.coordinates)
        picks = spread_out(points, q, points[self._pending], start)
        return [Chosen(place, None, cost) for place, cost in picks]

    def next(self, model: StreamingGP, q: int, trials: int) -> list[Chosen]:
        """Choose up to q sites that reduce the criterion most, once all pending ones are surveyed.

        Args:
            model: Of all results.
            q: Most sites.
            trials: Number of people that a site is expected to examine.

        Raises:
            UsageError: No site may be chosen.
        """
        choice = self._select(model, q, trials, self._pending)
        values = (choice.indices.tolist(), choice.gains.tolist(), choice.costs.tolist())
        return [Chosen(*each) for each in zip(*values, strict=True)]

    def forecast(self, model: StreamingGP, rounds: int, q: int, trials: int) -> pd.DataFrame:
        """Predict the criterion's total after further rounds; arguments as :meth:`next`.

        Each round is chosen as if the rounds before it, and the pending sites, were surveyed. The
        table ends where no site is left; the total is NaN if none is left now.
        """
        waiting = self._pending
        lines: list[tuple[int, int, float, float]] = []
        for number in range(1, rounds + 1):
            try:
                choice = self._select(model, q, trials, waiting)
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

    def _select(self, model: StreamingGP, q: int, trials: int, pending: Tensor) -> SiteChoice:
        self._begin(pending)
        return select_sites(
            model,
            self._sites.X,
            q,
            self._criterion,
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
            raise UsageError(self._nothing_left())
        costs = start.costs()
        if costs is not None and not bool(start.feasible(costs).any()):
            least = int(costs.masked_fill(~start.allowed, torch.inf).argmin())
            raise UsageError(
                f"The budget of {self._settings.budget:g} pays for no site: the cheapest one, "
                f"{self._sites.ids[least]}, costs {float(costs[least]):.4g}, travel included. "
                "Raise the budget."
            )
        return start

    def _nothing_left(self) -> str:
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
                ". Any others are nearer to surveyed or pending ones than the minimum distance, or "
                "in strata with a quota of 0"
            )
        return f"No site is left to ask for: of {len(self._sites):,} sites, {known}{others}."


def criterion_of(settings: SurveySettings) -> Criterion:
    """Build the criterion that settings name; thresholds and variances are of prevalence."""
    name, threshold = settings.chosen_criterion, settings.threshold
    if name == "variance" or threshold is None:
        return IntegratedVariance(scale="prevalence")
    if name == "misclassification":
        return Misclassification(threshold, "prevalence", settings.miss_cost)
    kind = {"entropy": ExceedanceEntropy, "targeted": TargetedVariance}[name]
    return kind(threshold=threshold, scale="prevalence")


def constraints_of(
    sites: SurveySites, facts: SurveyFacts, settings: SurveySettings
) -> SiteConstraints:
    """Build the constraints of a round: those of the settings, and sites that were given up."""
    strata, quotas = None, None
    if sites.strata is not None:
        labels, numbers = np.unique(sites.strata.astype(str), return_inverse=True)
        strata = torch.from_numpy(numbers)
        place = {label: number for number, label in enumerate(labels.tolist())}
        quotas = {place[label]: most for label, most in settings.quotas.items()}
    base = None
    if settings.base is not None:
        base = sites.on_plane(torch.tensor([settings.base], dtype=sites.X.dtype))[0]
    unreachable = torch.from_numpy(~sites.reachable)
    unreachable[_places(sites, list(facts.given_up))] = True
    return SiteConstraints(
        costs=sites.costs,
        budget=settings.budget,
        positions=sites.kilometres,
        minimum_distance=settings.minimum_distance,
        earlier=sites.on_plane(facts.inputs(facts.surveyed)),
        strata=strata,
        quotas=quotas,
        unreachable=unreachable,
        base=base,
        cost_per_km=settings.cost_per_km,
    )


def _places(sites: SurveySites, ids: Sequence[str]) -> Tensor:
    """Return the places of those of some sites that are in the list."""
    places = sites.positions(ids)
    return torch.from_numpy(places[places >= 0])
