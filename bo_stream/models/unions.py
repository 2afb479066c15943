"""What several draws drew, each once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Union:
    """All that several draws drew.

    Attributes:
        index: Distinct.
        places: Of each drawn one among them.
        times: That each was drawn.
    """

    index: Tensor
    places: Tensor | None
    times: Tensor | None

    @classmethod
    def of(cls, draws: list[Tensor]) -> Union:
        """Of the indices of one draw or several."""
        if len(draws) == 1:
            return cls(draws[0], None, None)
        return cls(*torch.unique(torch.cat(draws), return_inverse=True, return_counts=True))

    def total(self, parts: list[Tensor]) -> Tensor:
        """Sum of what the draws have for each, ``m x k ...``."""
        if self.places is None:
            return parts[0]
        whole = torch.cat(parts, 1)
        total = whole.new_zeros(len(whole), len(self.index), *whole.shape[2:])
        return total.index_add_(1, self.places, whole)

    def parts(self, whole: Tensor) -> Tensor:
        """What is had once for each, shared by the draws: undoes :meth:`total`."""
        if self.places is None or self.times is None:
            return whole
        return (whole / self.times[:, None])[:, self.places]
