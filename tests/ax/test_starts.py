"""A search starts near the best of the observed points, too."""

from __future__ import annotations

import warnings
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
from bo_stream.ax.acquisition import FARTHEST, LEADERS, near_and_far, with_starts
from tests.ax.experiments import NEARLY_WITHOUT_NOISE, run, started

pytestmark = NEARLY_WITHOUT_NOISE

SEARCH = "ax.generators.torch.botorch_modular.acquisition.optimize_acqf"


class PeakBesideAHill(AcquisitionFunction):
    """A peak of width 0.02 and height 9 at the middle, a hill of height 1 at a corner."""

    def forward(self, X: Tensor) -> Tensor:
        """Of ``... x 1 x d``."""
        peak = (X - 0.5).square().sum((-1, -2)) / (2.0 * 0.02**2)
        hill = (1.0 - X).square().sum((-1, -2))
        return 9.0 * torch.exp(-peak) + torch.exp(-hill)


def test_a_narrow_peak_beside_a_leader_is_found() -> None:
    bounds = torch.tensor([[0.0] * 6, [1.0] * 6], dtype=torch.float64)
    leaders = torch.full((2, 6), 0.5, dtype=torch.float64)
    leaders[0, 0], leaders[1] = 0.51, 0.9
    acqf = PeakBesideAHill(OSGPR(leaders, leaders[:, :1]))
    options = with_starts({"num_restarts": 4, "raw_samples": 128}, bounds, leaders)
    torch.manual_seed(0)
    point, value = optimize_acqf(acqf, bounds, 1, **options)
    assert float(value) > 9.0
    assert float((point - 0.5).abs().max()) < 0.02


def test_a_search_is_not_repeated_because_one_line_search_ended_early() -> None:
    bounds = torch.tensor([[0.0] * 6, [1.0] * 6], dtype=torch.float64)
    leaders, calls = torch.full((1, 6), 0.5, dtype=torch.float64), list[int]()

    def search(X: Tensor, acqf: AcquisitionFunction, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append(len(X))
        warnings.warn("ABNORMAL", OptimizationWarning, stacklevel=2)
        return X, acqf(X)

    options = with_starts({"num_restarts": 4, "raw_samples": 16}, bounds, leaders)
    acqf = PeakBesideAHill(OSGPR(leaders, leaders[:, :1]))
    optimize_acqf(acqf, bounds, 1, gen_candidates=search, **options)
    assert calls == [4]


def test_points_fill_the_box_and_the_neighbourhood_of_leaders() -> None:
    bounds = torch.tensor([[-2.0, 0.0, 5.0], [4.0, 1e-3, 1e6]], dtype=torch.float64)
    leaders = bounds[0] + (bounds[1] - bounds[0]) * torch.tensor([[0.5, 0.5, 1.0], [0.2, 0.9, 0.0]])
    draw = near_and_far(bounds, leaders)
    points = draw(1001, 2, 3)
    assert points.shape == (1001, 2, 3)
    assert bool(((points >= bounds[0]) & (points <= bounds[1])).all())
    far, near = ((points - bounds[0]) / (bounds[1] - bounds[0])).split([501, 500])
    assert bool(((far < 0.2).any(0) & (far > 0.8).any(0)).all())
    unit = (leaders - bounds[0]) / (bounds[1] - bounds[0])
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
    assert LEADERS < 8


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
    """The options of each search in a box."""
    given: list[dict[str, Any]] = []

    def watched(*args: Any, **options: Any) -> Any:
        given.append(options)
        return optimize_acqf(*args, **options)

    monkeypatch.setattr(SEARCH, watched)
    return given
