"""One grid for each part of a sum of kernels, over the inputs that the part acts on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.bases.grid import Grid, Mesh, Sizes, columns


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
