"""The command ``bo-stream optimize --asynchronous``: run, stopped, killed, and taken up again."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from pathlib import Path
from subprocess import Popen

import pytest

from bo_stream.loops.optimization import load_optimizer
from tests.cli.optimizing import (
    QUICK,
    in_a_folder_with_a_module,
    installed,
    optimize,
    table,
)

PATIENCE = 300.0
BOX = ["--bounds", "0,1"]
ASYNCHRONOUS = [*BOX, *QUICK, "--asynchronous"]
LOGGED = "my_costs:logged"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_folder_with_a_module(tmp_path, monkeypatch)


def plan() -> dict[str, object]:
    content: dict[str, dict[str, object]] = json.loads(Path("run/run.json").read_text())
    return content["plan"]


def steps() -> list[int]:
    """The step of each trial, in the order of the steps."""
    return sorted(table("run")["step"])


def test_as_many_trials_as_step_by_step_and_the_same_files() -> None:
    threads = ["--executor", "threads:2", "--out", "run"]
    result = optimize("my_costs:cost", *ASYNCHRONOUS, *threads)
    assert result.exit_code == 0, result.stderr
    assert "4 initial points, then 6, each when a worker is free, by qLogEI" in result.stdout
    assert "posterior mean" in result.stdout
    history = table("run")
    assert history["key"].tolist() == list(range(10))
    assert steps() == [0] * 4 + [1] * 2 + [2] * 2 + [3] * 2
    assert set(history["status"]) <= {"told", "failed"}
    run = json.loads(Path("run/run.json").read_text())
    assert run["finished"] is True
    assert run["plan"]["asynchronous"] is True
    assert run["best"]["Y"] == history["y"][run["best"]["key"]]
    assert run["seconds"] > 0.0
    for picture in ("trace.png", "trust.png"):
        assert Path("run", picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.integration
def test_a_run_goes_on_in_either_mode() -> None:
    threads = ["--executor", "threads:2", "--acquisition", "random", "--out", "run"]
    begun = optimize("my_costs:cost", *BOX, *QUICK, "--steps", "1", *threads)
    assert begun.exit_code == 0, begun.stderr
    first = table("run")
    again = ["my_costs:cost", "--out", "run", "--resume"]
    result = optimize(*again, "--steps", "2", "--asynchronous", "--at-once", "3", "--ahead", "0")
    assert result.exit_code == 0, result.stderr
    assert "Going on after step 1." in result.stdout
    assert (plan()["at_once"], plan()["ahead"]) == (3, 0)
    assert optimize(*again, "--steps", "3").exit_code == 0
    assert plan()["asynchronous"] is True
    result = optimize(*again, "--steps", "4", "--synchronous")
    assert result.exit_code == 0, result.stderr
    assert (plan()["asynchronous"], plan()["at_once"], plan()["ahead"]) == (False, None, None)
    assert steps() == [0] * 4 + [1] * 2 + [2] * 2 + [3] * 2 + [4] * 2
    assert table("run")[:6].drop(columns="best").equals(first.drop(columns="best"))


def calls() -> Counter[str]:
    """How often the function was called at each point."""
    return Counter(Path("calls").read_text().split()) if Path("calls").exists() else Counter()


def wait_for_calls(process: Popen[str], count: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while calls().total() < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.integration
def test_after_kill_9_only_what_was_under_way_is_evaluated_again() -> None:
    process = installed(LOGGED, *ASYNCHRONOUS, "--steps", "10", "--workers", "2", "--out", "run")
    wait_for_calls(process, 12)
    process.kill()
    process.communicate()  # ends with the workers, which hold the output open as well
    ledger = load_optimizer(Path("run"), trusted=[LOGGED])[0].ledger
    told = {trial.key: trial.Y for trial in ledger.with_status("told")}
    assert len(told) >= 9  # all that were called but those under way, and one on its way here
    assert calls().total() - len(told) <= 3
    result = optimize(LOGGED, "--out", "run", "--resume")
    assert result.exit_code == 0, result.stderr
    history = table("run")
    assert history["status"].tolist() == ["told"] * 24
    assert history["x0"].is_unique
    assert history["attempts"].tolist() == [1] * 24
    assert steps() == sorted([0] * 4 + 2 * list(range(1, 11)))
    for key, Y in told.items():
        assert history["y"][key] == Y
        assert calls()[repr(ledger[key].X[0])] == 1
    assert set(calls()) == {repr(float(x)) for x in history["x0"]}
    assert calls().total() <= 24 + 3


@pytest.mark.integration
def test_ctrl_c_lets_what_is_under_way_end() -> None:
    process = installed(LOGGED, *ASYNCHRONOUS, "--steps", "500", "--workers", "2", "--out", "run")
    wait_for_calls(process, 8)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert "Stopping when the evaluations under way have ended" in err
    command = "bo-stream optimize my_costs:logged --out run --resume"
    assert command in out
    counts = table("run")["status"].value_counts()
    assert counts["told"] == calls().total()
    ends = str(json.loads(Path("run/run.json").read_text())["steps_done"] + 2)
    assert optimize(*command.split()[2:], "--steps", ends).exit_code == 0
    assert set(calls().values()) == {1}
    assert table("run")["status"].value_counts()["told"] == 4 + 2 * int(ends)


@pytest.mark.integration
def test_on_a_cluster_of_dask() -> None:
    process = installed(LOGGED, *ASYNCHRONOUS, "--executor", "dask:2", "--out", "run")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert table("run")["status"].tolist() == ["told"] * 10
    assert set(calls().values()) == {1}
    assert plan()["executor"] == "dask:2"


def test_failures_are_repeated_and_recorded() -> None:
    options = ["--retries", "1", "--executor", "threads:2", "--acquisition", "random"]
    assert optimize("my_costs:cost", *ASYNCHRONOUS, *options, "--out", "run").exit_code == 0
    failed = table("run").query("status == 'failed'")
    assert len(failed) >= 1
    assert (failed["x0"] < 0.2).all()
    assert (failed["attempts"] == 2).all()
    assert (failed["error"] == "ValueError: too little").all()
