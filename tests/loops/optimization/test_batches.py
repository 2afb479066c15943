"""Batches by fantasies, against brute force: dense conditioning, and sampled expectations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bo_stream import OSGPR, WISKI, AutoGP, LocalGP
from bo_stream.loops.optimization import acquisition as acquisitions
from bo_stream.loops.optimization import load_optimizer, save_optimizer
from bo_stream.loops.optimization.acquisition import (
    FANTASIES,
    Candidates,
    Utility,
    choose_by_fantasies,
)
from bo_stream.models.base import StreamingGP
from tests.loops.optimizing import QUICK, points, started, tell_all

Build = Callable[[Tensor, Tensor], StreamingGP]

BOX = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
MODELS: dict[str, Build] = {
    "exact": lambda X, Y: AutoGP(X, Y),
    "grid": lambda X, Y: WISKI(X, Y, bounds=BOX, grid_size=12),
    "inducing": lambda X, Y: OSGPR(X, Y, inducing_points=X[::2]),
    "local": lambda X, Y: LocalGP(X, Y),
}
PENDING = torch.tensor([[0.2, 0.3], [0.7, 0.6], [0.5, 0.9]], dtype=torch.float64)
SAMPLES = 200_000

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short")


def model_of(name: str) -> StreamingGP:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(14, 2, generator=generator, dtype=torch.float64)
    Y = (5.0 * X).sin().sum(-1, keepdim=True)
    return MODELS[name](X, Y + 0.1 * torch.randn(14, 1, generator=generator)).eval()


def candidates_of(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 2, generator=generator, dtype=torch.float64)


@torch.no_grad()
def joint(model: StreamingGP, X: Tensor) -> tuple[Tensor, Tensor]:
    """The dense posterior in units of the process."""
    process = model.process(X)
    return process.mean(X)[0], process.covariance(X)[0]


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_candidates_are_conditioned_as_a_dense_normal_is(name: str) -> None:
    """On pending points, then on two of themselves; S fantasies share their covariance."""
    model, X = model_of(name), candidates_of(20)
    candidates = Candidates(model.process(X), X, len(PENDING) + 2, seed=0)
    values = [candidates.condition_on(PENDING)]
    values += [candidates.choose(row).unsqueeze(-1) for row in (4, 11)]
    mean, covariance = joint(model, torch.cat((PENDING, X[[4, 11]], X)))
    known, new = slice(0, 5), slice(5, None)
    gain = torch.linalg.solve(covariance[known, known], covariance[known, new]).mT
    expected = mean[new] + (torch.cat(values, -1) - mean[known]) @ gain.mT
    left = covariance[new, new] - gain @ covariance[known, new]
    scale = covariance.diagonal().max()
    torch.testing.assert_close(candidates.fantasies, expected, rtol=0.0, atol=1e-5)
    assert float((candidates.variance - left.diagonal()).abs().max()) < 1e-6 * scale


@torch.no_grad()
def test_fantasies_have_the_posterior_s_moments() -> None:
    model, X = model_of("exact"), candidates_of(5)
    rounds = [Candidates(model.process(X), X, 3, seed).condition_on(PENDING) for seed in range(300)]
    drawn = torch.cat(rounds)
    mean, covariance = joint(model, PENDING)
    error = (drawn.mean(0) - mean).abs() / (covariance.diagonal() / len(drawn)).sqrt()
    assert float(error.max()) < 5.0
    torch.testing.assert_close(drawn.mT.cov(), covariance, rtol=0.1, atol=0.02)


@torch.no_grad()
@pytest.mark.parametrize("utility", [Utility(), Utility(2.0)], ids=["value", "upper bound"])
@pytest.mark.parametrize("level", [-1.0, 0.5, 2.0])
def test_gains_are_those_of_drawn_values(utility: Utility, level: float) -> None:
    generator = torch.Generator().manual_seed(2)
    fantasy, mean = torch.tensor([[0.4], [-0.9]]).double(), torch.tensor([0.1]).double()
    sd, reached = torch.tensor([0.7]).double(), torch.tensor([[level]]).double()
    draws = torch.randn(SAMPLES, 1, 1, generator=generator, dtype=torch.float64)
    excess = (utility.of(fantasy + sd * draws, mean) - reached).clamp_min(0.0)
    error = 5.0 * excess.std(0) / SAMPLES**0.5 + 1e-12
    found = utility.log_gain(fantasy, sd, mean, reached).exp()
    assert bool(((found - excess.mean(0)).abs() < error).all())


@torch.no_grad()
@pytest.mark.parametrize("utility", [Utility(), Utility(2.0)], ids=["value", "upper bound"])
def test_the_mean_over_fantasies_is_the_joint_expectation(utility: Utility) -> None:
    """What BoTorch's Monte Carlo acquisition functions estimate beside pending points."""
    model, X = model_of("exact"), candidates_of(4)
    gains = []
    for seed in range(100):
        candidates = Candidates(model.process(X), X, len(PENDING), seed)
        values = candidates.condition_on(PENDING)
        told = utility.of(values, joint(model, PENDING)[0]).amax(-1, keepdim=True)
        log_gain = utility.log_gain(candidates.fantasies, candidates.sd, candidates.mean, told)
        gains.append(log_gain.exp())
    found = torch.cat(gains)
    mean, covariance = joint(model, torch.cat((PENDING, X)))
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(SAMPLES, len(mean), generator=generator, dtype=torch.float64)
    drawn = utility.of(mean + normal @ torch.linalg.cholesky(covariance).mT, mean)
    best = drawn[:, : len(PENDING)].amax(-1, keepdim=True)
    excess = (drawn[:, len(PENDING) :] - best).clamp_min(0.0)
    error = (found.var(0) / len(found) + excess.var(0) / SAMPLES).sqrt()
    assert bool(((found.mean(0) - excess.mean(0)).abs() < 5.0 * error).all())


