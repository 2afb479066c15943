"""Kernels of maps: sums of one part over position and one over each covariate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import AdditiveKernel, Kernel, LinearKernel, MaternKernel, ScaleKernel
from gpytorch.priors import LogNormalPrior
from torch import Tensor

from bo_stream.mapping.positions import Units, kilometres

POSITION_SHARE = 0.3
"""Prior median of the length scale of position, of the sites' root mean square radius."""

COVARIATE_LENGTH = 4.0
"""Prior median of the length scale of a covariate, in its standard deviations."""

ONE_PLACE = 1e-6
"""Largest difference of two coordinates of one place, in kilometres."""

SITE_VARIANCE = 0.05
"""Prior median of the variance of what a site has for itself."""

SHORTEST = 1e-3
"""Least length scale and least output scale, of their prior medians."""


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
    product of two one-dimensional kernels over position, and say so. On three surveys it called
    sites above a threshold about as well as one kernel over everything: better on one, slightly
    worse on another (``benchmarks/maps/map_kernels.py``).

    Args:
        sites: ``n x d``, all that are to be mapped, as for ``map_inputs``.
        position: Columns of longitude and latitude, or of east and north.
        linear: Columns that enter linearly, such as predictions of ``out_of_fold``.
        nu: Smoothness of the part over position: 0.5, 1.5 or 2.5.
        variance: Sum of the prior medians of the output scales; 1 for standardised outcomes.
        units: Of positions: ``"degrees"``, or ``"kilometres"`` or ``"metres"`` on a map projection.

    Raises:
        InputDataError: Positions are not in these units.
        ValueError: A column of ``linear`` is none of the covariates, or the units are unknown.
    """
    covariates = [column for column in range(sites.shape[-1]) if column not in position]
    if not set(linear) <= set(covariates):
        raise ValueError(f"Expected linear among the covariates {covariates}, got {list(linear)}.")
    places = kilometres(sites, position, units).transform(sites)[..., list(position)].flatten(0, -2)
    radius = float((places - places.mean(0)).square().sum(-1).mean().sqrt())
    smooth = [column for column in covariates if column not in linear]
    half = 0.5 * variance
    parts: list[Kernel] = [_part(nu, position, POSITION_SHARE * (radius or 1.0), half)]
    parts += [_part(2.5, (column,), COVARIATE_LENGTH, half / len(smooth)) for column in smooth]
    parts += [_line(column) for column in linear]
    return AdditiveKernel(*parts).to(sites)


def survey_kernel(
    sites: Tensor, position: tuple[int, int] = (0, 1), units: Units = "degrees"
) -> AdditiveKernel:
    """Make the kernel of logits of prevalence, for inputs transformed by ``map_inputs``.

    That of :func:`map_kernel` with an exponential part over position (``nu`` of one half) and a
    variance of 2, the square of about the standard deviation of logits between villages; and
    ``+ s [p = p']``, what a site has for itself, with s of prior median 0.05 and log standard
    deviation 1: a nugget, which all surveys of a site share. Without it a survey of counts makes
    the other parts too rough.

    Args:
        sites: ``n x d``, all that are to be mapped, as for ``map_inputs``.
        position: Columns of longitude and latitude, or of east and north.
        units: Of positions: ``"degrees"``, or ``"kilometres"`` or ``"metres"`` on a map projection.

    Raises:
        InputDataError: Positions are not in these units.
        ValueError: The units are none of these.
    """
    shared = map_kernel(sites, position, nu=0.5, variance=2.0, units=units).kernels
    own = _scaled(SiteKernel(active_dims=position), SITE_VARIANCE)
    return AdditiveKernel(*shared, own).to(sites)


class SiteKernel(Kernel):
    """Kernel that is 1 between inputs at one place, within a millimetre, and 0 between others.

    Coordinates are compared one by one: a distance from the difference of squares, as a short
    length scale would need it, has errors of metres across a country.
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
            (a - b).abs() <= ONE_PLACE for a, b in zip(x1.unbind(-1), x2.unbind(-1), strict=True)
        ]
        return torch.stack(same).all(0).to(x1)


def _part(nu: float, columns: tuple[int, ...], length: float, variance: float) -> ScaleKernel:
    matern = MaternKernel(
        nu,
        active_dims=columns,
        lengthscale_prior=LogNormalPrior(math.log(length), 1.0),
        lengthscale_constraint=_above(SHORTEST * length, length),
    )
    return _scaled(matern, variance)


def _line(column: int) -> ScaleKernel:
    linear = LinearKernel(active_dims=(column,))
    linear.variance = 1.0
    linear.raw_variance.requires_grad_(False)  # the output scale is v_j
    return _scaled(linear, 1.0)


def _scaled(kernel: Kernel, variance: float) -> ScaleKernel:
    prior = LogNormalPrior(math.log(variance), 1.0)
    return ScaleKernel(
        kernel,
        outputscale_prior=prior,
        outputscale_constraint=_above(SHORTEST * variance, variance),
    )


def _above(least: float, start: float) -> GreaterThan:
    """Constrain a parameter, which an optimiser sees as a logarithm: kilometres or shares alike."""
    return GreaterThan(least, transform=torch.exp, inv_transform=torch.log, initial_value=start)
