"""Differences between multisets of rows."""

from __future__ import annotations

import pytest
import torch
from botorch.utils.datasets import SupervisedDataset

from bo_stream.ax.surrogate import DataRows, noise_floor


def rows(values: list[tuple[float, float, float]]) -> DataRows:
    table = torch.tensor(values, dtype=torch.float64).reshape(-1, 3)
    return DataRows(table[:, :1], table[:, 1:2], table[:, 2:])


NAN = float("nan")


def test_order_does_not_count() -> None:
    held, wanted = rows([(0, 1, NAN), (1, 2, NAN)]), rows([(1, 2, NAN), (2, 5, NAN), (0, 1, NAN)])
    assert wanted.without(held).X.tolist() == [[2.0]]
    assert len(held.without(wanted)) == 0


def test_equal_rows_count_as_often_as_they_stand() -> None:
    held = rows([(0, 1, NAN), (0, 1, NAN)])
    assert len(rows([(0, 1, NAN)] * 5).without(held)) == 3
    assert len(held.without(rows([(0, 1, NAN)]))) == 1


def test_another_outcome_or_noise_is_another_row() -> None:
    held, wanted = rows([(0, 1, NAN), (1, 1, 0.5)]), rows([(0, 2, NAN), (1, 1, NAN)])
    assert wanted.without(held).Y.tolist() == [[2.0], [1.0]]
    assert held.without(wanted).Y.tolist() == [[1.0], [1.0]]


def test_the_sign_of_zero_does_not_count() -> None:
    held, wanted = rows([(0.0, -0.0, NAN)]), rows([(-0.0, 0.0, -NAN)])
    assert (len(wanted.without(held)), len(held.without(wanted))) == (0, 0)


def test_noise_is_none_where_none_is_known() -> None:
    assert rows([(0, 1, NAN)]).known_noise is None
    assert rows([(0, 1, NAN), (0, 1, 2.0)]).known_noise is not None


def test_known_noise_is_raised_to_the_floor_and_unknown_noise_stays() -> None:
    Y = torch.tensor([[1.0], [3.0], [5.0]])
    names = {"feature_names": ["x"], "outcome_names": ["y"]}
    Yvar = torch.tensor([[0.0], [0.5], [NAN]])
    data = SupervisedDataset(torch.zeros(3, 1), Y, Yvar=Yvar, **names)
    assert DataRows.of(data, noise_floor(data)).Yvar[:2, 0].tolist() == pytest.approx(
        [8e-5 / 3, 0.5]
    )
    assert bool(DataRows.of(data, 0.1).Yvar[2].isnan())
    alone = SupervisedDataset(torch.zeros(1, 1), Y[:1], **names)
    assert noise_floor(alone) == pytest.approx(1e-5)
