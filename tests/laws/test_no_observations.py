"""Posteriors of no observations have the gradients of the prior, and given no more the same."""

from __future__ import annotations

from itertools import groupby

import pytest
import torch
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from bo_stream.models.base import StreamingGP
from bo_stream.testing.streams import assert_close, condition_on, gaussian
from tests.laws.cases import STREAMS
from tests.laws.registry import Stream

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")

ONE_EACH = [next(group) for _, group in groupby(STREAMS, lambda stream: stream.case.name)]

APART = [
    stream
    for stream in STREAMS
    if stream.setting.batch_shape and stream.case.family != "last_layer"  # elements share a network
    if stream.case.name != "WISKI, binomial, a window on the grid"  # no memory of counts begins so
]
OF_BATCHES = [next(group) for _, group in groupby(APART, lambda stream: stream.case.name)]


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


@pytest.mark.parametrize("stream", OF_BATCHES, ids=str)
def test_a_fit_has_a_loss_of_each_element_also_of_no_observations(stream: Stream) -> None:
    model = stream.model(stream.data(6))
    outputs, shape = model.num_outputs, stream.setting.batch_shape
    for each in (model, stream.model(stream.data(0)), model.clear()):
        mll = MarginalLogLikelihood(each.likelihood, each.train())
        loss = each.compute_custom_loss(mll)
        assert loss.shape == (shape if outputs == 1 else (*shape, outputs))
        assert bool(loss.isfinite().all())
