"""The interpolation basis: kernels on grids, in their largest Kronecker eigenvectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from bo_stream.bases.basis import Basis
from bo_stream.bases.grid.kernel import GridKernel, KernelFactors
from bo_stream.bases.grid.mesh import Grid, Mesh, columns


@dataclass(frozen=True)
class GridBasis(Basis):
    """Features of ``Σ_g k̃_g(x_g, x'_g)`` on one grid or on several, without residual covariance.

    Those of every part are independent a priori. Kept are the r largest eigenvalues of all parts
    together, in order of their size.

    Attributes:
        parts: The features on each grid.
        grid: The grids.
        scale: Prior variance, the sum of the parts', ``... x m``.
        member: The part that each feature belongs to, ``r``.
        dropped: Truncated part of the kernel's trace, the largest over the outputs.
    """

    parts: tuple[InterpolationBasis, ...]
    grid: Mesh
    scale: Tensor
    member: Tensor
    dropped: float

    @property
    def rank(self) -> int:
        """Number r of features."""
        return self.member.shape[0]

    @cached_property
    def order(self) -> Tensor:
        """Position of each feature among those of the parts side by side, ``r``."""
        return self.member.argsort(stable=True).argsort()

    def features(self, X: Tensor) -> Tensor:
        """Compute the features, ``... x n x d -> ... x m x n x r``. Cost O(n (Σ g_i² + r d))."""
        found = []
        for part, group in zip(self.parts, self.grid.groups, strict=True):
            own = X if len(self.parts) == 1 else columns(X, group)
            lines = part.grid.interpolation_matrices(own.unsqueeze(-3))
            product = part.scale.sqrt()[..., None, None].expand(*part.scale.shape, 1, 1)
            for line, root, index in zip(lines, part.roots, part.index.unbind(-1), strict=True):
                values = line @ root
                chosen = index.expand(*values.shape[:-1], index.shape[0])
                product = product * values.gather(-1, chosen)
            found.append(product)
        return found[0] if len(found) == 1 else self.joined(found)

    def shares(self) -> Tensor:
        """Return all eigenvalues, kept or not, in parts of the prior variance, ``... x m x p``."""
        shares = [relative_products(part.eigenvalues) for part in self.parts]
        if len(shares) == 1:
            return shares[0]
        weights = ((part.scale / self.scale).unsqueeze(-1) for part in self.parts)
        return torch.cat([w * own for w, own in zip(weights, shares, strict=True)], -1)

    def leading(self, rank: int) -> GridBasis:
        """Return the first features only, the largest."""
        return self._between(0, rank)

    def trailing(self, rank: int) -> GridBasis:
        """Return all but the first features."""
        return self._between(rank, self.rank)

    def _between(self, first: int, last: int) -> GridBasis:
        ends = (self.member[:end].bincount(minlength=len(self.parts)) for end in (first, last))
        triples = zip(self.parts, *(end.tolist() for end in ends), strict=True)
        parts = (replace(part, index=part.index[begin:end]) for part, begin, end in triples)
        return replace(self, parts=tuple(parts), member=self.member[first:last])

    def enough(self, tolerance: float, max_rank: int) -> int:
        """Count the leading features that truncate at most ``tolerance`` of the trace."""
        return select_largest(self.shares(), tolerance, max_rank)[0].shape[0]

    def joined(self, values: Sequence[Tensor], dim: int = -1) -> Tensor:
        """Put values of each part's features in the order of the features."""
        if len(values) == 1:
            return values[0]
        return torch.cat(list(values), dim).index_select(dim, self.order)

    def in_order(self, matrix: Tensor) -> Tensor:
        """Put a matrix between the parts' features side by side in the order of the features."""
        if len(self.parts) == 1:
            return matrix
        return matrix.index_select(-2, self.order).index_select(-1, self.order)

    def own_blocks(self, matrix: Tensor) -> list[Tensor]:
        """Extract the blocks of a matrix within each part."""
        if len(self.parts) == 1:
            return [matrix]
        positions = self.order.argsort().split([part.rank for part in self.parts])
        return [matrix.index_select(-2, own).index_select(-1, own) for own in positions]


@dataclass(frozen=True)
class InterpolationBasis:
    """Features of ``k̃(x, x') = w(x)ᵀ K w(x')`` on a grid, K the kernel on its nodes.

    K is a Kronecker product, ``K = E Λ Eᵀ`` one dimension at a time. Kept are some products of
    eigenvalues: ``z_α(x) = √λ_α Π_i w_iᵀ e_{α_i}``, so the prior root is ``E Λ^½`` and is never
    formed. Source: WISKI, section 4; the truncation is ours.

    Attributes:
        grid: Nodes.
        eigenvalues: Per dimension, ``... x m x g_i``, largest first.
        eigenvectors: Per dimension, ``... x m x g_i x g_i``.
        scale: Prior variance, ``... x m``.
        index: The kept products, ``r x d``.
    """

    grid: Grid
    eigenvalues: tuple[Tensor, ...]
    eigenvectors: tuple[Tensor, ...]
    scale: Tensor
    index: Tensor

    @property
    def rank(self) -> int:
        """Number r of features."""
        return self.index.shape[0]

    @cached_property
    def roots(self) -> list[Tensor]:
        """Eigenvectors times the root of their eigenvalue, as far as any product needs them."""
        return self._scaled([values.sqrt() for values in self.eigenvalues])

    @cached_property
    def whitenings(self) -> list[Tensor]:
        """Eigenvectors over the root of their eigenvalue, as :attr:`roots`; 0 where that is 0."""
        return self._scaled([torch.where(v > 0, v.rsqrt(), 0.0) for v in self.eigenvalues])

    @cached_property
    def product_whitenings(self) -> list[Tensor]:
        """Column of :attr:`whitenings` of each feature, per dimension, ``... x g x r``."""
        return [line[..., self.index[:, i]] for i, line in enumerate(self.whitenings)]

    def _scaled(self, factors: list[Tensor]) -> list[Tensor]:
        largest = self.index.amax(0).tolist() if self.rank > 0 else [0] * self.grid.dim
        lines = zip(self.eigenvectors, factors, largest, strict=True)
        return [vectors[..., : i + 1] * own[..., None, : i + 1] for vectors, own, i in lines]


def grid_basis(
    mesh: Mesh, kernel: GridKernel, batch: torch.Size, tolerance: float, max_rank: int
) -> GridBasis:
    """Build the basis of a kernel. Cost O(Σ g_i³ + p log p) over all grids.

    Args:
        mesh: Made for the kernel.
        kernel: Differentiable or not; its hyperparameters are used as they are now.
        batch: ``batch_shape x m``, to which the hyperparameters broadcast.
        tolerance: Largest part of the trace of K that may be truncated.
        max_rank: Cap on r, whatever the tolerance.
    """
    pairs = zip(kernel.parts, mesh.parts, strict=True)
    parts = tuple(_eigenbasis(factors, grid, batch) for factors, grid in pairs)
    scale = parts[0].scale
    if len(parts) > 1:
        scale = torch.stack([part.scale for part in parts]).sum(0)
    nothing = torch.zeros(0, dtype=torch.long, device=scale.device)
    whole = GridBasis(parts, mesh, scale, nothing, 1.0)
    chosen, dropped = select_largest(whole.shares(), tolerance, max_rank)
    ends = torch.tensor([grid.num_nodes for grid in mesh.parts], device=chosen.device).cumsum(0)
    member = torch.bucketize(chosen, ends, right=True)
    terms = []
    for g, part in enumerate(parts):
        own = chosen[member == g] - (ends[g] - mesh.parts[g].num_nodes)
        sizes = [values.shape[-1] for values in part.eigenvalues]
        terms.append(replace(part, index=torch.stack(torch.unravel_index(own, sizes), dim=-1)))
    return replace(whole, parts=tuple(terms), member=member, dropped=dropped)


def _eigenbasis(factors: KernelFactors, grid: Grid, batch: torch.Size) -> InterpolationBasis:
    """Compute the eigenvectors of a kernel's factors, with no feature chosen. Cost O(Σ g_i³)."""
    matrices = [node_correlation(factors, grid, i).detach() for i in range(grid.dim)]
    pairs = [torch.linalg.eigh(matrix.expand(*batch, *matrix.shape[-2:])) for matrix in matrices]
    values = tuple(own.flip(-1).clamp_min(0.0) for own, _ in pairs)
    vectors = tuple(own.flip(-1) for _, own in pairs)
    scale = factors.scale().detach().to(values[0].device).expand(batch)
    nothing = torch.zeros(0, grid.dim, dtype=torch.long, device=scale.device)
    return InterpolationBasis(grid, values, vectors, scale, nothing)


def select_largest(shares: Tensor, tolerance: float, max_rank: int) -> tuple[Tensor, float]:
    """Select the largest of ``... x p`` shares that sum to one, one set for all batch elements.

    Returns:
        Their positions, largest first, and the largest sum of the other shares.
    """
    rows = shares.reshape(-1, shares.shape[-1])
    best = rows.amax(0)
    order = best.argsort(descending=True, stable=True)
    left = 1.0 - rows[:, order].cumsum(-1).amin(0)
    enough = int((left > tolerance).sum()) + 1 if tolerance > 0 else int((best > 0).sum())
    rank = max(1, min(enough, max_rank, order.numel()))
    return order[:rank], max(float(left[rank - 1]), 0.0)


def relative_products(eigenvalues: tuple[Tensor, ...]) -> Tensor:
    """Compute all products of eigenvalues in parts of their sum, ``... x p``."""
    shares = torch.ones((), dtype=torch.float64, device=eigenvalues[0].device)
    for values in eigenvalues:
        share = values / values.sum(-1, keepdim=True)
        shares = (shares.unsqueeze(-1) * share.unsqueeze(-2)).flatten(-2) if shares.ndim else share
    return shares


def node_correlation(factors: KernelFactors, grid: Grid, dimension: int) -> Tensor:
    """Compute the correlation matrix of one dimension's nodes, ``... x g x g``, differentiable."""
    nodes = grid.nodes(dimension).to(factors.device)
    return factors.correlation(dimension, nodes, nodes)


def first_correlations(factors: KernelFactors, grid: Grid, dimension: int) -> Tensor:
    """Compute correlations of one dimension's first node with all nodes, ``... x g``.

    Differentiable. The nodes are evenly spaced and the kernel is stationary: this is the content of
    :func:`node_correlation`.
    """
    distances = grid.distances(dimension).to(factors.device)
    return factors.correlation(dimension, distances[:1], distances).squeeze(-2)
