"""The error for mistakes that a user of the loops can correct, and checks that raise it."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np


class UsageError(ValueError):
    """An error for data, a setting or a file that cannot be used; the message says what to do.

    The command line shows it as one line and exits with code 2.
    """


def check_whole(name: str, value: Any, least: int = 1) -> int:
    """Return a whole number as an int, or raise a ``UsageError`` if it is none or below the least.

    It may be one of NumPy, or a tensor of one number.
    """
    number = as_whole(value)
    if number is None or number < least:
        raise UsageError(
            f"Expected {name} to be a whole number of at least {least}, got {value!r}."
        )
    return number


def check_seed(seed: Any) -> int:
    """Return a seed as an int, or raise a ``UsageError`` if it is none from 0 to 2**63 - 1."""
    number = check_whole("seed", seed, 0)
    if number >= 2**63:
        raise UsageError(f"Expected seed from 0 to 2**63 - 1, got {number}.")
    return number


def as_whole(value: Any) -> int | None:
    """Return a whole number of Python, NumPy or torch as an int, None for anything else."""
    if type(value) is int:
        return value
    value = plain(value)
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def as_real(value: Any) -> float | None:
    """Return one real number of any class as a float, None for anything else: texts, times, bools.

    It may be an array or a tensor of one entry, and is infinite where a float cannot hold it.
    """
    if np.ma.is_masked(value) or isinstance(value, _NO_NUMBERS):
        return None
    try:
        is_time = getattr(getattr(value, "dtype", None), "kind", "f") in "mM"
        number = value.item() if hasattr(value, "item") and not is_time else value
        return None if is_time or isinstance(number, _NO_NUMBERS) else float(number)
    except OverflowError:
        return -math.inf if number < 0 else math.inf
    except (TypeError, ValueError, RuntimeError):
        return None


_NO_NUMBERS = (bool, str, bytes, bytearray, memoryview, np.datetime64, np.timedelta64)


def plain(value: Any) -> Any:
    """Return a number of NumPy or a tensor of no dimension as Python's, other values unchanged.

    So are those in lists, tuples and mappings.
    """
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    return value.item() if getattr(value, "shape", None) == () else value


def encodable(text: str) -> str:
    """Return a text that a file in UTF-8 can hold: surrogates, as in names of files, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def make_plain(settings: Any, numbers: Iterable[str] = ()) -> None:
    """Replace the fields of a dataclass, which may be frozen, by their plain values, in place.

    Args:
        settings: The dataclass.
        numbers: Names of fields that are to be numbers, or None where that is the default.

    Raises:
        UsageError: One of these is something else.
    """
    for each in fields(settings):
        object.__setattr__(settings, each.name, plain(getattr(settings, each.name)))
    for name in numbers:
        value = getattr(settings, name)
        unset = value is None and getattr(type(settings), name, 0) is None
        if isinstance(value, bool) or not (unset or isinstance(value, int | float)):
            raise UsageError(f"Expected {name} to be a number, got {value!r}.")


def check_one_of(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise a ``UsageError`` unless a value is one of the choices."""
    choices = tuple(choices)
    if value not in choices:
        known = ", ".join(map(str, choices))
        raise UsageError(f"Expected {name} to be one of {known}, got {value!r}.")
