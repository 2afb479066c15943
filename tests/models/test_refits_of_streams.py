"""Refits along a stream whose first outcomes are all equal."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream import OSGPR, WISKI, AutoGP
from bo_stream.models import fitting
from bo_stream.models.base import StreamingGP
from bo_stream.models.fitting import (
    Values,
    _Fits,
    hyperparameters,
    other_start,
    set_hyperparameters,
)


def fit(model: StreamingGP) -> float:
    """Fit as a user does; returns the log posterior of the hyperparameters."""
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    fit_gpytorch_mll(mll)
    model.train()
    with torch.no_grad():
        value = -float(model.compute_custom_loss(mll)) * model.num_observations
    model.eval()
    return value


def waves(n: int = 25) -> tuple[Tensor, Tensor]:
    X = torch.linspace(0.0, 1.0, n, dtype=torch.float64).unsqueeze(-1)
    return X, (18.0 * X).sin()


@pytest.mark.parametrize(
    ("kind", "offset", "scale"),
    [
        (AutoGP, 0.0, 1.0),
        (OSGPR, 0.0, 1.0),
        (WISKI, 0.0, 1.0),
        (AutoGP, 1e6, 1e-2),
        (OSGPR, 0.0, 1e12),
    ],
)
def test_a_poor_present_start_ends_where_a_fresh_fit_does(
    kind: type[StreamingGP], offset: float, scale: float
) -> None:
    """Values as learned of a plateau: a long lengthscale, and all else noise."""
    X, Y = waves()
    Y = offset + scale * Y
    fresh = fit(kind(X, Y))
    model = kind(X, Y)
    with torch.no_grad():
        model.covar_module.lengthscale = 1.0
        model.likelihood.noise = 1.0
    assert other_start(model)
    assert fit(model) == pytest.approx(fresh, abs=1.0)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Numbers of observations of the fits that evaluate other values than the present ones."""
    numbers: list[float] = []
    losses = _Fits.losses

    def recorded(self: _Fits, values: Values) -> Tensor:
        numbers.append(self.mll.model.num_observations)
        return losses(self, values)

    monkeypatch.setattr(_Fits, "losses", recorded)
    return numbers


def test_of_many_observations_a_poor_start_is_left_and_a_settled_one_is_not_compared(
    compared: list[float],
) -> None:
    X, Y = waves(60)
    Y = Y + 0.1 * torch.randn(60, 1).double()
    fresh = fit(OSGPR(X, Y))
    model = OSGPR(X, Y)
    with torch.no_grad():
        model.covar_module.lengthscale = 1.0
        model.likelihood.noise = 1.0
    assert fit(model) == pytest.approx(fresh, abs=1.0)
    assert len(compared) == 1
    assert fit(model) == pytest.approx(fresh, abs=1.0)
    assert len(compared) == 1  # near an optimum the first values are not evaluated


def test_starts_are_compared_again_of_twice_as_many_observations_or_surprising_ones(
    monkeypatch: pytest.MonkeyPatch, compared: list[float]
) -> None:
    monkeypatch.setattr(fitting, "SETTLED", 0.0)
    X, Y = waves(400)
    Y = Y + 0.1 * torch.randn(400, 1).double()
    model = OSGPR(X[::5], Y[::5])  # 80
    fit(model)
    fit(model)
    assert compared == [80]
    fit(model.update(X[1::10], Y[1::10]))
    assert compared == [80]  # 120 that are alike
    assert model._last_fit is not None
    assert model._last_fit.raced == 80
    surprised = deepcopy(model)
    fit(surprised.update(X[2::20], -Y[2::20]))
    assert compared == [80, 140]
    fit(model.update(X[3::8], Y[3::8]))
    assert compared == [80, 140, 170]


