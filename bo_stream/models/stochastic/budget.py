"""Budgets of a training and its optimisers."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpytorch import Module
from gpytorch.constraints import Interval
from torch import Tensor
from torch.nn import Parameter

from bo_stream.collective import ALONE, Collective
from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.models.inference import Prior
from bo_stream.models.stochastic.replay import Batch, Replay, generator_at
from bo_stream.models.stochastic.training import NUMERICAL_ERRORS, Training, agreed
from bo_stream.process import PosteriorProcess
from bo_stream.warnings import ShortTrainingWarning, users_stack_level

SEARCH_SHARE = 1.0 / 3.0
"""Part of a budget after which the search for first hyperparameters ends."""

START_SHARE = 0.5
"""Part of a budget after which nothing else is begun before the first step."""

JUDGED = 1000
"""Most rows by which a training is judged."""

LEAST_JUDGED = 30
"""Fewest of them that no step has drawn, for those alone to count."""

QUANTILE = 1.6448536269514722
"""Of a standard normal, at 95 %: a central interval of 90 %."""

_PLACE = 2**34
"""Of the random numbers that choose rows to judge by, beyond those of steps."""

_FAR = 10.0
"""How much lower a bound is where it cannot be computed, over one plus its first size."""

_PASSES = 8
"""Times that steps draw each row in mean, from which on hardly any is left undrawn."""


class Budget:
    """Wall time of a training, counted from the call.

    Attributes:
        seconds: The limit, or None.
        began: Monotonic time of the call.
    """

    def __init__(self, seconds: float | None, collective: Collective = ALONE) -> None:
        """Begin to count; processes that train together go by the clock of the first."""
        self.seconds, self.began, self._collective = seconds, time.monotonic(), collective

    def left(self, share: float = 1.0) -> float | None:
        """Return the seconds that are left of a share of the limit, at least 0; None: no limit."""
        if self.seconds is None:
            return None
        spent = agreed(time.monotonic() - self.began, self._collective)
        return max(share * self.seconds - spent, 0.0)


@dataclass(frozen=True)
class Scores:
    """How a process predicts some rows.

    Attributes:
        densities: Log predictive density of each, ``n``, summed over batch elements and outputs.
        squares: Squared error of the mean, ``n``, likewise; None where outcomes are not normal.
        covered: Share of outcomes in their central 90 % intervals, ``n``; None where outcomes are
            not normal.
    """

    densities: Tensor
    squares: Tensor | None
    covered: Tensor | None


@dataclass(frozen=True)
class JudgedRows:
    """Rows by which a training is judged, drawn from those that are stored.

    Attributes:
        places: Where they are, ``n``.
        rows: In the units of the process.
    """

    places: Tensor
    rows: Batch

    @classmethod
    def of(cls, replay: Replay, prior: Prior, seed: int, most: int = JUDGED) -> JudgedRows:
        """Draw at most so many, the same whenever they are drawn; all processes get all of them."""
        places = replay.places(min(most, replay.held), generator_at(seed, _PLACE)).unique()
        rows = replay.in_units(replay.at(places), prior)
        return cls(places, replay.completed(rows, places))

    @torch.no_grad()
    def scores(self, process: PosteriorProcess, prior: Prior) -> Scores:
        """Predict the rows. Cost of a prediction of the process."""
        targets, outcomes = self.rows.targets, OutcomeModel(prior.likelihood, prior.num_outputs)
        mean, variance = process.marginals(self.rows.X)
        densities = outcomes.log_marginal(targets, mean, variance).flatten(0, -2).sum(0)
        if not prior.is_gaussian:
            return Scores(densities, None, None)
        _, total = outcomes.moments(mean, variance)
        covered = (targets - mean).abs() <= QUANTILE * total.sqrt()
        squares = (targets - mean).square().flatten(0, -2).sum(0)
        return Scores(densities, squares, covered.flatten(0, -2).double().mean(0))

    def undrawn(self, replay: Replay, size: int, seed: int, steps: range) -> Tensor:
        """Find the rows that no minibatch of some steps drew, ``n``; all if almost none are."""
        free = torch.ones(len(self.places), dtype=torch.bool)
        if size < replay.held and size * len(steps) < _PASSES * replay.held:
            for step in steps:
                drawn = replay.places(size, generator_at(seed, step))
                free &= ~torch.isin(self.places, drawn)
        elif len(steps) > 0:
            free[:] = False
        return free if int(free.sum()) >= LEAST_JUDGED else torch.ones_like(free)


def judged(
    training: Training, before: Scores | None, after: Scores, free: Tensor, ended: float
) -> Training:
    """Say of a training how well the outcomes of some rows are covered, and whether to keep it.

    Args:
        training: That ended just now.
        before: Of the model before the call, where it is to be no better than afterwards.
        after: Of the model as it is.
        free: Which rows count, ``n``.
        ended: Monotonic time of its last step's end.
    """
    kept = before is None or _is_no_worse(before, after, free)
    best = after if kept or before is None else before
    coverage = None if best.covered is None else float(best.covered[free].mean())
    final = time.monotonic() - ended
    seconds = training.seconds + final
    return replace(training, coverage=coverage, is_kept=kept, seconds=seconds, final=final)


def _is_no_worse(before: Scores, after: Scores, free: Tensor) -> bool:
    """Say whether the mean log density is no smaller, or the mean squared error no larger."""
    if bool(after.densities[free].mean() >= before.densities[free].mean()):
        return True
    if after.squares is None or before.squares is None:
        return False
    return bool(after.squares[free].mean() <= before.squares[free].mean())


LEAST_COVERAGE = 0.6
"""Coverage of 90 % intervals below which a training has not come far."""

MOST_GAIN = 2.0
"""Gain of the bound, see :class:`Training`, above which it has not: nats an observation.

