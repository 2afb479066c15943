"""Kernel matrices in float32 with far points, against squares of differences in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bo_stream.bases.kernels import matrix_between


def spoiled(A: Tensor, B: Tensor) -> Tensor:
    """As gpytorch does it: squares of distances from the mean."""
    A, B = A - A.mean(-2, keepdim=True), B - A.mean(-2, keepdim=True)
    square = A.square().sum(-1, keepdim=True) + B.square().sum(-1).unsqueeze(-2) - 2.0 * A @ B.mT
    return torch.exp(-0.5 * square.clamp_min(0.0))


def dense(A: Tensor, B: Tensor) -> Tensor:
    difference = A.double().unsqueeze(-2) - B.double().unsqueeze(-3)
    return torch.exp(-0.5 * difference.square().sum(-1))


def points(*far: float) -> Tensor:
    rows = [torch.rand(40, 3), *(torch.full((1, 3), one) + torch.rand(2, 3) for one in far)]
    return torch.cat(rows)[torch.randperm(40 + 2 * len(far))]


def near(X: Tensor) -> Tensor:
    return X.abs().amax(-1) < 2.0


@pytest.mark.parametrize("far", [(), (1e4,), (3e4, -1e7), (1e3, 1e5, 1e9)])
def test_far_points_leave_the_others_their_digits(far: tuple[float, ...]) -> None:
    Z, X = points(*far), torch.cat((points(*far), points(*far)[:3] + 0.1))
    batch = torch.rand(5, 4, 3)
    for A, B in ((Z, Z), (X, Z), (Z, X), (batch, Z), (Z, batch), (batch, batch + 0.1)):
        found = matrix_between(spoiled, A, B).double()
        told = near(A).unsqueeze(-1) | near(B).unsqueeze(-2)
        torch.testing.assert_close(found[told], dense(A, B)[told], rtol=0.0, atol=1e-5)
    whole = matrix_between(spoiled, Z, Z)
    torch.testing.assert_close(whole, whole.mT)
    if far:
        both = near(Z).unsqueeze(-1) & near(Z)
        assert float((spoiled(Z, Z).double() - dense(Z, Z))[both].abs().max()) > 1e-3


def test_no_points_and_equal_points() -> None:
    none, equal = torch.zeros(0, 3), torch.full((5, 3), 0.5)
    assert matrix_between(spoiled, none, none).shape == (0, 0)
    assert matrix_between(spoiled, equal, none).shape == (5, 0)
    assert torch.equal(matrix_between(spoiled, equal, equal), torch.ones(5, 5))


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_points_that_are_not_finite_end_in_some_block(odd: float) -> None:
    Z = points(1e5)
    Z[3] = odd
    values, between = matrix_between(dense, Z, Z), matrix_between(dense, points(), Z)
    finite = torch.arange(len(Z)) != 3
    assert values.shape == (len(Z), len(Z))
    assert bool(values[finite][:, finite].isfinite().all())
    assert bool(between[:, finite].isfinite().all())
