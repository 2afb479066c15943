"""Posteriors of no observations have the gradients of the prior, and given no more the same."""

from __future__ import annotations

from itertools import groupby

import pytest
import torch
from torch import Tensor

from bo_stream.models.base import StreamingGP
from bo_stream.testing.streams import assert_close, condition_on, gaussian
from tests.laws.cases import STREAMS
from tests.laws.registry import Stream

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")

ONE_EACH = [next(group) for _, group in groupby(STREAMS, lambda stream: stream.case.name)]


def slopes(model: StreamingGP, X: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of posterior means and variances in the inputs."""
    X = X.clone().requires_grad_()
    posterior = gaussian(model.posterior(X))
    of_mean, of_variance = (
        torch.autograd.grad(part.sum(), X, retain_graph=True, materialize_grads=True)[0]
        if part.requires_grad
        else torch.zeros_like(X)
        for part in (posterior.mean, posterior.variance)
    )
    return of_mean, of_variance


@pytest.mark.parametrize("stream", ONE_EACH, ids=str)
def test_gradients_without_observations_are_finite(stream: Stream) -> None:
    of_mean, of_variance = slopes(stream.model(stream.data(0)), stream.points)
    assert bool(of_mean.isfinite().all())
    assert bool(of_variance.isfinite().all())


@pytest.mark.parametrize("stream", ONE_EACH, ids=str)
def test_gradients_given_no_rows_are_the_model_s(stream: Stream) -> None:
    model = stream.model(stream.data(10))
    given = slopes(condition_on(model, stream.data(0)), stream.points)
    for actual, expected in zip(given, slopes(model, stream.points), strict=True):
        assert_close(actual, expected)
