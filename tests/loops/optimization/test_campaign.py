from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pandas as pd
import pytest

from bo_stream.errors import UsageError
from bo_stream.loops.optimization import Optimizer, Trial
from bo_stream.loops.optimization.campaign import (
    OptimizationCampaign,
    OptimizationStep,
    Plan,
    history,
    write_optimization,
)
from bo_stream.loops.optimization.executed import worker_processes
from bo_stream.loops.optimization.objectives import InProcess, find_objective
from bo_stream.loops.run import OPTIMIZATION, StopRequest
from bo_stream.models.base import StreamingGP
from bo_stream.storage.archive import atomic_write
from tests.loops.functions import bowl
from tests.loops.optimizing import QUICK, points

pytestmark = [
    pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short"),
]


def begin(
    function: str = "bowl", total: int = 2, retries: int = 0, **settings: Any
) -> OptimizationCampaign:
    chosen = replace(QUICK, **{"q": 2, **settings})
    name = f"tests.loops.functions:{function}"
    objective = find_objective(name, None, 0.0, chosen.bounds, chosen.seed)
    return OptimizationCampaign(objective, Optimizer(chosen), Plan(total, retries))


def resumed(folder: Path, function: str = "bowl", **changes: Any) -> OptimizationCampaign:
    return OptimizationCampaign.resume(folder, [f"tests.loops.functions:{function}"], **changes)


def run(campaign: OptimizationCampaign) -> OptimizationCampaign:
    for _ in campaign.run(InProcess(campaign.objective)):
        pass
    return campaign


@pytest.fixture(scope="module")
def whole() -> OptimizationCampaign:
    return run(begin())


def trials(campaign: OptimizationCampaign) -> list[Trial]:
    """All but the wall time."""
    return [replace(trial, seconds=None) for trial in campaign.optimizer.ledger]


def test_a_run_is_the_initial_points_and_steps_of_q(whole: OptimizationCampaign) -> None:
    assert whole.finished
    assert [len(step.keys) for step in whole.steps] == [4, 2, 2]
    assert whole.steps_done == 2
    table = history(whole)
    assert table["step"].tolist() == [0] * 4 + [1] * 2 + [2] * 2
    assert table["best"].tolist() == table["y"].cummin().tolist()
    assert table["best"].iloc[-1] < 0.01


@pytest.mark.matrix
@pytest.mark.parametrize("events", range(11))
def test_a_run_stopped_anywhere_goes_on_to_the_same_points(
    whole: OptimizationCampaign, tmp_path: Path, events: int
) -> None:
    campaign = begin()
    for _, _event in zip(range(events), campaign.run(InProcess(campaign.objective)), strict=False):
        pass
    campaign.save(tmp_path)
    again = run(resumed(tmp_path))
    assert trials(again) == trials(whole)
    assert [step.keys for step in again.steps] == [step.keys for step in whole.steps]
    assert [step.mean for step in again.steps] == [step.mean for step in whole.steps]


@pytest.mark.integration
def test_any_number_of_workers_gives_the_same_run() -> None:
    campaign = begin()
    with worker_processes(campaign.objective, count=2) as workers:
        for _ in campaign.run(workers):
            pass
    assert trials(campaign) == trials(run(begin()))


def test_failures_are_recorded_and_kept_from_the_model() -> None:
    campaign = run(begin("half_forbidden", total=3, retries=1))
    ledger = campaign.optimizer.ledger
    failed = ledger.with_status("failed")
    assert failed
    assert all(trial.X[0] < 1.0 and trial.attempts == 2 for trial in failed)
    assert {trial.error for trial in failed} == {"ValueError: forbidden ground"}
    assert set(campaign.optimizer.surrogate.held) == {t.key for t in ledger.with_status("told")}
    assert len(ledger) == 4 + 3 * 2
    table = history(campaign)
    assert table.loc[table["status"] == "failed", "y"].isna().all()


def test_what_fails_is_tried_as_often_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    campaign = run(begin("third_time", total=1, retries=2))
    assert {(t.status, t.attempts) for t in campaign.optimizer.ledger} == {("told", 3)}
    assert {trial.error for trial in campaign.optimizer.ledger} == {"OSError: not yet"}


def test_a_function_that_always_fails_ends_the_run_and_nothing_is_lost(tmp_path: Path) -> None:
    campaign = begin("never")
    evaluating = InProcess(campaign.objective)
    with (
        StopRequest(lambda: None) as stop,
        pytest.raises(UsageError, match="All 4 trials failed, the last one with: RuntimeError: no"),
    ):
        campaign.run_in(tmp_path, evaluating, stop, lambda _: None)
    assert write_optimization(campaign, tmp_path, []) is None  # there is no model to trust
    assert trials(resumed(tmp_path, "never")) == trials(campaign)
    assert len(pd.read_csv(tmp_path / "history.csv")) == 4


