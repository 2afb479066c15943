"""L-BFGS-B in logarithms of positive hyperparameters: for all at once, or for each element."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from botorch.exceptions.warnings import OptimizationWarning
from botorch.optim import batched_lbfgs_b
from botorch.optim.closures import (
    BatchedNDarrayOptimizationClosure,
    NdarrayOptimizationClosure,
    get_loss_closure,
    get_loss_closure_with_grads,
)
from botorch.optim.core import OptimizationResult, OptimizationStatus
from botorch.optim.fit import fit_gpytorch_mll_scipy
from botorch.optim.utils import get_parameters, get_parameters_and_bounds
from botorch.optim.utils.numpy_utils import get_bounds_as_ndarray, get_per_element_bounds
from botorch.optim.utils.timeout import minimize_with_timeout
from gpytorch.kernels import Kernel
from gpytorch.likelihoods.noise_models import Noise
from gpytorch.means import Mean
from gpytorch.mlls import MarginalLogLikelihood
from linear_operator.utils.errors import NotPSDError
from numpy.typing import NDArray
from scipy.optimize import LbfgsInvHessProduct
from torch import Tensor

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class LogObjective:
    """An objective in the logarithms of those parameters that are positive.

    Lengthscales, variances and scales differ by factors, so that an objective is nearer to a
    quadratic one in their logarithms: L-BFGS-B takes a half to a third of the evaluations, and
    fewer of its first steps lead to bounds.

    Attributes:
        objective: Value and gradient by the parameters, at arrays with the ``m`` parameters last.
        bounds: Least and largest parameters, ``m x 2``.
        positive: Whether a parameter is moved in its logarithm, ``m``.
        scales: R: parameters, or their logarithms, are R times the variables that are moved, plus
            an origin. A diagonal, ``m``, or a matrix, ``m x m``: see :class:`Fitted`.
        origin: ``m``.
    """

    objective: NdarrayOptimizationClosure | BatchedNDarrayOptimizationClosure
    bounds: Floats
    positive: NDArray[np.bool_]
    scales: Floats
    origin: Floats

    @classmethod
    def of(
        cls,
        objective: NdarrayOptimizationClosure | BatchedNDarrayOptimizationClosure,
        bounds: Floats | None,
    ) -> LogObjective:
        """Take the logarithms of parameters that are positive and must not become negative.

        Args:
            objective: Its state is where the optimizer shall begin.
            bounds: As in the class; None: there are none.
        """
        present = objective.state
        if bounds is None:
            bounds = np.tile((-math.inf, math.inf), (present.shape[-1], 1))
        least = present.reshape(-1, len(bounds)).min(0)
        positive = (bounds[:, 0] >= 0.0) & (least > 0.0)
        return cls(objective, bounds, positive, np.ones(len(bounds)), np.zeros(len(bounds)))

    @property
    def start(self) -> Floats:
        """Variables at the objective's present parameters."""
        return self.variables(self.objective.state)

    @property
    def limits(self) -> Floats:
        """Least and largest variables, ``m x 2``; none where these are mixed by a matrix."""
        if self.scales.ndim > 1:
            return np.tile((-math.inf, math.inf), (len(self.bounds), 1))
        return self.variables(self.bounds.T).T

    @property
    def at_bounds(self) -> bool:
        """Whether a present parameter is at one of its bounds, rounding aside."""
        present, (least, largest) = self.objective.state, self.bounds.T
        near = [np.isclose(present, bound, rtol=1e-6, atol=0.0) for bound in (least, largest)]
        return bool(np.logical_or(*near).any())

    def scaled(self, scales: Floats, slopes: Floats) -> LogObjective:
        """Take scales, less where a first step would move something over ``FIRST_STEP``.

        The origin is where the objective is, so that nothing large is mixed into anything.

        Args:
            scales: As in the class.
            slopes: Gradient by the variables, which are not scaled yet, ``m``.
        """
        with np.errstate(divide="ignore"):
            if scales.ndim > 1:
                room = FIRST_STEP / np.abs(scales @ (slopes @ scales)).max()
                scales = scales * math.sqrt(min(1.0, room))
            else:
                scales = np.fmin(scales, np.sqrt(FIRST_STEP / np.abs(slopes)))
        return replace(self, scales=scales, origin=self.start)

    def move_to(self, variables: Floats) -> None:
        """Set the objective's parameters."""
        self.objective.state = self.parameters(variables)

    def variables(self, parameters: Floats) -> Floats:
        """Return what the optimizer moves; infinite bounds and zero have infinite logarithms."""
        moved = np.array(parameters, dtype=np.float64)
        with np.errstate(divide="ignore"):
            moved[..., self.positive] = np.log(moved[..., self.positive])
        moved -= self.origin
        if self.scales.ndim > 1:
            return cast(Floats, np.linalg.solve(self.scales, moved))
        return moved / self.scales

    def parameters(self, variables: Floats) -> Floats:
        """Return the parameters, within their bounds in spite of the logarithm's rounding."""
        values = np.asarray(variables, dtype=np.float64)
        values = self.scales @ values if self.scales.ndim > 1 else values * self.scales
        values += self.origin
        with np.errstate(over="ignore"):  # the objective at infinity is not a number
            values[..., self.positive] = np.exp(values[..., self.positive])
        return np.clip(values, *self.bounds.T)

    def __call__(self, variables: Floats, **kwargs: Any) -> tuple[Floats, Floats]:
        """Evaluate the objective and its gradient by the variables.

        Where a matrix mixes them, they move freely, and parameters stop at their bounds.

        Args:
            variables: ``m``, or for elements apart ``elements x m``.
            kwargs: Of the objective.
        """
        values = self.parameters(variables)
        loss, gradients = self.objective(values, **kwargs)
        slopes = gradients * np.where(self.positive, values, 1.0)
        if self.scales.ndim > 1:
            least, largest = self.bounds.T
            slopes = np.where((values > least) & (values < largest), slopes, 0.0)
        return loss, self.by_variables(slopes)

    def by_variables(self, slopes: Floats) -> Floats:
        """Turn a gradient by the parameters or their logarithms to one by the variables."""
        return slopes @ self.scales if self.scales.ndim > 1 else slopes * self.scales


