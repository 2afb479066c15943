"""Sites that are settled by their own survey: against the choice by dense formulas."""

from __future__ import annotations

import math

import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from scipy.special import owens_t
from torch import Tensor

from bo_stream import OSGPR, Misclassification, select_sites
from bo_stream.acquisition import site_choice

N = 14


def _problem() -> tuple[OSGPR, Tensor]:
    random = torch.Generator().manual_seed(0)
    pool = torch.rand(N, 2, dtype=torch.float64, generator=random)
    X = torch.rand(6, 2, dtype=torch.float64, generator=random)
    kernel = ScaleKernel(MaternKernel(1.5)).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, 0.4
    model = OSGPR(X, torch.sin(6.0 * X[:, :1]), covar_module=kernel, outcome_transform=None)
    model.likelihood.noise = 0.1
    return model, pool


def _by_hand(
    model: OSGPR, pool: Tensor, weights: Tensor, known: list[int], pending: list[int], q: int
) -> tuple[list[int], list[float]]:
    """Choose greedily by the posterior covariance; settled sites do not count."""
    with torch.no_grad():
        posterior = model.posterior(pool)
        mean, covariance = posterior.mean[:, 0], posterior.distribution.covariance_matrix
    noise = model.likelihood.noise.item()

    def loss(observed: list[int], settled: set[int]) -> float:
        cross = covariance[:, observed]
        inner = covariance[observed][:, observed] + noise * torch.eye(len(observed)).double()
        removed = (cross @ torch.linalg.inv(inner) * cross).sum(-1)
        total = 0.0
        for j in set(range(len(pool))) - settled:
            s2 = float(covariance[j, j])
            a = float(mean[j]) / math.sqrt(s2)
            gone = max(float(removed[j]), 1e-300)
            total += float(weights[j]) * 2.0 * float(owens_t(a, math.sqrt(s2 / gone - 1.0)))
        return total

    picks: list[int] = []
    falls = []
    for _ in range(q):
        before = loss(pending + picks, {*known, *pending, *picks})
        left = [i for i in range(len(pool)) if i not in {*known, *pending, *picks}]
        after = [loss([*pending, *picks, i], {*known, *pending, *picks, i}) for i in left]
        best = min(range(len(left)), key=after.__getitem__)
        picks, falls = [*picks, left[best]], [*falls, before - after[best]]
    return picks, falls


@pytest.mark.parametrize("listed", [False, True])
def test_choice_is_that_of_dense_formulas(listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if listed:  # a shortlist that holds all of a pool taken for large
        monkeypatch.setattr(site_choice, "MOST_PAIRS", 1)
    model, pool = _problem()
    weights = torch.linspace(0.5, 1.5, N, dtype=torch.float64)
    known, pending = [3, 8], [5]
    choice = select_sites(
        model,
        pool,
        4,
        Misclassification(0.0, "latent"),
        weights=weights,
        exclude=torch.tensor(known),
        pending=torch.tensor(pending),
        settles=True,
    )
    picks, falls = _by_hand(model, pool, weights, known, pending, 4)
    assert choice.indices.tolist() == picks
    assert choice.gains.tolist() == pytest.approx(falls, rel=1e-3)
    assert choice.before - choice.after == pytest.approx(sum(falls), rel=1e-3)


def test_many_targets_are_thinned_with_their_weight() -> None:
    model, pool = _problem()
    criterion = Misclassification(0.0, "latent")
    whole = select_sites(model, pool, 1, criterion, settles=True, exclude=torch.tensor([0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site_choice, "MOST_TARGETS", 8)
        some = select_sites(model, pool, 1, criterion, settles=True, exclude=torch.tensor([0]))
    assert some.before == pytest.approx(whole.before, rel=0.5)
    assert some.before != whole.before


def test_targets_of_their_own_are_refused() -> None:
    model, pool = _problem()
    with pytest.raises(ValueError, match="no mc_points with settles"):
        select_sites(
            model, pool, 1, Misclassification(0.0, "latent"), mc_points=pool[:3], settles=True
        )
