"""Choice of a survey's next sites: constraints, a first round, rounds by the model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

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
from bo_stream.loops.own_functions import import_function
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
        self._surveyed = _places(sites, list(facts.results))
        self._pending = _places(sites, list(facts.pending))
        self._constraints = constraints_of(sites, facts, settings)

    def check(self) -> None:
        """Check that a site may be chosen, and by what.

        Raises:
            UsageError: There is none, or the loss cannot be imported or is no loss.
        """
        self._begin(self._pending)
        if self._trusted is None:
            _check_criterion(self._criterion, self._settings)

    @cached_property
    def _criterion(self) -> Criterion:
        if self._given is not None:
            return self._given
        loss = self._settings.loss
        if loss is not None and self._trusted is not None and loss not in self._trusted:
            raise UsageError(
                f"The survey names the loss {loss}, which would be imported and called. If you "
                f"trust it, name it too: --loss {loss}, or trusted=[...]."
            )
        return criterion_of(self._settings)

    def first(self, q: int) -> list[Chosen]:
        """Choose up to q sites that are spread out, for lack of results.

        Raises:
            UsageError: No site may be chosen.
        """
        start = self._begin(self._pending)
        points = spread_coordinates(self._sites.X, self._sites.X, self._sites.coordinates)
        picks = spread_out(points, q, points[self._pending], start)
        return [Chosen(place, None, cost) for place, cost in picks]

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
        return [Chosen(*each) for each in zip(*values, strict=True)], choice.before

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


def _check_criterion(criterion: Criterion, settings: SurveySettings) -> None:
    """Try a criterion out, for a loss may be any function."""
    mean = torch.linspace(-3.0, 3.0, 7, dtype=torch.float64)
    try:
        criterion.current(mean, torch.ones_like(mean))
    except Exception as error:
        if settings.loss is None:
            raise
        raise UsageError(
            f"The loss {settings.loss} does not map probabilities to losses, elementwise by torch: "
            f"{error}"
        ) from error


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
