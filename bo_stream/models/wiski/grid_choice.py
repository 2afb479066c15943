"""Which inputs a model's grids cover, and with how many nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import Kernel

from bo_stream.bases.grid.kernel import GridKernel, Groups, kernel_factors
from bo_stream.bases.grid.mesh import STENCIL, Sizes
from bo_stream.bases.grid.resolution import default_grid_size

MAX_DIM = 4
"""Most inputs that a grid can take; a kernel that is a sum has a grid for each part."""


def check_dim(dim: int, kernel: Kernel | None = None) -> int:
    """Check the number of inputs, of all grids that a kernel (default: a product) needs.

    Raises:
        UnsupportedError: A grid has too many inputs, or an input has no grid.
    """
    groups = (tuple(range(dim)),) if kernel is None else kernel_factors(kernel, dim).groups(dim)
    if len(groups) > 1:
        _check_groups(groups, dim)
    elif not 1 <= dim <= MAX_DIM:
        raise UnsupportedError(
            f"Expected train_X with 1 to {MAX_DIM} inputs (after its input transform), got {dim}: "
            "a grid's size is exponential in them. Use botorch.models.SingleTaskGP while n is a "
            "few thousand, bo_stream.OSGPR, whose inducing points need no grid, project "
            f"the inputs: stem=LinearStem(d={dim}, k=2), or give a covar_module that is a sum of "
            f"kernels with at most {MAX_DIM} active_dims each."
        )
    return dim


def _check_groups(groups: Groups, dim: int) -> None:
    wide = [group for group in groups if len(group) > MAX_DIM]
    if wide:
        raise UnsupportedError(
            f"Expected each part of a covar_module that is a sum to act on 1 to {MAX_DIM} inputs, "
            f"got one that acts on {wide[0]}. Give it active_dims."
        )
    unused = sorted(set(range(dim)).difference(*groups))
    if unused:
        raise UnsupportedError(
            f"Expected a covar_module that is a sum to act on all {dim} inputs, but no part acts "
            f"on {unused}. Leave these out of train_X, e.g. by input_transform=FilterFeatures(...)."
        )


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
    """One tuple per grid where the given sizes fit, else whatever was given."""
    if not isinstance(grid_size, Sequence):
        return tuple((grid_size,) * len(group) for group in groups)
    if all(isinstance(own, Sequence) for own in grid_size):
        return tuple(tuple(own) for own in grid_size)
    if len(grid_size) != dim:
        return (tuple(grid_size),)
    return tuple(tuple(grid_size[i] for i in group) for group in groups)
