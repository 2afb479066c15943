"""How good a model's predictions are on held-out points."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from botorch.posteriors.gpytorch import GPyTorchPosterior
from torch import Tensor

from bo_stream.acquisition.sites import sites
from bo_stream.acquisition.weight_space import weight_space
from bo_stream.models.streaming_gp import StreamingGP

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
def predict(model: StreamingGP, X: Tensor) -> tuple[Tensor, Tensor]:
    """Marginal means and variances of the function at ``n x d`` inputs, ``n`` each, float64.

    As ``model.posterior(X)``, for one output and an affine outcome transform, but in feature space:
    on a grid O(n 4^d) and one quadratic form, without n x r features.
    """
    inputs = model.transform_inputs(X).double()
    process = weight_space(model.process(inputs), inputs)
    points = sites(process.basis, inputs)
    mean = points.linear(process.weights.mean)[0, 0]
    variance = points.quadratic(process.weights.covariance().unsqueeze(0))[0, 0]
    first = cast(GPyTorchPosterior, model.posterior(X[:1])).mean.double().squeeze()
    scale = model.outcome_scale().squeeze()
    return first + scale * (mean - mean[0]), scale.square() * variance.clamp_min(0.0)


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