@dataclass(slots=True)
class Fitted(OptimizationResult):
    """BoTorch's result, with what the next fit can know of the objective's curvature.

    Attributes:
        scales: Of each parameter its rows of a root R of the objective's inverse Hessian ``R Rᵀ``,
            by the parameters or their logarithms, ``... x m``; of more than ``MATRIX`` parameters
            the square root of the diagonal entry, ``...``. None without a step. Variables of which
            the parameters are R times have curvatures near one.
        fewest: Steps of the element that took the fewest, where elements were fitted apart.
    """

    scales: Mapping[str, Tensor] | None = None
    fewest: int | None = None


MATRIX = 32
"""Most parameters of which a whole root of the inverse Hessian is kept."""

FIRST_STEP = 1.0
"""Most that scales let a parameter, or its logarithm, move in the first step."""

FARTHEST = 1e9
"""How far a variable without bounds may move, in its own size and one more: between bounds
L-BFGS-B's first step has the length of the gradient, and otherwise a length of one."""

SCIPYS_FTOL = 1e7 * sys.float_info.epsilon
"""L-BFGS-B's tolerance where none is given: the least relative decrease of the loss."""

SMALLEST, GREATEST = 1e-12, 1e12
"""Eigenvalues of an inverse Hessian, or its entries, as rounding could make them negative."""


