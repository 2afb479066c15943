"""Kernels of maps: sums of a part over position and parts over covariates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import AdditiveKernel, Kernel, LinearKernel, MaternKernel, ScaleKernel
from gpytorch.priors import LogNormalPrior
from torch import Tensor

from bo_stream.mapping.positions import kilometres

POSITION_SHARE = 0.3
"""Prior median of the length scale of position, of the sites' root mean square radius."""

COVARIATE_LENGTH = 4.0
"""Prior median of the length scale of a covariate, in its standard deviations."""

SITE_KILOMETRES = 0.1
"""Length scale of what a site has for itself."""

SITE_VARIANCE = 0.05
"""Prior median of the variance of what a site has for itself."""

SHORTEST = 1e-3
"""Least length scale and least output scale, of their prior medians."""


def map_kernel(
    sites: Tensor,
    position: tuple[int, int] = (0, 1),
    linear: Sequence[int] = (),
    nu: float = 1.5,
) -> AdditiveKernel:
    """Make the kernel of a map, a ``covar_module`` for inputs transformed by ``map_inputs``.

    ``k(x, x') = s_0 Matern_nu(|p - p'| / l_0) + Σ_j s_j Matern_5/2(|x_j - x_j'| / l_j)`` with p the
    position in kilometres and x_j the covariate j, standardised; over the columns in ``linear``
    ``+ v_j x_j x_j'`` instead. Priors are log-normal: the length scale l_0 has median 0.3 of the
    root mean square distance of the sites from their middle, l_j median 4, the output scales s_0
    and the sum of the s_j median one half. They are wide, of log standard deviation 1.

    Its parts have at most two inputs, so that WISKI's grids represent it, but for linear parts. On
    three surveys it called sites above a threshold about as well as one kernel over everything:
    better on one, slightly worse on another (``benchmarks/map_kernels.py``).

    Args:
        sites: ``n x d``, all that are to be mapped, in degrees, as for ``map_inputs``.
        position: Columns of longitude and latitude.
        linear: Columns that enter linearly, such as predictions of ``out_of_fold``.
        nu: Smoothness of the part over position: 0.5, 1.5 or 2.5.

    Raises:
        InputDataError: Positions are not in degrees.
        ValueError: A column of ``linear`` is none of the covariates.
    """
    covariates = [column for column in range(sites.shape[-1]) if column not in position]
    if not set(linear) <= set(covariates):
        raise ValueError(f"Expected linear among the covariates {covariates}, got {list(linear)}.")
    smooth = [column for column in covariates if column not in linear]
    parts: list[Kernel] = [_over_position(sites, position, nu, 0.5)]
    parts += [_part(2.5, (column,), COVARIATE_LENGTH, 0.5 / len(smooth)) for column in smooth]
    parts += [_line(column) for column in linear]
    return AdditiveKernel(*parts).to(sites)


def survey_kernel(sites: Tensor, position: tuple[int, int] = (0, 1)) -> AdditiveKernel:
    """Make the kernel of logits of prevalence for inputs transformed by ``map_inputs``.

    ``k(x, x') = s_0 Matern_3/2(|p - p'| / l_0) + s_1 Matern_5/2(|(x - x') / l|) +
    s_2 exp(-|p - p'| / 0.1 km)`` with p the position in kilometres and x the covariates,
    standardised, of which each has its own length scale. The last part is what a site has for
    itself, a nugget: of sites farther apart than a few hundred metres it is independent. Without it
    a few examined at each site make the other parts rough.

    Priors are log-normal, of log standard deviation 1: the length scale l_0 has median 0.3 of the
    root mean square distance of the sites from their middle, those of covariates median 4, s_0 and
    s_1 median 1, s_2 median 0.05.

    Args:
        sites: ``n x d``, all that are to be mapped, in degrees, as for ``map_inputs``.
        position: Columns of longitude and latitude.

    Raises:
        InputDataError: Positions are not in degrees.
    """
    covariates = tuple(column for column in range(sites.shape[-1]) if column not in position)
    parts: list[Kernel] = [_over_position(sites, position, 1.5, 1.0)]
    if covariates:
        parts.append(_part(2.5, covariates, COVARIATE_LENGTH, 1.0))
    own = MaternKernel(0.5, active_dims=position)
    own.lengthscale = SITE_KILOMETRES
    own.raw_lengthscale.requires_grad_(False)
    return AdditiveKernel(*parts, _scaled(own, SITE_VARIANCE)).to(sites)


def _over_position(
    sites: Tensor, position: tuple[int, int], nu: float, variance: float
) -> ScaleKernel:
    places = kilometres(sites, position).transform(sites)[..., list(position)].flatten(0, -2)
    radius = float((places - places.mean(0)).square().sum(-1).mean().sqrt())
    return _part(nu, position, POSITION_SHARE * (radius or 1.0), variance, alike=True)


def _part(
    nu: float, columns: tuple[int, ...], length: float, variance: float, alike: bool = False
) -> ScaleKernel:
    """Make a Matérn kernel with a length scale for each column, or one if these are alike."""
    matern = MaternKernel(
        nu,
        ard_num_dims=None if alike or len(columns) == 1 else len(columns),
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
