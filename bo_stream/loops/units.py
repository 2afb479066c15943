"""The unit in which a model is given outcomes: acquisition functions have absolute tolerances."""

from __future__ import annotations

import math
from collections.abc import Sequence

OFF = 1024.0
"""A unit serves until the outcomes' spread is this many times larger or smaller."""

_ROUNDING = 1e-9


def unit_of(Y: Sequence[float]) -> float:
    """A power of two near the spread of outcomes, so that dividing by it rounds nothing.

    Args:
        Y: At least one.
    """
    largest = max(abs(y) for y in Y)
    spread = max(max(Y) - min(Y), _ROUNDING * largest)
    return float(2.0 ** round(math.log2(spread))) if spread > 0.0 else 1.0


def is_off(unit: float, Y: Sequence[float]) -> bool:
    """Whether outcomes ask for a unit of another order.

    Args:
        unit: In use.
        Y: At least one.
    """
    return not 1.0 / OFF < unit_of(Y) / unit < OFF
