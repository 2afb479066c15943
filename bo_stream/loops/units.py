"""Units of outcomes in a model, as acquisition functions have absolute tolerances."""

from __future__ import annotations

import math
from collections.abc import Sequence

OFF = 1024.0
"""Factor by which the spread of the outcomes may differ from the unit."""

_ROUNDING = 1e-9


def unit_of(Y: Sequence[float]) -> float:
    """Return a power of two near the spread of one or more outcomes: dividing by it is exact."""
    largest = max(abs(y) for y in Y)
    spread = max(max(Y) - min(Y), _ROUNDING * largest)
    return float(2.0 ** round(math.log2(spread))) if spread > 0.0 else 1.0


def is_off(unit: float, Y: Sequence[float]) -> bool:
    """Return whether a unit is of another order than the spread of one or more outcomes."""
    return not 1.0 / OFF < unit_of(Y) / unit < OFF
