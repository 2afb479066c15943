"""Posteriors of many points: their variances without their covariance, which is there if asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.models import ModelListGP
from botorch.sampling import SobolQMCNormalSampler

from bo_stream import OSGPR, WISKI, BayesianLastLayer, ClusteredGP, LocalGP
from bo_stream.linalg import LazyCovariance
from bo_stream.models.base import StreamingGP
from bo_stream.process import DENSE_LIMIT
from bo_stream.testing.streams import assert_close
from tests.support.problems import observations

MODELS: dict[str, Callable[..., StreamingGP]] = {
    "OSGPR": OSGPR,
    "LocalGP": LocalGP,
    "ClusteredGP": ClusteredGP,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("batch", "outputs"), [((), 1), ((), 2), ((2,), 2)])
def test_beyond_the_limit_as_below_it(name: str, batch: tuple[int, ...], outputs: int) -> None:
    data = observations(30, 2, outputs, batch)
    model = MODELS[name](data.X, data.Y)
    X = torch.rand(*batch, DENSE_LIMIT + 40, 2, dtype=torch.float64)
    X[..., 40:80, :] = X[..., :40, :]
    noise = 0.1 + torch.rand(*batch, DENSE_LIMIT + 40, outputs, dtype=torch.float64)
    few, many = (
        model.posterior(x, observation_noise=s)
        for x, s in ((X[..., :80, :], noise[..., :80, :]), (X, noise))
    )
    assert_close(many.mean[..., :80, :], few.mean)
    assert_close(many.variance[..., :80, :], few.variance)
    last = [0] if outputs == 1 else [outputs - 1]
    one, other = (
        model.posterior(x, output_indices=last).distribution.covariance_matrix
        for x in (X[..., :80, :], X)
    )
    assert_close(other[..., :80, :80], one)


def test_several_models_at_many_points() -> None:
    data = observations(30, 2)
    models = [kind(data.X, data.Y) for kind in (OSGPR, WISKI, OSGPR)]
    X = torch.rand(DENSE_LIMIT + 8, 2, dtype=torch.float64)
    posterior = ModelListGP(*models).posterior(X)
    for i, model in enumerate(models):
        assert_close(posterior.mean[:, i], model.posterior(X).mean.squeeze(-1))
        assert_close(posterior.variance[:, i], model.posterior(X).variance.squeeze(-1))


def test_a_batch_dimension_more() -> None:
    X = torch.rand(3, 5, 2, dtype=torch.float64)
    lazy = LazyCovariance(X[..., 0], lambda: X @ X.mT, lambda: X.square().sum(-1))
    for dim in (0, 1):
        wider = lazy.unsqueeze(dim)
        assert_close(wider.to_dense(), (X @ X.mT).unsqueeze(dim))
        assert_close(wider.diagonal(dim1=-2, dim2=-1), X.square().sum(-1).unsqueeze(dim))


def test_batch_elements_in_another_order() -> None:
    X = torch.rand(2, 3, 5, 2, dtype=torch.float64)
    lazy, dense = LazyCovariance(X[..., 0], lambda: X @ X.mT, lambda: X.square().sum(-1)), X @ X.mT
    every = slice(None)
    for index in ((1,), ([1, 0],), (every, [2, 0, 1]), (..., every, slice(2, 4)), (0, 1, 2)):
        part = lazy[index]
        part = part if isinstance(part, torch.Tensor) else part.to_dense()
        assert_close(part, dense[index])
    assert isinstance(lazy[:, 1], LazyCovariance)
    for order in ((1, 0), (0, 1)):
        permuted = lazy.permute(*order, -2, -1)
        assert_close(permuted.to_dense(), dense.permute(*order, 2, 3))
        expected = X.square().sum(-1).permute(*order, 2)
        assert_close(permuted.diagonal(dim1=-2, dim2=-1), expected)


@pytest.mark.parametrize("name", MODELS)
def test_samples_and_gradients_beyond_the_limit(name: str) -> None:
    data = observations(30, 2)
    model = MODELS[name](data.X, data.Y)
    X = torch.rand(DENSE_LIMIT + 5, 2, dtype=torch.float64, requires_grad=True)
    posterior = model.posterior(X, observation_noise=True)
    (gradient,) = torch.autograd.grad(posterior.variance.sum(), X)
    (single,) = torch.autograd.grad(model.posterior(X.unsqueeze(-2)).variance.sum(), X)
    assert_close(gradient, single)
    draws = posterior.rsample(torch.Size([200])).detach()
    deviation = draws.std(0) / posterior.variance.detach().sqrt()
    assert float((deviation - 1.0).abs().mean()) < 0.1


def test_more_points_than_a_covariance_could_hold() -> None:
    data = observations(20, 2)
    model = OSGPR(data.X, data.Y)
    X = torch.rand(200_000, 2, dtype=torch.float64)
    with torch.no_grad():
        posterior = model.posterior(X, observation_noise=True)
        few = model.posterior(X[-3:], observation_noise=True)
        assert_close(posterior.variance[-3:], few.variance)
        assert_close(posterior.mean[-3:], few.mean)


LOW_RANK: dict[str, Callable[..., StreamingGP]] = {
    "WISKI": partial(WISKI, bounds=torch.tensor([[-1.0, -1.0], [2.0, 2.0]]), grid_size=10),
    "BayesianLastLayer": BayesianLastLayer,
    "OSGPR": OSGPR,
}


@pytest.mark.filterwarnings("ignore:A not p.d.")  # so many points leave no variance
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("name", LOW_RANK)
def test_acquisition_functions_of_many_points(name: str, outputs: int) -> None:
    """Samples of a sampler, and their cached factor, as those of fewer points."""
    data = observations(30, 2, outputs)
    model = LOW_RANK[name](data.X, data.Y)
    weights = torch.ones(outputs).double() / outputs
    transform = None if outputs == 1 else ScalarizedPosteriorTransform(weights)
    X, candidate = torch.rand(DENSE_LIMIT + 8, 2).double(), torch.rand(1, 2).double()
    for prune in (True, False):
        criterion = qLogNoisyExpectedImprovement(
            model,
            X,
            sampler=SobolQMCNormalSampler(torch.Size([8]), seed=0),
            prune_baseline=prune,
            posterior_transform=transform,
        )
        assert bool(criterion(candidate).isfinite())
    sampler = SobolQMCNormalSampler(torch.Size([512]), seed=0)
    posterior = model.posterior(X)
    draws = sampler(posterior)
    assert draws.shape == (512, len(X), outputs)
    deviation = draws.std(0) / posterior.variance.sqrt()
    assert float((deviation - 1.0).abs().mean()) < 0.1
