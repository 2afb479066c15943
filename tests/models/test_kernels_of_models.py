"""Every model computes with the kernel that it shows, whatever that is: prior and posterior.

The oracle is the dense formula of a Gaussian process with the values of ``model.covar_module``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    MaternKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.kernels import Kernel as AnyKernel
from torch import Tensor

from bo_stream import (
    OSGPR,
    OSVGP,
    WISKI,
    AutoGP,
    ClusteredGP,
    DirichletWISKI,
    HeteroscedasticWISKI,
    LocalGP,
    ProductKernelWarning,
    ProductMatern,
)
from bo_stream.models.auto.auto import family_model
from bo_stream.models.base import StreamingGP
from bo_stream.models.wiski.grid_model import GridModel
from tests.oracles.gaussian_process import DenseGP

NOISE = 0.02


def _sum(d: int) -> Kernel:
    return AdditiveKernel(
        ScaleKernel(MaternKernel(2.5, ard_num_dims=d)), ScaleKernel(RBFKernel(active_dims=(0,)))
    )


KERNELS: dict[str, Callable[[int], Kernel]] = {
    "RBF": lambda d: RBFKernel(ard_num_dims=d),
    "Matérn 1/2": lambda d: MaternKernel(0.5, ard_num_dims=d),
    "Matérn 3/2, one lengthscale": lambda d: MaternKernel(1.5),
    "Matérn 5/2": lambda d: MaternKernel(2.5, ard_num_dims=d),
    "product Matérn 3/2": lambda d: ProductMatern(1.5, ard_num_dims=d),
    "scaled": lambda d: ScaleKernel(MaternKernel(2.5, ard_num_dims=d)),
    "sum": _sum,
    "product": lambda d: ProductKernel(ScaleKernel(MaternKernel(1.5)), RBFKernel(ard_num_dims=d)),
}


def kernel_of(name: str, d: int) -> Kernel:
    """A kernel of lengthscales about a half, in float64."""
    kernel = KERNELS[name](d).double()
    for part in kernel.modules():
        if isinstance(part, AnyKernel) and part.has_lengthscale:
            part.lengthscale = torch.linspace(0.5, 0.8, part.lengthscale.shape[-1])
        elif isinstance(part, ScaleKernel):
            part.outputscale = 0.7
    return kernel


Build = Callable[[Tensor, Tensor, Kernel, Tensor], StreamingGP]


def _noisy(kind: Any, **options: Any) -> Build:
    """A builder of models of outcomes in their units, with known noise."""

    def build(X: Tensor, Y: Tensor, kernel: Kernel, box: Tensor) -> StreamingGP:
        own = {"bounds": box} if issubclass(kind, WISKI | AutoGP | HeteroscedasticWISKI) else {}
        Yvar = torch.full_like(Y, NOISE)
        given = {"covar_module": kernel, "outcome_transform": None, **own, **options}
        return kind(X, Y, Yvar, **given)

    return build


def _labels(X: Tensor, Y: Tensor, kernel: Kernel, box: Tensor) -> StreamingGP:
    return DirichletWISKI(X, Y > 0.0, covar_module=kernel, bounds=box)


def _sites(X: Tensor, Y: Tensor, kernel: Kernel, box: Tensor) -> StreamingGP:
    return OSVGP(X, Y, covar_module=kernel, hyper_steps=0)


MODELS: dict[str, Build] = {
    "WISKI": _noisy(WISKI),
    "HeteroscedasticWISKI": _noisy(HeteroscedasticWISKI, rounds=0),
    "DirichletWISKI": _labels,
    "OSGPR": _noisy(OSGPR),
    "OSVGP": _sites,
    "ClusteredGP": _noisy(ClusteredGP, max_centres=200, resolution=1e-3),
    "LocalGP": _noisy(LocalGP, w_gen=1e-9),
    "AutoGP": _noisy(AutoGP),
    "AutoGP on a grid": _noisy(AutoGP, families="WISKI"),
    "AutoGP, exact and grid": _noisy(AutoGP, families=("exact", "WISKI")),
}
GRIDS = {name for name in MODELS if "WISKI" in name or "grid" in name}


@contextmanager
def one_warning(expected: bool) -> Iterator[None]:
    """Expect one warning of a product in place of a kernel of the distance, or none."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
    found = [each for each in told if each.category is ProductKernelWarning]
    assert len(found) == expected, [str(each.message) for each in told]


def built(name: str, kernel: str, d: int, X: Tensor, Y: Tensor) -> StreamingGP:
    """A model in evaluation mode, of the unit cube."""
    module, box = kernel_of(kernel, d), torch.tensor([[0.0] * d, [1.0] * d]).double()
    radial = d > 1 and any(type(part) is MaternKernel for part in module.modules())
    before = deepcopy(module).state_dict()
    with one_warning(name in GRIDS and radial):
        model = MODELS[name](X, Y, module, box).eval()
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    assert model.covar_module.state_dict().keys() == before.keys()
    return model


def dense(model: StreamingGP, A: Tensor, B: Tensor) -> Tensor:
    kernel = deepcopy(model.covar_module).double().requires_grad_(False)
    return kernel(A, B).to_dense()


@pytest.mark.filterwarnings("ignore::bo_stream.GridResolutionWarning")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", MODELS)
def test_the_prior_is_that_of_the_kernel_that_is_shown(name: str, kernel: str) -> None:
    for d in (1, 3):
        none = torch.empty(0, d).double()
        model, T = built(name, kernel, d, none, none[:, :1]), torch.rand(9, d).double()
        with torch.no_grad():
            own = model.process(T).covariance(T)
        expected, view = dense(model, T, T), family_model(model)
        error = view.interpolation_error() if isinstance(view, GridModel) else 1e-12
        factor = float(expected.diagonal().max())
        assert float((own - expected).abs().max()) <= 1.1 * factor * error  # found by probes


REGRESSIONS = [name for name in MODELS if name not in ("DirichletWISKI", "OSVGP")]


@pytest.mark.filterwarnings("ignore::bo_stream.GridResolutionWarning")
@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "Matérn 1/2"])
@pytest.mark.parametrize("name", REGRESSIONS)
def test_the_posterior_is_that_of_the_kernel_that_is_shown(name: str, kernel: str) -> None:
    """To a twentieth of a posterior standard deviation, and of the variance."""
    for d in (1, 2):
        X, T = torch.rand(25, d).double(), torch.rand(9, d).double()
        Y = (4.0 * X.sum(-1, keepdim=True)).sin() + NOISE**0.5 * torch.randn(25, 1).double()
        model = built(name, kernel, d, X, Y)
        mean, noise = torch.zeros(1).double(), torch.full((25,), NOISE).double()
        exact = DenseGP(lambda A, B, model=model: dense(model, A, B), mean, X, Y.squeeze(-1), noise)
        expected, covariance = exact.posterior(T)
        posterior = model.posterior(T)
        variance = covariance.diagonal()
        deviation = (posterior.mean.squeeze(-1) - expected).abs() / variance.sqrt()
        ratio = posterior.variance.squeeze(-1) / variance
        assert float(deviation.max()) < 0.05
        assert 0.95 < float(ratio.min()) <= float(ratio.max()) < 1.05
