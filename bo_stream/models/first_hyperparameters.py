"""Where hyperparameters begin: those of an exact Gaussian process on some of the data."""

from __future__ import annotations

import warnings
from copy import deepcopy

import torch
from botorch.exceptions.warnings import BotorchWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, LaplaceLikelihood, Likelihood
from gpytorch.means import Mean
from gpytorch.mlls import ExactMarginalLogLikelihood

from bo_stream.models.replay import Batch


def learn_first_hyperparameters(
    kernel: Kernel, mean: Mean, likelihood: Likelihood, rows: Batch
) -> None:
    """Set kernel, mean and the noise of real outcomes by maximum marginal likelihood.

    Outcomes of other likelihoods, labels or counts, are taken for real ones: what is learned of
    lengthscales serves to begin with. Cost O(n³) a step of L-BFGS. [Evans2020, section I.1]

    Args:
        kernel: Set in place, and so are the others.
        mean: Its prior mean; set where outcomes are real.
        likelihood: Of the outcomes.
        rows: Transformed inputs ``n x d`` and outcomes ``n x m``.
    """
    own = isinstance(likelihood, GaussianLikelihood)
    exact = SingleTaskGP(
        rows.X,
        rows.Y,
        likelihood=deepcopy(likelihood).double() if own else None,
        covar_module=deepcopy(kernel).double(),
        mean_module=deepcopy(mean).double(),
        outcome_transform=None,
    ).to(rows.X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BotorchWarning)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(exact.likelihood, exact))
    with torch.no_grad():
        kernel.load_state_dict(exact.covar_module.state_dict())
        if isinstance(likelihood, GaussianLikelihood | LaplaceLikelihood):
            mean.load_state_dict(exact.mean_module.state_dict())
            share = 1.0 if own else 0.5
            likelihood.noise = (share * exact.likelihood.noise).reshape(likelihood.noise.shape)
