"""Settings that sampling and optimization have in common, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from bo_stream.errors import UsageError, check_one_of, check_whole
from bo_stream.loops.models import AUTO, KERNELS, MODELS, MOST_ON_GRID, Option, checked_model


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Model, precision and batches of a run; a ``UsageError`` says what is out of range.

    Attributes:
        q: Points chosen at a time.
        initial: Points to start with.
        model: A name in ``bo_stream.loops.models.MODELS``.
        model_options: Options of the model that differ from the defaults.
        kernel: A name in ``bo_stream.loops.models.KERNELS``.
        grid: For a model on a grid: nodes per dimension, one number or d; None: the model's default
            for the kernel. Model ``auto`` is on that grid from the first observation on then.
        refit: Growth factor of the number of observations after which the hyperparameters are
            learned again; 0: they are learned once, from the first points.
        seed: Seed of all that is random.
        device: A torch device.
        dtype: ``float64`` or ``float32``.
    """

    _kernels: ClassVar[tuple[str, ...]] = tuple(KERNELS)

    q: int
    initial: int = 10
    model: str = AUTO
    model_options: Mapping[str, Option] = field(default_factory=dict)
    kernel: str = "matern52"
    grid: tuple[int, ...] | None = None
    refit: float
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float64"

    def __post_init__(self) -> None:
        for name, least in (("q", 1), ("initial", 2), ("seed", 0)):
            check_whole(name, getattr(self, name), least)
        options = checked_model(self.model, self.model_options)
        object.__setattr__(self, "model_options", options)
        if self.grid is not None and not MODELS[self.model].on_grid:
            names = ", ".join(name for name, kind in MODELS.items() if kind.on_grid)
            raise UsageError(
                f"A grid is for model {names}, got {self.grid} with model {self.model}."
            )
        check_one_of("kernel", self.kernel, self._kernels)
        check_one_of("dtype", self.dtype, ("float64", "float32"))
        if self.refit != 0.0 and not 1.0 < self.refit < math.inf:
            raise UsageError(
                f"Expected refit above 1 (a growth factor), or 0 for never, got {self.refit:g}."
            )
        import torch  # the help pages import this module, and do without

        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UsageError(f"Device {self.device!r} cannot be used: {reason}") from error

    def refit_is_due(self, observations: int, refits: Sequence[int]) -> bool:
        """Return whether to learn again, after refits at other numbers of observations."""
        return not refits or 0.0 < self.refit * refits[-1] <= observations

    def check_inputs(self, dim: int) -> None:
        """Raise a ``UsageError`` unless model and grid take ``dim`` inputs."""
        checked_model(self.model, self.model_options, dim)
        if self.grid is not None and dim > MOST_ON_GRID:
            raise UsageError(
                f"Expected at most {MOST_ON_GRID} inputs on a grid, got {dim}. Give no grid."
            )
        if self.grid is not None and len(self.grid) not in (1, dim):
            raise UsageError(f"Expected grid to be one number or {dim}, got {self.grid}.")
