"""Statistics of few observations as roots, and the likelihood by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream import WISKI
from bo_stream.bases.kernels import ProductMatern
from bo_stream.marginal_likelihood import (
    NoiseGroup,
    low_rank_root_of,
    subspace_log_marginal_likelihood,
)
from bo_stream.testing.streams import assert_close
from bo_stream.weights import Whitened, weighted_statistics

R = 40


def statistics(n: int, batch: int = 1, equal: int = 0) -> Whitened:
    """Of n observations; in the last batch element ``equal`` of them have the same features."""
    features = torch.randn(batch, n, R, dtype=torch.float64)
    features[-1, :equal] = features[-1, :1]
    y, noise = torch.randn(batch, n).double(), 0.1 + torch.rand(batch, n).double()
    return weighted_statistics(features, y, noise, torch.ones_like(y))


def prior() -> Tensor:
    root = torch.randn(R, R, dtype=torch.float64) / R**0.5
    return root @ root.mT


@pytest.mark.parametrize("n", [0, 1, 7, 10])
@pytest.mark.parametrize("equal", [0, 4])
def test_a_root_is_the_statistics(n: int, equal: int) -> None:
    whole = statistics(n, batch=3, equal=min(equal, n))
    root = low_rank_root_of(whole)
    assert root is not None
    assert root.G.shape == (3, R, n)
    assert_close(root.G @ root.G.mT, whole.gram)
    assert_close(root.G @ root.b, whole.moment)


def test_no_root_where_it_would_not_pay() -> None:
    assert low_rank_root_of(statistics(10)) is not None
    assert low_rank_root_of(statistics(11)) is None
    faded = statistics(30).scale(0.1)
    assert float(faded.count) < 10
    assert low_rank_root_of(faded) is None


@pytest.mark.parametrize("sizes", [(9,), (4, 6), (8, 0)])
def test_the_likelihood_and_its_gradient_are_the_same(sizes: tuple[int, ...]) -> None:
    levels = [torch.tensor([v], dtype=torch.float64) for v in (0.02, 1.7)][: len(sizes)]
    groups = [NoiseGroup(statistics(n), level) for n, level in zip(sizes, levels, strict=True)]
    rooted = [replace(group, root=low_rank_root_of(group.statistics)) for group in groups]
    residual = torch.tensor([0.6, 0.2], dtype=torch.float64).view(1, 2, 1)
    P = prior().unsqueeze(0)
    variables = [P, residual, *levels]
    for variable in variables:
        variable.requires_grad_()
    values = [subspace_log_marginal_likelihood(some, residual, P) for some in (groups, rooted)]
    assert_close(values[1], values[0])
    wanted, actual = (torch.autograd.grad(value.sum(), variables) for value in values)
    for a, w in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, w, rtol=1e-6, atol=1e-6 * float(w.abs().max()))


@pytest.mark.usefixtures("in_features")
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("noise", ["learned", "known", "mixed"])
def test_a_refit_with_few_observations_takes_the_root(outputs: int, noise: str) -> None:
    X = torch.rand(12, 2, dtype=torch.float64)
    Y = torch.cat([(4.0 * X[:, :1] + i).sin() for i in range(outputs)], -1)
    Yvar = None if noise == "learned" else torch.full_like(Y, 0.01)
    if noise == "mixed" and Yvar is not None:
        Yvar[:5] = torch.nan
    kernel = ProductMatern(nu=2.5, ard_num_dims=2, batch_shape=torch.Size([outputs][: outputs - 1]))
    model = WISKI(X, Y, Yvar, covar_module=kernel, grid_size=14)
    mll = ExactMarginalLogLikelihood(model.likelihood, model).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    losses, gradients = [], []
    for rooted in (True, False):
        _, model._cache = model.inference.objective(model.memory, model._cache, model.prior)
        assert model._cache.learning is not None
        roots = model._cache.learning.roots
        assert any(root is not None and root.G.shape[-1] > 0 for root in roots)
        if not rooted:
            learning = replace(model._cache.learning, roots=(None, None))
            model._cache = replace(model._cache, learning=learning)
        loss = model.compute_custom_loss(mll).sum()
        losses.append(loss)
        gradients.append(torch.autograd.grad(loss, parameters))
    assert_close(losses[0], losses[1])
    for a, b in zip(*gradients, strict=True):
        assert_close(a, b)