@torch.no_grad()
def test_without_pending_points_the_first_is_that_of_the_plain_criterion() -> None:
    model, X = model_of("exact"), candidates_of(200)
    mean, covariance = joint(model, X)
    for utility, value in (
        (Utility(), mean),
        (Utility(4.0), mean + 2.0 * covariance.diagonal().sqrt()),
    ):
        first = choose_by_fantasies(model, utility, X[:0], X[:0], X, 1, seed=0)
        assert first.tolist() == [int(value.argmax())]


@torch.no_grad()
def test_an_upper_bound_of_no_deviations_prefers_large_means_without_repetition() -> None:
    model, X = model_of("exact"), candidates_of(60)
    mean, _ = joint(model, X)
    rows = choose_by_fantasies(model, Utility(0.0), X[:0], X[:0], X, 60, seed=0)
    assert rows[0] == mean.argmax()
    assert sorted(rows.tolist()) == list(range(60))


@torch.no_grad()
def test_points_of_a_batch_are_apart_from_each_other_and_from_pending_ones() -> None:
    model, X = model_of("grid"), candidates_of(60)
    known = X[:10], X[:1]
    rows = choose_by_fantasies(model, Utility(), *known, X, 30, seed=0).tolist()
    assert len(set(rows)) == 30
    assert rows[0] >= 10  # pending points are of no use any more
    assert sorted(choose_by_fantasies(model, Utility(), *known, X, 60, seed=0).tolist()) == list(
        range(60)
    )


@pytest.mark.matrix
@pytest.mark.parametrize("acquisition", ["qLogEI", "qLogNEI", "qUCB", "qSR", "TS"])
@pytest.mark.usefixtures("whole_fits")
def test_many_points_find_the_minimum_and_go_on_after_a_stop(
    acquisition: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acquisitions, "MANY", 4)
    optimizer = started(replace(QUICK, acquisition=acquisition), steps=0)
    for _ in range(2):
        tell_all(optimizer, optimizer.ask(5))
    optimizer.ask(3)  # pending
    save_optimizer(tmp_path, optimizer)
    loaded, _ = load_optimizer(tmp_path)
    asked = optimizer.ask(6)
    assert points(loaded.ask(6)) == points(asked)
    assert acquisition == "TS" or len(set(points(asked))) == 6
    assert all(-2.0 <= trial.X[0] <= 3.0 for trial in asked)
    best = optimizer.best()
    assert best.trial.X[0] == pytest.approx(0.7, abs=0.1)


def test_few_points_are_searched_for_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> Tensor:
        raise AssertionError("chosen by fantasies")

    few, many = started(steps=1), started(steps=1)
    expected = points(few.ask(3))
    monkeypatch.setattr(acquisitions, "choose_by_fantasies", refuse)
    assert points(many.ask(3)) == expected
    with pytest.raises(AssertionError, match="chosen by fantasies"):
        many.ask(acquisitions.MANY - 3)


def test_a_builder_of_ones_own_is_searched_however_many_are_pending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acquisitions, "MANY", 2)
    name = "tests.loops.optimization.test_optimizer:forgetful_builder"
    assert len(set(points(started(replace(QUICK, acquisition=name)).ask(3)))) == 3


def test_the_number_of_fantasies_is_what_the_draws_have() -> None:
    model, X = model_of("exact"), candidates_of(3)
    candidates = Candidates(model.process(X), X, 1, seed=0)
    assert candidates.choose(1).shape == (FANTASIES,)
