"""Maps: positions in kilometres, covariates, their default kernel and screening.

The map is Lambert's azimuthal equal-area projection about the middle of the sites [Snyder, 1987,
Map Projections: A Working Manual, eq. 24-2 to 24-4]. Two columns stay two, as a grid of positions
needs, where chords in three dimensions would need a third; the middle of the sites is taken on the
sphere, so that neither a pole nor the date line is special. At c radians from the middle lengths
are wrong by the factor cos(c / 2): 0.3 % at 1,000 km, 7.6 % at 5,000 km, beyond which it refuses.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import pandas as pd
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.exceptions.warnings import InputDataWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms.input import (
    AffineInputTransform,
    ChainedInputTransform,
    InputTransform,
)
from botorch.models.transforms.outcome import Standardize
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import AdditiveKernel, Kernel, LinearKernel, MaternKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import LogNormalPrior
from numpy.typing import ArrayLike, NDArray
from scipy.spatial import cKDTree
from torch import Tensor
from torch.nn import Module

from bo_stream.errors import as_whole
from bo_stream.likelihoods.binomial import empirical_logits

__all__ = [
    "Kilometres",
    "Regressor",
    "empirical_logits",
    "fill_missing",
    "kilometres",
    "map_inputs",
    "map_kernel",
    "out_of_fold",
    "screen_covariates",
    "survey_kernel",
]

Units = Literal["degrees", "kilometres", "metres"]
"""Units of positions: longitude and latitude, or east and north on a map projection like UTM."""

_LENGTHS = {"kilometres": 1.0, "metres": 1000.0}

RADIUS = 6371.0088
"""Mean radius of the Earth, in kilometres."""

REACH = 5000.0
"""Largest distance from the middle of the sites, in kilometres."""


class Kilometres(InputTransform):
    """Replace longitude and latitude in degrees by kilometres east and north of a centre.

    Other columns stay. The image of a box of degrees is no box: a model that covers a box (WISKI)
    chooses it from the inputs, without ``bounds``.

    Attributes:
        centre: Longitude and latitude of the point that becomes (0, 0), in degrees.
        position: Columns of longitude and latitude.
    """

    centre: Tensor

    def __init__(self, centre: tuple[float, float], position: tuple[int, int] = (0, 1)) -> None:
        super().__init__()
        self.register_buffer("centre", torch.tensor(centre, dtype=torch.float64))
        self.position = position
        self.transform_on_train = self.transform_on_eval = self.transform_on_fantasize = True

    def transform(self, X: Tensor) -> Tensor:
        """Map ``... x n x d`` inputs.

        Raises:
            InputDataError: Positions are not in degrees, or over 5,000 km from the centre.
        """
        _check_degrees(X, self.position)
        longitude, latitude = (torch.deg2rad(X[..., column]) for column in self.position)
        east, north = torch.deg2rad(self.centre.to(X)).unbind()
        turn = longitude - east
        cosine = north.sin() * latitude.sin() + north.cos() * latitude.cos() * turn.cos()
        if bool((cosine < math.cos(REACH / RADIUS)).any()):
            raise InputDataError(
                f"Expected sites within {REACH:,.0f} km of their middle, longitude and latitude "
                f"{self.centre.tolist()}, got one that is farther away. Model continents apart."
            )
        scale = RADIUS * (2.0 / (1.0 + cosine)).sqrt()
        x = scale * latitude.cos() * turn.sin()
        y = north.cos() * latitude.sin() - north.sin() * latitude.cos() * turn.cos()
        columns = list(X.unbind(-1))
        columns[self.position[0]], columns[self.position[1]] = x, scale * y
        return torch.stack(columns, -1)

    def equals(self, other: InputTransform) -> bool:
        """Compare; overrides ``InputTransform.equals``, which looks at tensors alone."""
        same = isinstance(other, Kilometres) and self.position == other.position
        return same and super().equals(other)


def kilometres(
    sites: Tensor, position: tuple[int, int] = (0, 1), units: Units = "degrees"
) -> InputTransform:
    """Make the input transform of positions to kilometres about the middle of the sites.

    Args:
        sites: ``... x n x d``, all that are to be mapped.
        position: Columns of longitude and latitude, or of east and north.
        units: ``"degrees"``, or ``"kilometres"`` or ``"metres"`` on a map projection.

    Raises:
        InputDataError: There are no sites, or their positions are not in these units or reach
            farther than 5,000 km from their middle.
        ValueError: The units are none of these.
    """
    check_positions(sites, position, units)
    if sites.numel() == 0:
        raise InputDataError(
            f"Expected at least one site, got none, of shape {tuple(sites.shape)}. Pass all sites "
            "that are to be mapped."
        )
    if units == "degrees":
        x, y, z = _on_sphere(sites, position).flatten(0, -2).mean(0).tolist()
        centre = math.degrees(math.atan2(y, x)), math.degrees(math.atan2(z, math.hypot(x, y)))
        projection = Kilometres(centre, position)
        projection.transform(sites)  # refuses sites that are too far apart
        return projection
    columns, length = list(position), torch.full((2,), _LENGTHS[units]).to(sites)
    positions = sites[..., columns].flatten(0, -2)
    middle = positions.mean(0)
    farthest = float(((positions - middle) / length).norm(dim=-1).max())
    if farthest > REACH:
        raise InputDataError(
            f"Expected sites within {REACH:,.0f} km of their middle, got one {farthest:,.0f} km "
            f"away with units={units!r}. Are the units others? Else model continents apart."
        )
    return AffineInputTransform(sites.shape[-1], length, middle, indices=columns)


def places(X: Tensor, position: tuple[int, int], units: Units) -> Tensor:
    """Compute positions in kilometres whose distances have the order of those along the ground.

    In space, ``... x n x d -> ... x n x 3``, or on a map projection, ``... x n x 2``.
    """
    if units == "degrees":
        return RADIUS * _on_sphere(X, position)
    return X[..., list(position)].double() / _LENGTHS[units]


def _on_sphere(X: Tensor, position: tuple[int, int]) -> Tensor:
    """Compute points on the unit sphere, ``... x n x 3``."""
    longitude, latitude = (torch.deg2rad(X[..., column].double()) for column in position)
    across = latitude.cos()
    return torch.stack((across * longitude.cos(), across * longitude.sin(), latitude.sin()), -1)


def check_positions(X: Tensor, position: tuple[int, int], units: Units) -> None:
    """Check two columns of positions: their range in degrees, else that they are finite.

    Raises:
        InputDataError: They are not.
        ValueError: The units are unknown.
    """
    if units == "degrees":
        _check_degrees(X, position)
    elif units in _LENGTHS:
        _check_columns(X, position, "east and north")
    else:
        known = "'degrees', 'kilometres' or 'metres'"
        raise ValueError(f"Expected units to be {known}, got {units!r}.")


def _check_degrees(X: Tensor, position: tuple[int, int]) -> None:
    """Check that two columns are longitudes, -180 to 360, and latitudes, -90 to 90.

    Swapped columns are noticed where a longitude is no latitude; near the Greenwich meridian and
    the equator the values do not show it.

    Raises:
        InputDataError: They are not.
    """
    longitude, latitude = _check_columns(X, position, "longitude and latitude")
    fits, fits_swapped = (
        bool(((x >= -180.0) & (x <= 360.0) & (y.abs() <= 90.0)).all())
        for x, y in ((longitude, latitude), (latitude, longitude))
    )
    if fits:
        return
    ranges = (
        f"{float(longitude.min()):.6g} to {float(longitude.max()):.6g} and "
        f"{float(latitude.min()):.6g} to {float(latitude.max()):.6g}"
    )
    if fits_swapped:
        advice = f"They are swapped: pass position={position[::-1]}."
    elif float(torch.maximum(longitude.abs().max(), latitude.abs().max())) > 1000.0:
        advice = "These look like metres of a map projection: pass units='metres'."
    else:
        advice = "Correct those rows."
    raise InputDataError(
        "Expected longitudes from -180 to 360 and latitudes from -90 to 90 degrees in columns "
        f"{position}, got {ranges}. {advice}"
    )


def _check_columns(X: Tensor, position: tuple[int, int], names: str) -> tuple[Tensor, Tensor]:
    """Check that two columns are there and finite, and return them."""
    if max(position) >= X.shape[-1] or min(position) < 0 or position[0] == position[1]:
        raise InputDataError(
            f"Expected position to be two columns of the {X.shape[-1]} of the sites, {names}, "
            f"got {position}."
        )
    first, second = (X[..., column].detach() for column in position)
    if not bool((first.isfinite() & second.isfinite()).all()):
        raise InputDataError(
            f"Expected {names}, columns {position}, of every site, got NaN or "
            "infinity. Drop those rows."
        )
    return first, second


# --- kernels of maps: sums of one part over position and one over each covariate -----------------


_POSITION_SHARE = 0.3
"""Prior median of the length scale of position, relative to the sites' root mean square radius."""

