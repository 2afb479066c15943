"""Meshes of one grid."""

from __future__ import annotations

from torch import Tensor

from bo_stream.bases.grid.mesh import Grid, Mesh


def mesh_of(grid: Grid) -> Mesh:
    """A grid as a mesh over all inputs."""
    return Mesh((grid,), (tuple(range(grid.dim)),))


def mesh_over(bounds: Tensor, sizes: tuple[int, ...]) -> Mesh:
    """Nodes over a box."""
    return mesh_of(Grid.over(bounds, sizes))
