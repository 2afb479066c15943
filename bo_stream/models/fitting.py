"""Fits of hyperparameters: a model's hook, from several starts, and in a run that must go on."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from botorch.exceptions.errors import ModelFittingError
from botorch.exceptions.warnings import OptimizationWarning
from botorch.fit import fit_gpytorch_mll
from botorch.optim.closures import get_loss_closure_with_grads
from botorch.optim.core import OptimizationResult, OptimizationStatus
from botorch.optim.fit import fit_gpytorch_mll_scipy
from botorch.optim.utils import get_parameters
from gpytorch.kernels import Kernel
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from bo_stream.models.lbfgs import SCIPYS_FTOL, Fitted, are_apart, fit_elements, fit_to_stall

if TYPE_CHECKING:
    from bo_stream.models.base import StreamingGP

Values = Mapping[str, Tensor]
"""Values of a model's parameters by name."""

LEAST_GAIN = 1e-3
"""Nats of all observations: an iteration that gains less ends a fit. Its hyperparameters are then
some hundredths of their posterior standard deviations from the optimum."""

FEW_STEPS = 2
"""Iterations up to which that is not believed of a first fit, which knows nothing of curvatures.
Its first step is as long as the gradient, so that on a plateau it gains little."""


@dataclass(frozen=True)
class LastFit:
    """Where a fit ended, for the refit that begins there.

    Attributes:
        values: Of what was learned.
        scales: As in :class:`Fitted`, by the names of the objective's parameters, if any are known.
        raced: Number of observations of the last fit that compared two starts; 0: none did.
        loss: Of an observation there; NaN: not known.
    """

    values: Values
    scales: Mapping[str, Tensor] | None
    raced: float
    loss: float = math.nan

    def is_at(self, values: Values) -> bool:
        """Say whether the fit ended at these values."""
        return values.keys() == self.values.keys() and all(
            torch.equal(value, self.values[name].to(value)) for name, value in values.items()
        )


_FIT_OPTIONS = {"maxiter": 25, "ftol": 1e-7}
"""Of L-BFGS-B in a run: a refit starts from the last one's optimum and need not be exact."""


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


@torch.inference_mode(False)
@torch.enable_grad()
def learn_hyperparameters(model: StreamingGP) -> None:
    """Maximise the marginal likelihood from the model's memory, starting where it stands.

    A line search that stalls near the optimum counts as its end: L-BFGS-B never leaves a point for
    a worse one.
    """
    least = max(_FIT_OPTIONS["ftol"], tolerance(model._counts()))
    fit_gpytorch_mll(
        _marginal_likelihood(model),
        optimizer_kwargs={"options": {**_FIT_OPTIONS, "ftol": least}},
        max_attempts=1,
        warning_handler=lambda warning: issubclass(warning.category, OptimizationWarning),
    )


def tolerance(counts: Tensor) -> float:
    """Return the decrease of the loss an observation, ``ftol``, that ``LEAST_GAIN`` amounts to.

    Not less than SciPy's default.

    Args:
        counts: Numbers of observations, of which the largest decides.
    """
    return max(LEAST_GAIN / max(float(counts.max()), 1.0), SCIPYS_FTOL)


def hyperparameters(model: StreamingGP) -> Values:
    """Copy a model's parameters as they are now."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def learned_values(model: StreamingGP) -> Values:
    """Copy those that a refit learns."""
    learned = get_parameters(model, requires_grad=True)
    return {name: value.detach().clone() for name, value in learned.items()}


@torch.no_grad()
def set_hyperparameters(model: StreamingGP, values: Values) -> None:
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
    caller gives one, a closure or a data loader. A refit begins at a second start, too, and a first
    fit that explains much by noise again at shorter lengthscales: see :func:`fit_from_both`. The
    default of its option ``ftol`` is :func:`tolerance`. The model's ``custom_fit``, which calls
    this function, must be hidden meanwhile.
    """
    given = kwargs.get("closure") is not None or kwargs.get("data_loader") is not None
    if optimizer in (None, fit_gpytorch_mll_scipy) and not given:
        several = mll.model._parameter_shape.numel() > 1
        optimizer = fit_elements if several else fit_to_stall
        start = other_start(mll.model)
        own = kwargs.get("optimizer_kwargs") or {}
        if start is not None:
            doubts = {"ftol", "gtol"}.isdisjoint(own.get("options") or {})
            optimizer = partial(fit_from_both, optimizer, start, doubts=doubts)
        options = {"ftol": tolerance(mll.model._counts()), **(own.get("options") or {})}
        kwargs["optimizer_kwargs"] = {**own, "options": options}
        callback, steps = own.get("callback"), count(1)
        if callback is not None:  # of several searches, which would each begin at step 1
            kwargs["optimizer_kwargs"]["callback"] = lambda parameters, result: callback(
                parameters, replace(result, step=next(steps))
            )
    return fit_gpytorch_mll(mll, optimizer=optimizer, **kwargs)


