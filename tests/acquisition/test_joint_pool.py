"""Greedy choices for models whose features are not all there is, against trying every candidate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.exceptions.errors import UnsupportedError
from gpytorch.likelihoods import BernoulliLikelihood, LaplaceLikelihood
from torch import Tensor

from bo_stream import OSGPR, OSVGP, WISKI, AutoGP
from bo_stream.acquisition import PoolSelector, select_from_pool
from bo_stream.acquisition import gains as gains_module
from bo_stream.acquisition import pool as pool_module
from bo_stream.models.base import StreamingGP
from bo_stream.models.clustered.clustered import ClusteredGP
from bo_stream.models.local import LocalGP
from tests.support.problems.inducing import wave


def rand(n: int) -> Tensor:
    return torch.rand(n, 2, dtype=torch.float64)


def _laplace(X: Tensor, Y: Tensor) -> OSVGP:
    return OSVGP(X, Y, LaplaceLikelihood(), inducing_points=X[:10])


MODELS: dict[str, Callable[[Tensor, Tensor], StreamingGP]] = {
    "OSGPR": lambda X, Y: OSGPR(X, Y, inducing_points=X[:10]),
    "OSVGP, Laplace": _laplace,
    "AutoGP, exact": lambda X, Y: AutoGP(X, Y, families="exact"),
    "ClusteredGP": lambda X, Y: ClusteredGP(X, Y, resolution=0.1),
    "LocalGP": lambda X, Y: LocalGP(X, Y, max_size=15),
}


def left(model: StreamingGP, X: Tensor, points: Tensor, factors: Tensor) -> float:
    """Mean variance at points once X is observed, whatever comes out."""
    inputs = model.transform_inputs(X).double()
    zeros = torch.zeros(model.num_outputs, len(X), dtype=torch.float64)
    after = model.process(inputs).condition(inputs, zeros, model.noise_at(inputs))
    return float((factors * after.variance(model.transform_inputs(points).double()).mean(-1)).sum())


def greedy(
    model: StreamingGP, pool: Tensor, points: Tensor, q: int, factors: Tensor | None = None
) -> list[int]:
    weights = torch.ones(model.num_outputs).double() if factors is None else factors
    chosen: list[int] = []
    with torch.no_grad():
        for _ in range(q):
            values = [
                left(model, pool[[*chosen, i]], points, weights) if i not in chosen else torch.inf
                for i in range(len(pool))
            ]
            chosen.append(int(torch.tensor(values).argmin()))
    return chosen


@pytest.mark.parametrize("name", MODELS)
def test_equals_trying_all(name: str) -> None:
    X, Y = wave(40, 2)
    model, pool, points = MODELS[name](X, Y), rand(15), rand(30)
    picks = select_from_pool(model, pool, 4, points)
    assert picks.tolist() == greedy(model, pool, points, 4)
    assert select_from_pool(model, pool, 3, points, exclude=picks).tolist() != picks[:3].tolist()


def test_it_is_the_choice_in_feature_space_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, pool, points = WISKI(*wave(40, 2), grid_size=12), rand(200), rand(50)
    expected = select_from_pool(model, pool, 8, points)
    monkeypatch.setattr(pool_module, "in_weight_space", lambda process: False)
    assert torch.equal(select_from_pool(model, pool, 8, points), expected)


def test_of_a_weighted_sum_of_outputs() -> None:
    X, Y = wave(30, 2)
    model = OSGPR(X, torch.cat((Y, 3.0 * X[:, :1]), -1), inducing_points=X[:10])
    weights = torch.tensor([2.0, -0.5], dtype=torch.float64)
    pool, points = rand(15), rand(20)
    transform = ScalarizedPosteriorTransform(weights)
    picks = select_from_pool(model, pool, 3, points, posterior_transform=transform)
    factors = (weights * model.outcome_scale()).square()
    assert picks.tolist() == greedy(model, pool, points, 3, factors)


def test_a_selector_follows_the_model() -> None:
    X, Y = wave(40, 2)
    model, pool, points = MODELS["OSGPR"](X, Y), rand(60), rand(30)
    selector = PoolSelector(model, pool, points)
    first = selector.select(3)
    model.update(pool[first], Y[:3])
    conditioned = model.condition_on_observations(rand(2), Y[:2])
    for other in (model, conditioned):
        fresh = select_from_pool(other, pool, 3, points)
        assert torch.equal(PoolSelector(other, pool, points).select(3), fresh)
    assert torch.equal(selector.select(3), select_from_pool(model, pool, 3, points))


def test_regions_that_no_inducing_point_knows_are_explored() -> None:
    """The part of a candidate's variance that features miss is what exploration is about."""
    X = 0.05 * rand(30)  # half a lengthscale: known everywhere
    model = OSGPR(X, X.sum(-1, keepdim=True), inducing_points=X[:8])
    model.covar_module.lengthscale = 0.1
    picks = select_from_pool(model, rand(100), 5, rand(200))
    assert len(picks.unique()) == 5
    pool = torch.cat((0.05 * rand(50), 0.5 + 0.5 * rand(50)))
    assert bool((select_from_pool(model, pool, 5, rand(200)) >= 50).all())


