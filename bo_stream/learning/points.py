"""Inducing points and hyperparameters learned together from a stream's memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from botorch.exceptions.warnings import OptimizationWarning
from botorch.optim.core import OptimizationResult
from botorch.optim.fit import fit_gpytorch_mll_scipy
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from torch.nn import Parameter

from bo_stream.learning.pretraining import with_priors
from bo_stream.models.inducing.osgpr import OSGPR


def learn_points(model: OSGPR, maxiter: int = 30) -> OptimizationResult:
    """Learn a model's inducing points and hyperparameters together, by L-BFGS-B, in place.

    They move up the online bound. What came before the window is known by its statistics at the
    old points, the window's rows as they are: a long window is what the points are learned from.
    Unlike a refit, in which those rows have their full covariance, an iteration costs
    O(M³ + window M²), so that a window of thousands of rows is cheap. Source: the bound of Bui,
    Nguyen and Turner (2017, eq. 7), learned as Titsias (2009) does.

    Args:
        model: With observations and inducing points.
        maxiter: Most iterations.

    Returns:
        BoTorch's, with the last loss in ``fval``: the negative bound and log priors, a point.

    Raises:
        UnsupportedError: The model supposes data.
        ValueError: ``maxiter`` is less than one, or the model has no observations.
    """
    _check(model, maxiter)
    model.train()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    learned = {name: p for name, p in mll.named_parameters() if p.requires_grad}
    points = Parameter(model.inducing_points.double())
    former = {name: p.detach().clone() for name, p in learned.items()}
    before = _loss(model, mll, points).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizationWarning)  # the limit is no failure
        result = fit_gpytorch_mll_scipy(
            mll,
            parameters={**learned, "inducing_points": points},
            closure=lambda: _loss_and_gradients(model, mll, points, [*learned.values(), points]),
            options={"maxiter": maxiter},
        )
    with torch.no_grad():
        if not bool(_loss(model, mll, points) <= before):
            for name, value in former.items():
                learned[name].copy_(value)
            points.copy_(model.inducing_points)
    model.zero_grad()
    model.place_points(points)
    model.eval()
    return result


def _loss(model: OSGPR, mll: ExactMarginalLogLikelihood, points: Tensor) -> Tensor:
    return -with_priors(mll, model.bound_at(points)) / model.num_observations


def _loss_and_gradients(
    model: OSGPR,
    mll: ExactMarginalLogLikelihood,
    points: Parameter,
    parameters: Sequence[Parameter],
) -> tuple[Tensor, Sequence[Tensor | None]]:
    for parameter in parameters:
        parameter.grad = None
    loss = _loss(model, mll, points)
    loss.backward()
    return loss, [parameter.grad for parameter in parameters]


def _check(model: OSGPR, maxiter: int) -> None:
    if maxiter < 1:
        raise ValueError(f"Expected maxiter of at least 1, got {maxiter}.")
    model._check_not_supposed("learn_points")
    if len(model.inducing_points) == 0:
        raise ValueError("Expected a model with observations to learn points from, got none.")
