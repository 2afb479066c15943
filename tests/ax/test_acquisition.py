"""The best of the observed points: a baseline, and starts of a search."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig
from ax.core.parameter_constraint import ParameterConstraint
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.exceptions.warnings import OptimizationWarning
from botorch.optim.optimize import optimize_acqf
from torch import Tensor

from bo_stream import OSGPR
from bo_stream.ax.acquisition import (
    BASELINE,
    FARTHEST,
    INCUMBENTS,
    best_observed,
    most_promising,
    near_and_far,
    violation_of,
    with_starts,
)
from tests.ax.experiments import (
    NEARLY_WITHOUT_NOISE,
    acquisition_of,
    adapter_of,
    loss,
    run,
    started,
)

pytestmark = NEARLY_WITHOUT_NOISE

SEARCH = "ax.generators.torch.botorch_modular.acquisition.optimize_acqf"


class PeakBesideAHill(AcquisitionFunction):
    """A peak of width 0.02 and height 9 at the middle, a hill of height 1 at a corner."""

    def forward(self, X: Tensor) -> Tensor:
        peak = (X - 0.5).square().sum((-1, -2)) / (2.0 * 0.02**2)
        hill = (1.0 - X).square().sum((-1, -2))
        return 9.0 * torch.exp(-peak) + torch.exp(-hill)


def test_a_narrow_peak_beside_a_leader_is_found() -> None:
    bounds = torch.tensor([[0.0] * 6, [1.0] * 6], dtype=torch.float64)
    incumbents = torch.full((2, 6), 0.5, dtype=torch.float64)
    incumbents[0, 0], incumbents[1] = 0.51, 0.9
    acqf = PeakBesideAHill(OSGPR(incumbents, incumbents[:, :1]))
    options = with_starts({"num_restarts": 4, "raw_samples": 128}, bounds, incumbents)
    torch.manual_seed(0)
    point, value = optimize_acqf(acqf, bounds, 1, **options)
    assert float(value) > 9.0
    assert float((point - 0.5).abs().max()) < 0.02


def test_a_search_is_not_repeated_because_one_line_search_ended_early() -> None:
    bounds = torch.tensor([[0.0] * 6, [1.0] * 6], dtype=torch.float64)
    incumbents, calls = torch.full((1, 6), 0.5, dtype=torch.float64), list[int]()

    def search(X: Tensor, acqf: AcquisitionFunction, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append(len(X))
        warnings.warn("ABNORMAL", OptimizationWarning, stacklevel=2)
        return X, acqf(X)

    options = with_starts({"num_restarts": 4, "raw_samples": 16}, bounds, incumbents)
    acqf = PeakBesideAHill(OSGPR(incumbents, incumbents[:, :1]))
    optimize_acqf(acqf, bounds, 1, gen_candidates=search, **options)
    assert calls == [4]


def test_points_fill_the_box_and_the_neighbourhood_of_leaders() -> None:
    bounds = torch.tensor([[-2.0, 0.0, 5.0], [4.0, 1e-3, 1e6]], dtype=torch.float64)
    incumbents = bounds[0] + (bounds[1] - bounds[0]) * torch.tensor(
        [[0.5, 0.5, 1.0], [0.2, 0.9, 0.0]]
    )
    draw = near_and_far(bounds, incumbents)
    points = draw(1001, 2, 3)
    assert points.shape == (1001, 2, 3)
    assert bool(((points >= bounds[0]) & (points <= bounds[1])).all())
    far, near = ((points - bounds[0]) / (bounds[1] - bounds[0])).split([501, 500])
    assert bool(((far < 0.2).any(0) & (far > 0.8).any(0)).all())
    unit = (incumbents - bounds[0]) / (bounds[1] - bounds[0])
    apart = (near.unsqueeze(-2) - unit).abs().amax(-1).amin(-1)
    assert 0.3 < float((apart < 0.03).double().mean()) < 0.8
    assert float(apart.max()) < 6.0 * FARTHEST
    torch.testing.assert_close(draw(1001, 2, 3), points, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("acquisition", ["qLogNEI", "qUCB"])
def test_searches_for_the_best_outcome_start_there(
    acquisition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = watch_searches(monkeypatch)
    client = started(acquisition=acquisition, search={"num_restarts": 2, "raw_samples": 8})
    run(client, 5)
    assert len(given) == 2
    for options in given:
        assert options["num_restarts"] == 2
        assert options["generator"](8, 1, 0).shape == (8, 1, 2)
    assert INCUMBENTS < 8


@pytest.mark.parametrize("reason", ["constraint", "variance", "choice"])
def test_other_searches_have_their_own_starts(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = watch_searches(monkeypatch)
    options: dict[str, Any] = {"acquisition": "FeatureNIPV"} if reason == "variance" else {}
    ranges = [
        RangeParameterConfig(name=name, bounds=(0.0, 1.0), parameter_type="float") for name in "ab"
    ]
    choice = ChoiceParameterConfig(name="c", values=[1, 2], parameter_type="int", is_ordered=True)
    parameters = [*ranges, choice] if reason == "choice" else ranges
    client = started(parameters, **options)
    if reason == "constraint":
        space = client._experiment.search_space
        space.set_parameter_constraints([ParameterConstraint(inequality="a + b <= 1.5")])
    run(client, 4)
    assert all("generator" not in options for options in given)
    assert bool(given) == (reason != "choice")


def watch_searches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list that receives the options of each search in a box."""
    given: list[dict[str, Any]] = []

    def watched(*args: Any, **options: Any) -> Any:
        given.append(options)
        return optimize_acqf(*args, **options)

    monkeypatch.setattr(SEARCH, watched)
    return given


