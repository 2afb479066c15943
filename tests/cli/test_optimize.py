"""The command ``bo-stream optimize``: run as its user runs it."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from botorch.exceptions.errors import ModelFittingError
from torch.quasirandom import SobolEngine
from typer.testing import CliRunner

from bo_stream.cli import app
from bo_stream.loops.optimization.optimizer import Best, Optimizer
from bo_stream.loops.optimization.trials import MOST_INPUTS
from bo_stream.loops.run import ASKING, SURVEY, CheckpointFormat
from bo_stream.models.base import StreamingGP
from tests.cli.commands import assert_one_clear_error
from tests.cli.optimizing import (
    QUICK,
    in_a_folder_with_a_module,
    installed,
    optimize,
    own,
    table,
)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_folder_with_a_module(tmp_path, monkeypatch)


def test_help_names_every_option() -> None:
    text = optimize("--help").stdout
    for option in ("--dim", "--noise", "--bounds", "--acquisition", "--workers", "--asynchronous"):
        assert option in text
    assert "qLogNEI" in text
    words = " ".join(text.replace("│", " ").split())
    assert "with --acquisition, another --model than auto, --set or --grid; both in up to" in words
    assert "whose first one is the middle of the box" in words
    assert "Of the box: relearn hyperparameters" in words
    assert "Of the box: β" in words
    assert "bo-stream optimize Levy --dim 20" in words  # of Ackley the middle is the least value


@pytest.mark.usefixtures("small_pictures")
def test_a_test_function_with_noise() -> None:
    result = optimize("Branin", "--noise", "0.5", *QUICK, "--out", "run")
    assert result.exit_code == 0, result.stderr
    assert "Minimising Branin over [-5, 10] x [0, 15]: 4 initial points" in result.stdout
    assert "known minimum" in result.stdout
    history = table("run")
    assert history["key"].tolist() == list(range(10))
    assert (history["y"] - history["noiseless"]).std() == pytest.approx(0.5, rel=0.9)
    run = json.loads(Path("run/run.json").read_text())
    assert run["finished"] is True
    assert run["objective"]["noise"] == 0.5
    assert run["counts"]["told"] == 10
    assert run["best"]["Y"] == history["y"][run["best"]["key"]]
    assert set(run["versions"]) >= {"python", "bo-stream", "torch", "botorch"}
    assert Path("run/trace.png").read_bytes().startswith(b"\x89PNG")
    assert Path("run/trust.png").read_bytes().startswith(b"\x89PNG")
    trust = json.loads(Path("run/trust.json").read_text())
    assert trust["validation"]["total"]["count"] == 6  # the first four built the model
    assert "Only 6 rows were validated" in trust["untested"]


@pytest.mark.usefixtures("small_pictures")
@pytest.mark.parametrize(("options", "which"), [([], "Lowest"), (["--maximize"], "Highest")])
def test_a_better_outcome_than_that_of_the_best_mean_is_named(
    options: list[str], which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second(optimizer: Optimizer) -> Best:
        told = optimizer.ledger.with_status("told")
        order = sorted(told, key=lambda t: optimizer.settings.sign * float(t.Y or 0.0))
        return Best(order[-2], 0.0)

    monkeypatch.setattr(Optimizer, "best", second)
    result = optimize(*own("cost", *options, "--steps", "0", "--out", "run"))
    assert result.exit_code == 0, result.stderr
    found = json.loads(Path("run/run.json").read_text())["best_outcome"]
    line = f"{which} outcome: {found['Y']:.6g} of trial {found['key']}, at ({found['X'][0]:.6g})."
    assert line in result.stdout


def test_many_inputs_are_searched_in_a_region_and_it_says_so() -> None:
    options = ("-q", "5", "--workers", "0", "--out", "run")
    result = optimize("Levy", "--dim", "12", "--steps", "2", *options)
    assert result.exit_code == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert "over [-10, 10]^12: 24 initial points, then 2 steps of 5 by draws in a reg" in said
    assert "Searching a region about the best point, as there are 12 inputs" in said
    run = json.loads(Path("run/run.json").read_text())
    assert run["settings"]["search"] == "region"
    assert run["outcome_scale"]["unit"] > 0.0
    assert run["model"]["class"] == "AutoGP"
    trust = json.loads(Path("run/trust.json").read_text())
    assert trust["validation"]["total"]["count"] == 24 + 10  # in folds
    assert trust["alarms"] == []
    assert trust["untested"] == "A region learns another model at each step: alarms are not judged."
    again = optimize("--out", "run", "--resume", "--steps", "3")
    assert again.exit_code == 0, again.stderr
    assert len(table("run")) == 24 + 15


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--dim", "2"), "Searching the whole box, as there are 2 inputs; --search chooses"),
        (("--dim", "5"), "box until there are 40 outcomes, then a region about the best point, as"),
        (("--dim", "11", "--acquisition", "random"), "of 11 inputs; --search region is faster"),
        (("--dim", "11", "--acquisition", "qLogEI"), "of 11 inputs; --search region is faster"),
        (("--dim", "2", "--search", "region"), "about the best point, as asked for, of 2 inputs."),
    ],
)
def test_the_reason_for_a_search_is_said(options: tuple[str, ...], reason: str) -> None:
    few = ("--initial", "3", "--steps", "1", "--workers", "0")
    result = optimize("Ackley", *options, *few, "--out", "run")
    assert result.exit_code == 0, result.stderr
    assert reason in " ".join(result.stdout.split())


@pytest.mark.integration
@pytest.mark.smoke
def test_the_installed_command_runs_a_function_of_one_s_own_in_a_worker() -> None:
    few = ["--steps", "1", "--retries", "1"]
    process = installed(*own("cost", "--workers", "1", *few, "--out", "run"))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert optimize(*own("cost", *few, "--out", "serial")).exit_code == 0
    pd.testing.assert_frame_equal(table("run"), table("serial"))
    failed = table("run").query("status == 'failed'")
    assert (failed["x0"] < 0.2).all()
    assert (failed["attempts"] == 2).all()
    assert (failed["error"] == "ValueError: too little").all()
    assert len(failed) >= 1


def test_a_refit_that_fails_is_in_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: StreamingGP) -> None:
        raise ModelFittingError("no luck")

    monkeypatch.setattr("bo_stream.models.fitting.learn_hyperparameters", fail)
    result = optimize("Branin", *QUICK, "--out", "run")
    assert result.exit_code == 0, result.stderr
    assert "Numerical record: a refit that failed, first at 4 observations" in result.stdout
    run = json.loads(Path("run/run.json").read_text())
    (event,) = run["model"]["numerical_log"]
    assert (event["what"], event["observations"]) == ("a refit that failed", 4.0)
    assert event["times"] == len(run["refits_at"])


@pytest.mark.integration
def test_another_model_with_an_option() -> None:
    model = ["--model", "osgpr", "--set", "max-points=5", "--set", "window=0"]
    steps = ["--initial", "6", "--steps", "2", "-q", "2", "--out", "run"]
    assert optimize("Hartmann", *steps, *model).exit_code == 0
    record = json.loads(Path("run/run.json").read_text())
    assert record["settings"]["model_options"] == {"max_points": 5, "window": 0}
    assert record["model"]["class"] == "OSGPR"
    assert 0 < record["model"]["inducing_points"] <= 5
    again = ["--out", "run", "--resume", "--steps", "3"]
    changed = optimize(*again, "--set", "max_points=6")
    assert_one_clear_error(changed, "The run began with --set max_points=5 --set window=0,")
    assert_one_clear_error(optimize(*again, "--model", "local"), "The run began with --model osgpr")
    assert optimize(*again, *model).exit_code == 0


def test_maximize_and_parquet() -> None:
    result = optimize(
        "Ackley", "--dim", "1", "--maximize", *QUICK, "--history", "parquet", "--out", "run"
    )
    assert result.exit_code == 0, result.stderr
    assert "Maximising Ackley" in result.stdout
    history = pd.read_parquet("run/history.parquet")
    assert history["best"].tolist() == history["y"].cummax().tolist()
    again = ["--resume", "--out", "run", "--steps", "4"]  # the kind of the file is as before
    assert optimize(*again).exit_code == 0
    assert len(pd.read_parquet("run/history.parquet")) > len(history)
    assert not Path("run/history.csv").exists()
    assert optimize(*again, "--history", "csv").exit_code == 0
    assert Path("run/history.csv").exists()
    assert not Path("run/history.parquet").exists()


@pytest.mark.integration
def test_a_run_goes_on_where_it_stopped() -> None:
    options = ["Branin", "--noise", "1", *QUICK]
    assert optimize(*options, "--out", "whole").exit_code == 0
    assert optimize(*options, "--steps", "1", "--out", "parts").exit_code == 0
    result = optimize("--out", "parts", "--resume", "--steps", "3", "--noise", "1")
    assert result.exit_code == 0, result.stderr
    assert "Going on after step 1." in result.stdout
    pd.testing.assert_frame_equal(table("parts"), table("whole"))


@pytest.mark.integration
def test_ctrl_c_ends_the_step_and_the_run_goes_on_to_the_same_points() -> None:
    process = installed(*own("slow", "--out", "run"))
    deadline = time.monotonic() + 120
    while not Path("calls").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Stopping after this step" in err
    command = "bo-stream optimize my_costs:slow --out run --resume"
    assert command in out
    assert len(table("run")) == 4
    assert optimize(*command.split()[2:]).exit_code == 0
    assert optimize(*own("slow", "--out", "whole")).exit_code == 0
    pd.testing.assert_frame_equal(table("run"), table("whole"))


def edited(old: str, new: str) -> None:
    """The run's index, as if it had been written with another word."""
    index = Path("run/optimization.json")
    text = index.read_text()
    assert old in text
    content = json.loads(text.replace(old, new))
    rest = {k: v for k, v in content.items() if k != "sha256"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    index.write_text(json.dumps({**content, "sha256": digest}))


@pytest.mark.integration
def test_no_function_is_imported_but_the_one_that_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resume = ["--out", "run", "--resume"]
    assert optimize(*own("cost", "--steps", "1", "--out", "run")).exit_code == 0
    Path("planted.py").write_text("open('mark', 'w')\ndef cost(x):\n    return x[0]\n")
    refusal = "names my_costs:cost, which would be imported and called. If you trust it, name it"
    assert_one_clear_error(optimize(*resume), refusal)
    edited("my_costs:cost", "planted:cost")
    for given in ([], ["my_costs:cost"]):
        assert_one_clear_error(optimize(*given, *resume), "names planted:cost, which would be")
    edited("planted:cost", "my_costs:cost")
    edited("qLogEI", "planted:cost")
    message = "names planted:cost, which would be imported"
    assert_one_clear_error(optimize("my_costs:cost", *resume), message)
    assert not Path("mark").exists()
    assert "planted" not in sys.modules
    edited("planted:cost", "qLogEI")
    assert optimize("my_costs:cost", *resume).exit_code == 0


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 2)])
@pytest.mark.integration
def test_at_a_terminal_the_function_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    assert optimize(*own("cost", "--steps", "0", "--out", "run")).exit_code == 0
    monkeypatch.setattr("bo_stream.cli.optimize.at_terminal", lambda: True)
    resume = ["optimize", "--out", "run", "--resume", "--steps", "1"]
    result = CliRunner().invoke(app, resume, input=f"{answer}\n")
    assert "names my_costs:cost. Import and call it?" in result.stderr
    assert result.exit_code == code


