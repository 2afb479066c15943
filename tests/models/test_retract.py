"""What is taken out of a model was in it, and what is left is of the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from bo_stream import OSGPR, WISKI, AutoGP, BayesianLastLayer, ClusteredGP
from bo_stream.models.base import StreamingGP
from bo_stream.testing.streams import assert_close, moments

BOX = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
OF_SUMS: dict[str, Callable[..., StreamingGP]] = {
    "WISKI": partial(WISKI, bounds=BOX, grid_size=8),
    "OSGPR": OSGPR,
    "ClusteredGP": ClusteredGP,
    "BayesianLastLayer": BayesianLastLayer,
}


def observed(n: int) -> tuple[Tensor, Tensor]:
    X = torch.rand(n, 2, dtype=torch.float64)
    return X, (3.0 * X).sin().sum(-1, keepdim=True) + 0.1 * torch.randn(n, 1, dtype=torch.float64)


@pytest.mark.parametrize("name", OF_SUMS)
def test_the_others_rounded_beside_a_huge_outcome_are_warned_of(name: str) -> None:
    X, Y = observed(80)
    model, bad = OF_SUMS[name](X, Y), torch.full((1, 1), 1e10, dtype=torch.float64)
    model.update(X[:1], bad)
    with pytest.warns(NumericalWarning, match="Build the model again"):
        model.retract(X[:1], bad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        usual = Y[:1] + 100.0
        OF_SUMS[name](X, Y).update(X[:1], usual).retract(X[:1], usual)
        labels = (torch.arange(80) % 20 == 0).to(Y).unsqueeze(-1)
        ones = labels[:, 0] == 1.0
        OF_SUMS[name](X, labels).retract(X[ones], labels[ones])  # all that are left are equal


def test_rows_lose_nothing_beside_a_huge_outcome() -> None:
    X, Y = observed(30)
    model, bad = AutoGP(X, Y), torch.full((1, 1), 1e10, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.update(X[:1], bad).retract(X[:1], bad).train().eval()
    assert_close(model.outcome_scale(), AutoGP(X, Y).outcome_scale())


@pytest.mark.parametrize("wrong", [0.5, 1e-3])
@pytest.mark.parametrize("name", ["OSGPR", "BayesianLastLayer"])
def test_what_is_not_among_the_rows_is_refused_where_these_are_all(name: str, wrong: float) -> None:
    X, Y = observed(40)
    model: Any = OF_SUMS[name](X, Y)
    before = moments(model, X)
    with pytest.raises(InputDataError, match="never put in"):
        model.retract(X[:3], Y[:3] + wrong)
    assert model.num_observations == 40
    for after, former in zip(moments(model, X), before, strict=True):
        assert_close(after, former)
    model.retract(X[:3], Y[:3])
    assert model.num_observations == len(model.memory.rows) == 37


def test_a_row_that_came_after_forgetting_is_taken_out_although_it_was_there_before() -> None:
    X, Y = observed(20)
    model = AutoGP(X, Y).forget(0.9)
    before = moments(model, X)
    model.update(X[:1], Y[:1]).retract(X[:1], Y[:1])
    for after, former in zip(moments(model, X), before, strict=True):
        assert_close(after, former)
    with pytest.raises(InputDataError, match="forget has scaled them down"):
        model.retract(X[:1], Y[:1])