def test_the_most_promising_points() -> None:
    values = torch.tensor([[3.0, 0.0], [0.0, 3.0], [2.0, 2.0], [1.0, 1.0], [9.0, 9.0], [2.5, 0.0]])
    violation = violation_of(
        torch.tensor([[0.0], [0.0], [0.0], [0.0], [2.0], [0.0]]),
        (torch.tensor([[1.0]]), torch.tensor([[1.0]])),
    )
    assert violation.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    order = most_promising(values, violation).tolist()
    assert set(order[:3]) == {0, 1, 2}
    assert order[-1] == 4
    assert most_promising(values[:, :1], violation).tolist()[0] == 0


@pytest.mark.integration
def test_the_baseline_has_a_fixed_size() -> None:
    client = started(acquisition="qLogNEI", refit=0.0)
    run(client, 4)
    for _ in range(BASELINE + 20):
        a, b = torch.rand(2).tolist()
        parameters = {"a": 2.0 * a, "b": 2.0 * b - 1.0}
        client.complete_trial(client.attach_trial(parameters), {"loss": loss(parameters)})
    client.get_next_trials(1)
    assert len(acquisition_of(client).X_observed) == BASELINE


def test_the_best_observed_point_is_known_from_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    client = started()
    run(client, 5)
    generator: Any = adapter_of(client).generator
    elsewhere: list[Any] = []
    monkeypatch.setattr(
        "bo_stream.ax.strategy.best_observed", lambda *given: elsewhere.append(given)
    )
    asked: list[dict[str, Any]] = []
    best_point = type(generator).best_point

    def recorded(self: Any, **given: Any) -> Any:
        asked.append({**given, "found": best_point(self, **given)})
        return asked[-1]["found"]

    monkeypatch.setattr(type(generator), "best_point", recorded)
    client.get_next_trials(1)
    ((digest, config, found),) = (tuple(each.values()) for each in asked)
    assert elsewhere == []
    torch.testing.assert_close(found, best_observed(generator.surrogate, digest, config))
    best_point(generator, digest, replace(config))
    assert len(elsewhere) == 1
