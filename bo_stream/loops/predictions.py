"""Predictions of a model over all sites, and their scores on held-out outcomes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from botorch.posteriors.gpytorch import GPyTorchPosterior
from torch import Tensor

from bo_stream.acquisition import mean_path
from bo_stream.acquisition.sites import sites
from bo_stream.acquisition.weight_space import in_weight_space, weight_space
from bo_stream.models.base import StreamingGP
from bo_stream.process.observation_space import ObservationSpaceProcess
from bo_stream.process.process import ROWS, ConditionedProcess, PosteriorProcess

_HALF_WIDTH_95 = 1.959963984540054


@torch.no_grad()
def predict(model: StreamingGP, X: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the marginal means and variances of ``model.posterior(X)``, ``n`` each, float64.

    Where the process is all in the weights of its features, the cost on a grid of d inputs is
    O(n 4^d) and one quadratic form, without ``n x r`` features.

    Args:
        model: Model of one output with an affine outcome transform.
        X: Inputs, ``n x d``.
    """
    process, inputs = process_at(model, X)
    if _in_features_only(process):
        space = weight_space(process)
        points = sites(space.basis, inputs)
        mean = points.linear(space.weights.mean)[0, 0]
        variance = points.quadratic(space.weights.covariance().unsqueeze(0))[0, 0]
    else:
        mean, variance = (value[0] for value in process.marginals(inputs))
    scale = model.outcome_scale().squeeze()
    return _in_units(model, X, mean), scale.square() * variance.clamp_min(0.0)


def process_at(model: StreamingGP, X: Tensor) -> tuple[PosteriorProcess, Tensor]:
    """Return the posterior process, and inputs ``n x d`` as it takes them, in float64."""
    inputs = model.transform_inputs(X).double()
    return model.process(inputs), inputs


@torch.no_grad()
def predict_mean(model: StreamingGP, X: Tensor) -> Tensor:
    """Compute the means of :func:`predict` alone, ``n``.

    In O(n r) where all is in r features, and in O(n k) where k observations are held as rows.
    """
    if _in_features_only(model.process()):
        return mean_path(model)(X).squeeze(-1)
    process, inputs = process_at(model, X)
    rule = process.regression if isinstance(process, ObservationSpaceProcess) else process.mean
    mean = torch.cat([rule(rows)[0] for rows in inputs.split(ROWS, -2)], -1)
    return _in_units(model, X, mean).to(X)


def _in_units(model: StreamingGP, X: Tensor, mean: Tensor) -> Tensor:
    """Return means of the process at X, ``n``, in units of the outcomes."""
    first = cast(GPyTorchPosterior, model.posterior(X[:1])).mean.double().squeeze()
    return first + model.outcome_scale().squeeze() * (mean - mean[0])


def _in_features_only(process: PosteriorProcess) -> bool:
    """Return whether a process is kept in the weights of its features, rather than of few rows."""
    base = process.base if isinstance(process, ConditionedProcess) else process
    return in_weight_space(process) and not isinstance(base, ObservationSpaceProcess)


@dataclass(frozen=True)
class Score:
    """Scores of the predictions of held-out outcomes.

    Attributes:
        observations: Number of observations so far.
        rmse: Root mean squared error of the mean, in units of the target.
        rmse_sd: ``rmse`` over the standard deviation of the held-out outcomes.
        mae: Mean absolute error of the mean, in units of the target.
        mae_sd: ``mae`` over that standard deviation.
        nll: Mean negative log density of an outcome, noise included, in nats.
        coverage: Share of outcomes in their 95 % interval, noise included.
        wrong: Share of outcomes on the other side of a threshold than the mean; None without one.
    """

    observations: int
    rmse: float
    rmse_sd: float
    mae: float
    mae_sd: float
    nll: float
    coverage: float
    wrong: float | None = None


@torch.no_grad()
def score(model: StreamingGP, X: Tensor, Y: Tensor, threshold: float | None = None) -> Score:
    """Score the predictions, as of :func:`predict`, of held-out outcomes ``n x 1`` at ``n x d``.

    A threshold is in the units of the outcomes.
    """
    mean, variance = predict(model, X)
    noise = model.noise_at(model.transform_inputs(X).double()).squeeze(-2)
    variance = variance + noise * model.outcome_scale().square().squeeze()
    truth = Y.double().squeeze(-1)
    error, deviation = truth - mean, float(truth.std())
    rmse, mae = float(error.square().mean().sqrt()), float(error.abs().mean())
    density = 0.5 * (error.square() / variance + variance.log() + math.log(2.0 * math.pi))
    inside = error.abs() <= _HALF_WIDTH_95 * variance.sqrt()
    return Score(
        round(model.num_observations),
        rmse,
        rmse / deviation,
        mae,
        mae / deviation,
        float(density.mean()),
        float(inside.double().mean()),
        None if threshold is None else _share_wrong(mean, truth, threshold),
    )


def _share_wrong(mean: Tensor, truth: Tensor, threshold: float) -> float:
    return float(((mean > threshold) != (truth > threshold)).double().mean())


def mean_over_run(curve: Sequence[Score]) -> Score:
    """Average scores over the observations between the first and the last of them.

    Each measure is taken to change linearly from one score to the next. The number of observations
    is that of the last.

    Args:
        curve: Scores at growing numbers of observations, one or more.
    """
    last = curve[-1]
    if len(curve) == 1:
        return last
    at = [score.observations for score in curve]
    means: dict[str, Any] = {
        field.name: float(np.trapezoid([getattr(score, field.name) for score in curve], at))
        / (at[-1] - at[0])
        for field in fields(Score)
        if getattr(last, field.name) is not None
    }
    return replace(last, **{**means, "observations": last.observations})
