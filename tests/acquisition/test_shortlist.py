"""Large pools: the shortlist against the exact gains of all candidates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpytorch.kernels import MaternKernel
from torch import Tensor

from bo_stream import OSGPR, OSVGP, WISKI, BinomialLikelihood, LocalGP
from bo_stream.acquisition import (
    Criterion,
    ExceedanceEntropy,
    IntegratedVariance,
    Misclassification,
    SiteConstraints,
    select_sites,
    site_choice,
)
from bo_stream.acquisition.criteria import sites
from bo_stream.acquisition.feature_nipv import PointMeasure, explained
from bo_stream.acquisition.site_choice import ShortlistGains, SiteNoise, with_targets
from bo_stream.models.base import StreamingGP
from bo_stream.testing.streams import assert_close
from tests.models.inducing.test_counts import count_kernel, surveys
from tests.support.problems.inducing import wave

N, Q = 400, 5


def rand(n: int) -> Tensor:
    return torch.rand(n, 2, dtype=torch.float64)


def counts(points: int = 6) -> OSVGP:
    """A model of few inducing points, which leave much of the process to the residual."""
    X, Y = surveys(60)
    return OSVGP(X, Y, BinomialLikelihood(), count_kernel(), inducing_points=X[:points])


def grid() -> WISKI:
    return WISKI(*wave(40, 2), grid_size=12)


def inducing() -> OSGPR:
    X, Y = wave(40, 2)
    kernel = MaternKernel(nu=1.5).double()
    kernel.lengthscale = 0.4
    return OSGPR(X, Y, covar_module=kernel, inducing_points=X[:8])


def conditioned() -> StreamingGP:
    return inducing().condition_on_observations(rand(3), torch.zeros(3, 1).double())


def local() -> LocalGP:
    return LocalGP(*wave(40, 2), max_size=15)


MODELS: dict[str, Callable[[], StreamingGP]] = {
    "counts": counts,
    "a grid": grid,
    "inducing points": inducing,
    "hypothetical observations": conditioned,
    "no features": local,
}
CRITERIA: list[Criterion] = [
    IntegratedVariance(),
    IntegratedVariance("prevalence"),
    ExceedanceEntropy(-0.2, "latent"),
    Misclassification(-0.2, "latent"),
]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pool is too large for the covariances of all candidates."""
    monkeypatch.setattr(site_choice, "MOST_PAIRS", 1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("large")
def test_a_list_of_all_candidates_is_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_choice, "SHORTLIST", N)
    model, pool, targets = MODELS[name](), rand(36), rand(12)
    for criterion in CRITERIA:
        pending = torch.tensor([7, 30])
        found = select_sites(model, pool, Q, criterion, targets, pending=pending)
        with monkeypatch.context() as patch:
            patch.setattr(site_choice, "MOST_PAIRS", 10**9)
            exact = select_sites(model, pool, Q, criterion, targets, pending=pending)
        assert_close(found.gains, exact.gains)
        assert found.before == pytest.approx(exact.before, rel=1e-8, abs=1e-10)
        assert found.after == pytest.approx(exact.after, rel=1e-8, abs=1e-10)