@pytest.mark.integration
def test_a_function_that_ends_its_process_costs_its_trials_alone() -> None:
    process = installed("my_costs:die", "--bounds", "0,1", *QUICK, "--out", "run")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert "Traceback" not in err
    history = table("run")
    assert len(history) == 10
    lost = history["x0"] < 0.5
    assert 0 < lost.sum() < 10
    assert (history["error"][lost] == "the worker process died (exit code 7)").all()
    assert (history["status"][~lost] == "told").all()


@pytest.mark.integration
def test_a_second_command_in_a_run_s_folder_is_told_who_is_at_work_there() -> None:
    command = ["my_costs:wait", "--bounds", "0,1", *QUICK, "--out", "run"]
    first = installed(*command)
    while not Path("calls").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    message = f"run is in use by process {first.pid} on "
    assert_one_clear_error(optimize(*command), message)
    assert_one_clear_error(optimize("--out", "run", "--resume"), message)
    first.kill()
    first.communicate()  # ends with the worker, which holds the output open as well
    Path("go").touch()
    assert optimize(*command, "--workers", "0").exit_code == 0
    assert len(table("run")) == 10


def test_a_function_that_always_fails() -> None:
    result = optimize(*own("never", "--out", "run"))
    assert result.exit_code == 2
    assert "All 4 trials failed, the last one with: the value is nan" in result.stderr
    assert table("run")["error"].tolist() == ["the value is nan"] * 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--acquisition", "qUCB"], "The run began with --acquisition qLogEI, got qUCB"),
        (["-q", "3"], "The run began with --batch 2, got 3"),
        (["--noise", "2"], "The run began with --noise 0.0, got 2.0"),
        (["--grid", "9"], "The run began with --grid 12, got 9."),
        (["--maximize"], "The run began with --minimize, got --maximize. A run"),
        (["--initial", "0"], "The run began with --initial 4, got 10"),
        (["--set", "max_exact=5"], "The run began with no --set, got max_exact=5."),
        (["Ackley"], "The run began with FUNCTION Branin, got Ackley"),
        (["--steps", "0"], "has done 1 steps already"),
        (["--at-once", "3"], "at_once is for asynchronous runs"),
        (["--asynchronous", "--workers", "0"], "An asynchronous run keeps workers busy"),
    ],
)
def test_a_run_does_not_go_on_with_other_settings(
    finished: Path, given: list[str], message: str
) -> None:
    shutil.copytree(finished, "run")
    before = {path.name: path.read_bytes() for path in Path("run").iterdir()}
    assert_one_clear_error(optimize(*given, "--out", "run", "--resume"), message)
    assert {path.name: path.read_bytes() for path in Path("run").iterdir()} == before


