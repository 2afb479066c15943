"""Outliers: observations far from what all others predict, left out of a model at refits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from botorch.exceptions.errors import InputDataError
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.posterior import Posterior
from torch import Tensor

from bo_stream.diagnostics.cross_validation import leave_one_out
from bo_stream.models.base import StreamingGP
from bo_stream.models.refit import relearn

ONE_IN = 100
"""At most one observation in so many is an outlier: more are heavy-tailed noise."""

MOST_PASSES = 3
"""Times that a refit may change which observations are outliers."""


def leave_outliers_out(
    model: StreamingGP, X: Tensor, Y: Tensor, outliers: Sequence[int], threshold: float
) -> list[int]:
    """Take outliers out of a model after a refit, and learn again where that changes them.

    An outlier is an observation more than ``threshold`` standard deviations of the posterior
    predictive distribution, noise included, from its mean given all other observations in the
    model. It returns to the model once it is no outlier any more, because observations beside it
    agree or because the hyperparameters are others. The refit before is to all new observations, so
    that hyperparameters which were learned from few do not rule out what contradicts them. Without
    outliers the model stays as it is, at the cost of a leave-one-out prediction of all
    observations, O(n r²) on a grid.

    Args:
        model: Of the observations without the former outliers; changed in place. It retracts
            exactly, as WISKI does.
        X: All observations, outliers among them, ``n x d``.
        Y: ``n x 1``.
        outliers: The former ones, as rows of X, in increasing order.
        threshold: In standard deviations.

    Returns:
        The outliers, as rows of X, in increasing order. The model is without them.
    """
    former = list(outliers)
    for _ in range(MOST_PASSES):
        found = _outliers(_deviations(model, X, Y, former), threshold)
        if found == former:
            break
        _move(model, X, Y, former, found)
        relearn(model)
        former = found
    return former


def _outliers(deviations: Tensor, threshold: float) -> list[int]:
    """Rows with the largest deviations that are above the threshold, in increasing order."""
    largest = deviations.argsort(descending=True, stable=True)[: len(deviations) // ONE_IN]
    return sorted(largest[deviations[largest] > threshold].tolist())


@torch.no_grad()
def _deviations(model: StreamingGP, X: Tensor, Y: Tensor, outliers: Sequence[int]) -> Tensor:
    """Distances to what all other observations in the model predict, in its deviations, ``n``.

    Zero for all that are in the model where rounding hides how much they weigh there.
    """
    out = torch.zeros(len(X), dtype=torch.bool, device=X.device)
    out[list(outliers)] = True
    deviations = torch.zeros_like(Y[:, 0])
    try:
        others = leave_one_out(model, X[~out], Y[~out]).posterior
        deviations[~out] = _standardized(others, Y[~out])
    except InputDataError:
        model.log_event("leave-one-out predictions that rounding hides")
    deviations[out] = deviations_from_prediction(model, X[out], Y[out])
    return deviations


@torch.no_grad()
def deviations_from_prediction(model: StreamingGP, X: Tensor, Y: Tensor) -> Tensor:
    """Distances of outcomes that are not in a model to their predicted means, ``n``.

    Args:
        model: Of one output.
        X: ``n x d``.
        Y: ``n x 1``.

    Returns:
        In standard deviations of the posterior predictive distribution, noise included.
    """
    return _standardized(model.posterior(X, observation_noise=True), Y)


def _standardized(posterior: Posterior, Y: Tensor) -> Tensor:
    """Distances of outcomes, ``n x 1``, to their predicted means in predicted deviations, ``n``."""
    normal = cast(GPyTorchPosterior, posterior)
    return ((Y[:, 0] - normal.mean.reshape(-1)).abs()) / normal.variance.reshape(-1).sqrt()


def _move(
    model: StreamingGP, X: Tensor, Y: Tensor, former: Sequence[int], found: Sequence[int]
) -> None:
    """Take new outliers out of the model, and put former ones that are none back."""
    new, back = ([i for i in a if i not in b] for a, b in ((found, former), (former, found)))
    if new:
        model.retract(X[new], Y[new])
    if back:
        model.update(X[back], Y[back])
