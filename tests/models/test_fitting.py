"""Refits from several starts."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.optim.core import OptimizationResult
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream import OSGPR, WISKI
from bo_stream.models import fitting, lbfgs
from bo_stream.models.base import StreamingGP
from bo_stream.models.fitting import hyperparameters, relearn, set_hyperparameters


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
def test_the_first_values_lead_out_of_a_poor_maximum(kind: str) -> None:
    model, first = in_a_poor_maximum(kind), hyperparameters(model_of(kind))
    assert lengthscale(model) > 0.5
    poor = model.log_marginal_likelihood().item()
    model._first_values = first
    relearn(model)
    assert lengthscale(model) < 0.2
    assert model.log_marginal_likelihood().item() > poor + 10.0
    assert not model.training


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_loop_that_records_no_gradients_learns(mode: Any) -> None:
    model, other = model_of("WISKI"), model_of("WISKI")
    relearn(model)
    with mode():
        relearn(other)
    assert lengthscale(other) == lengthscale(model)
    assert other.covar_module.lengthscale.requires_grad


def test_the_present_start_is_kept_where_it_is_the_better() -> None:
    poor = hyperparameters(in_a_poor_maximum("WISKI"))
    model = model_of("WISKI")
    relearn(model)
    alone = lengthscale(model)
    model._first_values = poor
    relearn(model)
    assert lengthscale(model) == pytest.approx(alone, rel=1e-2)


def test_a_callback_counts_the_steps_of_all_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, searches, minimize = list[int](), list[int](), lbfgs.minimize_with_timeout

    def counted(*args: Any, **kwargs: Any) -> Any:
        end = minimize(*args, **kwargs)
        searches.append(end.nit)
        return end

    monkeypatch.setattr(lbfgs, "minimize_with_timeout", counted)
    model = in_a_poor_maximum("WISKI")
    model._first_values = hyperparameters(model_of("WISKI"))
    searches.clear()
    fit_gpytorch_mll(
        ExactMarginalLogLikelihood(model.likelihood, model),
        optimizer_kwargs={"callback": lambda _, result: seen.append(result.step)},
    )
    assert len(searches) > 1
    assert seen == list(range(1, sum(searches) + 1))


@pytest.mark.parametrize("better", ["present", "first"])
def test_points_are_placed_for_the_hyperparameters_that_are_kept(better: str) -> None:
    X, Y = waves()
    poor, good = hyperparameters(in_a_poor_maximum("OSGPR")), hyperparameters(model_of("OSGPR"))
    model = OSGPR(X, Y)
    present, model._first_values = (good, poor) if better == "present" else (poor, good)
    set_hyperparameters(model, present)
    relearn(model)
    Z = model.inducing_points
    assert lengthscale(model) < 0.2
    assert torch.equal(Z, model.update(X[:0], Y[:0]).inducing_points)
    left = model.process().basis.residual_variance(X)
    assert float(left.max()) <= 1e-8  # all rows are among the points, or determined by them


@pytest.mark.parametrize("fails", ["present", "first"])
def test_a_start_that_leads_nowhere_costs_nothing(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, fit = in_a_poor_maximum("WISKI"), fitting.fit_to_stall
    good = hyperparameters(model_of("WISKI"))
    poor, starts = lengthscale(model), list[float]()
    model._first_values = good
    if fails == "first":
        set_hyperparameters(model, good)
        model._first_values = hyperparameters(in_a_poor_maximum("WISKI"))

    def fail_once(mll: MarginalLogLikelihood, **kwargs: Any) -> OptimizationResult:
        starts.append(lengthscale(mll.model))
        if starts[-1] == pytest.approx(poor):
            raise NotPSDError("no luck")
        return fit(mll, **kwargs)

    monkeypatch.setattr(fitting, "fit_to_stall", fail_once)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        relearn(model)
    assert len(starts) == 3
    assert not model.numerical_log
    assert lengthscale(model) < 0.2


def noisy_at_first(kind: str, missed: bool = True) -> StreamingGP:
    """Built with long lengthscales and much noise, from which a fit explains waves by noise."""
    model = model_of(kind)
    with torch.no_grad():
        model.covar_module.lengthscale = 0.8
        model.likelihood.noise = 0.3
    if missed:
        model._first_values = hyperparameters(model)
    return model


@pytest.mark.parametrize("kind", ["WISKI", "OSGPR"])
def test_a_first_fit_finds_waves_that_are_noise_to_longer_lengthscales(kind: str) -> None:
    alone, found = noisy_at_first(kind, missed=False), noisy_at_first(kind)
    relearn(alone)
    relearn(found)
    assert lengthscale(alone) > 0.5
    assert lengthscale(found) < 0.2
    gained = found.log_marginal_likelihood() - alone.log_marginal_likelihood()
    assert gained.item() > 10.0


def test_each_output_keeps_the_better_of_its_first_fits() -> None:
    X, Y = waves()
    Y = torch.cat((Y, 0.3 * Y + X), -1)  # of which the trend is more than the waves
    fitted = []
    for first in ({}, None):
        model = WISKI(X, Y, grid_size=60)
        with torch.no_grad():
            model.covar_module.lengthscale = torch.full((2, 1, 1), 0.8)
            model.likelihood.noise = torch.full((2, 1), 0.3)
        model._first_values = hyperparameters(model) if first is None else first
        relearn(model)
        fitted.append(model.log_marginal_likelihood().detach())
    alone, found = fitted
    assert bool((found >= alone - 0.1).all())
    assert float((found - alone).max()) > 10.0


def test_seconds_are_for_all_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that runs on by three seconds a fit, and a limit of five."""
    model, seconds, now = in_a_poor_maximum("WISKI"), list[float](), [0.0]
    model._first_values = hyperparameters(model_of("WISKI"))

    def fit(mll: MarginalLogLikelihood, **kwargs: Any) -> OptimizationResult:
        seconds.append(kwargs.pop("timeout_sec"))
        now[0] += 3.0
        return fitting.fit_to_stall(mll, **kwargs)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    mll = ExactMarginalLogLikelihood(model.likelihood, model.train())
    fitting.fit_from_both(fit, fitting.other_start(model), mll, timeout_sec=5.0)
    assert seconds == [5.0, 2.0]


