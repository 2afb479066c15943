"""Output scale and noise to begin with: their bound by dense formulas, and that they are best."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean
from torch import Tensor

from bo_stream.models.inference import Hyperparameters
from bo_stream.models.stochastic.replay import Batch
from bo_stream.models.stochastic.start import scale_bound, set_scales
from tests.oracles.inducing import SGPR, two_basis_bound
from tests.oracles.kernels import dense_kernel
from tests.support.problems.likelihoods import LIKELIHOODS

D, N = 2, 60


def observations(outputs: int = 1, batch: tuple[int, ...] = ()) -> Batch:
    X = torch.rand(*batch, N, D, dtype=torch.float64)
    Y = (8.0 * X[..., :1]).sin() * torch.arange(1.0, outputs + 1).double()
    targets = (Y + 0.3 * torch.randn_like(Y)).mT
    return Batch(X, targets.mT)


def hyperparameters(
    kernel: Kernel | None = None, likelihood: Likelihood | None = None, batch: tuple[int, ...] = ()
) -> Hyperparameters:
    shape = torch.Size(batch)
    if kernel is None:
        base = RBFKernel(ard_num_dims=D, batch_shape=shape)
        base.lengthscale = 0.2
        kernel = ScaleKernel(base, batch_shape=shape)
        kernel.outputscale = 5.0
    if likelihood is None:
        likelihood = GaussianLikelihood(batch_shape=shape)
        likelihood.noise = 0.01
    mean = ConstantMean(batch_shape=shape)
    mean.constant = 0.2
    hyper = Hyperparameters(kernel, mean, likelihood)
    for parameter in hyper.parameters():
        parameter.requires_grad_(True)
    return hyper


def bound_of(bound: Callable[[Tensor, Tensor], Tensor], scale: float, noise: float) -> float:
    value = bound(torch.tensor([scale]).double(), torch.tensor([noise]).double())
    return float(value.detach())


@pytest.mark.parametrize("scale", [0.3, 2.0])
@pytest.mark.parametrize("weight", [1, 3])
def test_with_one_basis_for_both_the_bound_is_titsias_s(scale: float, weight: int) -> None:
    data, hyper, noise = observations(), hyperparameters(), 0.2
    bound = scale_bound(hyper, data, 20, 20, weight * N)
    Z, kernel = data.X[::3], hyper.covar_module
    K, cross, inner = (
        scale * dense_kernel(kernel, *p) for p in ((data.X,) * 2, (data.X, Z), (Z, Z))
    )
    y, noises = data.targets[0] - 0.2, torch.full((N,), noise).double()
    rows = torch.arange(N).repeat(weight)
    dense = SGPR(K[rows][:, rows], cross[rows], inner, y[rows], noises[rows]).bound() / (weight * N)
    found = bound_of(bound, scale, noise) - 0.5 * math.log(2.0 * math.pi)
    assert found == pytest.approx(float(dense.detach()), rel=1e-4)


def test_with_fewer_functions_the_covariance_has_the_leading_ones() -> None:
    data, hyper = observations(), hyperparameters()
    bound = scale_bound(hyper, data, 20, 6, N)
    kernel, X, Z = hyper.covar_module, data.X, data.X[::3]
    K, cross, inner = (dense_kernel(kernel, *p) for p in ((X, X), (X, Z), (Z, Z)))
    dense = two_basis_bound(K, cross, inner, data.targets[0] - 0.2, 0.2, 6).detach() / N
    expected = float(dense) + 0.5 * math.log(2.0 * math.pi)
    assert bound_of(bound, 1.0, 0.2) == pytest.approx(expected, rel=1e-4)


def test_the_scales_are_the_best() -> None:
    data, hyper = observations(), hyperparameters()
    bound = scale_bound(hyper, data, 20, 6, N)
    set_scales(hyper, data, 20, 6, N)
    scale, noise = hyper.covar_module.outputscale.item() / 5.0, hyper.likelihood.noise.item()
    best = bound_of(bound, scale, noise)
    assert scale < 0.5
    assert noise > 0.02
    for factor in (0.9, 1.1):
        assert bound_of(bound, factor * scale, noise) < best
        assert bound_of(bound, scale, factor * noise) < best


def test_the_output_scale_becomes_no_larger() -> None:
    data, hyper = observations(), hyperparameters()
    hyper.covar_module.outputscale = 1e-3
    set_scales(hyper, data, 20, 6, N)
    assert hyper.covar_module.outputscale.item() == pytest.approx(1e-3)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_outputs_and_batches_are_each_alone(batch: tuple[int, ...]) -> None:
    data = observations(2, batch)
    both = hyperparameters(batch=(*batch, 2))
    set_scales(both, data, 20, 6, N)
    for place in range(2):
        one = hyperparameters(batch=batch)
        alone = Batch(data.X, data.Y[..., place : place + 1])
        set_scales(one, alone, 20, 6, N)
        scale = both.covar_module.outputscale[..., place]
        torch.testing.assert_close(scale, one.covar_module.outputscale, rtol=1e-2, atol=0.0)
        noise = both.likelihood.noise[..., place, :]
        torch.testing.assert_close(noise, one.likelihood.noise, rtol=1e-2, atol=0.0)


def test_what_stays_stays() -> None:
    data, hyper = observations(), hyperparameters()
    hyper.covar_module.raw_outputscale.requires_grad_(False)
    before = hyper.covar_module.outputscale.item()
    set_scales(hyper, data, 20, 6, N)
    assert hyper.covar_module.outputscale.item() == before
    assert hyper.likelihood.noise.item() != pytest.approx(0.01)
    hyper = hyperparameters()
    hyper.likelihood.requires_grad_(False)
    set_scales(hyper, data, 20, 6, N)
    assert hyper.likelihood.noise.item() == pytest.approx(0.01)
    assert hyper.covar_module.outputscale.item() != before


def test_a_kernel_without_an_output_scale_has_its_noise_set() -> None:
    data, base = observations(), RBFKernel(ard_num_dims=D)
    base.lengthscale = 0.2
    hyper = hyperparameters(base)
    set_scales(hyper, data, 20, 6, N)
    assert 0.02 < hyper.likelihood.noise.item() < 1.0


def test_the_noise_keeps_its_constraint() -> None:
    likelihood = GaussianLikelihood(noise_constraint=GreaterThan(3.0))
    likelihood.noise = 4.0
    hyper = hyperparameters(likelihood=likelihood)
    set_scales(hyper, observations(), 20, 6, N)
    assert 3.0 < hyper.likelihood.noise.item() < 3.01
    assert all(p.isfinite().all() for p in hyper.parameters())


def test_other_likelihoods_leave_the_scale() -> None:
    data, hyper = observations(), hyperparameters(likelihood=LIKELIHOODS["bernoulli"]())
    set_scales(hyper, data, 20, 6, N)
    assert hyper.covar_module.outputscale.item() == pytest.approx(5.0)


def test_without_functions_of_the_covariance_the_scale_stays() -> None:
    data, hyper = observations(), hyperparameters()
    set_scales(hyper, data, 0, 0, N)
    assert hyper.covar_module.outputscale.item() == pytest.approx(5.0)


def test_outcomes_that_do_not_vary_leave_numbers_finite() -> None:
    data, hyper = observations(), hyperparameters()
    flat = Batch(data.X, torch.full_like(data.Y, 0.2))
    set_scales(hyper, flat, 20, 6, N)
    assert all(p.isfinite().all() for p in hyper.parameters())
