"""What the constructor of a model of clusters checks."""

from __future__ import annotations

import torch

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


def checked_dtype(dtype: torch.dtype) -> torch.dtype:
    """A dtype to compute in.

    Raises:
        ValueError: It is another than float64 and float32.
    """
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(f"Expected arithmetic to be torch.float64 or torch.float32, got {dtype}.")
    return dtype
