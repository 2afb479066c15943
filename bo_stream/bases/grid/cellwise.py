"""Sums of interpolation weights and their products over many rows, by blocks of rows of one cell.

All rows of a cell have weight at the same nodes, and add to the same moments. So the sums over a
block of L of them are matrix products: the memory is touched once instead of L times, and products
of polynomials over all dimensions are never formed row by row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.bases.grid.mesh import PAIR_DEGREES, Grid, legendre, outer_product, ravel, weights

ROWS_A_CELL = 2
"""From so many rows a cell on, on average, it is faster than row by row."""

_SHORTEST, _LONGEST = 4, 16
"""Rows of a block."""

_CHUNK_NUMBERS = 400_000
"""Numbers that are computed at a time: about as many as a processor's own cache holds."""


@dataclass(frozen=True)
class CellSums:
    """Sums over the rows of each of b blocks, on a grid of d dimensions.

    Attributes:
        cells: Flat index of each block's cell, ``b``.
        moments: ``Σ D⁻¹ Π_i P_{l_i}(t_i)`` for degrees l_i from 0 to 6, with P the Legendre
            polynomials, t a row's position in the cell and D its noise in each of g groups,
            ``g x b x 7^d``.
        nodes: Flat index of the nodes around each cell, ``b x 4^d``.
        targets: Interpolation weights times ``D⁻¹ [Y, 1]`` of each of m outputs, summed,
            ``m x b x 4^d x 2``.
    """

    cells: Tensor
    moments: Tensor
    nodes: Tensor
    targets: Tensor


def cell_sums(grid: Grid, X: Tensor, precision: Tensor, weighted: Tensor) -> Iterator[CellSums]:
    """Yield sums over all rows, some blocks at a time.

    Cost O(n (7^⌈d/2⌉ + 4^⌈d/2⌉) + n 7^d / L) numbers touched, for blocks of up to L rows.

    Args:
        grid: Whose box holds all rows.
        X: ``n x d``.
        precision: D⁻¹ times 1 to add a row, −1 to retract or 0 to skip it, ``g x n``.
        weighted: Columns [Y, 1] of targets times the precision, ``m x n x 2``.
    """
    cell, t = grid.locate(X)
    cells, half = ravel(cell, grid.cells), (grid.dim + 1) // 2
    length = min(max(_SHORTEST, len(cells) // math.prod(grid.cells)), _LONGEST)
    rows, held = blocks(cells, length)
    widths = PAIR_DEGREES**half, PAIR_DEGREES ** (grid.dim - half)
    numbers = PAIR_DEGREES**grid.dim + length * sum(widths)
    step = max(1, _CHUNK_NUMBERS // numbers)
    for some, here in zip(rows.split(step), held.split(step), strict=True):
        first, places = some[:, 0], t[some].to(weighted.dtype)
        moments = _sums(
            legendre(places), half, torch.where(here, precision[:, some], 0.0)[..., None]
        )
        own = torch.where(here[..., None], weighted[:, some], 0.0)
        sums = _sums(weights(places), half, own)
        yield CellSums(cells[first], moments.squeeze(-1), grid.nodes_around(cell[first]), sums)


def _sums(values: Tensor, half: int, columns: Tensor) -> Tensor:
    """Sum products over dimensions times columns over the rows of each block.

    Args:
        values: l functions of each of d dimensions, at the L rows of b blocks, ``b x L x d x l``.
        half: Number of dimensions of the left factor of the matrix products.
        columns: c numbers of each row, for each of g groups, ``g x b x L x c``.

    Returns:
        ``g x b x l^d x c``.
    """
    left = outer_product(values[..., :half, :])
    if half < values.shape[-2]:
        right = outer_product(values[..., half:, :])
        columns = (right.unsqueeze(-1) * columns.unsqueeze(-2)).flatten(-2)
    width = values.shape[-1] ** values.shape[-2]
    return (left.mT @ columns).unflatten(-1, (width // left.shape[-1], -1)).flatten(-3, -2)


def blocks(cells: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Put rows of the same cell into blocks.

    Args:
        cells: Cell of each row, ``n``.
        length: Most rows of a block, L.

    Returns:
        The rows of each block, ``b x L``, the first always one of its own, and whether each is of
        the block, ``b x L``: b is at most ``n / L`` and one more for each cell that has rows.
    """
    order = cells.argsort()
    counts = torch.unique_consecutive(cells[order], return_counts=True)[1]
    ends, parts = counts.cumsum(0), (counts + length - 1) // length
    group = torch.repeat_interleave(torch.arange(len(counts), device=cells.device), parts)
    within = torch.arange(len(group), device=cells.device) - (parts.cumsum(0) - parts)[group]
    first = (ends - counts)[group] + length * within
    positions = first.unsqueeze(-1) + torch.arange(length, device=cells.device)
    return order[positions.clamp_max(len(cells) - 1)], positions < ends[group].unsqueeze(-1)
