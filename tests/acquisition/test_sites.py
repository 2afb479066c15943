"""Functions and quadratic forms at many sites, without features, against those with features."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bo_stream.acquisition import criteria as module
from bo_stream.acquisition.criteria import sites
from bo_stream.bases.inducing import Basis
from bo_stream.testing.streams import assert_close
from tests.acquisition.examples import small_model, some
from tests.acquisition.test_weight_space import WithResidual


@pytest.fixture(params=[(1, 1), (2, 1), (2, 2), (3, 1), (4, 1)], ids=str)
def basis(request: pytest.FixtureRequest) -> Basis:
    dim, outputs = request.param
    options = {"grid_size": 12 if dim < 4 else 6, "tolerance": 1e-3}
    return small_model(some(dim=dim, outputs=outputs), **options).feature_process().basis


@pytest.fixture(params=["grid", "grid, weights not kept", "any basis"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(module, "CHUNK_NUMBERS", 2000)
    if request.param == "grid, weights not kept":
        monkeypatch.setattr(module, "KEPT_NUMBERS", 0)
    return request.param


def example(basis: Basis, kind: str) -> tuple[module.FeatureSites, Tensor]:
    """Sites, and their features ``m x N x r``."""
    dim = len(basis.grid.bounds[0])
    X = torch.rand(50, dim, dtype=torch.float64)
    X[:2] = torch.tensor([[0.0], [1.0]])
    wrapped = WithResidual(basis) if kind == "any basis" else basis
    return sites(wrapped, X), wrapped.features(X)


def test_functions(basis: Basis, kind: str) -> None:
    located, features = example(basis, kind)
    weights = torch.randn(features.shape[0], basis.rank, 3, dtype=torch.float64)
    assert_close(located.linear(weights), (features @ weights).mT)


def test_quadratic_forms(basis: Basis, kind: str) -> None:
    located, features = example(basis, kind)
    root = torch.randn(2, features.shape[0], basis.rank, basis.rank, dtype=torch.float64)
    matrices = root @ root.mT / basis.rank
    expected = ((features @ matrices) * features).sum(-1)
    with torch.no_grad():
        assert_close(located.quadratic(matrices), expected)
