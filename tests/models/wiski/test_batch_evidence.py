"""The log marginal likelihood of a batch in features, against the dense normal density."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from torch import Size
from torch.distributions import MultivariateNormal

from bo_stream.bases.grid.contraction import prior_covariance
from bo_stream.bases.grid.interpolation import grid_basis
from bo_stream.bases.grid.kernel import GridKernel, kernel_factors
from bo_stream.bases.grid.mesh import Mesh
from bo_stream.bases.kernels import ProductMatern
from bo_stream.models.wiski.cache import batch_log_marginal_likelihood

KERNELS = {
    "product": lambda: ScaleKernel(ProductMatern(nu=1.5, ard_num_dims=2)),
    "additive": lambda: (
        ScaleKernel(ProductMatern(nu=1.5, active_dims=(1,)))
        + ScaleKernel(RBFKernel(active_dims=(0, 1)))
    ),
}


@pytest.mark.parametrize("name", list(KERNELS))
@pytest.mark.parametrize("n", [1, 7, 23, 24, 60])
def test_value_and_gradients_are_the_dense_ones(name: str, n: int) -> None:
    """Of more and of fewer rows than the 24 features, whose prior moves with the kernel."""
    module: Kernel = KERNELS[name]().double()
    box = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)

    def factors() -> GridKernel:
        return kernel_factors(module, 2).for_single_output()

    groups = factors().groups(2)
    mesh = Mesh.over(box, groups, tuple((7,) * len(group) for group in groups))
    basis = grid_basis(mesh, factors(), Size((1,)), 0.0, 24)
    X = torch.rand(n, 2, dtype=torch.float64).requires_grad_()
    y = torch.randn(1, n, dtype=torch.float64).requires_grad_()
    noise = (0.05 + torch.rand(1, n, dtype=torch.float64)).requires_grad_()
    own = batch_log_marginal_likelihood(X, y, noise, basis, factors())
    z = basis.features(X)
    covariance = z @ prior_covariance(basis, factors()) @ z.mT + torch.diag_embed(noise)
    dense = MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)
    torch.testing.assert_close(own, dense, rtol=1e-10, atol=1e-10)
    leaves = [X, y, noise, *module.parameters()]
    pairs = (torch.autograd.grad(value.sum(), leaves) for value in (own, dense))
    for actual, expected in zip(*pairs, strict=True):
        size = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-9 * size)