def raced(model: StreamingGP, X: Tensor, Y: Tensor) -> bool:
    """Whether a refit after some more rows began at two starts."""
    starts = 0

    def fit(mll: MarginalLogLikelihood, **kwargs: Any) -> OptimizationResult:
        nonlocal starts
        starts += kwargs["options"].get("maxiter") == fitting.RACE
        return fitting.fit_to_stall(mll, **kwargs)

    model.update(X, Y)
    mll = ExactMarginalLogLikelihood(model.likelihood, model.train())
    start = fitting.other_start(model)
    assert start
    fitting.fit_from_both(fit, start, mll)
    model.eval()
    return starts == 2


def test_refits_begin_at_two_starts_again_after_a_tenth_more_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(40, 1, generator=generator, dtype=torch.float64)
    Y = (9.0 * X).sin() + 0.1 * torch.randn(40, 1, generator=generator, dtype=torch.float64)
    model = OSGPR(X[:20], Y[:20], inducing_points=X[:20])
    with torch.no_grad():
        model.covar_module.lengthscale = 0.2
        model.likelihood.noise = 0.02
    rows = [(X[i : i + 1], Y[i : i + 1]) for i in range(20, 30)]
    assert raced(model, *rows[0])  # 21: the first
    last = model._last_fit
    assert last is not None
    assert [raced(model, *row) for row in rows[1:4]] == [False, False, True]  # 22, 23, 24 rows
    model._last_fit = last
    assert raced(model, *rows[4])  # the last fit ended elsewhere: nothing is known of a race
    assert model._last_fit is not None
    model._last_fit = replace(model._last_fit, raced=100.0)
    assert raced(model, *rows[5])  # of more rows than there are now, 26


def test_a_saved_model_is_refitted_as_the_model(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(160, 1, generator=generator, dtype=torch.float64)
    Y = (9.0 * X).sin() + 0.1 * torch.randn(160, 1, generator=generator, dtype=torch.float64)
    model = OSGPR(X[:100], Y[:100], inducing_points=X[:20])
    relearn(model)
    model.save(tmp_path / "model.bo_stream")
    other = OSGPR.load(tmp_path / "model.bo_stream")
    assert other._last_fit is not None
    for each in (model, other):
        relearn(each.update(X[100:], Y[100:]))
    for name, value in hyperparameters(model).items():
        assert torch.equal(value, hyperparameters(other)[name])


def test_hyperparameters_are_copies() -> None:
    model = model_of("WISKI")
    values = hyperparameters(model)
    with torch.no_grad():
        model.covar_module.lengthscale = 3.0
    assert lengthscale(model) == pytest.approx(3.0)
    set_hyperparameters(model, values)
    assert lengthscale(model) == pytest.approx(lengthscale(model_of("WISKI")))