@pytest.mark.parametrize("maximize", [False, True])
def test_a_better_outcome_than_that_of_the_best_mean_is_recorded(
    maximize: bool, tmp_path: Path
) -> None:
    campaign = run(begin(total=0, maximize=maximize))
    ranked = sorted(campaign.optimizer.ledger, key=lambda t: float(t.Y or 0.0), reverse=maximize)
    for trial, other in ((ranked[0], None), (ranked[1], ranked[0])):
        campaign.steps[-1] = replace(campaign.steps[-1], best=trial.key)
        write_optimization(campaign, tmp_path, [])
        found = json.loads((tmp_path / "run.json").read_text())["best_outcome"]
        assert found == (
            other and {"key": other.key, "X": list(other.X), "Y": other.Y, "noiseless": None}
        )


def test_an_error_of_the_search_loses_no_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: OptimizationCampaign
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no convergence")

    campaign = begin()
    with monkeypatch.context() as patch, StopRequest(lambda: None) as stop:
        patch.setattr("bo_stream.loops.optimization.optimizer.best_points", fail)
        with pytest.raises(RuntimeError, match="no convergence"):
            campaign.run_in(tmp_path, InProcess(campaign.objective), stop, lambda _: None, 1e9)
    again = resumed(tmp_path)
    assert [trial.status for trial in again.optimizer.ledger] == ["told"] * 4
    assert trials(run(again)) == trials(whole)


def interrupted(campaign: OptimizationCampaign, folder: Path) -> None:
    with StopRequest(lambda: None) as stop, pytest.raises(KeyboardInterrupt):
        campaign.run_in(folder, InProcess(campaign.objective), stop, lambda _: None, 1e9)


def test_an_interrupt_in_the_function_loses_no_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: OptimizationCampaign
) -> None:
    calls = []

    def interrupt_the_seventh(x: list[float]) -> float:
        calls.append(x)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return bowl(x)

    with monkeypatch.context() as patch:
        patch.setattr("tests.loops.functions.bowl", interrupt_the_seventh)
        interrupted(begin(), tmp_path)
    again = resumed(tmp_path)
    assert len(again.optimizer.ledger.with_status("told")) == 6
    assert trials(run(again)) == trials(whole)


def test_an_interrupt_while_the_model_changes_leaves_what_it_is_built_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(model: StreamingGP, *_: object) -> StreamingGP:
        raise KeyboardInterrupt

    campaign = begin()
    with monkeypatch.context() as patch:
        patch.setattr("bo_stream.models.auto.auto.AutoGP.update", interrupt)
        interrupted(campaign, tmp_path)
    told = [trial for trial in trials(campaign) if trial.status == "told"]
    assert len(told) == 6
    again = resumed(tmp_path)
    assert again.optimizer.surrogate.model is None
    assert trials(again) == trials(campaign)
    assert run(again).finished
    assert trials(again)[:6] == told
    assert len(again.optimizer.surrogate.held) == 8


def test_more_steps_may_be_asked_for_but_not_fewer(
    whole: OptimizationCampaign, tmp_path: Path
) -> None:
    run(begin(total=1)).save(tmp_path)
    assert trials(run(resumed(tmp_path, total=2))) == trials(whole)
    with pytest.raises(UsageError, match=r"done 1 steps already: .* got 0"):
        resumed(tmp_path, total=0)


def test_workers_and_timeout_are_remembered_and_may_change(tmp_path: Path) -> None:
    objective = begin().objective
    plan = Plan(3, retries=1, workers=2, timeout=9.0)
    OptimizationCampaign(objective, Optimizer(QUICK), plan).save(tmp_path)
    assert resumed(tmp_path).plan == plan
    changed = resumed(tmp_path, timeout=None, workers=1).plan
    assert changed == Plan(3, retries=1)
    for wrong in ({"workers": 0}, {"timeout": -1.0}, {"retries": -1}, {"total": -1}):
        with pytest.raises(UsageError, match=r"[Ee]xpected"):
            resumed(tmp_path, **wrong)


def test_an_executor_of_one_s_own_gives_the_same_run(whole: OptimizationCampaign) -> None:
    campaign = begin()
    with ThreadPoolExecutor(2) as executor, campaign.evaluator(executor) as evaluator:
        for _ in campaign.run(evaluator):
            pass
    assert trials(campaign) == trials(whole)


