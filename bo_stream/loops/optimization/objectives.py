"""Objectives: BoTorch's test functions, and functions of the user's own."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from botorch.test_functions import synthetic
from botorch.test_functions.base import ConstrainedBaseTestProblem
from botorch.test_functions.synthetic import SyntheticTestFunction

from bo_stream.errors import UsageError
from bo_stream.loops.optimization.settings import Bounds, checked_bounds
from bo_stream.loops.optimization.trials import LARGEST
from bo_stream.loops.own_functions import import_function

P = TypeVar("P")  # a point
V = TypeVar("V")  # an outcome


class NoOutcomeError(ValueError):
    """An error for a returned value that is no outcome; the message says what was expected."""


class Work(ABC, Generic[P, V]):
    """A function and how to read what it returns; it can be pickled."""

    @abstractmethod
    def prepare(self) -> None:
        """Import or build what is needed."""

    @abstractmethod
    def evaluate(self, X: P, key: int, attempt: int) -> V:
        """Evaluate, or raise a ``NoOutcomeError``; noise depends on the arguments alone."""


@dataclass(frozen=True)
class Objective(Work[tuple[float, ...], float]):
    """A function of d inputs and one outcome: one of BoTorch's, or the user's own.

    Attributes:
        function: Name of a class of BoTorch, or ``package.module:function``, which takes a list of
            d floats and returns one number.
        bounds: Low and high of each input.
        dim: Number of inputs, for classes that leave it open.
        noise: Standard deviation of the noise, drawn anew for each trial and attempt.
        seed: Seed of the noise.
    """

    function: str
    bounds: Bounds
    dim: int | None = None
    noise: float = 0.0
    seed: int = 0

    @property
    def is_own(self) -> bool:
        """Whether it is the user's own code."""
        return ":" in self.function

    @property
    def optimum(self) -> float | None:
        """Least value, where it is known."""
        try:
            return None if self.is_own else float(self._callable().optimal_value)
        except NotImplementedError:
            return None

    def prepare(self) -> None:
        """Import or build the function."""
        self._callable()

    def _callable(self) -> Any:
        if self.is_own:
            return import_function(self.function, "FUNCTION")
        return _test_function(self.function, self.dim)

    def evaluate(self, X: Sequence[float], key: int, attempt: int) -> float:
        """Return one number; see :class:`Work`."""
        value = self.noiseless(X)
        if value is None:
            return as_number(self._callable()(list(X)))
        generator = np.random.default_rng((self.seed, key, attempt))
        return as_number(value + self.noise * float(generator.standard_normal()))

    def noiseless(self, X: Sequence[float]) -> float | None:
        """Return the value without noise, where it is known: of BoTorch's functions."""
        if self.is_own:
            return None
        return float(self._callable().evaluate_true(torch.tensor([list(X)], dtype=torch.float64)))


def find_objective(
    function: str, dim: int | None, noise: float, bounds: Bounds | None, seed: int
) -> Objective:
    """Return the objective of a name.

    Args:
        function: Name of a test function of BoTorch (capitals do not matter), or
            ``package.module:function``.
        dim: Number of inputs of a test function that leaves it open.
        noise: Standard deviation of a test function's noise.
        bounds: Bounds of one's own function.
        seed: Seed of the noise.

    Raises:
        UsageError: No such function, or an option that does not fit it.
    """
    if ":" in function:
        return _own_function(function, dim, noise, bounds, seed)
    if bounds is not None:
        raise UsageError(f"--bounds are for functions of your own; {function!r} has its own.")
    if not 0.0 <= noise < float("inf"):
        raise UsageError(f"Expected --noise of at least 0 (a standard deviation), got {noise}.")
    names = {name.lower(): name for name in _classes()}
    if function.lower() not in names:
        raise UsageError(
            f"No test function {function!r}. Expected one of {', '.join(_classes())}, or "
            "package.module:function."
        )
    name = names[function.lower()]
    if dim is not None and "dim" not in inspect.signature(_classes()[name].__init__).parameters:
        raise UsageError(f"{name} has a fixed number of inputs: leave out --dim.")
    try:
        box = _test_function(name, dim).bounds
    except (ValueError, NotImplementedError) as error:
        raise UsageError(
            f"{name} cannot have --dim {dim}: {error or type(error).__name__}"
        ) from error
    return Objective(name, checked_bounds(box.T.tolist()), dim, noise, seed)


