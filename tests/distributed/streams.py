"""Models to sum, data for them, and what "the same as one stream" means."""

from __future__ import annotations

import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream import WISKI
from bo_stream.models.base import StreamingGP
from tests.problems import Observations

SAME = 1e-10
"""Relative difference of sums in another order."""

UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def grid_model(data: Observations | None = None, **options: object) -> WISKI:
    """A model on a grid of 9 x 9 nodes over the unit square, of some observations or none."""
    none = torch.empty(0, 2, dtype=torch.float64), torch.empty(0, 1, dtype=torch.float64)
    chosen: dict[str, object] = {"bounds": UNIT, "grid_size": 9}
    return WISKI(*(none if data is None else data.astuple()), **{**chosen, **options})


def assert_same(a: StreamingGP, b: StreamingGP, X: Tensor) -> None:
    """Equal posterior, objective, gradient of the objective, and count, to :data:`SAME`."""
    assert a.num_observations == b.num_observations
    for found, expected in zip(_numbers(a, X), _numbers(b, X), strict=True):
        size = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(found, expected, rtol=0.0, atol=SAME * size)


def _numbers(model: StreamingGP, X: Tensor) -> list[Tensor]:
    posterior = model.posterior(X)
    numbers = [posterior.mean.detach(), posterior.variance.detach()]
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = model.compute_custom_loss(ExactMarginalLogLikelihood(model.likelihood, model)).sum()
    gradient = torch.autograd.grad(loss, parameters)
    model.eval()
    return [*numbers, loss.detach(), *gradient]