def test_a_fit_goes_on_in_the_features_of_its_first_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First values that are compared, and are worse, have features of their own, for that once."""
    features: list[tuple[str, Any]] = []

    def recorded(name: str) -> Callable[..., Any]:
        verb = getattr(_Fits, name)

        def run(self: _Fits, *args: Any, **kwargs: Any) -> Any:
            features.append((name, getattr(self.mll.model._cache, "learning", None)))
            return verb(self, *args, **kwargs)

        return run

    for name in ("losses", "end"):
        monkeypatch.setattr(_Fits, name, recorded(name))
    X, Y = waves(700)
    Y = Y + 0.1 * torch.randn(700, 1).double()
    model = WISKI(X[:400], Y[:400], bounds=torch.tensor([[0.0], [1.0]]).double())
    fit(model)
    with torch.no_grad():
        model.covar_module.lengthscale = 0.7 * model.covar_module.lengthscale
    features.clear()
    fit(model)
    (first, compared), (second, begun) = features
    assert (first, second) == ("losses", "end")
    assert compared is not None
    assert begun is compared


def test_what_was_learned_is_kept_where_it_is_the_better() -> None:
    X, Y = waves()
    model = OSGPR(X, Y)
    best = fit(model)
    poor = {name: torch.full_like(v, 2.0) for name, v in hyperparameters(model).items()}
    model._first_values = poor
    assert fit(model) >= best - 1e-3


def test_elements_choose_for_themselves() -> None:
    X, Y = waves()
    both = torch.cat((Y, Y.flip(0) + 0.1 * X), -1)
    fresh = OSGPR(X, both)
    mll = ExactMarginalLogLikelihood(fresh.likelihood, fresh)
    fit_gpytorch_mll(mll)
    model = OSGPR(X, both)
    set_hyperparameters(model, hyperparameters(fresh))
    with torch.no_grad():
        lengthscale = model.covar_module.lengthscale.clone()
        lengthscale[1] = 1.0
        noise = model.likelihood.noise.clone()
        noise[1] = 1.0
        model.covar_module.lengthscale, model.likelihood.noise = lengthscale, noise
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    expected = fresh.covar_module.lengthscale.flatten().tolist()
    assert model.covar_module.lengthscale.flatten().tolist() == pytest.approx(expected, rel=0.1)


def test_there_is_one_start_before_anything_is_learned() -> None:
    assert other_start(OSGPR(*waves())) == {}


@pytest.mark.parametrize(
    ("lengthscale", "noise", "smooth"), [(0.5, 1e-3, False), (0.5, 0.5, True), (0.05, 0.5, False)]
)
def test_the_other_start_is_of_the_other_kind(
    lengthscale: float, noise: float, smooth: bool
) -> None:
    model = OSGPR(*waves())
    first = hyperparameters(model)
    with torch.no_grad():
        model.covar_module.lengthscale = lengthscale
        model.likelihood.noise = noise
    start = other_start(model)
    assert start.keys() == first.keys()
    kernel, variance = "covar_module.raw_lengthscale", "likelihood.noise_covar.raw_noise"
    assert torch.equal(start["mean_module.raw_constant"], first["mean_module.raw_constant"])
    assert start[kernel].item() == pytest.approx(first[kernel].item() * (0.3 if smooth else 1.0))
    assert start[variance].item() == pytest.approx(
        first[variance].item() if smooth else max(noise, 0.3)
    )


def test_the_other_start_leaves_known_noise() -> None:
    X, Y = waves()
    model = OSGPR(X, Y, 0.01 * torch.ones_like(Y))
    first = hyperparameters(model)
    fit(model)
    start = other_start(model)
    assert start.keys() == {name for name in first if not name.startswith("likelihood.")}
    assert all(torch.equal(value, first[name]) for name, value in start.items())


def test_elements_have_other_starts_of_their_own() -> None:
    X, Y = waves()
    model = OSGPR(X, torch.cat((Y, Y), -1))
    first = hyperparameters(model)["covar_module.raw_lengthscale"].flatten()
    with torch.no_grad():
        model.covar_module.lengthscale = torch.full((2, 1, 1), 0.5)
        model.likelihood.noise = torch.tensor([[1e-3], [0.5]])
    start = other_start(model)["covar_module.raw_lengthscale"].flatten()
    torch.testing.assert_close(start, first * torch.tensor([1.0, 0.3]))


def test_elements_that_share_their_noise_have_one_start_of_it() -> None:
    X, Y = waves()
    model = OSGPR(X, torch.cat((Y, Y), -1), likelihood=GaussianLikelihood())
    with torch.no_grad():
        model.covar_module.lengthscale = torch.tensor([0.5, 0.01]).view(2, 1, 1)
        model.likelihood.noise = 0.5
    start = other_start(model)
    assert {name: value.shape for name, value in start.items()} == {
        name: value.shape for name, value in hyperparameters(model).items()
    }
