"""Settings and trials of an optimization, and the journal of its trials."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from pathlib import Path
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar
from uuid import uuid4

from bo_stream.errors import (
    UsageError,
    as_real,
    as_whole,
    check_one_of,
    check_whole,
    encodable,
    make_plain,
)
from bo_stream.loops.models import AUTO, RunSettings
from bo_stream.storage.archive import AppendOnlyFile

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

ACQUISITIONS = ("qUCB", "qLogEI", "qLogNEI", "qSR", "TS", "random")
"""Names of the acquisitions; ``TS`` and ``random`` need no acquisition function."""

SEARCHES = ("box", "both", "region")
"""Names of the searches: of the whole box, of a trust region in it, or of one after the other."""

MOST_IN_BOX, MOST_IN_BOTH = 3, 10
"""Most inputs of which the whole box is searched to the end, and of which it is searched at first,
unless another search is named. By ``benchmarks.optimization.few_inputs``."""

FIRST_IN_BOX = 40
"""Outcomes after which a search of both goes from the whole box to a region."""

MOST_INPUTS = 21_201
"""Most inputs of a Sobol sequence of torch, from which the first points come."""

Bounds = tuple[tuple[float, float], ...]


def usual_search(dim: int) -> str:
    """Return the name of the search of so many inputs, unless another is asked for."""
    if dim <= MOST_IN_BOX:
        return "box"
    return "both" if dim <= MOST_IN_BOTH else "region"


@dataclass(frozen=True, kw_only=True)
class OptimizationSettings(RunSettings):
    """Settings that, with the trials so far, determine the next points; see also ``RunSettings``.

    Attributes:
        bounds: Low and high of each input, d pairs, at most ``MOST_INPUTS``.
        maximize: Whether large outcomes are good; else small ones are.
        initial: Points of a scrambled Sobol sequence to begin with; 0: 10, or twice the number of
            inputs where a region is searched from the first, and where the middle of the box stands
            for the first of the sequence.
        search: A name in ``SEARCHES``: ``box``; ``region``, a trust region about the best point
            with a model of the nearest outcomes; or ``both``, the box until there are
            ``FIRST_IN_BOX`` outcomes, then a region. Default (empty): ``box`` in up to
            ``MOST_IN_BOX`` inputs, and where an acquisition, another model than auto, options of
            a model or a grid are named; ``both`` in up to ``MOST_IN_BOTH``; ``region`` in more.
        acquisition: Of the search of the box: a name in ``ACQUISITIONS``, or
            ``package.module:function`` of a builder of one's own, see
            ``bo_stream.loops.optimization.acquisition``. Default (empty): ``qLogEI``.
        beta: β of ``mean + √β standard deviation`` in qUCB.
        num_restarts: Starts of the search for the best candidate.
        raw_samples: Points among which the starts are found.
        refit: As in ``RunSettings``; a region has a rule of its own, unless it is 0.
    """

    bounds: Bounds = field(kw_only=False)
    maximize: bool = False
    q: int = 1
    initial: int = 0
    search: str = ""
    acquisition: str = ""
    beta: float = 2.0
    num_restarts: int = 8
    raw_samples: int = 256
    refit: float = 1.3

    def __post_init__(self) -> None:
        make_plain(self, ("beta",))
        check_one_of("maximize", self.maximize, (True, False))
        object.__setattr__(self, "bounds", checked_bounds(self.bounds))
        if self.dim > MOST_INPUTS:
            raise UsageError(
                f"Expected bounds of at most {MOST_INPUTS:,} inputs, as many as a Sobol sequence "
                f"has, got {self.dim:,}. Search fewer of them, and fix the others."
            )
        is_named = self.acquisition != ""
        if not is_named:
            object.__setattr__(self, "acquisition", "qLogEI")
        others: dict[str, Any] = {
            "acquisition": "qLogEI",
            "model": AUTO,
            "model_options": {},
            "grid": None,
        }
        named = [name for name, default in others.items() if getattr(self, name) != default]
        if not self.search:
            for_box = named or is_named
            object.__setattr__(self, "search", "box" if for_box else usual_search(self.dim))
        check_one_of("search", self.search, SEARCHES)
        if self.search != "box" and named:
            raise UsageError(
                "A region is searched with draws of an exact model of the nearest outcomes: leave "
                f"out {' and '.join(named)}, or search the box."
            )
        if self.initial == 0:
            object.__setattr__(self, "initial", 2 * self.dim if self.search == "region" else 10)
        super().__post_init__()
        self.check_inputs(self.dim)
        check_whole("num_restarts", self.num_restarts, 1)
        check_whole("raw_samples", self.raw_samples, self.num_restarts)
        if not 0.0 <= self.beta < math.inf:
            raise UsageError(f"Expected beta of at least 0, got {self.beta}.")

    @property
    def dim(self) -> int:
        """Number d of inputs."""
        return len(self.bounds)

    @property
    def sign(self) -> float:
        """Factor of the outcomes in the model, which always maximises."""
        return 1.0 if self.maximize else -1.0

    def to_unit_cube(self, X: Sequence[Sequence[float]]) -> Tensor:
        """Scale ``n x d`` inputs from the bounds to the unit cube, in which the model has them."""
        import torch  # late: the help pages do without

        low, high = torch.tensor(self.bounds, dtype=torch.float64).unbind(-1)
        unit = (torch.tensor(X, dtype=torch.float64).reshape(-1, self.dim) - low) / (high - low)
        return unit.clamp(0.0, 1.0).to(getattr(torch, self.dtype)).to(self.device)

    def from_unit_cube(self, U: Tensor) -> list[tuple[float, ...]]:
        """Scale ``n x d`` points of the unit cube to the bounds."""
        import torch  # late: the help pages do without

        low, high = torch.tensor(self.bounds, dtype=torch.float64).unbind(-1)
        X = low + U.detach().to("cpu", torch.float64).clamp(0.0, 1.0) * (high - low)
        return [tuple(row) for row in X.clamp(low, high).tolist()]


def checked_bounds(bounds: Any) -> Bounds:
    """Return bounds, pairs or an array ``d x 2``, as pairs of floats.

    Raises:
        UsageError: There are none, or one is no interval of finite width.
    """
    pairs = bounds.tolist() if hasattr(bounds, "tolist") else bounds
    if not isinstance(pairs, Sequence) or isinstance(pairs, str) or not pairs:
        raise UsageError(
            f"Expected bounds of at least one input, a pair (low, high) for each, got {bounds!r}."
        )
    checked = []
    for i, pair in enumerate(pairs):
        try:
            low, high = pair
            is_interval = low < high and math.isfinite(high - low)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            is_interval = False
        if not is_interval:
            raise UsageError(
                f"Expected bounds of input {i} to be finite, low < high, and no farther apart than "
                f"the largest float, got {pair!r}. Give a pair (low, high) for each input."
            )
        checked.append((float(low), float(high)))
    return tuple(checked)


# --- the ledger of an optimization: every trial, with its outcome --------------------------------


Status = Literal["pending", "told", "failed", "withdrawn"]
STATUSES: tuple[Status, ...] = ("pending", "told", "failed", "withdrawn")

FEWEST = 2
"""Number of outcomes from which a model can be built."""

LARGEST = 1e75
"""Largest absolute value of an outcome: the square of a larger one overflows in a model."""

Origin = Literal["sobol", "model", "hand"]


@dataclass(frozen=True)
class Trial:
    """A point and the result of its evaluation.

    Attributes:
        key: Number from 0, in the order of asking.
        X: The point, d numbers in the units of the bounds.
        origin: Source of the point: the Sobol sequence (with the middle of the box in a region),
            the model, or a person.
        status: ``pending`` until told, failed or withdrawn.
        Y: Outcome of a told trial.
        attempts: Number of evaluations that ended, well or not.
        error: Reason of the last failed attempt, even if a later one succeeds.
        seconds: Duration of the last attempt, where it is known.
        Yvar: Known noise variance of the outcome; None: it is not known.
    """

    key: int
    X: tuple[float, ...]
    origin: Origin
    status: Status = "pending"
    Y: float | None = None
    attempts: int = 0
    error: str | None = None
    seconds: float | None = None
    Yvar: float | None = None


_CHANGING = RLock()
"""Held while trials are changed or collected, which threads may do at once."""


def _alone(method: Callable[P, R]) -> Callable[P, R]:
    """Let one thread at a time run a method that stores a trial by what it has read."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _CHANGING:
            return method(*args, **kwargs)

    return run


