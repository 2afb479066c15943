"""Exact means of products of features over a box."""

from __future__ import annotations

import torch
from torch import Tensor

from bo_stream.bases.grid.interpolation import GridBasis, InterpolationBasis
from bo_stream.bases.grid.mesh import gauss_legendre


def integrated_gram(basis: GridBasis, bounds: Tensor) -> Tensor:
    """Compute the mean of ``z zᵀ`` over the box ``bounds`` (``2 x d``), exact, ``... x m x r x r``.

    Dimension by dimension: products of two interpolated eigenvectors where the grids of both
    features cover it, means of one where only one does. They are polynomials of degree at most 6 in
    each cell, integrated exactly by four Gauss points; the box is cut at all cell borders.
    """
    own = list(zip(basis.parts, basis.grid.groups, strict=True))
    rows = [torch.cat([_block(a, b, bounds) for b in own], -1) for a in own]
    return basis.in_order(torch.cat(rows, -2))


_Part = tuple[InterpolationBasis, tuple[int, ...]]


def _block(first: _Part, second: _Part, bounds: Tensor) -> Tensor:
    """Compute mean products of the features of two parts, ``... x m x r x r'``."""
    result = (first[0].scale * second[0].scale).sqrt()[..., None, None]
    for dimension in sorted({*first[1], *second[1]}):
        result = result * _one_dimension(first, second, dimension, bounds[:, dimension])
    return result


def _one_dimension(first: _Part, second: _Part, dimension: int, interval: Tensor) -> Tensor:
    sides = [
        (basis, group.index(dimension) if dimension in group else None)
        for basis, group in (first, second)
    ]
    cuts = [basis.grid.nodes(i) for basis, i in sides if i is not None]
    x, quadrature = _cellwise_quadrature(torch.cat(cuts), interval.to(first[0].scale))
    rows, columns = (_values(basis, i, x) for basis, i in sides)
    line = rows.mT @ (columns * quadrature.unsqueeze(-1))
    for dim, (basis, i) in zip((-2, -1), sides, strict=True):
        line = line if i is None else line.index_select(dim, basis.index[:, i])
    return line


def _values(basis: InterpolationBasis, i: int | None, x: Tensor) -> Tensor:
    """Evaluate one dimension's functions, ``... x n x k``; the constant one where there is none."""
    if i is None:
        return torch.ones_like(x).unsqueeze(-1)
    return basis.grid.interpolation_matrix(i, x) @ basis.roots[i]


def _cellwise_quadrature(nodes: Tensor, interval: Tensor) -> tuple[Tensor, Tensor]:
    """Return points and weights (summing to one), exact to degree 7 between nodes."""
    low, high = interval.tolist()
    inner = nodes[(nodes > low) & (nodes < high)].unique()
    edges = torch.cat((nodes.new_tensor([low]), inner, nodes.new_tensor([high])))
    t, quadrature = gauss_legendre(4)
    widths = edges.diff()
    points = edges[:-1, None] + widths[:, None] * t
    share = widths[:, None] * quadrature / (high - low)
    return points.flatten().to(interval), share.flatten().to(interval)
