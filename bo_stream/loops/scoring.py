"""How good a model's predictions are on held-out points."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from botorch.models.gpytorch import GPyTorchModel
from torch import Tensor

_CHUNK = 512
_HALF_WIDTH_95 = 1.959963984540054


@dataclass(frozen=True)
class Score:
    """Predictions of held-out outcomes, scored.

    Attributes:
        observations: How many the model had seen.
        rmse: Root of the mean squared error of the mean, in units of the target.
        rmse_sd: The same in units of the target's standard deviation over the held-out points.
        nll: Mean negative log density of an outcome, noise included, in nats.
        coverage: Share of outcomes in their 95 % interval, noise included.
    """

    observations: int
    rmse: float
    rmse_sd: float
    nll: float
    coverage: float


@torch.no_grad()
def predict(
    model: GPyTorchModel, X: Tensor, observation_noise: bool = False
) -> tuple[Tensor, Tensor]:
    """Marginal means and variances at ``n x d`` inputs, ``n`` each, in chunks of bounded memory."""
    means, variances = [], []
    for chunk in X.split(_CHUNK):
        posterior = model.posterior(chunk, observation_noise=observation_noise)
        means.append(posterior.mean.squeeze(-1))
        variances.append(posterior.variance.squeeze(-1))
    return torch.cat(means), torch.cat(variances)


def score(model: GPyTorchModel, X: Tensor, Y: Tensor, observations: int) -> Score:
    """Score a single-output model.

    Args:
        model: Its posterior is asked for, noise included.
        X: Held-out inputs, ``n x d``.
        Y: Held-out outcomes, ``n x 1``.
        observations: How many the model has seen, for the record.
    """
    mean, variance = predict(model, X, observation_noise=True)
    error = (Y.squeeze(-1) - mean).double()
    variance = variance.double()
    rmse = float(error.square().mean().sqrt())
    density = 0.5 * (error.square() / variance + variance.log() + math.log(2.0 * math.pi))
    inside = error.abs() <= _HALF_WIDTH_95 * variance.sqrt()
    return Score(
        observations,
        rmse,
        rmse / float(Y.double().std()),
        float(density.mean()),
        float(inside.double().mean()),
    )
