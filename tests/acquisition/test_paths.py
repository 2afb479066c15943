"""Functions drawn from the posterior: their law, their consistency, and BoTorch's uses of them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.acquisition import PosteriorMean, qSimpleRegret
from botorch.acquisition.objective import LinearMCObjective
from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.models.transforms.input import Normalize
from botorch.models.transforms.outcome import ChainedOutcomeTransform, Log, Standardize
from botorch.optim import optimize_acqf
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.sampling.pathwise import draw_matheron_paths, get_matheron_path_model
from botorch.utils.sampling import optimize_posterior_samples
from torch import Tensor

from bo_stream import OSGPR, WISKI, AutoGP
from bo_stream.acquisition import mean_path, sample_paths
from bo_stream.models.base import StreamingGP
from bo_stream.testing.streams import assert_close, assert_gradient, joint_covariance
from tests.acquisition.examples import small_model, some
from tests.support.smooth_points import smooth_points

UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
DRAWS = 20_000


def points(*shape: int) -> Tensor:
    return torch.rand(*shape, 2, dtype=torch.float64)


def logarithmic(outputs: int) -> ChainedOutcomeTransform:
    return ChainedOutcomeTransform(log=Log(), standardize=Standardize(outputs))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"outcome_transform": None},
    "transforms": {"input_transform": Normalize(2, bounds=UNIT * 1.0)},
    "truncated": {"tolerance": 1e-4},
}


@pytest.fixture(params=[1, 2], ids=["one output", "two outputs"])
def outputs(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=OPTIONS)
def model(request: pytest.FixtureRequest, outputs: int) -> WISKI:
    return small_model(some(outputs=outputs), **OPTIONS[request.param])


def assert_drawn_from(draws: Tensor, posterior: GPyTorchPosterior) -> None:
    """Moments of ``n x q x m`` draws are the posterior's, within five standard errors."""
    mean, covariance = posterior.mean, joint_covariance(posterior)
    variance = posterior.variance
    bound = 5.0 * (variance / draws.shape[0]).sqrt()
    assert bool(((draws.mean(0) - mean).abs() <= bound).all())
    residual = (draws - mean).mT.unsqueeze(-1)
    found = (residual * residual.mT).mean(0)
    products = variance.mT.unsqueeze(-1) * variance.mT.unsqueeze(-2)
    bound = 5.0 * ((products + covariance.square()) / draws.shape[0]).sqrt()
    assert bool(((found - covariance).abs() <= bound).all())


class TestLaw:
    def test_is_the_posterior(self, model: WISKI) -> None:
        X = points(4)
        draws = sample_paths(model, DRAWS, seed=1)(X)
        assert draws.shape == (DRAWS, 4, model.num_outputs)
        assert_drawn_from(draws, model.posterior(X))

    def test_is_the_posterior_given_what_is_hypothetical(self) -> None:
        model = small_model(some())
        conditioned = model.condition_on_observations(points(3), 10.0 * points(3)[:, :1])
        draws = sample_paths(conditioned, DRAWS, seed=1)(points(4))
        X = points(4)
        assert_drawn_from(sample_paths(conditioned, DRAWS, seed=1)(X), conditioned.posterior(X))
        assert float((draws.mean(0) - model.posterior(X).mean).abs().max()) > 0.1

    def test_is_the_posterior_of_each_of_a_batch_that_is_hypothetical(self) -> None:
        Y = torch.tensor([0.0, 5.0, 10.0]).double().view(3, 1, 1).expand(3, 2, 1)
        conditioned = small_model(some()).condition_on_observations(points(3, 2), Y)
        draws = sample_paths(conditioned, DRAWS, seed=1)(X := points(4))
        assert draws.shape == (DRAWS, 3, 4, 1)
        assert_drawn_from(draws, conditioned.posterior(X))
        assert draw_matheron_paths(conditioned, torch.Size([3]))(X).shape == (3, 3, 4)

    def test_is_the_prior_before_any_data(self) -> None:
        model, X = small_model(some(0), outcome_transform=None), points(3)
        assert_drawn_from(sample_paths(model, DRAWS, seed=1)(X), model.posterior(X))

    def test_of_a_batch_of_models(self) -> None:
        model, X = small_model(some(batch_shape=(2,))), points(3)
        paths = sample_paths(model, DRAWS, seed=1)
        draws = paths(X)
        assert paths.batch_shape == (DRAWS, 2)
        assert draws.shape == (DRAWS, 2, 3, 1)
        posterior = model.posterior(X.expand(2, 3, 2))
        assert_close(draws.mean(0), posterior.mean, 1e6)
        assert_close(draws.var(0), posterior.variance, 1e6)

    def test_undoes_any_outcome_transform(self, outputs: int) -> None:
        data = some(outputs=outputs)
        model = small_model(data, outcome_transform=logarithmic(outputs))
        draws = sample_paths(model, DRAWS, seed=1)(X := points(3))
        assert bool((draws > 0.0).all())
        torch.testing.assert_close(draws.mean(0), model.posterior(X).mean, rtol=0.01, atol=0.0)


