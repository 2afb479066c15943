"""The gram of cubic interpolation on a grid, stored as polynomial moments of the data per cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.bases.cubic import PAIR_DEGREES, STENCIL, legendre, pair_coefficients
from bo_stream.bases.grid import Grid
from bo_stream.linalg import check_memory

MEMORY_LIMIT_GIB = 4.0
"""Largest grid that is allocated."""

# Up to here torch's index_put_ is several times faster on a CPU than index_add_.
_NARROW = 8
_FEW_NUMBERS = 50_000


@dataclass(frozen=True)
class CellGram:
    """``Wᵀ D⁻¹ W`` of cubic interpolation weights, from which any entry follows exactly.

    Inside a cell every weight is a cubic in the position, so a product of two weights is a
    polynomial of degree 6 per dimension: the data enter the gram only through ``Σ D⁻¹ Π_i
    P_{l_i}(t_i)``, 7^d Legendre moments a cell. That is the size of the 7^d stencil of a node, at
    7^d instead of 16^d numbers touched per observation, and it contracts with Kronecker features
    one dimension at a time.

    Attributes:
        moments: ``... x cells x 7^d``, cells and degrees in row-major order.
        cells: Cells per dimension.
    """

    moments: Tensor
    cells: tuple[int, ...]

    def __add__(self, other: CellGram) -> CellGram:
        """Gram of both data sets."""
        return CellGram(self.moments + other.moments, self.cells)

    def __mul__(self, factor: float) -> CellGram:
        """Gram of down-weighted data."""
        return CellGram(self.moments * factor, self.cells)

    @property
    def num_nodes(self) -> int:
        """Nodes of the grid."""
        return math.prod(cells + STENCIL - 1 for cells in self.cells)

    def to(self, device: torch.device) -> CellGram:
        """The gram on another device."""
        return CellGram(self.moments.to(device), self.cells)

    def select(self, outputs: list[int]) -> CellGram:
        """A copy for some of the outputs; a gram that all outputs share stays whole."""
        shared = self.moments.shape[-3] == 1
        chosen = self.moments if shared else self.moments[..., outputs, :, :]
        return CellGram(chosen.clone(), self.cells)

    def by_dimension(self) -> Tensor:
        """Moments as ``... x (cells_1 · 7) x ... x (cells_d · 7)``."""
        dim = len(self.cells)
        batch = self.moments.shape[:-2]
        tensor = self.moments.reshape(*batch, *self.cells, *([PAIR_DEGREES] * dim))
        lead = len(batch)
        interleaved = [lead + i + side * dim for i in range(dim) for side in (0, 1)]
        sizes = [cells * PAIR_DEGREES for cells in self.cells]
        return tensor.permute(*range(lead), *interleaved).reshape(*batch, *sizes)


def pair_polynomials(values: Tensor) -> Tensor:
    """Legendre coefficients of products of interpolated functions, cell by cell.

    Args:
        values: Node values of r one-dimensional functions, ``g x r``.

    Returns:
        ``(cells · 7) x r (r + 1) / 2``, unordered pairs with those of small index first.
    """
    functions = values.shape[-1]
    cells = values.shape[0] - STENCIL + 1
    first, second = torch.tril_indices(functions, functions, device=values.device)
    check_memory("A grid's pairs of functions", cells * PAIR_DEGREES * len(first), MEMORY_LIMIT_GIB)
    local = values.unfold(0, STENCIL, 1)
    half = torch.einsum("ljk,caj->kcla", pair_coefficients().to(values), local)
    result = half[0][..., first] * local[:, None, second, 0]
    for k in range(1, STENCIL):
        result.addcmul_(half[k][..., first], local[:, None, second, k])
    return result.flatten(0, 1)


def line_congruence(moments: Tensor, values: Tensor) -> Tensor:
    """``Vᵀ gram V`` on a one-dimensional grid, ``r x r``. Cost O(g r²).

    Args:
        moments: ``cells · 7``.
        values: V, node values of r functions, ``g x r``.
    """
    local = values.unfold(0, STENCIL, 1).mT
    coefficients = pair_coefficients().to(values)
    blocks = torch.einsum("cl,ljk->cjk", moments.unflatten(0, (-1, PAIR_DEGREES)), coefficients)
    return local.flatten(0, 1).mT @ (blocks @ local).flatten(0, 1)


def gram_numbers(grid: Grid) -> int:
    """Numbers in a gram on a grid, ``7^d cells``."""
    return grid.num_cells * PAIR_DEGREES**grid.dim


def zero_gram(grid: Grid, lead: Sequence[int], device: torch.device) -> CellGram:
    """The gram of no data, with leading dimensions. Memory O(7^d cells)."""
    shape = (*lead, grid.num_cells, PAIR_DEGREES**grid.dim)
    return CellGram(torch.zeros(shape, dtype=torch.float64, device=device), grid.cells)


def add_points(gram: CellGram, cell: Tensor, t: Tensor, precision: Tensor) -> None:
    """Add observations at located points in place. Cost O(n 7^d).

    Args:
        gram: With leading dimensions ``batch x (1 or m)``.
        cell: Of each point, ``batch x n x d``.
        t: Position in the cell, ``batch x n x d``.
        precision: ``D⁻¹``, ``batch x (1 or m) x n``.
    """
    add_rows(
        gram.moments,
        ravel(cell, gram.cells).unsqueeze(-2),
        outer_product(legendre(t)).unsqueeze(-3) * precision.unsqueeze(-1),
    )


def add_rows(memory: Tensor, index: Tensor, rows: Tensor) -> None:
    """``memory[..., index[..., k], :] += rows[..., k, :]``; leading dimensions as the memory's."""
    size, width = memory.shape[-2:]
    lead = memory.shape[:-2]
    offsets = (torch.arange(math.prod(lead), device=index.device) * size).view(*lead, 1)
    flat = (index + offsets).reshape(-1)
    values = rows.expand(*lead, -1, -1).reshape(-1, width)
    if width == 1:
        memory.view(-1).scatter_add_(0, flat, values.view(-1))  # several times faster than the rest
    elif values.is_cpu and (width <= _NARROW or values.numel() <= _FEW_NUMBERS):
        memory.view(-1, width).index_put_((flat,), values, accumulate=True)
    else:
        memory.view(-1, width).index_add_(0, flat, values)


def outer_product(factors: Tensor) -> Tensor:
    """Products over dimensions, ``... x d x l -> ... x l^d``, row-major."""
    result = factors[..., 0, :]
    for i in range(1, factors.shape[-2]):
        result = (result.unsqueeze(-1) * factors[..., i, :].unsqueeze(-2)).flatten(-2)
    return result


def ravel(index: Tensor, sizes: Sequence[int]) -> Tensor:
    """Row-major flat index of ``... x d`` indices."""
    flat = index[..., 0]
    for i in range(1, len(sizes)):
        flat = flat * sizes[i] + index[..., i]
    return flat


def window(sizes: Sequence[int], larger: Sequence[int], offset: Sequence[int]) -> Tensor:
    """Row-major flat positions of an array's entries in a larger one, at an offset."""
    positions = torch.arange(math.prod(larger)).view(*larger)
    for i, (start, size) in enumerate(zip(offset, sizes, strict=True)):
        positions = positions.narrow(i, start, size)
    return positions.flatten()
