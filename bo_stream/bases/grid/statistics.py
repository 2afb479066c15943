"""Sufficient statistics of observations on a grid, and sums over its cells.

All rows of a cell have weight at the same nodes, and add to the same moments. So the sums over a
block of L of them are matrix products: the memory is touched once instead of L times, and products
of polynomials over all dimensions are never formed row by row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.bases.grid.mesh import (
    PAIR_DEGREES,
    STENCIL,
    Grid,
    Mesh,
    Stencil,
    legendre,
    outer_product,
    ravel,
    weights,
)
from bo_stream.linalg import check_memory, row_product
from bo_stream.tensors import read_expected
from bo_stream.weights import SufficientStatistics

MEMORY_LIMIT_GIB = 4.0
"""Largest gram that is allocated."""

ROWS_A_CELL = 2
"""Mean number of rows a cell from which on sums by cell are faster than row by row."""

_SHORTEST, _LONGEST = 4, 16
"""Rows of a block of one cell."""

_NUMBERS_BY_CELL = 400_000
"""Numbers of sums by cell that are computed at a time: about a processor's own cache."""

_NUMBERS_BY_ROW = 4_000_000
"""Numbers that are computed at a time row by row."""

# Up to here torch's index_put_ is several times faster on a CPU than index_add_.
_NARROW = 8
_FEW_NUMBERS = 50_000


