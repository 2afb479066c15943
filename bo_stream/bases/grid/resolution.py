"""How well a grid carries a kernel, and how fine it must be."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bo_stream.bases.grid.kernel import GridKernel, KernelFactors
from bo_stream.bases.grid.mesh import Grid, Mesh, Sizes

DEFAULT_SIZES: dict[str, dict[int, int]] = {
    "smooth": {1: 128, 2: 36, 3: 20, 4: 12},
    "rough": {1: 192, 2: 60, 3: 26, 4: 12},
}
"""Nodes per dimension by the kernel's smoothness (rough: any Matérn) and the number d of inputs."""

_LARGEST_SUGGESTION = 2048
_PROBES = (0.25, 0.5, 0.618033988749895, 0.75)  # in cells; no period divides all their distances


def default_grid_size(kernel: GridKernel, dim: int) -> Sizes:
    """Nodes per dimension of each grid that meet the accuracies of ``benchmarks/accuracy.py``.

    By smoothness only: a grid is chosen before the hyperparameters are learned. A period or the
    inverse of a mixture's frequency shorter than about six cells needs a finer grid than this;
    :func:`interpolation_error` then tells so, and :func:`sufficient_grid_size` which.
    """
    pairs = zip(kernel.parts, kernel.groups(dim), strict=True)
    return tuple(_default_size(factors, len(group)) for factors, group in pairs)


def _default_size(factors: KernelFactors, dim: int) -> tuple[int, ...]:
    kind = "smooth" if math.isinf(factors.smoothness) else "rough"
    return (DEFAULT_SIZES[kind][dim],) * dim


def interpolation_error(kernel: GridKernel, mesh: Mesh) -> float:
    """Bound on ``|k − k̃|`` in parts of the prior variance, from probes inside the cells.

    A part of the kernel is a product of factors of at most one, hence its error is at most the sum
    of the errors of its dimensions. Those are probed at points between the nodes. Cost O(Σ g³).
    """
    total = kernel.scale().detach()
    return sum(
        float((factors.scale().detach().to(total) / total).max()) * _part_error(factors, grid)
        for factors, grid in zip(kernel.parts, mesh.parts, strict=True)
    )


def _part_error(factors: KernelFactors, grid: Grid) -> float:
    return sum(float(dimension_error(factors, grid, i).max()) for i in range(grid.dim))


def dimension_error(factors: KernelFactors, grid: Grid, dimension: int) -> Tensor:
    """Largest error of one dimension's interpolated correlation, ``...``."""
    with torch.no_grad():
        offsets = torch.tensor(_PROBES, dtype=torch.float64)
        nodes = grid.nodes(dimension)
        middle = grid.cells[dimension] // 2
        cells = sorted({0, middle, grid.cells[dimension] - 1})
        x = (nodes[[c + 1 for c in cells], None] + offsets * grid.spacing[dimension]).flatten()
        x, nodes = x.to(factors.device), nodes.to(factors.device)
        weights = grid.interpolation_matrix(dimension, x)
        approximate = weights @ factors.correlation(dimension, nodes, nodes) @ weights.mT
        return (approximate - factors.correlation(dimension, x, x)).abs().amax((-2, -1))


def sufficient_grid_size(kernel: GridKernel, mesh: Mesh, tolerance: float) -> Sizes | None:
    """The smallest grids over the same boxes, found by growing by a quarter, of at most this error.

    Returns:
        Nodes per dimension of each, or None where more than ``2048`` a side would be needed.
    """
    pairs = zip(kernel.parts, mesh.parts, strict=True)
    sizes = [_sufficient_size(factors, grid, tolerance) for factors, grid in pairs]
    enough = tuple(size for size in sizes if size is not None)
    return enough if len(enough) == len(sizes) else None


def _sufficient_size(
    factors: KernelFactors, grid: Grid, tolerance: float
) -> tuple[int, ...] | None:
    sizes: list[int] = []
    for i in range(grid.dim):
        size = _sufficient_line(factors, grid, i, tolerance / grid.dim)
        if size is None:
            return None
        sizes.append(size)
    return tuple(sizes)


def _sufficient_line(
    factors: KernelFactors, grid: Grid, dimension: int, tolerance: float
) -> int | None:
    size = grid.size[dimension]
    while size <= _LARGEST_SUGGESTION:
        sizes = tuple(size if i == dimension else n for i, n in enumerate(grid.size))
        finer = Grid.over(grid.bounds, sizes)
        if float(dimension_error(factors, finer, dimension).max()) <= tolerance:
            return size
        size = math.ceil(1.25 * size)
    return None
