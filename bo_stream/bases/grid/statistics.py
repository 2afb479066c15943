"""Statistics of node values on a mesh, and their map to the whitened weights of a basis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.bases.grid.gram import (
    MEMORY_LIMIT_GIB,
    CellGram,
    NodeGram,
    add_points,
    add_rows,
    contract,
    gram_numbers,
    outer_product,
    ravel,
    strip_shapes,
    window,
    zero_gram,
)
from bo_stream.bases.grid.interpolation import GridBasis, InterpolationBasis
from bo_stream.bases.grid.mesh import PAIR_DEGREES, STENCIL, Grid, Mesh, columns
from bo_stream.bases.grid.mesh import weights as cubic_weights
from bo_stream.linalg import check_memory
from bo_stream.sufficient_statistics import SufficientStatistics, target_columns

NodeStatistics = SufficientStatistics[NodeGram]

_CHUNK_NUMBERS = 4_000_000


def zero_statistics(
    mesh: Mesh, batch: torch.Size, noise_groups: int, outputs: int, device: torch.device
) -> NodeStatistics:
    """Make statistics of no data. Memory O(7^d cells) a grid, and O(p p') a pair of grids.

    Raises:
        ValueError: They would need more than ``MEMORY_LIMIT_GIB``; nothing is allocated.
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
    sizes = [" x ".join(map(str, grid.size)) for grid in mesh.parts]
    what = "A grid" if len(sizes) == 1 else "The pairs of grids"
    each = "" if copies == 1 else f", {copies:,} times,"
    name = f"{what} of {', '.join(sizes)} nodes{each}"
    check_memory(name, copies * numbers, MEMORY_LIMIT_GIB)


def accumulate(
    statistics: NodeStatistics,
    mesh: Mesh,
    X: Tensor,
    targets: Tensor,
    noise: Tensor,
    weight: Tensor,
) -> None:
    """Add observations to statistics in place, at a cost independent of those before.

    Cost O(n 7^d) a grid, and O(n S²) for several whose stencils have S = Σ 4^d nodes together.

    Args:
        statistics: Memory with leading batch shape ``batch``.
        mesh: Of the statistics.
        X: ``batch x n x d``, inside the mesh's box.
        targets: ``batch x m x n``.
        noise: Relative noise, ``batch x (1 or m) x n``.
        weight: 1 to add, −1 to retract, 0 to skip, ``batch x (1 or m) x n``.
    """
    pairs = map(math.prod, strip_shapes([STENCIL**grid.dim for grid in mesh.parts]))
    widest = max([*pairs, *(PAIR_DEGREES**grid.dim for grid in mesh.parts)])
    chunk = max(1, _CHUNK_NUMBERS // (widest * noise.shape[-2]))
    if X.shape[-2] > chunk:
        for start in range(0, X.shape[-2], chunk):
            part = slice(start, start + chunk)
            values = (value[..., part] for value in (targets, noise, weight))
            accumulate(statistics, mesh, X[..., part, :], *values)
        return
    if X.shape[-2] == 0:
        return
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
    """Add to the gram; return all nodes around each point and weights, ``batch x n x Σ 4^d``."""
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
    """Return flat indices and weights of the 4^d nodes around each point, ``... x n x 4^d``."""
    nodes = cell.unsqueeze(-1) + torch.arange(STENCIL, device=cell.device)
    flat = nodes[..., 0, :]
    for i in range(1, grid.dim):
        flat = (flat.unsqueeze(-1) * grid.size[i] + nodes[..., i, :].unsqueeze(-2)).flatten(-2)
    return flat, outer_product(cubic_weights(t))


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


@dataclass(frozen=True)
class MeshPullBack:
    """Map from the whitened weights of a basis to the node values of all its grids.

    Block-diagonal: one Kronecker root per grid.

    Attributes:
        basis: The basis whose weights are mapped.
        mesh: The nodes: the basis's own or others inside its box.
    """

    basis: GridBasis
    mesh: Mesh

    def _roots(self) -> list[KroneckerPullBack]:
        pairs = zip(self.basis.parts, self.mesh.parts, strict=True)
        return [KroneckerPullBack(part, grid) for part, grid in pairs]

    def congruence(self, gram: NodeGram) -> Tensor:
        """Compute ``Rᵀ gram R``, ``... x m x r x r``.

        Cost O((7 g)^d g²) a grid, and O(p p' Σ r_i) for two of p and p' nodes.
        """
        roots = self._roots()
        own = [root.congruence(block) for root, block in zip(roots, gram.blocks, strict=True)]
        if len(own) == 1:
            return own[0]
        return self.basis.in_order(_assembled(own, _between(roots, gram)))

    def transpose(self, moment: Tensor) -> Tensor:
        """Compute ``Rᵀ moment``, ``... x m x p x 2 -> ... x m x r x 2``. Cost O(p Σ r_i)."""
        rows = moment.split([grid.num_nodes for grid in self.mesh.parts], -2)
        images = [root.transpose(own) for root, own in zip(self._roots(), rows, strict=True)]
        return self.basis.joined(images, -2)


def _between(roots: Sequence[KroneckerPullBack], gram: NodeGram) -> list[Tensor]:
    """Compute each grid's block with all earlier ones, ``... x m x r x Σ r'``."""
    nodes = [block.num_nodes for block in gram.blocks]
    halves = [
        root.transpose(strip).split(nodes[a + 1 :], -1)
        for a, (root, strip) in enumerate(zip(roots[:-1], gram.strips, strict=True))
    ]
    earlier = [
        torch.cat([halves[a][b - a - 1] for a in range(b)], -2) for b in range(1, len(nodes))
    ]
    return [root.transpose(half.mT) for root, half in zip(roots[1:], earlier, strict=True)]


def _assembled(diagonal: Sequence[Tensor], lower: Sequence[Tensor]) -> Tensor:
    """Assemble a symmetric matrix from its diagonal blocks and those left of each but the first."""
    width = sum(block.shape[-1] for block in diagonal)
    result = diagonal[0].new_empty(*diagonal[0].shape[:-2], width, width)
    start = diagonal[0].shape[-1]
    result[..., :start, :start] = diagonal[0]
    for block, left in zip(diagonal[1:], lower, strict=True):
        end = start + block.shape[-1]
        result[..., start:end, start:end] = block
        result[..., start:end, :start] = left
        result[..., :start, start:end] = left.mT
        start = end
    return result


@dataclass(frozen=True)
class KroneckerPullBack:
    """Map ``v = R w`` from whitened weights to node values of a grid, R the Kronecker root.

    Attributes:
        basis: The basis whose weights w are.
        grid: The grid whose node values v are: the basis's own or another inside its box.
    """

    basis: InterpolationBasis
    grid: Grid

    def _node_roots(self) -> list[Tensor]:
        """Compute each dimension's root functions at the grid's nodes, ``... x m x g x r_i``."""
        roots = self.basis.roots
        own = self.basis.grid
        offset = self.grid.offset_in(own)
        if offset is not None:  # its nodes are nodes of the basis
            windows = zip(roots, offset, self.grid.size, strict=True)
            return [root[..., start : start + size, :] for root, start, size in windows]
        nodes = (self.grid.nodes(i).to(roots[0]) for i in range(own.dim))
        return [own.interpolation_matrix(i, x) @ roots[i] for i, x in enumerate(nodes)]

    def congruence(self, gram: CellGram) -> Tensor:
        """Compute ``Rᵀ gram R``, ``... x m x r x r``, by dimension. Cost O((7 g)^d g²)."""
        roots = self._node_roots()
        batch = self.basis.scale.shape
        shape = torch.broadcast_shapes(batch, gram.moments.shape[:-2])
        moments = gram.moments.expand(*shape, *gram.moments.shape[-2:])
        flat_roots = [r.expand(*shape, *r.shape[-2:]).flatten(0, -3) for r in roots]
        flat = CellGram(moments.reshape(-1, *moments.shape[-2:]), gram.cells).by_dimension()
        results = [
            contract(flat[b], [root[b] for root in flat_roots], self.basis.index)
            for b in range(flat.shape[0])
        ]
        scale = self.basis.scale[..., None, None]
        return torch.stack(results).reshape(*shape, *results[0].shape) * scale

    def transpose(self, moment: Tensor) -> Tensor:
        """Compute ``Rᵀ moment``, ``... x m x p x 2 -> ... x m x r x 2``. Cost O(p Σ r_i)."""
        roots = self._node_roots()
        sizes = [root.shape[-1] for root in roots]
        flat = moment.flatten(-2)
        for root in roots:
            flat = (flat.unflatten(-1, (root.shape[-2], -1)).mT @ root).flatten(-2)
        products = flat.unflatten(-1, (moment.shape[-1], math.prod(sizes)))
        kept = products[..., ravel(self.basis.index, sizes)].mT
        return kept * self.basis.scale.sqrt()[..., None, None]