FEW_PER_INPUT, AGAIN = 50, 1.1
"""Most observations per input at which refits begin at two starts, and how many times as many as at
the last such refit there must be."""

TWICE, SURPRISE = 2.0, 0.05
"""Beyond ``FEW_PER_INPUT``: how many times as many observations there must be before starts are
compared again, unless the loss of an observation has risen by so many nats since the last fit."""

RACE = 6
"""Iterations of L-BFGS-B from each of two starts, after which the better one goes on."""

SETTLED = 1e-2
"""Largest gradient near an optimum, in nats an observation and per change of a parameter, or of its
logarithm where that is larger."""

MUCH_NOISE, MORE_NOISE = 0.05, 0.3
"""Variances of the noise over the process's, above which values explain much by noise, and where a
fit begins that shall."""

SHORTER = 0.3
"""Lengthscales, in the first ones, at which a fit begins that shall explain little by noise."""


def other_start(model: StreamingGP) -> Values | None:
    """Return where a refit begins besides the present values: see :func:`other_kind`.

    Returns:
        The values; none where the present kernel and mean are those that the model was built with.
        None where the objective depends on more than hyperparameters and data (variational
        parameters, a network).
    """
    first, learned = model._first_values, learned_values(model)
    gaussian = isinstance(model.likelihood, _GaussianLikelihoodBase)
    if not (gaussian and model._inference.restarts and learned.keys() <= first.keys()):
        return None
    start = {name: first[name].to(value) for name, value in learned.items()}
    if any(value.shape != learned[name].shape for name, value in start.items()):
        return None
    kernel = [name for name in start if not name.startswith("likelihood.")]
    same = all(torch.equal(start[name], learned[name]) for name in kernel)
    return {} if same else other_kind(model, start)[0]


@torch.no_grad()
def other_kind(model: StreamingGP, first: Values) -> tuple[Values, bool]:
    """Return values near another kind of maximum than a model's present ones, of each element.

    Of few observations the likelihood has maxima of two kinds: what varies quickly is noise to long
    lengthscales, or the process's to short ones. Present values are of the first kind, smooth, if
    they explain much by noise and no lengthscale is short. Then these are the first ones with
    shorter lengthscales, and else the first kernel and mean, with much noise. Known noise stays.

    Args:
        model: With its present values.
        first: Of what it learns, the values from which it began.

    Returns:
        The values, and whether an element is smooth.
    """
    start = {name: value for name, value in first.items() if not name.startswith("likelihood.")}
    noise = "likelihood.noise_covar.raw_noise"
    if noise not in first:
        return start, False
    at = torch.zeros(1, model._process_dim).to(first[noise])
    variance, part = model.covar_module(at, diag=True)[..., :1], model.likelihood.noise_covar
    smooth = (part.noise > MUCH_NOISE * variance)[..., 0]
    shorter = {}
    for path, kernel in model.named_modules():
        name = f"{path}.raw_lengthscale"
        if isinstance(kernel, Kernel) and name in first:
            limits = kernel.raw_lengthscale_constraint
            short = SHORTER * limits.transform(first[name])
            smooth = smooth & (kernel.lengthscale > short).flatten(-2).all(-1)
            short = short.maximum(limits.lower_bound.to(short))
            shorter[name] = limits.inverse_transform(short)
    smooth = smooth & bool(shorter)
    more = part.noise.clamp_min(MORE_NOISE * variance.amax())
    more = part.raw_noise_constraint.inverse_transform(more)

    def chosen(value: Tensor, otherwise: Tensor) -> Tensor:
        own = otherwise.shape[: smooth.ndim] == smooth.shape  # and not shared by elements
        ones = (1,) * (otherwise.ndim - smooth.ndim)
        return torch.where(
            smooth.reshape(smooth.shape + ones) if own else smooth.any(), value, otherwise
        )

    for name, value in shorter.items():
        start[name] = chosen(value, start[name])
    start[noise] = chosen(first[noise], more)
    return start, bool(smooth.any())


