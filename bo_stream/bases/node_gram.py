"""The gram of interpolation on several grids at once: a block per grid and per pair of grids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import torch
from torch import Tensor

from bo_stream.bases.cell_gram import CellGram, add_rows


@dataclass(frozen=True)
class NodeGram:
    """``Wᵀ D⁻¹ W`` for the interpolation weights of one or several grids side by side.

    Inside a grid it is a :class:`CellGram`. Between two grids of p and p' nodes it is dense, p p'
    numbers: their inputs are as a rule not the same, so that any two nodes can meet.

    Attributes:
        blocks: One per grid.
        cross: The blocks of all pairs of grids, row-major, one behind the other, ``... x numbers``.
    """

    blocks: tuple[CellGram, ...]
    cross: Tensor

    def __add__(self, other: NodeGram) -> NodeGram:
        """Gram of both data sets."""
        pairs = zip(self.blocks, other.blocks, strict=True)
        return NodeGram(tuple(a + b for a, b in pairs), self.cross + other.cross)

    def __sub__(self, other: NodeGram) -> NodeGram:
        """Gram without the other data set."""
        pairs = zip(self.blocks, other.blocks, strict=True)
        return NodeGram(tuple(a - b for a, b in pairs), self.cross - other.cross)

    def __mul__(self, factor: float) -> NodeGram:
        """Gram of down-weighted data."""
        return NodeGram(tuple(block * factor for block in self.blocks), self.cross * factor)

    def to(self, device: torch.device) -> NodeGram:
        """The gram on another device."""
        return NodeGram(tuple(block.to(device) for block in self.blocks), self.cross.to(device))

    def select(self, outputs: list[int]) -> NodeGram:
        """A copy for some of the outputs; a gram that all outputs share stays whole."""
        shared = self.cross.shape[-2] == 1
        chosen = self.cross if shared else self.cross[..., outputs, :]
        return NodeGram(tuple(block.select(outputs) for block in self.blocks), chosen.clone())

    @property
    def noise_groups(self) -> int:
        """One for all outputs, or one each."""
        return self.cross.shape[-2]

    def between(self, first: int, second: int) -> Tensor:
        """A view of the block of two grids, ``... x p x p'``, ``first < second``."""
        return self.flat_between(first, second).unflatten(-1, (self.blocks[first].num_nodes, -1))

    def flat_between(self, first: int, second: int) -> Tensor:
        """The same in one row, ``... x p p'``."""
        nodes = tuple(block.num_nodes for block in self.blocks)
        start = cross_starts(nodes)[first, second]
        return self.cross.narrow(-1, start, nodes[first] * nodes[second])

    def add_pairs(self, nodes: Sequence[Tensor], weights: Sequence[Tensor], D: Tensor) -> None:
        """Add observations to the blocks of pairs, in place.

        Cost O(n S²) for stencils of S nodes together.

        Args:
            nodes: Per grid, flat nodes around each point, ``batch x n x 4^d``.
            weights: Their interpolation weights.
            D: Precision, ``batch x (1 or m) x n``.
        """
        if len(self.blocks) == 1:
            return
        stencils = tuple(own.shape[-1] for own in nodes)
        pairs = _stencil_pairs(stencils, tuple(block.num_nodes for block in self.blocks))
        rows, columns, start, width = pairs.to(self.cross.device)
        flat, w = torch.cat(list(nodes), -1), torch.cat(list(weights), -1)
        index = start + flat[..., rows] * width + flat[..., columns]
        products = (w[..., rows] * w[..., columns]).unsqueeze(-3) * D.unsqueeze(-1)
        add_rows(
            self.cross.unsqueeze(-1),
            index.flatten(-2).unsqueeze(-2),
            products.flatten(-2).unsqueeze(-1),
        )


@cache
def cross_starts(nodes: tuple[int, ...]) -> dict[tuple[int, int], int]:
    """Where the block of each pair of grids begins, and under ``(-1, -1)`` where all end."""
    starts, end = dict[tuple[int, int], int](), 0
    for a, b in combinations(range(len(nodes)), 2):
        starts[a, b] = end
        end += nodes[a] * nodes[b]
    return {**starts, (-1, -1): end}


def cross_numbers(nodes: tuple[int, ...]) -> int:
    """Numbers in the blocks of all pairs of grids."""
    return cross_starts(nodes)[-1, -1]


@cache
def _stencil_pairs(stencils: tuple[int, ...], nodes: tuple[int, ...]) -> Tensor:
    """Pairs of stencil columns of two grids: the columns, block's start and width, ``4 x n``."""
    owner = torch.repeat_interleave(torch.arange(len(stencils)), torch.tensor(stencils))
    rows, columns = (owner.unsqueeze(-1) < owner).nonzero().unbind(-1)
    starts = cross_starts(nodes)
    own = list(zip(owner[rows].tolist(), owner[columns].tolist(), strict=True))
    start = torch.tensor([starts[pair] for pair in own])
    width = torch.tensor([nodes[b] for _, b in own])
    return torch.stack((rows, columns, start, width))
