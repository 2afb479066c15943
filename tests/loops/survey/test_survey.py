"""Ask and tell: late, partial, in any order, corrected, withdrawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from bo_stream import prevalence
from bo_stream.acquisition import ExpectedLoss
from bo_stream.errors import UsageError
from bo_stream.loops.survey.findings import in_words, next_files
from bo_stream.loops.survey.model import ModelCache, reasons
from bo_stream.loops.survey.survey import Survey
from bo_stream.loops.survey.tables import read_table
from tests.loops.survey.villages import SETTINGS, results_of, villages

STATE = ["id", "longitude", "latitude", "examined", "positive", "listed"]
TWELVE = [f"V{row:03d}" for row in range(12)]


def begin(**changes: Any) -> Survey:
    return Survey(villages(), replace(SETTINGS, **changes))


@pytest.fixture(scope="module")
def told() -> Survey:
    survey = begin()
    survey.tell(results_of(TWELVE))
    survey.model  # noqa: B018 (built once for all tests)
    return survey


def test_sites_asked_for_are_pending_until_their_results_come() -> None:
    survey = begin()
    asked = survey.ask(5)
    assert list(asked.columns) == ["id", "longitude", "latitude", "reason", "gain", "cost"]
    assert asked["id"].nunique() == 5
    assert asked["gain"].isna().all()
    assert survey.pending["id"].tolist() == asked["id"].tolist()
    late = survey.tell(results_of(asked["id"][[3, 1]]))
    assert (set(late.new), late.unasked) == (set(asked["id"][[3, 1]]), ())
    assert survey.pending["id"].tolist() == asked["id"][[0, 2, 4]].tolist()
    rest = survey.tell(results_of([*asked["id"], "V000"]).drop_duplicates("village"))
    assert set(rest.unchanged) == set(asked["id"][[3, 1]])
    assert survey.pending.empty
    status = survey.status()
    assert (status.surveyed, status.pending, status.rounds) == (len(survey.results), 0, 1)
    assert status.examined == 50 * status.surveyed
    assert survey.results["asked"].sum() == 5


def test_the_first_round_goes_on_where_the_pending_sites_are_not() -> None:
    survey, whole = begin(), begin()
    parts = [*survey.ask(4)["id"], *survey.ask(3)["id"]]
    assert parts == whole.ask(7)["id"].tolist()


def test_the_state_is_the_same_in_any_order() -> None:
    outside = pd.DataFrame(
        [
            {"village": "Zomba", "tested": 30, "positives": 4, "lon": 35.1, "lat": -5.2},
            {"village": "Beira", "tested": 20, "positives": 1, "lon": 35.3, "lat": -4.8},
        ]
    ).assign(rain=610.0, night_lights=np.nan)
    parts = [results_of([site]) for site in TWELVE[:6]] + [outside.iloc[[0]], outside.iloc[[1]]]
    generator = np.random.default_rng(3)
    wrong = results_of(["V002"]).assign(tested=49)
    surveys = []
    for _ in range(3):
        survey = begin()
        survey.tell(wrong)
        for part in generator.permutation(len(parts)):
            survey.tell(parts[part])
        surveys.append(survey)
    first, *others = surveys
    for other in others:
        pd.testing.assert_frame_equal(other.results[STATE], first.results[STATE])
        assert other.fingerprint == first.fingerprint
        for one, another in zip(other.observations, first.observations, strict=True):
            assert torch.equal(one, another)
    assert first.observations[0][-1, :3].tolist() == [35.1, -5.2, 610.0]
    assert first.results["id"].tolist() == [*TWELVE[:6], "Beira", "Zomba"]
    assert first.results["listed"].tolist() == [True] * 6 + [False] * 2


def test_a_result_that_is_told_again_replaces_the_former() -> None:
    survey = begin()
    survey.tell(results_of(["V001", "V002"]))
    before = survey.fingerprint
    again = survey.tell(results_of(["V002", "V001"]))
    assert again.unchanged == ("V002", "V001")
    assert len(survey.ledger.events) == 1
    corrected = survey.tell(results_of(["V001"]).assign(positives=0))
    assert corrected.corrected == ("V001",)
    assert survey.results["positive"].tolist()[0] == 0
    assert survey.results["corrected"].tolist() == [1, 0]
    survey.tell(results_of(["V001"]))
    assert survey.fingerprint == before


def test_a_bad_table_changes_nothing() -> None:
    survey = begin()
    survey.ask(2)
    survey.tell(results_of(["V001", "V002"]))
    before = (survey.status(), survey.fingerprint, list(survey.ledger.events))
    bad = results_of(["V003", "V001", "V004"])
    bad.loc[2, "positives"] = 51
    with pytest.raises(UsageError, match="51 positive, but only 50 examined"):
        survey.tell(bad)
    with pytest.raises(UsageError, match="Site 'V039' is not pending and has no result"):
        survey.withdraw(["V001", "V039"])
    with pytest.raises(UsageError, match="Expected q to be a whole number of at least 1"):
        survey.ask(0)
    assert (survey.status(), survey.fingerprint, list(survey.ledger.events)) == before


def test_sites_that_are_withdrawn() -> None:
    survey = begin()
    asked = survey.ask(3)["id"].tolist()
    survey.withdraw(asked[:1])
    survey.withdraw(asked[1:2], ask_again=True)
    assert survey.pending["id"].tolist() == asked[2:]
    assert asked[0] not in set(survey.ask(39)["id"])
    assert set(survey.pending["id"]) == {f"V{row:03d}" for row in range(40)} - {asked[0]}
    survey.tell(results_of(asked[:1]))
    assert (survey.status().given_up, survey.results["id"].tolist()) == (0, asked[:1])
    survey.withdraw(asked[:1])
    assert survey.results.empty
    place = {"lon": 35.1, "lat": -5.2, "rain": 610.0, "night_lights": 1.0}
    survey.tell(pd.DataFrame([{"village": "Zomba", "n": 30, "pos": 4, **place}]))
    survey.withdraw(["Zomba"])
    assert (survey.status().outside, survey.status().given_up) == (0, 1)


@pytest.mark.parametrize("one", ["12", 12, np.int64(12)])
def test_a_text_or_a_number_is_one_id(one: Any) -> None:
    survey = Survey(villages().assign(village=range(40)), SETTINGS)
    survey.ask(40)
    torch.testing.assert_close(survey.inputs(one), survey.inputs(["12"]))
    pd.testing.assert_frame_equal(survey.others(one), survey.others(["12"]))
    survey.withdraw(one)
    assert {str(row) for row in range(40)} - set(survey.pending["id"]) == {"12"}


def test_exact_ids_are_told_apart_without_positions() -> None:
    ids = ["7", "007", "1.1", "1.10", *(f"V{row:03d}" for row in range(36))]
    survey = Survey(villages().assign(village=ids), SETTINGS)
    table = pd.DataFrame({"id": ["7", "1.10"], "examined": 50, "positive": [1, 2]})
    with pytest.raises(UsageError, match="id '7' could be '7' or '007' of the list"):
        survey.tell(table)
    assert survey.tell(table, exact_ids=True).new == ("7", "1.10")


@pytest.mark.parametrize(
    ("names", "changes"),
    [
        (("village", "latitude", "longitude"), {"x": ("latitude", "longitude")}),
        (("village", "north", "east"), {"x": ("north", "east"), "units": "km"}),
        (("round", "lon", "lat"), {"id": "round"}),
    ],
)
def test_a_form_has_names_of_its_own_for_ids_and_positions(
    names: tuple[str, str, str], changes: dict[str, Any], tmp_path: Path
) -> None:
    listed = villages().set_axis([*names, "rain", "night_lights"], axis=1)
    survey = Survey(listed, replace(SETTINGS, **changes))
    asked = survey.ask(2)
    (tmp_path / "next.csv").write_bytes(next_files(survey)["next.csv"])
    form = read_table(tmp_path / "next.csv")
    place = dict(zip(survey.settings.coordinates.names, (35.1, -5.2), strict=True))
    form = pd.concat((form, form[:1].assign(id="Zomba", **place)))
    told = survey.tell(form.assign(examined=50, positive=[1, 2, 3]))
    assert (told.new, told.outside) == ((*asked["id"], "Zomba"), ("Zomba",))
    assert (told.warnings, told.remarks) == ((), ())
    assert survey.results.iloc[-1, 1:3].tolist() == [35.1, -5.2]


def test_results_that_came_with_the_sites_can_be_corrected_and_withdrawn() -> None:
    counts = results_of(TWELVE).rename(columns={"tested": "examined"})
    survey = Survey(villages().merge(counts, how="left"), SETTINGS)
    assert survey.results["told"].tolist() == [""] * 12
    survey.tell(results_of(["V001"]).assign(positives=0))
    survey.withdraw(["V002"])
    assert survey.results["corrected"].tolist() == [0, 1] + [0] * 9
    separately = begin()
    separately.tell(results_of(TWELVE))
    separately.tell(results_of(["V001"]).assign(positives=0))
    separately.withdraw(["V002"])
    assert separately.fingerprint == survey.fingerprint


def test_later_rounds_reduce_the_criterion(told: Survey) -> None:
    survey = begin()
    survey.tell(results_of(TWELVE))
    survey.cache = told.cache
    first, second = survey.ask(4), survey.ask(4)
    assert not set(first["id"]) & {*second["id"], *TWELVE}
    assert (first["gain"] > 0.0).all()
    assert second["gain"].between(0.0, 1.0).all()
    assert (
        first["reason"]
        .str.fullmatch(
            r"prevalence [\d.]+ % \([\d.]+ % to [\d.]+ %\); above 10 % with probability [01]\.\d\d"
        )
        .all()
    )
    whole = begin()
    whole.tell(results_of(TWELVE))
    whole.cache = told.cache
    assert [*first["id"], *second["id"]] == whole.ask(8)["id"].tolist()


def test_predictions_are_those_of_the_model(told: Survey) -> None:
    table = told.predictions()
    rates = prevalence(told.model, torch.from_numpy(told.sites.iloc[:, 1:5].to_numpy(copy=True)))
    np.testing.assert_allclose(table["prevalence"], rates.mean.detach().reshape(-1))
    np.testing.assert_allclose(table["exceedance"], rates.exceedance(0.1).detach().reshape(-1))
    upper = rates.quantile(torch.tensor(0.975)).detach().reshape(-1)
    np.testing.assert_allclose(table["upper"], upper)
    ordered = table[["lower", "q25", "q75", "upper"]].to_numpy()
    assert (np.diff(ordered, axis=1) > 0.0).all()
    above, below = (table["exceedance"] >= 0.9, table["exceedance"] <= 0.1)
    assert (table["class"] == np.select([above, below], ["above", "below"], "uncertain")).all()
    assert table["examined"].notna().tolist() == [True] * 12 + [False] * 28
    assert table["id"].tolist() == told.sites["id"].tolist()


def test_where_a_missed_site_is_dear_choices_heed_it(told: Survey) -> None:
    """A choice reduces the lower one of the expected costs; a call's certainty is plain."""
    dear = begin(threshold=0.25, miss_cost=3.0, certainty=0.7)
    dear.tell(results_of(TWELVE))
    dear.cache = told.cache
    table = dear.predictions()
    missed, alarm = 3.0 * table["exceedance"], 1.0 - table["exceedance"]
    share = table["exceedance"]
    named = np.select([share >= 0.7, share <= 0.3], ["above", "below"], "uncertain")
    assert (table["class"] == named).all()
    assert len(set(named)) == 3
    left = np.minimum(missed, alarm)[table["examined"].isna()]
    assert dear.forecast(1, 1)["total"][0] == pytest.approx(left.sum(), rel=1e-6)
    assert in_words(dear)["Cost of a missed site"] == "3 false alarms"
    assert in_words(dear)["Called above, below"].endswith("at least 70 %, at most 30 %")


