"""AdaGrad where a step moves a few of very many numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_TINY = 1e-20


@dataclass(frozen=True)
class AdaGrad:
    """Steps along gradients, each number's over the root of its own sum of squares so far.

    Numbers whose gradient is not among those given stay, and so do their sums: a step costs what it
    moves. [Duchi2011; Evans2020, section 2.4]

    Attributes:
        squares: Sums of squared gradients, shaped as the numbers, ``m x p ...``; moved in place.
    """

    squares: Tensor

    @classmethod
    def on(cls, values: Tensor) -> AdaGrad:
        """With nothing seen so far."""
        return cls(torch.zeros_like(values))

    def ascend(
        self, values: Tensor, index: Tensor, gradient: Tensor, rate: Tensor | float
    ) -> Tensor:
        """Move some numbers up a gradient, in place; returns by how much, shaped as the gradient.

        Args:
            values: ``m x p ...``.
            index: Distinct, of the second dimension, ``k``.
            gradient: ``m x k ...``.
            rate: Of the first step; later ones are shorter. Broadcast against the gradient.
        """
        squares = self.squares.index_select(1, index) + gradient.square()
        self.squares.index_copy_(1, index, squares)
        moves = rate * gradient / (squares + _TINY).sqrt()
        values.index_add_(1, index, moves)
        return moves
