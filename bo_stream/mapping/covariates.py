"""Covariates of sites, and which of them explain outcomes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.exceptions.warnings import InputDataWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms.input import AffineInputTransform, ChainedInputTransform
from botorch.models.transforms.outcome import Standardize
from gpytorch.kernels import Kernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from scipy.spatial import cKDTree
from torch import Tensor
from torch.nn import Module

from bo_stream.mapping.kernel import Units, check_positions, kilometres, map_kernel, places


def fill_missing(
    X: Tensor,
    sites: Tensor | None = None,
    position: tuple[int, int] = (0, 1),
    codes: Sequence[float] = (-9999.0,),
    units: Units = "degrees",
) -> Tensor:
    """Fill each missing covariate with its value at the nearest site that has one.

    Most are missing where a cell of a raster is sea or cloud: the nearest site is in a neighbouring
    cell. Cost O(log n) for each missing value.

    Args:
        X: ``n x d``, positions and covariates; NaN where missing.
        sites: ``n' x d``, where to look for values; default X itself.
        position: Columns of longitude and latitude, or of east and north.
        codes: Numbers that stand for missing values.
        units: Units of positions: ``"degrees"``, or on a map projection ``"kilometres"`` or
            ``"metres"``.

    Returns:
        A copy of X without missing values.

    Raises:
        InputDataError: A position is missing, or a covariate at all sites.
        ValueError: The units are none of these.
    """
    known = X if sites is None else sites
    check_positions(X, position, units)
    check_positions(known, position, units)
    filled = X.clone()
    for column in set(range(X.shape[-1])) - set(position):
        gaps = _missing(X[:, column], codes)
        if not bool(gaps.any()):
            continue
        there = ~_missing(known[:, column], codes)
        if not bool(there.any()):
            raise InputDataError(
                f"Expected a value of covariate {column} at one site at least, got none. Leave the "
                "column out."
            )
        tree = cKDTree(places(known[there], position, units).numpy(force=True))
        _, nearest = tree.query(places(X[gaps], position, units).numpy(force=True))
        rows = torch.as_tensor(nearest, device=known.device)
        filled[gaps, column] = known[there, column][rows].to(X)
    return filled


def _missing(values: Tensor, codes: Sequence[float]) -> Tensor:
    """Return which values are missing: not finite, or one of the codes."""
    coded = torch.isin(values, torch.as_tensor(codes).to(values))
    return coded | ~values.isfinite()


def map_inputs(
    sites: Tensor, position: tuple[int, int] = (0, 1), units: Units = "degrees"
) -> ChainedInputTransform:
    """Make a model's input transform: positions in kilometres, covariates standardised.

    Args:
        sites: ``n x d``, all that are to be mapped, without missing values.
        position: Columns of longitude and latitude, or of east and north.
        units: Units of positions: ``"degrees"``, or on a map projection ``"kilometres"`` or
            ``"metres"``.

    Raises:
        InputDataError: Positions are not in these units, or a covariate is missing.
        ValueError: The units are none of these.
    """
    if not bool(sites.isfinite().all()):
        raise InputDataError(
            "Expected sites without missing values, got NaN or infinity. Call fill_missing first."
        )
    steps = {"position": kilometres(sites, position, units)}
    d = sites.shape[-1]
    covariates = [column for column in range(d) if column not in position]
    if not covariates:
        return ChainedInputTransform(**steps)
    values = sites[..., covariates].flatten(0, -2)
    sd = values.std(0) if len(values) > 1 else torch.ones_like(values[0])
    spread = torch.where(sd > 1e-9 * values.abs().amax(0), sd, torch.ones_like(sd))
    scale = AffineInputTransform(d, spread, values.mean(0), indices=covariates)
    return ChainedInputTransform(**steps, covariates=scale)


# --- which covariates explain outcomes: differences of log marginal likelihoods ------------------


STEPS = 50
"""Largest number of iterations of a fit of hyperparameters."""

TOLERANCE = 1e-7
"""Relative change of the objective at which a fit ends."""


def screen_covariates(
    X: Tensor,
    Y: Tensor,
    Yvar: Tensor | None = None,
    names: Sequence[str] | None = None,
    position: tuple[int, int] = (0, 1),
    units: Units = "degrees",
) -> pd.DataFrame:
    """Rank covariates by their gains of log marginal likelihood in an exact model.

    Every model is an exact Gaussian process with ``map_kernel`` over the position and some
    covariates, its hyperparameters at their posterior mode. For q covariates 2 q + 2 models are
    fitted, each at O(n³) a step; above some 2,000 rows pass a random part of them. The fit of a
    model with one covariate starts from the model without any, the fit of a model that leaves a
    covariate out from the model with all.

    Args:
        X: ``n x d``, positions, and covariates without missing values.
        Y: ``n x 1`` outcomes, such as :func:`empirical_logits`.
        Yvar: Variances of their noise, ``n x 1``; by default one variance is learned.
        names: Names of the d columns; by default their numbers.
        position: Columns of longitude and latitude, or of east and north.
        units: Units of positions: ``"degrees"``, or on a map projection ``"kilometres"`` or
            ``"metres"``.

    Returns:
        One row for each covariate, best first: ``gain_alone`` is the difference of log marginal
        likelihoods of the models with it and without any covariate, ``gain_last`` the difference of
        the models with all covariates and with all others. A covariate above 0 in both should stay;
        one with a large first gain and a last gain near 0 is redundant.

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

    def fit(chosen: list[int], start: _Fitted | None = None) -> _Fitted:
        return _fit(X[:, [*position, *chosen]], Y, Yvar, units, chosen, start)

    none = fit([])
    every = fit(covariates, none)
    rows = []
    for column in covariates:
        others = [other for other in covariates if other != column]
        alone, without = fit([column], none), fit(others, every)
        rows.append(
            {
                "gain_alone": alone.evidence - none.evidence,
                "gain_last": every.evidence - without.evidence,
            }
        )
    labels: list[Any] = [column if names is None else names[column] for column in covariates]
    table = pd.DataFrame(rows, index=pd.Index(labels, name="covariate"))
    return table.sort_values("gain_last", ascending=False)