class Ledger:
    """Trials by key; a method changes one trial, or raises a ``UsageError`` and changes none."""

    def __init__(self, trials: Iterable[Trial] = ()) -> None:
        """Begin with trials whose keys count from 0."""
        self._trials: list[Trial] = []
        self._keys: dict[Status, set[int]] = {status: set() for status in STATUSES}
        self._origins: Counter[Origin] = Counter()
        self._changed: list[int] = []
        for trial in trials:
            self.put(trial)

    def __len__(self) -> int:
        return len(self._trials)

    def __iter__(self) -> Iterator[Trial]:
        return iter(self._trials)

    def __getitem__(self, key: int) -> Trial:
        number = as_whole(key)
        if number is None or not 0 <= number < len(self._trials):
            raise UsageError(
                f"No trial has key {key!r}: {len(self._trials)} were asked for, with keys from 0. "
                "For a point of your own, register it first."
            )
        return self._trials[number]

    @property
    def changes(self) -> int:
        """Number of changes so far."""
        return len(self._changed)

    def changed_since(self, changes: int) -> list[int]:
        """Return the keys of trials that were added or changed since there were so many changes."""
        return sorted(set(self._changed[changes:]))

    def with_status(self, *statuses: Status) -> list[Trial]:
        """Return the trials of some statuses, by key, in O(k log k) of these k."""
        with _CHANGING:  # a thread that chooses reads while outcomes come
            keys = sorted(key for status in statuses for key in self._keys[status])
        return [self._trials[key] for key in keys]

    def count(self, status: Status) -> int:
        """Count the trials of a status."""
        return len(self._keys[status])

    def outcomes(self) -> tuple[dict[int, float], dict[int, float]]:
        """Return the outcomes of told trials, and those noise variances that are known, by key."""
        told = self.with_status("told")
        outcomes = {trial.key: float(trial.Y) for trial in told if trial.Y is not None}
        return outcomes, {trial.key: trial.Yvar for trial in told if trial.Yvar is not None}

    def count_from(self, origin: Origin) -> int:
        """Count the trials of an origin, whatever became of them."""
        with _CHANGING:
            return self._origins[origin]

    @_alone
    def add(self, X: Sequence[float], origin: Origin) -> Trial:
        """Add a pending trial."""
        return self.put(Trial(len(self._trials), tuple(X), origin))

    @_alone
    def put(self, trial: Trial) -> Trial:
        """Store a trial as it is: replace the one of its key, or append it."""
        if trial.key == len(self._trials):
            self._trials.append(trial)
        else:
            former = self._trials[trial.key]
            self._keys[former.status].remove(trial.key)
            self._origins[former.origin] -= 1
            self._trials[trial.key] = trial
        self._keys[trial.status].add(trial.key)
        self._origins[trial.origin] += 1
        self._changed.append(trial.key)
        return trial

    @_alone
    def tell(
        self, key: int, Y: float, seconds: float | None = None, Yvar: float | None = None
    ) -> Trial:
        """Record the finite outcome of a pending or failed trial.

        Telling it again changes nothing; telling another one is an error.

        Args:
            key: Of the trial.
            Y: Its outcome.
            seconds: Duration of the evaluation, at least 0; None: it is not known.
            Yvar: Known noise variance of the outcome; None: it is learned.
        """
        trial, value = self[key], _checked_outcome(key, Y)
        noise = _checked("noise variance", key, Yvar, LARGEST**2)
        seconds = _checked("seconds", key, seconds)
        if trial.status == "withdrawn":
            raise UsageError(f"Trial {key} was withdrawn. To bring it back, amend it.")
        if trial.status != "told":
            attempts = trial.attempts + 1
            return self.put(
                replace(
                    trial, status="told", Y=value, attempts=attempts, seconds=seconds, Yvar=noise
                )
            )
        if (value, noise) != (trial.Y, trial.Yvar):
            raise UsageError(
                f"Trial {key} was told {_spelled(trial.Y, trial.Yvar)} already, got "
                f"{_spelled(value, noise)}. To correct it, amend it."
            )
        return trial

    @_alone
    def amend(self, key: int, Y: float, Yvar: float | None = None) -> Trial:
        """Set the outcome, a finite number, of a trial of any status.

        Its noise variance becomes the given one, unknown if there is none.
        """
        trial, value = self[key], _checked_outcome(key, Y)
        noise = _checked("noise variance", key, Yvar, LARGEST**2)
        attempts = max(trial.attempts, 1)
        return self.put(replace(trial, status="told", Y=value, attempts=attempts, Yvar=noise))

    @_alone
    def withdraw(self, key: int) -> Trial:
        """Delete a trial, told or not; withdrawing it again changes nothing."""
        return self.put(replace(self[key], status="withdrawn", Y=None, Yvar=None))

    @_alone
    def fail(self, key: int, error: str | BaseException, seconds: float | None = None) -> Trial:
        """Record that an attempt at a pending or failed trial failed, by a text or an exception."""
        trial, seconds = self[key], _checked("seconds", key, seconds)
        if isinstance(error, BaseException):
            error = f"{type(error).__name__}: {error}"
        if not isinstance(error, str):
            raise UsageError(
                f"Expected the error of trial {key} as a text or an exception, got {error!r}."
            )
        if trial.status in ("told", "withdrawn"):
            raise UsageError(
                f"Trial {key} is {trial.status}: it cannot fail any more. To drop its outcome, "
                "withdraw it."
            )
        error, attempts = encodable(error), trial.attempts + 1
        return self.put(
            replace(trial, status="failed", error=error, attempts=attempts, seconds=seconds)
        )

    @_alone
    def record(
        self, key: int, Y: float | None, error: str | None, seconds: float, retries: int
    ) -> Trial:
        """Record how an attempt at a trial ended.

        Args:
            key: Of the trial.
            Y: Its outcome; None: it failed.
            error: Reason of the failure.
            seconds: Duration of the attempt.
            retries: How often a failed trial is tried again: it is pending then.
        """
        if Y is not None:
            return self.tell(key, Y, seconds)
        trial = self.fail(key, error or "no outcome", seconds)
        return self.retry(key) if trial.attempts <= retries else trial

    @_alone
    def retry(self, key: int) -> Trial:
        """Make a failed trial pending again."""
        trial = self[key]
        if trial.status != "failed":
            raise UsageError(f"Only a failed trial can be retried; trial {key} is {trial.status}.")
        return self.put(replace(trial, status="pending"))


