"""The interpolation basis: a product kernel on a grid, in its largest Kronecker eigenvectors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bo_stream.bases.basis import Basis
from bo_stream.bases.cell_gram import CellGram, ravel
from bo_stream.bases.contraction import contract
from bo_stream.bases.cubic import gauss_legendre
from bo_stream.bases.grid import Grid
from bo_stream.bases.kernel_factors import KernelFactors


@dataclass(frozen=True)
class InterpolationBasis(Basis):
    """Features of ``k̃(x, x') = w(x)ᵀ K w(x')``, K the kernel on the grid's nodes.

    K is a Kronecker product, ``K = E Λ Eᵀ`` one dimension at a time. Kept are the r products of
    eigenvalues that carry all but a stated part of the trace: ``z_α(x) = √λ_α Π_i w_iᵀ e_{α_i}``,
    so the prior root is ``E Λ^½`` and is never formed. Source: WISKI, section 4; the truncation is
    ours.

    Attributes:
        grid: Nodes.
        eigenvalues: Per dimension, ``... x m x g_i``, largest first.
        eigenvectors: Per dimension, ``... x m x g_i x g_i``.
        scale: Prior variance, ``... x m``.
        index: The kept products, ``r x d``.
        dropped: Part of the kernel's trace that was left out, the largest over the outputs.
    """

    grid: Grid
    eigenvalues: tuple[Tensor, ...]
    eigenvectors: tuple[Tensor, ...]
    scale: Tensor
    index: Tensor
    dropped: float

    @property
    def rank(self) -> int:
        """Number r of features."""
        return self.index.shape[0]

    def features(self, X: Tensor) -> Tensor:
        """Whitened features, ``... x n x d -> ... x m x n x r``. Cost O(n (Σ g_i² + r d))."""
        wide = X.unsqueeze(-3)
        product = self.scale.sqrt()[..., None, None].expand(*self.scale.shape, 1, 1)
        for i, root in enumerate(self.roots):
            values = self.grid.interpolation_matrix(i, wide[..., i]) @ root
            chosen = self.index[:, i].expand(*values.shape[:-1], self.rank)
            product = product * values.gather(-1, chosen)
        return product

    @cached_property
    def roots(self) -> list[Tensor]:
        """Eigenvectors times the root of their eigenvalue, as far as any product needs them."""
        return [
            vectors[..., :kept] * values[..., None, :kept].sqrt()
            for vectors, values, kept in zip(
                self.eigenvectors, self.eigenvalues, self._kept(), strict=True
            )
        ]

    def _kept(self) -> list[int]:
        return [int(largest) + 1 for largest in self.index.amax(0)]

    def residual_covariance(self, X: Tensor, X2: Tensor) -> None:
        """None: the basis carries its whole kernel k̃."""

    def residual_variance(self, X: Tensor) -> None:
        """None: the basis carries its whole kernel k̃."""

    def integrated_gram(self, bounds: Tensor) -> Tensor:
        """Mean of ``z zᵀ`` over the box ``bounds`` (``2 x d``), exact, ``... x m x r x r``.

        Products of interpolated eigenvectors are polynomials of degree 6 in each cell, integrated
        exactly by four Gauss points; the box is cut at the cell borders.
        """
        result = self.scale[..., None, None].expand(*self.scale.shape, 1, 1)
        for i, root in enumerate(self.roots):
            x, quadrature = _cellwise_quadrature(self.grid, i, bounds[:, i].to(root))
            values = self.grid.interpolation_matrix(i, x) @ root
            line = values.mT @ (values * quadrature.unsqueeze(-1))
            column = self.index[:, i]
            result = result * line.index_select(-2, column).index_select(-1, column)
        return result


def _cellwise_quadrature(grid: Grid, dimension: int, interval: Tensor) -> tuple[Tensor, Tensor]:
    """Points and weights (summing to one) that integrate cellwise polynomials of degree 7."""
    low, high = interval.tolist()
    nodes = grid.nodes(dimension)
    inner = nodes[(nodes > low) & (nodes < high)]
    edges = torch.cat((nodes.new_tensor([low]), inner, nodes.new_tensor([high])))
    t, quadrature = gauss_legendre(4)
    widths = edges.diff()
    points = edges[:-1, None] + widths[:, None] * t
    share = widths[:, None] * quadrature / (high - low)
    return points.flatten().to(interval), share.flatten().to(interval)


def interpolation_basis(
    factors: KernelFactors, grid: Grid, batch: torch.Size, tolerance: float, max_rank: int
) -> InterpolationBasis:
    """Build the basis of a kernel on a grid. Cost O(Σ g_i³ + p log p).

    Args:
        factors: The kernel.
        grid: The nodes.
        batch: ``batch_shape x m``, to which the hyperparameters broadcast.
        tolerance: Largest part of the trace of K that may be left out.
        max_rank: Cap on r, whatever the tolerance.
    """
    pairs = [_eigenpairs(factors, grid, i, batch) for i in range(grid.dim)]
    values = tuple(pair[0] for pair in pairs)
    index, dropped = select_products(values, tolerance, max_rank)
    scale = factors.scale().detach().to(values[0].device).expand(batch)
    return InterpolationBasis(grid, values, tuple(pair[1] for pair in pairs), scale, index, dropped)


def _eigenpairs(
    factors: KernelFactors, grid: Grid, dimension: int, batch: torch.Size
) -> tuple[Tensor, Tensor]:
    matrix = node_correlation(factors, grid, dimension).detach()
    values, vectors = torch.linalg.eigh(matrix.expand(*batch, *matrix.shape[-2:]))
    return values.flip(-1).clamp_min(0.0), vectors.flip(-1)


def node_correlation(factors: KernelFactors, grid: Grid, dimension: int) -> Tensor:
    """Correlation matrix of one dimension's nodes, ``... x g x g``, differentiable."""
    nodes = grid.nodes(dimension).to(factors.device)
    return factors.correlation(dimension, nodes, nodes)


