"""Inducing points and hyperparameters learned together from a stream's memory."""

from __future__ import annotations

from copy import deepcopy

import torch
from botorch.optim.core import OptimizationResult
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from torch.nn import Parameter

from bo_stream.learning.fits import minimise, with_priors
from bo_stream.models.inducing.osgpr import OSGPR


def learn_points(model: OSGPR, maxiter: int = 30) -> OptimizationResult:
    """Learn a model's inducing points and hyperparameters together, by L-BFGS-B, in place.

    They move up the online bound. Observations before the window are known by their statistics at
    the old points, the window's rows as they are: a long window is what the points are learned
    from. Unlike a refit, in which those rows have their full covariance, an iteration costs
    O(M³ + window M²), so that a window of thousands of rows is cheap. Source: the bound of Bui,
    Nguyen and Turner (2017, eq. 7), learned as Titsias (2009) does.

    Args:
        model: With observations and inducing points.
        maxiter: Most iterations.

    Returns:
        BoTorch's, with the last loss in ``fval``: the negative bound and log priors, a point.

    Raises:
        UnsupportedError: The model is conditioned on hypothetical observations.
        ValueError: ``maxiter`` is less than one, or the model has no observations.
    """
    if maxiter < 1:
        raise ValueError(f"Expected maxiter of at least 1, got {maxiter}.")
    model._check_not_supposed("learn_points")
    if len(model.inducing_points) == 0:
        raise ValueError("Expected a model with observations to learn points from, got none.")
    model.train()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    points = Parameter(model.inducing_points.double())

    def loss() -> Tensor:
        return -with_priors(mll, model.bound_at(points)) / model.num_observations

    state, before = deepcopy(model.state_dict()), loss().detach()
    result = minimise(mll, loss, maxiter, {"inducing_points": points})
    with torch.no_grad():
        if not bool(loss() <= before):
            model.load_state_dict(state)
            points.copy_(model.inducing_points)
    model.zero_grad()
    model.place_points(points)
    model.eval()
    return result