class NoModelError(UsageError):
    """An error for points that are asked of a model before there are outcomes for one."""

    def __init__(self) -> None:
        """Say how many it needs."""
        super().__init__(f"There is no model yet: it needs {FEWEST} outcomes.")


def all_failed(count: int, last: Trial) -> UsageError:
    """Return the error that ends a run of which every trial has failed."""
    return UsageError(
        f"All {count} trials failed, the last one with: {last.error}. Mend the function; a resumed "
        "run goes on with other points."
    )


def _checked_outcome(key: int, Y: float) -> float:
    value = as_real(Y)
    if value is None:
        raise UsageError(f"Expected one number as the outcome of trial {key}, got {Y!r}.")
    if not abs(value) <= LARGEST:
        raise UsageError(
            f"Expected a finite outcome of trial {key}, of at most {LARGEST:g} in size, got "
            f"{value}. If its evaluation failed, say fail."
        )
    return value


def _checked(what: str, key: int, value: float | None, most: float = math.inf) -> float | None:
    """Return a finite number of at least 0, or None, or raise a ``UsageError``."""
    if value is None:
        return None
    number = as_real(value)
    if number is None or not 0.0 <= number <= most or math.isinf(number):
        limit = "" if math.isinf(most) else f", and at most {most:g}"
        raise UsageError(
            f"Expected the {what} of trial {key} as a finite number of at least 0{limit}, got "
            f"{value!r}. Leave out what is not known."
        )
    return number


