"""Marginal predictions of a single-output model at many inputs, as cheap as the model allows."""

from __future__ import annotations

from typing import cast

import torch
from botorch.posteriors.gpytorch import GPyTorchPosterior
from torch import Tensor

from bo_stream.acquisition import mean_path
from bo_stream.acquisition.sites import sites
from bo_stream.acquisition.weight_space import anywhere, in_weight_space, weight_space
from bo_stream.models.observation_space import ObservationSpaceProcess
from bo_stream.models.streaming_gp import StreamingGP
from bo_stream.process import ConditionedProcess, PosteriorProcess


@torch.no_grad()
def predict(model: StreamingGP, X: Tensor) -> tuple[Tensor, Tensor]:
    """Marginal means and variances of the function at ``n x d`` inputs, ``n`` each, float64.

    As ``model.posterior(X)``, for one output and an affine outcome transform. In feature space,
    where a model has all of its process there: on a grid O(n 4^d) and one quadratic form, without
    n x r features.
    """
    inputs = model.transform_inputs(X).double()
    process = model.process(inputs)
    if _in_features_only(process, inputs):
        mean, variance = _in_features(process, inputs)
    else:
        mean, variance = (value[0] for value in process.marginals(inputs))
    first = cast(GPyTorchPosterior, model.posterior(X[:1])).mean.double().squeeze()
    scale = model.outcome_scale().squeeze()
    return first + scale * (mean - mean[0]), scale.square() * variance.clamp_min(0.0)


def _in_features_only(process: PosteriorProcess, inputs: Tensor) -> bool:
    """Whether a process is kept in the weights of its features, rather than of few rows."""
    base = process.base if isinstance(process, ConditionedProcess) else process
    return in_weight_space(process, inputs) and not isinstance(base, ObservationSpaceProcess)


def _in_features(process: PosteriorProcess, inputs: Tensor) -> tuple[Tensor, Tensor]:
    space = weight_space(process, inputs)
    points = sites(space.basis, inputs)
    mean = points.linear(space.weights.mean)[0, 0]
    return mean, points.quadratic(space.weights.covariance().unsqueeze(0))[0, 0]


@torch.no_grad()
def predict_mean(model: StreamingGP, X: Tensor) -> Tensor:
    """The means alone, ``n``. Cost O(n r) where the process is all in its features."""
    if _in_features_only(model.process(), anywhere(model)):
        return mean_path(model)(X).squeeze(-1)
    return predict(model, X)[0].to(X)
