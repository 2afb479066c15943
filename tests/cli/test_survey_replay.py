"""``bo-stream survey replay``: from a table to a comparison, stopped, gone on with, and refused."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from bo_stream.cli import app
from bo_stream.loops.survey.replay import ReplayRun
from tests.cli.commands import assert_one_clear_error
from tests.cli.test_sample import command, wait_for
from tests.cli.test_survey import small_country

SIZES = ["--start", "8", "--rounds", "2", "-q", "3", "--seeds", "1"]
OPTIONS = ["--threshold", "0.1", "--covariates", "rain", *SIZES]
FILES = {"replay.csv", "picks.csv", "replay.png", "replay.json"}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    small_country(30, 24).to_csv("last.csv", index=False)


def replay(*args: str) -> Result:
    return CliRunner().invoke(app, ["survey", "replay", *args])


@pytest.mark.integration
def test_the_installed_command_compares_designs_and_goes_on() -> None:
    process = command("survey", "replay", "last.csv", *OPTIONS, "--compare", "random", "--out", "r")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "last.csv: 24 sites with results" in out
    assert "6 of 30 sites have no result" in out
    assert "Random sites came to" in out
    assert "Traceback" not in err
    assert {file.name for file in Path("r").iterdir()} >= FILES
    assert Path("r/replay.png").read_bytes().startswith(b"\x89PNG")
    scores = pd.read_csv("r/replay.csv")
    assert scores["surveyed"].tolist() == [8, 11, 14] * 2
    assert scores["left"].tolist() == [16, 13, 10] * 2
    assert scores["accuracy"].between(0.0, 1.0).all()
    picks = pd.read_csv("r/picks.csv")
    assert picks.groupby("design")["id"].nunique().tolist() == [14, 14]
    last_known = small_country(30, 24)["village"][:24]
    assert set(picks["id"]) <= set(last_known)

    refused = replay("last.csv", *OPTIONS, "--out", "r")
    assert_one_clear_error(refused, "r holds a run already. Go on with it by --resume")
    changed = replay("last.csv", "--out", "r", "--resume", "--miss-cost", "3")
    assert_one_clear_error(changed, "The run began with --miss-cost 2.0, got 3.0")
    fewer = replay("last.csv", "--out", "r", "--resume", "--quota", "north=2")
    assert_one_clear_error(fewer, "The run began with no --quota, got")
    before = scores
    more = replay("last.csv", *OPTIONS[:-1], "2", "--out", "r", "--resume", "--compare", "random")
    assert more.exit_code == 0, more.output
    assert "Going on after 2 finished replays" in more.stdout
    scores = pd.read_csv("r/replay.csv")
    assert len(scores) == 12
    pd.testing.assert_frame_equal(scores[:6], before)


def test_it_says_what_the_columns_are_and_what_was_added_up() -> None:
    people = pd.concat([small_country(30, 24).assign(name="Bandé", true=0.2)] * 2)
    people.to_csv("people.csv", index=False)
    said = replay("people.csv", *OPTIONS, "--truth", "true", "--group", "--rounds", "1").output
    words = " ".join(said.split())
    assert "60 rows were added up to 30 sites, one for each position." in words
    assert "truth: 'true'" in words
    unused = words.partition("Not used:")[2].partition(". Tables")[0]
    assert "'name'" in unused
    assert "'true'" not in unused


@pytest.mark.integration
def test_ctrl_c_keeps_the_rounds_so_far() -> None:
    many = [*OPTIONS[:-1], "9", "--rounds", "4", "--out", "r"]
    process = command("survey", "replay", "last.csv", *many)
    wait_for(Path("r/replay.json"), process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    if process.returncode == 0:
        pytest.skip("the replays were over before they could be stopped")
    assert process.returncode == 130, err
    assert "bo-stream survey replay last.csv --out r --resume" in out
    assert {file.name for file in Path("r").iterdir()} >= FILES
    assert 1 <= len(pd.read_csv("r/replay.csv")) < 45


def test_the_command_to_go_on_is_whole_and_imports_nothing_that_is_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stopped(replays: ReplayRun, *_: object) -> bool:
        replays.save(Path("r"))
        return True

    monkeypatch.setattr("bo_stream.cli.running.run_with_bar", stopped)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("loss_of_test_survey_replay.py").write_text("def missed(p):\n    return p * (1 - p)\n")
    pd.concat([small_country(30, 24)] * 2).to_csv("last.csv", index=False)
    loss = ["--loss", "loss_of_test_survey_replay:missed"]
    begun = replay("last.csv", *OPTIONS, "--group", *loss, "--out", "r")
    again = f"survey replay last.csv --group {' '.join(loss)} --out r --resume"
    assert begun.exit_code == 130, begun.output
    assert f"To go on: bo-stream {again}" in begun.stdout
    resumed = CliRunner().invoke(app, again.split())
    assert resumed.exit_code == 130, resumed.output
    assert again in resumed.stdout
    del sys.modules["loss_of_test_survey_replay"]
    refused = replay("last.csv", "--group", "--out", "r", "--resume")
    assert_one_clear_error(refused, f"If you trust it, name it too: {' '.join(loss)}")
    assert "loss_of_test_survey_replay" not in sys.modules


@pytest.mark.integration
def test_a_map_is_compared_by_its_error() -> None:
    more = ["--goal", "map", "--compare", "random", "--out", "r", *SIZES]
    result = replay("last.csv", *more)
    assert result.exit_code == 0, result.output
    assert "Random sites came to an RMSE of" in result.stdout
    assert "accuracy" not in pd.read_csv("r/replay.csv")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["none.csv", *OPTIONS], "No such file: none.csv"),
        (["last.csv", *SIZES], "Expected a threshold"),
        (["last.csv", *OPTIONS, "--start", "30"], "has results of 24 sites, too few for 30 first"),
        (["last.csv", *OPTIONS, "--rounds", "9"], "At most 5 rounds are possible (--rounds 5)"),
        (
            ["last.csv", *OPTIONS, "--seeds", "0"],
            "Expected seeds to be a whole number of at least 1",
        ),
        (["last.csv", *OPTIONS, "--truth", "rate"], "has no column 'rate', which --truth names"),
        (["last.csv", *OPTIONS, "--truth", "rain"], "both the truth and a covariate"),
        (["last.csv", *OPTIONS, "--compare", "grid"], "Expected --compare random, got 'grid'"),
        (["last.csv", *OPTIONS, "--budget", "0.5"], "budget"),
        (["last.csv", *OPTIONS, "--resume"], "There is no replay to resume in r"),
        (["bare.csv", *OPTIONS], "bare.csv has no results, of which there is nothing to replay"),
    ],
)
def test_a_replay_that_cannot_begin_says_why(args: list[str], message: str) -> None:
    small_country().drop(columns=["examined", "positive"]).to_csv("bare.csv", index=False)
    assert_one_clear_error(replay(*args, "--out", "r"), message)
    assert not Path("r").exists()


def test_the_folder_of_a_survey_is_left_alone() -> None:
    start = ["survey", "start", "last.csv", "--threshold", "0.1", "--out", "r"]
    assert CliRunner().invoke(app, start).exit_code == 0
    shutil.copytree("r", "before")
    assert_one_clear_error(replay("last.csv", *OPTIONS, "--out", "r"), "r holds a survey")
    for file in Path("before").iterdir():
        assert (Path("r") / file.name).read_bytes() == file.read_bytes()
    assert len(list(Path("r").iterdir())) == len(list(Path("before").iterdir()))


def test_help_has_its_own_options_and_those_of_a_survey() -> None:
    text = replay("--help").stdout
    for name in ("--start", "--rounds", "--batch", "--compare", "--seeds", "--truth", "--resume"):
        assert name in text
    for name in ("--threshold", "--covariates", "--miss-cost", "--budget", "--overdispersion"):
        assert name in text