@dataclass(frozen=True)
class CellGram:
    """Gram ``Wᵀ D⁻¹ W`` of interpolation weights on one grid, from which any entry follows exactly.

    Inside a cell every weight is a cubic in the position, so a product of two weights is a
    polynomial of degree 6 per dimension: the data enter the gram only through
    ``Σ D⁻¹ Π_i P_{l_i}(t_i)``, 7^d Legendre moments a cell: the size of a node's 7^d stencil, at
    7^d instead of 16^d numbers touched per observation, and it contracts with Kronecker features
    one dimension at a time.

    Attributes:
        moments: ``... x cells x 7^d``, cells and degrees in row-major order.
        cells: Cells per dimension.
    """

    moments: Tensor
    cells: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the grid."""
        return math.prod(cells + STENCIL - 1 for cells in self.cells)

    def by_dimension(self) -> Tensor:
        """Return the moments as ``... x (cells_1 · 7) x ... x (cells_d · 7)``."""
        dim = len(self.cells)
        batch = self.moments.shape[:-2]
        tensor = self.moments.reshape(*batch, *self.cells, *([PAIR_DEGREES] * dim))
        lead = len(batch)
        interleaved = [lead + i + side * dim for i in range(dim) for side in (0, 1)]
        sizes = [cells * PAIR_DEGREES for cells in self.cells]
        return tensor.permute(*range(lead), *interleaved).reshape(*batch, *sizes)

    @classmethod
    def of_dimensions(cls, moments: Tensor, cells: tuple[int, ...]) -> CellGram:
        """Undo :meth:`by_dimension` of a gram without batch."""
        dim = len(cells)
        pairs = moments.view([size for count in cells for size in (count, PAIR_DEGREES)])
        apart = pairs.permute(*range(0, 2 * dim, 2), *range(1, 2 * dim, 2))
        return cls(apart.reshape(math.prod(cells), -1), cells)


@dataclass(frozen=True)
class NodeGram:
    """Gram ``Wᵀ D⁻¹ W`` of the interpolation weights of one or several grids side by side.

    Between grids it is dense, p p' numbers for two of p and p' nodes: their inputs are as a rule
    not the same, so that any two nodes can meet.

    Attributes:
        blocks: One per grid.
        strips: For each grid but the last, the block with all later grids, ``... x p x Σ p'``.
    """

    blocks: tuple[CellGram, ...]
    strips: tuple[Tensor, ...]


NodeStatistics = SufficientStatistics[NodeGram]


def zero_statistics(
    mesh: Mesh, batch: torch.Size, noise_groups: int, outputs: int, device: torch.device
) -> NodeStatistics:
    """Make statistics of no data. Memory O(7^d cells) a grid, and O(p p') a pair of grids.

    Raises:
        ValueError: They would need more than ``MEMORY_LIMIT_GIB``; nothing is allocated.
    """
    check_room(mesh, math.prod(batch) * noise_groups)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*batch, *shape, dtype=torch.float64, device=device)

    shapes = [(math.prod(grid.cells), PAIR_DEGREES**grid.dim) for grid in mesh.parts]
    blocks = [
        CellGram(zeros(noise_groups, *shape), grid.cells)
        for shape, grid in zip(shapes, mesh.parts, strict=True)
    ]
    nodes = [block.num_nodes for block in blocks]
    strips = tuple(zeros(noise_groups, *shape) for shape in _strip_shapes(nodes))
    return SufficientStatistics(
        NodeGram(tuple(blocks), strips),
        zeros(outputs, sum(nodes), 2),
        zeros(outputs, 2, 2),
        zeros(outputs, 2, 2),
        zeros(outputs),
        zeros(outputs),
    )


def _strip_shapes(nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Return rows and columns of the strips for grids with the given numbers of nodes."""
    return [(own, sum(nodes[a + 1 :])) for a, own in enumerate(nodes[:-1])]


def gram_numbers(mesh: Mesh) -> int:
    """Count the numbers of a gram: 7^d a cell of each grid, p p' for each pair of grids."""
    strips = _strip_shapes([grid.num_nodes for grid in mesh.parts])
    cells = sum(math.prod(grid.cells) * PAIR_DEGREES**grid.dim for grid in mesh.parts)
    return cells + sum(map(math.prod, strips))


def check_room(mesh: Mesh, copies: int) -> None:
    """Check that memory suffices for some copies of a mesh's pairs of nodes.

    Raises:
        ValueError: More than ``MEMORY_LIMIT_GIB`` would be needed.
    """
    sizes = [" x ".join(map(str, grid.size)) for grid in mesh.parts]
    what = "A grid" if len(sizes) == 1 else "The pairs of grids"
    each = "" if copies == 1 else f", {copies:,} times,"
    name = f"{what} of {', '.join(sizes)} nodes{each}"
    check_memory(name, copies * gram_numbers(mesh), MEMORY_LIMIT_GIB)


def accumulate(
    statistics: NodeStatistics,
    mesh: Mesh,
    X: Tensor,
    targets: Tensor,
    noise: Tensor,
    weight: Tensor,
) -> NodeStatistics:
    """Add observations to statistics, at a cost independent of earlier observations.

    Gram and moment change in place. Energy, totals and sums of noise are new tensors: a model that
    shares the former statistics still has the number of its observations and their noise.

    [Stanton2021, eq. 16 and 17, and WᵀW itself, of which the paper keeps a root]

    Cost O(n 7^d) a grid, less for many rows a cell, and O(n S²) for several grids whose stencils
    have S = Σ 4^d nodes together.

    Args:
        statistics: Memory with leading batch shape ``batch``.
        mesh: The nodes of the statistics.
        X: ``batch x n x d``, inside the mesh's box.
        targets: ``batch x m x n``.
        noise: Relative noise, ``batch x (1 or m) x n``.
        weight: 1 to add, −1 to retract, 0 to skip, ``batch x (1 or m) x n``.

    Returns:
        Those with the observations.
    """
    n = X.shape[-2]
    if n == 0:
        return statistics
    if not X.is_cpu:
        read_expected()
    precision = weight / noise
    columns = torch.stack((targets, torch.ones_like(targets)), -1)
    weighted = columns * precision.unsqueeze(-1)
    grid = mesh.parts[0]
    is_one = X.dim() == 2 and X.is_cpu and len(mesh.parts) == 1
    if is_one and n >= ROWS_A_CELL * math.prod(grid.cells):
        moments = statistics.gram.blocks[0].moments
        for sums in cell_sums(grid, X, precision, weighted):
            _add_rows(moments, sums.cells, sums.moments)
            _add_rows(statistics.moment, sums.nodes.flatten(), sums.targets.flatten(-3, -2))
    else:
        dims = [len(part.cells) for part in mesh.parts]
        pairs = map(math.prod, _strip_shapes([STENCIL**dim for dim in dims]))
        widest = max([*pairs, *(PAIR_DEGREES**dim for dim in dims)])
        size = max(1, _NUMBERS_BY_ROW // (widest * precision.shape[-2]))
        for first in range(0, n, size):
            rows = slice(first, first + size)
            stencils = mesh.stencils(X[..., rows, :])
            _add_by_row(statistics, stencils, precision[..., rows], weighted[..., rows, :])
    return replace(
        statistics,
        energy=statistics.energy + row_product(columns.mT, weighted),
        totals=statistics.totals + row_product(columns.mT, columns * weight.unsqueeze(-1)),
        log_noise=statistics.log_noise + (weight * noise.log()).sum(-1),
        noise_sum=statistics.noise_sum + (weight * noise).sum(-1),
    )


def _add_by_row(
    statistics: NodeStatistics, stencils: Sequence[Stencil], precision: Tensor, weighted: Tensor
) -> None:
    """Add rows with given stencils to gram and moment."""
    gram = statistics.gram
    for block, stencil in zip(gram.blocks, stencils, strict=True):
        moments = stencil.polynomials.unsqueeze(-3) * precision.unsqueeze(-1)
        _add_rows(block.moments, stencil.cells.unsqueeze(-2), moments)
        del moments  # the largest of all: its memory is used again
    starts = [0, *itertools.accumulate(block.num_nodes for block in gram.blocks)]
    nodes = [own.nodes + start for own, start in zip(stencils, starts, strict=False)]
    weights = [own.weights for own in stencils]
    for a, strip in enumerate(gram.strips):
        rows = stencils[a].nodes.unsqueeze(-1) * strip.shape[-1]
        index = rows + (torch.cat(nodes[a + 1 :], -1) - starts[a + 1]).unsqueeze(-2)
        own = (weights[a].unsqueeze(-3) * precision.unsqueeze(-1)).unsqueeze(-1)
        products = own * torch.cat(weights[a + 1 :], -1).unsqueeze(-3).unsqueeze(-2)
        flat = index.flatten(-3).unsqueeze(-2)
        _add_rows(strip.flatten(-2).unsqueeze(-1), flat, products.flatten(-3).unsqueeze(-1))
    rows = torch.cat(weights, -1).unsqueeze(-3).unsqueeze(-1) * weighted.unsqueeze(-2)
    index = torch.cat(nodes, -1).flatten(-2).unsqueeze(-2)
    _add_rows(statistics.moment, index, rows.flatten(-3, -2))


def _add_rows(memory: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add ``rows[..., k, :]`` to ``memory[..., index[..., k], :]``, of equal leading dimensions."""
    size, width = memory.shape[-2:]
    lead = memory.shape[:-2]
    if math.prod(lead) > 1:
        index = index + (torch.arange(math.prod(lead), device=index.device) * size).view(*lead, 1)
    flat = index.reshape(-1)
    values = rows.expand(*lead, -1, -1).reshape(-1, width)
    if width == 1:
        memory.view(-1).scatter_add_(0, flat, values.view(-1))  # several times faster than the rest
    elif values.is_cpu and (width <= _NARROW or values.numel() <= _FEW_NUMBERS):
        memory.view(-1, width).index_put_((flat,), values, accumulate=True)
    else:
        memory.view(-1, width).index_add_(0, flat, values)


def embed(statistics: NodeStatistics, mesh: Mesh, larger: Mesh) -> NodeStatistics:
    """Pull statistics back to a mesh with the same nodes and more: zero padding, exact.

    Raises:
        ValueError: The nodes do not coincide, or the larger mesh exceeds the memory limit.
    """
    pairs = list(zip(mesh.parts, larger.parts, strict=True))
    offsets = [offset for own, to in pairs if (offset := own.offset_in(to)) is not None]
    if len(offsets) < len(pairs):
        raise ValueError("Expected a larger grid that shares this grid's nodes.")
    lead, outputs = statistics.moment.shape[:-3], statistics.moment.shape[-3]
    gram, device = statistics.gram, statistics.moment.device
    noise_groups = gram.blocks[0].moments.shape[-3]
    result = zero_statistics(larger, lead, noise_groups, outputs, device)
    nodes, starts = list[Tensor](), [0]
    for (own, to), offset, source, target in zip(
        pairs, offsets, gram.blocks, result.gram.blocks, strict=True
    ):
        cells = _window(own.cells, to.cells, offset).to(device)
        target.moments.index_copy_(-2, cells, source.moments)
        nodes.append(starts[-1] + _window(own.size, to.size, offset).to(device))
        starts.append(starts[-1] + to.num_nodes)
    result.moment.index_copy_(-2, torch.cat(nodes), statistics.moment)
    for a, (old, new) in enumerate(zip(gram.strips, result.gram.strips, strict=True)):
        rows, columns = nodes[a] - starts[a], torch.cat(nodes[a + 1 :]) - starts[a + 1]
        new[..., rows.unsqueeze(-1), columns] = old
    return replace(statistics, gram=result.gram, moment=result.moment)


def _window(sizes: Sequence[int], larger: Sequence[int], offset: Sequence[int]) -> Tensor:
    """Return row-major flat positions of an array's entries in a larger one, at an offset."""
    positions = torch.arange(math.prod(larger)).view(*larger)
    for i, (start, size) in enumerate(zip(offset, sizes, strict=True)):
        positions = positions.narrow(i, start, size)
    return positions.flatten()


# --- sums over the rows of each cell --------------------------------------------------------------


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
        grid: The grid, whose box holds all rows.
        X: ``n x d``.
        precision: D⁻¹ times 1 to add a row, −1 to retract or 0 to skip it, ``g x n``.
        weighted: Columns [Y, 1] of targets times the precision, ``m x n x 2``.
    """
    cell, t = grid.locate(X)
    cells, half = ravel(cell, grid.cells), (grid.dim + 1) // 2
    length = min(max(_SHORTEST, len(cells) // math.prod(grid.cells)), _LONGEST)
    rows, is_own = blocks(cells, length)
    widths = PAIR_DEGREES**half, PAIR_DEGREES ** (grid.dim - half)
    numbers = PAIR_DEGREES**grid.dim + length * sum(widths)
    step = max(1, _NUMBERS_BY_CELL // numbers)
    for some, here in zip(rows.split(step), is_own.split(step), strict=True):
        first, positions = some[:, 0], t[some].to(weighted.dtype)
        moments = _sums(
            legendre(positions), half, torch.where(here, precision[:, some], 0.0)[..., None]
        )
        own = torch.where(here[..., None], weighted[:, some], 0.0)
        sums = _sums(weights(positions), half, own)
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
        The rows of each block, ``b x L``, of which the first is always its own, and whether each
        belongs to the block, ``b x L``: b is at most ``n / L`` plus one for each cell with rows.
    """
    order = cells.argsort()
    counts = torch.unique_consecutive(cells[order], return_counts=True)[1]
    ends, parts = counts.cumsum(0), (counts + length - 1) // length
    group = torch.repeat_interleave(torch.arange(len(counts), device=cells.device), parts)
    within = torch.arange(len(group), device=cells.device) - (parts.cumsum(0) - parts)[group]
    first = (ends - counts)[group] + length * within
    positions = first.unsqueeze(-1) + torch.arange(length, device=cells.device)
    return order[positions.clamp_max(len(cells) - 1)], positions < ends[group].unsqueeze(-1)
