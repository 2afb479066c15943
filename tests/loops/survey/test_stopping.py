"""The stopping rule: how many more sites, in numbers and in words."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bo_stream.errors import UsageError
from bo_stream.loops.survey import Survey, SurveySettings
from bo_stream.loops.survey.stopping import SOONER, Stopping
from tests.loops.survey.villages import SETTINGS, results_of, villages


def test_the_number_of_sites_is_the_look_ahead_s_corrected() -> None:
    rule = Stopping(0.05, tuple(0.1 - 0.001 * count for count in range(101)), 4)
    assert rule.share == 0.1
    assert not rule.reached
    rule = Stopping(0.0501, rule.shares, 4)  # reached after 50
    assert rule.more == math.ceil(SOONER * 50)
    said = rule.in_words()
    assert "at most 5.0 % of all calls" in said
    assert "roughly 28 more sites, the 4 pending ones among them; in replays of surveys" in said
    assert "You may end" in Stopping(0.2, (0.1,), 0).in_words()
    assert "more than 26 more sites" in replace(rule, shares=rule.shares[:50]).in_words()
    assert "no site is left" in Stopping(0.05, (0.1,), 0).in_words()


def test_a_survey_looks_ahead_as_far_as_it_must() -> None:
    survey = Survey(villages(), replace(SETTINGS, threshold=0.25, stop_when=0.1))
    survey.tell(results_of([f"V{row:03d}" for row in range(12)]))
    today = survey.stopping(0.49)
    assert today.reached
    assert today.more == 0
    pending = survey.ask(2)["id"]
    rule = survey.stopping(0.9 * today.share)
    assert rule.pending == 2
    assert rule.shares[0] == pytest.approx(today.share)
    assert rule.more is not None
    assert 0 < rule.more <= 28
    never = survey.stopping(1e-9)
    assert never.more is None
    assert len(never.shares) == 29
    survey.tell(results_of(pending))
    assert survey.stopping(0.49).share != today.share


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
