"""Every setting that decides which point is tried next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

from bo_stream.loops.errors import UsageError
from bo_stream.loops.models import KERNELS, Option, check_grid, checked_model
from bo_stream.loops.sampling.settings import (
    DTYPES,
    check_device,
    check_one_of,
    check_whole,
    torch_dtype,
)

if TYPE_CHECKING:  # torch is imported when a setting is used, not for its name
    from torch import Tensor

THOMPSON = "TS"
RANDOM = "random"
ACQUISITIONS = ("qUCB", "qLogEI", "qLogNEI", "qSR", THOMPSON, RANDOM)
"""Every name; ``TS`` and ``random`` need no acquisition function."""

Bounds = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class OptimizationSettings:
    """What, with the trials so far, determines the next candidates.

    Attributes:
        bounds: Low and high of each input, d pairs.
        maximize: Whether large outcomes are good; else small ones are.
        initial: Points of a scrambled Sobol sequence to begin with.
        q: Points asked for at a time, unless another number is asked for.
        acquisition: A name in ``ACQUISITIONS``, or ``package.module:function`` of a builder of
            one's own, see ``bo_stream.loops.optimization.acquisition``.
        beta: Of qUCB: how much the standard deviation counts.
        num_restarts: Starts of the search for the best candidate.
        raw_samples: Points among which the starts are found.
        model: A name in ``bo_stream.loops.models.MODELS``.
        model_options: Those of its options that are not the defaults.
        kernel: A name in ``bo_stream.loops.models.KERNELS``.
        grid: For a model on a grid: nodes per dimension, one number or d; None: the model's default
            for the kernel.
        refit: The hyperparameters are learned anew whenever the observations have become this many
            times as many as at the last refit; 0: only once, from the first points.
        seed: Of the Sobol points and of the search.
        dtype: ``float64`` or ``float32``.
        device: A torch device.
    """

    bounds: Bounds
    maximize: bool = False
    initial: int = 10
    q: int = 1
    acquisition: str = "qLogEI"
    beta: float = 2.0
    num_restarts: int = 8
    raw_samples: int = 256
    model: str = "wiski"
    model_options: Mapping[str, Option] = field(default_factory=dict)
    kernel: str = "matern52"
    grid: tuple[int, ...] | None = None
    refit: float = 1.3
    seed: int = 0
    dtype: str = "float64"
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Check each setting.

        Raises:
            UsageError: One is out of range.
        """
        object.__setattr__(self, "bounds", checked_bounds(self.bounds))
        least = {"initial": 2, "q": 1, "num_restarts": 1, "seed": 0}
        for name, bound in least.items():
            check_whole(name, getattr(self, name), bound)
        check_whole("raw_samples", self.raw_samples, self.num_restarts)
        options = checked_model(self.model, self.model_options, self.dim)
        object.__setattr__(self, "model_options", options)
        check_grid(self.model, self.grid)
        check_one_of("kernel", self.kernel, tuple(KERNELS))
        check_one_of("dtype", self.dtype, DTYPES)
        _check_reals(self.refit, self.beta)
        if self.grid is not None and len(self.grid) not in (1, self.dim):
            raise UsageError(f"Expected grid to be one number or {self.dim}, got {self.grid}.")
        check_device(self.device)

    @property
    def dim(self) -> int:
        """Number d of inputs."""
        return len(self.bounds)

    @property
    def sign(self) -> float:
        """What an outcome is multiplied by before the model sees it: it always maximises."""
        return 1.0 if self.maximize else -1.0

    def tensor(self, values: Sequence[Any]) -> Tensor:
        """Numbers as a tensor of the model's dtype and device."""
        import torch

        return torch.tensor(values, dtype=torch_dtype(self.dtype), device=self.device)

    def to_unit_cube(self, X: Sequence[Sequence[float]]) -> Tensor:
        """Inputs as the model sees them, ``n x d``."""
        import torch

        low, high = self._box()
        unit = (torch.tensor(X, dtype=torch.float64).reshape(-1, self.dim) - low) / (high - low)
        return unit.clamp(0.0, 1.0).to(torch_dtype(self.dtype)).to(self.device)

    def from_unit_cube(self, U: Tensor) -> list[tuple[float, ...]]:
        """Points of the unit cube, ``n x d``, in the units of the bounds."""
        import torch

        low, high = self._box()
        X = low + U.detach().to("cpu", torch.float64).clamp(0.0, 1.0) * (high - low)
        return [tuple(row) for row in X.clamp(low, high).tolist()]

    def _box(self) -> tuple[Tensor, Tensor]:
        import torch

        box = torch.tensor(self.bounds, dtype=torch.float64)
        return box[:, 0], box[:, 1]

    def as_record(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """From plain values, as JSON gives them back."""
        known = {field.name: record[field.name] for field in fields(cls)}
        grid = record["grid"]
        return cls(**{**known, "grid": None if grid is None else tuple(grid)})


def checked_bounds(bounds: Sequence[Sequence[float]]) -> Bounds:
    """Bounds as pairs of floats.

    Raises:
        UsageError: No inputs; a pair that is no finite interval.
    """
    if not bounds:
        raise UsageError("Expected bounds of at least one input, got none.")
    for i, pair in enumerate(bounds):
        if len(pair) != 2 or not all(map(math.isfinite, pair)) or not pair[0] < pair[1]:
            raise UsageError(
                f"Expected bounds of input {i} to be finite, low < high, got {tuple(pair)}."
            )
    return tuple((float(low), float(high)) for low, high in bounds)


def _check_reals(refit: float, beta: float) -> None:
    if refit != 0.0 and not 1.0 < refit < math.inf:
        raise UsageError(f"Expected refit above 1 (a growth factor), or 0 for never, got {refit}.")
    if not 0.0 <= beta < math.inf:
        raise UsageError(f"Expected beta of at least 0, got {beta}.")
