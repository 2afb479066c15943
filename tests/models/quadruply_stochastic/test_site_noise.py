"""How sharp a likelihood is, against its own variance and curvature."""

from __future__ import annotations

import pytest
import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
)
from torch import Tensor

from bo_stream.likelihoods.outcome_model import LogisticLikelihood
from bo_stream.models.quadruply_stochastic.inference import site_noise
from bo_stream.testing.streams import assert_close


@pytest.mark.parametrize("likelihood", [GaussianLikelihood(), LaplaceLikelihood()])
def test_real_outcomes_have_their_own_variance(likelihood: Likelihood) -> None:
    likelihood.noise = 0.37
    own = likelihood(torch.zeros(1)).variance
    assert_close(site_noise(likelihood).detach(), own.detach())


@pytest.mark.parametrize("likelihood", [BernoulliLikelihood(), LogisticLikelihood()])
def test_labels_have_one_over_the_curvature_at_zero(likelihood: Likelihood) -> None:
    def log_probability(f: Tensor) -> Tensor:
        return likelihood(f).log_prob(torch.ones(()))

    curvature = torch.autograd.functional.hessian(log_probability, torch.zeros(()).double())
    assert_close(site_noise(likelihood), -1.0 / curvature.reshape(1))
