"""The gram of interpolation on several grids at once: within each grid and between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.bases.cell_gram import CellGram, add_rows


@dataclass(frozen=True)
class NodeGram:
    """``Wᵀ D⁻¹ W`` for the interpolation weights of one or several grids side by side.

    Inside a grid it is a :class:`CellGram`. Between grids it is dense, p p' numbers for two of p
    and p' nodes: their inputs are as a rule not the same, so that any two nodes can meet.

    Attributes:
        blocks: One per grid.
        strips: For each grid but the last, the block with all later grids, ``... x p x Σ p'``.
    """

    blocks: tuple[CellGram, ...]
    strips: tuple[Tensor, ...]

    def __add__(self, other: NodeGram) -> NodeGram:
        """Gram of both data sets."""
        blocks = zip(self.blocks, other.blocks, strict=True)
        strips = zip(self.strips, other.strips, strict=True)
        return NodeGram(tuple(a + b for a, b in blocks), tuple(a + b for a, b in strips))

    def __mul__(self, factor: float) -> NodeGram:
        """Gram of down-weighted data."""
        blocks = tuple(block * factor for block in self.blocks)
        return NodeGram(blocks, tuple(strip * factor for strip in self.strips))

    def to(self, device: torch.device) -> NodeGram:
        """The gram on another device."""
        blocks = tuple(block.to(device) for block in self.blocks)
        return NodeGram(blocks, tuple(strip.to(device) for strip in self.strips))

    def select(self, outputs: list[int]) -> NodeGram:
        """A copy for some of the outputs; a gram that all outputs share stays whole."""
        blocks = tuple(block.select(outputs) for block in self.blocks)
        if self.noise_groups == 1:
            return NodeGram(blocks, tuple(strip.clone() for strip in self.strips))
        return NodeGram(blocks, tuple(strip[..., outputs, :, :] for strip in self.strips))

    @property
    def noise_groups(self) -> int:
        """One for all outputs, or one each."""
        return self.blocks[0].moments.shape[-3]

    def add_pairs(self, nodes: Sequence[Tensor], weights: Sequence[Tensor], D: Tensor) -> None:
        """Add observations to the strips, in place. Cost O(n S²), S nodes of all stencils.

        Args:
            nodes: Per grid, flat nodes around each point, ``batch x n x 4^d``.
            weights: Their interpolation weights.
            D: Precision, ``batch x (1 or m) x n``.
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


def strip_shapes(nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Rows and columns of the strips for grids of so many nodes."""
    return [(own, sum(nodes[a + 1 :])) for a, own in enumerate(nodes[:-1])]
