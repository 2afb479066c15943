"""The objective of a fit: the marginal likelihood in a space that stays while lengthscales do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream import WISKI
from bo_stream.models.wiski import cache
from bo_stream.models.wiski.cache import FEW_FEATURES, RADIUS
from bo_stream.models.wiski.memory import StreamMemory
from bo_stream.testing.streams import assert_close
from tests.oracles.interpolation import interpolation_weights, largest_eigenvectors, node_inputs
from tests.oracles.kernels import dense_kernel
from tests.oracles.reference import reference
from tests.support.problems import Observations, kernel, observations

pytestmark = [
    pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid"),
    pytest.mark.usefixtures("in_features"),
]


@pytest.fixture(autouse=True, params=[FEW_FEATURES, 0], ids=["few features", "many features"])
def _few_features(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few features have a prior covariance, many are whitened again."""
    monkeypatch.setattr(cache, "FEW_FEATURES", request.param)


def loss_of(model: WISKI) -> Tensor:
    return model.compute_custom_loss(ExactMarginalLogLikelihood(model.likelihood, model)).sum()


def stretch(model: WISKI, factor: float) -> None:
    """Multiply all lengthscales, and change all that does not move the space."""
    for part in model.covar_module.modules():
        if isinstance(part, Kernel) and part.has_lengthscale:
            part.lengthscale = factor * part.lengthscale.detach()
    model.covar_module.outputscale = 1.3 * model.covar_module.outputscale.detach()
    model.likelihood.noise = 0.7 * model.likelihood.noise.detach()
    model.mean_module.constant.data.add_(0.2)


def dense_loss(model: WISKI, data: Observations, **options: Any) -> Tensor:
    dense = reference(model, *data.astuple(), **options).log_marginal_likelihood()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    return -mll._add_other_terms(dense.clone(), []).sum() / len(data)


def assert_gradients(model: WISKI, own: Tensor, dense: Tensor) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    actual = torch.autograd.grad(own, parameters)
    expected = torch.autograd.grad(dense, parameters)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, factor=10)


@pytest.mark.parametrize("factor", [0.95, 1.2, 0.4, 3.0])
@pytest.mark.parametrize("outputs", [1, 2])
def test_the_whole_space_is_the_marginal_likelihood_wherever_it_is_centred(
    factor: float, outputs: int
) -> None:
    """A rough kernel keeps every eigenvector, so that the space is the same everywhere."""
    data = observations(18, 2, outputs).with_noise("mixed")
    shape = (outputs,) if outputs > 1 else ()
    rough = ScaleKernel(kernel("Matérn-1/2", 2, shape), batch_shape=torch.Size(shape)).double()
    model = WISKI(*data.astuple(), covar_module=rough, grid_size=(7, 8))
    for changes in (0, 1, 2):
        if changes > 0:
            stretch(model, factor)
        own, dense = loss_of(model), dense_loss(model, data)
        assert_close(own, dense)
        assert_gradients(model, own, dense)


def test_a_part_of_the_space_stays_while_lengthscales_move_little() -> None:
    """``P K(θ) P`` with P of the centre, until the lengthscales are too far from it."""
    data = observations(18)
    model = WISKI(*data.astuple(), covar_module=kernel("scaled", 2), grid_size=(7, 8), max_rank=25)
    model.eval()
    loss_of(model)
    centre = largest_eigenvectors(model.covar_module, model.bounds, model.grid_size, 25)
    stretch(model, math.exp(0.9 * RADIUS))
    K = node_covariance(model)
    restricted = centre @ (centre.mT @ K @ centre) @ centre.mT
    own, dense = loss_of(model), dense_loss(model, data, kernel=interpolating(model, restricted))
    assert_close(own, dense)
    assert_gradients(model, own, dense)
    stretch(model, math.exp(0.2 * RADIUS))
    own, dense = loss_of(model), dense_loss(model, data, rank=25)
    assert_close(own, dense)
    assert_gradients(model, own, dense)


