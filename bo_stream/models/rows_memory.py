"""What a memory can be asked that holds observations to draw from instead of statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NoReturn

from botorch.exceptions.errors import UnsupportedError
from torch import Tensor

from bo_stream.models.replay import Replay
from bo_stream.sufficient_statistics import target_columns

_ROWS = 4096


class HoldsRows(ABC):
    """A memory whose observations are in ``replay``, in units of the process."""

    replay: Replay

    @property
    @abstractmethod
    def counts(self) -> Tensor:
        """Number of observations that came, ``... x m``."""

    @property
    def totals(self) -> Tensor:
        """``[Y, 1]ᵀ [Y, 1]``, ``... x m x 2 x 2``; of a sample scaled to all that came. O(n)."""
        total = self.counts.new_zeros(*self.counts.shape, 2, 2)
        for batch in self.replay.chunks(_ROWS):
            columns = target_columns(batch.Y.to(total).mT)
            total = total + columns.mT @ columns
        return total * (self.replay.count / max(self.replay.held, 1))

    def mean_known_noise(self) -> Tensor | None:
        """None: the noise is the likelihood's."""
        return None

    def scale(self, factor: float) -> NoReturn:
        """Refused.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            f"forget({factor:g}) needs a memory of statistics, but this model learns from the "
            "observations themselves. Bound how many it holds by max_rows, or build it anew."
        )
