"""How the exact peers learn: L-BFGS-B on the exact marginal likelihood, by autograd."""

from __future__ import annotations

import warnings

from botorch.exceptions.warnings import OptimizationWarning
from botorch.optim.fit import fit_gpytorch_mll_scipy
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor


def learn_exactly(model: ExactGP, maxiter: int) -> None:
    """Learn all of a model's parameters; summed over its batch elements."""
    model.train()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    parameters = {name: p for name, p in mll.named_parameters() if p.requires_grad}

    def loss_and_gradients() -> tuple[Tensor, list[Tensor | None]]:
        model.zero_grad()
        loss = -mll(model(*model.train_inputs), model.train_targets).sum()
        loss.backward()
        return loss, [parameter.grad for parameter in parameters.values()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizationWarning)
        fit_gpytorch_mll_scipy(
            mll,
            parameters=parameters,
            closure=loss_and_gradients,
            options={"maxiter": maxiter},
        )
