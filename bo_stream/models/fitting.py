"""Fits of hyperparameters: a model's hook, from several starts, and in a run that must go on."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from botorch.exceptions.errors import ModelFittingError
from botorch.exceptions.warnings import OptimizationWarning
from botorch.fit import fit_gpytorch_mll
from botorch.optim.closures import (
    get_loss_closure_with_grads,
)
from botorch.optim.core import OptimizationResult, OptimizationStatus
from botorch.optim.fit import fit_gpytorch_mll_scipy
from gpytorch.kernels import Kernel
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream.models.lbfgs import are_apart, fit_elements, fit_to_stall

if TYPE_CHECKING:
    from bo_stream.models.base import StreamingGP

M = TypeVar("M", bound="StreamingGP")

Hyperparameters = Mapping[str, Tensor]
"""Values of a model's parameters by name."""

_FIT_OPTIONS = {"maxiter": 25, "ftol": 1e-7}
"""L-BFGS-B's; a refit starts from the last one's optimum and need not be exact."""


def relearn(model: StreamingGP) -> None:
    """Learn hyperparameters; where that fails, those from before serve on: a run must not end.

    A failure is in the model's ``numerical_log``, and a warning.

    Args:
        model: Its hyperparameters are where the fit begins (see :func:`fit_from_both`), and are
            replaced in place.
    """
    former = hyperparameters(model)
    try:
        learn_hyperparameters(model)
    except ModelFittingError as error:
        model.train()
        set_hyperparameters(model, former)
        model.eval()  # inducing points move to where these want them
        model.log_event("a refit that failed")
        warnings.warn(
            f"The hyperparameters could not be relearned and stay as they were: {error}",
            RuntimeWarning,
            stacklevel=2,
        )


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
    """Copy a model's parameters as they are now."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def learned_values(model: StreamingGP) -> Hyperparameters:
    """Copy those that a refit learns."""
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
def total_loss(model: StreamingGP) -> float:
    """Return what a fit minimises, in nats of all observations, summed over elements.

    That is the negative log marginal likelihood, or its evidence lower bound, and the negative log
    densities of the priors, in transformed units. Cost as a refit's step.
    """
    each = model.compute_custom_loss(_marginal_likelihood(model))
    return float((each * model._from_per_output(model._counts()).clamp_min(1.0)).sum())


def fit_apart(
    mll: MarginalLogLikelihood, optimizer: Callable[..., Any] | None = None, **kwargs: Any
) -> MarginalLogLikelihood:
    """Call ``fit_gpytorch_mll`` with an optimizer for the batch elements of a model.

    The optimizer is :func:`fit_elements`, or for a single element :func:`fit_to_stall`, unless the
    caller gives one, a closure or a data loader. A refit begins at the values that the model was
    built with, too, and a first fit that explains much by noise at shorter lengthscales: see
    :func:`fit_from_both`. The model's ``custom_fit``, which calls this
    function, must be hidden meanwhile.
    """
    given = kwargs.get("closure") is not None or kwargs.get("data_loader") is not None
    if optimizer in (None, fit_gpytorch_mll_scipy) and not given:
        several = mll.model._parameter_shape.numel() > 1
        optimizer = fit_elements if several else fit_to_stall
        start = first_start(mll.model)
        if start is not None:
            optimizer = partial(fit_from_both, optimizer, start)
    return fit_gpytorch_mll(mll, optimizer=optimizer, **kwargs)


FEW_PER_INPUT = 50
"""Most observations per input at which every refit begins at the model's first values, too."""

RACE = 4
"""Iterations of L-BFGS-B from each of two starts, after which the better one goes on."""

SETTLED = 1e-2
"""Largest gradient near an optimum, in nats an observation and per change of a parameter, or of its
logarithm where that is larger."""

MUCH_NOISE = 0.05
"""Variance of the noise over the process's above which a first fit is done again from others."""

SHORTER = 0.3
"""Its lengthscales then, in the first ones: a function that oscillates is noise to longer ones."""


def first_start(model: StreamingGP) -> Hyperparameters | None:
    """Return the kernel and mean that a model was built with, where a fit may begin there.

    The likelihood's values stay: what was learned of the noise is the better start, from which an
    optimizer takes fewer evaluations and finds more.

    Returns:
        The values; none where they are the present ones. None where the objective depends on more
        than hyperparameters and data (variational parameters, a network).
    """
    first, learned = model._first_values, learned_values(model)
    gaussian = isinstance(model.likelihood, _GaussianLikelihoodBase)
    if not (gaussian and model._inference.restarts and learned.keys() <= first.keys()):
        return None
    start = {
        name: first[name].to(value)
        for name, value in learned.items()
        if not name.startswith("likelihood.")
    }
    if any(value.shape != learned[name].shape for name, value in start.items()):
        return None
    same = all(torch.equal(value, learned[name]) for name, value in start.items())
    return {} if same else start


