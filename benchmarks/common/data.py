"""Data of the benchmarks: noisy Levy in the unit cube, and the real sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from botorch.test_functions import Levy
from torch import Tensor

NOISE_SD = 10.0
FOLDER = Path(os.environ.get("BO_STREAM_DATA", Path(__file__).parents[3] / "shared" / "data"))
"""Folder of the real sets: the environment's BO_STREAM_DATA, else ``../shared/data``."""


def levy(n: int, d: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Uniform points of the unit cube and noisy values of Levy's function there (noise sd 10).

    Args:
        n: Number of points.
        d: Their dimension.
        seed: Of points and noise.

    Returns:
        X, ``n x d``, and Y, ``n x 1``.
    """
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(n, d, generator=generator, dtype=torch.float64)
    function = Levy(dim=d)
    noise = NOISE_SD * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return X, function(-10.0 + 20.0 * X).unsqueeze(-1) + noise


def levy_stream(n: int, chunk: int, d: int = 3, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """The same by chunks, so that no more than one is in memory."""
    for index, begin in enumerate(range(0, n, chunk)):
        yield levy(min(chunk, n - begin), d, seed=1_000_003 * (seed + 1) + index)


def real_file(name: str) -> Path:
    """Path of the real set NAME.

    Raises:
        FileNotFoundError: It is not there.
    """
    path = FOLDER / f"{name}.npz"
    if not path.is_file():
        raise FileNotFoundError(
            f"The data set {name} is missing: expected {path}. Put {name}.npz (arrays X, n x d, "
            "and y, n) there, or set BO_STREAM_DATA to the folder that has it."
        )
    return path


def real(name: str) -> tuple[Tensor, Tensor]:
    """Inputs ``n x d`` and target ``n x 1`` of the real set NAME, in float64."""
    with np.load(real_file(name), allow_pickle=False) as arrays:
        X, y = (torch.as_tensor(arrays[key], dtype=torch.float64) for key in ("X", "y"))
    return X, y.unsqueeze(-1)


def write_small_field(path: Path, n: int, seed: int = 0) -> Path:
    """Write a small simulated 2-D field as ``.npz``, for smoke runs without the real set."""
    generator = np.random.default_rng(seed)
    X = generator.random((n, 2))
    y = np.sin(6 * X[:, 0]) * np.cos(5 * X[:, 1]) + 0.1 * generator.standard_normal(n)
    np.savez(path, X=X, y=y, columns=np.array(["lon", "lat"]), target=np.array("field"))
    return path
