"""A stem and the hyperparameters learned together from a first batch, as in the WISKI paper."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.optim.core import OptimizationResult
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream.learning.fits import minimise, with_priors
from bo_stream.models.wiski.grid_model import GridModel

LEAST_POINTS = 10
"""Fewest points to learn a stem from."""


def pretrain(
    model: GridModel,
    X: Tensor,
    Y: Tensor,
    Yvar: Tensor | None = None,
    maxiter: int = 200,
    report: Callable[[int, float], None] | None = None,
) -> OptimizationResult:
    """Learn the stem and all hyperparameters by the marginal likelihood of a batch, by L-BFGS-B.

    The stem is calibrated on the batch at every step (a batch norm, through which gradients flow).
    Afterwards the model's memory holds exactly this batch, projected by the learned stem. Cost
    O(n r² + r³) an iteration. Source: the WISKI paper, section 5.1; it takes 200 steps of Adam.

    Args:
        model: With a stem; its memory is cleared first.
        X: ``n x d``.
        Y: ``n x m``.
        Yvar: Known noise variances shaped as Y; NaN: unknown.
        maxiter: Most iterations.
        report: Called after each with its number and the loss: the negative log posterior of the
            hyperparameters, a point.

    Returns:
        BoTorch's, with the last loss in ``fval``.

    Raises:
        InputDataError: Fewer than ten points, the cases in which ``update`` raises one, or a stem
            that was led out of the grid's cube; nothing is changed then.
        UnsupportedError: The model has no stem, or is conditioned on hypothetical observations.
        ValueError: ``maxiter`` is less than one.
    """
    model._check_not_supposed("pretrain")
    model.standardized(X, Y, Yvar)  # raises what update would, before anything is dropped
    _check(model, X, maxiter)
    units, state = model._units, deepcopy(model.state_dict())
    memory: Any = model._memory
    try:
        return _fitted(model, X, Y, Yvar, maxiter, report)
    except BaseException:
        model.zero_grad()
        model.load_state_dict(state)
        model._units = units
        model._set_memory(memory)
        model.eval()
        raise


def _check(model: GridModel, X: Tensor, maxiter: int) -> None:
    if model._modules.get("stem") is None:
        raise UnsupportedError(
            "Expected a model with a stem to pretrain, got one without. Learn its hyperparameters "
            "by botorch.fit.fit_gpytorch_mll."
        )
    if X.shape[-2] < LEAST_POINTS:
        raise InputDataError(
            f"Expected at least {LEAST_POINTS} points to pretrain a stem on, got {X.shape[-2]}."
        )
    if maxiter < 1:
        raise ValueError(f"Expected maxiter of at least 1, got {maxiter}.")


def _fitted(
    model: GridModel,
    X: Tensor,
    Y: Tensor,
    Yvar: Tensor | None,
    maxiter: int,
    report: Callable[[int, float], None] | None,
) -> OptimizationResult:
    mll = ExactMarginalLogLikelihood(model.likelihood, model)

    def likelihood() -> Tensor:
        return model.batch_log_marginal_likelihood(X, Y, Yvar, recalibrate=True)

    model.clear().update(X, Y, Yvar).train()
    result = minimise(
        mll,
        lambda: -with_priors(mll, likelihood()) / X.shape[-2],
        maxiter,
        callback=None if report is None else lambda _, found: report(found.step, found.fval),
    )
    model.zero_grad()
    with torch.no_grad():
        likelihood()  # calibrates the learned stem
    model.clear().update(X, Y, Yvar).eval()
    return result
