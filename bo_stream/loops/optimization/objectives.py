"""Objectives: what a user optimizes, and how one evaluation of it ends."""

from __future__ import annotations

import inspect
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar

import numpy as np

from bo_stream.errors import UsageError, check_whole
from bo_stream.executors.engine import check_versions
from bo_stream.loops.models import import_function
from bo_stream.loops.optimization.trials import LARGEST, Bounds, checked_bounds
from bo_stream.storage.archive import one_line

P = TypeVar("P")  # a point
V = TypeVar("V")  # an outcome


class NoOutcomeError(ValueError):
    """An error for a returned value that is no outcome; the message names the expected one."""


class Work(ABC, Generic[P, V]):
    """A function and how to read its result; it can be pickled."""

    @abstractmethod
    def prepare(self) -> Any:
        """Import or build the function, and return it."""

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
        noise: Standard deviation of the noise, drawn for each trial and attempt.
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
            return None if self.is_own else float(self.prepare().optimal_value)
        except NotImplementedError:
            return None

    def prepare(self) -> Any:
        """Import or build the function, and return it."""
        if self.is_own:
            return import_function(self.function, "FUNCTION")
        return _test_function(self.function, self.dim)

    def evaluate(self, X: Sequence[float], key: int, attempt: int) -> float:
        """Return one number; see :class:`Work`."""
        value = self.noiseless(X)
        if value is None:
            return as_number(self.prepare()(list(X)))
        generator = np.random.default_rng((self.seed, key, attempt))
        return as_number(value + self.noise * float(generator.standard_normal()))

    def noiseless(self, X: Sequence[float]) -> float | None:
        """Return the value without noise, where it is known: of BoTorch's functions."""
        if self.is_own:
            return None
        import torch  # late: a worker that evaluates a function of the user's does without

        return float(self.prepare().evaluate_true(torch.tensor([list(X)], dtype=torch.float64)))


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
    names = {name.lower(): name for name in _classes()}
    if function.lower() not in names:
        raise UsageError(
            f"No test function {function!r}. Expected one of {', '.join(_classes())}, or "
            "package.module:function."
        )
    name = names[function.lower()]
    if bounds is not None:
        raise UsageError(f"--bounds are for functions of your own; {function!r} has its own.")
    if not 0.0 <= noise < float("inf"):
        raise UsageError(f"Expected --noise of at least 0 (a standard deviation), got {noise}.")
    if dim is not None and "dim" not in inspect.signature(_classes()[name].__init__).parameters:
        raise UsageError(f"{name} has a fixed number of inputs: leave out --dim.")
    if dim is not None:
        check_whole("--dim", dim, 1)
    try:
        box = _test_function(name, dim).bounds
    except (ValueError, NotImplementedError) as error:
        raise UsageError(
            f"{name} cannot have --dim {dim}: {error or type(error).__name__}"
        ) from error
    return Objective(name, checked_bounds(box.T.tolist()), dim, noise, seed)


@cache
def _test_function(name: str, dim: int | None) -> Any:
    return _classes()[name](**({} if dim is None else {"dim": dim}))


@cache
def _classes() -> dict[str, Any]:
    """Return BoTorch's functions of continuous inputs and one outcome without constraints."""
    from botorch.test_functions import synthetic  # late: as torch
    from botorch.test_functions.base import ConstrainedBaseTestProblem
    from botorch.test_functions.synthetic import SyntheticTestFunction

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

    def prepare(self) -> Any:
        """Import the function, and return it."""
        return import_function(self.name, "function")

    def evaluate(self, X: Mapping[str, Any], key: int, attempt: int) -> Report:
        """Return a value for each metric, or one alone; see :class:`Work`."""
        return as_report(self.prepare()(dict(X)))


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
    if np.ma.is_masked(result):
        raise NoOutcomeError("expected one number, got a masked one")
    if type(result) is int:  # of any length, where NumPy's have at most 64 bits
        if abs(result) > LARGEST:
            raise NoOutcomeError(f"the value is an integer, larger in size than {LARGEST:g}")
        result = float(result)
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


# --- tasks, their outcomes, and evaluators -------------------------------------------------------


@dataclass(frozen=True)
class Task(Generic[P]):
    """One attempt at a trial.

    Attributes:
        key: Key of the trial.
        X: The point.
        attempt: Number of the attempt, from 0.
    """

    key: int
    X: P
    attempt: int


@dataclass(frozen=True)
class Outcome(Generic[V]):
    """The result of a task.

    Attributes:
        key: Key of the trial.
        value: The outcome, or None.
        error: Reason why there is none, or None.
        seconds: Wall time.
    """

    key: int
    value: V | None
    error: str | None
    seconds: float


class Evaluator(Protocol[P, V]):
    """An object that does tasks: here, in worker processes, or on a cluster.

    A task that is submitted has one outcome, even if its function fails, unless it is cancelled.
    It may be evaluated more than once, where workers are lost; one outcome is given of it.
    An evaluator is a context manager that closes itself.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def submit(self, task: Task[P]) -> None:
        """Add a task, whose key no other task under way has."""

    def poll(self, seconds: float | None) -> Outcome[V] | None:
        """Wait for an outcome for some seconds (None: any time); None may be returned sooner.

        Raises:
            UsageError: Nothing can be evaluated any more; the message says why.
        """

    def next_outcome(self) -> Outcome[V]:
        """Wait for the next outcome, of the tasks that were submitted."""

    def cancel(self, key: int) -> None:
        """Drop a task: it has no outcome. A key that is not under way changes nothing."""

    def close(self) -> None:
        """Drop all tasks and end the processes started for them."""


class InProcess(Evaluator[P, V]):
    """An evaluator in this process, one task after the other; nothing can stop one that hangs.

    Attributes:
        capacity: Number of tasks that are done at a time.
    """

    capacity = 1

    def __init__(self, work: Work[P, V]) -> None:
        """Prepare to do a work for each task."""
        self._work = work
        self._tasks: deque[Task[P]] = deque()

    def submit(self, task: Task[P]) -> None:
        """Add a task.

        Raises:
            UsageError: One of this key waits.
        """
        if any(waiting.key == task.key for waiting in self._tasks):
            raise UsageError(f"The task {task.key} is under way: expected another key.")
        self._tasks.append(task)

    def poll(self, seconds: float | None) -> Outcome[V] | None:
        """Do the next task, however long it takes; None if there is none."""
        return self.next_outcome() if self._tasks else None

    def next_outcome(self) -> Outcome[V]:
        """Do the next task."""
        return attempt(self._work, self._tasks.popleft())

    def cancel(self, key: int) -> None:
        """Drop a task that waits."""
        self._tasks = deque(task for task in self._tasks if task.key != key)

    def close(self) -> None:
        """Drop all tasks."""
        self._tasks.clear()


def attempt(
    work: Work[P, V], task: Task[P], expected: Mapping[str, str] | None = None
) -> Outcome[V]:
    """Evaluate once; an error, or a result of the wrong type, is an outcome, too.

    Args:
        work: The function.
        task: What to evaluate.
        expected: Versions of distributions that a worker needs, which may have come later than all
            checks; None: any.

    Raises:
        UsageError: Another version is here.
    """
    if expected is not None:
        check_versions(expected)
    started = time.monotonic()
    value, error = None, None
    try:
        value = work.evaluate(task.X, task.key, task.attempt)
    except NoOutcomeError as wrong:
        error = str(wrong)
    except (Exception, SystemExit) as raised:  # the user's function may raise anything
        error = one_line(raised)
    return Outcome(task.key, value, error, time.monotonic() - started)
