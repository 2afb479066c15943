"""The interpolated kernel between points without features, from its one-dimensional factors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, starmap

import torch
from torch import Tensor

from bo_stream.bases.grid.interpolation import first_correlations, node_correlation
from bo_stream.bases.grid.kernel import GridKernel
from bo_stream.bases.grid.mesh import STENCIL, Mesh, columns, weights
from bo_stream.linalg import row_product, stack_columns


@dataclass(frozen=True)
class InterpolatedKernel:
    """Kernel ``k̃(x, x') = Σ_g s_g Π_i w_i(x)ᵀ K_i w_i(x')`` over the parts g of a sum of products.

    The tensor product of one-dimensional interpolations makes each part a product of
    one-dimensional interpolated kernels. So no node of the whole grid is visited and nothing is
    truncated. Differentiable in the kernel's hyperparameters and in the weights w. Points are given
    by their ``lines``, :func:`interpolation_lines`, ``... x 1 x n x G``, and by their
    :meth:`images`.

    Attributes:
        scales: s_g per part, ``... x m``.
        correlations: K_i per part and dimension, ``... x m x g_i x g_i``.
    """

    scales: tuple[Tensor, ...]
    correlations: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def of(cls, kernel: GridKernel, mesh: Mesh) -> InterpolatedKernel:
        """Evaluate a kernel's present hyperparameters on a mesh. Cost O(Σ g_i²)."""
        pairs = list(zip(kernel.parts, mesh.parts, strict=True))
        correlations = tuple(
            tuple(node_correlation(part, grid, i) for i in range(grid.dim)) for part, grid in pairs
        )
        return cls(_scales(kernel, correlations[0][0]), correlations)

    def images(self, lines: Tensor) -> Tensor:
        """Compute all ``K_i w_i(x)`` side by side, ``... x m x n x G``. Cost O(n Σ g_i²)."""
        own = zip(self._by_dimension(lines), chain(*self.correlations), strict=True)
        return reduce(stack_columns, starmap(row_product, own))

    def covariance(self, lines: Tensor, images: Tensor) -> Tensor:
        """Compute the covariance of points with others, ``... x m x n x n'``. Cost O(n n' G)."""
        pairs = zip(self._by_dimension(lines), self._by_dimension(images), strict=True)
        return self._summed((row_product(w, image.mT) for w, image in pairs), 2)

    def variance(self, lines: Tensor, images: Tensor) -> Tensor:
        """Compute the prior variance at n points, ``... x m x n``. Cost O(n G)."""
        pairs = zip(self._by_dimension(lines), self._by_dimension(images), strict=True)
        return self._summed(((w * image).sum(-1) for w, image in pairs), 1)

    def _by_dimension(self, columns: Tensor) -> tuple[Tensor, ...]:
        return columns.split([K.shape[-1] for K in chain(*self.correlations)], -1)

    def _summed(self, values: Iterable[Tensor], after: int) -> Tensor:
        return _summed(self.scales, [len(part) for part in self.correlations], values, after)


def interpolation_lines(mesh: Mesh, X: Tensor) -> Tensor:
    """Compute the interpolation weights of all dimensions, ``... x n x d -> ... x n x G``.

    ``G = Σ g_i`` counts the nodes of all dimensions of all grids. Differentiable.
    """
    pairs = zip(mesh.parts, mesh.groups, strict=True)
    own = (grid.interpolation_matrices(columns(X, group)) for grid, group in pairs)
    return torch.cat([line for lines in own for line in lines], -1)


@dataclass(frozen=True)
class Pairs:
    """All pairs of n points in one dimension of a grid.

    A point's weights w are those of ``STENCIL`` consecutive nodes, and the nodes are evenly spaced
    with distance h. So the interpolated correlation of a pair is ``w(x)ᵀ K w(x') = Σ_s c_s κ(s h)``
    over seven numbers of steps s, whatever the number of nodes.

    Attributes:
        steps: The numbers s, ``... x 1 x 7 n²``.
        products: Sums c_s of products of weights, ``... x 1 x 7 x n x n``.
    """

    steps: Tensor
    products: Tensor

    @classmethod
    def of(cls, cell: Tensor, position: Tensor) -> Pairs:
        """Pair points at positions in cells of a line of the grid, ``... x n`` each."""
        w = weights(position)
        node = torch.arange(STENCIL, device=cell.device)
        apart = torch.arange(1 - STENCIL, STENCIL, device=cell.device)[:, None, None]
        which = (node.unsqueeze(-1) - node == apart).to(w)
        products = torch.einsum("...ia,...jb,sab->...sij", w, w, which)
        cells = cell.unsqueeze(-1) - cell.unsqueeze(-2)
        steps = (cells.unsqueeze(-3) + apart).abs().flatten(-3)
        return cls(steps.unsqueeze(-2), products.unsqueeze(-4))

    def correlation(self, nodes: Tensor) -> Tensor:
        """Interpolate the first node's correlations, ``... x m x g -> ... x m x n x n``."""
        batch = torch.broadcast_shapes(nodes.shape[:-1], self.steps.shape[:-1])
        values = nodes.expand(*batch, -1).gather(-1, self.steps.expand(*batch, -1))
        return (values.unflatten(-1, self.products.shape[-3:]) * self.products).sum(-3)


def pairs_of(mesh: Mesh, X: Tensor) -> tuple[Pairs, ...]:
    """Pair points ``... x n x d`` in each dimension of each grid. Memory O(n²) for each."""
    groups = zip(mesh.parts, mesh.groups, strict=True)
    located = [grid.locate(columns(X, group)) for grid, group in groups]
    return tuple(
        Pairs.of(*line)
        for cell, position in located
        for line in zip(cell.unbind(-1), position.unbind(-1), strict=True)
    )


def covariance_of_pairs(kernel: GridKernel, mesh: Mesh, pairs: Sequence[Pairs]) -> Tensor:
    """Compute the covariance of n points, ``... x m x n x n``. Cost O(n² d + Σ g_i).

    As :meth:`InterpolatedKernel.covariance`, and cheaper for few points and many nodes.
    """
    parts = list(zip(kernel.parts, mesh.parts, strict=True))
    nodes = [first_correlations(part, grid, i) for part, grid in parts for i in range(grid.dim)]
    values = (own.correlation(row) for own, row in zip(pairs, nodes, strict=True))
    return _summed(_scales(kernel, nodes[0]), [grid.dim for _, grid in parts], values, 2)


def _scales(kernel: GridKernel, like: Tensor) -> tuple[Tensor, ...]:
    """Return the prior variance of each part, ``... x m``, on the device of a tensor."""
    return tuple(part.scale().to(like.device) for part in kernel.parts)


def _summed(
    scales: Sequence[Tensor], dims: Sequence[int], values: Iterable[Tensor], after: int
) -> Tensor:
    """Compute ``Σ_g s_g Π_i value_i`` over parts g of ``dims[g]`` dimensions i.

    ``values`` has one tensor per dimension of each part, with ``after`` dimensions after m.
    """
    remaining, total = iter(values), None
    for scale, dim in zip(scales, dims, strict=True):
        product = scale[(..., *(None,) * after)]
        for _ in range(dim):
            product = product * next(remaining)
        total = product if total is None else total + product
    if total is None:
        raise ValueError("Expected a kernel of at least one part, got none.")
    return total
