"""Interpolation error of a kernel on a grid, and the grid size that an error needs."""

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
_NEAR, _APART = 8, 48
"""Cells that are probed with the first: the nearest, and as many more over the whole line."""


def default_grid_size(kernel: GridKernel, dim: int) -> Sizes:
    """Return nodes per dimension of each grid, as ``benchmarks/accuracy/accuracy.py`` measures.

    By smoothness only: a grid is chosen before the hyperparameters are learned. A period or the
    inverse of a mixture's frequency shorter than about six cells needs a finer grid than this;
    :func:`interpolation_error` tells whether, and :func:`sufficient_grid_size` which.
    """
    kinds = ("smooth" if math.isinf(part.smoothness) else "rough" for part in kernel.parts)
    pairs = zip(kinds, map(len, kernel.groups(dim)), strict=True)
    return tuple((DEFAULT_SIZES[kind][d],) * d for kind, d in pairs)


def interpolation_error(kernel: GridKernel, mesh: Mesh) -> float:
    """Bound ``|k − k̃|`` in parts of the prior variance, from probes inside the cells.

    A part of the kernel is a product of factors of at most one, hence its error is at most the sum
    of the errors of its dimensions, which are probed at points between the nodes. Cost O(Σ g²).
    """
    total, bound = kernel.scale().detach(), 0.0
    for factors, grid in zip(kernel.parts, mesh.parts, strict=True):
        error = sum(float(dimension_error(factors, grid, i).max()) for i in range(grid.dim))
        bound += float((factors.scale().detach().to(total) / total).max()) * error
    return bound


def dimension_error(factors: KernelFactors, grid: Grid, dimension: int) -> Tensor:
    """Return the largest error of one dimension's interpolated correlation, ``...``.

    Kernel and nodes are the same everywhere, so that it depends on the distance of two cells and
    the places in them: the first cell is probed with others at all distances.
    """
    with torch.no_grad():
        offsets = torch.tensor(_PROBES, dtype=torch.float64)
        nodes, last = grid.nodes(dimension), grid.cells[dimension] - 1
        spread = torch.linspace(0, last, min(_APART, last + 1)).round().long()
        cells = torch.cat((torch.arange(min(_NEAR, last + 1)), spread)).unique()
        points = nodes[cells + 1, None] + offsets * grid.spacing[dimension]
        x, others = points[0].to(factors.device), points.flatten().to(factors.device)
        nodes = nodes.to(factors.device)
        left, right = (grid.interpolation_matrix(dimension, each) for each in (x, others))
        approximate = left @ factors.correlation(dimension, nodes, nodes) @ right.mT
        return (approximate - factors.correlation(dimension, x, others)).abs().amax((-2, -1))


def sufficient_grid_size(kernel: GridKernel, mesh: Mesh, tolerance: float) -> Sizes | None:
    """Find the smallest grids over the same boxes, growing by a quarter, of at most this error.

    Returns:
        Nodes per dimension of each, or None where more than ``2048`` a side would be needed.
    """
    found: list[tuple[int, ...]] = []
    for factors, grid in zip(kernel.parts, mesh.parts, strict=True):
        dim = grid.dim
        sizes = [_sufficient_line(factors, grid, i, tolerance / dim) for i in range(dim)]
        found.append(tuple(size for size in sizes if size is not None))
        if len(found[-1]) < dim:
            return None
    return tuple(found)


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
