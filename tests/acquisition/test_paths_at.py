"""Functions that are drawn jointly at given points: their law there and between, in closed form."""

from __future__ import annotations

import copy
import pickle
from itertools import groupby
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.models.transforms.input import Normalize
from botorch.models.transforms.outcome import Log
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PolynomialKernel,
    RBFKernel,
    ScaleKernel,
)
from torch import Tensor

from bo_stream import OSGPR, WISKI, AutoGP, ClusteredGP, LocalGP
from bo_stream.acquisition import mean_path, sample_paths
from bo_stream.acquisition.conditional_mean import NUGGET, is_weighted_sum
from bo_stream.bases.spectral import RandomDraws
from bo_stream.models.base import StreamingGP
from bo_stream.testing.streams import assert_close, assert_gradient, gaussian, joint_covariance
from tests.laws.cases import STREAMS
from tests.laws.registry import Stream, condition_on, shared_out

pytestmark = pytest.mark.filterwarnings("ignore:The kernel.s lengthscale is too short for the grid")

AFFINE = [s for s in STREAMS if not any(word in s.case.name for word in ("log", "power"))]
ONE_EACH = [next(group) for _, group in groupby(AFFINE, lambda s: s.case.name)]
TWO_OUTPUTS = [
    s
    for s in AFFINE
    if s.case.name in ("AutoGP, exact", "OSGPR", "ClusteredGP", "DecoupledGP", "LocalGP")
    and s.setting.outputs == 2
]


class Hyperbolic(Kernel):
    """``k(x, x') = 1 / (1 + ¼ |x − x'|² + x₁ x'₁)``: a user's own, not stationary, PSD on [0, 1]."""

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        own = x1[..., :1].cos(), x2[..., :1].cos()
        if diag:
            return (own[0] * own[1]).squeeze(-1) * torch.ones_like(x1[..., 0])
        distance = self.covar_dist(x1, x2, square_dist=True)
        return own[0] * own[1].mT / (1.0 + 0.25 * distance)


@pytest.fixture
def unit_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw N functions of N points from unit vectors: functions are linear in what is drawn."""

    def normal(draws: RandomDraws, *after: int) -> Tensor:
        assert draws.shape[0] == after[0]
        unit = torch.eye(after[0], dtype=torch.float64)
        return unit.view(after[0], *(1,) * (len(draws.shape) - 1), *after).expand(
            *draws.shape, *after
        )

    monkeypatch.setattr(RandomDraws, "normal", normal)


def assert_law(model: StreamingGP, C: Tensor, X: Tensor, factor: float = 10.0) -> None:
    """The sum of squares over unit vectors is the covariance that f(C) explains of f at X and C."""
    N = C.shape[-2]
    both = torch.cat((X.expand(*C.shape[:-2], *X.shape[-2:]), C), -2)
    paths = sample_paths(model, N, at=C)
    deviations = (paths(both) - mean_path(model)(both)).double().movedim(0, -1).transpose(-3, -2)
    covariance = joint_covariance(gaussian(model.posterior(both))).detach().double()
    cross, own = covariance[..., :, -N:], covariance[..., -N:, -N:]
    nugget = torch.diag_embed(NUGGET * own.diagonal(dim1=-2, dim2=-1))
    expected = cross @ torch.linalg.solve(own + nugget, cross.mT)
    found = deviations @ deviations.mT
    scale = covariance.abs().amax((-2, -1), keepdim=True)
    assert_close((found / scale).to(X.dtype), expected / scale, factor)


def data(n: int, d: int = 2, m: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    X = torch.rand(n, d, generator=generator, dtype=torch.float64)
    return X, torch.stack([(3.0 * X.sum(-1) + i).sin() for i in range(m)], -1)


def exact(kernel: Kernel | None = None, n: int = 12, **options: Any) -> AutoGP:
    model = AutoGP(*data(n), covar_module=kernel, families="exact", **options)
    model.likelihood.noise = 0.03
    return model.eval()


@pytest.mark.usefixtures("unit_draws")
class TestLaw:
    @pytest.mark.parametrize("stream", shared_out([*ONE_EACH, *TWO_OUTPUTS]))
    def test_is_the_posterior_there_and_its_mean_between(self, stream: Stream) -> None:
        model = stream.model(stream.data(25))
        C = stream.data(4).X
        if is_weighted_sum(model.process()):
            pytest.skip("functions are exact everywhere")
        assert_law(model, C, stream.points)

    @pytest.mark.parametrize("stream", shared_out([*ONE_EACH, *TWO_OUTPUTS]))
    def test_given_hypothetical_observations(self, stream: Stream) -> None:
        model = stream.model(stream.data(25))
        for _ in range(2):
            model = condition_on(model, stream.data(2))
        if is_weighted_sum(model.process()):
            pytest.skip("functions are exact everywhere")
        assert_law(model, stream.data(4).X, stream.points)
