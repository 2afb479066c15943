"""BoTorch's acquisition functions of the logit of counts: gradients against differences."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from botorch.acquisition import (
    AcquisitionFunction,
    qLogExpectedImprovement,
    qNegIntegratedPosteriorVariance,
    qUpperConfidenceBound,
)
from botorch.models.model import Model
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.means import ZeroMean

from bo_stream import OSVGP, WISKI, AutoGP, BinomialLikelihood
from bo_stream.models.base import StreamingGP
from tests.models.inducing.test_counts import count_kernel, surveys

X, Y = surveys(20)
MODELS: dict[str, Callable[[BinomialLikelihood], StreamingGP]] = {
    "AutoGP": lambda counts: AutoGP(X, Y, None, counts, count_kernel(), ZeroMean()),
    "OSVGP": lambda counts: OSVGP(X, Y, counts, count_kernel(), ZeroMean(), inducing_points=X),
    "WISKI": lambda counts: WISKI(X, Y, None, counts, count_kernel(), ZeroMean()),
}


@cache
def _model(name: str, overdispersed: bool) -> StreamingGP:
    return MODELS[name](BinomialLikelihood(None, overdispersed))


def _sampler(n: int) -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size([n]), seed=1)


ACQUISITIONS: dict[str, Callable[[Model], AcquisitionFunction]] = {
    "qUCB": lambda model: qUpperConfidenceBound(model, 0.5, _sampler(16)),
    "qLogEI": lambda model: qLogExpectedImprovement(model, -1.0, _sampler(16)),
    "qNIPV": lambda model: qNegIntegratedPosteriorVariance(model, X + 0.01, sampler=_sampler(1)),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("acquisition", ACQUISITIONS)
@pytest.mark.parametrize("overdispersed", [False, True])
def test_gradients_are_those_of_differences(
    model: str, acquisition: str, overdispersed: bool
) -> None:
    chosen = ACQUISITIONS[acquisition](_model(model, overdispersed))
    at = torch.tensor([[[0.21, 0.47], [0.62, 0.83]]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(chosen(at).sum(), at)
    along = torch.tensor([[[0.3, -0.8], [0.5, 0.6]]], dtype=torch.float64)
    with torch.no_grad():
        difference = (chosen(at + 1e-5 * along) - chosen(at - 1e-5 * along)) / 2e-5
    assert float((gradient * along).sum()) == pytest.approx(float(difference), rel=1e-5, abs=1e-7)
