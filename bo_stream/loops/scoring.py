"""How good a model's predictions are on held-out points."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.loops.prediction import predict
from bo_stream.models.streaming_gp import StreamingGP

_HALF_WIDTH_95 = 1.959963984540054


@dataclass(frozen=True)
class Score:
    """Predictions of held-out outcomes, scored.

    Attributes:
        observations: How many there were.
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
def score(model: StreamingGP, X: Tensor, Y: Tensor) -> Score:
    """Score a single-output model.

    Args:
        model: See :func:`predict`.
        X: Held-out inputs, ``n x d``.
        Y: Held-out outcomes, ``n x 1``.
    """
    mean, variance = predict(model, X)
    noise = model.noise_at(model.transform_inputs(X).double()).squeeze(-2)
    variance = variance + noise * model.outcome_scale().square().squeeze()
    error = Y.double().squeeze(-1) - mean
    rmse = float(error.square().mean().sqrt())
    density = 0.5 * (error.square() / variance + variance.log() + math.log(2.0 * math.pi))
    inside = error.abs() <= _HALF_WIDTH_95 * variance.sqrt()
    return Score(
        round(model.num_observations),
        rmse,
        rmse / float(Y.double().std()),
        float(density.mean()),
        float(inside.double().mean()),
    )
