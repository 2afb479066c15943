"""The recursion of the OIPS paper with its slips mended against O-SGPR, and as it is printed."""

from __future__ import annotations

import torch
from gpytorch.kernels import RBFKernel
from gpytorch.means import ZeroMean
from torch import Tensor

from bo_stream import OSGPR
from bo_stream.testing.streams import assert_close
from tests.oracles.inducing import online_update
from tests.oracles.kernels import DenseKernel, dense_kernel

NOISE = 0.05
OLD, NEW = 0.4, 0.25
"""Lengthscales of the first batch and of the second."""


def rbf(lengthscale: float) -> RBFKernel:
    made = RBFKernel().double()
    made.lengthscale = lengthscale
    return made


def dense(lengthscale: float) -> DenseKernel:
    kernel = rbf(lengthscale)
    return lambda A, B: dense_kernel(kernel, A, B).detach()


def batches() -> list[tuple[Tensor, Tensor]]:
    parts = torch.rand(60, 1, dtype=torch.float64).split(30)
    return [(X, (7.0 * X).sin() + NOISE**0.5 * torch.randn(30, 1).double()) for X in parts]


def points(n: int) -> Tensor:
    return torch.linspace(0.0, 1.0, n, dtype=torch.float64).unsqueeze(-1)


def recursion(data: list[tuple[Tensor, Tensor]], K_old: Tensor, printed: bool = False) -> Tensor:
    """Means at the second points: 5 points, then 7 and another lengthscale."""
    (X, Y), (X2, Y2) = data
    K, cross = dense(OLD)(points(5), points(5)), dense(OLD)(X, points(5))
    A = K + cross.mT @ cross / NOISE
    first = K @ torch.linalg.solve(A, cross.mT @ Y.squeeze(-1) / NOISE)
    former = (first, K @ torch.linalg.solve(A, K))
    step = (dense(NEW), points(5), points(7), X2, Y2.squeeze(-1), NOISE, printed)
    return online_update(former, K_old, *step)[0]


def test_the_recursion_of_the_oips_paper_needs_an_inverse_and_the_old_prior() -> None:
    """``Σ (… + κᵀ Σ_old⁻¹ μ_old)``; D is by the kernel of the old hyperparameters."""
    data = batches()
    options = {"mean_module": ZeroMean(), "outcome_transform": None, "window": 0}
    model = OSGPR(*data[0], covar_module=rbf(OLD), inducing_points=points(5), **options)
    with torch.no_grad():
        model.likelihood.noise = NOISE
        model.covar_module.lengthscale = NEW
    model.place_points(points(7)).update(*data[1]).eval()
    found = model.posterior(points(7)).mean.detach().squeeze(-1)
    old_prior = dense(OLD)(points(5), points(5))
    assert_close(found, recursion(data, old_prior), factor=100)
    assert (recursion(data, old_prior, printed=True) - found).abs().max() > 0.1
    new_prior = dense(NEW)(points(5), points(5))
    assert (recursion(data, new_prior) - found).abs().max() > 1e-3
