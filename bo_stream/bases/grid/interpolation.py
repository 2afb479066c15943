"""The interpolation basis: a product kernel on a grid, in its largest Kronecker eigenvectors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from bo_stream.bases.basis import Basis
from bo_stream.bases.grid.kernel import KernelFactors
from bo_stream.bases.grid.mesh import Grid, Mesh


class GridBasis(Basis):
    """Features on one grid or on several, none with features of two grids.

    Attributes:
        grid: Nodes.
        scale: Prior variance, ``... x m``.
        dropped: Part of the kernel's trace that was left out, the largest over the outputs.
    """

    grid: Mesh
    scale: Tensor
    dropped: float

    @property
    @abstractmethod
    def parts(self) -> tuple[InterpolationBasis, ...]:
        """The features of each grid."""

    @property
    @abstractmethod
    def order(self) -> Tensor | None:
        """Where each feature is among those of the parts side by side; None: in its place."""

    @abstractmethod
    def leading(self, rank: int) -> Self:
        """The first features only, the largest."""

    @abstractmethod
    def trailing(self, rank: int) -> Self:
        """All but the first features."""

    @abstractmethod
    def enough(self, tolerance: float, max_rank: int) -> int:
        """How many leading features leave out at most ``tolerance`` of the trace."""

    def residual_covariance(
        self,
        X: Tensor,
        X2: Tensor,
        features: Tensor | None = None,
        features2: Tensor | None = None,
    ) -> None:
        """None: the basis carries its whole kernel k̃."""

    def residual_variance(self, X: Tensor, features: Tensor | None = None) -> None:
        """None: the basis carries its whole kernel k̃."""

    def joined(self, values: Sequence[Tensor], dim: int = -1) -> Tensor:
        """Values of each part's features as values of the features."""
        if self.order is None:
            return values[0]
        return torch.cat(list(values), dim).index_select(dim, self.order)

    def in_order(self, matrix: Tensor) -> Tensor:
        """A matrix between the parts' features side by side as one of the features, both ways."""
        if self.order is None:
            return matrix
        return matrix.index_select(-2, self.order).index_select(-1, self.order)

    def own_blocks(self, matrix: Tensor) -> list[Tensor]:
        """The blocks of a matrix within each part."""
        if self.order is None:
            return [matrix]
        positions = self.order.argsort().split([part.rank for part in self.parts])
        return [matrix.index_select(-2, own).index_select(-1, own) for own in positions]


@dataclass(frozen=True)
class InterpolationBasis(GridBasis):
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
    def parts(self) -> tuple[InterpolationBasis, ...]:
        """This basis alone."""
        return (self,)

    @property
    def order(self) -> None:
        """None: the features are this basis's own."""

    @property
    def rank(self) -> int:
        """Number r of features."""
        return self.index.shape[0]

    def features(self, X: Tensor) -> Tensor:
        """Whitened features, ``... x n x d -> ... x m x n x r``. Cost O(n (Σ g_i² + r d))."""
        lines = self.grid.interpolation_matrices(X.unsqueeze(-3))
        product = self.scale.sqrt()[..., None, None].expand(*self.scale.shape, 1, 1)
        for i, (line, root) in enumerate(zip(lines, self.roots, strict=True)):
            values = line @ root
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

    @cached_property
    def whitenings(self) -> list[Tensor]:
        """Eigenvectors over the root of their eigenvalue, as :attr:`roots`; 0 where that is 0."""
        return [
            vectors[..., :kept] * torch.where(values > 0, values.rsqrt(), 0.0)[..., None, :kept]
            for vectors, values, kept in zip(
                self.eigenvectors, self.eigenvalues, self._kept(), strict=True
            )
        ]

    @cached_property
    def product_whitenings(self) -> list[Tensor]:
        """Of each dimension, the column of :attr:`whitenings` of each feature, ``... x g x r``."""
        return [line[..., self.index[:, i]] for i, line in enumerate(self.whitenings)]

    def _kept(self) -> list[int]:
        if self.rank == 0:
            return [1] * self.grid.dim
        return [int(largest) + 1 for largest in self.index.amax(0)]

    def leading(self, rank: int) -> InterpolationBasis:
        """The first features only, the largest."""
        return replace(self, index=self.index[:rank])

    def trailing(self, rank: int) -> InterpolationBasis:
        """All but the first features."""
        return replace(self, index=self.index[rank:])

    def enough(self, tolerance: float, max_rank: int) -> int:
        """How many leading features leave out at most ``tolerance`` of the trace."""
        return select_products(self.eigenvalues, tolerance, max_rank)[0].shape[0]


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
    whole = eigenbasis(factors, grid, batch)
    index, dropped = select_products(whole.eigenvalues, tolerance, max_rank)
    return replace(whole, index=index, dropped=dropped)


