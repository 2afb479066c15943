"""Caches must never be seen: stale ones are dropped, carried ones are what a fresh solve gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bo_stream import OSGPR, WISKI, AutoGP, BayesianLastLayer
from bo_stream.models.base import StreamingGP
from bo_stream.models.wiski.cache import WHITENED_ROWS, WIDER_GRIDS
from bo_stream.testing.streams import assert_close, joint_covariance
from bo_stream.weights import MOST_ROWS as SOLVED_ROWS
from tests.support.problems import kernel, observations

pytestmark = pytest.mark.usefixtures("both_spaces")


def model() -> WISKI:
    data = observations(20).with_noise("mixed")
    return WISKI(*data.astuple(), covar_module=kernel("product", 2), grid_size=9, tolerance=0.0)


def without_caches(warm: WISKI) -> WISKI:
    cold = copy.deepcopy(warm)
    cold._cache = None
    return cold


def assert_fresh(warm: WISKI) -> None:
    T = torch.rand(5, 2).double()
    cold = without_caches(warm)
    assert_close(warm.posterior(T).mean, cold.posterior(T).mean)
    assert_close(joint_covariance(warm.posterior(T)), joint_covariance(cold.posterior(T)))
    assert_close(warm.log_marginal_likelihood(), cold.log_marginal_likelihood())


@pytest.mark.parametrize("n", [1, SOLVED_ROWS, SOLVED_ROWS + 1, WHITENED_ROWS + 1])
@pytest.mark.parametrize("noise", ["learned", "known", "mixed"])
def test_updates_of_any_size_leave_no_stale_cache(n: int, noise: str) -> None:
    warm, data = model(), observations(n).with_noise(noise)
    warm.posterior(data.X)
    warm.update(*data.astuple())
    assert_fresh(warm)
    warm.retract(*data.astuple())
    assert_fresh(warm)


def _set_lengthscale(m: WISKI) -> None:
    for part in m.covar_module.modules():
        if part.__dict__.get("ard_num_dims"):
            part.lengthscale = 0.77


def _reload(m: WISKI) -> None:
    m.load_state_dict(
        {k: 1.1 * v if v.is_floating_point() else v for k, v in m.state_dict().items()}
    )


def _step(m: WISKI) -> None:
    """Take a step of an optimiser."""
    optimizer = torch.optim.Adam(m.parameters(), lr=0.1)
    for parameter in m.parameters():
        parameter.grad = -torch.ones_like(parameter)
    optimizer.step()


def _assign(m: WISKI) -> None:
    """Give a parameter a tensor of its own."""
    m.likelihood.raw_noise.data = m.likelihood.raw_noise.data + 0.3


CHANGES: dict[str, Callable[[WISKI], object]] = {
    "lengthscale": _set_lengthscale,
    "output scale": lambda m: setattr(m.covar_module, "outputscale", 3.0),
    "noise": lambda m: setattr(m.likelihood, "noise", 0.5),
    "mean": lambda m: m.mean_module.constant.data.fill_(2.0),
    "state": _reload,
    "optimiser": _step,
    "new tensor": _assign,
    "array": lambda m: m.likelihood.raw_noise.detach().numpy().fill(0.2),
    "constraint": lambda m: m.likelihood.noise_covar.raw_noise_constraint.lower_bound.fill_(0.1),
    "training": lambda m: m.train(),
    "growth": lambda m: m.posterior(torch.full((1, 2), 1.4).double()),
    "refining": lambda m: m.refine(12),
    "forgetting": lambda m: m.forget(0.5),
    "merging": lambda m: m.merge(model()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_leave_no_stale_cache(change: str) -> None:
    warm, data = model(), observations(3).with_noise("mixed")
    warm.posterior(data.X)
    CHANGES[change](warm)
    assert_fresh(warm)
    CHANGES[change](warm)
    warm.update(*data.astuple())
    assert_fresh(warm)


@pytest.mark.parametrize("kind", [WISKI, OSGPR, AutoGP, BayesianLastLayer])
def test_what_a_thread_reads_during_an_update_is_not_kept(
    kind: type[StreamingGP], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update within the solve of a posterior stands for one by another thread."""
    data, more = observations(20), observations(4)
    read, alone = kind(data.X, data.Y), kind(data.X, data.Y)
    solve, waiting = type(read._inference).process, [more[:2], more[2:]]

    def interrupted(inference: Any, *args: Any) -> Any:
        found = solve(inference, *args)
        if waiting and inference is read._inference:
            read.update(*waiting.pop(0).astuple()[:2])
        return found

    for batch in (more[:2], more[2:]):
        alone.posterior(data.X)
        alone.update(batch.X, batch.Y)
    with monkeypatch.context() as patched:
        patched.setattr(type(read._inference), "process", interrupted)
        read.posterior(data.X)
        read.posterior(data.X)
    assert not waiting
    assert read.num_observations == alone.num_observations
    assert_close(read.posterior(data.X).mean, alone.posterior(data.X).mean)


def test_batches_that_wait_are_not_lost_when_more_come_than_may_wait() -> None:
    warm, more = model(), observations(3 * WHITENED_ROWS).with_noise("mixed")
    warm.posterior(more.X[:1])
    for start in range(0, len(more), SOLVED_ROWS):
        warm.update(*more[start : start + SOLVED_ROWS].astuple())
    assert_fresh(warm)


def wider_processes(m: WISKI, T: torch.Tensor) -> list[object]:
    return [m.process(T + shift) for shift in (0.3, 0.8)]


def test_queries_outside_are_solved_once_and_follow_the_stream() -> None:
    warm, T = model(), torch.rand(5, 2).double()
    before = wider_processes(warm, T)
    assert all(a is b for a, b in zip(before, wider_processes(warm, T), strict=True))
    for n in (1, 3):
        data = observations(n).with_noise("mixed")
        warm.update(*data.astuple())
        carried = [wider.whitening for wider in warm._cache.wider]
        assert len(carried) == 2
        cold = without_caches(warm)
        for shift in (0.3, 0.8, 0.0):
            assert_close(warm.posterior(T + shift).mean, cold.posterior(T + shift).mean)
            assert_close(
                joint_covariance(warm.posterior(T + shift)),
                joint_covariance(cold.posterior(T + shift)),
            )
        kept = {id(wider.whitening.basis) for wider in warm._cache.wider if wider.whitening}
        assert kept == {id(whitening.basis) for whitening in carried if whitening}


def test_queries_outside_that_ended_cost_updates_nothing() -> None:
    warm = model()
    wider_processes(warm, torch.rand(5, 2).double())
    for _ in range(2):
        warm.update(*observations(1).with_noise("mixed").astuple())
    assert warm._cache.wider == ()


def test_few_wider_grids_are_kept() -> None:
    warm = model()
    for shift in torch.linspace(0.01, 1.5, 12).tolist():
        warm.posterior(torch.tensor([[1.0 + shift, 0.5]]).double())
        warm.posterior(torch.tensor([[-shift, 0.5]]).double())
    assert len(warm._cache.wider) == WIDER_GRIDS
