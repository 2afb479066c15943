"""Refits from several starts."""

from __future__ import annotations

import warnings

import pytest
import torch
from botorch.exceptions.errors import ModelFittingError
from torch import Tensor

from bo_stream import OSGPR, WISKI
from bo_stream.models.base import StreamingGP
from bo_stream.models.shell import fitting
from bo_stream.models.shell.fitting import hyperparameters, relearn, set_hyperparameters


def waves() -> tuple[Tensor, Tensor]:
    """A function that is all noise to a kernel with long lengthscales."""
    X = torch.linspace(0.0, 1.0, 25, dtype=torch.float64).unsqueeze(-1)
    return X, (18.0 * X).sin()


def model_of(kind: str) -> StreamingGP:
    X, Y = waves()
    model = WISKI(X, Y, grid_size=60) if kind == "WISKI" else OSGPR(X, Y, inducing_points=X)
    model._first_values = {}  # no other starts than those that are given
    return model


def in_a_poor_maximum(kind: str) -> StreamingGP:
    """Learned from a start from which the waves look like noise."""
    model = model_of(kind)
    with torch.no_grad():
        model.covar_module.lengthscale = 1.0
        model.likelihood.noise = 1.0
    relearn(model)
    return model


def lengthscale(model: StreamingGP) -> float:
    return model.covar_module.lengthscale.item()


@pytest.mark.parametrize("kind", ["WISKI", "OSGPR"])
def test_a_further_start_leads_out_of_a_poor_maximum(kind: str) -> None:
    model, defaults = in_a_poor_maximum(kind), hyperparameters(model_of(kind))
    assert lengthscale(model) > 0.5
    poor = model.log_marginal_likelihood().item()
    relearn(model, [defaults])
    assert lengthscale(model) < 0.2
    assert model.log_marginal_likelihood().item() > poor + 10.0
    assert not model.training


def test_the_present_start_is_kept_where_it_is_the_better() -> None:
    poor = hyperparameters(in_a_poor_maximum("WISKI"))
    model = model_of("WISKI")
    relearn(model)
    alone = lengthscale(model)
    relearn(model, [poor])
    assert lengthscale(model) == pytest.approx(alone, rel=1e-2)


@pytest.mark.parametrize("better", ["first", "last"])
def test_points_are_placed_for_the_hyperparameters_that_are_kept(better: str) -> None:
    X, Y = waves()
    poor, good = hyperparameters(in_a_poor_maximum("OSGPR")), hyperparameters(model_of("OSGPR"))
    model = OSGPR(X, Y)
    model._first_values = {}
    starts = [good, poor] if better == "first" else [poor, good]
    set_hyperparameters(model, starts[0])
    relearn(model, starts[1:])
    Z = model.inducing_points
    assert lengthscale(model) < 0.2
    assert torch.equal(Z, model.update(X[:0], Y[:0]).inducing_points)
    left = model.process().basis.residual_variance(X)
    assert float(left.max()) <= 1e-8  # all rows are among the points, or determined by them


def test_a_start_that_fails_costs_nothing_but_a_line_on_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, learn = in_a_poor_maximum("WISKI"), fitting.learn_hyperparameters
    starts = [hyperparameters(model), hyperparameters(model_of("WISKI"))]

    def fail_once(model: StreamingGP) -> None:
        monkeypatch.setattr(fitting, "learn_hyperparameters", learn)
        model.train()
        raise ModelFittingError("no luck")

    monkeypatch.setattr(fitting, "learn_hyperparameters", fail_once)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        relearn(model, starts[1:])
    assert [event.what for event in model.numerical_log] == ["a refit that failed"]
    assert lengthscale(model) < 0.2


def test_hyperparameters_are_copies() -> None:
    model = model_of("WISKI")
    values = hyperparameters(model)
    with torch.no_grad():
        model.covar_module.lengthscale = 3.0
    assert lengthscale(model) == pytest.approx(3.0)
    set_hyperparameters(model, values)
    assert lengthscale(model) == pytest.approx(lengthscale(model_of("WISKI")))
