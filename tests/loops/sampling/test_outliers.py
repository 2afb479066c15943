from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from bo_stream import WISKI
from bo_stream.bases.kernels import as_product
from bo_stream.loops.models import KERNELS
from bo_stream.loops.sampling.state import leave_outliers_out, most_outliers
from bo_stream.models.fitting import relearn

SITE = 60
"""Far from the edges of the box."""
NOISE = 0.1

pytestmark = [
    pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short"),
    pytest.mark.usefixtures("whole_fits"),
]


def sites(n: int, seed: int = 0) -> Tensor:
    return torch.rand(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def smooth(X: Tensor, seed: int = 0) -> Tensor:
    """A wave with independent noise."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(X), 1, dtype=X.dtype, generator=generator)
    return (4.0 * X[:, :1]).sin() * (3.0 * X[:, 1:]).cos() + NOISE * noise


def field(n: int, artefact: float = 0.0) -> tuple[Tensor, Tensor]:
    """A wave, with a site in the middle that is so many sd of the outcomes off."""
    X = sites(n)
    X[SITE] = 0.5
    Y = smooth(X)
    Y[SITE] += artefact * Y.std()
    return X, Y


def model_of(X: Tensor, Y: Tensor) -> WISKI:
    box = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=X.dtype)
    kernel = as_product(KERNELS["matern52"](2).to(X), 2)
    return WISKI(X, Y, covar_module=kernel, bounds=box, grid_size=16)


def refit(
    model: WISKI, X: Tensor, Y: Tensor, outliers: Sequence[int] = (), threshold: float = 7.0
) -> list[int]:
    """As the loop does it."""
    relearn(model)
    return leave_outliers_out(model, X, Y, outliers, threshold)


def noise_sd(model: WISKI) -> float:
    """In units of the data."""
    return float((model.noise_level().sqrt() * model.outcome_scale()).detach().squeeze())


@pytest.mark.parametrize("n", [120, 320], ids=["as rows", "on the grid"])
def test_an_artefact_does_not_raise_the_noise(n: int) -> None:
    X, Y = field(n, artefact=10.0)
    kept = model_of(X, Y)
    relearn(kept)
    model = model_of(X, Y)
    assert refit(model, X, Y) == [SITE]
    rest = torch.arange(n) != SITE
    clean = model_of(X[rest], Y[rest])
    relearn(clean)
    assert model.num_observations == n - 1
    assert noise_sd(clean) == pytest.approx(NOISE, rel=0.3)
    assert noise_sd(model) == pytest.approx(noise_sd(clean), rel=0.2)
    assert noise_sd(kept) > 2.0 * noise_sd(clean)


def test_without_outliers_nothing_is_changed() -> None:
    X, Y = field(150)
    plain, screened = model_of(X, Y), model_of(X, Y)
    relearn(plain)
    assert refit(screened, X, Y) == []
    posteriors = [model.posterior(sites(9, seed=1)) for model in (plain, screened)]
    assert torch.equal(posteriors[0].mean, posteriors[1].mean)
    assert torch.equal(posteriors[0].variance, posteriors[1].variance)


def test_a_steep_slope_is_no_outlier() -> None:
    """A cliff of twenty noise deviations, which a site in seven lies on."""
    X = sites(300)
    Y = smooth(X) + torch.sigmoid((X[:, :1] - 0.5) / 0.03) * 20.0 * NOISE
    assert refit(model_of(X, Y), X, Y) == []


def test_an_outlier_returns_once_others_beside_it_agree() -> None:
    """A site alone on a hill, until the hill is looked at."""
    X, Y = field(150, artefact=10.0)
    model = model_of(X, Y)
    outliers = refit(model, X, Y)
    assert outliers == [SITE]
    beside = X[SITE] + 0.2 * (sites(40, seed=2) - 0.5)
    slope = 1.0 - 0.5 * (beside - X[SITE]).norm(dim=-1, keepdim=True) / 0.1
    level = Y[SITE] * slope + smooth(beside, seed=3)
    model.update(beside, level)
    X, Y = torch.cat((X, beside)), torch.cat((Y, level))
    assert refit(model, X, Y, outliers) == []
    assert model.num_observations == 190


def test_at_most_one_in_a_hundred_is_an_outlier() -> None:
    X, Y = field(299)
    Y[::20] += 10.0 * Y.std()
    model = model_of(X, Y)
    assert len(refit(model, X, Y, threshold=3.0)) == 2


def test_one_of_fewer_than_two_hundred_is_an_outlier() -> None:
    numbers = (19, 20, 99, 199, 200, 299, 300)
    assert [most_outliers(n) for n in numbers] == [0, 1, 1, 1, 2, 2, 3]
    X, Y = field(99, artefact=10.0)
    assert refit(model_of(X, Y), X, Y) == [SITE]


def test_observations_without_noise() -> None:
    X = sites(150)
    Y = (4.0 * X[:, :1]).sin()
    model = model_of(X, Y)
    assert refit(model, X, Y) == []
    assert model.num_observations == 150


def test_rows_that_cannot_be_left_out_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding can hide what the others leave to an observation: no run ends of that."""
    X, Y = field(150, artefact=10.0)
    model = model_of(X, Y)

    def fail(*args: object) -> None:
        raise InputDataError("Expected observations that are in memory.")

    monkeypatch.setattr("bo_stream.loops.sampling.state.leave_one_out", fail)
    assert refit(model, X, Y) == []
    assert model.num_observations == 150
    assert "rounding hides" in str(next(iter(model.numerical_log)))
