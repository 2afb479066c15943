"""Small models with known hyperparameters, and what they must say, computed naively."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import RBFKernel
from torch import Tensor

from bo_stream import WISKI
from tests.oracles.gaussian_process import DenseGP
from tests.oracles.reference import reference
from tests.support.problems import Observations, observations


def small_model(data: Observations, **options: Any) -> WISKI:
    """A model that keeps every eigenvector, with noise and a mean worth noticing."""
    dim, batch = data.X.shape[-1], data.X.shape[:-2]
    outputs = data.Y.shape[-1]
    parameters = torch.Size((*batch, *([outputs] if outputs > 1 else [])))
    kernel = RBFKernel(ard_num_dims=dim, batch_shape=parameters)
    kernel.lengthscale = 0.25 + 0.2 * torch.rand(*parameters, 1, dim)
    defaults: dict[str, Any] = {
        "covar_module": kernel,
        "grid_size": 11,
        "tolerance": 0.0,
        "bounds": torch.tensor([[0.0] * dim, [1.0] * dim]),
    }
    model = WISKI(*data.astuple(), **{**defaults, **options}).to(data.X)
    if data.Yvar is None:
        model.likelihood.noise = 0.02 + 0.03 * torch.rand(*parameters, 1)
    return model


def dense(model: WISKI, data: Observations) -> DenseGP:
    """The same model as a Gaussian process that keeps all data."""
    return reference(model, *data.astuple())


def greedy_choice(
    gp: DenseGP,
    pool: Tensor,
    points: Tensor,
    q: int,
    noise: Tensor,
    allowed: set[int],
    costs: Tensor | None = None,
) -> list[int]:
    """Try every candidate at every pick, conditioning a dense covariance; N x N and N x M."""
    n = pool.shape[0]
    covariance = gp.posterior(torch.cat((pool, points)))[1].detach()
    picks: list[int] = []
    for _ in range(q):
        worth = {}
        for i in sorted(allowed - set(picks)):
            gain = covariance[n:, i].square().mean() / (covariance[i, i] + noise)
            worth[i] = float(gain if costs is None else gain / costs[i])
        best = max(worth, key=lambda i: (worth[i], -i))
        column = covariance[:, best]
        covariance = covariance - torch.outer(column, column) / (column[best] + noise)
        picks.append(best)
    return picks


def some(n: int = 25, dim: int = 2, **kwargs: Any) -> Observations:
    """Observations of n points."""
    return observations(n, dim, **kwargs)
