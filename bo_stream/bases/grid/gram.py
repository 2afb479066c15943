"""The gram of cubic interpolation on one or several grids, and its congruence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.bases.grid.mesh import PAIR_DEGREES, STENCIL, Grid, legendre, pair_coefficients
from bo_stream.linalg import check_memory

MEMORY_LIMIT_GIB = 4.0
"""Largest gram that is allocated."""

_CONTRACTION_LIMIT_GIB = 8.0
_BUCKETS = 12

# Up to here torch's index_put_ is several times faster on a CPU than index_add_.
_NARROW = 8
_FEW_NUMBERS = 50_000


@dataclass(frozen=True)
class NodeGram:
    """Gram ``Wᵀ D⁻¹ W`` of the interpolation weights of one or several grids side by side.

    Inside a grid it is a :class:`CellGram`. Between grids it is dense, p p' numbers for two of p
    and p' nodes: their inputs are as a rule not the same, so that any two nodes can meet.

    Attributes:
        blocks: One per grid.
        strips: For each grid but the last, the block with all later grids, ``... x p x Σ p'``.
    """

    blocks: tuple[CellGram, ...]
    strips: tuple[Tensor, ...]

    def select(self, outputs: list[int]) -> NodeGram:
        """Copy some of the outputs; a gram that all outputs share stays whole."""
        blocks = tuple(block.select(outputs) for block in self.blocks)
        if self.noise_groups == 1:
            return NodeGram(blocks, tuple(strip.clone() for strip in self.strips))
        return NodeGram(blocks, tuple(strip[..., outputs, :, :] for strip in self.strips))

    @property
    def noise_groups(self) -> int:
        """Number of grams: one for all outputs, or one each."""
        return self.blocks[0].moments.shape[-3]

    def add_pairs(self, nodes: Sequence[Tensor], weights: Sequence[Tensor], D: Tensor) -> None:
        """Add observations to the strips, in place. Cost O(n S²), S nodes of all stencils.

        Per grid flat nodes around each point and their weights, ``batch x n x 4^d``; precision D,
        ``batch x (1 or m) x n``.
        """
        ends = torch.tensor([block.num_nodes for block in self.blocks]).cumsum(0).tolist()
        later = [own + end for own, end in zip(nodes[1:], ends, strict=False)]
        for a, strip in enumerate(self.strips):
            rows = nodes[a].unsqueeze(-1) * strip.shape[-1]
            index = rows + (torch.cat(later[a:], -1) - ends[a]).unsqueeze(-2)
            own = (weights[a].unsqueeze(-3) * D.unsqueeze(-1)).unsqueeze(-1)
            products = own * torch.cat(list(weights[a + 1 :]), -1).unsqueeze(-3).unsqueeze(-2)
            add_rows(
                strip.flatten(-2).unsqueeze(-1),
                index.flatten(-3).unsqueeze(-2),
                products.flatten(-3).unsqueeze(-1),
            )


@dataclass(frozen=True)
class CellGram:
    """Gram ``Wᵀ D⁻¹ W`` on one grid, from which any entry follows exactly.

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

    def select(self, outputs: list[int]) -> CellGram:
        """Copy some of the outputs; a gram that all outputs share stays whole."""
        shared = self.moments.shape[-3] == 1
        chosen = self.moments if shared else self.moments[..., outputs, :, :]
        return CellGram(chosen.clone(), self.cells)

    def by_dimension(self) -> Tensor:
        """Return the moments as ``... x (cells_1 · 7) x ... x (cells_d · 7)``."""
        dim = len(self.cells)
        batch = self.moments.shape[:-2]
        tensor = self.moments.reshape(*batch, *self.cells, *([PAIR_DEGREES] * dim))
        lead = len(batch)
        interleaved = [lead + i + side * dim for i in range(dim) for side in (0, 1)]
        sizes = [cells * PAIR_DEGREES for cells in self.cells]
        return tensor.permute(*range(lead), *interleaved).reshape(*batch, *sizes)


def gram_numbers(grid: Grid) -> int:
    """Count the numbers in a gram on a grid, ``7^d cells``."""
    return grid.num_cells * PAIR_DEGREES**grid.dim


