"""Random Fourier features: what they approximate, and that any of them is made alone."""

from __future__ import annotations

import math

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import Kernel, MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel

from bo_stream.bases.spectral import FourierBasis, check_spectral, normals
from bo_stream.testing.streams import assert_close

BASES = {
    "RBF": lambda **kw: RBFKernel(ard_num_dims=3, **kw),
    "RBF, one lengthscale": lambda **kw: RBFKernel(**kw),
    "Matérn-1/2": lambda **kw: MaternKernel(nu=0.5, ard_num_dims=3, **kw),
    "Matérn-3/2": lambda **kw: MaternKernel(nu=1.5, ard_num_dims=3, **kw),
    "Matérn-5/2": lambda **kw: MaternKernel(nu=2.5, ard_num_dims=3, **kw),
    "scaled": lambda **kw: ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=3, **kw), **kw),
}


def _kernel(name: str, outputs: int = 1) -> Kernel:
    kernel = BASES[name](batch_shape=torch.Size([outputs] if outputs > 1 else [])).double()
    for part in kernel.modules():
        if isinstance(part, ScaleKernel):
            part.outputscale = 1.0 + torch.rand_like(part.outputscale)
        elif isinstance(part, RBFKernel | MaternKernel):
            part.lengthscale = 0.5 + 0.5 * torch.rand_like(part.lengthscale)
    return kernel


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("outputs", [1, 2])
def test_features_have_the_kernel_for_their_mean(name: str, outputs: int) -> None:
    """Within five standard errors of 15,000 independent frequencies, at every pair of points."""
    kernel, X = _kernel(name, outputs), torch.rand(6, 3, dtype=torch.float64)
    count = 30_000
    basis = FourierBasis(kernel, count, seed=1)
    index = torch.arange(count)
    features = basis.functions(X, index).detach()
    prior = basis.precision_diagonal(index).reciprocal().unsqueeze(-2)
    covariance = (features * prior) @ features.mT
    expected = kernel(X).to_dense().reshape(outputs, 6, 6).detach()
    error = 5.0 / math.sqrt(count / 2) * expected.abs().max()
    torch.testing.assert_close(covariance, expected, rtol=0.0, atol=float(error))
    assert_close(covariance.diagonal(dim1=-2, dim2=-1), expected.diagonal(dim1=-2, dim2=-1))


def test_any_features_are_those_among_all(dtype: torch.dtype, device: torch.device) -> None:
    basis = FourierBasis(_kernel("Matérn-3/2").to(device), 10_000_000, seed=3)
    X = torch.rand(4, 3, dtype=dtype, device=device)
    index = torch.tensor([9_999_999, 0, 17, 5_000_001, 17], device=device)
    together = basis.functions(X, index)
    for column, one in enumerate(index):
        assert_close(together[..., column], basis.functions(X, one.reshape(1))[..., 0])
    assert together.dtype == dtype
    assert together.shape == (1, 4, 5)


def test_other_seeds_are_other_features() -> None:
    X, index = torch.rand(4, 3, dtype=torch.float64), torch.arange(10)
    one, other = (FourierBasis(_kernel("RBF"), 10, seed).functions(X, index) for seed in (0, 1))
    assert bool((one != other).all())


def test_gradients_in_the_lengthscales_and_in_the_inputs() -> None:
    kernel = _kernel("Matérn-5/2")
    index = torch.tensor([0, 3, 8, 9])

    def features(raw: torch.Tensor, X: torch.Tensor) -> torch.Tensor:
        kernel.__dict__.pop("lengthscale", None)
        with torch.no_grad():
            kernel.raw_lengthscale.copy_(raw.detach())
        parameters = {"raw_lengthscale": raw}
        module = torch.nn.utils.stateless._reparametrize_module(kernel, parameters)
        with module:
            return FourierBasis(kernel, 10, seed=0).functions(X, index)

    raw = kernel.raw_lengthscale.detach().clone().requires_grad_()
    X = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(features, (raw, X))


def test_active_dimensions() -> None:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2, active_dims=(2, 0))).double()
    X = torch.rand(4, 3, dtype=torch.float64)
    inner = ScaleKernel(RBFKernel(ard_num_dims=2)).double()
    index = torch.arange(8)
    expected = FourierBasis(inner, 8, 0).functions(X[:, [2, 0]], index)
    assert_close(FourierBasis(kernel, 8, 0).functions(X, index), expected)


def test_a_kernel_without_a_known_spectral_density_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"PeriodicKernel.*InducingAtData"):
        check_spectral(ScaleKernel(PeriodicKernel()))


def test_random_numbers_are_standard_normal_and_uncorrelated() -> None:
    numbers = normals(5, torch.arange(200_000), 3)
    error = 5.0 / math.sqrt(200_000)
    assert float(numbers.mean(0).abs().max()) < error
    assert float((numbers.mT.cov() - torch.eye(3)).abs().max()) < 2.0 * error
    shifted = torch.cat((numbers[1:], numbers[:1]))
    assert float((numbers * shifted).mean(0).abs().max()) < error
    assert float((numbers.pow(4).mean(0) - 3.0).abs().max()) < 5.0 * math.sqrt(96 / 200_000)
    assert float((numbers * normals(6, torch.arange(200_000), 3)).mean(0).abs().max()) < error
