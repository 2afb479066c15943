"""Expectations of a softmax against a dense quadrature, long sampling and known limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bo_stream.likelihoods.sites import ROWS, entropy, sampled_softmax, softmax_moments
from bo_stream.testing.streams import assert_close
from tests.oracles.classification import softmax_expectations


def scores(classes: int, scale: float) -> tuple[Tensor, Tensor]:
    mean = 3.0 * torch.randn(classes, dtype=torch.float64)
    return mean, scale * (0.5 + torch.rand(classes, dtype=torch.float64))


@pytest.mark.parametrize("scale", [1e-8, 1e-2, 1.0, 4.0])
@pytest.mark.parametrize("classes", [2, 3])
def test_moments_are_those_of_a_dense_quadrature(classes: int, scale: float) -> None:
    mean, variance = scores(classes, scale)
    moments = softmax_moments(mean, variance)
    probabilities, expected_entropy = softmax_expectations(mean, variance)
    assert_close(moments.probabilities, probabilities)
    assert_close(moments.expected_entropy, expected_entropy)


def test_large_variances_are_those_of_long_sampling() -> None:
    mean, variance = scores(4, 100.0)
    p = (mean + variance.sqrt() * torch.randn(500_000, 4, dtype=torch.float64)).softmax(-1)
    moments = softmax_moments(mean, variance)
    torch.testing.assert_close(moments.probabilities, p.mean(0), rtol=0.0, atol=2e-3)
    expected = entropy(p).mean()
    torch.testing.assert_close(moments.expected_entropy, expected, rtol=0.0, atol=2e-3)


def test_without_variance_it_is_the_softmax() -> None:
    mean = 2.0 * torch.randn(5, 3, dtype=torch.float64)
    moments = softmax_moments(mean, torch.zeros_like(mean))
    assert_close(moments.probabilities, mean.softmax(-1))
    assert_close(moments.expected_entropy, entropy(mean.softmax(-1)))
    assert_close(moments.information, torch.zeros(5, dtype=torch.float64))


def test_scores_far_apart_are_certain() -> None:
    mean = torch.tensor([-50.0, 0.0, 700.0], dtype=torch.float64)
    moments = softmax_moments(mean, torch.tensor([100.0, 0.1, 1.0], dtype=torch.float64))
    assert_close(moments.probabilities, torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))
    assert_close(moments.information, torch.zeros((), dtype=torch.float64))


def test_every_point_is_alone_whatever_comes_with_it() -> None:
    mean = torch.randn(3, ROWS, 2, dtype=torch.float64)
    variance = 5.0 * torch.rand_like(mean)
    together = softmax_moments(mean, variance)
    assert together.probabilities.shape == mean.shape
    assert_close(together.probabilities.sum(-1), torch.ones(3, ROWS, dtype=torch.float64))
    for i, j in ((0, 0), (2, ROWS - 1), (1, 7)):
        alone = softmax_moments(mean[i, j], variance[i, j])
        assert_close(together.probabilities[i, j], alone.probabilities)
        assert_close(together.expected_entropy[i, j], alone.expected_entropy)


def test_no_points_have_no_moments() -> None:
    nothing = torch.empty(0, 3, dtype=torch.float64)
    moments = softmax_moments(nothing, nothing)
    assert moments.probabilities.shape == (0, 3)
    assert moments.information.shape == (0,)


def test_twice_the_step_has_the_root_of_the_accuracy() -> None:
    mean, variance = scores(3, 2.0)
    coarse, exact = softmax_moments(mean, variance, 0.84), softmax_expectations(mean, variance)
    for actual, expected in zip(
        (coarse.probabilities, coarse.expected_entropy), exact, strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-3)


def test_gradients_are_those_of_differences() -> None:
    mean = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    variance = torch.rand(2, 3, dtype=torch.float64).add(0.1).requires_grad_()

    def moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        found = softmax_moments(mean, variance)
        return found.probabilities, found.information

    assert torch.autograd.gradcheck(moments, (mean, variance))


def test_sampling_converges_to_the_quadrature() -> None:
    mean, variance = scores(3, 1.0)
    exact = softmax_moments(mean, variance).probabilities
    drawn = sampled_softmax(mean, variance, 20_000, seed=3)
    torch.testing.assert_close(drawn, exact, rtol=0.0, atol=0.01)
    few, same, other = (sampled_softmax(mean, variance, 50, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(few, same)
    assert not torch.equal(few, other)
