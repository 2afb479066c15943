"""How many nodes a model's grids have, and whether they are enough for its kernel."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from botorch.exceptions.errors import UnsupportedError
from botorch.exceptions.warnings import BotorchWarning
from gpytorch.kernels import Kernel

from bo_stream.bases.grid.interpolation import GridBasis
from bo_stream.bases.grid.kernel import (
    GridKernel,
    default_grid_size,
    interpolation_error,
    kernel_factors,
    sufficient_grid_size,
)
from bo_stream.bases.grid.mesh import STENCIL, Groups, Mesh, Sizes
from bo_stream.bases.grid.statistics import check_room
from bo_stream.warnings import CoarsePointsWarning, users_stack_level

MAX_DIM = 4
"""Most inputs that a grid can take; a kernel that is a sum has a grid for each part."""


def check_dim(dim: int, kernel: Kernel | None = None) -> int:
    """Check the number of inputs, of all grids that a kernel (default: a product) needs.

    Raises:
        UnsupportedError: A grid has too many inputs, or an input has no grid.
    """
    groups = (tuple(range(dim)),) if kernel is None else kernel_factors(kernel, dim).groups(dim)
    if len(groups) > 1:
        wide = [group for group in groups if len(group) > MAX_DIM]
        if wide:
            raise UnsupportedError(
                "Expected each part of a covar_module that is a sum to act on 1 to "
                f"{MAX_DIM} inputs, got one that acts on {wide[0]}. Give it active_dims."
            )
        unused = sorted(set(range(dim)).difference(*groups))
        if unused:
            raise UnsupportedError(
                f"Expected a covar_module that is a sum to act on all {dim} inputs, but no part "
                f"acts on {unused}. Leave these out of train_X, e.g. by "
                "input_transform=FilterFeatures(...)."
            )
    elif not 1 <= dim <= MAX_DIM:
        raise UnsupportedError(
            f"Expected train_X with 1 to {MAX_DIM} inputs (after its input transform), got {dim}: "
            "a grid's size is exponential in them. Use botorch.models.SingleTaskGP while n is a "
            "few thousand, bo_stream.OSGPR, whose inducing points need no grid, project "
            f"the inputs: stem=LinearStem(d={dim}, k=2), or give a covar_module that is a sum of "
            f"kernels with at most {MAX_DIM} active_dims each."
        )
    return dim


GridSize = int | Sequence[int] | Sequence[Sequence[int]]
"""Nodes per dimension: one number, one for each input, or such a sequence for each grid."""


def choose_grid_size(grid_size: GridSize | None, kernel: GridKernel, dim: int) -> Sizes:
    """Nodes per dimension of each grid: those given, or the default for this kernel."""
    if grid_size is None:
        return default_grid_size(kernel, dim)
    groups = kernel.groups(dim)
    sizes = _sizes(grid_size, groups, dim)
    lengths = [len(group) for group in groups]
    flat = [size for own in sizes for size in own]
    fits = [len(own) for own in sizes] == lengths
    if not fits or not all(isinstance(size, int) and size >= STENCIL for size in flat):
        each = "" if len(groups) == 1 else f", or a tuple of {lengths} for the grids of {groups}"
        raise ValueError(
            f"Expected grid_size to be an integer of at least {STENCIL} (nodes per dimension) or "
            f"{dim} of them{each}, got {grid_size}."
        )
    return sizes


def _sizes(grid_size: Any, groups: Groups, dim: int) -> Sizes:
    """Bring sizes to one tuple per grid where they fit, else leave them."""
    if not isinstance(grid_size, Sequence):
        return tuple((grid_size,) * len(group) for group in groups)
    if all(isinstance(own, Sequence) for own in grid_size):
        return tuple(tuple(own) for own in grid_size)
    if len(grid_size) != dim:
        return (tuple(grid_size),)
    return tuple(tuple(grid_size[i] for i in group) for group in groups)


WARN_ABOVE = 0.05
"""Part of the prior variance that interpolation or truncation may miss without a warning."""

COARSER_THAN_NOISE = 5.0
"""Interpolation error, in parts of the noise variance, from which on the model warns.

