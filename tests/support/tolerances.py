"""The one place for tolerances: what "equal" means in each dtype."""

from __future__ import annotations

import torch

TOLERANCE: dict[torch.dtype, float] = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Two ways to compute the same number, relative to its scale."""

GRADIENT_TOLERANCE = 1e-6
"""An analytic gradient against central differences in float64, relative to the largest entry."""


def assert_close(actual: torch.Tensor, expected: torch.Tensor, factor: float = 1.0) -> None:
    """Compare values by the actual dtype's tolerance; ``expected`` may be of a higher precision.

    Entries may differ by ``factor`` tolerances, relative to the larger of 1 and the entry's size.
    """
    tolerance = factor * TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)
