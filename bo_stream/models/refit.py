"""Learning hyperparameters from the memory, where a run must not end if that fails."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from botorch.exceptions.errors import ModelFittingError
from botorch.exceptions.warnings import OptimizationWarning
from botorch.fit import fit_gpytorch_mll
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from torch import Tensor

from bo_stream.models.base import StreamingGP

Hyperparameters = Mapping[str, Tensor]
"""Values of a model's parameters by name."""

_FIT_OPTIONS = {"maxiter": 25, "ftol": 1e-7}
"""L-BFGS-B's; a refit starts from the last one's optimum and need not be exact."""


def relearn(model: StreamingGP, starts: Sequence[Hyperparameters] = ()) -> None:
    """Learn hyperparameters; where that fails, those from before serve on: a run must not end.

    With few observations the likelihood has several maxima, and the one nearest to what was
    learned from fewer still may be much the worse: further starts help. A failure is in the
    model's ``numerical_log``, and, where no start leads anywhere, a warning.

    Args:
        model: Its hyperparameters are the first start, and are replaced in place.
        starts: Further ones, tried after it; of all maxima found the largest is kept.
    """
    former = hyperparameters(model)
    ends: list[Hyperparameters] = []
    failure: ModelFittingError | None = None
    for start in (former, *starts):
        set_hyperparameters(model, start)
        try:
            learn_hyperparameters(model)
            ends.append(hyperparameters(model))
        except ModelFittingError as error:
            failure = error
    if failure is not None:
        model.log_event("a refit that failed")
    if not ends:
        warnings.warn(
            f"The hyperparameters could not be relearned and stay as they were: {failure}",
            RuntimeWarning,
            stacklevel=2,
        )
    _settle(model, _best(ends, model) if ends else former)


def _settle(model: StreamingGP, values: Hyperparameters) -> None:
    """End a refit with some hyperparameters: inducing points move to where these want them."""
    model.train()
    set_hyperparameters(model, values)
    model.eval()


def _best(ends: Sequence[Hyperparameters], model: StreamingGP) -> Hyperparameters:
    if len(ends) == 1:
        return ends[0]
    return min(ends, key=partial(_loss_at, model))


def learn_hyperparameters(model: StreamingGP) -> None:
    """Maximise the marginal likelihood from the model's memory, starting where it stands.

    A line search that stalls near the optimum counts as its end: L-BFGS-B never leaves a point for
    a worse one.
    """
    fit_gpytorch_mll(
        _marginal_likelihood(model),
        optimizer_kwargs={"options": _FIT_OPTIONS},
        max_attempts=1,
        warning_handler=lambda warning: issubclass(warning.category, OptimizationWarning),
    )


def hyperparameters(model: StreamingGP) -> Hyperparameters:
    """Copies of a model's parameters as they are now."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def learned_values(model: StreamingGP) -> Hyperparameters:
    """Copies of those that a refit learns."""
    parameters = model.named_parameters()
    return {name: p.detach().clone() for name, p in parameters if p.requires_grad}


@torch.no_grad()
def set_hyperparameters(model: StreamingGP, values: Hyperparameters) -> None:
    """Give a model's parameters other values, in place; those not named stay."""
    parameters = dict(model.named_parameters())
    for name, value in values.items():
        parameters[name].copy_(value)


def _marginal_likelihood(model: StreamingGP) -> MarginalLogLikelihood:
    gaussian = isinstance(model.likelihood, _GaussianLikelihoodBase)
    kind = ExactMarginalLogLikelihood if gaussian else MarginalLogLikelihood
    return kind(model.likelihood, model)


@torch.no_grad()
def _loss_at(model: StreamingGP, values: Hyperparameters) -> float:
    set_hyperparameters(model, values)
    model.train()
    loss = model.compute_custom_loss(_marginal_likelihood(model))
    model.eval()
    return float(loss.sum())
