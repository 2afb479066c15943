from __future__ import annotations

import numpy as np

from bo_stream.loops.datasets import simulated_prevalence


def test_is_a_map_of_proportions_on_some_thousands_of_pixels() -> None:
    data = simulated_prevalence()
    assert 2_000 < len(data.y) < 10_000
    assert data.X.shape == (len(data.y), 2)
    assert 0.0 < data.y.min() < 0.15
    assert 0.6 < data.y.max() < 1.0
    assert len(np.unique(data.X, axis=0)) == len(data.y)


def test_is_the_same_each_time_and_another_for_another_seed() -> None:
    assert simulated_prevalence().fingerprint == simulated_prevalence().fingerprint
    assert simulated_prevalence(1).fingerprint != simulated_prevalence().fingerprint


def test_is_smooth_but_not_without_noise() -> None:
    data = simulated_prevalence()
    pixel = np.diff(np.unique(data.X[:, 0])).min()
    order = np.lexsort((data.X[:, 0], data.X[:, 1]))
    X, y = data.X[order], data.y[order]
    neighbours = np.isclose(np.diff(X[:, 0]), pixel) & (np.diff(X[:, 1]) == 0.0)
    rough = np.diff(y)[neighbours].std() / y.std()
    assert 0.05 < rough < 0.4
