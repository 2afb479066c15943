"""Data to put into models, in any shape and dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from torch import Tensor

from bo_stream import LinearStem, ProductMatern
from bo_stream.testing.streams import ExampleData, example_data

Observations, observations = ExampleData, example_data
"""Those of the laws."""

# --- kernels ------------------------------------------------------------------------------------


def _matern(nu: float) -> Callable[..., Kernel]:
    return lambda dim, **kwargs: ProductMatern(nu=nu, ard_num_dims=dim, **kwargs)


def _product(dim: int, **kwargs: Any) -> Kernel:
    parts = [
        MaternKernel(nu=1.5, active_dims=(dim - 1,), **kwargs),
        RBFKernel(ard_num_dims=dim, **kwargs),
        MaternKernel(nu=2.5, active_dims=(0,), **kwargs),
    ]
    return ScaleKernel(ProductKernel(*parts), **kwargs)


def _scaled_parts(dim: int, **kwargs: Any) -> Kernel:
    parts = [
        ScaleKernel(RBFKernel(active_dims=(i,), **kwargs), **kwargs) for i in reversed(range(dim))
    ]
    return ProductKernel(*parts)


def _locally_periodic(dim: int, **kwargs: Any) -> Kernel:
    parts = (PeriodicKernel(active_dims=(0,), **kwargs), RBFKernel(ard_num_dims=dim, **kwargs))
    return ScaleKernel(ProductKernel(*parts), **kwargs)


def _sum_on_one_input(dim: int, **kwargs: Any) -> Kernel:
    own = {"active_dims": (dim - 1,), **kwargs}
    parts = [
        ScaleKernel(PeriodicKernel(**own), **kwargs),
        SpectralMixtureKernel(num_mixtures=2, **own),
        ScaleKernel(MaternKernel(nu=1.5, **own) * RBFKernel(**own), **kwargs),
        RBFKernel(**own),
    ]
    return ProductKernel(MaternKernel(active_dims=(0,), **kwargs), AdditiveKernel(*parts))


KERNELS: dict[str, Callable[..., Kernel]] = {
    "RBF": lambda dim, **kwargs: RBFKernel(ard_num_dims=dim, **kwargs),
    "RBF, one lengthscale": lambda dim, **kwargs: RBFKernel(**kwargs),
    "Matérn-1/2": _matern(0.5),
    "Matérn-3/2": _matern(1.5),
    "Matérn-5/2": _matern(2.5),
    "scaled": lambda dim, **kwargs: ScaleKernel(_matern(2.5)(dim, **kwargs), **kwargs),
    "product": _product,
    "product of scaled": _scaled_parts,
    "periodic": lambda dim, **kwargs: PeriodicKernel(ard_num_dims=dim, **kwargs),
    "periodic, one period": lambda dim, **kwargs: PeriodicKernel(**kwargs),
    "locally periodic": _locally_periodic,
    "spectral mixture": lambda dim, **kwargs: SpectralMixtureKernel(3, dim, **kwargs),
    "sum on one input": _sum_on_one_input,
}
"""Every way to compose a kernel that a grid takes; the arguments are d and ``batch_shape``."""


def kernel(name: str, dim: int, batch_shape: tuple[int, ...] = ()) -> Kernel:
    """A kernel with random lengthscales of 0.3 to 0.9 and random other parameters, float64."""
    module = KERNELS[name](dim, batch_shape=torch.Size(batch_shape)).double()
    for part in module.modules():
        if isinstance(part, ScaleKernel):
            part.outputscale = 0.5 + torch.rand_like(part.outputscale)
        elif isinstance(part, RBFKernel | MaternKernel | ProductMatern | PeriodicKernel):
            part.lengthscale = 0.3 + 0.6 * torch.rand_like(part.lengthscale)
        if isinstance(part, PeriodicKernel):
            part.period_length = 0.4 + 0.6 * torch.rand_like(part.period_length)
        elif isinstance(part, SpectralMixtureKernel):
            part.mixture_means = 0.2 + 2.0 * torch.rand_like(part.mixture_means)
            part.mixture_scales = 0.2 + 0.5 * torch.rand_like(part.mixture_scales)
            part.mixture_weights = 0.2 + torch.rand_like(part.mixture_weights)
    return module


class OpenStem(LinearStem):
    """The mean of the inputs times a weight that may lead it out of the unit cube."""

    def __init__(self, d: int) -> None:
        super().__init__(d, 1)
        self.calibrated = torch.tensor(True)
        torch.nn.init.constant_(self.weight, 1.0 / d)

    def _squashed(self, projected: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
        return projected + self.offset
