"""Replays in a folder: what is kept, what goes on, and how designs are compared."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from bo_stream.errors import UsageError
from bo_stream.loops.run import REPLAY
from bo_stream.loops.survey.maps import draw_replay
from bo_stream.loops.survey.replay import (
    FinishedSurvey,
    ReplayRun,
    RoundScore,
    mean_curves,
    sites_needed,
)
from bo_stream.loops.survey.settings import DESIGNS, Design, ReplayPlan
from tests.loops.survey.villages import SETTINGS, results_of, villages

PLAN = ReplayPlan(start=10, q=4, rounds=2)
CURVES: dict[Design, tuple[float, ...]] = {"adaptive": (0.6, 0.8, 0.9), "random": (0.6, 0.7, 0.8)}


def table() -> pd.DataFrame:
    return villages().merge(results_of(villages()["village"]))


def begun(**changes: Any) -> ReplayRun:
    finished = changes.pop("finished", None) or FinishedSurvey.of(table(), SETTINGS)
    return ReplayRun(finished, **{"plan": PLAN, "designs": DESIGNS, "seeds": 2, **changes})


def scores(seeds: int = 2, rounds: int = 2) -> list[RoundScore]:
    """Made-up scores: seed 1 is right ten per cent more often than seed 0."""
    return [
        RoundScore(
            design=design,
            seed=seed,
            round=number,
            surveyed=10 + 4 * number,
            left=30 - 4 * number,
            accuracy=accuracy + 0.1 * seed,
            sensitivity=math.nan,
            log_score=-3.0,
            rmse=1.0 - accuracy,
            sites=(f"V{number:03d}",),
        )
        for seed in range(seeds)
        for design, curve in CURVES.items()
        for number, accuracy in enumerate(curve[: rounds + 1])
    ]


# --- in a folder --------------------------------------------------------------------------------


def test_finished_pairs_are_kept_and_others_dropped(tmp_path: Path) -> None:
    run = begun(scores=scores())
    assert (run.steps, run.steps_done, run.finished) == (12, 12, True)
    run.save(tmp_path)
    again = ReplayRun.resume(tmp_path, table(), "table", None)
    pd.testing.assert_frame_equal(again.table, run.table)
    assert [one.sites for one in again.scores] == [one.sites for one in run.scores]
    assert again.finished
    more = ReplayRun.resume(tmp_path, table(), "table", 3)
    assert (more.steps_done, more.steps, more.finished) == (12, 18, False)
    run.scores = run.scores[:8]  # stopped within a replay, as after Ctrl-C
    run.save(tmp_path)
    assert len(pd.read_csv(tmp_path / "replay.csv")) == 8
    stopped = ReplayRun.resume(tmp_path, table(), "table", None)
    assert stopped.steps_done == 6
    assert {one.seed for one in stopped.scores} == {0}


def test_a_run_goes_on_with_its_own_table_and_no_fewer_seeds(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no replay to resume"):
        ReplayRun.resume(tmp_path, table(), "table", None)
    begun(scores=scores()).save(tmp_path)
    other = table()
    other.loc[3, "positives"] += 1
    with pytest.raises(UsageError, match="is not the table that the replay"):
        ReplayRun.resume(tmp_path, other, "other.csv", None)
    with pytest.raises(UsageError, match="has 2 seeds: expected seeds of at least that, got 1"):
        ReplayRun.resume(tmp_path, table(), "table", 1)
    REPLAY.save(tmp_path, {"settings": {}}, {})
    with pytest.raises(UsageError):
        ReplayRun.resume(tmp_path, table(), "table", None)


def test_a_loss_is_imported_only_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "replayed_loss.py").write_text("def missed(p):\n    return p * (1 - p)\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = "replayed_loss:missed"
    with_loss = FinishedSurvey.of(table(), replace(SETTINGS, loss=name))
    begun(finished=with_loss).save(tmp_path)
    del sys.modules["replayed_loss"]
    with pytest.raises(UsageError, match=f"names the loss {name}.*--loss {name}"):
        ReplayRun.resume(tmp_path, table(), "table", None)
    assert "replayed_loss" not in sys.modules
    again = ReplayRun.resume(tmp_path, table(), "table", None, trusted=[name])
    assert again.finished_survey.settings.loss == name
    assert "replayed_loss" in sys.modules


def test_files_have_scores_and_choices(tmp_path: Path) -> None:
    begun(scores=scores()).save(tmp_path)
    found = pd.read_csv(tmp_path / "replay.csv")
    assert found.columns.tolist() == [
        "design", "seed", "round", "surveyed", "left", "accuracy", "sensitivity", "log_score",
        "rmse",
    ]  # fmt: skip
    assert found["accuracy"].tolist() == pytest.approx([one.accuracy for one in scores()])
    picks = pd.read_csv(tmp_path / "picks.csv")
    assert picks.iloc[1].tolist() == ["adaptive", 0, 1, "V001"]
    finished = FinishedSurvey.of(table(), replace(SETTINGS, goal="map", threshold=None))
    assert {"accuracy", "sensitivity"}.isdisjoint(
        ReplayRun(finished, PLAN, DESIGNS, 2, scores=scores()).table
    )


def test_too_few_sites_or_seeds() -> None:
    with pytest.raises(UsageError, match="40 sites, too few"):
        begun(plan=replace(PLAN, start=32))
    with pytest.raises(UsageError, match="Expected seeds to be a whole number of at least 1"):
        begun(seeds=0)


def test_a_design_ends_where_the_settings_allow_no_further_site(tmp_path: Path) -> None:
    far = FinishedSurvey.of(table(), replace(SETTINGS, minimum_distance=2000.0))
    run = ReplayRun(far, PLAN, ["adaptive"], 1)
    assert [score.round for score in run.run()] == [0]
    assert run.finished
    assert "The adaptive design, seed 0, ended early. No site is left" in run.notes[-1]
    run.save(tmp_path)
    again = ReplayRun.resume(tmp_path, table(), "table", None)
    assert (again.finished, again.notes) == (True, run.notes)


@pytest.mark.integration
def test_a_stopped_run_goes_on_to_the_same_scores(tmp_path: Path) -> None:
    whole = begun(seeds=1)
    assert len(list(whole.run())) == 6
    part = begun(seeds=1)
    steps = part.run()
    for _ in range(5):  # the random design lacks a round
        next(steps)
    part.save(tmp_path)
    again = ReplayRun.resume(tmp_path, table(), "table", None)
    assert again.steps_done == 3
    assert len(list(again.run())) == 3
    pd.testing.assert_frame_equal(again.table, whole.table)


# --- comparison ---------------------------------------------------------------------------------


def test_means_and_errors_over_seeds() -> None:
    found = begun(scores=scores()).table
    means, errors = mean_curves(found)
    assert means.loc["adaptive", "accuracy"].tolist() == pytest.approx([0.65, 0.85, 0.95])
    assert errors.loc["random", "accuracy"].tolist() == pytest.approx([0.05] * 3)
    assert mean_curves(found[found["seed"] == 0])[1]["accuracy"].isna().all()


def test_sites_needed_for_the_random_design_s_end() -> None:
    found = begun(scores=scores()).table
    assert sites_needed(mean_curves(found)[0]) == ("accuracy", pytest.approx(0.85), 18.0, 14.0)
    by_error, _ = mean_curves(found.drop(columns=["accuracy", "sensitivity"]))
    assert sites_needed(by_error) == ("rmse", pytest.approx(0.2), 18.0, 14.0)
    assert sites_needed(mean_curves(found[found["design"] == "adaptive"])[0]) is None
    worse = found.assign(accuracy=np.where(found["design"] == "random", 0.99, 0.5))
    needed = sites_needed(mean_curves(worse)[0])
    assert needed is not None
    assert math.isnan(needed[-1])


def test_the_picture_has_a_curve_of_each_seed_and_of_their_mean() -> None:
    found = begun(scores=scores()).table
    figure = draw_replay(found)
    accuracy, _, _, error = figure.axes
    drawn = [np.asarray(line.get_ydata()).tolist() for line in accuracy.lines]
    for design, curve in CURVES.items():
        for shift in (0.0, 0.1, 0.05):
            assert any(line == pytest.approx([y + shift for y in curve]) for line in drawn), design
    assert drawn[-1] == pytest.approx([0.85, 0.85])  # the random design's end
    assert len(error.lines) == 6
    assert error.get_xlabel() == "sites surveyed"
    assert len(draw_replay(found.drop(columns=["accuracy", "sensitivity"])).axes) == 2
