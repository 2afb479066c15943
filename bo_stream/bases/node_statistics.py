"""Statistics of a stream in the node values of one grid or of several."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from bo_stream.bases.cell_gram import (
    MEMORY_LIMIT_GIB,
    add_points,
    add_rows,
    gram_numbers,
    outer_product,
    window,
    zero_gram,
)
from bo_stream.bases.cubic import PAIR_DEGREES, STENCIL
from bo_stream.bases.cubic import weights as cubic_weights
from bo_stream.bases.grid import Grid, Mesh, columns
from bo_stream.bases.node_gram import NodeGram, strip_shapes
from bo_stream.linalg import check_memory
from bo_stream.sufficient_statistics import SufficientStatistics, target_columns

NodeStatistics = SufficientStatistics[NodeGram]

_CHUNK_NUMBERS = 4_000_000


def zero_statistics(
    mesh: Mesh, batch: torch.Size, noise_groups: int, outputs: int, device: torch.device
) -> NodeStatistics:
    """Statistics of no data. Memory O(7^d cells) a grid, and O(p p') for each pair of grids.

    Raises:
        ValueError: More than ``MEMORY_LIMIT_GIB`` would be needed, said before allocating.
    """
    check_room(mesh, math.prod(batch) * noise_groups)
    nodes = [grid.num_nodes for grid in mesh.parts]
    strips = strip_shapes(nodes)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*batch, *shape, dtype=torch.float64, device=device)

    lead = (*batch, noise_groups)
    blocks = tuple(zero_gram(grid, lead, device) for grid in mesh.parts)
    return SufficientStatistics(
        NodeGram(blocks, tuple(zeros(noise_groups, *shape) for shape in strips)),
        zeros(outputs, sum(nodes), 2),
        zeros(outputs, 2, 2),
        zeros(outputs, 2, 2),
        zeros(outputs),
        zeros(outputs),
    )


def check_room(mesh: Mesh, copies: int) -> None:
    """Refuse so many copies of a mesh's pairs of nodes as memory does not hold.

    Raises:
        ValueError: More than ``MEMORY_LIMIT_GIB`` would be needed.
    """
    strips = strip_shapes([grid.num_nodes for grid in mesh.parts])
    numbers = sum(map(gram_numbers, mesh.parts)) + sum(map(math.prod, strips))
    check_memory(_described(mesh, copies), copies * numbers, MEMORY_LIMIT_GIB)


def _described(mesh: Mesh, copies: int) -> str:
    sizes = [" x ".join(map(str, grid.size)) for grid in mesh.parts]
    what = "A grid" if len(sizes) == 1 else "The pairs of grids"
    each = "" if copies == 1 else f", {copies:,} times,"
    return f"{what} of {', '.join(sizes)} nodes{each}"


def accumulate(
    statistics: NodeStatistics,
    mesh: Mesh,
    X: Tensor,
    targets: Tensor,
    noise: Tensor,
    weight: Tensor,
) -> None:
    """Add observations to statistics in place, at a cost that does not depend on what they hold.

    Cost O(n 7^d) a grid, and O(n S²) for several whose stencils have S = Σ 4^d nodes together.

    Args:
        statistics: Memory with leading batch shape ``batch``.
        mesh: The nodes the statistics live on.
        X: ``batch x n x d``, inside the mesh's box.
        targets: ``batch x m x n``.
        noise: Relative noise, ``batch x (1 or m) x n``.
        weight: 1 to add, −1 to take out, 0 to leave out, ``batch x (1 or m) x n``.
    """
    pairs = map(math.prod, strip_shapes([STENCIL**grid.dim for grid in mesh.parts]))
    widest = max([*pairs, *(PAIR_DEGREES**grid.dim for grid in mesh.parts)])
    chunk = max(1, _CHUNK_NUMBERS // (widest * noise.shape[-2]))
    for start in range(0, X.shape[-2], chunk):
        rows = slice(start, start + chunk)
        _accumulate_chunk(
            statistics,
            mesh,
            X[..., rows, :],
            targets[..., rows],
            noise[..., rows],
            weight[..., rows],
        )


def _accumulate_chunk(
    statistics: NodeStatistics,
    mesh: Mesh,
    X: Tensor,
    targets: Tensor,
    noise: Tensor,
    weight: Tensor,
) -> None:
    precision = weight / noise
    columns = target_columns(targets)
    weighted = columns * precision.unsqueeze(-1)
    nodes, node_weights = _interpolate(statistics.gram, mesh, X, precision)
    rows = node_weights.unsqueeze(-3).unsqueeze(-1) * weighted.unsqueeze(-2)
    add_rows(statistics.moment, nodes.flatten(-2).unsqueeze(-2), rows.flatten(-3, -2))
    statistics.energy.add_(columns.mT @ weighted)
    statistics.totals.add_(columns.mT @ (columns * weight.unsqueeze(-1)))
    statistics.log_noise.add_((weight * noise.log()).sum(-1))
    statistics.noise_sum.add_((weight * noise).sum(-1))


def _interpolate(gram: NodeGram, mesh: Mesh, X: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Add to the gram; returns all nodes around each point and weights, ``batch x n x Σ 4^d``."""
    stencils, starts, end = [], [], 0
    for grid, group, block in zip(mesh.parts, mesh.groups, gram.blocks, strict=True):
        cell, t = grid.locate(X if len(gram.blocks) == 1 else columns(X, group))
        add_points(block, cell, t, precision)
        stencils.append(_stencil(grid, cell, t))
        starts.append(end)
        end += grid.num_nodes
    nodes, weights = zip(*stencils, strict=True)
    gram.add_pairs(nodes, weights, precision)
    shifted = [own + start for own, start in zip(nodes, starts, strict=True)]
    return torch.cat(shifted, -1), torch.cat(weights, -1)


def _stencil(grid: Grid, cell: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Flat node indices and weights of the 4^d nodes around each point, ``... x n x 4^d``."""
    nodes = cell.unsqueeze(-1) + torch.arange(STENCIL, device=cell.device)
    flat = nodes[..., 0, :]
    for i in range(1, grid.dim):
        flat = (flat.unsqueeze(-1) * grid.size[i] + nodes[..., i, :].unsqueeze(-2)).flatten(-2)
    return flat, outer_product(cubic_weights(t))


def embed(statistics: NodeStatistics, mesh: Mesh, larger: Mesh) -> NodeStatistics:
    """Pull statistics back to a mesh with the same nodes and more: padding with zeros, exact.

    Raises:
        ValueError: The nodes do not coincide, or the larger mesh exceeds the memory limit.
    """
    pairs = list(zip(mesh.parts, larger.parts, strict=True))
    offsets = [offset for own, to in pairs if (offset := own.offset_in(to)) is not None]
    if len(offsets) < len(pairs):
        raise ValueError("Expected a larger grid that shares this grid's nodes.")
    lead, outputs = statistics.moment.shape[:-3], statistics.moment.shape[-3]
    gram, device = statistics.gram, statistics.moment.device
    result = zero_statistics(larger, lead, gram.noise_groups, outputs, device)
    nodes, starts = list[Tensor](), [0]
    for (own, to), offset, source, target in zip(
        pairs, offsets, gram.blocks, result.gram.blocks, strict=True
    ):
        cells = window(own.cells, to.cells, offset).to(device)
        target.moments.index_copy_(-2, cells, source.moments)
        nodes.append(starts[-1] + window(own.size, to.size, offset).to(device))
        starts.append(starts[-1] + to.num_nodes)
    result.moment.index_copy_(-2, torch.cat(nodes), statistics.moment)
    for a, (old, new) in enumerate(zip(gram.strips, result.gram.strips, strict=True)):
        rows, columns = nodes[a] - starts[a], torch.cat(nodes[a + 1 :]) - starts[a + 1]
        new[..., rows.unsqueeze(-1), columns] = old
    return replace(statistics, gram=result.gram, moment=result.moment)
