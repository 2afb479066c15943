"""Hypothetical data folded into a weight posterior are the process conditioned on them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from torch import Tensor

from bo_stream.acquisition.feature_nipv import weight_space
from bo_stream.bases.inducing import Basis
from bo_stream.linalg import row_product
from bo_stream.process import WeightSpaceProcess
from bo_stream.testing.streams import assert_close
from tests.acquisition.examples import small_model, some
from tests.support.smooth_points import smooth_points


@dataclass(frozen=True)
class WithResidual(Basis):
    """A basis that carries half of its kernel."""

    has_residual = True
    inner: Basis

    @property
    def rank(self) -> int:
        return self.inner.rank

    def features(self, X: Tensor) -> Tensor:
        return self.inner.features(X) * 0.5**0.5

    def residual_covariance(self, X: Tensor, X2: Tensor, *features: Tensor) -> Tensor:
        return 0.5 * self.inner.features(X) @ self.inner.features(X2).mT

    def residual_variance(self, X: Tensor, features: Tensor | None = None) -> Tensor:
        return 0.5 * self.inner.features(X).square().sum(-1)


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64)


def test_of_a_model_is_its_own() -> None:
    process = small_model(some()).feature_process()
    assert weight_space(process) is process


@pytest.mark.usefixtures("both_spaces")
@pytest.mark.parametrize("outputs", [1, 2])
def test_conditions_alike(outputs: int) -> None:
    process, T = small_model(some(outputs=outputs)).process(), rand(5, 2)
    for batch in ((), (3,)):
        noise = 1e-4 + 0.1 * rand(outputs, 4)
        process = process.condition(rand(*batch, 4, 2), torch.randn(outputs, 4).double(), noise)
        folded = weight_space(process)
        assert isinstance(folded, WeightSpaceProcess)
        assert_close(folded.mean(T), process.mean(T))
        assert_close(folded.covariance(T), process.covariance(T))


@pytest.mark.usefixtures("both_spaces")
def test_is_differentiable_in_what_is_hypothetical() -> None:
    model = small_model(some())
    inputs = [smooth_points(model, 3), torch.randn(1, 3).double(), 0.1 + rand(1, 3)]
    process = model.process()

    def moments(X: Tensor, Y: Tensor, noise: Tensor) -> Tensor:
        folded = weight_space(process.condition(X, Y, noise))
        return torch.cat((folded.mean(T), folded.variance(T)))

    T = rand(2, 2)
    assert torch.autograd.gradcheck(moments, [x.requires_grad_() for x in inputs])


def test_refuses_a_residual() -> None:
    process = small_model(some()).feature_process()
    partial = WeightSpaceProcess(WithResidual(process.basis), process.weights, process.prior_mean)
    for refused in (partial, partial.condition(rand(2, 2), rand(1, 2), rand(1, 2))):
        with pytest.raises(UnsupportedError, match="WithResidual, which leaves a residual"):
            weight_space(refused)


def test_row_product_is_a_matrix_product() -> None:
    for rows, matrix in (((4, 1, 3, 5), (2, 5, 6)), ((3, 5), (2, 5, 6)), ((2, 3, 5), (5, 1))):
        A, B = rand(*rows), rand(*matrix)
        assert_close(row_product(A, B), A @ B)