@dataclass(frozen=True)
class _Fitted:
    """A model at the mode of the hyperparameters' posterior.

    Attributes:
        model: An exact model with ``map_kernel``.
        columns: Columns of its covariates, in the order of the kernel's parts after the first,
            which is over position.
        evidence: Log marginal likelihood.
    """

    model: SingleTaskGP
    columns: list[int]
    evidence: float

    def part(self, column: int) -> Kernel | None:
        """Return the part of the kernel over a covariate, None if it has none."""
        if column not in self.columns:
            return None
        return self.model.covar_module.kernels[1 + self.columns.index(column)]


def _fit(
    X: Tensor,
    Y: Tensor,
    Yvar: Tensor | None,
    units: Units,
    columns: list[int],
    start: _Fitted | None,
) -> _Fitted:
    """Fit a model, from the hyperparameters of another one where both have them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InputDataWarning)  # inputs are in kilometres
        warnings.simplefilter("ignore", RuntimeWarning)
        model = SingleTaskGP(
            X,
            Y,
            Yvar,
            covar_module=map_kernel(X, units=units),
            input_transform=map_inputs(X, units=units),
            outcome_transform=Standardize(1),
        )
        if start is not None:
            position, *parts = model.covar_module.kernels
            pairs: list[tuple[Module, Module | None]] = [
                (position, start.model.covar_module.kernels[0]),
                (model.mean_module, start.model.mean_module),
                (model.likelihood, start.model.likelihood),
            ]
            pairs += [(part, start.part(c)) for c, part in zip(columns, parts, strict=True)]
            with torch.no_grad():
                for own, other in pairs:
                    if other is not None:
                        values = zip(own.parameters(), other.parameters(), strict=True)
                        for parameter, value in values:
                            parameter.copy_(value)
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        fit_gpytorch_mll(
            mll,
            optimizer_kwargs={"options": {"maxiter": STEPS, "ftol": TOLERANCE}},
            warning_handler=lambda _: True,  # a search that stalls near an optimum is its end
        )
        model.train()
        with torch.no_grad():
            prior = model(*model.train_inputs)
            evidence = float(model.likelihood(prior).log_prob(model.train_targets))
    return _Fitted(model, columns, evidence)