_COVARIATE_LENGTH = 4.0
"""Prior median of the length scale of a covariate, in its standard deviations."""

_ONE_PLACE = 1e-6
"""Largest difference of two coordinates of one place, in kilometres."""

_SITE_VARIANCE = 0.05
"""Prior median of the variance of each site's own effect."""

_SHORTEST = 1e-3
"""Least length scale and least output scale, relative to their prior medians."""


def map_kernel(
    sites: Tensor,
    position: tuple[int, int] = (0, 1),
    linear: Sequence[int] = (),
    nu: float = 1.5,
    variance: float = 1.0,
    units: Units = "degrees",
) -> AdditiveKernel:
    """Make the kernel of a map, a ``covar_module`` for inputs transformed by ``map_inputs``.

    ``k(x, x') = s_0 Matern_nu(|p - p'| / l_0) + Σ_j s_j Matern_5/2(|x_j - x_j'| / l_j)`` with p the
    position in kilometres and x_j the covariate j, standardised; over the columns in ``linear``
    ``+ v_j x_j x_j'`` instead. Priors are log-normal: the length scale l_0 has median 0.3 of the
    root mean square distance of the sites from their middle, l_j median 4, the output scale s_0
    half the ``variance``, the s_j together the other half, and each v_j 1. They are wide, of log
    standard deviation 1.

    Its parts have at most two inputs. WISKI's grids represent it, but for linear parts, with the
    product of two one-dimensional kernels over position, and a warning. On three surveys it called
    sites above a threshold about as well as one kernel over everything: better on one, slightly
    worse on another (``benchmarks/maps/map_kernels.py``).

    Args:
        sites: ``n x d``, all that are to be mapped, as for ``map_inputs``.
        position: Columns of longitude and latitude, or of east and north.
        linear: Columns that enter linearly, such as predictions of ``out_of_fold``.
        nu: Smoothness of the part over position: 0.5, 1.5 or 2.5.
        variance: Sum of the prior medians of s_0 and of the s_j, 1 for standardised outcomes. Where
            there are no s_j, with no covariates or linear ones only, s_0 still has half of it.
        units: Of positions: ``"degrees"``; of a map projection ``"kilometres"`` or ``"metres"``.

    Raises:
        InputDataError: There are no sites, or positions are not in these units.
        ValueError: A column of ``linear`` is none of the covariates, the variance is not positive
            and finite, or the units are unknown.
    """
    if not (math.isfinite(variance) and variance > 0.0):
        raise ValueError(f"Expected variance to be positive and finite, got {variance!r}.")
    covariates = [column for column in range(sites.shape[-1]) if column not in position]
    if not set(linear) <= set(covariates):
        raise ValueError(f"Expected linear among the covariates {covariates}, got {list(linear)}.")
    transformed = kilometres(sites, position, units).transform(sites)
    positions = transformed[..., list(position)].flatten(0, -2)
    radius = float((positions - positions.mean(0)).square().sum(-1).mean().sqrt())
    smooth = [column for column in covariates if column not in linear]
    half = 0.5 * variance
    parts: list[Kernel] = [_part(nu, position, _POSITION_SHARE * (radius or 1.0), half)]
    parts += [_part(2.5, (column,), _COVARIATE_LENGTH, half / len(smooth)) for column in smooth]
    for column in linear:
        line = LinearKernel(active_dims=(column,))
        line.variance = 1.0
        line.raw_variance.requires_grad_(False)  # the output scale is v_j
        parts.append(_scaled(line, 1.0))
    return AdditiveKernel(*parts).to(sites)


