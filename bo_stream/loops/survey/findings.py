"""Findings of a survey: the tables that a report shows, and its summary in numbers and words."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd

from bo_stream.loops.survey.model import (
    ABOVE,
    BELOW,
    UNCERTAIN,
    Stopping,
    chances_of_wrong_calls,
    held_out_counts,
    per_cent,
)
from bo_stream.loops.survey.settings import DEGREES, Coordinates, CriterionName, SurveySettings
from bo_stream.loops.survey.survey import Survey

CALLED = "called"
"""Name of the file of all calls, without its ending."""

LEAST_HELD_OUT = 10
"""Results from which on predictions are compared with counts."""


@dataclass(frozen=True, kw_only=True)
class SurveyFindings:
    """Tables and settings of a survey at one moment.

    Attributes:
        name: Name of the campaign.
        predictions: A row a site: ``id``, ``longitude`` and ``latitude`` (or ``east`` and
            ``north``), ``prevalence`` (posterior mean), ``sd``, ``lower`` and ``upper`` (95 %
            interval), and where a site was surveyed ``examined`` and ``positive``, else NaN, and
            ``date``, empty where it is not known. With a
            threshold also ``exceedance``, the probability of a prevalence above it, and ``class``:
            above, below or uncertain.
        chosen: A row a site that is to be surveyed next, in the order of choice: ``id``,
            ``longitude``, ``latitude`` (or ``east``, ``north``), ``reason``, ``gain``, ``cost``.
        held_out: Counts predicted by models without them, from ``held_out_counts``; may be empty.
        forecast: A row a future round: ``sites``, surveyed by then in addition to today's, and
            ``remaining``, the expected share of today's uncertainty that is left.
        threshold: Prevalence that divides sites, or None.
        certainty: Least probability at which a site is called above or below.
        calls: Probabilities of being above at most, at least, with which a site is below, above.
        miss_cost: Cost of calling a site below that is above, in costs of the opposite mistake.
        settings: Settings in plain words.
        coordinates: Units and names of positions.
        notes: What looks odd in the tables of sites and results.
        stopping: How many more sites the stopping rule needs; None: there is no such rule.
        calls_made: Sites with their calls, of :func:`~bo_stream.loops.survey.model.calls_table`;
            empty without a threshold.
        labels: Other columns of the list of sites, such as name and district, indexed by id.
        called_file: Name of the file of all calls.
    """

    name: str
    predictions: pd.DataFrame
    chosen: pd.DataFrame
    held_out: pd.DataFrame
    forecast: pd.DataFrame
    threshold: float | None = None
    certainty: float = 0.9
    calls: tuple[float, float] = (0.1, 0.9)
    miss_cost: float = 1.0
    settings: Mapping[str, str] = field(default_factory=dict)
    coordinates: Coordinates = DEGREES
    notes: tuple[str, ...] = ()
    stopping: Stopping | None = None
    calls_made: pd.DataFrame = field(default_factory=pd.DataFrame)
    labels: pd.DataFrame = field(default_factory=pd.DataFrame)
    called_file: str = "called.csv"

    @property
    def surveyed(self) -> pd.DataFrame:
        """Rows of the sites that were surveyed."""
        return self.predictions[self.predictions["examined"].notna()]

    def class_counts(self) -> dict[str, int]:
        """Count the sites of each class: above, uncertain, below.

        Raises:
            ValueError: There is no threshold.
        """
        if self.threshold is None:
            raise ValueError("Expected findings with a threshold, got none: there are no classes.")
        counts = self.predictions["class"].value_counts()
        return {name: int(counts.get(name, 0)) for name in (ABOVE, UNCERTAIN, BELOW)}

    def expected_errors(self) -> float:
        """Compute how many sites are expected to be called wrongly, each by its cheaper call."""
        chance = self.predictions["exceedance"].to_numpy()
        return float(chances_of_wrong_calls(chance, 1.0 / (1.0 + self.miss_cost)).sum())


def find(
    survey: Survey,
    name: str,
    rounds: int = 5,
    q: int = 10,
    on_step: Callable[[str], None] = lambda text: None,
) -> SurveyFindings:
    """Compute what a report shows: predictions, their calibration and a look ahead.

    Costs a fit of the model, a third of one for each of ten folds, which start from it, and
    ``rounds`` choices.

    Args:
        survey: With one result at least.
        name: Of the campaign.
        rounds: Number of rounds of the forecast.
        q: Number of sites of each.
        on_step: Is called with a text about each step before it.

    Raises:
        UsageError: There is no result yet, or the survey's loss is not trusted.
    """
    on_step("Learning from the results")
    predictions = survey.predictions()
    on_step("Looking ahead")
    ahead = survey.forecast(rounds, q)
    forecast = pd.DataFrame({"sites": [], "remaining": []})
    now = float(ahead["total"].iloc[0])
    if now > 0.0:  # else nothing is uncertain; NaN: no site may be asked for
        later = ahead[1:]
        forecast = pd.DataFrame({"sites": later["sites"], "remaining": later["total"] / now})
    held_out = pd.DataFrame()
    if len(survey.results) >= LEAST_HELD_OUT:
        on_step("Predicting each result from the others")
        fit = partial(survey.fit, former=survey.model)
        held_out = held_out_counts(fit, *survey.observations)
    ends = survey.settings.stop_when is not None
    rule = survey.stopping(predictions=predictions) if ends else None
    return SurveyFindings(
        name=name,
        predictions=predictions,
        chosen=survey.pending,
        held_out=held_out,
        forecast=forecast,
        threshold=survey.settings.threshold,
        certainty=survey.settings.certainty,
        calls=survey.settings.calls,
        miss_cost=survey.settings.miss_cost,
        settings=in_words(survey),
        coordinates=survey.coordinates,
        notes=survey.notes,
        stopping=rule,
        calls_made=survey.calls(predictions),
        labels=survey.labels,
        called_file=survey.table_format.name(CALLED),
    )


def chance_in_words(chance: float) -> str:
    """Write a probability in per cent, never as none or all."""
    if chance > 0.99:
        return "over 99 %"
    return "under 1 %" if chance < 0.01 else per_cent(chance)


def result_in_words(site: Mapping[Hashable, Any]) -> str:
    """Say the result of a site, as in ``5 of 60 positive, 2026-01-31``.

    Args:
        site: ``examined``, ``positive`` and ``date`` of a row of predictions; NaN and empty where
            it was not surveyed.
    """
    if pd.isna(site["examined"]):
        return ""
    day = f", {site['date']}" if site["date"] else ""
    return f"{site['positive']:,.0f} of {site['examined']:,.0f} positive{day}"


_CRITERIA: dict[CriterionName, str] = {
    "entropy": "uncertainty (entropy) about which side of the threshold each site is on",
    "misclassification": "expected number of sites called wrongly",
    "targeted": "variance of prevalence near the threshold",
    "variance": "variance of prevalence",
}


def in_words(survey: Survey) -> dict[str, str]:
    """Say the settings of a survey in plain words, each with its name."""
    settings = survey.settings
    reduced = _CRITERIA[settings.chosen_criterion]
    if settings.loss is not None:
        reduced = f"the expected loss of the best actions ({settings.loss})"
    texts = {"Goal": goal_in_words(settings)}
    if settings.threshold is not None:
        rest, sure = (per_cent(chance) for chance in settings.calls)
        texts["Called above, below"] = f"chance of being above at least {sure}, at most {rest}"
    if settings.stop_when is not None:
        texts["The survey may end at"] = f"{per_cent(settings.stop_when)} expected wrong calls"
    texts |= {
        "Sites are chosen to reduce": reduced,
        "Cost of a missed site": f"{settings.miss_cost:g} false alarms",
        "Covariates": ", ".join(settings.covariates) or "none",
        "People expected at a site": f"{survey.trials:,}",
        "Counts": "beta-binomial" if settings.overdispersion else "binomial",
    }
    if settings.budget is not None:
        texts["Budget of a round"] = f"{settings.budget:,.6g}"
    if settings.minimum_distance:
        texts["Least distance between sites"] = f"{settings.minimum_distance:g} km"
    if settings.quotas:
        quotas = (f"{name}: {most}" for name, most in settings.quotas.items())
        texts["Most sites of a round by stratum"] = ", ".join(quotas)
    if settings.base is not None:
        places = zip(settings.coordinates.names, settings.base, strict=True)
        place = ", ".join(f"{name} {value:.10g}" for name, value in places)
        travel = f"{settings.cost_per_km:g} a km"
        texts["Rounds start from"] = f"{place}; {travel}"
    return texts


def goal_in_words(settings: SurveySettings) -> str:
    """Say what a survey is to find out."""
    if settings.goal == "map" or settings.threshold is None:
        return "the prevalence everywhere"
    return f"which sites have a prevalence above {per_cent(settings.threshold)}"