def strip_shapes(nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Return rows and columns of the strips for grids of so many nodes."""
    return [(own, sum(nodes[a + 1 :])) for a, own in enumerate(nodes[:-1])]


def zero_gram(grid: Grid, lead: Sequence[int], device: torch.device) -> CellGram:
    """Make the gram of no data, with leading dimensions. Memory O(7^d cells)."""
    shape = (*lead, grid.num_cells, PAIR_DEGREES**grid.dim)
    return CellGram(torch.zeros(shape, dtype=torch.float64, device=device), grid.cells)


def add_points(gram: CellGram, cell: Tensor, t: Tensor, precision: Tensor) -> None:
    """Add observations at positions t in cells, ``batch x n x d``, in place. Cost O(n 7^d).

    ``precision`` is ``D⁻¹``, ``batch x (1 or m) x n``, as the gram's leading dimensions.
    """
    add_rows(
        gram.moments,
        ravel(cell, gram.cells).unsqueeze(-2),
        outer_product(legendre(t)).unsqueeze(-3) * precision.unsqueeze(-1),
    )


def add_rows(memory: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add ``rows[..., k, :]`` to ``memory[..., index[..., k], :]``, of equal leading dimensions."""
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


def contract(moments: Tensor, roots: list[Tensor], index: Tensor) -> Tensor:
    """Compute ``C[α, α'] = Σ moments Π_i (f_{α_i} f_{α'_i})`` for r products α of functions.

    Dimensions are summed out from the last to the first. After each, only those pairs of functions
    are kept that some pair of products needs: with products chosen by size (a hyperbolic cross)
    these are few. Cost about O((7 g)^d g²), without any power of r.

    Args:
        moments: ``(cells_1 · 7) x ... x (cells_d · 7)``.
        roots: Per dimension, node values of its functions, ``g_i x r_i``.
        index: The products, ``r x d``.
    """
    if len(roots) == 1:
        line = line_congruence(moments, roots[0])
        return line[index, index.mT]
    level = _Level(
        moments.reshape(1, -1),
        torch.zeros(1, 1, dtype=torch.long, device=index.device),
        torch.zeros_like(index[:, 0]),
    )
    for i in reversed(range(1, len(roots))):
        level = _sum_out(level, pair_polynomials(roots[i]), index[:, i:])
    return _last(level, pair_polynomials(roots[0]), index[:, 0])


@dataclass(frozen=True)
class _Level:
    """Sums over all dimensions behind one dimension.

    Attributes:
        sums: One row for each pair of tails that differs in its functions, ``pairs x rest``.
        position: Row of each pair of tails, ``tails x tails``.
        tail: The tail of each product, ``r``.
    """

    sums: Tensor
    position: Tensor
    tail: Tensor


def _sum_out(level: _Level, polynomials: Tensor, tails: Tensor) -> _Level:
    """Sum out one more dimension, the first column of ``tails``."""
    distinct, tail = tails.unique(dim=0, return_inverse=True)
    own = distinct[:, 0]
    parent = torch.empty_like(own).scatter(0, tail, level.tail)
    pair = pair_position(own.unsqueeze(-1), own)
    size = polynomials.shape[-1]
    code = level.position[parent.unsqueeze(-1), parent] * size + pair
    needed, position = code.unique(return_inverse=True)
    sums = _multiply(level.sums, polynomials, _extents(level, parent, own))
    return _Level(sums.mT.reshape(-1, sums.shape[-2])[needed], position, tail)


def _last(level: _Level, polynomials: Tensor, own: Tensor) -> Tensor:
    """Sum out the first dimension and gather every pair of products, ``r x r``."""
    sums = _multiply(level.sums, polynomials, _extents(level, level.tail, own)).squeeze(-2)
    rows = level.position[level.tail.unsqueeze(-1), level.tail]
    return sums.reshape(-1)[rows * sums.shape[-1] + pair_position(own.unsqueeze(-1), own)]


def _extents(level: _Level, parent: Tensor, own: Tensor) -> Tensor:
    """Count the functions of the next dimension that each row of sums is multiplied with."""
    tails = level.position.shape[0]
    most = own.new_zeros(tails).scatter_reduce(0, parent, own + 1, "amax")
    both = torch.maximum(most.unsqueeze(-1), most).reshape(-1)
    rows = own.new_zeros(level.sums.shape[0])
    return rows.scatter_reduce(0, level.position.reshape(-1), both, "amax")


def _multiply(sums: Tensor, polynomials: Tensor, extents: Tensor) -> Tensor:
    """Compute ``sums[k, rest, D] @ polynomials[D, pairs]``, as many pairs as row k needs."""
    rows, pairs = sums.shape[0], polynomials.shape[-1]
    folded = sums.reshape(rows, -1, polynomials.shape[0])
    check_memory(
        "The gram in feature space", rows * folded.shape[1] * pairs, _CONTRACTION_LIMIT_GIB
    )
    result = sums.new_empty(rows, folded.shape[1], pairs)
    order = extents.argsort()
    for bucket in order.chunk(min(_BUCKETS, max(1, rows // 64))):
        count = math.comb(int(extents[bucket].max()) + 1, 2)
        result[bucket, :, :count] = folded[bucket] @ polynomials[:, :count]
    return result


def pair_position(first: Tensor, second: Tensor) -> Tensor:
    """Return the position of unordered pairs of functions among all, of small index first."""
    high = torch.maximum(first, second)
    return high * (high + 1) // 2 + torch.minimum(first, second)


def pair_polynomials(values: Tensor) -> Tensor:
    """Compute Legendre coefficients of products of interpolated functions, cell by cell.

    Node values of r one-dimensional functions, ``g x r``, to ``(cells · 7) x r (r + 1) / 2``:
    unordered pairs with those of small index first.
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
    """Compute ``Vᵀ gram V`` of node values V in one dimension, ``g x r -> r x r``."""
    local = values.unfold(0, STENCIL, 1).mT
    coefficients = pair_coefficients().to(values)
    blocks = torch.einsum("cl,ljk->cjk", moments.unflatten(0, (-1, PAIR_DEGREES)), coefficients)
    return local.flatten(0, 1).mT @ (blocks @ local).flatten(0, 1)


def outer_product(factors: Tensor) -> Tensor:
    """Compute products over dimensions, ``... x d x l -> ... x l^d``, row-major."""
    result = factors[..., 0, :]
    for i in range(1, factors.shape[-2]):
        result = (result.unsqueeze(-1) * factors[..., i, :].unsqueeze(-2)).flatten(-2)
    return result


def ravel(index: Tensor, sizes: Sequence[int]) -> Tensor:
    """Compute the row-major flat index of ``... x d`` indices."""
    flat = index[..., 0]
    for i in range(1, len(sizes)):
        flat = flat * sizes[i] + index[..., i]
    return flat


def window(sizes: Sequence[int], larger: Sequence[int], offset: Sequence[int]) -> Tensor:
    """Return row-major flat positions of an array's entries in a larger one, at an offset."""
    positions = torch.arange(math.prod(larger)).view(*larger)
    for i, (start, size) in enumerate(zip(offset, sizes, strict=True)):
        positions = positions.narrow(i, start, size)
    return positions.flatten()
