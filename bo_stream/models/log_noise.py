"""A grid model of a log noise variance, and what it is told."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.priors import GammaPrior
from torch import Tensor

from bo_stream.models.grid_choice import GridSize
from bo_stream.models.grid_gp import GridGP
from bo_stream.models.log_squares import expected_exponential, log_squares
from bo_stream.models.memory import Observations

TOLERANCE = 1e-6
"""Part of the kernel's trace left out: little, where the log squares have a variance of five."""


@dataclass(frozen=True)
class LearnedNoise:
    """Noise variances and the log squared residuals that teach them.

    Attributes:
        noise: In the units of the targets, ``batch x m x n``.
        log_squares: Measured log variances, ``batch x m x n``.
        variances: Of those measurements, ``batch x m x n``.
    """

    noise: Tensor
    log_squares: Tensor
    variances: Tensor


@dataclass(frozen=True)
class Entry:
    """What an update put into memory: with it the update can be undone.

    Attributes:
        observations: For the mean, with the noise variances that they entered with.
        log_squares: For the noise.
    """

    observations: Observations
    log_squares: Observations

    def negated(self) -> Self:
        """The same, to be taken out."""
        return replace(
            self,
            observations=replace(self.observations, sign=-1.0),
            log_squares=replace(self.log_squares, sign=-1.0),
        )


def observed(inputs: Tensor, targets: Tensor, noise: Tensor) -> Observations:
    """Observations of known noise, to be added.

    Args:
        inputs: ``batch x n x d``.
        targets: ``batch x m x n``.
        noise: Variances, ``batch x m x n``.
    """
    known = torch.ones_like(targets[..., :1, :], dtype=torch.bool)
    return Observations(inputs.to(torch.float64), targets, noise, known, 1.0)


@torch.no_grad()
def predicted_noise(
    model: GridGP, noise_model: GridGP, inputs: Tensor, targets: Tensor
) -> LearnedNoise:
    """Noise expected of observations before they enter, and what their residuals measure.

    Args:
        model: Of the mean.
        noise_model: Of the log noise variance.
        inputs: Transformed, ``batch x n x d``.
        targets: ``batch x m x n``.
    """
    noise = expected_exponential(*marginals(noise_model, inputs))
    mean, variance = marginals(model, inputs)
    return LearnedNoise(noise, *log_squares(targets - mean, variance, noise))


@torch.no_grad()
def marginals(model: GridGP, X: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior mean and variance of the targets at transformed inputs, ``batch x m x n`` each.

    In the units of the targets, before a standardisation. Cost O(n r²), some thousand rows at once.
    """
    inputs = X.to(torch.float64)
    mean, variance = model.process(inputs).marginals(inputs)
    offset, scale = (t.unsqueeze(-1) for t in model._outcomes.offset_and_scale(model._counts()))
    return offset + scale * mean, scale.square() * variance


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
    grid_size: GridSize | None,
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
