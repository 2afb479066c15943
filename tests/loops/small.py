"""A small map and quick settings, shared by the tests of the loops and of the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bo_stream.loops.datasets import Dataset
from bo_stream.loops.sampling.campaign import PoolSplit
from bo_stream.loops.sampling.settings import Settings

COLUMNS = ("lon", "lat")
TARGET = "prevalence"
QUICK = Settings(q=3, steps=4, pool=60, test=40, initial=5, grid=(12,), score_every=2)
LONG = Settings(q=5, steps=4, pool=120, test=40, initial=100, grid=(12,), refit=1.1, outliers=7.0)
"""Enough observations for an outlier to be told from noise."""


def small_map(rows: int = 120, seed: int = 0) -> Dataset:
    """A smooth function of two inputs at random sites, with a little noise."""
    generator = np.random.default_rng(seed)
    X = generator.uniform((5.0, 40.0), (9.0, 46.0), (rows, 2))
    y = 0.4 + 0.2 * np.sin(X[:, 0]) * np.cos(X[:, 1]) + 0.01 * generator.standard_normal(rows)
    return Dataset(X, y, COLUMNS, TARGET, "small map")


def map_with_an_artefact(settings: Settings, place: int = 50) -> tuple[Dataset, int]:
    """A small map with a row ten standard deviations off at a place in the pool, and that row."""
    data = small_map(settings.initial + settings.q * (settings.steps or 0) + 40)
    resolved = settings.resolved(*data.X.shape)
    row = int(PoolSplit.of(data, resolved).pool_rows[place])
    data.y[row] += 10.0 * data.y.std()
    return Dataset(data.X, data.y, COLUMNS, TARGET, "map with an artefact"), row


def write_npz(path: Path, data: Dataset) -> Path:
    np.savez(path, X=data.X, y=data.y, columns=np.array(data.columns), target=data.target)
    return path
