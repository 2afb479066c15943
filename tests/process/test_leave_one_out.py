"""The closed form of leaving one out against leaving it out."""

from __future__ import annotations

import torch

from bo_stream.process import leave_one_out
from bo_stream.testing.streams import assert_close
from tests.oracles.gaussian_process import DenseGP


def gp_of_nine() -> DenseGP:
    """Of noisy numbers."""
    X, y, noise = torch.rand(9, 1).double(), torch.randn(9).double(), 0.1 + torch.rand(9).double()
    kernel = lambda A, B: (-8.0 * (A - B.mT).square()).exp()  # noqa: E731
    return DenseGP(kernel, torch.tensor([0.4]).double(), X, y, noise)


def test_leaving_one_out_is_predicting_it_from_the_others() -> None:
    gp = gp_of_nine()
    mean, covariance = gp.posterior(gp.X)
    means, variances = leave_one_out(gp.y, mean, covariance.diagonal(), gp.noise)
    for i in range(9):
        expected_mean, expected_variance = gp.without([i]).posterior(gp.X[[i]])
        assert_close(means[[i]], expected_mean)
        assert_close(variances[[i]], expected_variance[0])


def test_what_an_observation_is_told_of_itself_is_at_least_a_share() -> None:
    gp = gp_of_nine()
    means, variances = leave_one_out(gp.y, gp.y + 1.0, 2.0 * gp.noise, gp.noise, 0.01)
    assert_close(means, gp.y + 100.0)
    assert_close(variances, 200.0 * gp.noise)
