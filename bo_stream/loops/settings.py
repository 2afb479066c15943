"""Settings that sampling and optimization have in common, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from bo_stream.loops.errors import UsageError
from bo_stream.loops.models import KERNELS, Option, check_grid, checked_model
from bo_stream.loops.run_folder import from_record

if TYPE_CHECKING:  # settings are imported for the help pages, which do without torch
    import torch

DTYPES = ("float64", "float32")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Model, precision and batches of a run.

    Attributes:
        q: Points chosen at a time.
        initial: Points to start with.
        model: A name in ``bo_stream.loops.models.MODELS``.
        model_options: Options of the model that differ from the defaults.
        kernel: A name in ``bo_stream.loops.models.KERNELS``.
        grid: For a model on a grid: nodes per dimension, one number or d; None: the model's default
            for the kernel.
        refit: Growth factor of the number of observations after which the hyperparameters are
            learned again; 0: they are learned once, from the first points.
        seed: Seed of all that is random.
        device: A torch device.
        dtype: ``float64`` or ``float32``.
    """

    q: int
    initial: int = 10
    model: str = "wiski"
    model_options: Mapping[str, Option] = field(default_factory=dict)
    kernel: str = "matern52"
    grid: tuple[int, ...] | None = None
    refit: float
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float64"

    def __post_init__(self) -> None:
        """Check each setting by itself.

        Raises:
            UsageError: One is out of range.
        """
        for name, least in (("q", 1), ("initial", 2), ("seed", 0)):
            check_whole(name, getattr(self, name), least)
        options = checked_model(self.model, self.model_options)
        object.__setattr__(self, "model_options", options)
        check_grid(self.model, self.grid)
        check_one_of("kernel", self.kernel, tuple(KERNELS))
        check_one_of("dtype", self.dtype, DTYPES)
        if self.refit != 0.0 and not 1.0 < self.refit < math.inf:
            raise UsageError(
                f"Expected refit above 1 (a growth factor), or 0 for never, got {self.refit:g}."
            )
        _check_device(self.device)

    def check_inputs(self, dim: int) -> None:
        """Check model and grid against the number of inputs.

        Raises:
            UsageError: The model takes fewer inputs, or the grid has another number.
        """
        checked_model(self.model, self.model_options, dim)
        if self.grid is not None and len(self.grid) not in (1, dim):
            raise UsageError(f"Expected grid to be one number or {dim}, got {self.grid}.")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype named by ``dtype``."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def as_record(self) -> dict[str, Any]:
        """Return all settings as plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Build settings from plain values, as JSON returns them."""
        return from_record(cls, record)


def check_whole(name: str, value: int, least: int) -> None:
    """Check that a number is whole and not below the least.

    Raises:
        UsageError: It is not.
    """
    if not isinstance(value, int):
        raise UsageError(
            f"Expected {name} to be a whole number of at least {least}, got {value!r}."
        )
    if value < least:
        raise UsageError(f"Expected {name} of at least {least}, got {value}.")


def check_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Check that a name is one of the choices.

    Raises:
        UsageError: It is not.
    """
    if value not in choices:
        raise UsageError(f"Expected {name} to be one of {', '.join(choices)}, got {value!r}.")


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"Device {device!r} cannot be used: {reason}") from error
