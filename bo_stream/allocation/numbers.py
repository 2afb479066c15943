"""Checks of numbers that allocators and models are made with."""

from __future__ import annotations

import math
from numbers import Real


def checked_number(name: str, value: object, least: int = 1) -> int:
    """A whole number of at least ``least``.

    Raises:
        ValueError: It is smaller, or none.
    """
    number = float(value) if isinstance(value, Real) else math.nan
    if not number >= least or number % 1.0 != 0.0:
        raise ValueError(
            f"Expected {name} to be a whole number of at least {least}, got {value!r}."
        )
    return int(number)