Against the exact process at the same hyperparameters (a squared exponential kernel, lengthscale
0.15 to 1, noise 1e-2 to 1e-6 of the prior variance, 30 to 1,000 observations, scattered or on a
line, two to four inputs) predicted means were off by up to 0.13 posterior standard deviations
below it, and by up to 1 above.
"""

LEAST_HEEDED = 1e-4
"""Less noise than this, in parts of the prior variance, asks for no finer grid: BoTorch's
likelihood learns none, and with that of exact outcomes a default grid is seldom far off.
"""

FAR_FROM_UNIT = 3.0
"""Width of an input's range, or one over it, from which on the warning advises to normalise."""


class GridResolutionWarning(BotorchWarning):
    """The kernel is too rough, or its lengthscale too short, for the grid."""


def warn_of_resolution(kernel: GridKernel, mesh: Mesh) -> bool:
    """Warn if the interpolation error exceeds ``WARN_ABOVE``; say whether it does."""
    error = interpolation_error(kernel, mesh)
    if error > WARN_ABOVE:
        enough = _enough(kernel, mesh, WARN_ABOVE)
        advice = f"{_refining(enough)} would bring it below {WARN_ABOVE:g}."
        if enough is None:
            advice = "No grid that fits in memory would do: use a smoother kernel."
        message = (
            f"The kernel's lengthscale is too short for the grid of {mesh.size} nodes: its "
            f"interpolation error is up to {error:.2g} of the prior variance. {advice}"
            f"{_scaling_advice(mesh)}"
        )
        warnings.warn(message, GridResolutionWarning, stacklevel=users_stack_level())
    return error > WARN_ABOVE


def warn_of_coarse_grid(kernel: GridKernel, mesh: Mesh, noise: float) -> bool:
    """Warn if the interpolation error is above the noise; say whether it is.

    The noise variance is in parts of the prior variance.
    """
    error, most = interpolation_error(kernel, mesh), COARSER_THAN_NOISE * max(noise, LEAST_HEEDED)
    if error > WARN_ABOVE:
        return False  # which is another warning
    if error > most:
        enough = _enough(kernel, mesh, most)
        advice = f"{_refining(enough)} would do, or OSGPR, which has no grid."
        if enough is None:
            advice = "Use OSGPR, whose inducing points lie where the observations do."
        message = (
            f"The grid of {mesh.size} nodes is coarser than the noise: its interpolation error is "
            f"up to {error:.2g} of the prior variance, {error / noise:.2g} times the noise "
            "variance, so that predicted means may be off by a tenth of a standard deviation and "
            f"more. {advice}"
        )
        warnings.warn(message, CoarsePointsWarning, stacklevel=users_stack_level())
    return error > most


def _refining(size: object) -> str:
    return f'refine(grid_size={size}) (of an AutoGP: move_to("WISKI", grid_size={size}))'


def _enough(kernel: GridKernel, mesh: Mesh, tolerance: float) -> tuple[int, ...] | Sizes | None:
    """Return the smallest grid's size for an error; None if it does not fit in memory."""
    sizes = sufficient_grid_size(kernel, mesh, tolerance)
    if sizes is None:
        return None
    try:
        check_room(mesh.resized(sizes), 1)
    except ValueError:
        return None
    return sizes[0] if len(sizes) == 1 else sizes


class TruncationWarning(BotorchWarning):
    """The features leave out a large part of the prior variance."""


def warn_of_truncation(basis: GridBasis, max_rank: int) -> None:
    """Warn if ``max_rank`` features leave out more than ``WARN_ABOVE`` of the prior variance."""
    if basis.dropped > WARN_ABOVE and basis.rank == max_rank:
        warnings.warn(
            f"The {max_rank} features (max_rank) leave out {basis.dropped:.2g} of the prior "
            f"variance on the box {basis.grid.bounds.tolist()}, so predicted variances are too "
            f"small by up to {basis.dropped:.2g} of it. Build the model with a larger max_rank "
            "(memory O(max_rank²), a solve O(max_rank³)), with a smoother kernel, or with inputs "
            "and queries in a narrower box.",
            TruncationWarning,
            stacklevel=users_stack_level(),
        )


def _scaling_advice(mesh: Mesh) -> str:
    """Say what to do where inputs are far from the unit cube, for which default priors are."""
    low, high = mesh.bounds
    widths = high - low
    if float(widths.max()) < FAR_FROM_UNIT and float(widths.min()) > 1.0 / FAR_FROM_UNIT:
        return ""
    return (
        f" The inputs span {widths.tolist()}, while BoTorch's default lengthscales and their prior "
        f"are for the unit cube: pass input_transform=Normalize(d={len(widths)})."
    )
