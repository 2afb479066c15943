"""Where hyperparameters begin: those of an exact Gaussian process on some of the data."""

from __future__ import annotations

import warnings
from copy import deepcopy

import torch
from botorch.exceptions.warnings import BotorchWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim.closures import get_loss_closure_with_grads
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, LaplaceLikelihood, Likelihood
from gpytorch.means import Mean
from gpytorch.mlls import ExactMarginalLogLikelihood

from bo_stream.models.replay import Batch


def learn_first_hyperparameters(
    kernel: Kernel, mean: Mean, likelihood: Likelihood, rows: Batch, maxiter: int | None = None
) -> None:
    """Set kernel, mean and the noise of real outcomes by maximum marginal likelihood.

    Outcomes of other likelihoods, labels or counts, are taken for real ones: what is learned of
    lengthscales serves to begin with. Cost O(n³) a step of L-BFGS. [Evans2020, section I.1]

    Args:
        kernel: Set in place, and so are the others.
        mean: Its prior mean; set where outcomes are real.
        likelihood: Of the outcomes.
        rows: Transformed inputs ``... x n x d`` and outcomes ``... x n x m``.
        maxiter: Most steps of L-BFGS; None: until it converges.
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
        _fit(exact, maxiter)
    with torch.no_grad():
        kernel.load_state_dict(exact.covar_module.state_dict())
        if isinstance(likelihood, GaussianLikelihood | LaplaceLikelihood):
            mean.load_state_dict(exact.mean_module.state_dict())
            share = 1.0 if own else 0.5
            likelihood.noise = (share * exact.likelihood.noise).reshape(likelihood.noise.shape)


def _fit(model: SingleTaskGP, maxiter: int | None) -> None:
    """Each batch element and output for itself, where no hyperparameter is of several."""
    objective = ExactMarginalLogLikelihood(model.likelihood, model)
    learned = {name: p for name, p in objective.named_parameters() if p.requires_grad}
    batch = model.train_targets.shape[:-1]
    shared = any(p.shape[: len(batch)] != batch for p in learned.values())
    fit_gpytorch_mll(
        objective.train(),
        closure=get_loss_closure_with_grads(objective, learned) if shared else None,
        optimizer_kwargs={} if maxiter is None else {"options": {"maxiter": maxiter}},
    )