def fit_from_both(
    fit: Callable[..., OptimizationResult],
    start: Values,
    mll: MarginalLogLikelihood,
    options: Mapping[str, Any] | None = None,
    timeout_sec: float | None = None,
    doubts: bool = False,
    **kwargs: Any,
) -> OptimizationResult:
    """Fit from the present values and from another start, of which the better counts.

    What was learned from few observations, or from outcomes that were all equal, is a poor start:
    the likelihood has several maxima, and the nearest one may be much the worse. ``RACE``
    iterations from each tell which is better, for each element apart where these share no
    hyperparameter. Cost of ``RACE`` iterations beyond those of a fit. With more than
    ``FEW_PER_INPUT`` observations an input, and from the end of such a fit until there are
    ``AGAIN`` times as many, the other start is tried only where the objective is larger there than
    at the present values, and where no element is apart, only if these are not ``SETTLED``. With
    more than ``FEW_PER_INPUT`` they are compared again only when there are ``TWICE`` as many, or
    the loss has risen by ``SURPRISE``.

    Where the last fit ended at the present values, its scales (:class:`Fitted`) serve this one.

    A first fit begins at the present values. If it ends smooth (:func:`other_kind`), it is done
    again from shorter lengthscales, at the cost of another fit. If ``doubts`` and it ends within
    ``FEW_STEPS``, it is done again with SciPy's ``ftol``.

    Args:
        fit: :func:`fit_to_stall` or :func:`fit_elements`, called with the other arguments.
        start: The other values; parameters that are not among them begin where the race from the
            present values ends. None of them: it is a first fit.
        mll: Of a model in training mode.
        options: Of L-BFGS-B; its most iterations are those of the race and the rest together, or of
            each of two first fits.
        timeout_sec: Seconds for all.
        doubts: Whether tolerances are the defaults.
        kwargs: Further arguments of ``fit``.

    Raises:
        NotPSDError: Neither start leads anywhere.
    """
    model, present = mll.model, learned_values(mll.model)
    shape = model._parameter_shape
    apart = shape.numel() > 1 and are_apart(mll, shape)
    fits = _Fits(fit, mll, dict(options or {}), timeout_sec, kwargs, apart, time.monotonic())
    last, n = model._last_fit, float(model._counts().max())
    if last is None or not last.is_at(present):
        last = LastFit(present, None, 0.0)
    scales, raced = last.scales, last.raced
    few, lately = n <= FEW_PER_INPUT * model._process_dim, raced <= n < AGAIN * raced
    if not start:
        best = fits.first(present, doubts)
    elif few and not lately:
        best, raced = fits.raced(present, start, scales), n
    elif apart:
        tried = bool((fits.losses(start) < fits.losses(present)).any())
        best = fits.raced(present, start) if tried else fits.end(present)
    else:
        expected = math.nan if few or n >= TWICE * raced else last.loss + SURPRISE
        best, compared = fits.settled(present, start, scales, expected)
        raced = n if compared and not few else raced
    if best is None:
        raise NotPSDError("The covariance is not positive definite from where the fit begins.")
    set_hyperparameters(model, best.values)
    loss = math.nan if apart else float(best.losses)
    model._last_fit = LastFit(best.values, best.scales, raced, loss)
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
    values: Values
    losses: Tensor
    warnings: Sequence[warnings.WarningMessage]

    @property
    def is_quick(self) -> bool:
        """Whether a tolerance ended it within ``FEW_STEPS``, of an element if these are apart."""
        fewest = self.result.fewest if isinstance(self.result, Fitted) else None
        steps = self.result.step if fewest is None else fewest
        return self.result.status == OptimizationStatus.SUCCESS and steps <= FEW_STEPS

    @property
    def scales(self) -> Mapping[str, Tensor] | None:
        """Scales there, if the fit found any."""
        return self.result.scales if isinstance(self.result, Fitted) else None


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
    def losses(self, values: Values) -> Tensor:
        """Give the model some values, and evaluate what a fit minimises there."""
        set_hyperparameters(self.mll.model, values)
        try:
            loss: Tensor = self.mll.model.compute_custom_loss(self.mll)
        except NanError:
            some = next(self.mll.model.parameters())
            loss = some.new_full(self.mll.model._parameter_shape, math.nan)
        return (loss if self.apart else loss.sum()).nan_to_num(nan=math.inf)

    def end(
        self, values: Values, scales: Mapping[str, Tensor] | None = None, **options: Any
    ) -> _End | None:
        """Fit from some values, with scales of the objective there if they are known.

        None where the covariance there is not positive definite.
        """
        given = {**self.kwargs, "options": {**self.options, **options}}
        if scales is not None:
            given["scales"] = scales
        if self.timeout_sec is not None:
            given["timeout_sec"] = max(self._left(), 0.0)
        set_hyperparameters(self.mll.model, values)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", OptimizationWarning)
            try:
                result = self.fit(self.mll, **given)
            except NotPSDError:
                return None
        values = learned_values(self.mll.model)
        value = torch.tensor(float(result.fval), dtype=torch.float64).nan_to_num(nan=math.inf)
        return _End(result, values, self.losses(values) if self.apart else value, caught)

    def first(self, present: Values, doubts: bool) -> _End | None:
        """Fit from present values, and from shorter lengthscales where these end smooth."""
        best = self.end(present)
        if doubts and best is not None and best.is_quick and self._left() > 0.0:
            again = self.end(present, ftol=SCIPYS_FTOL)
            best = best if again is None else _better(best, again)
        if best is None or self._left() <= 0.0:
            return best
        start, smooth = other_kind(self.mll.model, present)
        other = self.end(start) if smooth else None
        return best if other is None else _better(best, other)

    def settled(
        self,
        present: Values,
        start: Values,
        scales: Mapping[str, Tensor] | None,
        expected: float,
    ) -> tuple[_End | None, bool]:
        """Fit from present values, and from others where these are better and the first unsettled.

        The first evaluation is that of the fit from the present values, too. Where its loss is at
        most an ``expected`` one, the others are not evaluated.

        Returns:
            The end, and whether the two were compared.
        """
        set_hyperparameters(self.mll.model, present)
        learned = get_parameters(self.mll, requires_grad=True)
        evaluate = get_loss_closure_with_grads(self.mll, learned)
        try:
            loss, gradients = evaluate()
        except NotPSDError:
            return self.raced(present, start, scales), True
        first = loss.detach(), [None if g is None else g.clone() for g in gradients]
        pairs = zip(first[1], learned.values(), strict=True)
        slopes = [
            (g * p.detach().abs().clamp_max(1.0)).abs().max() for g, p in pairs if g is not None
        ]
        steepest = float(torch.stack(slopes).max())
        cache = self.mll.model._cache
        compared = not (steepest <= SETTLED or float(first[0]) <= expected)
        if compared and bool(self.losses(start) < first[0]):
            return self.raced(present, start, scales), True
        self.mll.model._cache = cache  # the fit goes on in the features of its first evaluation
        known = [first]

        def closure(**kwargs: Any) -> tuple[Tensor, Sequence[Tensor | None]]:
            return known.pop() if known else evaluate(**kwargs)

        go_on = replace(self, kwargs={**self.kwargs, "closure": closure})
        return go_on.end(present, scales), compared

    def raced(
        self,
        present: Values,
        start: Values,
        scales: Mapping[str, Tensor] | None = None,
    ) -> _End | None:
        """Fit from the better of two starts; None where neither leads anywhere."""
        most = self.options.get("maxiter")
        race = RACE if most is None else min(RACE, most)
        best = self.end(present, scales, maxiter=race)
        if self._left() > 0.0:
            set_hyperparameters(self.mll.model, present if best is None else best.values)
            other = self.end(start, maxiter=race)
            best = other if best is None else best if other is None else _better(best, other)
        done = best is None or best.result.status == OptimizationStatus.SUCCESS
        if best is None or done or race == most or self._left() <= 0.0:
            return best
        left = {} if most is None else {"maxiter": most - race}
        rest = self.end(best.values, best.scales, **left)
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
