"""Missing covariates, scales, and predictions of another regressor."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import InputDataError

from bo_stream.mapping import fill_missing, map_inputs, map_kernel, out_of_fold

SITES = torch.tensor(
    [[179.9, 0.0, 1.0, 7.0], [-179.9, 0.0, math.nan, 8.0], [179.0, 0.0, 3.0, -9999.0]]
).double()


def test_missing_values_are_those_of_the_nearest_site_across_the_date_line() -> None:
    filled = fill_missing(SITES)
    assert filled[:, 2].tolist() == [1.0, 1.0, 3.0]
    assert filled[:, 3].tolist() == [7.0, 8.0, 7.0]
    assert math.isnan(SITES[1, 2])


def test_values_are_looked_up_among_other_sites() -> None:
    cell = torch.tensor([[179.25, 0.125, math.nan, -9999.0]]).double()
    assert fill_missing(cell, SITES)[0].tolist() == [179.25, 0.125, 3.0, 7.0]


def test_a_covariate_that_no_site_has_is_named() -> None:
    X = SITES.clone()
    X[:, 2] = math.nan
    with pytest.raises(InputDataError, match="covariate 2 at one site"):
        fill_missing(X)


def test_inputs_of_a_map_are_kilometres_and_standardised() -> None:
    X = torch.cat((fill_missing(SITES), torch.full((3, 1), 5.0).double()), -1)
    inputs = map_inputs(X)(X)
    assert float(inputs[:, :2].norm(dim=-1).max()) == pytest.approx(80.0, rel=0.1)  # 0.7 degrees
    torch.testing.assert_close(inputs[:, 2:4].std(0), torch.ones(2).double())
    torch.testing.assert_close(inputs[:, 2:].mean(0), torch.zeros(3).double())
    assert torch.equal(map_inputs(X[:, :2])(X[:, :2]), inputs[:, :2])


def test_missing_values_do_not_get_into_scales() -> None:
    with pytest.raises(InputDataError, match="fill_missing"):
        map_inputs(SITES)


@pytest.mark.parametrize("units", ["degrees", "kilometres"])
def test_no_sites_are_refused(units: Any) -> None:
    for make in (map_inputs, map_kernel):
        with pytest.raises(InputDataError, match=r"at least one site, got none, of shape \(0, 4\)"):
            make(SITES[:0], units=units)


class Memory:
    """Predicts the outcome of a row that it has seen, and -1 of any other."""

    def fit(self, X: Any, y: Any) -> Self:
        self.seen = dict(zip(map(tuple, X), y, strict=True))
        return self

    def predict(self, X: Any) -> Any:
        return np.array([self.seen.get(tuple(row), -1.0) for row in X])


@pytest.mark.parametrize("folds", [5, np.int64(5), torch.tensor(5), [0, 0, 1, 1, 2, 2, 3, 3]])
def test_rows_are_predicted_without_their_fold(folds: Any) -> None:
    X, y = np.arange(16.0).reshape(8, 2), np.arange(8.0)
    regressor = Memory()
    held, whole = out_of_fold(regressor, X, y, folds)
    assert (held == -1.0).all()
    assert (whole.predict(X) == y).all()
    assert not hasattr(regressor, "seen")


def test_rows_that_do_not_match_and_single_folds_are_refused() -> None:
    with pytest.raises(ValueError, match="got 3, 2 and 3"):
        out_of_fold(Memory(), np.ones((3, 2)), [1.0, 2.0])
    for folds in (1, 0, -3):
        with pytest.raises(ValueError, match="two at least"):
            out_of_fold(Memory(), np.ones((3, 2)), np.ones(3), folds)
    with pytest.raises(ValueError, match="got 3, 3 and 1"):
        out_of_fold(Memory(), np.ones((3, 2)), np.ones(3), 2.5)  # type: ignore[arg-type]
