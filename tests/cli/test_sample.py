"""The command itself: run as its user runs it, on small files and on a real map."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from botorch.exceptions.errors import ModelFittingError
from typer.testing import CliRunner, Result

from bo_stream import __version__
from bo_stream.cli import app
from bo_stream.cli.running import spread
from bo_stream.models.base import StreamingGP
from tests.cli.commands import assert_one_clear_error
from tests.loops.small import LONG, QUICK, map_with_an_artefact, small_map, write_npz

RESULTS = ["curve.csv", "curve.png", "map.png", "picks.csv", "run.json", "trust.json", "trust.png"]
OPTIONS = [
    "-q",
    "3",
    "--steps",
    "4",
    "--pool",
    "60",
    "--test",
    "40",
    "--initial",
    "5",
    "--grid",
    "12",
]


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(write_npz(tmp_path / "map.npz", small_map()))


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def command(*args: str, limit_blocks: int | None = None) -> subprocess.Popen[str]:
    """The installed command in a process of its own, maybe with a limit to the files it writes."""
    program = shutil.which("bo-stream", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("needs bo-stream installed beside this Python")
    limited = [] if limit_blocks is None else ["sh", "-c", f'ulimit -f {limit_blocks}; "$@"', "sh"]
    return subprocess.Popen(
        [*limited, program, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def sample(*args: str) -> Result:
    return CliRunner().invoke(app, ["sample", *args])


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def picks(folder: str) -> list[list[str]]:
    with Path(folder, "picks.csv").open(newline="") as file:
        return list(csv.reader(file))


def test_version_and_help() -> None:
    version = CliRunner().invoke(app, ["--version"])
    assert version.stdout == f"bo-stream {__version__}\n"
    assert "sample" in CliRunner().invoke(app, ["--help"]).stdout
    text = sample("--help").stdout
    for option in ("--x", "--y", "--batch", "--compare", "--resume", "--out", "--refit"):
        assert option in text


@pytest.mark.usefixtures("small_pictures")
def test_a_file_is_sampled_and_compared_with_random_choice(data: str) -> None:
    result = sample(data, *OPTIONS, "--out", "run", "--compare", "random")
    assert result.exit_code == 0, result.stderr
    out = result.stdout
    assert "map.npz: 120 sites, target prevalence" in out
    assert "least variance" in out
    assert "random choice" in out
    names = contents(Path("run"))
    assert set(RESULTS) < set(names)
    assert names["map.png"].startswith(b"\x89PNG")
    assert len(picks("run")) == 1 + 2 * 17


@pytest.mark.integration
def test_a_table_with_named_columns() -> None:
    small = small_map()
    table = pd.DataFrame({"id": range(120), "lat": small.X[:, 1], "prevalence": small.y})
    table["lon"] = small.X[:, 0]
    table.to_csv("map.csv", index=False)
    result = sample("map.csv", "--x", "lon", "lat", "--y", "prevalence", *OPTIONS, "--out", "run")
    assert result.exit_code == 0, result.stderr
    assert picks("run")[0] == ["strategy", "step", "row", "lon", "lat", "prevalence", "outlier"]
    write_npz(Path("map.npz"), small)
    assert sample("map.npz", *OPTIONS, "--out", "other").exit_code == 0
    assert picks("other") == picks("run")


@pytest.mark.integration
def test_another_model_of_more_inputs() -> None:
    write_five_inputs(Path("wide.npz"))
    quick = ["--steps", "2", "--pool", "30", "--test", "20", "--initial", "5", "--out", "run"]
    options = ["--model", "clustered", "--set", "resolution=0.3"]
    assert sample("wide.npz", *quick, *options).exit_code == 0
    record = json.loads(Path("run/run.json").read_text())
    assert record["settings"]["model_options"] == {"resolution": 0.3}
    model = record["strategies"]["chosen"]["model"]
    assert (model["class"], model["resolution"]) == ("ClusteredGP", 0.3)
    changed = sample("--out", "run", "--resume", "--set", "resolution=0.2")
    assert_one_clear_error(changed, "The run began with --set resolution=0.3, got resolution=0.2.")
    assert sample("--out", "run", "--resume", *options).exit_code == 0


def test_names_may_follow_one_option() -> None:
    args = ["map.csv", "--x", "lon", "lat", "-q", "3", "--x", "height", "--y", "p"]
    assert spread("--x", args) == [
        "map.csv", "--x", "lon", "--x", "lat", "-q", "3", "--x", "height", "--y", "p",
    ]  # fmt: skip


@pytest.mark.integration
def test_without_data_it_samples_the_simulated_map_into_a_fresh_folder() -> None:
    for folder in ("bo-stream-run", "bo-stream-run-2"):
        result = sample("--steps", "1", "--grid", "12", "--pool", "200", "--test", "200")
        assert result.exit_code == 0, result.stderr
        assert "No DATA given: sampling a simulated prevalence map." in result.stdout
        assert set(RESULTS) < set(contents(Path(folder)))


@pytest.mark.integration
def test_a_run_goes_on_where_it_stopped(data: str) -> None:
    assert sample(data, *OPTIONS, "--out", "whole").exit_code == 0
    assert sample(data, *OPTIONS, "--steps", "2", "--out", "parts").exit_code == 0
    result = sample("--out", "parts", "--resume", "--steps", "4")
    assert result.exit_code == 0, result.stderr
    assert "Going on after step 2." in result.stdout
    assert picks("parts") == picks("whole")
    assert json.loads(Path("parts/run.json").read_text())["steps_done"] == 4


@pytest.mark.integration
def test_ctrl_c_leaves_a_run_that_goes_on_to_the_same_picks(data: str) -> None:
    many = [*OPTIONS, "--steps", "18"]
    process = command("sample", data, *many, "--out", "run")
    wait_for(Path("run/checkpoint.json"), process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    if process.returncode == 0:
        pytest.skip("the run was over before it could be stopped")
    assert process.returncode == 130, err
    assert "bo-stream sample --out run --resume" in out
    assert set(RESULTS) < set(contents(Path("run")))
    assert json.loads(Path("run/run.json").read_text())["finished"] is False
    assert 1 + 5 <= len(picks("run")) < 1 + 59
    assert sample("--out", "run", "--resume").exit_code == 0
    assert sample(data, *many, "--out", "whole").exit_code == 0
    assert picks("run") == picks("whole")


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 300
    while not path.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["none.npz"], "No such file: none.npz"),
        (
            ["text.csv", "--x", "a", "--y", "b"],
            "text.csv has no column 'a', which --x names. Its columns:",
        ),
        (["text.csv"], "Say which columns of text.csv are inputs"),
        (["text.npz"], "text.npz is no .npz file of plain arrays"),
        (["map.npz", "--x", "height"], "map.npz has no column 'height'. Its columns: lon, lat"),
        (["--x", "lon", "--y", "prevalence"], "give DATA, before --x"),
        (["map.npz", "--kernel", "cubic"], "kernel to be one of learned, rbf"),
        (["map.npz", "--grid", "2"], "grid_size"),
        (["map.npz", "--grid", "20,20,20"], "Expected grid to be one number or 2"),
        (["map.npz", "--grid", "100000"], "memory"),
        (["map.npz", "-q", "0"], "q to be a whole number of at least 1"),
        (["map.npz", "--steps", "1000"], "need a pool of"),
        (["map.npz", "--pool", "110", "--test", "40"], "too few for pool"),
        (["map.npz", "--device", "cuda:77"], "Device 'cuda:77' cannot be used"),
        (["map.npz", "--refit", "0.5"], "refit above 1"),
        (["map.npz", "--outliers", "-1"], "outliers above 0"),
        (["map.npz", "--model", "local", "--outliers", "8"], "left out of model auto, wiski"),
        (["map.npz", "--goal", "exceedance"], "needs the threshold"),
        (["map.npz", "--compare", "chance"], "Expected --compare random, got 'chance'"),
        (["wide.npz", "--model", "wiski"], "at most 4 inputs with model wiski"),
        (["map.npz", "--model", "svgp"], "Expected model to be one of auto, wiski, osgpr"),
        (["map.npz", "--model", "local", "--set", "=3"], "Expected --set name=value"),
        (["map.npz", "--model", "local", "--grid", "9"], "A grid is for model auto, wiski"),
        (["map.npz", "--out", "text.csv"], "text.csv is not a folder"),
        (["map.npz", "--resume"], "--out FOLDER --resume"),
        (["--resume", "--out", "nothing"], "no run to resume in nothing"),
    ],
)
def test_bad_input_is_one_clear_error_and_leaves_no_files(
    data: str, args: list[str], message: str
) -> None:
    write_five_inputs(Path("wide.npz"))
    for name in ("text.csv", "text.npz"):
        Path(name).write_text("no, such\nthing, 1\n")
    before = contents(Path())
    assert_one_clear_error(sample(*args), message)
    assert contents(Path()) == before
    assert not [path for path in Path().iterdir() if path.is_dir()]


def write_five_inputs(path: Path) -> None:
    import numpy as np

    np.savez(path, X=np.random.default_rng(0).random((60, 5)), y=np.arange(60.0))


@pytest.mark.parametrize("args", [["-q", "many"], ["--grid", "fine"], ["--unknown"], ["a", "b"]])
def test_bad_syntax_is_said_by_the_parser(data: str, args: list[str]) -> None:
    result = sample(*args)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr
    assert "Error" in result.stderr


@pytest.mark.integration
def test_a_run_is_not_written_over_and_keeps_its_settings(data: str, tmp_path: Path) -> None:
    assert sample(data, *OPTIONS, "--out", "run").exit_code == 0
    write_npz(tmp_path / "other.npz", small_map(seed=1))
    before = contents(Path("run"))
    resume = ["--out", "run", "--resume"]
    for args, message in (
        ([data, "--out", "run"], "run holds a run already. Go on with it by --resume"),
        ([*resume, "-q", "4"], "The run began with --batch 3, got 4."),
        ([*resume, "--compare", "random"], "The run began with no --compare, got random."),
        ([*resume, "--grid", "13,9"], "The run began with --grid 12, got 13,9."),
        ([*resume, "--x", "lat", "lon"], "The run began with no --x, got lat lon."),
        ([*resume, "--steps", "2"], "has done 4 steps already"),
        (["other.npz", *resume], "of another data set than other.npz"),
    ):
        assert_one_clear_error(sample(*args), message)
    index = Path("run/checkpoint.json")
    index.write_bytes(before["checkpoint.json"].replace(b'"version": 9', b'"version": 99'))
    assert_one_clear_error(sample(*resume), "version 99 of the format")
    index.write_bytes(before["checkpoint.json"])
    assert contents(Path("run")) == before
    assert sample(data, *resume, "-q", str(QUICK.q)).exit_code == 0


@pytest.mark.integration
def test_a_full_disk_is_one_clear_error_and_leaves_the_run_whole(data: str) -> None:
    """Files may grow to a size that the models exceed: writing fails in the midst of one."""
    assert sample(data, *OPTIONS, "--out", "run").exit_code == 0
    before = contents(Path("run"))
    resume = ("sample", "--out", "run", "--resume", "--steps", "6")
    process = command(*resume, limit_blocks=40)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "Traceback" not in err
    assert "error: run: File too large. What was written before is whole." in err
    assert contents(Path("run")) == before
    assert sample(*resume[1:]).exit_code == 0
    assert len(picks("run")) == 1 + 5 + 6 * 3


@pytest.mark.integration
def test_a_refit_that_fails_is_in_the_summary(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: StreamingGP) -> None:
        raise ModelFittingError("no luck")

    monkeypatch.setattr("bo_stream.models.fitting.learn_hyperparameters", fail)
    result = sample(data, *OPTIONS, "--out", "run")
    assert result.exit_code == 0, result.stderr
    assert "Numerical record: a refit that failed, first at 5 observations" in result.stdout
    run = json.loads(Path("run/run.json").read_text())
    (event,) = run["strategies"]["chosen"]["model"]["numerical_log"]
    assert event["what"] == "a refit that failed"


@pytest.mark.integration
def test_outliers_are_told(tmp_path: Path) -> None:
    small, row = map_with_an_artefact(LONG)
    data = str(write_npz(tmp_path / "artefact.npz", small))
    sizes = ["--pool", "120", "--test", "40", "--initial", "100", "--steps", "0", "--grid", "12"]
    result = sample(data, *sizes, "--outliers", "7", "--out", "run")
    assert result.exit_code == 0, result.stderr
    told = f"outliers by least variance (--outliers 0 keeps them): rows {row} of the data."
    assert told in result.stdout
    resumed = sample("--out", "run", "--resume", "--outliers", "0")
    assert_one_clear_error(resumed, "The run began with --outliers 7.0, got 0.0.")


def test_a_folder_that_cannot_be_written(data: str) -> None:
    Path("file").write_text("")
    assert_one_clear_error(sample(data, *OPTIONS, "--out", "file/run"), "file/run")


@pytest.mark.integration
def test_a_real_map(shared_data: Path) -> None:
    path = shared_data / "nigeria_pf.npz"
    if not path.is_file():
        pytest.skip("needs nigeria_pf.npz in ../shared/data beside the project")
    args = ["--steps", "5", "--grid", "30", "--pool", "2000", "--test", "2000"]
    process = command("sample", os.fspath(path), *args, "--out", "run", "--compare", "random")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "nigeria_pf.npz: 43,189 sites, target PfPR2-10 mean prevalence 2020" in out
    run = json.loads(Path("run/run.json").read_text())
    assert run["finished"] is True
    assert run["peak_memory_mib"] < 2048
    assert run["data"]["columns"] == ["longitude", "latitude"]
    chosen, random = (run["strategies"][name]["final"] for name in ("chosen", "random"))
    assert chosen["observations"] == random["observations"] == 40
    assert 0.3 < chosen["rmse_sd"] < 1.1
