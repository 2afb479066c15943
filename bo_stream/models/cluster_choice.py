"""What the constructor of a model of clusters checks."""

from __future__ import annotations

import torch
from botorch.exceptions.errors import UnsupportedError
from torch import Tensor

from bo_stream.allocation.cover_tree import CoverTree
from bo_stream.allocation.numbers import checked_number
from bo_stream.models.cluster_gp import Solver


def checked_solver(
    solver: Solver | None, tolerance: float | None
) -> tuple[Solver | None, float | None]:
    """A solver and a tolerance, if they are some.

    Raises:
        ValueError: They are not.
    """
    if solver not in ("cholesky", "cg", None):
        raise ValueError(f'Expected solver to be "cholesky", "cg" or None, got {solver!r}.')
    if tolerance is not None and not 0.0 < tolerance < 1.0:
        raise ValueError(f"Expected cg_tolerance in (0, 1), got {tolerance}.")
    return solver, tolerance


FINEST = 1e-4
"""Resolution by default, in parts of the diagonal of the box of the first inputs."""


def first_tree(
    tree: CoverTree | None, resolution: float | None, X: Tensor, like: Tensor
) -> CoverTree:
    """A copy of the tree, or an empty one of the resolution.

    Args:
        tree: That was given, if any.
        resolution: Used without one; None: ``FINEST`` of the first inputs' box, and of 1 where
            that has no extent.
        X: The first inputs, ``... x n x d``.
        like: ``0 x d``, of the dtype and device of centres.

    Raises:
        UnsupportedError: What was given is no tree.
        BotorchTensorDimensionError: The tree is of another number of inputs.
        ValueError: The resolution is not positive and finite.
    """
    if tree is None:
        return CoverTree(FINEST * _extent(X) if resolution is None else resolution)
    if not isinstance(tree, CoverTree):
        raise UnsupportedError(
            f"Expected tree to be a CoverTree or None, got {type(tree).__name__}. A number is the "
            "resolution."
        )
    return tree.to(like).insert(like)


def checked_dtype(dtype: torch.dtype) -> torch.dtype:
    """A dtype to compute in.

    Raises:
        ValueError: It is another than float64 and float32.
    """
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(f"Expected arithmetic to be torch.float64 or torch.float32, got {dtype}.")
    return dtype


def checked_most(max_centres: int, resolution: float | None, tree: CoverTree | None) -> int | None:
    """The largest number of centres, if the model chooses its resolution; else None.

    Raises:
        ValueError: It is not a positive whole number.
    """
    max_centres = checked_number("max_centres", max_centres)
    return max_centres if resolution is None and tree is None else None


def _extent(X: Tensor) -> float:
    rows = X.flatten(0, -2)
    if len(rows) == 0:
        return 1.0
    return float(torch.linalg.vector_norm(rows.amax(0) - rows.amin(0))) or 1.0
