"""The basis of a sum of kernels: the largest eigenvectors of all its parts side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, singledispatch

import torch
from torch import Tensor

from bo_stream.bases.grid.interpolation import (
    GridBasis,
    InterpolationBasis,
    eigenbasis,
    interpolation_basis,
    relative_products,
    select_largest,
    unravel,
)
from bo_stream.bases.grid.kernel import GridKernel
from bo_stream.bases.grid.mesh import Grid, Mesh, Sizes, columns


@dataclass(frozen=True)
class AdditiveGrid(Mesh):
    """Grids over groups of inputs that may overlap; every input is in a group.

    Attributes:
        grids: One per group.
        dims: The groups.
    """

    grids: tuple[Grid, ...]
    dims: tuple[tuple[int, ...], ...]

    @property
    def parts(self) -> tuple[Grid, ...]:
        """The grids."""
        return self.grids

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups."""
        return self.dims

    @property
    def size(self) -> Sizes:
        """Nodes per dimension of each grid."""
        return tuple(grid.size for grid in self.grids)

    @property
    def bounds(self) -> Tensor:
        """The box that all grids cover, ``2 x d``."""
        return torch.stack((self._extreme(0, max), self._extreme(1, min)))

    def _extreme(self, side: int, choose: Callable[[list[float]], float]) -> Tensor:
        """The chosen one of the lower (0) or upper (1) ends of all grids, per input."""
        ends: dict[int, list[float]] = {}
        for grid, group in zip(self.grids, self.dims, strict=True):
            for i, end in zip(group, grid.bounds[side].tolist(), strict=True):
                ends.setdefault(i, []).append(end)
        return torch.tensor([choose(ends[i]) for i in sorted(ends)], dtype=torch.float64)

    def contains(self, X: Tensor) -> bool:
        """Whether all points lie in every grid's box."""
        pairs = zip(self.grids, self.dims, strict=True)
        return all(grid.contains(columns(X, group)) for grid, group in pairs)

    def grown_to(self, X: Tensor) -> AdditiveGrid:
        """Every grid grown by whole cells of its own."""
        pairs = zip(self.grids, self.dims, strict=True)
        return replace(self, grids=tuple(g.grown_to(columns(X, group)) for g, group in pairs))

    def grown_past(self, X: Tensor) -> AdditiveGrid:
        """Every grid grown by a power of two of its own cells on each side."""
        pairs = zip(self.grids, self.dims, strict=True)
        return replace(self, grids=tuple(g.grown_past(columns(X, group)) for g, group in pairs))

    def grown_over(self, other: Mesh) -> AdditiveGrid:
        """Every grid grown over the other's."""
        pairs = zip(self.grids, other.parts, strict=True)
        return replace(self, grids=tuple(grid.grown_over(theirs) for grid, theirs in pairs))

    def aligned(self, other: Mesh, rounding: float) -> AdditiveGrid:
        """Every grid aligned to the other's."""
        pairs = zip(self.grids, other.parts, strict=True)
        return replace(self, grids=tuple(g.aligned(theirs, rounding) for g, theirs in pairs))

    def resized(self, sizes: Sizes) -> AdditiveGrid:
        """Other nodes over the same boxes."""
        pairs = zip(self.grids, sizes, strict=True)
        return replace(self, grids=tuple(Grid.over(grid.bounds, size) for grid, size in pairs))


def mesh_over(bounds: Tensor, groups: tuple[tuple[int, ...], ...], sizes: Sizes) -> Mesh:
    """The nodes over ``bounds``, ``2 x d``, for a kernel whose parts act on these groups."""
    pairs = zip(groups, sizes, strict=True)
    grids = tuple(Grid.over(bounds[:, list(group)], size) for group, size in pairs)
    return grids[0] if len(grids) == 1 else AdditiveGrid(grids, groups)