def fit_in_logarithms(
    mll: MarginalLogLikelihood,
    closure: Callable[..., Any] | None = None,
    parameters: Mapping[str, Tensor] | None = None,
    bounds: Mapping[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    callback: Callable[[Mapping[str, Tensor], OptimizationResult], None] | None = None,
    timeout_sec: float | None = None,
    scales: Mapping[str, Tensor] | None = None,
    **kwargs: Any,
) -> OptimizationResult:
    """Maximise an objective as ``fit_gpytorch_mll_scipy``, in the variables of `LogObjective`.

    L-BFGS-B knows nothing of an objective's curvature when it begins, and needs some steps to learn
    it. Where a fit before ended in scales, these let the first step be nearly Newton's. A matrix of
    them, which mixes the parameters, serves while all are between their bounds: where one comes to
    a bound, the fit goes on from there with the diagonal.

    Args:
        mll: The objective.
        closure: Loss and gradients; default: those of ``mll``.
        parameters: What is moved; default: what ``mll`` learns.
        bounds: As ``fit_gpytorch_mll_scipy`` takes them, in place of the model's own.
        options: Of SciPy's L-BFGS-B.
        callback: Called after each iteration with the parameters and a result; unlike BoTorch's it
            costs no evaluation.
        timeout_sec: Seconds after which it is stopped.
        scales: Of :class:`Fitted`; all one where they are not known of each parameter.
        kwargs: Further arguments of ``fit_gpytorch_mll_scipy``, which is called if there are any.
    """
    if kwargs:
        kwargs |= {"parameters": parameters, "bounds": bounds, "callback": callback}
        kwargs |= {"options": options, "timeout_sec": timeout_sec}
        return fit_gpytorch_mll_scipy(mll, closure=closure, **kwargs)
    known, own = get_parameters_and_bounds(mll)
    moved = dict(known if parameters is None else parameters)
    learned = {name: value for name, value in moved.items() if value.requires_grad}
    evaluate = closure or get_loss_closure_with_grads(mll, learned)
    limits = get_bounds_as_ndarray(learned, {**own, **(bounds or {})})
    objective = LogObjective.of(NdarrayOptimizationClosure(evaluate, learned), limits)
    known_first, box = list[tuple[Floats, Floats]](), objective.limits
    begun = time.monotonic()
    if scales is not None and not learned.keys() <= scales.keys():
        scales = None
    if scales is not None:
        loss, slopes = objective(objective.start)
        objective = objective.scaled(_scales_of(scales, learned, not objective.at_bounds), slopes)
        known_first.append((loss, objective.by_variables(slopes)))
        far = FARTHEST * (1.0 + np.abs(objective.start))
        least, largest = objective.start - far, objective.start + far
        box = objective.limits.clip(least[:, None], largest[:, None])
    steps, last = count(1), math.nan

    def evaluated(variables: Floats) -> tuple[Floats, Floats]:
        nonlocal last
        loss, gradients = known_first.pop() if known_first else objective(variables)
        last = float(loss)
        return loss, gradients

    def iterated(variables: Floats) -> None:  # the point that was evaluated last
        result = OptimizationResult(next(steps), last, OptimizationStatus.RUNNING)
        cast(Callable[..., None], callback)(learned, result)

    minimize: Callable[..., Any] = minimize_with_timeout
    end = minimize(
        evaluated,
        objective.start,
        jac=True,
        bounds=box,
        method="L-BFGS-B",
        options=options,
        callback=None if callback is None else iterated,
        timeout_sec=timeout_sec,
    )
    objective.move_to(end.x)
    goes_on = objective.scales.ndim > 1 and objective.at_bounds
    if end.success or end.status == 1:
        status = OptimizationStatus.SUCCESS if end.success else OptimizationStatus.STOPPED
    else:
        status = OptimizationStatus.FAILURE
        if not goes_on:
            warnings.warn(f"L-BFGS-B ended with: {end.message}", OptimizationWarning, stacklevel=2)
    result = Fitted(end.nit, float(end.fun), status, message=str(end.message))
    pairs = end.get("hess_inv")  # None if the time was over
    if pairs is not None and len(pairs.sk) > 0:
        found = torch.from_numpy(_scales_from(pairs, objective.scales, scales is not None))
        parts = found.split([value.numel() for value in learned.values()])
        named = zip(learned.items(), parts, strict=True)
        result.scales = {
            name: part.reshape((*value.shape, *found.shape[1:])).to(value)
            for (name, value), part in named
        }
    else:
        result.scales = scales
    if not goes_on:
        return result
    options = dict(options or {})
    if "maxiter" in options:
        options["maxiter"] -= end.nit
    if timeout_sec is not None:
        timeout_sec = max(timeout_sec - (time.monotonic() - begun), 0.0)
    rest = fit_in_logarithms(
        mll, closure, parameters, bounds, options, callback, timeout_sec, result.scales
    )
    return replace(rest, step=result.step + rest.step)


def _scales_of(
    scales: Mapping[str, Tensor], learned: Mapping[str, Tensor], in_the_middle: bool
) -> Floats:
    """Return the scales of some parameters.

    A matrix where they have one and lie in the middle of their bounds, else the lengths of its
    rows: of the inverse Hessian the diagonal's root.
    """
    rows = torch.cat([scales[n].double().reshape(v.numel(), -1) for n, v in learned.items()])
    root: Floats = rows.numpy(force=True)
    if in_the_middle and len(root) == root.shape[1] > 1:
        return root
    return np.sqrt(np.square(root).sum(-1))


def _scales_from(pairs: LbfgsInvHessProduct, former: Floats, scaled: bool) -> Floats:
    """Compute scales from the steps of a fit: a root of the inverse Hessian, or of its diagonal.

    Args:
        pairs: Steps s and changes y of the gradient, by the variables.
        former: Scales of the variables.
        scaled: Whether their inverse Hessian was near the identity before; else near ``sᵀy / yᵀy``
            times it, of the last step, as in L-BFGS.
    """
    s, y = pairs.sk, pairs.yk
    before = 1.0 if scaled else float(s[-1] @ y[-1] / (y[-1] @ y[-1]))
    if s.shape[1] > MATRIX:
        return former * np.sqrt(_inverse_diagonal(s, y, before).clip(SMALLEST, GREATEST))
    unit = LbfgsInvHessProduct(s / math.sqrt(before), y * math.sqrt(before))
    inverse: Floats = before * unit.todense()
    values, vectors = np.linalg.eigh(0.5 * (inverse + inverse.T))
    root: Floats = vectors * np.sqrt(values.clip(SMALLEST, GREATEST))
    return former @ root if former.ndim > 1 else former[:, None] * root


def _inverse_diagonal(s: Floats, y: Floats, before: float) -> Floats:
    """Compute the diagonal of an inverse Hessian after k steps, ``m``. Cost O(m k²).

    With ``S`` and ``Y`` the steps s and y as columns, R the upper triangle of ``Sᵀ Y`` and D its
    diagonal, the matrix is ``γ I + S B Sᵀ − γ (Y R⁻¹ Sᵀ + S R⁻ᵀ Yᵀ)`` for ``B = R⁻ᵀ (D + γ Yᵀ Y)
    R⁻¹``. Source: Byrd, Nocedal and Schnabel (1994), theorem 2.2.

    Args:
        s: Steps, ``k x m``.
        y: Changes of the gradient, ``k x m``.
        before: γ; before these steps the matrix was γ times the identity.
    """
    products = s @ y.T
    inner = np.diag(np.diag(products)) + before * (y @ y.T)
    back = np.linalg.inv(np.triu(products))
    own = back.T @ inner @ back @ s - 2.0 * before * (back.T @ y)
    diagonal: Floats = before + (s * own).sum(0)
    return diagonal


MOST_RESTARTS = 3
"""Times that L-BFGS-B is begun again where its line search stalled, unless it stalls at once, or
there is a limit on its time."""


def fit_to_stall(
    mll: MarginalLogLikelihood,
    closure: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> OptimizationResult:
    """Maximise an objective as :func:`fit_in_logarithms`; a stalled line search ends it.

    A line search stalls where the objective's rounding errors are larger than what is left to gain:
    with known noise of 1e-10 of the outcomes' variance, and in float32. L-BFGS-B never leaves a
    point for a worse one, so the point is an optimum as far as it can be told. BoTorch takes this
    for a failure, and begins again from hyperparameters drawn from their priors, where the next
    end may be a far worse optimum. A search that stalls before its first step is reported as
    BoTorch does. A long step may also lead to a covariance matrix that cannot be factorised: its
    objective counts as not a number, and L-BFGS-B goes back to the last point, without its memory.

    Args:
        mll: The objective.
        closure: Loss and gradients; default: those of ``mll``.
        kwargs: Of :func:`fit_in_logarithms`.

    Raises:
        NotPSDError: The matrix of the first point cannot be factorised.
    """
    learned = get_parameters(mll, requires_grad=True)
    evaluate = closure or get_loss_closure_with_grads(mll, learned)
    is_first = True

    def evaluated_or_nan(**arguments: Any) -> tuple[Tensor, Sequence[Tensor | None]]:
        nonlocal is_first
        try:
            evaluated: tuple[Tensor, Sequence[Tensor | None]] = evaluate(**arguments)
        except NotPSDError:
            if is_first:
                raise
            nowhere = [torch.full_like(value, math.nan) for value in learned.values()]
            return torch.full_like(nowhere[0].flatten()[0], math.nan), nowhere
        is_first = False
        return evaluated

    steps, restarts = 0, MOST_RESTARTS if kwargs.get("timeout_sec") is None else 0
    for _ in range(1 + restarts):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", OptimizationWarning)
            result = fit_in_logarithms(mll, evaluated_or_nan, **kwargs)
        stalled = result.status == OptimizationStatus.FAILURE and "ABNORMAL" in str(result.message)
        steps += result.step
        kwargs["scales"] = None  # of where it began
        if not stalled or result.step == 0:
            break
    excused = stalled and steps > 0
    for warning in caught:
        if not (excused and issubclass(warning.category, OptimizationWarning)):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    return replace(result, step=steps, status=OptimizationStatus.STOPPED) if excused else result


_OPTIONS = {"maxiter": "maxiter", "maxcor": "maxcor", "maxls": "maxls", "gtol": "pgtol"}
"""SciPy's options of L-BFGS-B as BoTorch's batched one names them, besides ``ftol``."""


def fit_elements(
    mll: MarginalLogLikelihood,
    closure: Callable[..., Any] | None = None,
    options: dict[str, Any] | None = None,
    scales: Mapping[str, Tensor] | None = None,
    **kwargs: Any,
) -> OptimizationResult:
    """Maximise an objective in the hyperparameters of each element by an L-BFGS-B of its own.

    Elements are batch elements and outputs. All are evaluated at once, so that a fit takes as many
    evaluations as the slowest element; one L-BFGS-B on their sum takes several times as many. An
    element whose line search stalls ends there: L-BFGS-B never leaves a point for a worse one.

    :func:`fit_in_logarithms`, whose arguments these are, is used where elements share a
    hyperparameter or are bounded differently, and where an argument is given that BoTorch's batched
    L-BFGS-B does not take. Where a step of one element leads to a covariance matrix that cannot be
    factorised, :func:`fit_to_stall` begins again with the sum of all.
    """
    known, shape = _options(options or {}), mll.model._parameter_shape
    if closure is not None or kwargs or known is None or not are_apart(mll, shape):
        return fit_in_logarithms(mll, closure, options=options, scales=scales, **kwargs)
    learned, given = get_parameters_and_bounds(mll, requires_grad=True)
    bounds = {  # numbers or tensors, expanded to ``elements x entries of each``
        name: [
            torch.as_tensor(bound).to(value).expand(value.shape).reshape(shape.numel(), -1)
            for bound in given[name]
        ]
        for name, value in learned.items()
        if name in given
    }
    if any(bool((bound != bound[0]).any()) for pair in bounds.values() for bound in pair):
        each: Any = {name: (low.flatten(), high.flatten()) for name, (low, high) in bounds.items()}
        return fit_in_logarithms(mll, bounds=each, options=options)
    minimize: Callable[..., Any] = batched_lbfgs_b.fmin_l_bfgs_b_batched
    first: Any = {name: (low[0], high[0]) for name, (low, high) in bounds.items()}
    elements = BatchedNDarrayOptimizationClosure(get_loss_closure(mll), learned, shape)
    objective = LogObjective.of(elements, get_per_element_bounds(learned, first, shape))
    start = elements.state
    try:
        variables, losses, ends = minimize(
            objective,
            objective.start,
            bounds=objective.limits,
            pass_batch_indices=True,
            **known,
        )
    except NotPSDError:
        elements.state = start
        return fit_to_stall(mll, options=options)
    objective.move_to(variables)
    return _result(losses, ends)


def _options(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Translate to options of BoTorch's batched L-BFGS-B; None where it lacks one of them."""
    if not options.keys() <= {*_OPTIONS, "ftol"}:
        return None
    known = {_OPTIONS[name]: value for name, value in options.items() if name != "ftol"}
    return known | ({"factr": options["ftol"] / np.finfo(float).eps} if "ftol" in options else {})


def are_apart(mll: MarginalLogLikelihood, shape: torch.Size) -> bool:
    """Say whether there are hyperparameters to learn, each of one element of this batch shape."""
    several = False
    for part in mll.modules():
        learned = [p for p in part.parameters(recurse=False) if p.requires_grad]
        batched = isinstance(part, Mean | Noise)
        batched = batched or (isinstance(part, Kernel) and part.batch_shape == shape)
        if learned and not (batched and all(p.shape[: len(shape)] == shape for p in learned)):
            return False
        several = several or bool(learned)
    return several


def _result(losses: Any, ends: Sequence[Mapping[str, Any]]) -> OptimizationResult:
    lost = int((~np.isfinite(losses)).sum())
    if lost > 0:
        warnings.warn(
            f"The loss of {lost} of {len(losses)} batch elements or outputs is not finite.",
            OptimizationWarning,
            stacklevel=2,
        )
    stopped, steps = any(end["status"] == 1 for end in ends), [end["nit"] for end in ends]
    status = OptimizationStatus.STOPPED if stopped else OptimizationStatus.SUCCESS
    return Fitted(max(steps), float(losses.sum()), status, fewest=min(steps))