def survey_kernel(
    sites: Tensor, position: tuple[int, int] = (0, 1), units: Units = "degrees"
) -> AdditiveKernel:
    """Make the kernel of logits of prevalence, for inputs transformed by ``map_inputs``.

    It is the sum of :func:`map_kernel` with an exponential part over position (``nu`` of one half);
    and of ``s [p = p']``, a site's own effect, with s of prior median 0.05 and log standard
    deviation 1: a nugget, which all surveys of a site share. Without it a survey of counts makes
    the other parts too rough. The prior median of the output scale is 1 over position, and 1 over
    all covariates together: 2 in all where there are some, about the variance of logits between
    villages, and 1 of positions alone.

    Args:
        sites: ``n x d``, all that are to be mapped, as for ``map_inputs``.
        position: Columns of longitude and latitude, or of east and north.
        units: Of positions: ``"degrees"``; of a map projection ``"kilometres"`` or ``"metres"``.

    Raises:
        InputDataError: There are no sites, or positions are not in these units.
        ValueError: The units are none of these.
    """
    shared = map_kernel(sites, position, nu=0.5, variance=2.0, units=units).kernels
    own = _scaled(SiteKernel(active_dims=position), _SITE_VARIANCE)
    return AdditiveKernel(*shared, own).to(sites)


