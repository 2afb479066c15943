"""The ledger: every point that was ever asked for, and what became of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from bo_stream.loops.errors import UsageError

Status = Literal["pending", "told", "failed", "withdrawn"]
STATUSES: tuple[Status, ...] = ("pending", "told", "failed", "withdrawn")

LARGEST = 1e75
"""Largest size of an outcome: the square of what is beyond is of no use to a model."""

Origin = Literal["sobol", "model", "hand"]

History = Literal["csv", "parquet"]
HISTORIES: tuple[History, ...] = ("csv", "parquet")
"""Kinds of files of all trials."""


@dataclass(frozen=True)
class Trial:
    """One point and what is known of it.

    Attributes:
        key: Counts from 0, in the order of asking.
        X: The point, d numbers in the units of the bounds.
        origin: The Sobol sequence, the model, or a person's hand.
        status: ``pending`` until told, failed or withdrawn.
        Y: The outcome, of a told trial.
        attempts: Evaluations that came to an end, well or not.
        error: Why the last failed attempt failed; kept when a later one succeeds.
        seconds: Duration of the last attempt, where it is known.
    """

    key: int
    X: tuple[float, ...]
    origin: Origin
    status: Status = "pending"
    Y: float | None = None
    attempts: int = 0
    error: str | None = None
    seconds: float | None = None

    def as_record(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return dict(vars(self))

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """From plain values, as JSON gives them back."""
        return cls(**{**record, "X": tuple(record["X"])})


class Ledger:
    """Trials by key. Every verb checks first and changes one trial, or raises and changes none."""

    def __init__(self, trials: Iterable[Trial] = ()) -> None:
        """Begin with trials whose keys count from 0."""
        self._trials = list(trials)

    def __len__(self) -> int:
        return len(self._trials)

    def __iter__(self) -> Iterator[Trial]:
        return iter(self._trials)

    def __getitem__(self, key: int) -> Trial:
        """The trial of a key.

        Raises:
            UsageError: There is none.
        """
        if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < len(self._trials):
            raise UsageError(
                f"No trial has key {key!r}: {len(self._trials)} were asked for, with keys from 0. "
                "For a point of your own, register it first."
            )
        return self._trials[key]

    def with_status(self, *statuses: Status) -> list[Trial]:
        """Trials of some statuses, by key. Cost O(n) in all trials."""
        return [trial for trial in self._trials if trial.status in statuses]

    def add(self, X: Sequence[float], origin: Origin) -> Trial:
        """A new pending trial."""
        trial = Trial(len(self._trials), tuple(X), origin)
        self._trials.append(trial)
        return trial

    def tell(self, key: int, Y: float, seconds: float | None = None) -> Trial:
        """Record an outcome of a pending or failed trial; the same one again changes nothing.

        Raises:
            UsageError: An unknown key, no finite outcome, another outcome than was told before, or
                a withdrawn trial.
        """
        trial, value = self[key], _checked_outcome(key, Y)
        if trial.status == "withdrawn":
            raise UsageError(f"Trial {key} was withdrawn. To bring it back, amend it.")
        if trial.status != "told":
            return self._put(replace(_attempted(trial, seconds), status="told", Y=value))
        if value != trial.Y:
            raise UsageError(
                f"Trial {key} was told {trial.Y:g} already, got {value:g}. To correct it, amend it."
            )
        return trial

    def amend(self, key: int, Y: float) -> Trial:
        """Set the outcome of any trial, whatever was said of it before.

        Raises:
            UsageError: An unknown key, or no finite outcome.
        """
        trial, value = self[key], _checked_outcome(key, Y)
        attempts = max(trial.attempts, 1)
        return self._put(replace(trial, status="told", Y=value, attempts=attempts))

    def withdraw(self, key: int) -> Trial:
        """Drop a trial, told or not; again changes nothing.

        Raises:
            UsageError: An unknown key.
        """
        return self._put(replace(self[key], status="withdrawn", Y=None))

    def fail(self, key: int, error: str, seconds: float | None = None) -> Trial:
        """Record that an attempt came to nothing.

        Raises:
            UsageError: An unknown key, or a trial that was told or withdrawn.
        """
        trial = self[key]
        if trial.status in ("told", "withdrawn"):
            raise UsageError(
                f"Trial {key} is {trial.status}: it cannot fail any more. To drop its outcome, "
                "withdraw it."
            )
        return self._put(replace(_attempted(trial, seconds), status="failed", error=error))

    def retry(self, key: int) -> Trial:
        """Make a failed trial pending again.

        Raises:
            UsageError: An unknown key, or a trial that has not failed.
        """
        trial = self[key]
        if trial.status != "failed":
            raise UsageError(f"Only a failed trial can be retried; trial {key} is {trial.status}.")
        return self._put(replace(trial, status="pending"))

    def _put(self, trial: Trial) -> Trial:
        self._trials[trial.key] = trial
        return trial


def _attempted(trial: Trial, seconds: float | None) -> Trial:
    return replace(trial, attempts=trial.attempts + 1, seconds=seconds)


def _checked_outcome(key: int, Y: float) -> float:
    try:
        value = float(Y)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(
            f"Expected one number as the outcome of trial {key}, got {Y!r}."
        ) from error
    if not abs(value) <= LARGEST:
        raise UsageError(
            f"Expected a finite outcome of trial {key}, of at most {LARGEST:g} in size, got "
            f"{value}. If its evaluation failed, say fail."
        )
    return value
