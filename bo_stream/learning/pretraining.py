"""A stem and the hyperparameters learned together from a first batch, as in the WISKI paper."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.exceptions.warnings import OptimizationWarning
from botorch.optim.core import OptimizationResult
from botorch.optim.fit import fit_gpytorch_mll_scipy
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from torch.nn import Parameter

from bo_stream.models.base import StreamingGP
from bo_stream.models.wiski.grid_gp import GridGP

LEAST_POINTS = 10
"""Fewest points to learn a stem from."""


def pretrain(
    model: GridGP,
    X: Tensor,
    Y: Tensor,
    Yvar: Tensor | None = None,
    maxiter: int = 200,
    report: Callable[[int, float], None] | None = None,
) -> OptimizationResult:
    """Learn the stem and all hyperparameters by the marginal likelihood of a batch, by L-BFGS-B.

    The stem is calibrated on the batch at every step (a batch norm, through which gradients flow).
    Afterwards the model's memory holds exactly this batch, projected by the learned stem. Cost
    O(n r² + r³) an iteration. Source: the WISKI paper, section 5.1; it takes 200 steps of Adam.

    Args:
        model: With a stem; its memory is cleared first.
        X: ``n x d``.
        Y: ``n x m``.
        Yvar: Known noise variances shaped as Y; NaN: unknown.
        maxiter: Most iterations.
        report: Called after each with its number and the loss: the negative log posterior of the
            hyperparameters, a point.

    Returns:
        BoTorch's, with the last loss in ``fval``.

    Raises:
        InputDataError: Fewer than ten points, the cases in which ``update`` raises one, or a stem
            that was led out of the grid's cube; nothing is changed then.
        UnsupportedError: The model has no stem, or is conditioned on hypothetical observations.
        ValueError: ``maxiter`` is less than one.
    """
    model._check_not_supposed("pretrain")
    model.standardized(X, Y, Yvar)  # raises what update would, before anything is dropped
    _check(model, X, maxiter)
    memory, reference, state = model._memory, model._reference, deepcopy(model.state_dict())
    try:
        return _fitted(model, X, Y, Yvar, maxiter, report)
    except BaseException:
        model.zero_grad()
        model.load_state_dict(state)
        model._reference = reference
        model._set_memory(memory)
        model.eval()
        raise


def _check(model: GridGP, X: Tensor, maxiter: int) -> None:
    if model._modules.get("stem") is None:
        raise UnsupportedError(
            "Expected a model with a stem to pretrain, got one without. Learn its hyperparameters "
            "by botorch.fit.fit_gpytorch_mll."
        )
    if X.shape[-2] < LEAST_POINTS:
        raise InputDataError(
            f"Expected at least {LEAST_POINTS} points to pretrain a stem on, got {X.shape[-2]}."
        )
    if maxiter < 1:
        raise ValueError(f"Expected maxiter of at least 1, got {maxiter}.")


def _fitted(
    model: GridGP,
    X: Tensor,
    Y: Tensor,
    Yvar: Tensor | None,
    maxiter: int,
    report: Callable[[int, float], None] | None,
) -> OptimizationResult:
    mll = ExactMarginalLogLikelihood(model.likelihood, model)

    def likelihood() -> Tensor:
        return model.batch_log_marginal_likelihood(X, Y, Yvar, recalibrate=True)

    model.clear().update(X, Y, Yvar).train()
    result = minimise(
        mll,
        learned_parameters(mll),
        lambda: -with_priors(mll, likelihood()) / X.shape[-2],
        maxiter,
        None if report is None else lambda _, found: report(found.step, found.fval),
    )
    model.zero_grad()
    with torch.no_grad():
        likelihood()  # calibrates the learned stem
    model.clear().update(X, Y, Yvar).eval()
    return result


def minimise(
    mll: ExactMarginalLogLikelihood,
    parameters: Mapping[str, Parameter],
    loss: Callable[[], Tensor],
    maxiter: int,
    callback: Callable[..., None] | None = None,
) -> OptimizationResult:
    """Minimise a loss by L-BFGS-B.

    Args:
        mll: The model's, whose constraints bound the parameters.
        parameters: Leaves to move, by name.
        loss: Computes a differentiable scalar of them.
        maxiter: Most iterations; reaching them is no failure.
        callback: As in BoTorch's ``fit_gpytorch_mll_scipy``.
    """

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
            parameters=dict(parameters),
            closure=loss_and_gradients,
            options={"maxiter": maxiter},
            callback=callback,
        )


def learned_parameters(mll: ExactMarginalLogLikelihood) -> dict[str, Parameter]:
    """Return all learnable parameters by name."""
    return {name: p for name, p in mll.named_parameters() if p.requires_grad}


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


@dataclass
class Kept:
    """An observation kept from a stream.

    Attributes:
        X: Input, ``d``.
        Y: Outcomes, ``m``.
        Yvar: Known noise variances, ``m``, or None.
        coordinates: Where it entered the grid, ``k``.
    """

    X: Tensor
    Y: Tensor
    Yvar: Tensor | None
    coordinates: Tensor


class Reservoir:
    """A uniform sample of a stream's observations. Source: Vitter (1985), algorithm R."""

    def __init__(self, size: int, seed: int) -> None:
        """Start empty.

        Args:
            size: Most observations to keep.
            seed: Seed of the choice.

        Raises:
            ValueError: The size is negative.
        """
        if size < 0:
            raise ValueError(f"Expected to keep at least 0 observations, got {size}.")
        self.size = size
        self.kept: list[Kept] = []
        self._seen = 0
        self._generator = torch.Generator().manual_seed(seed)

    def columns(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return X, ``n x d``, Y, ``n x m``, and noise variances, ``n x m``, NaN where unknown."""
        if not self.kept:
            raise InputDataError("Expected kept observations, got none: give keep a budget.")
        X, Y = torch.stack([k.X for k in self.kept]), torch.stack([k.Y for k in self.kept])
        if all(k.Yvar is None for k in self.kept):
            return X, Y, None
        unknown = torch.full_like(self.kept[0].Y, torch.nan)
        return X, Y, torch.stack([unknown if k.Yvar is None else k.Yvar for k in self.kept])

    def offer(self, observation: Kept) -> None:
        """Keep an observation, or not. Cost O(1)."""
        self._seen += 1
        if len(self.kept) < self.size:
            self.kept.append(observation)
            return
        place = int(torch.randint(self._seen, (), generator=self._generator))
        if place < self.size:
            self.kept[place] = observation
