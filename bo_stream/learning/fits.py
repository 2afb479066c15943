"""Fits of a model's parameters by L-BFGS-B, and the parameters that there are to learn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from botorch.exceptions.warnings import OptimizationWarning
from botorch.optim.core import OptimizationResult
from botorch.optim.fit import fit_gpytorch_mll_scipy
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from torch.nn import Parameter

from bo_stream.models.base import StreamingGP


def minimise(
    mll: ExactMarginalLogLikelihood,
    loss: Callable[[], Tensor],
    maxiter: int,
    others: Mapping[str, Parameter] | None = None,
    callback: Callable[..., None] | None = None,
) -> OptimizationResult:
    """Minimise a loss in a model's learnable parameters by L-BFGS-B.

    Args:
        mll: The model's, whose constraints bound the parameters.
        loss: Computes a differentiable scalar.
        maxiter: Most iterations; reaching them is no failure.
        others: Further leaves to move, by name.
        callback: As in BoTorch's ``fit_gpytorch_mll_scipy``.
    """
    learned = {name: p for name, p in mll.named_parameters() if p.requires_grad}
    parameters = {**learned, **(others or {})}

    def loss_and_gradients() -> tuple[Tensor, list[Tensor | None]]:
        for parameter in parameters.values():
            parameter.grad = None
        value = loss()
        value.backward()
        return value, [parameter.grad for parameter in parameters.values()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizationWarning)
        return fit_gpytorch_mll_scipy(
            mll,
            parameters=parameters,
            closure=loss_and_gradients,
            options={"maxiter": maxiter},
            callback=callback,
        )


def stem_parameters(model: StreamingGP) -> list[Parameter]:
    """Return the learnable parameters of the stem."""
    stem: Any = model._modules.get("stem")
    return [] if stem is None else [p for p in stem.parameters() if p.requires_grad]


def hyperparameters(model: StreamingGP) -> list[Parameter]:
    """Return the learnable parameters of kernel, mean and likelihood."""
    own = {id(p) for p in stem_parameters(model)}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in own]


def with_priors(mll: ExactMarginalLogLikelihood, log_likelihood: Tensor) -> Tensor:
    """Add the log priors of all hyperparameters to a log likelihood, summed over outputs.

    Args:
        mll: The model's, which knows the priors.
        log_likelihood: ``batch_shape (x m if m > 1)``.
    """
    total: Tensor = mll._add_other_terms(log_likelihood.clone(), []).sum()
    return total