def eigenbasis(factors: KernelFactors, grid: Grid, batch: torch.Size) -> InterpolationBasis:
    """The eigenvectors of a kernel's factors, with no feature chosen yet. Cost O(Σ g_i³)."""
    pairs = [_eigenpairs(factors, grid, i, batch) for i in range(grid.dim)]
    values, vectors = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
    scale = factors.scale().detach().to(values[0].device).expand(batch)
    nothing = torch.zeros(0, grid.dim, dtype=torch.long, device=scale.device)
    return InterpolationBasis(grid, values, vectors, scale, nothing, 1.0)


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


def first_correlations(factors: KernelFactors, grid: Grid, dimension: int) -> Tensor:
    """Correlations of one dimension's first node with all nodes, ``... x g``, differentiable.

    The nodes are evenly spaced and the kernel is stationary: all that :func:`node_correlation` has.
    """
    distances = grid.distances(dimension).to(factors.device)
    return factors.correlation(dimension, distances[:1], distances).squeeze(-2)


def select_products(
    eigenvalues: tuple[Tensor, ...], tolerance: float, max_rank: int
) -> tuple[Tensor, float]:
    """The largest products of eigenvalues, one set that serves all batch elements.

    Returns:
        The index set, ``r x d``, and the largest part of a trace that it leaves out.
    """
    chosen, dropped = select_largest(relative_products(eigenvalues), tolerance, max_rank)
    return unravel(chosen, eigenvalues), dropped


def relative_products(eigenvalues: tuple[Tensor, ...]) -> Tensor:
    """All products of eigenvalues in parts of their sum, ``... x p``."""
    shares = torch.ones((), dtype=torch.float64, device=eigenvalues[0].device)
    for values in eigenvalues:
        share = values / values.sum(-1, keepdim=True)
        shares = (shares.unsqueeze(-1) * share.unsqueeze(-2)).flatten(-2) if shares.ndim else share
    return shares


def select_largest(shares: Tensor, tolerance: float, max_rank: int) -> tuple[Tensor, float]:
    """The largest of ``... x p`` shares that sum to one, one set that serves all batch elements.

    Returns:
        Their positions, largest first, and the largest sum of shares that they leave out.
    """
    rows = shares.reshape(-1, shares.shape[-1])
    best = rows.amax(0)
    order = best.argsort(descending=True, stable=True)
    left = 1.0 - rows[:, order].cumsum(-1).amin(0)
    enough = int((left > tolerance).sum()) + 1 if tolerance > 0 else int((best > 0).sum())
    rank = max(1, min(enough, max_rank, order.numel()))
    return order[:rank], max(float(left[rank - 1]), 0.0)


def unravel(chosen: Tensor, eigenvalues: tuple[Tensor, ...]) -> Tensor:
    """Positions among all products as indices per dimension, ``r -> r x d``."""
    sizes = [values.shape[-1] for values in eigenvalues]
    return torch.stack(torch.unravel_index(chosen, sizes), dim=-1)
