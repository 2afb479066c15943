"""Laws of bad input: what a user gets wrong is named, and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.sampling.normal import SobolQMCNormalSampler
from torch import Tensor

from bo_stream.testing.streams import (
    ExampleData,
    ModelStream,
    assert_untouched,
    fingerprint,
    law,
    refused,
)

_OTHER_DTYPE = {torch.float64: torch.float32, torch.float32: torch.float64}


@dataclass(frozen=True)
class InputFault:
    """Something wrong with inputs or outcomes, and the error that must say so.

    Attributes:
        name: What is wrong; begins with X or Y.
        spoil: Maps the tensor to one with the fault.
        error: What is raised.
        memory_only: Whether hypothetical observations and queries may be so.
        of_labels: Whether a model of labels must say so, too.
    """

    name: str
    spoil: Callable[[Tensor], Any]
    error: type[Exception]
    memory_only: bool = False
    of_labels: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def argument(self) -> str:
        """The name that must be in the message, as a pattern."""
        return "X" if self.name.startswith("X") else "Y|labels"

    def applied(self, data: ExampleData) -> tuple[Any, Any]:
        """Return X and Y, of which one has the fault."""
        if self.argument == "X":
            return self.spoil(data.X), data.Y
        return data.X, self.spoil(data.Y)


def _spoilt(value: float, tensor: Tensor) -> Tensor:
    spoilt = tensor.clone()
    spoilt.view(-1)[-1] = value
    return spoilt


_SHAPE = BotorchTensorDimensionError

FAULTS = (
    InputFault("X a list", lambda X: X.tolist(), InputDataError),
    InputFault("X of NumPy", lambda X: X.cpu().numpy(), InputDataError),
    InputFault("X None", lambda X: None, InputDataError),
    InputFault("X a single number", lambda X: X.sum(), _SHAPE),
    InputFault("X a vector", lambda X: X.flatten()[: X.shape[-1]], _SHAPE),
    InputFault("X too wide", lambda X: torch.cat((X, X), -1), _SHAPE),
    InputFault("X in an unknown batch", lambda X: X.expand(3, *X.shape), _SHAPE, memory_only=True),
    InputFault("X whole numbers", lambda X: (9 * X).long(), InputDataError),
    InputFault("X of another dtype", lambda X: X.to(_OTHER_DTYPE[X.dtype]), InputDataError),
    InputFault("X on another device", lambda X: X.to("meta"), InputDataError),
    InputFault("X with NaN", partial(_spoilt, math.nan), InputDataError),
    InputFault("X with inf", partial(_spoilt, math.inf), InputDataError),
    InputFault("Y a list", lambda Y: Y.tolist(), InputDataError),
    InputFault("Y None", lambda Y: None, InputDataError),
    InputFault("Y without its outputs", lambda Y: Y[..., 0], _SHAPE, of_labels=False),
    InputFault("Y with too many outputs", lambda Y: torch.cat((Y, Y), -1), _SHAPE),
    InputFault("Y with a row too few", lambda Y: Y[..., 1:, :], _SHAPE),
    InputFault("Y whole numbers", lambda Y: Y.long(), InputDataError, of_labels=False),
    InputFault(
        "Y of another dtype", lambda Y: Y.to(_OTHER_DTYPE[Y.dtype]), InputDataError, of_labels=False
    ),
    InputFault("Y on another device", lambda Y: Y.to("meta"), InputDataError),
    InputFault("Y with NaN", partial(_spoilt, math.nan), InputDataError),
    InputFault("Y with inf", partial(_spoilt, -math.inf), InputDataError),
)
"""What no model takes."""


@law
def bad_observations_are_named_and_change_nothing(stream: ModelStream) -> None:
    """Check that faults of X and Y are named by whatever takes them, and change nothing.

    Where they are not: leave `update`, `retract`, `condition_on_observations`, `posterior` and
    `fantasize` to `StreamingGP`, whose checks come before anything is changed.
    """
    model, more = stream.model(stream.data(10)), stream.data(4)
    model.posterior(stream.points)
    before, sampler = fingerprint(model), stream.sampler(2)
    for fault in FAULTS:
        if stream.labels and not fault.of_labels:
            continue
        X, Y = fault.applied(more)
        calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]
        calls = [(model.update, (X, Y)), (model.retract, (X, Y))]
        if not fault.memory_only:
            if not stream.labels:
                calls.append((model.condition_on_observations, (X, Y)))
            if fault.argument == "X":
                calls += [(model.posterior, (X,)), (model.fantasize, (X, sampler))]
        for verb, arguments in calls:
            with refused(fault.error, about=rf"\bExpected .*\b({fault.argument})\b"):
                verb(*arguments)
    assert_untouched(model, before)


@law
def a_sampler_that_is_none_is_named(stream: ModelStream) -> None:
    """Check that fantasies refuse what draws no samples, and change nothing.

    Where they do not: leave `fantasize` to `StreamingGP`.
    """
    model = stream.model(stream.data(10))
    model.posterior(stream.points)
    before = fingerprint(model)
    for wrong in (None, 4, torch.Size([4]), SobolQMCNormalSampler):
        with refused(UnsupportedError, about=r"sampler .*such as SobolQMCNormalSampler"):
            model.fantasize(stream.points, wrong)  # type: ignore[arg-type]
    assert_untouched(model, before)
