"""Exact means of products of features over a box."""

from __future__ import annotations

import torch
from torch import Tensor

from bo_stream.bases.grid.interpolation import GridBasis, InterpolationBasis
from bo_stream.bases.grid.mesh import Grid, gauss_legendre


def integrated_gram(basis: GridBasis, bounds: Tensor) -> Tensor:
    """Mean of ``z zᵀ`` over the box ``bounds`` (``2 x d``), exact, ``... x m x r x r``.

    Dimension by dimension: products of two interpolated eigenvectors where the grids of both
    features cover it, means of one where only one does. They are polynomials of degree at most 6
    in each cell, integrated exactly by four Gauss points; the box is cut at all cell borders.
    """
    own = list(zip(basis.parts, basis.grid.groups, strict=True))
    rows = [torch.cat([_block(a, b, bounds) for b in own], -1) for a in own]
    return basis.in_order(torch.cat(rows, -2))


_Part = tuple[InterpolationBasis, tuple[int, ...]]


def _block(first: _Part, second: _Part, bounds: Tensor) -> Tensor:
    """Mean products of the features of two parts, ``... x m x r x r'``."""
    result = (first[0].scale * second[0].scale).sqrt()[..., None, None]
    for dimension in sorted({*first[1], *second[1]}):
        result = result * _one_dimension(first, second, dimension, bounds[:, dimension])
    return result


def _one_dimension(first: _Part, second: _Part, dimension: int, interval: Tensor) -> Tensor:
    sides = [_line(*part, dimension) for part in (first, second)]
    cuts = [grid.nodes(i) for grid, i, _, _ in filter(None, sides)]
    x, quadrature = _cellwise_quadrature(torch.cat(cuts), interval.to(first[0].scale))
    rows, columns = (_values(side, x) for side in sides)
    weighted = columns * quadrature.unsqueeze(-1)
    line = rows.mT @ weighted
    return _chosen(_chosen(line, sides[0], -2), sides[1], -1)


_Line = tuple[Grid, int, Tensor, Tensor]


def _line(basis: InterpolationBasis, group: tuple[int, ...], dimension: int) -> _Line | None:
    """Grid, its dimension, functions on it and the features' choice of them, if it covers one."""
    if dimension not in group:
        return None
    i = group.index(dimension)
    return basis.grid, i, basis.roots[i], basis.index[:, i]


def _values(line: _Line | None, x: Tensor) -> Tensor:
    """Of the functions, ``... x n x k``; of the constant one where there are none."""
    if line is None:
        return torch.ones_like(x).unsqueeze(-1)
    grid, i, root, _ = line
    return grid.interpolation_matrix(i, x) @ root


def _chosen(matrix: Tensor, line: _Line | None, dim: int) -> Tensor:
    return matrix if line is None else matrix.index_select(dim, line[3])


def _cellwise_quadrature(nodes: Tensor, interval: Tensor) -> tuple[Tensor, Tensor]:
    """Points and weights (summing to one) that integrate polynomials of degree 7 between nodes."""
    low, high = interval.tolist()
    inner = nodes[(nodes > low) & (nodes < high)].unique()
    edges = torch.cat((nodes.new_tensor([low]), inner, nodes.new_tensor([high])))
    t, quadrature = gauss_legendre(4)
    widths = edges.diff()
    points = edges[:-1, None] + widths[:, None] * t
    share = widths[:, None] * quadrature / (high - low)
    return points.flatten().to(interval), share.flatten().to(interval)