def _spelled(Y: float | None, Yvar: float | None) -> str:
    return f"{Y:g}" if Yvar is None else f"{Y:g} with a noise variance of {Yvar:g}"


# --- the journal ----------------------------------------------------------------------------------


JOURNAL = "trials.jsonl"
"""Name of the file, in the folder of the checkpoint."""


class Journal:
    """A file of trials, whose lines are on the disk before a method returns; of any thread.

    A checkpoint holds a model and may take a second; hundreds of workers have several outcomes a
    second. So each trial that was asked for, and each that has an outcome, is a line of a file that
    only grows between two checkpoints. What is read from both is the state at the last line.

    Its first line names the journal, and so does the checkpoint that it belongs to: a journal that
    another run has left in the folder is not read.

    Attributes:
        name: Name that the checkpoints give.
    """

    def __init__(self, folder: Path) -> None:
        """Prepare to write in a folder, from the first :meth:`begin` on."""
        self.name = uuid4().hex
        self._path = folder / JOURNAL
        self._lock = Lock()
        self._file: AppendOnlyFile | None = None
        self._recent: list[Trial] = []

    def add(self, trials: Iterable[Trial]) -> None:
        """Write the present state of some trials.

        Raises:
            OSError: The disk is full or the file cannot be written; nothing is added to it.
        """
        with self._lock:
            new = list(trials)
            self._recent += new
            if self._file is not None:
                self._file.append(b"".join(map(_line, new)))

    def mark(self) -> int:
        """Return the number of trials so far, for :meth:`begin`, before a checkpoint is written."""
        with self._lock:
            return len(self._recent)

    def begin(self, mark: int) -> None:
        """Leave out the trials before a mark: a checkpoint that holds them is on the disk.

        Whenever the process ends, a complete file is left, the old or the new one; the old one has
        the trials of the checkpoint and those since.

        Raises:
            OSError: The disk is full or the file cannot be written; the old one stays.
        """
        with self._lock:
            self._recent = self._recent[mark:]
            file = AppendOnlyFile(self._path)
            head = json.dumps({"journal": self.name}).encode() + b"\n"
            file.write(head + b"".join(map(_line, self._recent)))
            self._file = file

    def close(self) -> None:
        """Write no more; the file stays."""
        with self._lock:
            self._file = None