@dataclass(frozen=True)
class AdditiveBasis(GridBasis):
    """Features of ``Σ_g k̃_g(x_g, x'_g)``: those of every part, independent a priori.

    Kept are the r largest eigenvalues of all parts together, in order of their size.

    Attributes:
        terms: The features of each part, on its own grid.
        grid: The grids.
        scale: Prior variance, the sum of the parts', ``... x m``.
        member: The part that each feature belongs to, ``r``.
        dropped: Part of the kernel's trace that was left out, the largest over the outputs.
    """

    terms: tuple[InterpolationBasis, ...]
    grid: AdditiveGrid
    scale: Tensor
    member: Tensor
    dropped: float

    @property
    def parts(self) -> tuple[InterpolationBasis, ...]:
        """The terms."""
        return self.terms

    @cached_property
    def order(self) -> Tensor:
        """Where each feature is among those of the parts side by side, ``r``."""
        return self.member.argsort(stable=True).argsort()

    @property
    def rank(self) -> int:
        """Number r of features."""
        return self.member.shape[0]

    def features(self, X: Tensor) -> Tensor:
        """Whitened features, ``... x n x d -> ... x m x n x r``. Cost the sum of the parts'."""
        pairs = zip(self.terms, self.grid.groups, strict=True)
        return self.joined([part.features(columns(X, group)) for part, group in pairs])

    def leading(self, rank: int) -> AdditiveBasis:
        """The first features only, the largest."""
        counts = self._counts(self.member[:rank])
        terms = (part.leading(count) for part, count in zip(self.terms, counts, strict=True))
        return replace(self, terms=tuple(terms), member=self.member[:rank])

    def trailing(self, rank: int) -> AdditiveBasis:
        """All but the first features."""
        counts = self._counts(self.member[:rank])
        terms = (part.trailing(count) for part, count in zip(self.terms, counts, strict=True))
        return replace(self, terms=tuple(terms), member=self.member[rank:])

    def _counts(self, member: Tensor) -> list[int]:
        return [int(count) for count in member.bincount(minlength=len(self.terms))]

    def enough(self, tolerance: float, max_rank: int) -> int:
        """How many leading features leave out at most ``tolerance`` of the trace."""
        return select_largest(_shares(self.terms, self.scale), tolerance, max_rank)[0].shape[0]


def _shares(parts: tuple[InterpolationBasis, ...], scale: Tensor) -> Tensor:
    """All eigenvalues of all parts in parts of the prior variance, ``... x m x Σ p``."""
    weights = ((part.scale / scale).unsqueeze(-1) for part in parts)
    pairs = zip(weights, parts, strict=True)
    return torch.cat([weight * relative_products(part.eigenvalues) for weight, part in pairs], -1)


@singledispatch
def grid_basis(
    mesh: Mesh, kernel: GridKernel, batch: torch.Size, tolerance: float, max_rank: int
) -> GridBasis:
    """Build the basis of a kernel. Cost O(Σ g_i³ + p log p) over all grids.

    Args:
        mesh: The nodes.
        kernel: The kernel that they were made for.
        batch: ``batch_shape x m``, to which the hyperparameters broadcast.
        tolerance: Largest part of the trace of K that may be left out.
        max_rank: Cap on r, whatever the tolerance.
    """
    raise TypeError(f"Expected a Grid or an AdditiveGrid, got {type(mesh).__name__}.")


@grid_basis.register
def _(
    mesh: Grid, kernel: GridKernel, batch: torch.Size, tolerance: float, max_rank: int
) -> InterpolationBasis:
    return interpolation_basis(kernel.parts[0], mesh, batch, tolerance, max_rank)


@grid_basis.register
def _(
    mesh: AdditiveGrid, kernel: GridKernel, batch: torch.Size, tolerance: float, max_rank: int
) -> AdditiveBasis:
    pairs = zip(kernel.parts, mesh.grids, strict=True)
    wholes = tuple(eigenbasis(factors, grid, batch) for factors, grid in pairs)
    scale = torch.stack([whole.scale for whole in wholes]).sum(0)
    chosen, dropped = select_largest(_shares(wholes, scale), tolerance, max_rank)
    ends = torch.tensor([grid.num_nodes for grid in mesh.grids], device=chosen.device).cumsum(0)
    member = torch.bucketize(chosen, ends, right=True)
    terms = []
    for g, whole in enumerate(wholes):
        own = chosen[member == g] - (ends[g] - mesh.grids[g].num_nodes)
        terms.append(replace(whole, index=unravel(own, whole.eigenvalues), dropped=dropped))
    return AdditiveBasis(tuple(terms), mesh, scale, member, dropped)