Measured on kin40k (3,000 rows, 1,000 Fourier features): 13 nats and a coverage of 0.18 after 50
steps, 11 and 0.54 after 1,000, 1.8 and 0.86 after 2,000; of a ``DecoupledGP`` 0.2 and 0.97 after
50.
"""


def judgement_said(training: Training, seconds: float | None) -> Training:
    """Warn where a training has not come far, or was cut short; return it."""
    if not training.is_kept:
        limit = f"{training.steps} steps" if seconds is None else f"{seconds:g} s"
        said = (
            f"{limit} were too few: after {training.steps} steps the model predicted rows "
            f"worse than before the call, and is as it was ({training.start:.3g} s went into first "
            "hyperparameters). Give more of them."
        )
    elif seconds is not None and training.steps == 0:
        said = (
            f"No step was taken in {seconds:g} s, of which {training.start:.3g} s went into first "
            "hyperparameters. Give more seconds."
        )
    elif training.steps > 0 and (
        training.gain > MOST_GAIN
        or (1.0 if training.coverage is None else training.coverage) < LEAST_COVERAGE
    ):
        signs = []
        if not math.isnan(training.gain):
            rise = f"{training.gain:.2g} nats an observation"
            signs.append(f"as many steps again would raise the bound by {rise}")
        if training.coverage is not None:
            signs.append(f"{training.coverage:.0%} of outcomes are in their 90 % intervals")
        said = (
            f"The training has not come far: {', '.join(signs)}. Call fit again; if it stays so, "
            "variances are too small for this model: compare with OSGPR or DecoupledGP."
        )
    else:
        return training
    warnings.warn(said, ShortTrainingWarning, stacklevel=users_stack_level())
    return training


# --- adam and L-BFGS on parameters that are kept inside their constraints ------------------------


def check_rate(name: str, rate: float) -> None:
    """Check a learning rate.

    Raises:
        ValueError: It is negative, infinite or NaN.
    """
    if not 0.0 <= rate < math.inf:
        raise ValueError(f"Expected {name} to be at least 0 and finite, got {rate}.")


def constrained_parameters(
    model: Module, parameters: Iterable[Parameter]
) -> list[ConstrainedParameter]:
    """Constrain some of a model's parameters as the model does."""
    named: Any = model.named_parameters_and_constraints
    constraints = {id(p): constraint for _, p, constraint in named()}
    found = []
    for parameter in parameters:
        bound = constraints.get(id(parameter))
        if not isinstance(bound, Interval) or bound.enforced:
            bound = None
        relative = bound is not None and not bool((bound.lower_bound < 0).any())
        moved = Parameter(parameter.detach().log()) if relative else parameter
        found.append(ConstrainedParameter(parameter, moved, bound))
    return found


@dataclass(frozen=True)
class ConstrainedParameter:
    """A parameter and what is moved for it: its logarithm where a constraint bounds it directly.

    BoTorch's default constraints bound noise and lengthscales without a transform that would
    enforce it; steps in the logarithm are relative and keep the sign.

    Attributes:
        parameter: The model's.
        moved: What an optimiser moves.
        constraint: The bound to keep, or None where a transform does.
    """

    parameter: Parameter
    moved: Parameter
    constraint: Interval | None

    @property
    def relative(self) -> bool:
        """Whether a logarithm is moved."""
        return self.moved is not self.parameter

    def slope(self, gradient: Tensor) -> Tensor:
        """Turn a gradient in the parameter into one in what is moved."""
        return gradient * self.parameter.detach() if self.relative else gradient

    def after(self) -> None:
        """Hand back the value, inside its bounds."""
        value = self.moved.exp() if self.relative else self.moved
        if self.constraint is not None:
            low, high = (self.constraint.inverse_transform(bound) for bound in self.constraint)
            value = value.clamp(torch.as_tensor(low).to(value), torch.as_tensor(high).to(value))
        self.parameter.copy_(value)


def linear_in(
    coordinates: Sequence[ConstrainedParameter], value: Tensor, gradient: Sequence[Tensor]
) -> Tensor:
    """Return a value with its gradient in the parameters as one that is linear in what is moved."""
    total = value.detach()
    for coordinate, slope in zip(coordinates, gradient, strict=True):
        step = coordinate.moved - coordinate.moved.detach()
        total = total + (coordinate.slope(slope) * step).sum()
    return total