def _own_function(
    function: str, dim: int | None, noise: float, bounds: Bounds | None, seed: int
) -> Objective:
    if noise or dim is not None:
        raise UsageError(
            f"--dim and --noise are for test functions; {function!r} is your own: say --bounds."
        )
    if bounds is None:
        raise UsageError(
            f"Say the bounds of each input of {function!r}, as in --bounds '0,1 -5,5'."
        )
    objective = Objective(function, checked_bounds(bounds), len(bounds), seed=seed)
    objective.prepare()
    return objective


@cache
def _test_function(name: str, dim: int | None) -> Any:
    return _classes()[name](**({} if dim is None else {"dim": dim}))


@cache
def _classes() -> dict[str, Any]:
    """Return BoTorch's functions of continuous inputs and one outcome without constraints."""
    others = (SyntheticTestFunction, synthetic.AckleyMixed, synthetic.Labs)  # abstract, discrete
    return {
        name: kind
        for name, kind in inspect.getmembers(synthetic, inspect.isclass)
        if issubclass(kind, SyntheticTestFunction)
        and not issubclass(kind, ConstrainedBaseTestProblem)
        and not inspect.isabstract(kind)
        and kind not in others
    }


Value: TypeAlias = tuple[float, float | None]
"""Mean and standard error, None if it is not known."""
Report: TypeAlias = dict[str, Value]
"""Values by metric; one value of the name ``ALONE`` if the function names none."""

ALONE = ""


@dataclass(frozen=True)
class FunctionOfParameters(Work[Mapping[str, Any], Report]):
    """A function of a dict of parameters, which may return several metrics.

    Attributes:
        name: ``package.module:function``.
    """

    name: str

    def prepare(self) -> None:
        """Import the function."""
        import_function(self.name, "function")

    def evaluate(self, X: Mapping[str, Any], key: int, attempt: int) -> Report:
        """Return a value for each metric, or one alone; see :class:`Work`."""
        return as_report(import_function(self.name, "function")(dict(X)))


def as_report(result: Any) -> Report:
    """Convert a result to a value for each metric, or one alone, or raise a ``NoOutcomeError``."""
    if isinstance(result, Mapping):
        return {str(name): _as_value(value) for name, value in result.items()}
    return {ALONE: _as_value(result)}


def _as_value(result: Any) -> Value:
    mean, sem = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if sem is None or (isinstance(sem, float) and math.isnan(sem)):
        return as_number(mean), None
    error = as_number(sem)
    if error < 0.0:
        raise NoOutcomeError(f"expected a standard error of at least 0, got {error}")
    return as_number(mean), error


def complete(report: Report, metrics: Sequence[str]) -> Report:
    """Return the values of the required metrics of a report, or raise a ``NoOutcomeError``."""
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


def as_number(result: Any) -> float:
    """Convert a result to one number, not too large for a model, or raise a ``NoOutcomeError``."""
    array = np.asarray(result)
    if array.dtype.kind not in "iuf":
        name, text = type(result).__name__, str(result)[:40]
        raise NoOutcomeError(f"expected one number, got {name} {text!r}")
    if array.shape not in ((), (1,)):
        raise NoOutcomeError(f"expected one number, got shape {array.shape}")
    value = float(array.reshape(()))
    if abs(value) <= LARGEST:
        return value
    excess = f", larger in size than {LARGEST:g}" if np.isfinite(value) else ""
    raise NoOutcomeError(f"the value is {value}{excess}")
