"""Steps up a gradient that keep parameters inside their constraints."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from gpytorch import Module
from torch import Tensor
from torch.nn import Parameter

from bo_stream.models.coordinates import coordinates_of


class Ascent:
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
            moments: Of an ascent on parameters of the same shapes.

        Raises:
            ValueError: The rate is negative.
        """
        if rate < 0.0:
            raise ValueError(f"Expected a learning rate of at least 0, got {rate}.")
        self._coordinates = coordinates_of(model, parameters if rate > 0.0 else ())
        moved = [coordinate.moved for coordinate in self._coordinates]
        self._adam = torch.optim.Adam(moved, lr=rate, fused=True) if moved else None
        if self._adam is not None and moments is not None:
            self._adam.load_state_dict(deepcopy(moments))

    def moments(self) -> dict[str, Any] | None:
        """A copy of Adam's state, for an ascent that goes on from here."""
        return None if self._adam is None else deepcopy(self._adam.state_dict())

    @property
    def learns(self) -> bool:
        """Whether there is anything to learn."""
        return self._adam is not None

    def set_rate(self, rate: float) -> None:
        """Of the steps from now on."""
        for group in self._adam.param_groups if self._adam is not None else ():
            group["lr"] = rate

    def ascend(self, value: Tensor) -> None:
        """One step that raises a scalar, along its gradient in the parameters."""
        if self._adam is None:
            return
        self.clear()
        (-value).backward()
        self.step()

    def clear(self) -> None:
        """Forget the parameters' gradients."""
        for coordinate in self._coordinates:
            coordinate.parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One step against the gradients that the parameters have."""
        if self._adam is None:
            return
        for coordinate in self._coordinates:
            coordinate.before()
        self._adam.step()
        for coordinate in self._coordinates:
            coordinate.after()
