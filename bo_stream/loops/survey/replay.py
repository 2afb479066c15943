"""Replay of a finished survey: the sites that a design would have chosen, and what it had known."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from bo_stream.errors import UsageError, check_one_of, check_whole
from bo_stream.loops.survey.calibration import log_scores
from bo_stream.loops.survey.cells import Array, Cells, Mask, first
from bo_stream.loops.survey.columns import find_column, given_column
from bo_stream.loops.survey.replay_plan import DESIGNS, Design, ReplayPlan
from bo_stream.loops.survey.settings import SurveySettings
from bo_stream.loops.survey.sites import SurveySites
from bo_stream.loops.survey.survey import Survey


@dataclass(frozen=True)
class RoundScore:
    """Predictions after a round of a replay, scored at the sites that are not surveyed by then.

    Attributes:
        design: Of the replay.
        seed: Of the first sites and of the random design.
        round: Number of rounds so far; 0: only the first sites.
        surveyed: Number of sites surveyed so far.
        left: Number of the other sites.
        accuracy: Share of these that are called right: above where the threshold is exceeded, else
            below; each site is called by the side that is expected to cost less. NaN without a
            threshold.
        sensitivity: Share of those above that are called above; NaN if none is.
        log_score: Mean log probability of their counts, in nats.
        rmse: Root mean squared error of their prevalence.
        sites: Ids of the sites of this round, in the order of choice.
    """

    design: Design
    seed: int
    round: int
    surveyed: int
    left: int
    accuracy: float
    sensitivity: float
    log_score: float
    rmse: float
    sites: tuple[str, ...]


@dataclass(frozen=True)
class FinishedSurvey:
    """Sites whose results are known, kept apart from the results.

    Attributes:
        sites: Their table as given, with empty results.
        results: By id: ``examined``, ``positive``, and ``prevalence``, which predictions are
            compared with.
        settings: Of the survey.
        source: Name of the table, for messages.
        notes: Texts for the coordinator.
    """

    sites: pd.DataFrame
    results: pd.DataFrame
    settings: SurveySettings
    source: str
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        table: pd.DataFrame,
        settings: SurveySettings,
        truth: str | None = None,
        source: str = "The table of sites",
    ) -> FinishedSurvey:
        """Take the results out of a table; rows without them are left out.

        Args:
            table: A row a site, with columns examined and positive; see :class:`SurveySettings`
                for the others.
            settings: Of the survey.
            truth: Column of the true prevalence, where it is known; None: the share of positives
                stands for it.
            source: Name of the table, for messages.

        Raises:
            UsageError: A fault of the table, named by row and column; it has no results; or a
                budget pays for no site.
        """
        listed = SurveySites.of(table, settings, source)
        if not listed.earlier:
            raise UsageError(
                f"{source} has no results, of which there is nothing to replay. Expected columns "
                "of people examined and positive, with numbers in the rows that were surveyed."
            )
        named = table.set_axis([str(name) for name in table.columns], axis=1)
        there = np.isin(listed.ids.astype(str), list(listed.earlier))
        results = pd.DataFrame(
            {
                "examined": [counts.examined for counts in listed.earlier.values()],
                "positive": [counts.positive for counts in listed.earlier.values()],
            },
            index=pd.Index(listed.ids[there], name="id", dtype=object),
        )
        share = (results["positive"] / results["examined"]).to_numpy()
        cells = Cells(named, source, listed.id_column)
        results["prevalence"] = share if truth is None else _true(cells, truth, there, settings)
        emptied = named[there].assign(**dict.fromkeys(_counts(cells, settings), np.nan))
        begun = Survey(emptied, settings, source)
        return cls(emptied, results, settings, source, (*_without(there), *begun.notes))

    def __len__(self) -> int:
        return len(self.results)

    def begin(self) -> Survey:
        """Begin the survey anew, without any result."""
        return Survey(self.sites, self.settings, self.source)

    def shuffled(self, seed: int) -> list[str]:
        """Return all ids in random order."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self), generator=generator).tolist()
        return [self.results.index[row] for row in order]

    def told(self, ids: Sequence[str]) -> pd.DataFrame:
        """Return the results of sites, as a survey is told them."""
        return self.results.loc[list(ids), ["examined", "positive"]].reset_index()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of sites and results."""
        tables = self.sites.to_csv() + self.results.to_csv()
        return hashlib.sha256(tables.encode()).hexdigest()


def replay_survey(
    finished: FinishedSurvey, plan: ReplayPlan, design: Design, seed: int
) -> Iterator[RoundScore]:
    """Survey the sites anew, round by round, by a design.

    The first sites are drawn at random, the same ones for both designs. Then the adaptive design
    asks a :class:`Survey` for each round, as a client does, and the random one goes on with the
    order that the first sites were drawn in, whatever the constraints of the settings. The survey
    is told the results of the sites of each round, and of no others. Costs a fit of the model and
    a choice a round.

    Args:
        finished: The survey.
        plan: Number of first sites, rounds, and sites of a round.
        design: ``adaptive`` or ``random``.
        seed: Of the order in which sites are drawn.

    Returns:
        Scores after the first sites and after each round, which are played as they are drawn. A
        round may have fewer than q sites where the settings allow no more, and raises a
        ``UsageError`` where they allow none.

    Raises:
        UsageError: The design is unknown, or there are too few sites.
    """
    check_one_of("design", design, DESIGNS)
    check_whole("seed", seed, 0)
    plan.check(len(finished), finished.source)
    return _rounds(finished, plan, design, seed)


def _rounds(
    finished: FinishedSurvey, plan: ReplayPlan, design: Design, seed: int
) -> Iterator[RoundScore]:
    survey, order = finished.begin(), finished.shuffled(seed)
    sites, order = order[: plan.start], order[plan.start :]
    for number in range(plan.rounds + 1):
        if number and design == "adaptive":
            sites = survey.ask(plan.q)["id"].tolist()
        elif number:
            sites, order = order[: plan.q], order[plan.q :]
        survey.tell(finished.told(sites))
        yield _score(survey, finished, design, seed, number, sites)


def _score(
    survey: Survey,
    finished: FinishedSurvey,
    design: Design,
    seed: int,
    number: int,
    sites: Sequence[str],
) -> RoundScore:
    predicted = survey.predictions().set_index("id")
    left = predicted[predicted["examined"].isna()]
    results = finished.results.loc[left.index]
    rate = results["prevalence"].to_numpy()
    accuracy, sensitivity = _calls(left, rate, finished.settings)
    Y = torch.tensor(results[["positive", "examined"]].to_numpy().tolist(), dtype=torch.float64)
    errors = left["prevalence"].to_numpy() - rate
    return RoundScore(
        design=design,
        seed=seed,
        round=number,
        surveyed=len(predicted) - len(left),
        left=len(left),
        accuracy=accuracy,
        sensitivity=sensitivity,
        log_score=float(log_scores(survey.model, survey.inputs(left.index), Y).mean()),
        rmse=float(np.sqrt(np.square(errors).mean())),
        sites=tuple(sites),
    )


def _calls(left: pd.DataFrame, rate: Array, settings: SurveySettings) -> tuple[float, float]:
    """Compute accuracy and sensitivity of calls, NaN without a threshold."""
    if settings.threshold is None:
        return np.nan, np.nan
    above = rate > settings.threshold
    called = left["exceedance"].to_numpy() >= settings.cheaper_above
    sensitivity = float(called[above].mean()) if above.any() else np.nan
    return float((called == above).mean()), sensitivity


def _counts(cells: Cells, settings: SurveySettings) -> list[str]:
    """Return the columns of counts of a table that has them."""
    names = settings.unclaimed(cells.names)
    roles = ("examined", "positive")
    found = (find_column(names, role, getattr(settings, role), cells.source) for role in roles)
    return [name for name in found if name is not None]


def _without(there: Mask) -> list[str]:
    """Say how many sites have no result, if any."""
    missing = int((~there).sum())
    if not missing:
        return []
    return [
        f"{missing:,} of {len(there):,} sites have no result: they are neither chosen nor scored."
    ]


def _true(cells: Cells, column: str, there: Mask, settings: SurveySettings) -> Array:
    """Read the true prevalence of the sites with results."""
    given_column(cells.names, column, cells.source, "--truth")
    if column in settings.covariates:
        raise UsageError(
            f"Column {column!r} is both the truth and a covariate: a model that is told the truth "
            "proves nothing. Leave it out of the covariates."
        )
    rates = cells.numbers(column, "a prevalence between 0 and 1")
    bad = first(there & ~((rates >= 0.0) & (rates <= 1.0)))
    if bad is None:
        return rates[there]
    text = f"expected a prevalence between 0 and 1, got {rates[bad]:g}."
    if np.isnan(rates[bad]):
        text = "the true prevalence is missing, but the site has a result."
    elif 1.0 < rates[bad] <= 100.0:
        text += f" From per cent: {rates[bad]:g} % is {rates[bad] / 100.0:g}."
    raise cells.fault(bad, column, text)