def test_what_it_cannot_choose_for() -> None:
    X, Y = wave(20, 2)
    conditioned = MODELS["OSGPR"](X, Y).condition_on_observations(
        rand(6).view(2, 3, 2), rand(3).sum(-1).view(3, 1)
    )
    with pytest.raises(UnsupportedError, match="hypothetical observations"):
        select_from_pool(conditioned, rand(10), 2, rand(5))
    labels = OSVGP(X, (Y > 0).double(), BernoulliLikelihood(), inducing_points=X[:10])
    with pytest.raises(UnsupportedError, match="no Gaussian noise"):
        select_from_pool(labels, rand(10), 2, rand(5))


def test_gains_of_an_exact_model_are_kept_while_it_observes_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And computed anew after anything else, with the same choices as without a memory."""
    X, Y = wave(30, 2)
    model, pool, points = AutoGP(X, Y, families="exact"), rand(60), rand(40)
    outcomes = torch.sin(pool.sum(-1, keepdim=True))
    computed: list[int] = []
    once = gains_module.VarianceGains.of
    monkeypatch.setattr(
        gains_module.VarianceGains, "of", lambda *args: [computed.append(0), once(*args)][1]
    )
    selector = PoolSelector(model, pool, points)
    taken = torch.zeros(0, dtype=torch.long)
    for turn in range(5):
        picks = selector.select(3, exclude=taken)
        known = len(computed)
        assert torch.equal(picks, select_from_pool(model, pool, 3, points, exclude=taken))
        assert known == (1, 2, 3, 4, 6)[turn]  # the choices to compare with are computed too
        told = picks if turn != 3 else picks[:2]
        model.update(pool[told], outcomes[told])
        taken = torch.cat((taken, told))


@pytest.mark.parametrize("name", ["OSGPR", "AutoGP, exact"])
def test_bounds_spare_reading_all_covariances_and_change_no_choice(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over rounds that the model observes; some wait, some cost more, and reductions are folded."""
    X, Y = wave(40, 2)
    pool, points = rand(150), rand(40)
    costs, outcomes = 1.0 + rand(150)[:, 0], torch.sin(pool.sum(-1, keepdim=True))
    evaluated: list[int] = []
    once = gains_module.VarianceGains.evaluated
    monkeypatch.setattr(
        gains_module.VarianceGains,
        "evaluated",
        lambda self, index, exact: [evaluated.append(len(index)), once(self, index, exact)][1],
    )
    choices = []
    for many in (10**9, 0):
        monkeypatch.setattr(gains_module, "_MANY", many)
        monkeypatch.setattr(gains_module, "_EVALUATED", 4)
        monkeypatch.setattr(gains_module, "_FOLDED", 6)
        model = MODELS[name](X, Y)
        selector, taken = PoolSelector(model, pool, points), torch.zeros(0, dtype=torch.long)
        rounds = []
        for turn in range(5):
            pending = torch.arange(turn, turn + 2) if turn == 3 else None
            given = costs if turn == 2 else None
            picks = selector.select(4, exclude=taken, costs=given, pending=pending)
            rounds.append(picks)
            model.update(pool[picks], outcomes[picks])
            taken = torch.cat((taken, picks))
        choices.append(torch.stack(rounds))
    assert torch.equal(*choices)
    assert 0 < sum(evaluated) < 20 * len(pool)  # each of 20 choices reads a part of the pool
