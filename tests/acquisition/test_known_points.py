"""Acquisition functions whose baseline and pending points are evaluated once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.acquisition import (
    AcquisitionFunction,
    LogExpectedImprovement,
    qLogExpectedImprovement,
    qUpperConfidenceBound,
)
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.acquisition.multi_objective.logei import qLogNoisyExpectedHypervolumeImprovement
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.model import Model
from botorch.sampling import SobolQMCNormalSampler
from torch import Tensor

from bo_stream import OSGPR, WISKI
from bo_stream.acquisition import evaluate_known_points_once
from bo_stream.process import PosteriorProcess
from bo_stream.testing.streams import assert_close
from tests.support.problems import observations


def sampler() -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size([16]), seed=0)


def noisy_improvement(model: Model, X: Tensor, prune: bool = False) -> AcquisitionFunction:
    return qLogNoisyExpectedImprovement(model, X, sampler=sampler(), prune_baseline=prune)


def hypervolume(model: Model, X: Tensor) -> AcquisitionFunction:
    return qLogNoisyExpectedHypervolumeImprovement(model, [-1.0, -1.0], X, sampler=sampler())


def improvement(model: Model, X: Tensor) -> AcquisitionFunction:
    return qLogExpectedImprovement(model, best_f=0.1, sampler=sampler())


def confidence_bound(model: Model, X: Tensor) -> AcquisitionFunction:
    return qUpperConfidenceBound(model, beta=2.0, sampler=sampler())


def of_kind(kind: Any, outputs: int) -> Any:
    return kind(*observations(20, 2, outputs).astuple())


def a_list(outputs: int) -> ModelListGP:
    return ModelListGP(of_kind(WISKI, 1), *(of_kind(OSGPR, 1) for _ in range(outputs - 1)))


CASES: dict[str, tuple[Callable[[], Model], Callable[..., AcquisitionFunction]]] = {
    "WISKI, qLogNEI": (lambda: of_kind(WISKI, 1), noisy_improvement),
    "OSGPR, qLogNEI": (lambda: of_kind(OSGPR, 1), noisy_improvement),
    "WISKI, qLogEI": (lambda: of_kind(WISKI, 1), improvement),
    "OSGPR, qUCB": (lambda: of_kind(OSGPR, 1), confidence_bound),
    "WISKI, two outputs, qLogNEHVI": (lambda: of_kind(WISKI, 2), hypervolume),
    "a list, qLogNEHVI": (lambda: a_list(2), hypervolume),
    "a list of one, qLogNEI": (lambda: a_list(1), noisy_improvement),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pending", ["none", "before", "after", "others after"])
def test_values_and_gradients_stay(case: str, pending: str) -> None:
    build, acquisition = CASES[case]
    model, baseline = build(), torch.rand(6, 2, dtype=torch.float64)
    plain, once = acquisition(model, baseline), acquisition(model, baseline)
    first = torch.tensor([[0.2, 0.9]], dtype=torch.float64)
    others = torch.tensor([[0.3, 0.9], [0.5, 0.1]], dtype=torch.float64)
    if pending in ("before", "others after"):
        once.set_X_pending(first)
    assert evaluate_known_points_once(once) is once
    if pending == "after":
        once.set_X_pending(first)
    if pending == "others after":
        once.set_X_pending(others)
    if pending != "none":
        plain.set_X_pending(others if pending == "others after" else first)
    X = torch.rand(4, 2, 2, dtype=torch.float64)
    for actual, expected in zip(evaluated(once, X), evaluated(plain, X), strict=True):
        assert_close(actual, expected, factor=1e3)


def evaluated(acqf: AcquisitionFunction, X: Tensor) -> tuple[Tensor, Tensor]:
    X = X.clone().requires_grad_()
    value = acqf(X)
    (gradient,) = torch.autograd.grad(value.sum(), X)
    return value.detach(), gradient


def prune_with(model: Model, X: Tensor) -> AcquisitionFunction:
    return noisy_improvement(model, X, prune=True)


@pytest.mark.usefixtures("both_spaces")
@pytest.mark.parametrize("acquisition", [prune_with, improvement])
@pytest.mark.parametrize("pending", [0, 4])
def test_features_of_known_points_are_not_asked_for_again(
    acquisition: Callable[..., AcquisitionFunction], pending: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, baseline = of_kind(WISKI, 1), torch.rand(9, 2, dtype=torch.float64)
    acqf = acquisition(model, baseline)
    if pending:
        acqf.set_X_pending(torch.rand(pending, 2, dtype=torch.float64))
    evaluate_known_points_once(acqf)
    counts: list[int] = []
    kind = type(model.process())
    at = kind.at

    def counted(self: PosteriorProcess, X: Tensor) -> Any:
        counts.append(X.shape[:-1].numel())
        return at(self, X)

    monkeypatch.setattr(kind, "at", counted)
    acqf(torch.rand(5, 2, 2, dtype=torch.float64))
    assert counts == [5 * 2]


def test_other_functions_and_other_models_stay() -> None:
    model = of_kind(WISKI, 1)
    for analytic in (LogExpectedImprovement(model, best_f=0.0), improvement(model, model.bounds)):
        assert evaluate_known_points_once(analytic).model is model
    data = observations(20, 2, 1)
    exact = SingleTaskGP(data.X, data.Y)
    assert evaluate_known_points_once(noisy_improvement(exact, data.X[:3])).model is exact
