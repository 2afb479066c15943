"""What evaluates a point, wherever that happens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import numpy as np

from bo_stream.loops.optimization.trials import LARGEST

P = TypeVar("P")
"""A point."""
V = TypeVar("V")
"""An outcome."""


class NoOutcomeError(ValueError):
    """A function returned what is no outcome; the message says what was expected and what came."""


class Work(ABC, Generic[P, V]):
    """A function and how to read what it returns. A value: it can be pickled."""

    @abstractmethod
    def prepare(self) -> None:
        """Import what is needed."""

    @abstractmethod
    def measure(self, X: P, key: int, attempt: int) -> Any:
        """Whatever the function returns; the same for the same arguments where there is noise."""

    @abstractmethod
    def read(self, result: Any) -> V:
        """The outcome.

        Raises:
            NoOutcomeError: It is none.
        """


def as_number(result: Any) -> float:
    """One number of a size that models take.

    Raises:
        NoOutcomeError: It is none.
    """
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