@pytest.mark.parametrize("name", ["counts", "a grid", "inducing points"])
@pytest.mark.parametrize("criterion", CRITERIA, ids=lambda c: type(c).__name__)
def test_a_short_list_holds_good_candidates(
    name: str, criterion: Criterion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of the candidates are looked at, and little is lost: of 144 rounds at most 0.11."""
    model, pool, targets = MODELS[name](), rand(N), rand(80)
    exact = select_sites(model, pool, Q, criterion, targets)
    monkeypatch.setattr(site_choice, "MOST_PAIRS", 1)
    monkeypatch.setattr(site_choice, "SHORTLIST", N // 20)
    found = select_sites(model, pool, Q, criterion, targets)
    assert found.before - found.after > 0.8 * (exact.before - exact.after)


@pytest.mark.parametrize("name", ["counts", "a grid", "inducing points"])
def test_candidates_rank_by_their_gains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guesses are the gains where a criterion is linear and its targets are inducing points."""
    monkeypatch.setattr(site_choice, "MOST_PAIRS", 1)
    model, pool, targets = MODELS[name](), rand(30), rand(12)
    monkeypatch.setattr(site_choice, "in_weight_space", lambda process: False)
    noise = SiteNoise.of(model, model.process_inputs(pool), None)
    points = PointMeasure(model.process_inputs(targets), torch.rand(12).double())
    gains = site_choice.gains_before(model, noise, points, IntegratedVariance())
    assert isinstance(gains, ShortlistGains)
    while True:
        exact = torch.stack([gains.exact(torch.tensor([k])).values()[0] for k in range(30)])
        assert gains.ranking is not None
        guessed, spread = gains.ranking
        error = float((guessed.value(spread)[0] - exact).abs().max())
        assert error < 0.01 * float(exact.max())
        if name != "a grid" or gains.observed == 2:
            break  # what is left at one candidate tells about others, which features do not know
        gains = gains.observing(4 + gains.observed)


@pytest.mark.usefixtures("large")
def test_constraints_hold_on_a_short_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_choice, "SHORTLIST", 10)
    pool, costs = rand(N), 0.5 + torch.rand(N, dtype=torch.float64)
    limits = SiteConstraints(
        costs=costs, budget=4.0, positions=pool, minimum_distance=0.2, unreachable=costs < 0.7
    )
    choice = select_sites(
        counts(), pool, 8, Misclassification(0.2, "prevalence"), constraints=limits
    )
    assert float(choice.costs.sum()) <= 4.0 + 1e-8
    assert float(costs[choice.indices].min()) >= 0.7
    places = pool[choice.indices]
    assert float((torch.cdist(places, places) + torch.eye(len(places))).min()) >= 0.2


def test_targets_as_inducing_points_leave_the_process_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(site_choice, "ADDED", 7)
    for model in (counts(), inducing()):
        targets, X = rand(30), rand(9)
        space = explained(model.process())
        assert space is not None
        weights = torch.rand(30, dtype=torch.float64)
        wider = with_targets(space, PointMeasure(targets, weights))
        added = wider.basis.rank - space.basis.rank
        assert 1 <= added <= 7
        assert_close(wider.mean(X), space.mean(X))
        assert_close(wider.covariance(X), space.covariance(X), factor=100.0)
        at, former = wider.at(targets), space.at(targets)
        residual = wider.basis.residual_variance(targets, at.prior)
        before = space.basis.residual_variance(targets, former.prior)
        assert residual is not None
        assert before is not None
        assert int((residual < 1e-6 * before.max()).sum()) >= added


@pytest.mark.parametrize("build", [counts, inducing, grid])
def test_kept_sites_are_sites_in_single_precision(build: Callable[[], StreamingGP]) -> None:
    space = explained(build().feature_process())
    assert space is not None
    X, r = rand(50), space.basis.rank
    matrices = torch.randn(2, 1, r, r, dtype=torch.float64)
    columns = torch.randn(1, r, 3, dtype=torch.float64)
    kept, exact = sites(space.basis, X, cached=True), sites(space.basis, X)
    pairs = [
        (kept.linear(columns), exact.linear(columns)),
        (kept.quadratic(matrices + matrices.mT), exact.quadratic(matrices + matrices.mT)),
        (kept.residual(), exact.residual()),
    ]
    for found, expected in pairs:
        assert found.dtype == torch.float64
        assert found.shape == expected.shape
        gap = float((found - expected).abs().max())
        assert gap <= 1e-3 * max(float(expected.abs().max()), 1.0)


@pytest.mark.usefixtures("large")
def test_the_same_round_twice() -> None:
    for model in (counts(), local()):
        pool, criterion = rand(50), Misclassification(0.0, "latent")
        first, second = (select_sites(model, pool, 3, criterion) for _ in range(2))
        assert torch.equal(first.indices, second.indices)