def select_products(
    eigenvalues: tuple[Tensor, ...], tolerance: float, max_rank: int
) -> tuple[Tensor, float]:
    """The largest products of eigenvalues, one set that serves all batch elements.

    Returns:
        The index set, ``r x d``, and the largest part of a trace that it leaves out.
    """
    sizes = [values.shape[-1] for values in eigenvalues]
    shares = torch.ones((), dtype=torch.float64, device=eigenvalues[0].device)
    for values in eigenvalues:
        share = values / values.sum(-1, keepdim=True)
        shares = (shares.unsqueeze(-1) * share.unsqueeze(-2)).flatten(-2) if shares.ndim else share
    best = shares.reshape(-1, shares.shape[-1]).amax(0)
    order = best.argsort(descending=True, stable=True)
    left = 1.0 - shares.reshape(-1, shares.shape[-1])[:, order].cumsum(-1).amin(0)
    enough = int((left > tolerance).sum()) + 1 if tolerance > 0 else int((best > 0).sum())
    rank = max(1, min(enough, max_rank, order.numel()))
    index = torch.stack(torch.unravel_index(order[:rank], sizes), dim=-1)
    return index, max(float(left[rank - 1]), 0.0)


@dataclass(frozen=True)
class KroneckerPullBack:
    """The map ``v = R w`` from whitened weights to node values of a grid, R the Kronecker root.

    Attributes:
        basis: The basis whose weights w are.
        grid: The grid whose node values v are: the basis's own or another inside its box.
    """

    basis: InterpolationBasis
    grid: Grid

    def _node_roots(self) -> list[Tensor]:
        """Values at the grid's nodes of each dimension's root functions, ``... x m x g x r_i``."""
        roots = self.basis.roots
        own = self.basis.grid
        offset = self.grid.offset_in(own)
        if offset is not None:  # its nodes are nodes of the basis
            windows = zip(roots, offset, self.grid.size, strict=True)
            return [root[..., start : start + size, :] for root, start, size in windows]
        nodes = [self.grid.nodes(i).to(roots[0]) for i in range(own.dim)]
        return [own.interpolation_matrix(i, x) @ roots[i] for i, x in enumerate(nodes)]

    def congruence(self, gram: CellGram) -> Tensor:
        """``Rᵀ gram R``, ``... x m x r x r``, one dimension at a time. Cost O((7 g)^d g²)."""
        roots = self._node_roots()
        batch = self.basis.scale.shape
        shape = torch.broadcast_shapes(batch, gram.moments.shape[:-2])
        moments = gram.moments.expand(*shape, *gram.moments.shape[-2:])
        flat_roots = [r.expand(*shape, *r.shape[-2:]).flatten(0, -3) for r in roots]
        flat = CellGram(moments.reshape(-1, *moments.shape[-2:]), gram.cells).by_dimension()
        results = [
            contract(flat[b], [root[b] for root in flat_roots], self.basis.index)
            for b in range(flat.shape[0])
        ]
        scale = self.basis.scale[..., None, None]
        return torch.stack(results).reshape(*shape, *results[0].shape) * scale

    def transpose(self, moment: Tensor) -> Tensor:
        """``Rᵀ moment``, ``... x m x p x 2 -> ... x m x r x 2``. Cost O(p Σ r_i)."""
        sizes = [root.shape[-1] for root in self._node_roots()]
        flat = moment.flatten(-2)
        for root in self._node_roots():
            flat = (flat.unflatten(-1, (root.shape[-2], -1)).mT @ root).flatten(-2)
        products = flat.unflatten(-1, (moment.shape[-1], math.prod(sizes)))
        kept = products[..., ravel(self.basis.index, sizes)].mT
        return kept * self.basis.scale.sqrt()[..., None, None]