@torch.no_grad()
def shorter_start(model: StreamingGP, first: Hyperparameters) -> Hyperparameters:
    """Return the first values with ``SHORTER`` lengthscales, where a first fit missed these.

    None where the kernel has no lengthscales or the noise is not learned; and where for no element
    the learned noise is ``MUCH_NOISE`` while all lengthscales are longer than these.

    Args:
        model: With the values that the fit learned.
        first: The values from which it began.
    """
    parts = {
        f"{name}.raw_lengthscale": part
        for name, part in model.named_modules()
        if f"{name}.raw_lengthscale" in first and isinstance(part, Kernel)
    }
    if not parts or not any(name.startswith("likelihood.noise_covar.") for name in first):
        return {}
    at = torch.zeros(1, model._process_dim).to(next(iter(first.values())))
    prior = model.covar_module(at, diag=True)[..., 0]
    missed = model.likelihood.noise[..., 0] > MUCH_NOISE * prior
    start = dict(first)
    for name, part in parts.items():
        limits = part.raw_lengthscale_constraint
        shorter = SHORTER * limits.transform(first[name])
        missed = missed & (part.lengthscale > shorter).flatten(-2).all(-1)
        shorter = torch.maximum(shorter, limits.lower_bound.to(shorter))
        start[name] = limits.inverse_transform(shorter)
    return start if bool(missed.any()) else {}


def fit_from_both(
    fit: Callable[..., OptimizationResult],
    start: Hyperparameters,
    mll: MarginalLogLikelihood,
    options: Mapping[str, Any] | None = None,
    timeout_sec: float | None = None,
    **kwargs: Any,
) -> OptimizationResult:
    """Fit from the present values and from another start, of which the better counts.

    What was learned from few observations, or from outcomes that were all equal, is a poor start:
    the likelihood has several maxima, and the nearest one may be much the worse. ``RACE``
    iterations from each tell which is better, for each element apart where these share no
    hyperparameter. With more than ``FEW_PER_INPUT`` observations an input the other start is tried
    only where the objective is larger there than at the present values, and where no element is
    apart, only if these are not ``SETTLED``. Cost of ``RACE`` iterations beyond those of a fit.

    A first fit begins at the present values. If it explains much by noise and has not met shorter
    lengthscales, it is done again from these, at the cost of another fit.

    Args:
        fit: ``fit_gpytorch_mll_scipy`` or :func:`fit_elements`, called with the other arguments.
        start: The other values; parameters that are not among them begin where the race from the
            present values ends. None of them: it is a first fit.
        mll: Of a model in training mode.
        options: Of L-BFGS-B; its most iterations are those of the race and the rest together, or of
            each of two first fits.
        timeout_sec: Seconds for all.
        kwargs: Further arguments of ``fit``.

    Raises:
        NotPSDError: Neither start leads anywhere.
    """
    model, present = mll.model, learned_values(mll.model)
    shape = model._parameter_shape
    apart = shape.numel() > 1 and are_apart(mll, shape)
    fits = _Fits(fit, mll, dict(options or {}), timeout_sec, kwargs, apart, time.monotonic())
    if not start:
        best = fits.first(present)
    elif float(model._counts().max()) <= FEW_PER_INPUT * model._process_dim:
        best = fits.raced(present, start)
    elif apart:
        tried = bool((fits.losses(start) < fits.losses(present)).any())
        best = fits.raced(present, start) if tried else fits.end(present)
    else:
        best = fits.settled(present, start)
    if best is None:
        raise NotPSDError("The covariance is not positive definite from where the fit begins.")
    set_hyperparameters(model, best.values)
    for warning in best.warnings:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return best.result


@dataclass(frozen=True)
class _End:
    """Where a fit ended.

    Attributes:
        result: Of the optimizer.
        values: Of what was learned.
        losses: Of elements, or one of all that share values.
        warnings: Given on the way.
    """

    result: OptimizationResult
    values: Hyperparameters
    losses: Tensor
    warnings: Sequence[warnings.WarningMessage]