def test_features_beyond_the_space_count_as_white_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their mean prior variance at the observations, under the kernel of the moment."""
    monkeypatch.setattr(cache, "LEARNING_RANK", 12)
    monkeypatch.setattr(cache, "LEFT_OUT", 1e3)
    monkeypatch.setattr(cache, "MOST_LEFT_OUT", 1e3)
    data = observations(18)
    model = WISKI(*data.astuple(), covar_module=kernel("scaled", 2), grid_size=(7, 8), max_rank=25)
    model.eval()
    loss_of(model)
    centre = largest_eigenvectors(model.covar_module, model.bounds, model.grid_size, 25)
    for factor in (1.0, math.exp(0.9 * RADIUS)):
        stretch(model, factor)
        own, dense = loss_of(model), dense_loss_with_white_noise(model, data, centre, 12)
        assert_close(own, dense)
        assert_gradients(model, own, dense)


def dense_loss_with_white_noise(
    model: WISKI, data: Observations, centre: Tensor, rank: int
) -> Tensor:
    K = node_covariance(model)
    space, beyond = centre[:, :rank], centre[:, rank:]
    restricted = space @ (space.mT @ K @ space) @ space.mT
    dense = reference(model, *data.astuple(), kernel=interpolating(model, restricted))
    W = interpolation_weights(data.X, model.bounds, model.grid_size)
    left_out = ((W @ beyond).square() * (beyond * (K @ beyond)).sum(0)).sum(-1).mean()
    likelihood = replace(dense, noise=dense.noise + left_out).log_marginal_likelihood()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    return -mll._add_other_terms(likelihood.clone(), []).sum() / len(data)


def test_the_space_has_as_many_features_as_the_noise_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Less noise, more features; the objective stays near that of the whole space."""
    monkeypatch.setattr(cache, "LEARNING_RANK", 5)
    data = observations(18)
    model = WISKI(*data.astuple(), covar_module=kernel("scaled", 2), grid_size=(7, 8))
    ranks = []
    for noise in (0.3, 0.03, 1e-3):
        model.likelihood.noise = noise
        own, dense = loss_of(model).detach(), dense_loss(model, data).detach()
        assert 0.0 < float((own - dense).abs()) < cache.MOST_LEFT_OUT
        assert model._cache.learning is not None
        ranks.append(model._cache.learning.basis.rank)
    assert 5 < ranks[0] < ranks[1] < ranks[2]


def test_the_space_ends_with_the_fit() -> None:
    """It is large, and neither copied nor saved with the model."""
    model = WISKI(*observations(18).astuple(), covar_module=kernel("scaled", 2), grid_size=(7, 8))
    model.train()
    loss_of(model)
    assert model._cache.learning is not None
    model.eval()
    assert model._cache.learning is None


@pytest.mark.parametrize("noise", ["learned", "mixed"])
@pytest.mark.parametrize("name", ["scaled", "additive"])
def test_squares_beyond_the_space_are_a_diagonal_of_the_statistics(name: str, noise: str) -> None:
    """Of observations with learned noise, on all grids of the memory."""
    data = observations(18).with_noise(noise)
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    parts = kernel("scaled", 2) + kernel("scaled", 2) if name == "additive" else kernel(name, 2)
    model = WISKI(*data[:9].astuple(), covar_module=parts, grid_size=7, bounds=bounds)
    model.refine(9)
    model.update(*data[9:].astuple())
    memory = model.memory
    assert isinstance(memory, StreamMemory)
    assert len(list(memory)) == 2
    rest = model.inference.basis(memory.grid, model.prior).between(3, 20)
    squares = memory.whitened(rest).learned.gram.diagonal(dim1=-2, dim2=-1)
    assert_close(memory.learned_squares(rest), squares)


def node_covariance(model: WISKI) -> Tensor:
    nodes = node_inputs(model.bounds, model.grid_size)
    return dense_kernel(model.covar_module, nodes, nodes)


def interpolating(model: WISKI, K: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def covariance(X: Tensor, X2: Tensor) -> Tensor:
        W, W2 = (interpolation_weights(x, model.bounds, model.grid_size) for x in (X, X2))
        return W @ K @ W2.mT

    return covariance


def test_new_data_enter_the_objective_at_once() -> None:
    data = observations(24)
    model = WISKI(*data[:10].astuple(), covar_module=kernel("scaled", 2), grid_size=(7, 8))
    loss_of(model)
    model.update(*data[10:14].astuple())
    model.posterior(data.X)
    model.update(*data[14:].astuple()).train()
    assert_close(loss_of(model), dense_loss(model, data))
    model.retract(*data[20:].astuple()).train()
    assert_close(loss_of(model), dense_loss(model, data[:20]))
    model.train()
    assert_close(loss_of(model), dense_loss(model, data[:20]))


@pytest.mark.parametrize("what", ["lengthscale", "outputscale"])
@pytest.mark.parametrize("name", ["scaled", "RBF", "periodic"])
def test_a_hyperparameter_that_underflows_is_no_failure(name: str, what: str) -> None:
    """As a line search may try one."""
    data = observations(18)
    model = WISKI(*data.astuple(), covar_module=kernel(name, 2), grid_size=(7, 8))
    with torch.no_grad():
        for part, parameter in model.covar_module.named_parameters():
            if what in part:
                parameter.fill_(-1e4)
    loss = loss_of(model)
    gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)
