"""Data in float32 cost their own rounding: models compute in float64 whatever the data's dtype."""

from __future__ import annotations

import pytest
from gpytorch.kernels import RBFKernel

from benchmarks.accuracy.precision import CASES, MOST, SINGLE, errors

pytestmark = pytest.mark.filterwarnings("ignore:Data \\(outcome observations\\)")

NOISE, ROWS = 2.0**-10, 200


@pytest.mark.parametrize("name", CASES)
def test_a_posterior_of_float32_data_is_that_of_the_same_values_in_float64(name: str) -> None:
    # logarithms of squared residuals near zero make much of a rounded one
    most = 0.05 if name == "HeteroscedasticWISKI" else MOST
    model = CASES[name]
    assert max(errors(model, model, RBFKernel, NOISE, ROWS)) <= most


def test_float32_arithmetic_would_be_seen() -> None:
    model = CASES["ClusteredGP"]
    single = SINGLE["ClusteredGP, arithmetic in float32"]
    assert max(errors(model, single, RBFKernel, NOISE, ROWS)) > MOST
