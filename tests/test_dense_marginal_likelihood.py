"""The log density of a multivariate normal, whose gradient is in closed form."""

from __future__ import annotations

import pytest
import torch
from linear_operator.utils.errors import NotPSDError
from torch import Tensor
from torch.distributions import MultivariateNormal

from bo_stream.linalg import cholesky_with_jitter
from bo_stream.marginal_likelihood import dense_log_marginal_likelihood

DOUBLE = torch.float64


def problem(*batch: int, n: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """A covariance, values and noise variances, all of which are differentiated."""
    root = torch.randn(*batch, n, n, dtype=DOUBLE)
    values, noise = torch.randn(*batch, n, dtype=DOUBLE), 0.5 + torch.rand(*batch, n, dtype=DOUBLE)
    leaves = (root @ root.mT / n, values, noise)
    return tuple(leaf.requires_grad_() for leaf in leaves)  # type: ignore[return-value]


@pytest.mark.parametrize("batch", [(1,), (2, 2)], ids=str)
def test_value_and_gradients_are_those_of_torch(batch: tuple[int, ...]) -> None:
    """Of elements whose sum is weighted, as where priors or counts differ."""
    leaves = problem(*batch)
    covariance, values, noise = leaves
    found = dense_log_marginal_likelihood(covariance, values, noise)
    matrix = covariance + torch.diag_embed(noise)
    normal = MultivariateNormal(torch.zeros_like(values), 0.5 * (matrix + matrix.mT))
    expected = normal.log_prob(values)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.rand(batch, dtype=DOUBLE)
    gradients = [torch.autograd.grad((v * weights).sum(), leaves) for v in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-11)


def test_values_alone_take_no_inverse(monkeypatch: pytest.MonkeyPatch) -> None:
    covariance, values, noise = problem(1)
    expected = torch.autograd.grad(
        dense_log_marginal_likelihood(covariance, values, noise).sum(), values
    )
    monkeypatch.setattr(torch, "cholesky_inverse", None)
    value = dense_log_marginal_likelihood(covariance.detach(), values, noise.detach())
    torch.testing.assert_close(torch.autograd.grad(value.sum(), values), expected)


def test_gradient_in_a_scale_of_a_matrix_that_needs_a_jitter() -> None:
    """It is that of the value: ``s (C + j I)`` scales as a whole, and y has no part outside of C.

    Then ``d / d log s log N(y; 0, s (C + j I)) = ½ (yᵀ (C + j I)⁻¹ y / s − n)``.
    """
    n, scale = 12, torch.tensor(1.7, dtype=DOUBLE, requires_grad=True)
    root = torch.randn(n, 3, dtype=DOUBLE)
    C = root @ root.mT - 1e-11 * torch.eye(n, dtype=DOUBLE)  # of no smaller jitter than 1e-10
    values, none = (root @ torch.randn(3, dtype=DOUBLE))[None], torch.zeros(1, n, dtype=DOUBLE)
    factor, jitter = cholesky_with_jitter(scale.detach() * C)
    assert jitter > 0.0
    value = dense_log_marginal_likelihood((scale * C)[None], values, none)
    (gradient,) = torch.autograd.grad(value.sum(), scale)
    whitened = torch.linalg.solve_triangular(factor, values.mT, upper=False)
    expected = 0.5 * (whitened.square().sum() - n) / scale.detach()
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("entry", [torch.nan, -5.0], ids=["NaN", "indefinite"])
def test_a_matrix_that_has_no_factor_is_refused(entry: float) -> None:
    covariance, values, noise = problem(1)
    covariance.detach()[..., 2, 2] = entry
    with pytest.raises(NotPSDError, match="Check the noise variance"):
        dense_log_marginal_likelihood(covariance, values, noise)


def test_a_second_derivative_is_refused() -> None:
    leaves = problem(1)
    value = dense_log_marginal_likelihood(*leaves).sum()
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(value, leaves, create_graph=True)