def maximise_inside(
    model: Module, parameters: Iterable[Parameter], bound: Callable[[], Tensor], maxiter: int
) -> None:
    """Move some of a model's parameters up a bound by :func:`maximise`, inside their constraints.

    Args:
        model: Whose constraints to keep.
        parameters: Those to move, in place.
        bound: Computes the bound for the parameters as they are.
        maxiter: Of L-BFGS.

    Raises:
        NotPSDError, NanError, LinAlgError: It cannot be computed at the start.
    """
    coordinates = constrained_parameters(model, parameters)

    @torch.no_grad()
    def set_parameters() -> None:
        for coordinate in coordinates:
            coordinate.after()

    def value() -> Tensor:
        set_parameters()
        found = bound()
        gradient = torch.autograd.grad(found, [one.parameter for one in coordinates])
        return linear_in(coordinates, found, gradient)

    maximise(value, [coordinate.moved for coordinate in coordinates], maxiter)
    set_parameters()


class ConstrainedAdam:
    """Adam on some of a model's parameters, kept inside their constraints.

    Those that require no gradient when a step is taken stay. Where the model was moved to another
    dtype or device, what is moved and its moments follow.
    """

    def __init__(
        self,
        model: Module,
        parameters: Iterable[Parameter],
        rate: float,
        moments: dict[str, Any] | None = None,
    ) -> None:
        """Start with fresh moments, or with another's.

        Args:
            model: Whose constraints to keep.
            parameters: Those to learn.
            rate: Learning rate; 0: nothing is learned.
            moments: Of Adam on parameters of the same shapes.

        Raises:
            ValueError: The rate is negative, infinite or NaN.
        """
        check_rate("learning_rate", rate)
        self._coordinates = constrained_parameters(model, parameters if rate > 0.0 else ())
        moved = [coordinate.moved for coordinate in self._coordinates]
        self._adam = torch.optim.Adam(moved, lr=rate, fused=True) if moved else None
        self._kinds = self._kinds_now()
        self.restore(moments)

    def moments(self) -> dict[str, Any] | None:
        """Copy Adam's state, for one that goes on from here."""
        return None if self._adam is None else deepcopy(self._adam.state_dict())

    def restore(self, moments: dict[str, Any] | None) -> None:
        """Go on from a copy of Adam's state, if there is one."""
        if self._adam is not None and moments is not None:
            self._adam.load_state_dict(deepcopy(moments))

    def _kinds_now(self) -> list[tuple[torch.dtype, torch.device]]:
        return [(one.parameter.dtype, one.parameter.device) for one in self._coordinates]

    @property
    def learns(self) -> bool:
        """Whether there is anything to learn now."""
        return any(one.parameter.requires_grad for one in self._coordinates)

    def set_rate(self, rate: float) -> None:
        """Set the rate of the steps from now on."""
        for group in self._adam.param_groups if self._adam is not None else ():
            group["lr"] = rate

    def ascend(self, value: Tensor, collective: Collective = ALONE) -> None:
        """Take a step that raises a scalar, along its gradient in the parameters.

        Of several processes each has its part of the scalar, and all take the step of their sum.
        """
        if not self.learns:
            return
        self.clear()
        (-value).backward()
        self.step(collective)

    def clear(self) -> None:
        """Forget the parameters' gradients."""
        for coordinate in self._coordinates:
            coordinate.parameter.grad = coordinate.moved.grad = None

    @torch.no_grad()
    def step(self, collective: Collective = ALONE) -> None:
        """Take a step against the parameters' gradients, of which each process has a part."""
        if self._adam is None:
            return
        moving, kinds = [], self._kinds_now()
        if kinds != self._kinds:
            for one in self._coordinates:
                one.moved.data = one.moved.to(one.parameter)
            self.restore(self.moments())
            self._kinds = kinds
        for one in self._coordinates:
            if one.parameter.grad is None:
                continue
            moving.append(one)
            one.parameter.grad = collective.sum(one.parameter.grad)
            if one.relative:
                one.moved.copy_(one.parameter.log())
                one.moved.grad = one.slope(one.parameter.grad)
        self._adam.step()
        for one in moving:
            one.after()


def maximise(bound: Callable[[], Tensor], variables: list[Tensor], maxiter: int) -> None:
    """Move leaves to a local maximum of a bound, or on the way there, by L-BFGS; in place.

    Where the bound cannot be computed it counts as far lower than at the start: a line search then
    tries a shorter step.

    Raises:
        NotPSDError, NanError, LinAlgError: It cannot be computed at the start.
    """
    optimizer = torch.optim.LBFGS(variables, max_iter=maxiter, line_search_fn="strong_wolfe")
    worst: Tensor | None = None

    def loss() -> Tensor:
        nonlocal worst
        optimizer.zero_grad()
        try:
            value = -bound()
        except NUMERICAL_ERRORS:
            if worst is None:
                raise
            return worst  # without a slope
        value.backward()
        if worst is None:
            worst = value.detach() + _FAR * (1.0 + value.detach().abs())
        return value.detach()

    optimizer.step(loss)