class SiteKernel(Kernel):
    """Kernel that is 1 between inputs at one place, within a millimetre, and 0 between others.

    Coordinates are compared one by one: a kernel with a short length scale would compute distances
    from differences of squares, with errors of metres across a country.
    """

    is_stationary = True

    def forward(
        self,
        x1: Tensor,
        x2: Tensor,
        diag: bool = False,
        last_dim_is_batch: bool = False,
        **params: Any,
    ) -> Tensor:
        """Compute the covariance, ``... x n x n'``, or of rows in pairs, ``... x n``, if diag."""
        if not diag:
            x1, x2 = x1.unsqueeze(-2), x2.unsqueeze(-3)
        pairs = zip(x1.unbind(-1), x2.unbind(-1), strict=True)
        return torch.stack([(a - b).abs() <= _ONE_PLACE for a, b in pairs]).all(0).to(x1)


def _part(nu: float, columns: tuple[int, ...], length: float, variance: float) -> ScaleKernel:
    """Make a Matérn part with prior medians of its length scale and its output scale."""
    prior, bound = LogNormalPrior(math.log(length), 1.0), _above(_SHORTEST * length, length)
    priors: dict[str, Any] = {"lengthscale_prior": prior, "lengthscale_constraint": bound}
    return _scaled(MaternKernel(nu, active_dims=columns, **priors), variance)


def _scaled(kernel: Kernel, variance: float) -> ScaleKernel:
    """Multiply a kernel by an output scale with a prior median."""
    prior, bound = LogNormalPrior(math.log(variance), 1.0), _above(_SHORTEST * variance, variance)
    return ScaleKernel(kernel, outputscale_prior=prior, outputscale_constraint=bound)


def _above(least: float, start: float) -> GreaterThan:
    """Constrain a parameter from below; its logarithm is optimised, so that its unit is free."""
    return GreaterThan(least, transform=torch.exp, inv_transform=torch.log, initial_value=start)


# --- predictions of another regressor as one more input of a model -------------------------------


class Regressor(Protocol):
    """An object with scikit-learn's two methods."""

    def fit(self, X: Any, y: Any) -> Self:
        """Learn from ``n x d`` inputs and n outcomes, from the start at each call."""

    def predict(self, X: Any) -> Any:
        """Predict n outcomes."""


R = TypeVar("R", bound=Regressor)


def out_of_fold(
    regressor: R, X: ArrayLike, y: ArrayLike, folds: int | Sequence[int] = 10
) -> tuple[NDArray[np.float64], R]:
    """Predict each row by a regressor that has not seen its fold.

    These predictions are one more input of the rows that a model learns from: predictions by a
    regressor that has seen a row would be better there than elsewhere. At sites without outcomes
    the input is the prediction of the regressor that is returned.

    Args:
        regressor: The regressor, not changed; each fold fits a copy.
        X: ``n x d`` inputs.
        y: n outcomes, such as logits of prevalence.
        folds: Number of folds, to which row i belongs by i modulo that number, or the fold of each
            row, such as a spatial block.

    Returns:
        Predictions, n, and a copy of the regressor fitted to all rows.

    Raises:
        ValueError: The rows of X, y and folds differ in number, or there is one fold only.
    """
    inputs, outcomes = np.asarray(X, dtype=np.float64), np.asarray(y, dtype=np.float64).ravel()
    rows = np.arange(len(inputs))
    count = as_whole(folds)
    labels = np.atleast_1d(folds) if count is None else rows % max(count, 1)
    if not len(inputs) == len(outcomes) == len(labels):
        raise ValueError(
            f"Expected as many rows of X, y and folds, got {len(inputs)}, {len(outcomes)} and "
            f"{len(labels)}."
        )
    if len(np.unique(labels)) < 2:
        raise ValueError(f"Expected folds to be two at least, got {folds!r}.")
    predictions = np.empty(len(inputs))
    for fold in np.unique(labels):
        left_out = labels == fold
        fitted = deepcopy(regressor).fit(inputs[~left_out], outcomes[~left_out])
        predictions[left_out] = np.asarray(fitted.predict(inputs[left_out])).ravel()
    return predictions, deepcopy(regressor).fit(inputs, outcomes)


