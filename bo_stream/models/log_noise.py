"""The grid model of a log noise variance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.priors import GammaPrior
from torch import Tensor

from bo_stream.models.grid_gp import GridGP

TOLERANCE = 1e-6
"""Part of the kernel's trace left out: little, where the log squares have a variance of five."""


def noise_kernel(dim: int, batch_shape: torch.Size) -> Kernel:
    """The default kernel: a smooth log variance that varies by a factor of e, or less.

    Its prior has a scale of 1 as mode and density near 0, for noise that is the same everywhere.
    """
    kernel = ScaleKernel(
        get_covar_module_with_dim_scaled_prior(dim, batch_shape=batch_shape),
        batch_shape=batch_shape,
        outputscale_prior=GammaPrior(2.0, 1.0),
    )
    kernel.outputscale = torch.ones(batch_shape)
    return kernel


def noise_gp(
    X: Tensor,
    log_squares: Tensor,
    variances: Tensor,
    kernel: Kernel,
    bounds: Tensor,
    grid_size: int | Sequence[int] | None,
) -> GridGP:
    """A grid model of measured log variances, each of known noise.

    Args:
        X: Transformed inputs, ``batch x n x d``.
        log_squares: ``batch x n x m``.
        variances: Of their noise, shaped alike.
        kernel: Of the log variance.
        bounds: The box of X, ``2 x d``.
        grid_size: As for the models.
    """
    return GridGP(
        X,
        log_squares,
        variances,
        covar_module=kernel,
        outcome_transform=None,
        bounds=bounds,
        grid_size=grid_size,
        tolerance=TOLERANCE,
    )


def centre(model: GridGP, mean: Tensor) -> None:
    """Set the prior mean of a log noise variance, ``batch x m``."""
    model.mean_module.initialize(constant=model._from_per_output(mean).to(model._dtype))
