"""One metric's model, which follows the data of an experiment by differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from botorch.exceptions.errors import BotorchError

from bo_stream.ax.rows import Difference, Rows, difference
from bo_stream.loops.refits import FEW_PER_INPUT, learn
from bo_stream.models.grid_gp import GridGP
from bo_stream.models.refit import Hyperparameters
from bo_stream.models.streaming_gp import StreamingGP

REFIT = 1.3
"""Growth of the data beyond ``OFTEN`` at which hyperparameters are learned anew."""

OFTEN = 100
"""Number of observations up to which they are learned at every trial, as in Ax."""


@dataclass
class Stream:
    """A model and what is in its memory.

    Attributes:
        model: Changed in place.
        rows: What is in its memory.
        defaults: The hyperparameters that it was built with.
        fitted_at: Number of observations at the last refit; 0: none yet.
    """

    model: StreamingGP
    rows: Rows
    defaults: Hyperparameters
    fitted_at: int = 0

    def follow(self, wanted: Rows) -> str | None:
        """Put in what is new and take out what is gone; else why that cannot be done.

        A model that refuses an observation is left with some of them: it must be built anew then.

        Args:
            wanted: All rows that it should have.
        """
        change = difference(self.rows, wanted)
        obstacle = self._obstacle(change)
        if obstacle is None:
            try:
                self._apply(change)
            except BotorchError as error:
                return f"the model refused them: {error}"
            self.rows = wanted
        return obstacle

    def _obstacle(self, change: Difference) -> str | None:
        if len(change.gone) == 0:
            return None
        if len(change.gone) >= len(self.rows):
            return "none of its observations is left"
        if not isinstance(self.model, GridGP):
            name = type(self.model).__name__
            return f"{len(change.gone)} observations are gone, and {name} cannot take them out"
        return None

    def _apply(self, change: Difference) -> None:
        if len(change.fresh) > 0:
            self.model.update(change.fresh.X, change.fresh.Y, change.fresh.known_noise)
        if len(change.gone) > 0:
            self.model.retract(change.gone.X, change.gone.Y, change.gone.known_noise)

    def refit_if_due(self, growth: float | None) -> bool:
        """Learn hyperparameters if the observations have grown by enough; whether they had.

        Args:
            growth: See :func:`is_due`.
        """
        count = len(self.rows)
        if not is_due(count, self.fitted_at, growth):
            return False
        learn(self.model, self._further_starts(growth))
        self.fitted_at = count
        return True

    def _further_starts(self, growth: float | None) -> Sequence[Hyperparameters]:
        """The defaults, where few observations may have led astray, and not at every trial."""
        count, before = len(self.rows), self.fitted_at
        few = count <= FEW_PER_INPUT * self.rows.X.shape[-1]
        if before == 0 or not few:
            return []
        is_thorough = growth is not None or _powers(count) > _powers(before)
        return [self.defaults] if is_thorough else []


def is_due(count: int, fitted_at: int, growth: float | None) -> bool:
    """Whether hyperparameters are to be learned anew.

    Args:
        count: Number of observations.
        fitted_at: That at the last refit; 0: none yet.
        growth: Factor by which the observations must have grown; 0: learn once; None: whenever
            there is another one up to ``OFTEN`` of them, then whenever those beyond have grown by
            ``REFIT``.
    """
    if fitted_at == 0:
        return True
    if growth is not None:
        return growth > 0.0 and count >= growth * fitted_at
    return count > fitted_at and (count <= OFTEN or count - OFTEN >= REFIT * (fitted_at - OFTEN))


def _powers(count: int) -> int:
    """How many times one observation has grown by ``REFIT``."""
    return math.floor(math.log(count) / math.log(REFIT))
