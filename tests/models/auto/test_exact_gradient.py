"""The gradient that a fit of an exact model takes: that of GPyTorch's autograd."""

from __future__ import annotations

import copy

import pytest
import torch
from botorch.models import SingleTaskGP
from botorch.optim.closures import get_loss_closure_with_grads
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import GammaPrior
from torch import Size, Tensor

from bo_stream import AutoGP
from bo_stream.testing.streams import assert_close
from tests.oracles.gaussian_process import DenseGP
from tests.oracles.kernels import dense_kernel

DOUBLE = torch.float64
D = 3
NU = (None, 0.5, 1.5, 2.5)


def kernel_of(
    nu: float | None, scaled: bool = True, ard: bool = True, batch: tuple[int, ...] = ()
) -> Kernel:
    """A kernel with a prior, so that what a fit adds to the evidence is there."""
    options = {
        "ard_num_dims": D if ard else None,
        "batch_shape": Size(batch),
        "lengthscale_prior": GammaPrior(3.0, 6.0),
    }
    base = (RBFKernel(**options) if nu is None else MaternKernel(nu=nu, **options)).to(DOUBLE)
    base.lengthscale = 0.3 + torch.rand(*batch, 1, D if ard else 1, dtype=DOUBLE)
    return ScaleKernel(base, batch_shape=Size(batch)).to(DOUBLE) if scaled else base


def data(*batch: int, m: int = 1, n: int = 14) -> tuple[Tensor, Tensor]:
    """Inputs of which two are equal, and outcomes."""
    X = torch.rand(*batch, n, D, dtype=DOUBLE)
    X[..., 5, :] = X[..., 2, :]
    return X, torch.randn(*batch, n, m, dtype=DOUBLE)


Evaluated = tuple[Tensor, dict[str, Tensor]]


def evaluated(model: AutoGP | SingleTaskGP) -> Evaluated:
    """Loss and gradients by name, as BoTorch's fit takes them."""
    model.train()
    parameters = dict(model.named_parameters())
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    loss, gradients = get_loss_closure_with_grads(mll, parameters)()
    found = {n: g.clone() for n, g in zip(parameters, gradients, strict=True) if g is not None}
    return loss.detach(), found


def assert_equal(found: Evaluated, expected: Evaluated, tolerance: float = 1e-10) -> None:
    """Compare losses, and gradients relative to the size of the whole of them."""
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    assert found[1].keys() == expected[1].keys()
    size = max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0.0, atol=tolerance * size)


def both(
    kernel: Kernel, X: Tensor, Y: Tensor, Yvar: Tensor | None = None
) -> tuple[AutoGP, SingleTaskGP]:
    """A model and BoTorch's exact one, with equal hyperparameters."""
    model, peer = (
        kind(X, Y, Yvar, covar_module=copy.deepcopy(kernel), outcome_transform=None)
        for kind in (AutoGP, SingleTaskGP)
    )
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.add_(0.1 * torch.rand_like(value))
            peer.get_parameter(name).copy_(value)
    return model, peer


@pytest.mark.parametrize("noise", ["learned", "known"])
@pytest.mark.parametrize("ard", [True, False], ids=["ard", "one lengthscale"])
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "bare"])
@pytest.mark.parametrize("nu", NU, ids=str)
def test_a_fit_evaluates_what_gpytorch_does(
    nu: float | None, scaled: bool, ard: bool, noise: str
) -> None:
    """For ν = 1/2 up to the distance of 1e-8 that GPyTorch finds between a point and itself."""
    X, Y = data()
    Yvar = 0.1 + torch.rand_like(Y) if noise == "known" else None
    model, peer = both(kernel_of(nu, scaled, ard), X, Y, Yvar)
    assert_equal(evaluated(model), evaluated(peer), 1e-5 if nu == 0.5 else 1e-10)


@pytest.mark.parametrize("nu", NU, ids=str)
def test_two_models_of_two_outputs(nu: float | None) -> None:
    X, Y = data(2, m=2)
    model, peer = both(kernel_of(nu, batch=(2, 2)), X, Y)
    assert_equal(evaluated(model), evaluated(peer), 1e-5 if nu == 0.5 else 1e-10)


@pytest.mark.parametrize(
    "kernel",
    [
        RBFKernel(active_dims=(0, 2), ard_num_dims=2),
        ScaleKernel(PeriodicKernel()),
        AdditiveKernel(LinearKernel(), ScaleKernel(MaternKernel(ard_num_dims=D))),
    ],
    ids=["some inputs", "periodic", "a sum"],
)
def test_other_kernels_are_differentiated_by_autograd(kernel: Kernel) -> None:
    model, peer = both(kernel.to(DOUBLE), *data())
    assert_equal(evaluated(model), evaluated(peer))


@pytest.mark.parametrize("nu", NU, ids=str)
def test_observations_that_count_in_part(nu: float | None) -> None:
    """Against autograd through the formula: the evidence of noise variances over weights."""
    X, Y = data()
    model = AutoGP(X[:9], Y[:9], covar_module=kernel_of(nu), outcome_transform=None)
    model.forget(0.25).update(X[9:], Y[9:]).forget(0.5)
    weight = torch.tensor([0.125] * 9 + [0.5] * 5, dtype=DOUBLE)
    noise = model.likelihood.noise
    kernel = model.covar_module
    dense = DenseGP(
        lambda A, B: dense_kernel(kernel, A, B),
        model.mean_module.constant,
        X,
        Y.squeeze(-1),
        noise / weight,
    )
    powers = 0.5 * ((1.0 - weight) * (2.0 * torch.pi * noise).log() - weight.log()).sum()
    values = model.log_marginal_likelihood(), dense.log_marginal_likelihood() + powers
    parameters = dict(model.named_parameters())
    found, expected = (
        (
            v.detach(),
            dict(zip(parameters, torch.autograd.grad(v, parameters.values()), strict=True)),
        )
        for v in values
    )
    assert_equal(found, expected)


@pytest.mark.parametrize("nu", NU, ids=str)
def test_float32_to_its_own_precision(nu: float | None) -> None:
    X, Y = (values.float() for values in data())
    model = AutoGP(X, Y, covar_module=kernel_of(nu).float(), outcome_transform=None)
    double = AutoGP(X.double(), Y.double(), covar_module=kernel_of(nu), outcome_transform=None)
    with torch.no_grad():
        for name, value in model.named_parameters():
            double.get_parameter(name).copy_(value)
    (loss, gradients), (expected, others) = evaluated(model), evaluated(double)
    assert_close(loss.float(), expected)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        assert_close(gradient, others[name])


def test_a_second_derivative_of_the_evidence_is_refused() -> None:
    """Before, it was wrong without a word."""
    model = AutoGP(*data(), covar_module=kernel_of(2.5))
    value = model.log_marginal_likelihood()
    with pytest.raises(NotImplementedError, match="Take differences of gradients"):
        torch.autograd.grad(value, list(model.parameters()), create_graph=True)