class TestFunction:
    def test_is_one(self, model: WISKI) -> None:
        """The same values in every company, at every call, alone and in a batch."""
        paths, X = sample_paths(model, 3), points(5)
        together = paths(X)
        assert torch.equal(paths(X), together)
        assert_close(paths(X[2:3]), together[:, 2:3])
        assert_close(paths(X.repeat(2, 1)), together.repeat(1, 2, 1))
        assert_close(paths(X.expand(4, 1, 5, 2)), together.expand(4, -1, -1, -1))
        for i in range(3):
            assert_close(paths.path(i)(X), together[i])
        assert_close(paths(torch.stack((X, X.flip(0), X)))[1], together[1].flip(0))

    def test_gradient_is_that_of_differences(self, model: WISKI) -> None:
        paths = sample_paths(model, 3)
        assert_gradient(lambda X: paths(X).sin().sum(), smooth_points(model, 3, 2))

    def test_outlives_changes_of_its_model(self) -> None:
        model, X = small_model(some(), input_transform=Normalize(2, bounds=UNIT * 1.0)), points(4)
        paths = sample_paths(model, 2)
        before, more = paths(X), some(10)
        model.update(more.X, more.Y + 5.0)
        model.covar_module.lengthscale = 2.0
        model.train().eval()
        model.input_transform.bounds.mul_(2.0)
        assert torch.equal(paths(X), before)

    def test_survives_copies(self) -> None:
        paths, X = sample_paths(small_model(some()), 2), points(4)
        for copied in (copy.deepcopy(paths), pickle.loads(pickle.dumps(paths))):
            assert torch.equal(copied(X), paths(X))

    def test_follows_its_seed_alone(self) -> None:
        model, X = small_model(some()), points(4)
        state = torch.get_rng_state()
        first = sample_paths(model, 2, seed=7)(X)
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(3)
        assert torch.equal(sample_paths(model, 2, seed=7)(X), first)
        assert not torch.equal(sample_paths(model, 2, seed=8)(X), first)
        assert not torch.equal(sample_paths(model, 2)(X), sample_paths(model, 2)(X))

    def test_keeps_the_dtype_of_inputs(self) -> None:
        model, X = small_model(some(dtype=torch.float32)), points(4)
        paths = sample_paths(model, 2)
        assert paths(X.float()).dtype == torch.float32
        assert_close(paths(X.float()), paths(X))

    def test_many_at_many_points_share_the_features(self) -> None:
        paths = sample_paths(small_model(some()), 500)
        assert paths(points(2000)).shape == (500, 2000, 1)


class TestModel:
    def test_posterior(self, model: WISKI) -> None:
        paths, X = sample_paths(model, 3), points(3, 4)
        posterior = paths.posterior(X)
        assert_close(posterior.mean, paths(X))
        assert not bool(posterior.variance.any())
        assert paths.num_outputs == model.num_outputs
        assert paths.batch_shape == (3,)

    def test_some_outputs(self) -> None:
        paths, X = sample_paths(small_model(some(outputs=3)), 2), points(4)
        part = paths.subset_output([2, 0])
        assert part.num_outputs == 2
        assert torch.equal(part(X), paths(X)[..., [2, 0]])
        assert torch.equal(part.subset_output([0]).path(1)(X), paths(X)[1, :, [2]])

    def test_is_optimised_one_by_one(self) -> None:
        paths = sample_paths(small_model(some()), 2)
        for acquisition in (PosteriorMean(paths.path(1)), qSimpleRegret(paths.path(1))):
            X, value = optimize_acqf(acquisition, UNIT, 1, num_restarts=3, raw_samples=32)
            assert float(value) >= float(paths.path(1)(points(200)).max()) - 1e-6
            assert_close(paths.path(1)(X).squeeze(), value.squeeze())

    def test_is_optimised_all_at_once(self) -> None:
        paths = sample_paths(small_model(some()), 4)
        X, values = optimize_posterior_samples(paths, UNIT, raw_samples=64, num_restarts=3)
        assert X.shape == (4, 2)
        assert values.shape == (4, 1)
        assert bool((values >= paths(points(200)).amax(1) - 1e-6).all())


