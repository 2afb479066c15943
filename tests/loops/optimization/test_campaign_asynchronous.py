"""A campaign whose plan is asynchronous: steps of outcomes, kills, and changes of the plan."""

from __future__ import annotations

import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bo_stream.errors import UsageError
from bo_stream.loops.optimization import Optimizer, Trial, load_optimizer
from bo_stream.loops.optimization.asynchronous import places_of
from bo_stream.loops.optimization.campaign import (
    Event,
    OptimizationCampaign,
    OptimizationStep,
    Plan,
    draw_trace,
    history,
)
from bo_stream.loops.optimization.objectives import InProcess, Outcome, find_objective
from bo_stream.loops.run import StopRequest
from tests.loops.optimization.test_asynchronous import Anyhow, half
from tests.loops.optimizing import QUICK

BOWL = "tests.loops.functions:bowl"
RANDOM = replace(QUICK, q=2, acquisition="random")
STEPS = 4
ASYNCHRONOUS = Plan(total=STEPS, asynchronous=True, at_once=3)
STEP_BY_STEP = Plan(total=STEPS)
TRIALS = 4 + STEPS * 2


class Once(Anyhow):
    """An evaluator whose outcomes come in random order, once: what a step-by-step run expects."""

    def next_outcome(self) -> Outcome[float]:
        self.again.clear()
        return super().next_outcome()


def begin(plan: Plan = ASYNCHRONOUS, settings: Any = RANDOM) -> OptimizationCampaign:
    objective = find_objective(BOWL, None, 0.0, settings.bounds, 0)
    return OptimizationCampaign(objective, Optimizer(settings), plan)


def resumed(folder: Path, **changes: Any) -> OptimizationCampaign:
    return OptimizationCampaign.resume(folder, [BOWL], **changes)


def run_in(folder: Path, campaign: OptimizationCampaign, evaluator: Anyhow) -> list[Event]:
    events: list[Event] = []
    with StopRequest(lambda: None) as stop:
        campaign.run_in(folder, evaluator, stop, events.append)
    return events


def check_whole(campaign: OptimizationCampaign) -> None:
    """Every trial ended, and is in one step; the steps are as long as they should be."""
    assert campaign.finished
    assert campaign.steps_done == STEPS
    assert {trial.status for trial in campaign.optimizer.ledger} <= {"told", "failed"}
    assert [step.number for step in campaign.steps] == list(range(STEPS + 1))
    assert [len(step.keys) for step in campaign.steps] == [4] + [2] * STEPS
    assert sorted(key for step in campaign.steps for key in step.keys) == list(range(TRIALS))
    assert history(campaign)["step"].notna().all()
    best, last = campaign.optimizer.best(), campaign.steps[-1]
    assert (last.best, last.mean) == (best.trial.key, best.mean)


def test_a_step_is_as_many_outcomes_as_a_choice_in_the_order_in_which_they_come(
    tmp_path: Path,
) -> None:
    campaign, evaluator = begin(), Anyhow()
    events = run_in(tmp_path, campaign, evaluator)
    check_whole(campaign)
    assert max(evaluator.under_way) == 3
    came = [event.key for event in events if isinstance(event, Trial)]
    assert came == [key for step in campaign.steps for key in step.keys]
    assert came != sorted(came)
    assert [e.number for e in events if isinstance(e, OptimizationStep)] == list(range(STEPS + 1))
    assert all(step.evaluation_seconds == 1.0 for step in campaign.steps)  # as Anyhow says
    assert campaign.seconds == sum(step.wall_seconds or 0.0 for step in campaign.steps)
    again = resumed(tmp_path)
    assert again.steps == campaign.steps
    assert again.plan == ASYNCHRONOUS
    assert list(again.optimizer.ledger) == list(campaign.optimizer.ledger)


@pytest.mark.usefixtures("whole_fits")
def test_finds_the_minimum_and_says_what_it_knows_meanwhile(tmp_path: Path) -> None:
    campaign = begin(replace(ASYNCHRONOUS, ahead=0), replace(QUICK, q=2))
    run_in(tmp_path, campaign, Anyhow())
    check_whole(campaign)
    assert campaign.optimizer.best().trial.X[0] == pytest.approx(0.7, abs=0.1)
    assert all(step.best is not None for step in campaign.steps)
    assert sum(step.model_seconds for step in campaign.steps) > 0.0
    assert len(draw_trace(campaign).axes) == 2


class Killed(BaseException):
    """Ends a run at any place."""


def killed(campaign: OptimizationCampaign, folder: Path, at: int, left: Path) -> list[Trial]:
    """Copy a run's folder as it is at an event, end the run, and return the trials it reported."""
    events: list[Event] = []

    def look(event: Event) -> None:
        events.append(event)
        if len(events) == at:
            shutil.copytree(folder, left)
            raise Killed

    with StopRequest(lambda: None) as stop, pytest.raises(Killed):
        campaign.run_in(folder, Once(half), stop, look)
    return [event for event in events if isinstance(event, Trial)]


