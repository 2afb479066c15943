"""Every model of the registry obeys every law; see :mod:`tests.contract`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import bo_stream.models
from bo_stream.models.base import StreamingGP
from tests.contract import (
    CASES,
    FAULTS,
    LAWS,
    STREAMS,
    VARIANCE_FAULTS,
    Fault,
    Law,
    Setting,
    Stream,
    applies,
    assert_untouched,
    fingerprint,
)

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")


def models() -> set[type[StreamingGP]]:
    """All models of the package: the classes that nothing is derived from."""
    found = set()
    for module in pkgutil.walk_packages(bo_stream.models.__path__, "bo_stream.models."):
        for _, member in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(member, StreamingGP) and not member.__subclasses__():
                found.add(member)
    return found


def test_every_model_is_in_the_registry() -> None:
    streams = [Stream(case, Setting()) for case in CASES]
    registered = {type(stream.model(stream.data(3))) for stream in streams}
    assert registered == models()


@pytest.mark.parametrize(
    ("law", "stream"),
    [
        pytest.param(law, stream, id=f"{law.__name__}-{stream}")
        for law in LAWS
        for stream in STREAMS
        if applies(law, stream.case)
    ],
)
def test_law(law: Law, stream: Stream) -> None:
    law(stream)


CUDA = [
    Stream(case, Setting(outputs=2, device="cuda"))
    for case in CASES
    if case.name in {"WISKI", "WISKI, additive"}
]


@pytest.mark.cuda
@pytest.mark.parametrize("stream", CUDA, ids=str)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law_on_a_gpu(law: Law, stream: Stream) -> None:
    law(stream)


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
    model = stream.model(stream.data(8))
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
    model, more = stream.model(stream.data(8)), stream.data(4)
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
    model, more = stream.model(stream.data(8)), stream.data(4)
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
