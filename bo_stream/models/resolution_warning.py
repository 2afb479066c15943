"""Telling a user that the fitted kernel is too rough for the grid, and which grid would do."""

from __future__ import annotations

import warnings

from botorch.exceptions.warnings import BotorchWarning

from bo_stream.bases.grid import Grid
from bo_stream.bases.kernel_factors import KernelFactors
from bo_stream.bases.resolution import interpolation_error, sufficient_grid_size
from bo_stream.models.warning_level import users_stack_level

WARN_ABOVE = 0.05
"""Interpolation error, in parts of the prior variance, above which a fitted model warns."""


class GridResolutionWarning(BotorchWarning):
    """The kernel is too rough, or its lengthscale too short, for the grid."""


def warn_of_resolution(factors: KernelFactors, grid: Grid) -> None:
    """Warn if the interpolation error exceeds ``WARN_ABOVE``, with the grid size that would do."""
    error = interpolation_error(factors, grid)
    if error > WARN_ABOVE:
        size = sufficient_grid_size(factors, grid, WARN_ABOVE)
        message = _message(error, grid.size, size)
        warnings.warn(message, GridResolutionWarning, stacklevel=users_stack_level())


def _message(error: float, size: tuple[int, ...], enough: tuple[int, ...] | None) -> str:
    finding = (
        f"The kernel's lengthscale is too short for the grid of {size} nodes: its interpolation "
        f"error is up to {error:.2g} of the prior variance. "
    )
    if enough is None:
        return finding + "No grid that fits in memory would do: use a smoother kernel."
    return finding + f"refine(grid_size={enough}) would bring it below {WARN_ABOVE:g}."
