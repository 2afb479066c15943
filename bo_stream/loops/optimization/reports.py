"""What a user's function returns of one parameterization."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from bo_stream.loops.optimization.imports import import_function
from bo_stream.loops.optimization.work import NoOutcomeError, Work, as_number

Value: TypeAlias = tuple[float, float | None]
"""Mean and standard error; None: not known."""
Report: TypeAlias = dict[str, Value]
"""By metric; of a function that names none, one value of the name ``ALONE``."""

ALONE = ""


@dataclass(frozen=True)
class FunctionOfParameters(Work[Mapping[str, Any], Report]):
    """``package.module:function``, which takes a dict of parameters.

    Attributes:
        name: Of the function.
    """

    name: str

    def prepare(self) -> None:
        """Import it."""
        import_function(self.name, "function")

    def measure(self, X: Mapping[str, Any], key: int, attempt: int) -> Any:
        """Call it."""
        return import_function(self.name, "function")(dict(X))

    def read(self, result: Any) -> Report:
        """A value for each metric, or one alone."""
        if isinstance(result, Mapping):
            return {str(name): _as_value(value) for name, value in result.items()}
        return {ALONE: _as_value(result)}


def _as_value(result: Any) -> Value:
    if isinstance(result, tuple) and len(result) == 2:
        return as_number(result[0]), _as_error(result[1])
    return as_number(result), None


def _as_error(sem: Any) -> float | None:
    if sem is None or (isinstance(sem, float) and math.isnan(sem)):
        return None
    value = as_number(sem)
    if value < 0.0:
        raise NoOutcomeError(f"expected a standard error of at least 0, got {value}")
    return value


def complete(report: Report, metrics: Sequence[str]) -> Report:
    """The values of all metrics.

    Args:
        report: Of a function.
        metrics: That it must report.

    Raises:
        NoOutcomeError: One is missing.
    """
    if set(report) == {ALONE} and len(metrics) == 1:
        return {metrics[0]: report[ALONE]}
    missing = [name for name in metrics if name not in report]
    if missing:
        came = "one number" if ALONE in report else f"values of {', '.join(report) or 'nothing'}"
        raise NoOutcomeError(
            f"no value of {', '.join(missing)} was returned, only {came}: expected a dict with a "
            "number, or a tuple of mean and standard error, for each metric"
        )
    return {name: report[name] for name in metrics}