def test_settings_are_said_with_all_their_digits() -> None:
    words = in_words(begin(threshold=0.125, certainty=0.995, stop_when=0.125))
    assert words["Goal"] == "which sites have a prevalence above 12.5 %"
    assert words["Called above, below"].endswith("at least 99.5 %, at most 0.5 %")
    assert words["The survey may end at"] == "12.5 % expected wrong calls"
    site = pd.DataFrame({"prevalence": [0.2], "lower": 0.1, "upper": 0.3, "exceedance": 0.9})
    assert reasons(site, 0.125)[0].endswith("above 12.5 % with probability 0.90")


def test_a_map_without_a_threshold_has_no_classes() -> None:
    survey = begin(goal="map", threshold=None)
    survey.tell(results_of(TWELVE))
    assert not {"exceedance", "class"} & set(survey.predictions().columns)
    assert survey.ask(1)["reason"].str.fullmatch(r"prevalence .* % \(.* % to .* %\)").all()


def test_the_forecast_is_of_the_rounds_that_would_be_chosen(told: Survey) -> None:
    table = told.forecast(3, 4)
    assert table["round"].tolist() == [0, 1, 2, 3]
    assert table["sites"].tolist() == [0, 4, 8, 12]
    assert (table["total"].diff()[1:] < 0.0).all()
    survey = begin()
    survey.tell(results_of(TWELVE))
    survey.cache = told.cache
    for before, after in zip(table["total"], table["total"][1:], strict=False):
        assert survey.ask(4)["gain"].sum() == pytest.approx(1.0 - after / before, rel=1e-6)
    assert survey.forecast(1, 4)["total"][0] == pytest.approx(table["total"][3], rel=1e-6)
    assert told.forecast(30, 10)["sites"].iloc[-1] == 28  # no more are left


