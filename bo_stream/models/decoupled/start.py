"""Where a decoupled model's hyperparameters begin: the median trick, then an exact process."""

from __future__ import annotations

import warnings

import torch
from botorch.exceptions.errors import ModelFittingError
from botorch.exceptions.warnings import BotorchWarning
from gpytorch.kernels import ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean, Mean
from torch import Tensor

from bo_stream.models.hyperparameters import Hyperparameters
from bo_stream.models.memory import Observations
from bo_stream.models.stochastic.replay import Batch
from bo_stream.models.stochastic.start import Sizes, learn_first_hyperparameters, set_scales

_PAIRS = 1000
"""Inputs whose distances are looked at."""

_STEPS = 50
"""Of L-BFGS on the exact process: it need not converge."""


def input_scale(X: Tensor) -> Tensor:
    """Standard deviation of each input, ``d``; 1 where it does not vary or there is one row."""
    flat = X.reshape(-1, X.shape[-1])
    if len(flat) < 2:
        return X.new_ones(X.shape[-1])
    scale = flat.std(0)
    return torch.where(scale > 0.0, scale, torch.ones_like(scale))


def begin_hyperparameters(
    hyper: Hyperparameters, few: Observations, more: Observations, size: Sizes, total: int
) -> None:
    """Learn them by an exact process of few data; output scale and noise then for a sparse one.

    From the median trick alone steps find lengthscales slowly: the mean has to follow each move of
    theirs before the next one pays. Cost O(k³) for each of some steps on k data.

    Args:
        hyper: In float64; set in place.
        few: For the exact process.
        more: For the scales; of real outcomes only.
        size: Of the bases.
        total: Observations that the data stand for.
    """
    modules = (hyper.covar_module, hyper.mean_module, hyper.likelihood)
    try:
        learn_first_hyperparameters(*modules, Batch(few.X, few.targets.mT), _STEPS)
    except ModelFittingError as error:
        message = f"Lengthscales begin by the median trick: an exact GP failed: {error}"
        warnings.warn(message, BotorchWarning, stacklevel=2)
    set_scales(hyper, more, size, total)


@torch.no_grad()
def set_kernel(kernel: ScaleKernel, X: Tensor, Y: Tensor, gaussian: bool) -> None:
    """Lengthscales at the median distance, and the outcomes' variance as the output scale.

    [Cheng2017, C.2]

    Distances are in standard deviations of each input, where the paper has one unit for all.

    Args:
        kernel: Of a kernel with a lengthscale for each input.
        X: First inputs, ``... x n x d``.
        Y: Their outcomes, ``... x n x m``.
        gaussian: Whether the likelihood is; else outcomes say little of the process's scale.
    """
    if X.shape[-2] < 2:
        return
    scale = input_scale(X)
    points = (X / scale).reshape(-1, X.shape[-1])[:_PAIRS]
    median = torch.pdist(points).median()
    if float(median) > 0.0:
        base = kernel.base_kernel
        base.lengthscale = (median * scale).expand_as(base.lengthscale).to(base.lengthscale)
    if gaussian:
        kernel.outputscale = _of_outputs(Y.var(-2), kernel.outputscale).clamp_min(1e-6)


@torch.no_grad()
def set_outcomes(likelihood: Likelihood | None, mean: Mean | None, Y: Tensor) -> None:
    """Noise variance and constant mean of the first outcomes; None: not to be set."""
    if Y.shape[-2] < 2:
        return
    if isinstance(likelihood, GaussianLikelihood):
        level = likelihood.noise.squeeze(-1)
        likelihood.noise = _of_outputs(Y.var(-2), level).clamp_min(1e-4).unsqueeze(-1)
    if isinstance(mean, ConstantMean):
        mean.constant = _of_outputs(Y.mean(-2), mean.constant)


def _of_outputs(value: Tensor, like: Tensor) -> Tensor:
    """``batch_shape x m`` as a hyperparameter has it: without m if that is 1."""
    value = value.squeeze(-1) if value.shape[-1] == 1 else value
    return value.expand_as(like).to(like)
