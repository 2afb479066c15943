"""A replay asks and tells as a client does, and knows no result before it is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import betabinom, binom, norm

from bo_stream.errors import UsageError
from bo_stream.loops.survey.replay import FinishedSurvey, RoundScore, replay_survey
from bo_stream.loops.survey.settings import Design, ReplayPlan
from bo_stream.loops.survey.survey import Survey
from tests.loops.survey.villages import SETTINGS, prevalence_at, results_of, villages

COUNT = 36
COSTLY = replace(SETTINGS, threshold=0.2, miss_cost=3.0)
PLAN = ReplayPlan(start=10, q=3, rounds=2)


def surveyed() -> pd.DataFrame:
    """Villages with results, a row without, and their true prevalence."""
    table = villages(COUNT).merge(results_of(villages(COUNT)["village"], COUNT))
    table["true"] = prevalence_at(table["Longitude (deg)"].to_numpy(), table["Lat"].to_numpy())
    table[["tested", "positives"]] = table[["tested", "positives"]].astype(float)
    table.loc[7, ["tested", "positives"]] = np.nan
    return table


def play(table: pd.DataFrame, design: Design, **changes: Any) -> list[RoundScore]:
    finished = FinishedSurvey.of(table, COSTLY, "true")
    return list(replay_survey(finished, replace(PLAN, **changes), design, 0))


def by_hand(table: pd.DataFrame) -> Iterator[tuple[Survey, list[str]]]:
    """A survey of the villages with results, as a client plays it: its sites, round by round."""
    known = table[table["tested"].notna()]
    results = known[["village", "tested", "positives"]].set_index("village")
    survey = Survey(known.drop(columns=["tested", "positives"]), COSTLY)
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(0))
    chosen = known["village"].iloc[order[: PLAN.start].tolist()].tolist()
    for _ in range(PLAN.rounds):
        survey.tell(results.loc[chosen].reset_index())
        yield survey, chosen
        chosen = survey.ask(PLAN.q)["id"].tolist()
    survey.tell(results.loc[chosen].reset_index())
    yield survey, chosen


@pytest.fixture(scope="module")
def adaptive() -> list[RoundScore]:
    return play(surveyed(), "adaptive")


def test_the_adaptive_design_asks_and_tells_as_a_client(adaptive: list[RoundScore]) -> None:
    scored = [tuple(sites) for _, sites in by_hand(surveyed())]
    assert scored == [score.sites for score in adaptive]
    assert [score.round for score in adaptive] == [0, 1, 2]
    assert [score.surveyed for score in adaptive] == [10, 13, 16]
    assert [score.left for score in adaptive] == [25, 22, 19]
    assert len({site for score in adaptive for site in score.sites}) == 16


def test_scores_are_those_of_the_formulas(adaptive: list[RoundScore]) -> None:
    table = surveyed()
    survey, score = Survey(table.drop(columns=["tested", "positives"]), COSTLY), adaptive[-1]
    known = table.set_index("village")
    told = [site for each in adaptive for site in each.sites]
    survey = Survey(table[table["tested"].notna()].drop(columns=["tested", "positives"]), COSTLY)
    survey.tell(known.loc[told, ["tested", "positives"]].reset_index())
    predicted = survey.predictions().set_index("id")
    right, found, squares, logs = [], [], [], []
    others = survey.model.likelihood.others
    for site in set(known.index) - {*told, "V007"}:
        chance, truth = predicted.loc[site, "exceedance"], known.loc[site, "true"]
        called = 3.0 * chance > 1.0 - chance  # a missed site costs three false alarms
        right.append(called == (truth > 0.2))
        if truth > 0.2:
            found.append(called)
        squares.append((predicted.loc[site, "prevalence"] - truth) ** 2)
        logit = survey.model.posterior(survey.inputs([site]))
        mean, sd = float(logit.mean), float(logit.variance.sqrt())
        f = np.linspace(mean - 9.0 * sd, mean + 9.0 * sd, 4001)
        count = (int(known.loc[site, "positives"]), int(known.loc[site, "tested"]))
        density = binom.pmf(*count, 1.0 / (1.0 + np.exp(-f))) * norm.pdf(f, mean, sd)
        ordinary = density.sum() * (f[1] - f[0])
        strange = betabinom.pmf(*count, others.a, others.b)
        logs.append(np.log((1.0 - others.share) * ordinary + others.share * strange))
    assert len(right) == score.left
    assert score.accuracy == pytest.approx(np.mean(right))
    assert score.sensitivity == pytest.approx(np.mean(found))
    assert score.rmse == pytest.approx(np.sqrt(np.mean(squares)))
    assert score.log_score == pytest.approx(np.mean(logs), abs=1e-6)


def test_a_result_that_is_not_told_changes_no_choice(adaptive: list[RoundScore]) -> None:
    first = adaptive[:2]
    other, told = surveyed(), {site for score in first for site in score.sites}
    untold = ~other["village"].isin(told)
    other.loc[untold, "positives"] = other["tested"] - other["positives"]
    changed = play(other, "adaptive", rounds=1)
    assert [score.sites for score in changed] == [score.sites for score in first]
    for one, another in zip(changed, first, strict=True):
        assert one.log_score != another.log_score
        assert (one.accuracy, one.rmse) == (another.accuracy, another.rmse)  # of the truth


def test_random_draws_are_the_same_whatever_the_outcomes(adaptive: list[RoundScore]) -> None:
    table, other = surveyed(), surveyed()
    other["positives"] = other["tested"] - other["positives"]
    first, second = (play(each, "random", rounds=1) for each in (table, other))
    assert [score.sites for score in first] == [score.sites for score in second]
    assert first[0] == replace(adaptive[0], design="random")
    order = FinishedSurvey.of(table, COSTLY).shuffled(0)
    assert [site for score in first for site in score.sites] == order[:13]
    assert abs(first[0].rmse - second[0].rmse) > 0.1  # the log score is symmetric in positives


def test_ids_that_are_one_number_to_a_spreadsheet_are_sites_of_their_own(
    adaptive: list[RoundScore],
) -> None:
    table = surveyed()
    names = ["7", "007", *(f"1.{row}" for row in range(1, COUNT - 1))]  # 1.1 and 1.10 are there
    renamed = dict(zip(table["village"], names, strict=True))
    table["village"] = table["village"].map(renamed)
    score = play(table, "random", rounds=1)[0]
    sites = tuple(renamed[site] for site in adaptive[0].sites)
    assert score == replace(adaptive[0], design="random", sites=sites)
    assert {"1.1", "1.10", "1.2", "1.20", "7", "007"} & set(sites)


@pytest.mark.integration
def test_a_map_without_a_threshold_has_no_calls() -> None:
    settings = replace(SETTINGS, goal="map", threshold=None)
    (score, *_) = replay_survey(FinishedSurvey.of(surveyed(), settings), PLAN, "adaptive", 1)
    assert np.isnan([score.accuracy, score.sensitivity]).all()
    assert np.isfinite([score.log_score, score.rmse]).all()


def test_results_are_kept_apart_and_rows_without_drop_out() -> None:
    finished = FinishedSurvey.of(surveyed(), SETTINGS)
    assert finished.notes == ("1 of 36 sites have no result: they are neither chosen nor scored.",)
    assert len(finished) == 35
    assert "V007" not in finished.shuffled(3)
    assert sorted(finished.shuffled(3)) == sorted(finished.results.index)
    assert finished.shuffled(3) != finished.shuffled(4)
    assert finished.begin().results.empty
    table = surveyed().set_index("village").loc[finished.results.index]
    shares = table["positives"] / table["tested"]
    assert finished.results["prevalence"].tolist() == shares.tolist()
    named = FinishedSurvey.of(surveyed(), SETTINGS, "true")
    assert named.results["prevalence"].tolist() == table["true"].tolist()
    assert named.fingerprint != finished.fingerprint


def test_columns_of_other_names_and_sites_without_ids() -> None:
    table = surveyed().drop(columns="village").rename(columns={"tested": "seen in 2015"})
    table["n"] = 1.0  # a usual name, which is not to take the place of the named column
    settings = replace(SETTINGS, examined="seen in 2015")
    finished = FinishedSurvey.of(table, settings)
    assert finished.begin().results.empty
    told = finished.begin()
    told.tell(finished.told(["0", "35"]))
    assert told.results["examined"].tolist() == [50, 50]


@pytest.mark.parametrize(
    ("changes", "truth", "message"),
    [
        ({"positives": np.nan, "tested": np.nan}, None, "no results, of which there is nothing"),
        ({"positives": 51.0, "tested": 50.0}, None, "row 0 .id V000., column 'positives'"),
        ({}, "height", "has no column 'height', which --truth names"),
        ({}, "rain", "both the truth and a covariate"),
        ({"true": 12.0}, "true", "row 0 .id V000., column 'true': .* 12 % is 0.12"),
        ({"true": np.nan}, "true", "column 'true': the true prevalence is missing"),
    ],
)
def test_a_table_that_cannot_be_replayed(
    changes: dict[str, float], truth: str | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        FinishedSurvey.of(surveyed().assign(**changes), SETTINGS, truth)


def test_a_label_with_a_comma_says_nothing_of_the_true_prevalence() -> None:
    table = surveyed()
    table = table.assign(visits="1,2", true=table["true"].map("{:.17f}".format))
    assert len(FinishedSurvey.of(table, SETTINGS, "true")) == 35


def test_a_true_prevalence_may_be_missing_where_there_is_no_result() -> None:
    table = surveyed()
    table.loc[7, "true"] = np.nan
    assert len(FinishedSurvey.of(table, SETTINGS, "true")) == 35


def test_too_few_sites_for_a_plan() -> None:
    finished = FinishedSurvey.of(surveyed(), SETTINGS)
    with pytest.raises(UsageError, match=r"35 sites, too few .* At most 8 rounds .*--rounds 8"):
        replay_survey(finished, replace(PLAN, rounds=9), "adaptive", 0)
    replay_survey(finished, replace(PLAN, rounds=8), "adaptive", 0)
    with pytest.raises(UsageError, match="Begin with fewer"):
        replay_survey(finished, replace(PLAN, start=34), "random", 0)
    with pytest.raises(UsageError, match="design to be one of adaptive, random"):
        replay_survey(finished, PLAN, "clever", 0)
    with pytest.raises(UsageError, match="Expected rounds to be a whole number of at least 1"):
        ReplayPlan(rounds=0)