@pytest.mark.parametrize("positives", [0, 500])
def test_gains_are_shares_where_all_results_are_alike(positives: int) -> None:
    cache = ModelCache()
    for criterion in ("entropy", "misclassification"):
        survey = Survey(villages(), replace(SETTINGS, criterion=criterion), cache=cache)
        survey.tell(results_of(TWELVE).assign(tested=500, positives=positives))
        total = survey.forecast(1, 4)["total"]
        assert 0.0 < total[1] < total[0] < 1e-12  # far from the threshold
        gains = survey.ask(28)["gain"]
        assert gains.between(0.0, 1.0).all()
        assert gains.sum() == pytest.approx(1.0, abs=1e-9)  # of all sites that are left


def test_a_programme_s_own_loss_may_be_the_criterion(told: Survey) -> None:
    loss = ExpectedLoss(lambda chance: chance * (1.0 - chance), 0.1, "prevalence")
    survey = Survey(villages(), SETTINGS, criterion=loss)
    survey.tell(results_of(TWELVE))
    survey.cache = told.cache
    assert survey.forecast(1, 1)["total"][0] != told.forecast(1, 1)["total"][0]
    assert len(survey.ask(3)) == 3


def test_without_results_there_is_no_model() -> None:
    for use in (lambda s: s.model, lambda s: s.predictions(), lambda s: s.forecast(1, 1)):
        with pytest.raises(UsageError, match="no result yet to learn from"):
            use(begin())


def test_when_no_site_is_left() -> None:
    survey = begin()
    assert len(survey.ask(100)) == 40
    with pytest.raises(UsageError, match="left to ask for: of 40 sites, 40 pending"):
        survey.ask(1)
    few = Survey(villages(12), SETTINGS)
    few.tell(results_of(TWELVE[:4], 12))
    few.tell(results_of(TWELVE[4:], 12))
    table = few.forecast(2, 2)
    assert (table["sites"].tolist(), table["total"].isna().tolist()) == ([0], [True])


def test_no_survey_expects_so_many_people() -> None:
    with pytest.raises(UsageError, match="Expected trials of at most 10,000,000 people, got 1,000"):
        Survey(villages(), replace(SETTINGS, trials=10**30))
