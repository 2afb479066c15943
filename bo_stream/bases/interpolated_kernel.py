"""The interpolated kernel between points, without features: a product of one-dimensional ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from bo_stream.bases.grid import Mesh
from bo_stream.bases.grid_kernel import GridKernel
from bo_stream.bases.interpolation import node_correlation
from bo_stream.linalg import row_product, stack_columns


def interpolation_lines(mesh: Mesh, X: Tensor) -> Tensor:
    """Interpolation weights of all grids' dimensions side by side, differentiable.

    Args:
        mesh: The nodes.
        X: ``... x n x d``, inside the mesh's box.

    Returns:
        ``... x n x G`` with ``G = Σ g_i`` nodes of all dimensions of all grids.
    """
    pairs = zip(mesh.parts, mesh.groups, strict=True)
    own = (grid.interpolation_matrices(X[..., list(group)]) for grid, group in pairs)
    return torch.cat([line for lines in own for line in lines], -1)


@dataclass(frozen=True)
class InterpolatedKernel:
    """``k̃(x, x') = Σ_g s_g Π_i w_i(x)ᵀ K_i w_i(x')`` over the parts g of a sum of products.

    The tensor product of one-dimensional interpolations makes each part a product of
    one-dimensional interpolated kernels. So no node of the whole grid is visited and nothing is
    truncated. Differentiable in the kernel's hyperparameters and in the weights w.

    Attributes:
        scales: s_g per part, ``... x m``.
        correlations: K_i per part and dimension, ``... x m x g_i x g_i``.
    """

    scales: tuple[Tensor, ...]
    correlations: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def of(cls, kernel: GridKernel, mesh: Mesh) -> InterpolatedKernel:
        """The kernel at its present hyperparameters on a mesh. Cost O(Σ g_i²)."""
        pairs = list(zip(kernel.parts, mesh.parts, strict=True))
        correlations = tuple(
            tuple(node_correlation(part, grid, i) for i in range(grid.dim)) for part, grid in pairs
        )
        scales = (
            part.scale().to(own[0].device)
            for (part, _), own in zip(pairs, correlations, strict=True)
        )
        return cls(tuple(scales), correlations)

    def images(self, lines: Tensor) -> Tensor:
        """``K_i w_i(x)`` of all dimensions side by side, ``... x m x n x G``. Cost O(n Σ g_i²)."""
        matrices = [matrix for part in self.correlations for matrix in part]
        own = self._by_dimension(lines)
        return reduce(stack_columns, map(row_product, own, matrices))

    def covariance(self, lines: Tensor, images: Tensor) -> Tensor:
        """Covariance of n points with n' others, ``... x m x n x n'``. Cost O(n n' G).

        Args:
            lines: Interpolation weights of the points, ``... x 1 x n x G``.
            images: Of the others, from :meth:`images`, ``... x m x n' x G``.
        """
        pairs = zip(self._by_dimension(lines), self._by_dimension(images), strict=True)
        return self._summed((row_product(w, image.mT) for w, image in pairs), 2)

    def variance(self, lines: Tensor, images: Tensor) -> Tensor:
        """Prior variance at n points, ``... x m x n``. Cost O(n G).

        Args:
            lines: Interpolation weights of the points, ``... x 1 x n x G``.
            images: Of the same points, from :meth:`images`.
        """
        pairs = zip(self._by_dimension(lines), self._by_dimension(images), strict=True)
        return self._summed(((w * image).sum(-1) for w, image in pairs), 1)

    def _by_dimension(self, columns: Tensor) -> tuple[Tensor, ...]:
        return columns.split([K.shape[-1] for part in self.correlations for K in part], -1)

    def _summed(self, values: Iterable[Tensor], after: int) -> Tensor:
        """``Σ_g s_g Π_i value_i`` of one value per dimension, with ``after`` dimensions after m."""
        remaining, total = iter(values), None
        for scale, part in zip(self.scales, self.correlations, strict=True):
            product = scale[(..., *(None,) * after)]
            for _ in part:
                product = product * next(remaining)
            total = product if total is None else total + product
        if total is None:
            raise ValueError("Expected a kernel of at least one part, got none.")
        return total
