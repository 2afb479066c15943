"""Covariances of weights in factors, and the change between two of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bo_stream.acquisition.gains import WeightCovariance, low_rank_change, same
from bo_stream.testing.streams import assert_close
from bo_stream.weights import WeightPosterior

RANK = 120


def covariance(m: int) -> Tensor:
    """A covariance below the identity, ``m x r x r``."""
    A = torch.randn(m, RANK, RANK, dtype=torch.float64)
    return torch.linalg.inv(torch.eye(RANK).double() + A @ A.mT)


def with_root(root: Tensor) -> WeightCovariance:
    return WeightCovariance.of(WeightPosterior.of(root[..., :1], root))


def of(matrix: Tensor) -> WeightCovariance:
    return with_root(torch.linalg.cholesky(matrix))


def observed(matrix: Tensor, count: int) -> Tensor:
    """After observations of ``count`` features."""
    z = torch.randn(matrix.shape[0], RANK, count, dtype=torch.float64)
    inner = torch.eye(count).double() + z.mT @ matrix @ z
    return matrix - matrix @ z @ torch.linalg.solve(inner, z.mT @ matrix)


@pytest.mark.parametrize("m", [1, 2])
def test_times(m: int) -> None:
    matrix, columns = covariance(m), torch.randn(m, RANK, 3, dtype=torch.float64)
    direction = 0.01 * torch.randn(m, RANK, 1, dtype=torch.float64)
    downdate = torch.cat((direction, 2.0 * direction), -1)
    found = replace(of(matrix), downdate=downdate).times(columns)
    assert_close(found, (matrix - 5.0 * direction @ direction.mT) @ columns)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 6])
def test_change_is_found(m: int, count: int) -> None:
    old = covariance(m)
    new = observed(old, count)
    for before, after in ((old, new), (new, old)):
        change = low_rank_change(of(before), of(after), count)
        assert change is not None
        directions, amounts = change
        lost = directions @ torch.diag_embed(amounts) @ directions.mT
        assert_close(before - lost, after)


def test_change_of_high_rank_is_none() -> None:
    old = covariance(1)
    assert low_rank_change(of(old), of(observed(old, 20)), 1) is None
    assert low_rank_change(of(old), of(0.9 * old), 2) is None
    assert low_rank_change(of(old), of(observed(old, 60)), 60) is None


def test_same_is_up_to_rounding() -> None:
    matrix = covariance(2)
    eigenvalues, vectors = torch.linalg.eigh(matrix)
    other = with_root(vectors * eigenvalues.sqrt().unsqueeze(-2))
    assert same(of(matrix), other)
    assert not same(of(matrix), of(matrix * (1.0 + 1e-7)))
    changed = matrix.clone()
    changed[1] = observed(matrix, 1)[1]
    assert not same(of(matrix), of(changed))
