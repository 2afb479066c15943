"""Kernels by their closed formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

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

from bo_stream.bases.kernels import ProductMatern

DenseKernel = Callable[[Tensor, Tensor], Tensor]


def dense_kernel(kernel: Kernel, X: Tensor, X2: Tensor) -> Tensor:
    """A kernel by closed formula; a Matérn kernel of several inputs is one of the distance."""
    if isinstance(kernel, ScaleKernel):
        return kernel.outputscale[..., None, None] * dense_kernel(kernel.base_kernel, X, X2)
    if isinstance(kernel, ProductKernel):
        result = dense_kernel(kernel.kernels[0], X, X2)
        for part in kernel.kernels[1:]:
            result = result * dense_kernel(part, X, X2)
        return result
    if isinstance(kernel, AdditiveKernel):
        return sum(dense_kernel(part, X, X2) for part in kernel.kernels)
    dims = range(X.shape[-1]) if kernel.active_dims is None else kernel.active_dims.tolist()
    if isinstance(kernel, PeriodicKernel):
        return _periodic(kernel, X[..., dims], X2[..., dims])
    if isinstance(kernel, SpectralMixtureKernel):
        return _spectral_mixture(kernel, X[..., dims], X2[..., dims])
    if isinstance(kernel, MaternKernel) and len(dims) > 1:
        lengthscale = kernel.lengthscale[..., None, :]
        difference = (X[..., :, None, dims] - X2[..., None, :, dims]) / lengthscale
        return matern(kernel.nu, difference.square().sum(-1).clamp_min(1e-30).sqrt())
    result = 1.0
    for column, i in enumerate(dims):
        lengthscale = kernel.lengthscale[..., 0, column if kernel.ard_num_dims else 0]
        distance = (X[..., :, None, i] - X2[..., None, :, i]).abs()
        result = result * _correlation(kernel, distance / lengthscale[..., None, None])
    return result


def _correlation(kernel: Kernel, r: Tensor) -> Tensor:
    if isinstance(kernel, RBFKernel):
        return torch.exp(-(r**2) / 2.0)
    assert isinstance(kernel, ProductMatern | MaternKernel)
    return matern(kernel.nu, r)


def matern(nu: float, r: Tensor) -> Tensor:
    """The correlation at distances r, in lengthscales. [Rasmussen and Williams, 2006, eq. 4.17]"""
    s = math.sqrt(2.0 * nu) * r
    polynomial = {0.5: 1.0, 1.5: 1.0 + s, 2.5: 1.0 + s + s**2 / 3.0}[nu]
    return polynomial * torch.exp(-s)


def _periodic(kernel: PeriodicKernel, X: Tensor, X2: Tensor) -> Tensor:
    """``exp(−2 Σ_i sin²(π τ_i / p_i) / λ_i)``, τ = x − x'. [gpytorch's documentation]"""
    exponent = 0.0
    for i in range(X.shape[-1]):
        column = i if kernel.ard_num_dims else 0
        period = kernel.period_length[..., 0, column][..., None, None]
        lengthscale = kernel.lengthscale[..., 0, column][..., None, None]
        difference = X[..., :, None, i] - X2[..., None, :, i]
        exponent = exponent - 2.0 * torch.sin(math.pi * difference / period) ** 2 / lengthscale
    return torch.exp(exponent)


def _spectral_mixture(kernel: SpectralMixtureKernel, X: Tensor, X2: Tensor) -> Tensor:
    """``Π_i Σ_j w_j exp(−2 π² τ_i² s_ij²) cos(2 π τ_i μ_ij)``. [WilsonAdams2013, eq. 11 and 12]

    The order of product and sum is gpytorch's, not the paper's; they agree in one dimension.
    """
    result = 1.0
    for i in range(X.shape[-1]):
        difference = X[..., :, None, i] - X2[..., None, :, i]
        line = 0.0
        for j in range(kernel.num_mixtures):
            weight = kernel.mixture_weights[..., j][..., None, None]
            mean = kernel.mixture_means[..., j, 0, i][..., None, None]
            scale = kernel.mixture_scales[..., j, 0, i][..., None, None]
            decay = torch.exp(-2.0 * (math.pi * difference * scale) ** 2)
            line = line + weight * decay * torch.cos(2.0 * math.pi * difference * mean)
        result = result * line
    return result


def correlation(kernel: DenseKernel, A: Tensor, B: Tensor) -> Tensor:
    variances = kernel(A, A).diagonal()[:, None] * kernel(B, B).diagonal()
    return kernel(A, B) / variances.sqrt()


def averaged_kernel(
    lengthscale: Tensor, scale: float, A: Tensor, factors: Tensor, B: Tensor, factors2: Tensor
) -> Tensor:
    """The generalised SE-ARD kernel, entry by entry. [Cheng2017, eq. 19]"""
    result = torch.empty(len(A), len(B), dtype=A.dtype)
    for i, j in product(range(len(A)), range(len(B))):
        l1, l2 = lengthscale * factors[i], lengthscale * factors2[j]
        total = l1**2 + l2**2
        size = (2.0 * l1 * l2 / total).sqrt().prod()
        result[i, j] = scale * size * torch.exp(-((A[i] - B[j]) ** 2 / total).sum())
    return result
