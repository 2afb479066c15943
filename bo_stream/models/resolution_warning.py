"""Telling a user that the fitted kernel is too rough for the grid, and which grid would do."""

from __future__ import annotations

import warnings

from botorch.exceptions.warnings import BotorchWarning

from bo_stream.bases.grid import Mesh, Sizes
from bo_stream.bases.grid_kernel import GridKernel
from bo_stream.bases.resolution import interpolation_error, sufficient_grid_size
from bo_stream.models.warning_level import users_stack_level

WARN_ABOVE = 0.05
"""Interpolation error, in parts of the prior variance, above which a fitted model warns."""


class GridResolutionWarning(BotorchWarning):
    """The kernel is too rough, or its lengthscale too short, for the grid."""


def warn_of_resolution(kernel: GridKernel, mesh: Mesh) -> None:
    """Warn if the interpolation error exceeds ``WARN_ABOVE``, with the grid size that would do."""
    error = interpolation_error(kernel, mesh)
    if error > WARN_ABOVE:
        sizes = sufficient_grid_size(kernel, mesh, WARN_ABOVE)
        enough = sizes[0] if sizes is not None and len(sizes) == 1 else sizes
        message = _message(error, mesh.size, enough)
        warnings.warn(message, GridResolutionWarning, stacklevel=users_stack_level())


def _message(
    error: float, size: tuple[int, ...] | Sizes, enough: tuple[int, ...] | Sizes | None
) -> str:
    finding = (
        f"The kernel's lengthscale is too short for the grid of {size} nodes: its interpolation "
        f"error is up to {error:.2g} of the prior variance. "
    )
    if enough is None:
        return finding + "No grid that fits in memory would do: use a smoother kernel."
    return finding + f"refine(grid_size={enough}) would bring it below {WARN_ABOVE:g}."
