"""Adam and L-BFGS on parameters that are kept inside their constraints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch import Module
from gpytorch.constraints import Interval
from torch import Tensor
from torch.nn import Parameter

from bo_stream.collective import ALONE, Collective


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


class ConstrainedAdam:
    """Adam on some of a model's parameters, kept inside their constraints."""

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
            ValueError: The rate is negative.
        """
        if rate < 0.0:
            raise ValueError(f"Expected a learning rate of at least 0, got {rate}.")
        self._coordinates = constrained_parameters(model, parameters if rate > 0.0 else ())
        moved = [coordinate.moved for coordinate in self._coordinates]
        self._adam = torch.optim.Adam(moved, lr=rate, fused=True) if moved else None
        if self._adam is not None and moments is not None:
            self._adam.load_state_dict(deepcopy(moments))

    def moments(self) -> dict[str, Any] | None:
        """Copy Adam's state, for one that goes on from here."""
        return None if self._adam is None else deepcopy(self._adam.state_dict())

    @property
    def learns(self) -> bool:
        """Whether there is anything to learn."""
        return self._adam is not None

    def set_rate(self, rate: float) -> None:
        """Set the rate of the steps from now on."""
        for group in self._adam.param_groups if self._adam is not None else ():
            group["lr"] = rate

    def ascend(self, value: Tensor, collective: Collective = ALONE) -> None:
        """Take a step that raises a scalar, along its gradient in the parameters.

        Of several processes each has its part of the scalar, and all take the step of their sum.
        """
        if self._adam is None:
            return
        self.clear()
        (-value).backward()
        self.sum_gradients(collective)
        self.step()

    def clear(self) -> None:
        """Forget the parameters' gradients."""
        for coordinate in self._coordinates:
            coordinate.parameter.grad = None

    def sum_gradients(self, collective: Collective) -> None:
        """Sum the parameters' gradients over the processes, each of which has some of them."""
        for one in self._coordinates:
            if one.parameter.grad is not None:
                one.parameter.grad = collective.sum(one.parameter.grad)

    @torch.no_grad()
    def step(self) -> None:
        """Take a step against the gradients that the parameters have."""
        if self._adam is None:
            return
        for one in self._coordinates:
            if one.relative and one.parameter.grad is not None:
                one.moved.copy_(one.parameter.log())
                one.moved.grad = one.slope(one.parameter.grad)
        self._adam.step()
        for one in self._coordinates:
            one.after()


def maximise(bound: Callable[[], Tensor], variables: list[Tensor], maxiter: int) -> None:
    """Move leaves to a local maximum of a bound, or on the way there, by L-BFGS; in place."""
    optimizer = torch.optim.LBFGS(variables, max_iter=maxiter, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -bound()
        value.backward()
        return value.detach()

    optimizer.step(loss)
