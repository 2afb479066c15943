"""The stopping rule: how many more sites, in numbers and in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bo_stream.errors import UsageError
from bo_stream.loops.survey import Survey, SurveySettings
from bo_stream.loops.survey.model import RATE, Stopping
from tests.loops.survey.villages import SETTINGS, results_of, villages

RULE = Stopping(target=0.05, share=0.1, results=100, pending=4, left=700)


def test_the_share_falls_as_a_power_of_the_number_of_results() -> None:
    assert replace(RULE, target=0.1 / 2.0**RATE).more in (100, 101)  # twice as many results
    assert replace(RULE, target=0.1 / 3.0**RATE).more in (200, 201)
    assert replace(RULE, target=0.1 / 3.0**RATE, results=50).more in (100, 101)
    assert replace(RULE, target=0.1 / 3.0**RATE, left=199).more is None
    assert replace(RULE, target=0.1 / 3.0**RATE, left=201).more in (200, 201)
    assert replace(RULE, share=0.05).more == 0


def test_it_says_how_far_it_is_and_how_rough_that_is() -> None:
    assert not RULE.reached
    said = RULE.in_words()
    assert "at most 5 % of all calls are to be wrong; today 10 % are expected to be" in said
    assert "at most 12.5 % of all" in replace(RULE, target=0.125).in_words()
    assert f"roughly {RULE.more} more sites, the 4 pending ones among them; in " in said
    assert f"{RULE.more} more sites; in" in replace(RULE, pending=0).in_words()
    assert "more than the 20 sites left" in replace(RULE, left=20).in_words()
    assert "no site is left" in replace(RULE, left=0).in_words()
    assert "You may end" in replace(RULE, target=0.2).in_words()


def test_more_sites_may_be_pending_than_are_needed() -> None:
    rule = replace(RULE, share=0.052, pending=10)
    assert rule.more == 7
    assert "The 10 pending ones may be enough (roughly 7 are needed); in " in rule.in_words()
    assert "7 more sites, the 7 pending ones among them" in replace(rule, pending=7).in_words()


def test_a_survey_knows_its_share_and_what_is_left() -> None:
    table = villages().assign(road=["no"] * 3 + ["yes"] * 37)
    settings = replace(SETTINGS, threshold=0.25, stop_when=0.1, reachable="road")
    survey = Survey(table, settings)
    survey.tell(results_of([f"V{row:03d}" for row in range(12)]))
    rule = survey.stopping()
    chance = survey.predictions()["exceedance"]
    assert rule.share == pytest.approx(chance.where(chance < 1 / 3, 1.0 - chance).mean())
    assert survey.stopping(predictions=survey.predictions()).share == pytest.approx(rule.share)
    assert (rule.target, rule.results, rule.pending, rule.left) == (0.1, 12, 0, 28)
    pending = survey.ask(3)["id"].tolist()
    survey.withdraw(pending[:1])
    rule = survey.stopping(0.9 * rule.share)
    assert (rule.results, rule.pending, rule.left) == (12, 2, 27)
    assert rule.more == 3  # 12 (0.9^(−1 / RATE) − 1) = 2.1
    assert survey.stopping(1e-9).more is None
    assert survey.stopping(0.49).reached


def test_there_is_no_rule_without_a_share_or_a_threshold() -> None:
    survey = Survey(villages(), SETTINGS)
    survey.tell(results_of(["V000", "V001", "V002"]))
    with pytest.raises(UsageError, match="no stopping rule"):
        survey.stopping()
    with pytest.raises(UsageError, match=r"above 0, below 0\.5"):
        survey.stopping(5.0)
    of_map = Survey(villages(), SurveySettings(goal="map"))
    of_map.tell(results_of(["V000", "V001", "V002"]))
    with pytest.raises(UsageError, match="give threshold, too"):
        of_map.stopping(0.05)
