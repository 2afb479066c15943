"""Cubic interpolation on a grid, and the kernels that it makes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    ScaleKernel,
)
from torch import Tensor

from tests.oracles.kernels import DenseKernel, dense_kernel


def grid_nodes(lower: float, upper: float, size: int) -> Tensor:
    """The box cut into ``size − 3`` cells, and one node more beyond each end."""
    cell = (upper - lower) / (size - 3)
    return torch.tensor([lower + (k - 1) * cell for k in range(size)], dtype=torch.float64)


def keys_kernel(s: Tensor) -> Tensor:
    """The cubic convolution kernel with a = −1/2 at a distance in cells. [Keys1981, eq. 15]"""
    s = s.abs()
    near = 1.5 * s**3 - 2.5 * s**2 + 1.0
    far = -0.5 * s**3 + 2.5 * s**2 - 4.0 * s + 2.0
    return torch.where(s <= 1.0, near, torch.where(s < 2.0, far, torch.zeros_like(s)))


def line_weights(x: Tensor, lower: float, upper: float, size: int) -> Tensor:
    """One-dimensional interpolation weights of all nodes, ``... -> ... x size``."""
    nodes = grid_nodes(lower, upper, size).to(x)
    return keys_kernel((x.unsqueeze(-1) - nodes) / (nodes[1] - nodes[0]))


def interpolation_weights(X: Tensor, bounds: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """W: weights of all nodes in row-major order, ``... x n x d -> ... x n x p``."""
    W = torch.ones_like(X[..., :1])
    for i, size in enumerate(sizes):
        line = line_weights(X[..., i], float(bounds[0, i]), float(bounds[1, i]), size)
        W = (W.unsqueeze(-1) * line.unsqueeze(-2)).flatten(-2)
    return W


def node_inputs(bounds: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """All nodes in row-major order, ``p x d``."""
    lines = [grid_nodes(float(bounds[0, i]), float(bounds[1, i]), s) for i, s in enumerate(sizes)]
    return torch.tensor(list(product(*(line.tolist() for line in lines))), dtype=torch.float64)


def interpolated_kernel(
    kernel: Kernel, bounds: Tensor, sizes: tuple[int, ...], rank: int | None = None
) -> DenseKernel:
    """``k̃(x, x') = w(x)ᵀ K w(x')``; with a rank, K in its largest Kronecker eigenvectors only.

    The eigenvectors are constants: gradients are those of ``P K(θ) P`` with P fixed.
    """
    nodes = node_inputs(bounds, sizes)
    K = dense_kernel(kernel, nodes, nodes).to(torch.float64)
    if rank is not None:
        E = largest_eigenvectors(kernel, bounds, sizes, rank)
        K = E @ (E.mT @ K @ E) @ E.mT

    def covariance(X: Tensor, X2: Tensor) -> Tensor:
        W, W2 = (interpolation_weights(x, bounds, sizes) for x in (X, X2))
        return W @ K @ W2.mT

    return covariance


def additive_interpolated_kernel(
    kernel: Kernel, cover: Callable[[tuple[int, ...]], tuple[Tensor, tuple[int, ...]]]
) -> DenseKernel:
    """The sum of the parts' interpolated kernels, each from a grid over the inputs it acts on.

    Args:
        kernel: A sum, scaled as a whole or not; each part names its inputs.
        cover: Bounds and nodes per dimension of the grid over some inputs.
    """
    if isinstance(kernel, AdditiveKernel):
        parts = [additive_interpolated_kernel(part, cover) for part in kernel.kernels]
        return lambda X, X2: sum(part(X, X2) for part in parts)
    if isinstance(kernel, ScaleKernel):
        base = additive_interpolated_kernel(kernel.base_kernel, cover)
        return lambda X, X2: kernel.outputscale[..., None, None] * base(X, X2)
    dims = list(kernel.active_dims)
    bounds, sizes = cover(tuple(int(i) for i in dims))
    lines = node_inputs(bounds, sizes)
    nodes = torch.zeros(len(lines), max(dims) + 1, dtype=torch.float64)
    nodes[:, dims] = lines
    K = dense_kernel(kernel, nodes, nodes).to(torch.float64)

    def covariance(X: Tensor, X2: Tensor) -> Tensor:
        W, W2 = (interpolation_weights(x[..., dims], bounds, sizes) for x in (X, X2))
        return W @ K @ W2.mT

    return covariance


@torch.no_grad()
def kronecker_eigenpairs(
    kernel: Kernel, bounds: Tensor, sizes: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """All eigenvalues and eigenvectors of K as products of one-dimensional ones, largest first."""
    values, vectors = torch.ones(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    origin = bounds[:1].to(torch.float64)
    scale = dense_kernel(kernel, origin, origin).to(torch.float64)
    for i, size in enumerate(sizes):
        line = origin.repeat(size, 1)
        line[:, i] = grid_nodes(float(bounds[0, i]), float(bounds[1, i]), size)
        own_values, own_vectors = torch.linalg.eigh(dense_kernel(kernel, line, line) / scale)
        values = torch.kron(values, own_values)
        vectors = torch.kron(vectors, own_vectors)
    order = values.argsort(descending=True)
    return scale.squeeze() * values[order], vectors[:, order]


def largest_eigenvectors(
    kernel: Kernel, bounds: Tensor, sizes: tuple[int, ...], rank: int
) -> Tensor:
    """The eigenvectors of the ``rank`` largest eigenvalues of K, ``p x rank``."""
    return kronecker_eigenpairs(kernel, bounds, sizes)[1][:, :rank]
