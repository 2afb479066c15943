"""Inducing points and hyperparameters learned together."""

from __future__ import annotations

import math

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

from bo_stream import OSGPR, AutoGP
from bo_stream.learning import learn_points
from bo_stream.models.lbfgs import LogObjective
from bo_stream.testing.streams import (
    GRADIENT_TOLERANCE,
    assert_close,
    assert_untouched,
    fingerprint,
)
from tests.oracles.inducing import SGPR
from tests.support.problems.inducing import wave


def crowded(n: int = 80, window: int = 200, dtype: torch.dtype = torch.float64) -> OSGPR:
    """A model whose eight points stand too close together, at wrong hyperparameters."""
    X, Y = (part.to(dtype) for part in wave(n, 2))
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2)).to(dtype)
    kernel.base_kernel.lengthscale = 0.4
    Z = 0.5 + 0.2 * X[:8]
    return OSGPR(X, Y, covar_module=kernel, inducing_points=Z, window=window)


def batch_bound(model: OSGPR, X: Tensor, Y: Tensor, Z: Tensor) -> Tensor:
    """Of standardised outcomes, densely."""
    kernel = model.covar_module
    y = (Y - Y.mean()).squeeze(-1) / Y.std() - model.mean_module.constant
    noise = model.likelihood.noise.expand(len(X))
    return SGPR(
        kernel(X).to_dense(), kernel(X, Z).to_dense(), kernel(Z).to_dense(), y, noise
    ).bound()


def test_the_bound_and_its_gradients_are_those_of_batch_sgpr() -> None:
    X, Y = wave(40, 2)
    model = OSGPR(X, Y, inducing_points=X[:6])
    Z = torch.rand(7, 2, dtype=torch.float64, requires_grad=True)
    leaves = [Z, *(p for p in model.parameters() if p.requires_grad)]
    ours = model.bound_at(Z).sum()
    theirs = batch_bound(model, X, Y, Z)
    assert_close(ours.detach(), theirs.detach(), 1e3)
    for one, other in zip(
        torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=GRADIENT_TOLERANCE, atol=GRADIENT_TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_points_and_hyperparameters_reach_a_better_bound_together(dtype: torch.dtype) -> None:
    model = crowded(dtype=dtype)
    before = float(model.bound_at(model.inducing_points.double()).detach())
    moved_alone = crowded(dtype=dtype)
    moved_alone.optimize_points()
    alone = float(moved_alone.bound_at(moved_alone.inducing_points.double()).detach())
    learn_points(model, maxiter=30)
    after = float(model.bound_at(model.inducing_points.double()).detach())
    assert after > alone + 1.0 > before + 1.0
    assert model.inducing_points.dtype == dtype
    assert not model.training


def test_hyperparameters_move_in_their_logarithms_and_points_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = list[LogObjective]()
    make = LogObjective.of
    monkeypatch.setattr(LogObjective, "of", lambda *args: made.append(make(*args)) or made[-1])
    X, Y = wave(40, 2)
    learn_points(OSGPR(X, Y, inducing_points=X[:7]), maxiter=2)
    (objective,) = made
    assert objective.positive.sum() == 3  # two lengthscales and the noise
    assert not objective.positive[-14:].any()  # two coordinates of seven points


def test_afterwards_the_memory_is_the_windows_rows_at_the_new_points() -> None:
    torch.manual_seed(1)
    X, Y = wave(60, 2)
    model = OSGPR(X, Y, inducing_points=X[:9])
    learn_points(model, maxiter=10)
    batch = OSGPR(X, Y, inducing_points=model.inducing_points)
    batch.load_state_dict(model.state_dict())
    test = torch.rand(5, 2, dtype=torch.float64)
    ours, theirs = model.posterior(test), batch.posterior(test)
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(ours.variance, theirs.variance, rtol=1e-6, atol=1e-7)
    assert not torch.equal(model.inducing_points, X[:9])


def test_the_stream_goes_on_and_an_allocator_stays() -> None:
    X, Y = wave(120, 2)
    model = OSGPR(X[:60], Y[:60], max_points=12, window=30)
    learn_points(model, maxiter=5)
    model.update(X[60:], Y[60:])
    learn_points(model, maxiter=5)
    assert model.num_observations == 120
    assert len(model.inducing_points) <= 12
    assert bool(torch.isfinite(model.posterior(X).variance).all())


def test_statistics_alone_lose_nothing() -> None:
    """No points are better than those that the statistics are of; noise may still be learned."""
    model = crowded(window=0)
    before = float(model.bound_at(model.inducing_points).detach())
    learn_points(model, maxiter=20)
    assert float(model.bound_at(model.inducing_points).detach()) >= before


def test_bad_input_changes_nothing() -> None:
    model = crowded()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    Z = model.inducing_points.clone()
    for wrong in (0, 1.5, math.nan, "a"):
        with pytest.raises(ValueError, match="Expected maxiter to be a whole number"):
            learn_points(model, maxiter=wrong)  # type: ignore[arg-type]
    conditioned = model.condition_on_observations(Z[:1], Z[:1, :1])
    with pytest.raises(UnsupportedError, match="learn_points"):
        learn_points(conditioned)
    empty = OSGPR(Z[:0], Z[:0, :1])
    with pytest.raises(ValueError, match="Expected a model with observations"):
        learn_points(empty)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert torch.equal(Z, model.inducing_points)
    assert not conditioned.training


def test_more_points_than_the_model_may_have_are_refused_before_anything_moves() -> None:
    model = crowded().eval()
    model.max_points = 5
    before = fingerprint(model)
    with pytest.raises(ValueError, match="at most max_points = 5 inducing points to learn, got 8"):
        learn_points(model)
    assert_untouched(model, before)


def test_a_failure_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = crowded().eval()
    X, Y = wave(20, 2)
    model.update(X, 9.0 * Y)
    before, Z = model.posterior(X), model.inducing_points.clone()
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def fail(self: OSGPR, Z: Tensor) -> OSGPR:
        raise KeyboardInterrupt

    monkeypatch.setattr(OSGPR, "place_points", fail)
    with pytest.raises(KeyboardInterrupt):
        learn_points(model, maxiter=2)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(Z, model.inducing_points)
    assert not model.training
    assert torch.equal(model.posterior(X).mean, before.mean)
    assert torch.equal(model.posterior(X).variance, before.variance)


def test_only_inducing_points_are_learned() -> None:
    with pytest.raises(UnsupportedError, match="Expected model to be an instance of OSGPR"):
        learn_points(AutoGP(*wave(20, 2)))  # type: ignore[arg-type]
