"""What an optimiser moves for a model's parameters, so that they keep their constraints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch import Module
from gpytorch.constraints import Interval
from torch import Tensor
from torch.nn import Parameter


def coordinates_of(model: Module, parameters: Iterable[Parameter]) -> list[Coordinate]:
    """Of some of a model's parameters.

    Args:
        model: Whose constraints to keep.
        parameters: Of it.
    """
    named: Any = model.named_parameters_and_constraints
    constraints = {id(p): constraint for _, p, constraint in named()}
    return [Coordinate.of(p, constraints.get(id(p))) for p in parameters]


@dataclass(frozen=True)
class Coordinate:
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

    @classmethod
    def of(cls, parameter: Parameter, constraint: object) -> Coordinate:
        """Of a parameter with its constraint, or None."""
        direct = isinstance(constraint, Interval) and not constraint.enforced
        bound = constraint if direct and isinstance(constraint, Interval) else None
        if bound is None or bool((bound.lower_bound < 0).any()):
            return cls(parameter, parameter, bound)
        return cls(parameter, Parameter(parameter.detach().log()), bound)

    @property
    def relative(self) -> bool:
        """Whether a logarithm is moved."""
        return self.moved is not self.parameter

    def before(self) -> None:
        """Take over the parameter's value and gradient."""
        if self.relative and self.parameter.grad is not None:
            self.moved.copy_(self.parameter.log())
            self.moved.grad = self.slope(self.parameter.grad)

    def slope(self, gradient: Tensor) -> Tensor:
        """A gradient in the parameter as one in what is moved."""
        return gradient * self.parameter.detach() if self.relative else gradient

    def after(self) -> None:
        """Hand back the value, inside its bounds."""
        value = self.moved.exp() if self.relative else self.moved
        if self.constraint is not None:
            low, high = self.constraint.lower_bound, self.constraint.upper_bound
            value = value.clamp(torch.as_tensor(low).to(value), torch.as_tensor(high).to(value))
        self.parameter.copy_(value)
