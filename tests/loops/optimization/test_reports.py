"""What a function of parameters may return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bo_stream.errors import UsageError
from bo_stream.loops.optimization.objectives import (
    FunctionOfParameters,
    NoOutcomeError,
    as_report,
    complete,
)

WORK = FunctionOfParameters("tests.ax.functions:bowl")
NAN = float("nan")


@pytest.mark.parametrize(
    ("result", "report"),
    [
        (1.5, {"": (1.5, None)}),
        (torch.tensor([2.0]), {"": (2.0, None)}),
        ((1, 0.5), {"": (1.0, 0.5)}),
        ({"loss": (1.0, NAN), "cost": np.float32(2.0)}, {"loss": (1.0, None), "cost": (2.0, None)}),
    ],
)
def test_values(result: Any, report: Any) -> None:
    assert as_report(result) == report


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"loss": NAN}, "the value is nan"),
        ({"loss": [1.0, 2.0]}, r"expected one number, got shape \(2,\)"),
        ((1.0, -1.0), "expected a standard error of at least 0, got -1.0"),
        ((1.0, float("inf")), "the value is inf"),
        (None, "expected one number, got NoneType"),
    ],
)
def test_what_is_no_outcome(result: Any, message: str) -> None:
    with pytest.raises(NoOutcomeError, match=message):
        as_report(result)


def test_each_metric_must_have_its_value() -> None:
    alone = as_report(1.0)
    assert complete(alone, ["loss"]) == {"loss": (1.0, None)}
    assert complete(as_report({"loss": 1.0, "note": 2.0}), ["loss"]) == {"loss": (1.0, None)}
    with pytest.raises(NoOutcomeError, match="loss, cost was returned, only one number"):
        complete(alone, ["loss", "cost"])
    with pytest.raises(NoOutcomeError, match="cost was returned, only values of loss"):
        complete(as_report({"loss": 1.0}), ["loss", "cost"])


def test_the_function_is_found_by_name() -> None:
    WORK.prepare()
    assert WORK.evaluate({"a": 0.6, "b": 1.3}, 0, 0) == {"": (pytest.approx(1.0), None)}
    with pytest.raises(UsageError, match="expected a function named 'nothing'"):
        FunctionOfParameters("tests.ax.functions:nothing").prepare()
