"""Kernels and data for models that place points among their inputs, whatever the kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    ScaleKernel,
)
from torch import Tensor

from bo_stream.models.base import StreamingGP

D = 3

KERNELS: dict[str, Callable[[], Kernel]] = {
    "rbf": lambda: RBFKernel(ard_num_dims=D),
    "matern": lambda: ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=D)),
    "linear plus periodic": lambda: AdditiveKernel(
        ScaleKernel(LinearKernel()), ScaleKernel(PeriodicKernel())
    ),
    "groups": lambda: AdditiveKernel(
        ScaleKernel(RBFKernel(active_dims=(0, 1))), ScaleKernel(MaternKernel(active_dims=(2,)))
    ),
}


def wave(n: int = 60, d: int = D) -> tuple[Tensor, Tensor]:
    """Noisy values of a sine at uniform points of the unit cube."""
    X = torch.rand(n, d, dtype=torch.float64)
    return X, (4.0 * X.sum(-1, keepdim=True)).sin() + 0.1 * torch.randn(n, 1).double()


def equal_rows() -> tuple[Tensor, Tensor]:
    """Ten thousand observations at one point."""
    return torch.full((10_000, 2), 0.5).double(), 3.0 + torch.randn(10_000, 1).double()


def assert_goes_on_after_odd_inputs(model: StreamingGP) -> None:
    """A model of :func:`equal_rows` takes an outlier and a column that is constant."""
    assert_knows_the_repeated_outcome(model)
    model.update(torch.full((1, 2), 1e6).double(), torch.ones(1, 1).double())
    model.update(torch.rand(50, 2).double() * torch.tensor([1.0, 0.0]), torch.randn(50, 1).double())
    posterior = model.posterior(torch.full((3, 2), 0.5).double())
    assert bool(posterior.variance.isfinite().all())
    assert model.num_observations == 10_051
    assert_knows_the_repeated_outcome(model)


def assert_knows_the_repeated_outcome(model: StreamingGP) -> None:
    """To a hundredth of one outcome's spread, for it came ten thousand times."""
    posterior = model.posterior(torch.full((1, 2), 0.5).double())
    assert posterior.mean.item() == pytest.approx(3.0, abs=0.1)
    assert posterior.variance.item() < 0.01
