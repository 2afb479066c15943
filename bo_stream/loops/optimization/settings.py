"""Settings of an optimization."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bo_stream.errors import UsageError, check_whole
from bo_stream.loops.settings import RunSettings

if TYPE_CHECKING:  # settings are imported for the help pages, which do without torch
    from torch import Tensor

ACQUISITIONS = ("qUCB", "qLogEI", "qLogNEI", "qSR", "TS", "random")
"""Names of the acquisitions; ``TS`` and ``random`` need no acquisition function."""

Bounds = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class OptimizationSettings(RunSettings):
    """Settings that, with the trials so far, determine the next points; see also ``RunSettings``.

    Attributes:
        bounds: Low and high of each input, d pairs.
        maximize: Whether large outcomes are good; else small ones are.
        initial: Points of a scrambled Sobol sequence to begin with.
        acquisition: A name in ``ACQUISITIONS``, or ``package.module:function`` of a builder of
            one's own, see ``bo_stream.loops.optimization.acquisition``.
        beta: Weight of the standard deviation in qUCB.
        num_restarts: Starts of the search for the best candidate.
        raw_samples: Points among which the starts are found.
    """

    bounds: Bounds = field(kw_only=False)
    maximize: bool = False
    q: int = 1
    acquisition: str = "qLogEI"
    beta: float = 2.0
    num_restarts: int = 8
    raw_samples: int = 256
    refit: float = 1.3

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", checked_bounds(self.bounds))
        super().__post_init__()
        self.check_inputs(self.dim)
        check_whole("num_restarts", self.num_restarts, 1)
        check_whole("raw_samples", self.raw_samples, self.num_restarts)
        if not 0.0 <= self.beta < math.inf:
            raise UsageError(f"Expected beta of at least 0, got {self.beta}.")

    @property
    def dim(self) -> int:
        """Number d of inputs."""
        return len(self.bounds)

    @property
    def sign(self) -> float:
        """Factor of the outcomes in the model, which always maximises."""
        return 1.0 if self.maximize else -1.0

    def to_unit_cube(self, X: Sequence[Sequence[float]]) -> Tensor:
        """Scale ``n x d`` inputs from the bounds to the unit cube, in which the model has them."""
        import torch

        low, high = self._box()
        unit = (torch.tensor(X, dtype=torch.float64).reshape(-1, self.dim) - low) / (high - low)
        return unit.clamp(0.0, 1.0).to(getattr(torch, self.dtype)).to(self.device)

    def from_unit_cube(self, U: Tensor) -> list[tuple[float, ...]]:
        """Scale ``n x d`` points of the unit cube to the bounds."""
        import torch

        low, high = self._box()
        X = low + U.detach().to("cpu", torch.float64).clamp(0.0, 1.0) * (high - low)
        return [tuple(row) for row in X.clamp(low, high).tolist()]

    def _box(self) -> tuple[Tensor, Tensor]:
        import torch

        box = torch.tensor(self.bounds, dtype=torch.float64)
        return box[:, 0], box[:, 1]


def checked_bounds(bounds: Sequence[Sequence[float]]) -> Bounds:
    """Return bounds as pairs of floats; none, or no finite interval, is a ``UsageError``."""
    if not bounds:
        raise UsageError("Expected bounds of at least one input, got none.")
    for i, pair in enumerate(bounds):
        if len(pair) != 2 or not all(map(math.isfinite, pair)) or not pair[0] < pair[1]:
            raise UsageError(
                f"Expected bounds of input {i} to be finite, low < high, got {tuple(pair)}."
            )
    return tuple((float(low), float(high)) for low, high in bounds)
