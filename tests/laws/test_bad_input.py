"""Bad input is named, and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
)
from torch import Tensor

from bo_stream.testing.streams import assert_untouched, fingerprint
from tests.laws.cases import CASES
from tests.laws.registry import (
    DIM,
    Setting,
    Stream,
)
from tests.support.problems import Observations

Mutation = Callable[[Observations], tuple[Any, Any, Any]]


@dataclass(frozen=True)
class Fault:
    """Something wrong with observations, and the error that must say so.

    Attributes:
        name: Of the test.
        spoil: Arguments with the fault in them.
        error: What is raised.
        argument: Its name is in the message.
        verbs: The methods that can see the fault.
    """

    name: str
    spoil: Mutation
    error: type[Exception]
    argument: str
    verbs: frozenset[str] = field(
        default=frozenset({"update", "retract", "condition_on_observations"})
    )

    def __str__(self) -> str:
        return self.name


def _with(tensor: Tensor, value: float) -> Tensor:
    spoilt = tensor.clone()
    spoilt.view(-1)[-1] = value
    return spoilt


_ALL = frozenset({"update", "retract", "condition_on_observations", "posterior"})
_MEMORY = frozenset({"update", "retract"})
_OTHER_DTYPE = {torch.float64: torch.float32, torch.float32: torch.float64}

FAULTS = (
    Fault("X no tensor", lambda o: (o.X.tolist(), o.Y, o.Yvar), InputDataError, "X", _ALL),
    Fault("Y no tensor", lambda o: (o.X, o.Y.tolist(), o.Yvar), InputDataError, "Y"),
    Fault(
        "X a single number",
        lambda o: (o.X.sum(), o.Y, o.Yvar),
        BotorchTensorDimensionError,
        "X",
        _ALL,
    ),
    Fault(
        "X a vector",
        lambda o: (o.X.flatten()[:DIM], o.Y, o.Yvar),
        BotorchTensorDimensionError,
        "X",
        _ALL,
    ),
    Fault(
        "X too wide",
        lambda o: (torch.cat((o.X, o.X), -1), o.Y, o.Yvar),
        BotorchTensorDimensionError,
        "X",
        _ALL,
    ),
    Fault(
        "X in an unknown batch",
        lambda o: (o.X.expand(3, *o.X.shape), o.Y, o.Yvar),
        BotorchTensorDimensionError,
        "X",
        _MEMORY,
    ),
    Fault(
        "Y without its outputs",
        lambda o: (o.X, o.Y[..., 0], o.Yvar),
        BotorchTensorDimensionError,
        "Y",
    ),
    Fault(
        "Y with too many outputs",
        lambda o: (o.X, torch.cat((o.Y, o.Y), -1), o.Yvar),
        BotorchTensorDimensionError,
        "Y",
    ),
    Fault(
        "Y with a row too few",
        lambda o: (o.X, o.Y[..., 1:, :], o.Yvar),
        BotorchTensorDimensionError,
        "Y",
    ),
    Fault("X whole numbers", lambda o: (o.X.long(), o.Y, o.Yvar), InputDataError, "X", _ALL),
    Fault("Y whole numbers", lambda o: (o.X, o.Y.long(), o.Yvar), InputDataError, "Y"),
    Fault(
        "X of another dtype",
        lambda o: (o.X.to(_OTHER_DTYPE[o.X.dtype]), o.Y, o.Yvar),
        InputDataError,
        "X",
        _ALL,
    ),
    Fault(
        "Y of another dtype",
        lambda o: (o.X, o.Y.to(_OTHER_DTYPE[o.Y.dtype]), o.Yvar),
        InputDataError,
        "Y",
    ),
    Fault(
        "X on another device", lambda o: (o.X.to("meta"), o.Y, o.Yvar), InputDataError, "X", _ALL
    ),
    Fault("Y on another device", lambda o: (o.X, o.Y.to("meta"), o.Yvar), InputDataError, "Y"),
    Fault("NaN in X", lambda o: (_with(o.X, math.nan), o.Y, o.Yvar), InputDataError, "X", _ALL),
    Fault("inf in X", lambda o: (_with(o.X, math.inf), o.Y, o.Yvar), InputDataError, "X", _ALL),
    Fault("NaN in Y", lambda o: (o.X, _with(o.Y, math.nan), o.Yvar), InputDataError, "Y"),
    Fault("inf in Y", lambda o: (o.X, _with(o.Y, -math.inf), o.Yvar), InputDataError, "Y"),
)
"""What no model takes, wherever it comes in."""

VARIANCE_FAULTS = (
    ("negative", lambda v: _with(v, -1e-3), InputDataError),
    ("infinite", lambda v: _with(v, math.inf), InputDataError),
    ("a row too few", lambda v: v[..., 1:, :], BotorchTensorDimensionError),
    ("of another dtype", lambda v: v.to(_OTHER_DTYPE[v.dtype]), InputDataError),
    ("on another device", lambda v: v.to("meta"), InputDataError),
    ("no tensor", lambda v: v.tolist(), InputDataError),
)
"""What no model takes for a variance (``Yvar`` or ``noise``)."""


SPOILT = [
    Stream(CASES[0], Setting(outputs=2)),
    Stream(CASES[0], Setting(torch.float32, batch_shape=(2,))),
]


@pytest.mark.parametrize(
    ("fault", "verb"),
    [(fault, verb) for fault in FAULTS for verb in sorted(fault.verbs)],
    ids=str,
)
@pytest.mark.parametrize("stream", SPOILT, ids=str)
def test_bad_input_is_named_and_changes_nothing(stream: Stream, fault: Fault, verb: str) -> None:
    model = stream.model(stream.data(10))
    model.posterior(stream.points)
    before = fingerprint(model)
    X, Y, _ = fault.spoil(stream.data(4))
    arguments = (X,) if verb == "posterior" else (X, Y)
    with pytest.raises(fault.error, match=rf"\b{fault.argument}\b"):
        getattr(model, verb)(*arguments)
    assert_untouched(model, before)


@pytest.mark.parametrize(
    "fault",
    [f for f in FAULTS if f.name not in {"X too wide", "Y with too many outputs"}],
    ids=str,
)
@pytest.mark.parametrize("stream", SPOILT, ids=str)
def test_bad_first_input_is_named(stream: Stream, fault: Fault) -> None:
    X, Y, _ = fault.spoil(stream.data(4))
    name = f"(train_)?{fault.argument}"
    if "batch" in fault.name or "dtype" in fault.name or "device" in fault.name:
        name = "(train_)?[XY]"  # which of the two is the odd one cannot be known
    with pytest.raises(fault.error, match=rf"\b{name}\b"):
        type(stream.model(stream.data(4)))(X, Y)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [pytest.param(spoil, error, id=name) for name, spoil, error in VARIANCE_FAULTS],
)
@pytest.mark.parametrize("stream", SPOILT, ids=str)
def test_bad_variances_are_named_and_change_nothing(
    stream: Stream, spoil: Callable[[Tensor], Any], error: type[Exception]
) -> None:
    model, more = stream.model(stream.data(10)), stream.data(4)
    model.posterior(stream.points)
    before = fingerprint(model)
    bad = spoil(0.1 + torch.rand_like(more.Y))
    for verb in (model.update, model.retract):
        with pytest.raises(error, match=r"\bYvar\b"):
            verb(more.X, more.Y, bad)
    with pytest.raises(error, match=r"\bnoise\b"):
        model.condition_on_observations(more.X, more.Y, noise=bad)
    assert_untouched(model, before)


def test_noise_known_for_some_outputs_only_is_named() -> None:
    stream = SPOILT[0]
    model, more = stream.model(stream.data(10)), stream.data(4)
    Yvar = torch.rand_like(more.Y)
    Yvar[1, 0] = torch.nan
    with pytest.raises(Exception, match=r"NaN .* in Yvar for all outputs of a row or for none"):
        model.update(more.X, more.Y, Yvar)


def test_more_than_there_is_cannot_be_retracted() -> None:
    stream = SPOILT[0]
    model = stream.model(stream.data(3))
    model.posterior(stream.points)
    before = fingerprint(model)
    with pytest.raises(Exception, match=r"at most the 3 observations in memory, got 4"):
        model.retract(*stream.data(4).astuple())
    assert_untouched(model, before)


@pytest.mark.parametrize("factor", [0.0, -0.5, 1.5, float("nan")])
def test_forgetting_takes_a_share(factor: float) -> None:
    stream = SPOILT[0]
    model = stream.model(stream.data(3))
    model.posterior(stream.points)
    before = fingerprint(model)
    with pytest.raises(ValueError, match="factor in"):
        model.forget(factor)
    assert_untouched(model, before)
