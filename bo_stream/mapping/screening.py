"""Which covariates earn their place: differences of log marginal likelihoods."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError
from botorch.exceptions.warnings import InputDataWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms.outcome import Standardize
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream.mapping.covariates import map_inputs
from bo_stream.mapping.kernel import map_kernel
from bo_stream.mapping.positions import Units

STEPS = 50
"""Iterations of a fit of hyperparameters."""


def screen_covariates(
    X: Tensor,
    Y: Tensor,
    Yvar: Tensor | None = None,
    names: Sequence[str] | None = None,
    position: tuple[int, int] = (0, 1),
    units: Units = "degrees",
) -> pd.DataFrame:
    """Rank covariates by what each adds to the log marginal likelihood of an exact model.

    Every model is an exact Gaussian process with ``map_kernel`` over the position and some
    covariates, its hyperparameters at their posterior mode. Of q covariates 2 q + 2 models are
    fitted, each at O(n³) a step; above some 2,000 rows pass a random part of them.

    Args:
        X: ``n x d``, positions, and covariates without missing values.
        Y: ``n x 1`` outcomes, such as :func:`empirical_logits`.
        Yvar: Variances of their noise, ``n x 1``; by default one variance is learned.
        names: Of the d columns; by default their numbers.
        position: Columns of longitude and latitude, or of east and north.
        units: Of positions: ``"degrees"``, or ``"kilometres"`` or ``"metres"`` on a map projection.

    Returns:
        A row a covariate, best first, named so: ``gain_alone`` is the difference of log marginal
        likelihoods of the models with it and without any covariate, ``gain_last`` that of the
        models with all covariates and with all others. Above 0 in both it should stay; large alone
        and near 0 last it is one of several that say the same.

    Raises:
        BotorchTensorDimensionError: X, Y, Yvar or names do not belong together.
    """
    n, d = X.shape[-2:]
    if X.ndim != 2 or Y.shape != (n, 1) or (Yvar is not None and Yvar.shape != Y.shape):
        raise BotorchTensorDimensionError(
            f"Expected X of shape `n x d`, Y and Yvar `n x 1`, got {tuple(X.shape)}, "
            f"{tuple(Y.shape)} and {None if Yvar is None else tuple(Yvar.shape)}."
        )
    if names is not None and len(names) != d:
        raise BotorchTensorDimensionError(f"Expected {d} names of columns, got {len(names)}.")
    covariates = [column for column in range(d) if column not in position]

    def evidence(chosen: list[int]) -> float:
        return _log_evidence(X[:, [*position, *chosen]], Y, Yvar, units)

    none, every = evidence([]), evidence(covariates)
    rows = [
        {
            "gain_alone": evidence([column]) - none,
            "gain_last": every - evidence([other for other in covariates if other != column]),
        }
        for column in covariates
    ]
    labels: list[Any] = [column if names is None else names[column] for column in covariates]
    table = pd.DataFrame(rows, index=pd.Index(labels, name="covariate"))
    return table.sort_values("gain_last", ascending=False)


def _log_evidence(X: Tensor, Y: Tensor, Yvar: Tensor | None, units: Units) -> float:
    """Compute the log marginal likelihood at the mode of the hyperparameters' posterior."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InputDataWarning)  # inputs are in kilometres
        warnings.simplefilter("ignore", category=RuntimeWarning)
        model = SingleTaskGP(
            X,
            Y,
            Yvar,
            covar_module=map_kernel(X, units=units),
            input_transform=map_inputs(X, units=units),
            outcome_transform=Standardize(1),
        )
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": STEPS}})
        model.train()
        with torch.no_grad():
            prior = model(*model.train_inputs)
            return float(model.likelihood(prior).log_prob(model.train_targets))
