"""Statistics of node values in the whitened weights of a basis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.bases.cell_gram import CellGram, ravel
from bo_stream.bases.contraction import contract
from bo_stream.bases.grid import Grid, Mesh
from bo_stream.bases.interpolation import GridBasis, InterpolationBasis
from bo_stream.bases.node_gram import NodeGram


@dataclass(frozen=True)
class MeshPullBack:
    """The map from the whitened weights of a basis to the node values of all its grids.

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
        """``Rᵀ gram R``, ``... x m x r x r``.

        Cost O((7 g)^d g²) a grid, and O(p p' Σ r_i) for two of p and p' nodes.
        """
        roots = self._roots()
        own = [root.congruence(block) for root, block in zip(roots, gram.blocks, strict=True)]
        if len(own) == 1:
            return own[0]
        return self.basis.in_order(_assembled(own, _between(roots, gram)))

    def transpose(self, moment: Tensor) -> Tensor:
        """``Rᵀ moment``, ``... x m x p x 2 -> ... x m x r x 2``. Cost O(p Σ r_i)."""
        rows = moment.split([grid.num_nodes for grid in self.mesh.parts], -2)
        images = [root.transpose(own) for root, own in zip(self._roots(), rows, strict=True)]
        return self.basis.joined(images, -2)


def _between(roots: Sequence[KroneckerPullBack], gram: NodeGram) -> list[Tensor]:
    """For each grid but the first, the block with all earlier grids, ``... x m x r x Σ r'``."""
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
    """A symmetric matrix from its diagonal blocks and what stands left of each but the first."""
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
    """The map ``v = R w`` from whitened weights to node values of a grid, R the Kronecker root.

    Attributes:
        basis: The basis whose weights w are.
        grid: The grid whose node values v are: the basis's own or another inside its box.
    """

    basis: InterpolationBasis
    grid: Grid

    def _node_roots(self) -> list[Tensor]:
        """Values at the grid's nodes of each dimension's root functions, ``... x m x g x r_i``."""
        roots = self.basis.roots
        own = self.basis.grid
        offset = self.grid.offset_in(own)
        if offset is not None:  # its nodes are nodes of the basis
            windows = zip(roots, offset, self.grid.size, strict=True)
            return [root[..., start : start + size, :] for root, start, size in windows]
        nodes = [self.grid.nodes(i).to(roots[0]) for i in range(own.dim)]
        return [own.interpolation_matrix(i, x) @ roots[i] for i, x in enumerate(nodes)]

    def congruence(self, gram: CellGram) -> Tensor:
        """``Rᵀ gram R``, ``... x m x r x r``, one dimension at a time. Cost O((7 g)^d g²)."""
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
        """``Rᵀ moment``, ``... x m x p x 2 -> ... x m x r x 2``. Cost O(p Σ r_i)."""
        sizes = [root.shape[-1] for root in self._node_roots()]
        flat = moment.flatten(-2)
        for root in self._node_roots():
            flat = (flat.unflatten(-1, (root.shape[-2], -1)).mT @ root).flatten(-2)
        products = flat.unflatten(-1, (moment.shape[-1], math.prod(sizes)))
        kept = products[..., ravel(self.basis.index, sizes)].mT
        return kept * self.basis.scale.sqrt()[..., None, None]