@pytest.mark.matrix
@pytest.mark.parametrize("at", [2, 5, 9, 14])
@pytest.mark.parametrize("plans", [(1, 1), (1, 0), (0, 1)])
def test_a_run_that_was_killed_goes_on_in_either_mode(
    at: int, plans: tuple[int, int], tmp_path: Path
) -> None:
    former, later = ([STEP_BY_STEP, ASYNCHRONOUS][number] for number in plans)
    reported = killed(begin(former), tmp_path / "run", at, tmp_path / "left")
    for folder in (tmp_path / "left", tmp_path / "run"):  # the latter was written at the end
        before = {
            trial.key: trial
            for trial in load_optimizer(folder, [BOWL])[0].ledger
            if trial.status in ("told", "failed")
        }
        if former.asynchronous or folder.name == "run":
            assert {trial.key: trial for trial in reported} == before
        campaign, evaluator = resumed(folder, **vars(later)), Once(half, seed=at)
        run_in(folder, campaign, evaluator)
        check_whole(campaign)
        for key, trial in before.items():
            assert campaign.optimizer.ledger[key] == trial
        evaluated = Counter(task.key for task in evaluator.submitted)
        assert evaluated == Counter(set(range(TRIALS)) - set(before))
        assert resumed(folder).steps == campaign.steps


def test_a_killed_run_does_not_go_on_to_fewer_steps_than_are_done(tmp_path: Path) -> None:
    killed(begin(), tmp_path / "run", 12, tmp_path / "left")
    done = resumed(tmp_path / "left").steps_done
    assert done >= 2
    with pytest.raises(UsageError, match=rf"done {done} steps already: .* got {done - 1}"):
        resumed(tmp_path / "left", total=done - 1)


def test_an_error_with_a_text_that_no_file_can_hold_is_kept(tmp_path: Path) -> None:
    campaign = begin()
    (trial, *_) = campaign.optimizer.ask(2)
    campaign.optimizer.fail(trial.key, ValueError("cannot read \udc80.txt"))
    (error,) = history(campaign)["error"].dropna()
    assert error == "ValueError: cannot read \\udc80.txt"
    assert b"udc80" in history(campaign).to_csv().encode()


def test_a_stop_leaves_what_goes_on_step_by_step_or_not(tmp_path: Path) -> None:
    for number, plan in enumerate([ASYNCHRONOUS, STEP_BY_STEP]):
        campaign, evaluator, folder = begin(), Once(), tmp_path / str(number)
        with StopRequest(lambda: None) as stop:

            def ask_to_stop(event: Event, stop: StopRequest = stop) -> None:
                stop.made = stop.made or (isinstance(event, OptimizationStep) and event.number == 1)

            campaign.run_in(folder, evaluator, stop, ask_to_stop)
        assert not campaign.finished
        ended = len(evaluator.submitted)
        assert history(campaign)["step"].notna().sum() == ended
        again = resumed(folder, **vars(plan))
        assert history(again)["step"].equals(history(campaign)["step"])
        evaluator = Once(seed=1)
        run_in(folder, again, evaluator)
        check_whole(again)
        assert len(evaluator.submitted) == TRIALS - ended


def test_no_more_is_evaluated_than_asked_for_of_what_was_chosen_ahead() -> None:
    campaign = begin(replace(ASYNCHRONOUS, total=1))
    campaign.optimizer.ask(9)
    for _ in campaign.run(Anyhow()):
        pass
    assert campaign.steps_done == 1
    assert len(campaign.optimizer.pending) == 3
    assert len(campaign.optimizer.ledger.with_status("told")) == 6


def test_as_many_are_under_way_as_there_are_workers() -> None:
    campaign = begin(replace(ASYNCHRONOUS, at_once=None))
    with pytest.raises(UsageError, match="A Anyhow does not say how many workers it has"):
        list(campaign.run(Anyhow()))
    assert len(campaign.optimizer.ledger) == 0
    with ThreadPoolExecutor(5) as executor, campaign.evaluator(executor) as evaluator:
        assert places_of(evaluator, campaign.plan.at_once)() == 5
        for _ in campaign.run(evaluator):
            pass
    check_whole(campaign)
    assert places_of(InProcess(campaign.objective), None)() == 1
    with replace_plan(campaign, executor="threads:3").evaluator() as evaluator:
        assert places_of(evaluator, None)() == 3
    with replace_plan(campaign, workers=7).evaluator() as evaluator:
        assert places_of(evaluator, None)() == 7
    assert places_of(Anyhow(), 2)() == 2


def replace_plan(campaign: OptimizationCampaign, **changes: Any) -> OptimizationCampaign:
    campaign.plan = replace(Plan(total=STEPS, asynchronous=True), **changes)
    return campaign


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"at_once": 2}, "at_once is for asynchronous runs: expected asynchronous, or no at_once"),
        ({"ahead": 0}, "ahead is for asynchronous runs"),
        (
            {"asynchronous": True, "at_once": 0},
            "Expected at_once to be a whole number of at least 1, got 0",
        ),
        (
            {"asynchronous": True, "ahead": -1},
            "Expected ahead to be a whole number of at least 0, got -1",
        ),
        ({"asynchronous": True, "workers": 0}, "expected workers of at least 1, or an executor"),
    ],
)
def test_plans_that_cannot_be(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Plan(3, **wrong)
