"""Positions on the globe, and kernels and mean functions of maps.

The map is Lambert's azimuthal equal-area projection about the middle of the sites [Snyder, 1987,
Map Projections: A Working Manual, eq. 24-2 to 24-4]. Two columns stay two, as a grid of positions
needs, where chords in three dimensions would need a third; the middle of the sites is taken on the
sphere, so that neither a pole nor the date line is special. At c radians from the middle lengths
are wrong by the factor cos(c / 2): 0.3 % at 1,000 km, 7.6 % at 5,000 km, beyond which it refuses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Literal, Protocol, Self, TypeVar

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError
from botorch.models.transforms.input import AffineInputTransform, InputTransform
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import AdditiveKernel, Kernel, LinearKernel, MaternKernel, ScaleKernel
from gpytorch.priors import LogNormalPrior
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

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


def kilometres(
    sites: Tensor, position: tuple[int, int] = (0, 1), units: Units = "degrees"
) -> InputTransform:
    """Make the input transform of positions to kilometres about the middle of the sites.

    Args:
        sites: ``... x n x d``, all that are to be mapped.
        position: Columns of longitude and latitude, or of east and north.
        units: ``"degrees"``, or ``"kilometres"`` or ``"metres"`` on a map projection.

    Raises:
        InputDataError: Positions are not in these units, or reach farther than 5,000 km from their
            middle.
        ValueError: The units are none of these.
    """
    check_positions(sites, position, units)
    if units == "degrees":
        return projection(sites, position)
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


def projection(sites: Tensor, position: tuple[int, int] = (0, 1)) -> Kilometres:
    """Make the input transform from degrees to kilometres about the middle of the sites.

    Args:
        sites: ``... x n x d``, all that are to be mapped.
        position: Columns of longitude and latitude, in degrees.

    Raises:
        InputDataError: Positions are not in degrees, or reach farther than 5,000 km from their
            middle.
    """
    _check_degrees(sites, position)
    x, y, z = _on_sphere(sites, position).flatten(0, -2).mean(0).tolist()
    centre = math.degrees(math.atan2(y, x)), math.degrees(math.atan2(z, math.hypot(x, y)))
    transform = Kilometres(centre, position)
    transform.transform(sites)
    return transform


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
        return
    if units not in _LENGTHS:
        raise ValueError(
            f"Expected units to be 'degrees', 'kilometres' or 'metres', got {units!r}."
        )
    _check_columns(X, position, "east and north")


def _check_degrees(X: Tensor, position: tuple[int, int]) -> None:
    """Check that two columns are longitudes, -180 to 360, and latitudes, -90 to 90.

    Swapped columns are noticed where a longitude is no latitude; near the Greenwich meridian and
    the equator the values do not show it.

    Raises:
        InputDataError: They are not.
    """
    longitude, latitude = _check_columns(X, position, "longitude and latitude")
    if _fits(longitude, latitude):
        return
    ranges = (
        f"{float(longitude.min()):.6g} to {float(longitude.max()):.6g} and "
        f"{float(latitude.min()):.6g} to {float(latitude.max()):.6g}"
    )
    if _fits(latitude, longitude):
        advice = f"They are swapped: pass position={position[::-1]}."
    elif float(torch.maximum(longitude.abs().max(), latitude.abs().max())) > 1000.0:
        advice = "These look like metres of a map projection: pass units='metres'."
    else:
        advice = "Correct those rows."
    raise InputDataError(
        "Expected longitudes from -180 to 360 and latitudes from -90 to 90 degrees in columns "
        f"{position}, got {ranges}. {advice}"
    )


def _fits(longitude: Tensor, latitude: Tensor) -> bool:
    """Return whether values can be longitudes and latitudes."""
    inside = (longitude >= -180.0) & (longitude <= 360.0) & (latitude.abs() <= 90.0)
    return bool(inside.all())


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
    root mean square distance of the sites from their middle, l_j median 4, the output scales s_0
    and the sum of the s_j each half the ``variance``. They are wide, of log standard deviation 1.

    Its parts have at most two inputs. WISKI's grids represent it, but for linear parts, with the
    product of two one-dimensional kernels over position, and a warning. On three surveys it called
    sites above a threshold about as well as one kernel over everything: better on one, slightly
    worse on another (``benchmarks/maps/map_kernels.py``).

    Args:
        sites: ``n x d``, all that are to be mapped, as for ``map_inputs``.
        position: Columns of longitude and latitude, or of east and north.
        linear: Columns that enter linearly, such as predictions of ``out_of_fold``.
        nu: Smoothness of the part over position: 0.5, 1.5 or 2.5.
        variance: Sum of the prior medians of the output scales; 1 for standardised outcomes.
        units: Units of positions: ``"degrees"``, or on a map projection ``"kilometres"`` or
            ``"metres"``.

    Raises:
        InputDataError: Positions are not in these units.
        ValueError: A column of ``linear`` is none of the covariates, or the units are unknown.
    """
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

    It is the sum of :func:`map_kernel` with an exponential part over position (``nu`` of one half)
    and a variance of 2, about the variance of logits between villages; and of ``s [p = p']``, a
    site's own effect, with s of prior median 0.05 and log standard deviation 1: a nugget, which all
    surveys of a site share. Without it a survey of counts makes the other parts too rough.

    Args:
        sites: ``n x d``, all that are to be mapped, as for ``map_inputs``.
        position: Columns of longitude and latitude, or of east and north.
        units: Units of positions: ``"degrees"``, or on a map projection ``"kilometres"`` or
            ``"metres"``.

    Raises:
        InputDataError: Positions are not in these units.
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
        same = [
            (a - b).abs() <= _ONE_PLACE for a, b in zip(x1.unbind(-1), x2.unbind(-1), strict=True)
        ]
        return torch.stack(same).all(0).to(x1)


def _part(nu: float, columns: tuple[int, ...], length: float, variance: float) -> ScaleKernel:
    """Make a Matérn part with prior medians of its length scale and its output scale."""
    matern = MaternKernel(
        nu,
        active_dims=columns,
        lengthscale_prior=LogNormalPrior(math.log(length), 1.0),
        lengthscale_constraint=_above(_SHORTEST * length, length),
    )
    return _scaled(matern, variance)


def _scaled(kernel: Kernel, variance: float) -> ScaleKernel:
    """Multiply a kernel by an output scale with a prior median."""
    prior = LogNormalPrior(math.log(variance), 1.0)
    return ScaleKernel(
        kernel,
        outputscale_prior=prior,
        outputscale_constraint=_above(_SHORTEST * variance, variance),
    )


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
    labels = rows % folds if isinstance(folds, int) else np.asarray(folds)
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
