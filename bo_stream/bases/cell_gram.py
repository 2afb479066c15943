"""The gram of cubic interpolation on a grid, stored as polynomial moments of the data per cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.bases.cubic import PAIR_DEGREES, STENCIL, legendre, pair_coefficients
from bo_stream.bases.cubic import weights as cubic_weights
from bo_stream.bases.grid import Grid
from bo_stream.linalg import check_memory
from bo_stream.sufficient_statistics import SufficientStatistics, target_columns

MEMORY_LIMIT_GIB = 4.0
"""Largest grid that is allocated."""

_CHUNK_NUMBERS = 4_000_000

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

    def __sub__(self, other: CellGram) -> CellGram:
        """Gram without the other data set."""
        return CellGram(self.moments - other.moments, self.cells)

    def __mul__(self, factor: float) -> CellGram:
        """Gram of down-weighted data."""
        return CellGram(self.moments * factor, self.cells)

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


def zero_statistics(
    grid: Grid, batch: torch.Size, noise_groups: int, outputs: int, device: torch.device
) -> SufficientStatistics[CellGram]:
    """Statistics of no data. Memory O(7^d cells).

    Raises:
        ValueError: The grid needs more than ``MEMORY_LIMIT_GIB``, said before allocating.
    """
    copies = math.prod(batch) * noise_groups
    numbers = copies * grid.num_cells * PAIR_DEGREES**grid.dim
    check_memory(f"A grid of {' x '.join(map(str, grid.size))} nodes", numbers, MEMORY_LIMIT_GIB)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*batch, *shape, dtype=torch.float64, device=device)

    return SufficientStatistics(
        CellGram(zeros(noise_groups, grid.num_cells, PAIR_DEGREES**grid.dim), grid.cells),
        zeros(outputs, math.prod(grid.size), 2),
        zeros(outputs, 2, 2),
        zeros(outputs, 2, 2),
        zeros(outputs),
        zeros(outputs),
    )


def accumulate(
    statistics: SufficientStatistics[CellGram],
    grid: Grid,
    X: Tensor,
    targets: Tensor,
    noise: Tensor,
    weight: Tensor,
) -> None:
    """Add observations to statistics in place. Cost O(n 7^d), whatever the statistics hold.

    Args:
        statistics: Memory with leading batch shape ``batch``.
        grid: The grid the statistics live on.
        X: ``batch x n x d``, inside the grid's box.
        targets: ``batch x m x n``.
        noise: Relative noise, ``batch x (1 or m) x n``.
        weight: 1 to add, −1 to take out, 0 to leave out, ``batch x (1 or m) x n``.
    """
    chunk = max(1, _CHUNK_NUMBERS // (PAIR_DEGREES**grid.dim * noise.shape[-2]))
    for start in range(0, X.shape[-2], chunk):
        rows = slice(start, start + chunk)
        _accumulate_chunk(
            statistics,
            grid,
            X[..., rows, :],
            targets[..., rows],
            noise[..., rows],
            weight[..., rows],
        )


def _accumulate_chunk(
    statistics: SufficientStatistics[CellGram],
    grid: Grid,
    X: Tensor,
    targets: Tensor,
    noise: Tensor,
    weight: Tensor,
) -> None:
    cell, t = grid.locate(X)
    precision = weight / noise
    columns = target_columns(targets)
    _add_rows(
        statistics.gram.moments,
        ravel(cell, grid.cells).unsqueeze(-2),
        outer_product(legendre(t)).unsqueeze(-3) * precision.unsqueeze(-1),
    )
    nodes, node_weights = _stencil(grid, cell, t)
    weighted = columns * precision.unsqueeze(-1)
    _add_rows(
        statistics.moment,
        nodes.flatten(-2).unsqueeze(-2),
        (node_weights.unsqueeze(-3).unsqueeze(-1) * weighted.unsqueeze(-2)).flatten(-3, -2),
    )
    statistics.energy.add_(columns.mT @ weighted)
    statistics.totals.add_(columns.mT @ (columns * weight.unsqueeze(-1)))
    statistics.log_noise.add_((weight * noise.log()).sum(-1))
    statistics.noise_sum.add_((weight * noise).sum(-1))


def _add_rows(memory: Tensor, index: Tensor, rows: Tensor) -> None:
    """``memory[..., index[..., k], :] += rows[..., k, :]``; leading dimensions as the memory's."""
    size, width = memory.shape[-2:]
    lead = memory.shape[:-2]
    offsets = (torch.arange(math.prod(lead), device=index.device) * size).view(*lead, 1)
    flat = (index + offsets).reshape(-1)
    values = rows.expand(*lead, -1, -1).reshape(-1, width)
    if values.is_cpu and (width <= _NARROW or values.numel() <= _FEW_NUMBERS):
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


def _stencil(grid: Grid, cell: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Flat node indices and weights of the 4^d nodes around each point, ``... x n x 4^d``."""
    nodes = cell.unsqueeze(-1) + torch.arange(STENCIL, device=cell.device)
    flat = nodes[..., 0, :]
    for i in range(1, grid.dim):
        flat = (flat.unsqueeze(-1) * grid.size[i] + nodes[..., i, :].unsqueeze(-2)).flatten(-2)
    return flat, outer_product(cubic_weights(t))


def embed(
    statistics: SufficientStatistics[CellGram], grid: Grid, larger: Grid
) -> SufficientStatistics[CellGram]:
    """Pull statistics back to a grid that has the same nodes and more: padding with zeros, exact.

    Raises:
        ValueError: The nodes do not coincide, or the larger grid exceeds the memory limit.
    """
    offset = grid.offset_in(larger)
    if offset is None:
        raise ValueError("Expected a larger grid that shares this grid's nodes.")
    lead = statistics.moment.shape[:-3]
    groups, outputs = statistics.gram.moments.shape[-3], statistics.moment.shape[-3]
    result = zero_statistics(larger, lead, groups, outputs, statistics.moment.device)
    _place(statistics.gram.moments, grid.cells, result.gram.moments, larger.cells, offset)
    _place(statistics.moment, grid.size, result.moment, larger.size, offset)
    return replace(statistics, gram=result.gram, moment=result.moment)


def _place(
    source: Tensor,
    sizes: tuple[int, ...],
    target: Tensor,
    larger: tuple[int, ...],
    offset: tuple[int, ...],
) -> None:
    width = source.shape[-1]
    block = target.view(*target.shape[:-2], *larger, width)
    for i, (start, size) in enumerate(zip(offset, sizes, strict=True)):
        block = block.narrow(i - len(sizes) - 1, start, size)
    block.copy_(source.reshape(*source.shape[:-2], *sizes, width))
