"""A stem learned from a batch."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)

from bo_stream import WISKI, BinomialLikelihood
from bo_stream.bases.kernels import LinearStem, MLPStem, RandomProjection
from bo_stream.learning import pretrain
from bo_stream.testing.streams import assert_close
from tests.support.problems import OpenStem, observations

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")

D = 4
DIRECTION = torch.tensor([0.8, -0.5, 0.1, 0.3], dtype=torch.float64)


def ridge(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A function of one direction, with noise."""
    generator = torch.Generator().manual_seed(seed)
    X = 2.0 * torch.rand(n, D, generator=generator, dtype=torch.float64) - 1.0
    noise = 0.05 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return X, torch.sin(3.0 * X @ DIRECTION).unsqueeze(-1) + noise


def alignment(stem: LinearStem) -> float:
    """Cosine between the stem's only direction and the function's."""
    weight = stem.weight.detach()[0]
    return float((weight @ DIRECTION).abs() / (weight.norm() * DIRECTION.norm()))


def test_the_direction_is_found() -> None:
    X, Y = ridge(150)
    stem = LinearStem(D, 1, seed=1)
    model = WISKI(X, Y, stem=stem, grid_size=24)
    assert alignment(stem) < 0.9
    pretrain(model, X, Y)
    assert alignment(stem) > 0.99
    test_X, test_Y = ridge(200, seed=1)
    assert (model.posterior(test_X).mean - test_Y).square().mean().sqrt() < 0.08


@pytest.mark.parametrize("noise", ["learned", "known", "mixed"])
def test_afterwards_the_memory_is_the_batch_by_the_new_stem(noise: str) -> None:
    data = observations(24, D).with_noise(noise)
    model = WISKI(*data[:15].astuple(), stem=MLPStem(D, 5, 2), grid_size=8, tolerance=0.0)
    pretrain(model, *data.astuple(), maxiter=3)
    assert model.num_observations == 24
    assert_close(
        model.log_marginal_likelihood(), model.batch_log_marginal_likelihood(*data.astuple())
    )
    stem = model.stem
    assert isinstance(stem, MLPStem)
    projected = stem.project(data.X)
    assert_close(stem.centre, projected.mean(0))
    assert_close(stem.spread, projected.std(0))
    assert all(p.grad is None for p in model.parameters())


def test_a_random_projection_learns_hyperparameters_only() -> None:
    data, stem = observations(20, D), RandomProjection(D, 2, seed=0)
    model = WISKI(*data.astuple(), stem=stem, grid_size=8)
    weight, noise = stem.weight.clone(), model.likelihood.noise.item()
    pretrain(model, *data.astuple(), maxiter=3)
    assert torch.equal(stem.weight, weight)
    assert model.likelihood.noise.item() != noise


def test_progress_is_reported() -> None:
    data = observations(12, D)
    model = WISKI(*data.astuple(), stem=LinearStem(D, 1), grid_size=8)
    seen: dict[int, float] = {}
    result = pretrain(model, *data.astuple(), maxiter=4, report=seen.__setitem__)
    assert len(seen) >= 4
    assert list(seen.values())[-1] == pytest.approx(result.fval)


def test_bad_input_changes_nothing() -> None:
    data = observations(12, D)
    model = WISKI(*data.astuple(), stem=LinearStem(D, 1), grid_size=8)
    for error, message, arguments in (
        (InputDataError, "at least 10 points", {"X": data.X[:9], "Y": data.Y[:9]}),
        (ValueError, "maxiter to be a whole", {"X": data.X, "Y": data.Y, "maxiter": 0}),
        (ValueError, "maxiter to be a whole", {"X": data.X, "Y": data.Y, "maxiter": math.nan}),
        (InputDataError, "NaN", {"X": data.X, "Y": data.Y * torch.nan}),
        (BotorchTensorDimensionError, "X of shape", {"X": data.X[:, 0], "Y": data.Y}),
        (BotorchTensorDimensionError, "Y of shape", {"X": data.X, "Y": data.Y[:5]}),
    ):
        with pytest.raises(error, match=message):
            pretrain(model, **arguments)
        assert model.num_observations == 12
    plain = WISKI(data.X[:, :2], data.Y, grid_size=8)
    with pytest.raises(UnsupportedError, match="fit_gpytorch_mll"):
        pretrain(plain, data.X[:, :2], data.Y)
    counts = torch.cat((data.Y.abs().round(), torch.full_like(data.Y, 9.0)), -1)
    stem, likelihood = LinearStem(D, 1), BinomialLikelihood()
    of_counts = WISKI(data.X, counts, likelihood=likelihood, stem=stem, grid_size=8)
    with pytest.raises(UnsupportedError, match=r"normal noise.* got a WISKI with a Binomial"):
        pretrain(of_counts, data.X, counts)
    conditioned = model.condition_on_observations(data.X[:1], data.Y[:1])
    with pytest.raises(UnsupportedError, match="pretrain needs a model of real observations"):
        pretrain(conditioned, data.X, data.Y)


def test_a_stem_that_is_led_out_of_the_grid_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    X, T = torch.rand(30, D).double(), torch.rand(5, D).double()
    Y, stem = X.sum(-1, keepdim=True), OpenStem(D)
    model = WISKI(X[:20], Y[:20], stem=stem, grid_size=8)
    before, state = model.posterior(T), copy.deepcopy(model.state_dict())

    def lead_out(*_: object, parameters: dict[str, torch.Tensor], **__: object) -> None:
        for parameter in parameters.values():
            parameter.data.mul_(3.0)

    monkeypatch.setattr("bo_stream.learning.fit_gpytorch_mll_scipy", lead_out)
    with pytest.raises(InputDataError, match="project into the unit cube"):
        pretrain(model, X, 9.0 * Y)
    assert model.num_observations == 20
    assert not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert_close(model.posterior(T).mean, before.mean)
    assert_close(model.posterior(T).variance, before.variance)
    model.update(X[20:], Y[20:])
