"""WISKI with kernels that oscillate or add up, against the dense process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from gpytorch.kernels import (
    Kernel,
    MaternKernel,
    PeriodicKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream import WISKI
from bo_stream.testing.streams import assert_close, joint_covariance
from tests.oracles.reference import reference, reference_posterior
from tests.support.problems import Observations, kernel, observations

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")

SIZES = {1: (14,), 2: (7, 8), 3: (5, 7, 6)}
NAMES = ("periodic", "locally periodic", "spectral mixture", "sum on one input")


def model_of(name: str, data: Observations) -> WISKI:
    """A model with random hyperparameters, each batch element and output with its own."""
    dim, outputs = data.X.shape[-1], data.Y.shape[-1]
    shape = (*data.X.shape[:-2], *([outputs] if outputs > 1 else []))
    covar_module = kernel(name, dim, shape)
    return WISKI(*data.astuple(), covar_module=covar_module, grid_size=SIZES[dim], tolerance=0.0)


def assert_equals_dense(model: WISKI, data: Observations) -> None:
    """Posterior, log marginal likelihood and its gradient in every hyperparameter."""
    T = torch.rand_like(data.X[..., :6, :])
    mean, covariance = reference_posterior(model, data.X, data.Y, T)
    posterior = model.posterior(T)
    assert_close(posterior.mean, mean)
    assert_close(joint_covariance(posterior), covariance)
    own = model.log_marginal_likelihood()
    dense = reference(model, data.X, data.Y).log_marginal_likelihood()
    assert_close(own, dense)
    parameters, weights = list(model.parameters()), torch.rand_like(dense)
    actual = torch.autograd.grad((weights * own).sum(), parameters)
    expected = torch.autograd.grad((weights * dense).sum(), parameters)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("batch_shape", [(), (2,)])
@pytest.mark.parametrize("name", NAMES)
def test_batches_and_outputs_equal_the_dense_process(
    name: str, batch_shape: tuple[int, ...], outputs: int
) -> None:
    data = observations(16, 2, outputs, batch_shape)
    assert_equals_dense(model_of(name, data), data)


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_every_dimension_equals_the_dense_process(name: str, dim: int) -> None:
    data = observations(16, dim)
    assert_equals_dense(model_of(name, data), data)


@pytest.mark.parametrize("name", NAMES)
def test_a_shared_kernel_serves_all_outputs(name: str) -> None:
    data = observations(16, 2, outputs=2)
    model = WISKI(*data.astuple(), covar_module=kernel(name, 2), grid_size=SIZES[2], tolerance=0.0)
    assert_equals_dense(model, data)


@pytest.mark.parametrize("name", NAMES)
def test_an_output_of_several_keeps_its_own_kernel(name: str) -> None:
    data, T = observations(16, 2, outputs=3), torch.rand(5, 2).double()
    model = model_of(name, data)
    whole = model.posterior(T)
    for outputs in ([2], [2, 0]):
        part = model.subset_output(outputs).posterior(T)
        assert_close(part.mean, whole.mean[..., outputs])
        assert_close(part.variance, whole.variance[..., outputs])


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_independent(name: str) -> None:
    data, T = observations(16), torch.rand(5, 2).double()
    model = model_of(name, data)
    before = model.posterior(T)
    other = copy.deepcopy(model)
    assert_close(other.posterior(T).mean, before.mean)
    with torch.no_grad():
        for parameter in other.covar_module.parameters():
            parameter.add_(0.5)
    assert not torch.allclose(other.posterior(T).variance, before.variance, rtol=1e-3)
    assert torch.equal(model.posterior(T).variance, before.variance)


# --- learning -----------------------------------------------------------------------------------


def waves(period: float, n: int = 150) -> Observations:
    """A signal of this period, with one harmonic, over many periods of the unit interval."""
    X = torch.rand(n, 1, dtype=torch.float64)
    phase = 2.0 * math.pi * X / period
    Y = torch.sin(phase) + 0.5 * torch.cos(2.0 * phase) + 0.05 * torch.randn_like(X)
    return Observations(X, Y)


def loss_of(model: WISKI) -> Tensor:
    return model.compute_custom_loss(ExactMarginalLogLikelihood(model.likelihood, model)).sum()


@pytest.mark.parametrize("factor", [1.002, 1.02, 0.9, 1.2])
@pytest.mark.parametrize("name", ["periodic", "locally periodic", "spectral mixture"])
def test_the_objective_follows_a_period(name: str, factor: float) -> None:
    """A small change of a period moves the kernel out of the largest eigenvectors of another."""
    data = waves(0.2)
    model = WISKI(*data.astuple(), covar_module=oscillating(name, 0.17), grid_size=100)
    model.likelihood.noise = 0.01
    fresh = copy.deepcopy(model)
    loss_of(model)
    for each in (model, fresh):
        stretch_period(each.covar_module, factor)
    assert float((loss_of(model) - loss_of(fresh)).detach().abs()) < 0.01


@pytest.mark.parametrize("period", [0.17, 0.19, 0.2, 0.22])
@pytest.mark.parametrize("name", ["periodic", "locally periodic", "spectral mixture"])
def test_the_objectives_gradient_is_the_dense_one(name: str, period: float) -> None:
    """Though the eigenvectors of a strictly periodic kernel turn with its period."""
    data = waves(0.2)
    model = WISKI(*data.astuple(), covar_module=oscillating(name, period), grid_size=100)
    model.likelihood.noise = 0.1
    parameters = [p for p in model.parameters() if p.requires_grad]
    actual = torch.autograd.grad(loss_of(model), parameters)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    dense = mll._add_other_terms(reference(model, data.X, data.Y).log_marginal_likelihood(), [])
    expected = torch.autograd.grad(-dense / len(data), parameters)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0.01, atol=2e-3)


def oscillating(name: str, period: float) -> Kernel:
    module = kernel(name, 1)
    for part in module.modules():
        if isinstance(part, PeriodicKernel):
            part.period_length = period
        if isinstance(part, SpectralMixtureKernel):
            part.mixture_means = torch.arange(1.0, 4.0).view(3, 1, 1) / period
    return module


def stretch_period(module: Kernel, factor: float) -> None:
    for part in module.modules():
        if isinstance(part, PeriodicKernel):
            part.period_length = factor * part.period_length.detach()
        if isinstance(part, SpectralMixtureKernel):
            part.mixture_means = part.mixture_means.detach() / factor


def strictly_periodic(period: float) -> tuple[Kernel, Callable[[], Tensor]]:
    part = PeriodicKernel()
    part.period_length = period
    return ScaleKernel(part).double(), lambda: part.period_length


def periodic_with_trend(period: float) -> tuple[Kernel, Callable[[], Tensor]]:
    part, trend = PeriodicKernel(), MaternKernel(nu=2.5)
    part.period_length = period
    return (ScaleKernel(part) + ScaleKernel(trend)).double(), lambda: part.period_length


def mixture(period: float) -> tuple[Kernel, Callable[[], Tensor]]:
    part = SpectralMixtureKernel(2).double()
    part.mixture_means = torch.tensor([1.0, 2.0]).view(2, 1, 1) / period
    part.mixture_scales = 0.5
    return part, lambda: part.mixture_means.amin().reciprocal()


@pytest.mark.parametrize("build", [strictly_periodic, periodic_with_trend, mixture])
def test_a_fit_finds_the_period(
    build: Callable[[float], tuple[Kernel, Callable[[], Tensor]]],
) -> None:
    """From a start in the optimum's own basin: over 4.3 periods it is a fifth of a wave away."""
    data = waves(0.23)
    module, period = build(0.22)
    model = WISKI(*data.astuple(), covar_module=module)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    assert float(period().detach()) == pytest.approx(0.23, rel=0.01)
    T = torch.rand(50, 1, dtype=torch.float64)
    phase = 2.0 * math.pi * T / 0.23
    error = model.posterior(T).mean - torch.sin(phase) - 0.5 * torch.cos(2.0 * phase)
    assert float(error.square().mean().sqrt()) < 0.05
