"""Bad first input, variances and sizes are named; :mod:`bo_stream.testing` has the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
)
from torch import Tensor

from bo_stream import WISKI
from bo_stream.testing.check import FAULTS, InputFault
from bo_stream.testing.streams import assert_untouched, fingerprint
from tests.laws.cases import CASES
from tests.laws.registry import Setting, Stream


def _with(tensor: Tensor, value: float) -> Tensor:
    spoilt = tensor.clone()
    spoilt.view(-1)[-1] = value
    return spoilt


_OTHER_DTYPE = {torch.float64: torch.float32, torch.float32: torch.float64}

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
    "fault",
    [f for f in FAULTS if f.name not in {"X too wide", "Y with too many outputs", "Y None"}],
    ids=str,
)
@pytest.mark.parametrize("stream", SPOILT, ids=str)
def test_bad_first_input_is_named(stream: Stream, fault: InputFault) -> None:
    name = f"(train_)?({fault.argument})"
    if "batch" in fault.name or "dtype" in fault.name or "device" in fault.name:
        name = "(train_)?[XY]"  # which of the two is the odd one cannot be known
    with pytest.raises(fault.error, match=rf"\b{name}\b"):
        WISKI(*fault.applied(stream.data(4)))


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
