"""Outliers of a model: observations far from what all others predict."""

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
from bo_stream.models.fitting import relearn

ONE_IN = 100
"""Least number of observations per outlier: if there are more, the noise is heavy-tailed."""

MOST_PASSES = 3
"""Most changes of the set of outliers in a refit."""


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
        model: Model of the observations without the former outliers, changed in place. It retracts
            exactly, as WISKI does.
        X: Inputs of all observations, outliers included, ``n x d``.
        Y: Their outcomes, ``n x 1``.
        outliers: Former outliers, as rows of X, in increasing order.
        threshold: Number of standard deviations.

    Returns:
        The outliers, which the model is without, as rows of X, in increasing order.
    """
    former = list(outliers)
    for _ in range(MOST_PASSES):
        deviations = _deviations(model, X, Y, former)
        largest = deviations.argsort(descending=True, stable=True)[: len(X) // ONE_IN]
        found = sorted(largest[deviations[largest] > threshold].tolist())
        if found == former:
            break
        new, back = ([i for i in a if i not in b] for a, b in ((found, former), (former, found)))
        if new:
            model.retract(X[new], Y[new])
        if back:
            model.update(X[back], Y[back])
        relearn(model)
        former = found
    return former


@torch.no_grad()
def _deviations(model: StreamingGP, X: Tensor, Y: Tensor, outliers: Sequence[int]) -> Tensor:
    """Compute standardised leave-one-out errors, ``n``.

    They are zero for all observations in the model where rounding hides how much each weighs.
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
    """Compute standardised errors, ``n``, of predictions of outcomes that are not in a model.

    Inputs are ``n x d``, outcomes ``n x 1``; the predictive distributions include the noise.
    """
    return _standardized(model.posterior(X, observation_noise=True), Y)


def _standardized(posterior: Posterior, Y: Tensor) -> Tensor:
    normal = cast(GPyTorchPosterior, posterior)
    return ((Y[:, 0] - normal.mean.reshape(-1)).abs()) / normal.variance.reshape(-1).sqrt()