def test_an_address_in_a_folder_is_not_connected_to(tmp_path: Path) -> None:
    plan = Plan(3, executor="dask:tcp://elsewhere:8786", resources={"GPU": 1.0})
    OptimizationCampaign(begin().objective, Optimizer(QUICK), plan).save(tmp_path)
    with pytest.raises(UsageError, match=r"was evaluated on dask:tcp://elsewhere:8786\. If you"):
        resumed(tmp_path, workers=2)
    assert resumed(tmp_path, executor=plan.executor).plan == plan
    assert resumed(tmp_path, executor=None, resources={}).plan == Plan(3)
    local = Plan(3, executor="threads:2")
    OptimizationCampaign(begin().objective, Optimizer(QUICK), local).save(tmp_path)
    assert resumed(tmp_path).plan == local


def test_plans_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Expected executor to be one of"):
        Plan(3, executor="slurm:4")
    with pytest.raises(UsageError, match="Resources are those of an executor"):
        Plan(3, resources={"GPU": 1.0})


def test_a_run_that_ends_within_a_step_leaves_no_task_to_another_one(
    whole: OptimizationCampaign, tmp_path: Path
) -> None:
    def interrupt(_: Trial | OptimizationStep) -> None:
        raise KeyboardInterrupt

    campaign = begin()
    with InProcess(campaign.objective) as evaluator:
        with pytest.raises(KeyboardInterrupt):
            campaign.run_in(tmp_path, evaluator, StopRequest(lambda: None), interrupt)
        assert evaluator.poll(0.0) is None
        for _ in campaign.run(evaluator):
            pass
    assert trials(campaign) == trials(whole)


def test_a_stop_ends_the_step_at_hand(tmp_path: Path) -> None:
    campaign = begin()
    with StopRequest(lambda: None) as stop:

        def ask_to_stop(event: Trial | OptimizationStep) -> None:
            stop.made = stop.made or (isinstance(event, Trial) and event.key == 4)

        campaign.run_in(tmp_path, InProcess(campaign.objective), stop, ask_to_stop)
    assert campaign.steps_done == 1
    assert points(resumed(tmp_path).optimizer.ledger) == points(campaign.optimizer.ledger)


def test_a_slow_evaluation_is_on_the_disk_at_once(tmp_path: Path) -> None:
    campaign = begin("slow", bounds=((1.01, 1.1),), initial=2, total=0)
    kept = []
    with StopRequest(lambda: None) as stop:

        def look(event: Trial | OptimizationStep) -> None:
            if (tmp_path / OPTIMIZATION.name).exists():
                ledger = resumed(tmp_path, "slow").optimizer.ledger
                kept.append(len(ledger.with_status("told")))

        campaign.run_in(tmp_path, InProcess(campaign.objective), stop, look)
    assert kept == [1, 2]  # as the second one and the end of the step are told


@pytest.mark.parametrize("failing", ["model-surrogate", OPTIMIZATION.name])
def test_a_full_disk_leaves_the_old_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    campaign = begin()
    events = campaign.run(InProcess(campaign.objective))
    for _ in range(6):
        next(events)
    campaign.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for _ in range(4):
        next(events)

    @contextmanager
    def full(path: Path) -> Iterator[IO[bytes]]:
        with atomic_write(path) as file:
            if Path(path).name.startswith(failing):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield file

    for module in ("archive", "objects"):
        monkeypatch.setattr(f"bo_stream.storage.{module}.atomic_write", full)
    with pytest.raises(OSError, match="No space left"):
        campaign.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    monkeypatch.undo()
    campaign.save(tmp_path)
    assert len([*tmp_path.glob("model-surrogate-*.safetensors")]) == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("nothing", "no optimization to resume"),
        ("text", "is damaged or no checkpoint"),
        ("keys", "is damaged: its SHA-256 is"),
        ("version", "was written by bo_stream 0.0.0"),
        ("no model", "The checkpoint in .* cannot be read: "),
        ("bad model", "The checkpoint in .* cannot be read: "),
    ],
)
def test_a_damaged_checkpoint_is_said(
    whole: OptimizationCampaign, tmp_path: Path, damage: str, message: str
) -> None:
    whole.save(tmp_path)
    index, model = (
        tmp_path / OPTIMIZATION.name,
        next(tmp_path.glob("model-surrogate-*.safetensors")),
    )
    content = json.loads(index.read_text())
    if damage == "nothing":
        shutil.rmtree(tmp_path)
    elif damage == "text":
        index.write_bytes(b"\x00\xff{")
    elif damage == "keys":
        index.write_text(json.dumps({k: v for k, v in content.items() if k != "trials"}))
    elif damage == "version":
        index.write_text(json.dumps({**content, "bo_stream": "0.0.0"}))
    elif damage == "no model":
        model.unlink()
    else:
        model.write_bytes(b"nothing")
    with pytest.raises(UsageError, match=message):
        resumed(tmp_path)