def test_a_run_goes_on_with_settings_that_say_the_same() -> None:
    begun = optimize("Branin", *QUICK, "--initial", "0", "--steps", "0", "--out", "run")
    assert begun.exit_code == 0, begun.stderr
    same = ["--initial", "0", "--set", "max_exact=0", "--minimize"]
    result = optimize("branin", *same, "--out", "run", "--resume")
    assert result.exit_code == 0, result.stderr
    assert optimize("--initial", "10", "--out", "run", "--resume").exit_code == 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("optimized") / "run"
    result = optimize("Branin", *QUICK, "--steps", "1", "--out", str(folder))
    assert result.exit_code == 0, result.stderr
    return folder


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "Say which FUNCTION to optimise"),
        (["Brannin"], "No test function 'Brannin'. Expected one of Ackley"),
        (["Hartmann", "--model", "wiski"], "Expected at most 4 inputs with model wiski"),
        (["Branin", "--model", "svgp"], "Expected model to be one of auto, wiski, osgpr"),
        (["Branin", "--model", "osgpr", "--set", "window"], "Expected --set name=value"),
        (
            ["Branin", "--model", "osgpr", "--set", "size=3"],
            "Expected options of osgpr (max_p",
        ),
        (["Branin", "--model", "osgpr", "--grid", "20"], "A grid is for model auto, wiski"),
        (["Ackley", "--dim", "21202"], "Expected bounds of at most 21,201 inputs, as many as a S"),
        (["Branin", "--dim", "2"], "Branin has a fixed number of inputs"),
        (["my_costs:cost"], "Say the bounds of each input of 'my_costs:cost'"),
        (["my_costs:price", "--bounds", "0,1"], "found nothing"),
        (["my_costs:answer", "--bounds", "0,1"], "found a int"),
        (["my_cost:cost", "--bounds", "0,1"], "module 'my_cost' cannot be imported"),
        (["Branin", "--search", "sphere"], "Expected search to be one of box, both, region"),
        (["Branin", "--search", "region", "--acquisition", "TS"], "leave out acquisition, or"),
        (["Branin", "--search", "region", "--model", "wiski"], "leave out model, or search the b"),
        (["Branin", "--acquisition", "EI"], "Expected acquisition to be one of qUCB"),
        (
            ["Branin", "--workers", "-1"],
            "Expected workers to be a whole number of at least 0, got -1",
        ),
        (["Branin", "--workers", "0", "--timeout", "9"], "A timeout needs a process"),
        (["Branin", "--asynchronous", "--workers", "0"], "An asynchronous run keeps workers busy"),
        (
            ["Branin", "--asynchronous", "--at-once", "0"],
            "Expected at_once to be a whole number of at least 1, got 0",
        ),
        (
            ["Branin", "--asynchronous", "--ahead", "-1"],
            "Expected ahead to be a whole number of at least 0, got -1",
        ),
        (["Branin", "--at-once", "2"], "at_once is for asynchronous runs"),
        (["Branin", "--ahead", "0"], "ahead is for asynchronous runs"),
        (["Branin", "--timeout", "0"], "Expected timeout above 0"),
        (["Branin", "--retries", "-1"], "Expected retries to be a whole number of at least 0"),
        (["Branin", "--history", "xls"], "Expected --history csv or parquet, got 'xls'"),
        (["--resume"], "Say which run to go on with"),
        (["--resume", "--out", "nothing"], "There is no optimization to resume in nothing"),
        (["Branin", "--out", "my_costs.py"], "--out my_costs.py is not a folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args: list[str], message: str) -> None:
    assert_one_clear_error(optimize(*args), message)
    assert [path.name for path in Path().iterdir() if path.name != "__pycache__"] == ["my_costs.py"]


def test_the_most_inputs_are_those_of_a_sobol_sequence() -> None:
    assert MOST_INPUTS == SobolEngine.MAXDIM


def test_bounds_may_be_negative() -> None:
    own_box = ["--bounds", "-5,-1 0,1", "--workers", "0"]
    result = optimize("my_costs:cost", *own_box, *QUICK, "--out", "run")
    assert "over [-5, -1] x [0, 1]" in result.stdout
    assert "All 4 trials failed, the last one with: ValueError: too little" in result.stderr


def test_bounds_that_are_none() -> None:
    result = optimize("my_costs:cost", "--bounds", "0;1")
    assert result.exit_code == 2
    assert "expected low,high of each input" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "command",
    [["optimize", "Branin"], ["benchmark"], ["survey", "start", "sites.csv", "--threshold", "0.1"]],
)
def test_a_folder_without_a_name_is_refused(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--out", ""])
    assert result.exit_code == 2
    assert "expected a folder, got ''" in " ".join(result.stderr.replace("│", " ").split())


def test_a_folder_with_a_run_is_not_begun_again(finished: Path) -> None:
    assert_one_clear_error(
        optimize("Branin", "--out", str(finished)), "holds a run already. Go on with it by --resume"
    )


@pytest.mark.parametrize("kind", [SURVEY, ASKING])
def test_a_folder_of_another_kind_is_left_alone(kind: CheckpointFormat) -> None:
    Path("other").mkdir()
    Path("other", kind.name).touch()
    message = f"other holds a {kind.run} ({kind.name}). Give another --out."
    assert_one_clear_error(optimize("Branin", "--out", "other"), message)
    assert [path.name for path in Path("other").iterdir()] == [kind.name]


@pytest.mark.integration
def test_a_wait_for_workers_is_said_before_the_end_and_other_warnings_at_it() -> None:
    quick = ["--bounds", "0,1", "--initial", "2", "--steps", "0", "--workers", "0"]
    said = optimize("my_costs:lonely", *quick, "--out", "run").stderr
    assert said.index("nobody is there") < said.index("evaluated") < said.index("that is odd")
    assert said.count("nobody is there") == said.count("that is odd") == 1


@pytest.mark.integration
def test_a_function_is_evaluated_on_an_executor() -> None:
    quick = ["--bounds", "0,1", *QUICK]
    result = optimize("my_costs:cost", *quick, "--executor", "threads:2", "--out", "run")
    assert result.exit_code == 0, result.stderr
    assert optimize(*own("cost", "--out", "serial")).exit_code == 0
    pd.testing.assert_frame_equal(table("run"), table("serial"))
    plan = json.loads(Path("run/run.json").read_text())["plan"]
    assert (plan["executor"], plan["resources"]) == ("threads:2", {})
    again = ["my_costs:cost", "--out", "run", "--resume", "--steps", "4"]
    assert optimize(*again).exit_code == 0
    assert optimize(*again[:-1], "5", "--workers", "0").exit_code == 0
    plan = json.loads(Path("run/run.json").read_text())["plan"]
    assert (plan["executor"], plan["workers"]) == (None, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--executor", "slurm"], "Expected executor to be one of processes, threads, dask, ray"),
        (["--executor", "threads:2", "--workers", "2"], "leave out --workers, or --executor"),
        (["--executor", "threads:2", "--resources", "GPU=1"], "An executor of threads has no"),
        (
            ["--executor", "threads:0", "--asynchronous"],
            "Expected workers to be a whole number of at least 1, got 0",
        ),
        (["--resources", "GPU=1"], "Resources are those of an executor"),
        (["--executor", "ray:127.0.0.1:1"], "Nothing answers at 127.0.0.1:1 within 5 s"),
    ],
)
def test_executors_that_cannot_be_had(options: list[str], message: str) -> None:
    result = optimize("my_costs:cost", "--bounds", "0,1", *options, "--out", "run")
    assert_one_clear_error(result, message)
    assert {path.name for path in Path().glob("run/*")} <= {".lock"}


def test_resources_are_names_and_numbers() -> None:
    result = optimize("Branin", "--executor", "dask:2", "--resources", "GPU")
    assert result.exit_code == 2
    assert "expected name=number" in " ".join(result.stderr.replace("│", " ").split())