def trial_of(record: Mapping[str, Any]) -> Trial:
    """Build a trial of a record; former versions knew no noise variances."""
    values = {"Yvar": None, **record}
    known = {each.name: values[each.name] for each in fields(Trial)}
    return Trial(**{**known, "X": tuple(map(float, record["X"]))})


def journaled_trials(folder: Path, name: str) -> Iterator[Trial]:
    """Read the trials of the journal of a name, in their order; none if the folder has another.

    Nothing is written. A last line that was cut short is left out: it was never confirmed.

    Raises:
        UsageError: Another line is damaged.
    """
    path = folder / JOURNAL
    if not path.is_file():
        return
    lines, rest = AppendOnlyFile(path).read()
    head, *lines = lines or [rest]
    if json.loads(head) != {"journal": name}:
        return
    for number, line in enumerate(lines, 2):
        try:
            yield trial_of(json.loads(line))
        except (ValueError, TypeError, LookupError) as error:
            raise UsageError(
                f"{path} is damaged in line {number} ({error!r}). Restore the folder from a copy, "
                "or remove that line: its trial is evaluated again."
            ) from error


def _line(trial: Trial) -> bytes:
    values: dict[str, Any] = vars(trial)
    return json.dumps(values, allow_nan=False).encode() + b"\n"