class TestBoTorchsPaths:
    def test_are_drawn_from_the_posterior(self, model: WISKI) -> None:
        X = points(4)
        drawn = get_matheron_path_model(model, torch.Size([DRAWS]))
        assert drawn.batch_shape == (DRAWS,)
        assert_drawn_from(drawn(X), model.posterior(X))
        assert get_matheron_path_model(model)(X).shape == (4, model.num_outputs)

    def test_serve_thompson_sampling(self, outputs: int) -> None:
        model = small_model(some(outputs=outputs))
        weights = torch.ones(outputs, dtype=torch.float64)
        acquisition = PathwiseThompsonSampling(model, objective=LinearMCObjective(weights))
        X, value = optimize_acqf(acquisition, UNIT, 3, num_restarts=2, raw_samples=16)
        assert X.shape == (3, 2)
        assert float(value) >= max(float(acquisition(points(3))) for _ in range(20))


@pytest.mark.usefixtures("in_features")  # a truncated mean is the posterior's only there
class TestMean:
    def test_is_the_posterior_mean(self, model: WISKI, outputs: int) -> None:
        X, more = points(4), some(3, outputs=outputs)
        assert_close(mean_path(model)(X), model.posterior(X).mean)
        model.update(more.X, more.Y + 1.0)
        assert_close(mean_path(model)(X), model.posterior(X).mean)

    def test_given_what_is_hypothetical(self) -> None:
        model, X = small_model(some()), points(4)
        conditioned = model.condition_on_observations(points(3), 10.0 * points(3)[:, :1])
        assert_close(mean_path(conditioned)(X), conditioned.posterior(X).mean)

    def test_of_a_batch_of_models(self) -> None:
        model, X = small_model(some(batch_shape=(2,))), points(3)
        assert mean_path(model).batch_shape == (2,)
        assert_close(mean_path(model)(X), model.posterior(X.expand(2, 3, 2)).mean)

    def test_is_the_median_behind_a_logarithm(self) -> None:
        model = small_model(some(), outcome_transform=logarithmic(1))
        posterior = model.posterior(X := points(3))
        spread = 1.0 + posterior.variance / posterior.mean.square()
        assert_close(mean_path(model)(X), posterior.mean / spread.sqrt())


class TestBadInput:
    @pytest.mark.parametrize("n", [0, -1])
    def test_count(self, n: int) -> None:
        with pytest.raises(ValueError, match=f"n to be a whole number of at least 1, got {n}"):
            sample_paths(small_model(some()), n)

    @pytest.mark.parametrize("seed", ["a", -1, 2**63])
    def test_seed(self, seed: Any) -> None:
        with pytest.raises(ValueError, match=r"Expected seed .* got"):
            sample_paths(small_model(some()), 2, seed=seed)

    @pytest.mark.parametrize("spread", [[0.0, 1.0], torch.ones(3), torch.tensor([0.0, torch.nan])])
    def test_spread(self, spread: Any) -> None:
        with pytest.raises(ValueError, match="spread to be a tensor of 2 finite numbers, got"):
            sample_paths(small_model(some()), 2, seed=0, spread=spread)

    def test_inputs(self) -> None:
        paths = sample_paths(small_model(some()), 2)
        with pytest.raises(BotorchTensorDimensionError, match="X of shape"):
            paths(torch.rand(3, 3))
        with pytest.raises(InputDataError, match="outside the box"):
            paths(points(3) + 1.0)


@pytest.mark.parametrize("build", [WISKI, OSGPR, AutoGP])
@pytest.mark.parametrize("at", [None, UNIT])
def test_functions_made_in_inference_mode_can_be_differentiated(
    build: type[StreamingGP], at: Tensor | None, tmp_path: Path
) -> None:
    X = torch.rand(12, 2, dtype=torch.float64)
    model = build(X, X.sum(-1, keepdim=True).sin())
    model.save(tmp_path / "model")
    queries = torch.rand(3, 2, dtype=torch.float64)
    with torch.inference_mode():
        functions = [sample_paths(model, 2, seed=0, at=at), mean_path(model)]
        loaded = build.load(tmp_path / "model")
    values = [lambda Z: loaded.posterior(Z).mean, *functions]
    again = [lambda Z: model.posterior(Z).mean, sample_paths(model, 2, seed=0, at=at)]
    again.append(mean_path(model))
    for value, expected in zip(values, again, strict=True):
        slopes = []
        for each in (value, expected):
            Z = queries.clone().requires_grad_()
            slopes += torch.autograd.grad(each(Z).sum(), Z)
        assert_close(*slopes)
