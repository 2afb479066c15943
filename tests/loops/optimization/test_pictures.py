"""What a run shows while it goes on and afterwards: the trace, and the words on the bar."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from matplotlib.axes import Axes

from bo_stream.cli.optimize import best_so_far, summary
from bo_stream.loops.optimization import Optimizer
from bo_stream.loops.optimization.campaign import OptimizationCampaign, Plan, draw_trace
from bo_stream.loops.optimization.objectives import InProcess, find_objective
from tests.loops.optimizing import QUICK

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short")


def run(
    function: str, steps: int, *, maximize: bool = False, max_exact: int = 0
) -> OptimizationCampaign:
    dim = 1 if function == "Ackley" else None
    bounds = None if dim else QUICK.bounds
    objective = find_objective(function, dim, 0.0, bounds, 0)
    settings = replace(QUICK, bounds=objective.bounds, maximize=maximize)
    if max_exact:
        settings = replace(settings, grid=None, model_options={"max_exact": max_exact})
    campaign = OptimizationCampaign(objective, Optimizer(settings), Plan(steps))
    for _ in campaign.run(InProcess(objective)):
        pass
    return campaign


def lines(axes: Axes) -> dict[str, list[float]]:
    return {str(line.get_label()): [float(y) for y in line.get_ydata()] for line in axes.lines}


@pytest.mark.parametrize("maximize", [False, True])
def test_the_trace_has_the_best_values_and_the_seconds_of_each_step(maximize: bool) -> None:
    campaign = run("Ackley", 2, maximize=maximize)
    above, below = (lines(axes) for axes in draw_trace(campaign).axes)
    steps, ledger = campaign.steps, campaign.optimizer.ledger
    best = max if maximize else min
    told = [[ledger[key].Y or 0.0 for key in step.keys] for step in steps]
    expected = [best(y for step in told[: i + 1] for y in step) for i in range(3)]
    assert above["best outcome"] == expected
    assert above["best posterior mean"] == [step.mean for step in steps]
    assert above["noiseless value there"] == [step.noiseless for step in steps]
    assert ("optimum 0" in above) != maximize  # the least value is known, the largest is not
    assert below["model and choice"] == [step.model_seconds for step in steps]
    assert below["evaluation"] == [step.evaluation_seconds for step in steps]


def test_a_hand_over_is_marked_at_its_step() -> None:
    campaign = run("Ackley", 3, max_exact=5)
    steps, (move,) = campaign.steps, campaign.optimizer.surrogate.model.history
    assert move.observations == 6  # four initial points, and two of steps
    _, below = draw_trace(campaign).axes
    (mark,) = (line for line in below.lines if line.get_label() == f"exact to {move.after}")
    assert list(mark.get_xdata()) == [steps[2].number] * 2
    assert mark.get_label() in [text.get_text() for text in below.get_legend().texts]


def test_failures_leave_gaps_in_the_trace_and_are_counted_on_the_bar() -> None:
    campaign = run("tests.loops.functions:half_forbidden", 6)
    failed = len(campaign.optimizer.ledger.with_status("failed"))
    assert failed > 0
    mean = campaign.steps[-1].mean
    assert mean is not None
    assert best_so_far(campaign) == f"best {mean:.5g}, {failed} failed"
    assert summary(campaign).startswith(f"{10 - failed} outcomes ({failed} failed) in ")
    campaign.steps.insert(0, replace(campaign.steps[0], keys=(), mean=None))
    above, _ = (lines(axes) for axes in draw_trace(campaign).axes)
    assert math.isnan(above["best posterior mean"][0])
    assert math.isnan(above["best outcome"][0])


def test_before_any_step_the_bar_counts_initial_points() -> None:
    objective = find_objective("tests.loops.functions:bowl", None, 0.0, QUICK.bounds, 0)
    campaign = OptimizationCampaign(objective, Optimizer(QUICK), Plan(1))
    events = campaign.run(InProcess(objective))
    next(events), next(events)
    assert best_so_far(campaign) == "2 initial points"
    draw_trace(campaign)
