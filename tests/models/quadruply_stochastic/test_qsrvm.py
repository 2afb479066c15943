"""QSRVM: precisions at their optimum, and a sparse model of a sinc."""

from __future__ import annotations

import math

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import GaussianLikelihood, LaplaceLikelihood

from bo_stream.models.quadruply_stochastic.memory import Chevron
from bo_stream.models.quadruply_stochastic.qsgp import QSRVM, RELEVANT
from bo_stream.models.quadruply_stochastic.steps import LARGEST, best_precisions


def _loss(s: torch.Tensor, moment: float, sharpness: float) -> torch.Tensor:
    """``L_Σ + L_μ + L_const`` of one weight with its variance at Proposition 1's."""
    variance = 1.0 / (sharpness + s)
    return (sharpness + s) * variance - variance.log() + s * moment - s.log()


@pytest.mark.parametrize("moment", [1e-4, 0.3, 5.0])
@pytest.mark.parametrize("sharpness", [0.2, 40.0])
def test_precisions_are_where_the_bound_is_best(moment: float, sharpness: float) -> None:
    best = best_precisions(*(torch.tensor([v], dtype=torch.float64) for v in (moment, sharpness)))
    best.requires_grad_()
    (slope,) = torch.autograd.grad(_loss(best, moment, sharpness).sum(), best)
    assert abs(float(slope * best.detach())) < 1e-10
    for factor in (0.9, 1.1):
        assert _loss(factor * best, moment, sharpness) > _loss(best, moment, sharpness)


def test_a_weight_of_zero_has_the_largest_precision() -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    assert float(best_precisions(zero, zero + 3.0)) == pytest.approx(LARGEST)


@pytest.mark.integration
def test_a_sinc_needs_few_functions() -> None:
    X = torch.linspace(-10.0, 10.0, 100, dtype=torch.float64).unsqueeze(-1)
    truth = torch.sinc(X / math.pi)
    Y = truth + 0.05 * torch.randn_like(truth)
    kernel, likelihood = RBFKernel().double(), GaussianLikelihood().double()
    kernel.lengthscale, likelihood.noise = 1.6, 0.0025
    options = {"outcome_transform": None, "initial_points": 0, "update_steps": 0}
    model = QSRVM(X, Y, likelihood, kernel, covariance=Chevron(2), freeze_steps=50, **options)
    assert len(model.relevance_vectors) == 100
    model.fit(steps=700, progress=False)
    assert len(model.relevance_vectors) < 50
    assert model.precisions.shape == (100,)
    assert int((model.precisions < RELEVANT).sum()) == len(model.relevance_vectors)
    assert float((model.posterior(X).mean - truth).std()) < 0.03


def test_other_likelihoods_are_refused() -> None:
    X = torch.rand(4, 1, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match=r"LaplaceLikelihood.*QSGP"):
        QSRVM(X, X, LaplaceLikelihood())


def test_a_cleared_model_has_forgotten_its_precisions() -> None:
    X = torch.rand(12, 1, dtype=torch.float64)
    model = QSRVM(X, X.sin(), freeze_steps=0)
    assert bool((model.precisions != 1.0).any())
    assert bool((model.clear().precisions == 1.0).all())
    assert model.update(X, X.sin()).num_observations == 12