@dataclass(frozen=True)
class _Fits:
    """Fits of one model from several starts.

    Attributes:
        fit: As in :func:`fit_from_both`, like those that follow.
        mll: Of the model.
        options: Of L-BFGS-B.
        timeout_sec: Seconds for all fits; None: no limit.
        kwargs: Further arguments of ``fit``.
        apart: Whether each element has a loss and an end of its own.
        begin: When the first fit began, by the monotonic clock.
    """

    fit: Callable[..., OptimizationResult]
    mll: MarginalLogLikelihood
    options: dict[str, Any]
    timeout_sec: float | None
    kwargs: Mapping[str, Any]
    apart: bool
    begin: float

    @torch.no_grad()
    def losses(self, values: Hyperparameters) -> Tensor:
        """Give the model some values, and evaluate what a fit minimises there."""
        set_hyperparameters(self.mll.model, values)
        loss: Tensor = self.mll.model.compute_custom_loss(self.mll)
        return (loss if self.apart else loss.sum()).nan_to_num(nan=math.inf)

    def end(self, values: Hyperparameters, **options: Any) -> _End | None:
        """Fit from some values; None where the covariance there is not positive definite."""
        limit = {} if self.timeout_sec is None else {"timeout_sec": max(self._left(), 0.0)}
        set_hyperparameters(self.mll.model, values)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", OptimizationWarning)
            try:
                given = {**self.options, **options}
                result = self.fit(self.mll, options=given, **limit, **self.kwargs)
            except NotPSDError:
                return None
        values = learned_values(self.mll.model)
        value = torch.tensor(float(result.fval), dtype=torch.float64).nan_to_num(nan=math.inf)
        return _End(result, values, self.losses(values) if self.apart else value, caught)

    def first(self, present: Hyperparameters) -> _End | None:
        """Fit from present values, and from shorter lengthscales where these were missed."""
        best = self.end(present)
        start = (
            {} if best is None or self._left() <= 0.0 else shorter_start(self.mll.model, present)
        )
        other = self.end(start) if start else None
        return best if best is None or other is None else _better(best, other)

    def settled(self, present: Hyperparameters, start: Hyperparameters) -> _End | None:
        """Fit from present values, and from others where these are better and the first unsettled.

        The first evaluation is that of the fit from the present values, too.
        """
        set_hyperparameters(self.mll.model, present)
        learned = {name: p for name, p in self.mll.named_parameters() if p.requires_grad}
        evaluate = get_loss_closure_with_grads(self.mll, learned)
        try:
            loss, gradients = evaluate()
        except NotPSDError:
            return self.raced(present, start)
        first = loss.detach(), [None if g is None else g.clone() for g in gradients]
        pairs = zip(first[1], learned.values(), strict=True)
        slopes = [
            (g * p.detach().abs().clamp_max(1.0)).abs().max() for g, p in pairs if g is not None
        ]
        steepest = float(torch.stack(slopes).max())
        if not steepest <= SETTLED and bool(self.losses(start) < first[0]):
            return self.raced(present, start)
        known = [first]

        def closure(**kwargs: Any) -> tuple[Tensor, Sequence[Tensor | None]]:
            return known.pop() if known else evaluate(**kwargs)

        return replace(self, kwargs={**self.kwargs, "closure": closure}).end(present)

    def raced(self, present: Hyperparameters, start: Hyperparameters) -> _End | None:
        """Fit from the better of two starts; None where neither leads anywhere."""
        most = self.options.get("maxiter")
        race = RACE if most is None else min(RACE, most)
        best = self.end(present, maxiter=race)
        if self._left() > 0.0:
            set_hyperparameters(self.mll.model, present if best is None else best.values)
            other = self.end(start, maxiter=race)
            best = other if best is None else best if other is None else _better(best, other)
        done = best is None or best.result.status == OptimizationStatus.SUCCESS
        if best is None or done or race == most or self._left() <= 0.0:
            return best
        rest = self.end(best.values, **({} if most is None else {"maxiter": most - race}))
        stalled = rest is not None and rest.result.status == OptimizationStatus.FAILURE
        if rest is None or (stalled and best.result.step > 0):
            return replace(best, warnings=())
        return rest

    def _left(self) -> float:
        """Return how many seconds are left."""
        limit = math.inf if self.timeout_sec is None else self.timeout_sec
        return limit - (time.monotonic() - self.begin)


def _better(known: _End, other: _End) -> _End:
    """Choose the end of the least loss, of each element for itself."""
    wins = other.losses < known.losses
    if not bool(wins.any()):
        return known
    if bool(wins.all()):
        return other

    def chosen(value: Tensor, former: Tensor) -> Tensor:
        return torch.where(
            wins.reshape(wins.shape + (1,) * (value.ndim - wins.ndim)), value, former
        )

    values = {name: chosen(value, known.values[name]) for name, value in other.values.items()}
    losses = torch.where(wins, other.losses, known.losses)
    done = all(end.result.status == OptimizationStatus.SUCCESS for end in (known, other))
    status = OptimizationStatus.SUCCESS if done else OptimizationStatus.STOPPED
    result = replace(other.result, status=status, fval=float(losses.sum()))
    return _End(result, values, losses, other.warnings)
