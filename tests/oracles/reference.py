"""The exact process that belongs to a model, and its posterior in the model's shapes."""

from __future__ import annotations

import math
from typing import Any

import torch
from botorch.models.model import Model
from botorch.models.transforms.outcome import ChainedOutcomeTransform, Standardize
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from tests.oracles.gaussian_process import DenseGP, in_order, standardization
from tests.oracles.interpolation import interpolated_kernel
from tests.oracles.kernels import DenseKernel


def reference(
    model: Model,
    X: Tensor,
    Y: Tensor,
    Yvar: Tensor | None = None,
    kernel: DenseKernel | None = None,
    rank: int | None = None,
) -> DenseGP:
    """The dense process, in transformed units, that a grid model with these data must equal.

    Hyperparameters, bounds and grid size are the model's (read from gpytorch's modules), the data
    are all given here. Differentiable in the hyperparameters. Inputs and outcomes are those after
    any transform but a standardisation.

    Args:
        model: A model with ``covar_module``, ``mean_module``, ``likelihood`` and a grid.
        X: ``... x n x d``.
        Y: ``... x n x m``.
        Yvar: Known noise variances; NaN or None where the likelihood's noise is meant.
        kernel: Instead of the interpolated kernel.
        rank: Keep the largest eigenvectors only.
    """
    X, Y = X.to(torch.float64), Y.to(torch.float64)
    m = Y.shape[-1]
    centre, scale = standardization(Y) if standardizes(model) else (0.0 * Y[..., :1, :], 1.0)
    y = in_order((Y - centre) / scale, m)
    noise = torch.full_like(Y, math.nan) if Yvar is None else Yvar.to(torch.float64)
    noise = in_order(noise / scale**2, m)
    if isinstance(model.likelihood, GaussianLikelihood):
        noise = torch.where(noise.isnan(), model.likelihood.noise.to(torch.float64), noise)
    if kernel is None:
        bounds = model.bounds.to(torch.float64)
        kernel = interpolated_kernel(model.covar_module, bounds, model.grid_size, rank)
    constant = getattr(model.mean_module, "constant", torch.zeros(()))
    return DenseGP(kernel, constant.to(torch.float64).unsqueeze(-1), lift(X, m), y, noise)


def standardizes(model: Model) -> bool:
    """Whether the model's outcome transform is, or ends in, a ``Standardize``."""
    transform = getattr(model, "outcome_transform", None)
    if isinstance(transform, ChainedOutcomeTransform):
        transform = list(transform.values())[-1]
    return isinstance(transform, Standardize)


def lift(X: Tensor, outputs: int) -> Tensor:
    """Inputs with a dimension for the outputs where there are several."""
    return X if outputs == 1 else X.unsqueeze(-3)


def reference_posterior(
    model: Model, X: Tensor, Y: Tensor, T: Tensor, Yvar: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Mean ``... x t x m``, covariance ``... x m x t x t`` of :func:`reference`, in Y's units."""
    m = Y.shape[-1]
    gp = reference(model, X, Y, Yvar, **kwargs)
    mean, covariance = gp.posterior(lift(T.to(torch.float64), m))
    mean = mean.unsqueeze(-1) if m == 1 else mean.mT
    covariance = covariance.unsqueeze(-3) if m == 1 else covariance
    if standardizes(model):
        centre, scale = standardization(Y.to(torch.float64))
        mean = centre + scale * mean
        covariance = scale.mT.unsqueeze(-1) ** 2 * covariance
    return mean, covariance