# --- covariates of sites, and which of them explain outcomes -------------------------------------


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
        units: Of positions: ``"degrees"``; of a map projection ``"kilometres"`` or ``"metres"``.

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
        gaps, absent = (
            torch.isin(values, torch.as_tensor(codes).to(values)) | ~values.isfinite()
            for values in (X[:, column], known[:, column])
        )
        if not bool(gaps.any()):
            continue
        there = ~absent
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


def map_inputs(
    sites: Tensor, position: tuple[int, int] = (0, 1), units: Units = "degrees"
) -> ChainedInputTransform:
    """Make a model's input transform: positions in kilometres, covariates standardised.

    Args:
        sites: ``n x d``, all that are to be mapped, without missing values.
        position: Columns of longitude and latitude, or of east and north.
        units: Of positions: ``"degrees"``; of a map projection ``"kilometres"`` or ``"metres"``.

    Raises:
        InputDataError: There are no sites, positions are not in these units, or a covariate is
            missing.
        ValueError: The units are none of these.
    """
    if not bool(sites.isfinite().all()):
        raise InputDataError(
            "Expected sites without missing values, got NaN or infinity. Call fill_missing first."
        )
    steps = {"position": kilometres(sites, position, units)}
    covariates = [column for column in range(sites.shape[-1]) if column not in position]
    if not covariates:
        return ChainedInputTransform(**steps)
    values = sites[..., covariates].flatten(0, -2)
    sd = values.std(0) if len(values) > 1 else torch.ones_like(values[0])
    spread = torch.where(sd > 1e-9 * values.abs().amax(0), sd, torch.ones_like(sd))
    scale = AffineInputTransform(sites.shape[-1], spread, values.mean(0), indices=covariates)
    return ChainedInputTransform(**steps, covariates=scale)


# --- which covariates explain outcomes: differences of log marginal likelihoods ------------------


_LIMITS = {"maxiter": 50, "ftol": 1e-7}
"""Of a fit of hyperparameters: most iterations, and the objective's least relative change."""


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
        units: Of positions: ``"degrees"``; of a map projection ``"kilometres"`` or ``"metres"``.

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
        alone, without = fit([column], none).evidence, fit(others, every).evidence
        rows.append({"gain_alone": alone - none.evidence, "gain_last": every.evidence - without})
    labels: list[Any] = [column if names is None else names[column] for column in covariates]
    table = pd.DataFrame(rows, index=pd.Index(labels, name="covariate"))
    return table.sort_values("gain_last", ascending=False)


class _Fitted(NamedTuple):
    """An exact model with ``map_kernel`` at the mode of the hyperparameters' posterior.

    ``columns`` are its covariates, in the order of the kernel's parts after the first, which is
    over position; ``evidence`` is the log marginal likelihood.
    """

    model: SingleTaskGP
    columns: list[int]
    evidence: float


def _fit(
    X: Tensor,
    Y: Tensor,
    Yvar: Tensor | None,
    units: Units,
    chosen: list[int],
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
            first, *others = start.model.covar_module.kernels
            known: dict[int, Module] = dict(zip(start.columns, others, strict=True))
            pairs: list[tuple[Module, Module]] = [
                (position, first),
                (model.mean_module, start.model.mean_module),
                (model.likelihood, start.model.likelihood),
            ]
            pairs += [(p, known[c]) for c, p in zip(chosen, parts, strict=True) if c in known]
            with torch.no_grad():
                for own, other in pairs:
                    for parameter, value in zip(own.parameters(), other.parameters(), strict=True):
                        parameter.copy_(value)
        fit_gpytorch_mll(
            ExactMarginalLogLikelihood(model.likelihood, model),
            optimizer_kwargs={"options": dict(_LIMITS)},
            warning_handler=lambda _: True,  # a search that stalls near an optimum is its end
        )
        model.train()
        with torch.no_grad():
            prior = model(*model.train_inputs)
            evidence = float(model.likelihood(prior).log_prob(model.train_targets))
    return _Fitted(model, chosen, evidence)
