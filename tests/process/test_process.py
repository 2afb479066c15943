"""Processes against dense joint normals, with and without a residual covariance."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bo_stream.bases.inducing import Basis
from bo_stream.process import (
    ConditionedProcess,
    PosteriorProcess,
    SelectedProcess,
    WeightSpaceProcess,
)
from bo_stream.testing.streams import assert_close
from bo_stream.weights import WeightPosterior
from tests.oracles.gaussian_process import condition_in_turn

OUTPUTS = 2


@dataclass(frozen=True)
class Nystroem(Basis):
    """Squared exponential kernels on inducing points, with or without what these leave out."""

    inducing: Tensor
    lengthscales: Tensor
    has_residual: bool

    @property
    def rank(self) -> int:
        return self.inducing.shape[0]

    def kernel(self, X: Tensor, X2: Tensor) -> Tensor:
        square = (X.unsqueeze(-3).unsqueeze(-2) - X2.unsqueeze(-3).unsqueeze(-3)).square().sum(-1)
        return torch.exp(-0.5 * square / self.lengthscales[:, None, None] ** 2)

    def features(self, X: Tensor) -> Tensor:
        factor = torch.linalg.cholesky(self.kernel(self.inducing, self.inducing))
        return torch.linalg.solve(factor, self.kernel(self.inducing, X)).mT

    def residual_covariance(self, X: Tensor, X2: Tensor, *features: Tensor) -> Tensor | None:
        if not self.has_residual:
            return None
        return self.kernel(X, X2) - self.features(X) @ self.features(X2).mT

    def residual_variance(self, X: Tensor, features: Tensor | None = None) -> Tensor | None:
        return 1.0 - self.features(X).square().sum(-1) if self.has_residual else None


@pytest.fixture(params=[False, True], ids=["no residual", "residual"])
def process(request: pytest.FixtureRequest) -> WeightSpaceProcess:
    basis = Nystroem(torch.rand(5, 2).double(), torch.tensor([0.4, 0.7]).double(), request.param)
    root = 0.5 * torch.randn(OUTPUTS, 5, 5, dtype=torch.float64)
    weights = WeightPosterior.of(torch.randn(OUTPUTS, 5, 1, dtype=torch.float64), root)
    return WeightSpaceProcess(basis, weights, torch.tensor([[0.3], [-2.0]]).double())


@pytest.fixture
def conditioned() -> tuple[Tensor, Tensor, Tensor]:
    X, Y = torch.rand(3, 2).double(), torch.randn(OUTPUTS, 3).double()
    return X, Y, 0.1 + torch.rand(OUTPUTS, 3).double()


def moments(process: PosteriorProcess, X: Tensor) -> tuple[Tensor, Tensor]:
    return process.mean(X), process.covariance(X)


def assert_same(process: PosteriorProcess, mean: Tensor, covariance: Tensor, X: Tensor) -> None:
    """Every way to ask a process for its moments gives the expected ones."""
    assert_close(process.mean(X), mean)
    assert_close(process.covariance(X), covariance)
    assert_close(process.covariance(X[:2], X[1:]), covariance[..., :2, 1:])
    assert_close(process.variance(X), covariance.diagonal(dim1=-2, dim2=-1))
    joint = process.joint(X)
    assert_close(joint.mean, mean)
    assert_close(joint.covariance(), covariance)


def test_moments_are_those_of_the_weights_and_the_residual(process: WeightSpaceProcess) -> None:
    X = torch.rand(6, 2).double()
    z = process.basis.features(X)
    covariance = z @ process.weights.covariance() @ z.mT
    residual = process.basis.residual_covariance(X, X, z, z)
    covariance = covariance if residual is None else covariance + residual
    mean = process.prior_mean + (z @ process.weights.mean).squeeze(-1)
    assert_same(process, mean, covariance, X)


def test_condition_is_conditioning_the_joint_normal(
    process: WeightSpaceProcess, conditioned: tuple[Tensor, Tensor, Tensor]
) -> None:
    X, Y, noise = conditioned
    T = torch.rand(4, 2).double()
    mean, covariance = moments(process, torch.cat((X, T)))
    expected = [
        condition_in_turn(mean[a], covariance[a], [0, 1, 2], Y[a], noise[a]) for a in range(OUTPUTS)
    ]
    assert_same(
        process.condition(X, Y, noise),
        torch.stack([m[3:] for m, _ in expected]),
        torch.stack([c[3:, 3:] for _, c in expected]),
        T,
    )


def test_condition_twice_is_once(
    process: WeightSpaceProcess, conditioned: tuple[Tensor, Tensor, Tensor]
) -> None:
    X, Y, noise = conditioned
    T = torch.rand(4, 2).double()
    once = process.condition(X, Y, noise)
    twice = process.condition(X[:1], Y[:, :1], noise[:, :1])
    assert_same(twice.condition(X[1:], Y[:, 1:], noise[:, 1:]), *moments(once, T), T)


def test_a_chain_of_conditionings_has_one_base(process: WeightSpaceProcess) -> None:
    """So its cost does not multiply: every link asks the base, not the link before."""
    chain: PosteriorProcess = process
    points = torch.rand(6, 2, dtype=torch.float64)
    for x in points.split(1):
        noise = torch.full((1, 1), 0.3, dtype=torch.float64)
        chain = chain.condition(x, chain.mean(x) + 1.0, noise)
    assert isinstance(chain, ConditionedProcess)
    assert chain.base is process
    assert chain.points.X.shape[-2] == 6


def test_fantasies_in_batches_are_each_alone(
    process: WeightSpaceProcess, conditioned: tuple[Tensor, Tensor, Tensor]
) -> None:
    X = torch.rand(4, 3, 2).double()
    Y = torch.randn(5, 4, OUTPUTS, 3).double()
    T = torch.rand(4, 6, 2).double()
    fantasies = process.condition(X, Y, conditioned[2])
    mean, covariance = fantasies.mean(T), fantasies.joint(T).covariance()
    for i, j in ((0, 0), (4, 3)):
        alone = process.condition(X[j], Y[i, j], conditioned[2])
        assert_close(mean[i, j], alone.mean(T[j]))
        assert_close(covariance.expand(5, -1, -1, -1, -1)[i, j], alone.covariance(T[j]))


@pytest.mark.parametrize("outputs", [(1,), (1, 0)])
def test_selecting_outputs_and_conditioning_commute(
    process: WeightSpaceProcess,
    conditioned: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[int, ...],
) -> None:
    X, Y, noise = conditioned
    T = torch.rand(4, 2).double()
    conditioned = process.condition(X, Y, noise)
    mean, covariance = (value[list(outputs)] for value in moments(conditioned, T))
    assert_same(SelectedProcess(conditioned, outputs), mean, covariance, T)
    rows = list(outputs)
    selected = SelectedProcess(process, outputs).condition(X, Y[rows], noise[rows])
    assert_same(selected, mean, covariance, T)


def test_joint_of_selected_outputs(process: WeightSpaceProcess) -> None:
    T = torch.rand(4, 2).double()
    joint = process.joint(T).select([1])
    assert_close(joint.mean, process.mean(T)[1:])
    assert_close(joint.covariance(), process.covariance(T)[1:])
