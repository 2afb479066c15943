"""The pictures of sinc functions can be drawn, and show what their pages say."""

from __future__ import annotations

import pytest
import torch
from matplotlib.figure import Figure

from docs.figures import sinc


@pytest.mark.integration
def test_decoupled_bases_have_the_mean_of_many_functions_and_more_variance() -> None:
    series = sinc.Series.of(300, 20.0)
    X = torch.linspace(-20.0, 20.0, 101, dtype=torch.float64).unsqueeze(-1)
    mean, deviation = sinc.predicted(series.exact, X)
    few, points, eigenfunctions, many = (
        sinc.predicted(model, X) for model in sinc.bases(series).values()
    )
    error = sinc.rmse(few[0], mean)
    assert all(sinc.rmse(own, mean) < 0.1 * error for own, _ in (points, eigenfunctions, many))
    torch.testing.assert_close(points[1], few[1], rtol=1e-3, atol=1e-4)
    assert bool((eigenfunctions[1] > deviation).all())


@pytest.mark.integration
def test_relevance_vectors_and_an_augmented_variance_can_be_drawn() -> None:
    left, right = Figure().subplots(1, 2)
    sinc.draw_augmentation(left)
    sinc.draw_relevance_vectors(right, steps=3)
    assert [len(axes.lines) for axes in (left, right)] == [5, 3]
