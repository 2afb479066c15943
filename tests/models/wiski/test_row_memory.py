"""Few observations held as rows: nothing of the grid is allocated, and nothing is truncated."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from bo_stream import WISKI, DirichletWISKI
from bo_stream.acquisition import FeatureNIPV, sample_paths, select_from_pool
from bo_stream.diagnostics import leave_one_out, without
from bo_stream.models.wiski import memory as row_memory
from bo_stream.models.wiski.memory import MOST_ROWS, RowMemory, StreamMemory
from bo_stream.testing.streams import (
    assert_close,
    assert_same_model,
    assert_untouched,
    fingerprint,
    held_bytes,
    joint_covariance,
)
from tests.oracles.reference import reference_posterior
from tests.support.problems import KERNELS, Observations, kernel, observations

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")


def build(data: Observations, **options: Any) -> WISKI:
    m, batch = data.Y.shape[-1], data.X.shape[:-2]
    shape = (*batch, *([m] if m > 1 else []))
    options = {"covar_module": kernel("scaled", 2, shape), **options}
    likelihood = GaussianLikelihood(batch_shape=torch.Size(shape))
    return WISKI(*data.astuple(), likelihood=likelihood, grid_size=(7, 8), tolerance=0.0, **options)


def in_features(model: WISKI) -> WISKI:
    """A copy whose rows are statistics on the grid."""
    twin = copy.deepcopy(model)
    assert isinstance(twin._memory, RowMemory)
    twin._set_memory(twin._memory.on_grid())
    return twin


def points() -> Tensor:
    return torch.rand(5, 2).double()


def test_nothing_of_the_grid_is_allocated() -> None:
    data = observations(30, dim=4)
    model = WISKI(*data.astuple())
    model.posterior(data.X).mean.sum()
    assert held_bytes(model) < 2**20
    assert sum(len(data) * 4 * 8 for _ in range(2)) < held_bytes(model)


@pytest.mark.parametrize("n", [1, 9, 60])
@pytest.mark.parametrize("noise", ["learned", "known", "mixed"])
def test_moving_to_the_grid_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, noise: str, n: int
) -> None:
    """Neither with the update that is one too many for the rows, nor in another order."""
    monkeypatch.setattr(row_memory, "MOST_ROWS", 20)
    data = observations(20, outputs=2, batch_shape=(2,)).with_noise(noise)
    more = observations(n, outputs=2, batch_shape=(2,)).with_noise(noise)
    held = build(data)
    held.posterior(points())
    moved = in_features(held)
    assert_same_model(held, moved, points())
    held.update(*more.astuple())
    assert isinstance(held._memory, StreamMemory)
    assert_same_model(held, moved.update(*more.astuple()), points())


def test_no_more_rows_are_held_than_there_may_be_features() -> None:
    data = observations(MOST_ROWS)
    assert isinstance(WISKI(*data.astuple(), grid_size=20)._memory, RowMemory)
    for model in (
        WISKI(*observations(MOST_ROWS + 1).astuple(), grid_size=20),
        WISKI(*data[:3].astuple(), max_rank=MOST_ROWS - 1),
        WISKI(*data[:17].astuple(), grid_size=4),
    ):
        assert isinstance(model._memory, StreamMemory)


def test_the_posterior_beyond_the_dense_limit_is_the_dense_one() -> None:
    data, T = observations(20).with_noise("mixed"), torch.rand(600, 2).double()
    model = build(data)
    mean, covariance = reference_posterior(model, data.X, data.Y, T, data.Yvar)
    posterior = model.posterior(T)
    assert_close(posterior.mean, mean)
    assert_close(posterior.variance, covariance.diagonal(dim1=-2, dim2=-1).mT)
    assert_close(joint_covariance(posterior), covariance)


# --- taking rows out ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_are_taken_out_in_any_order(dtype: torch.dtype) -> None:
    data = observations(8, outputs=2, batch_shape=(2,), dtype=dtype).with_noise("mixed")
    twice = Observations(*(torch.cat((t, t[..., :3, :]), -2) for t in data.astuple()))
    model = build(twice, outcome_transform=None)
    order = torch.tensor([6, 0, 2, 4])
    model.retract(*(t[..., order, :] for t in data.astuple()))
    left = torch.tensor([1, 3, 5, 7, 0, 1, 2])
    expected = build(
        Observations(*(t[..., left, :] for t in data.astuple())), outcome_transform=None
    )
    expected.load_state_dict(model.state_dict())
    assert_same_model(model, expected, points().to(dtype))


@pytest.mark.parametrize("spoil", ["X", "Y", "Yvar", "too often", "outside"])
def test_rows_that_are_not_in_are_refused(spoil: str) -> None:
    data = observations(8).with_noise("mixed")
    model = build(data)
    model.posterior(points())
    before, wrong = fingerprint(model), data[2:4]
    assert wrong.Yvar is not None
    changed = {
        "X": replace(wrong, X=wrong.X + 1e-3),
        "Y": replace(wrong, Y=wrong.Y + 1e-2),
        "Yvar": replace(wrong, Yvar=wrong.Yvar.flip(0)),
        "too often": Observations(*(torch.cat((t, t[:1])) for t in wrong.astuple())),
        "outside": replace(wrong, X=wrong.X + 1.0),
    }
    with pytest.raises(InputDataError, match="not"):
        model.retract(*changed[spoil].astuple())
    assert_untouched(model, before)


def test_refining_moves_the_rows_to_the_new_grid() -> None:
    data = observations(12).with_noise("mixed")
    model = build(data).refine((11, 12))
    finer = build(data)
    finer = WISKI(
        *data.astuple(),
        covar_module=model.covar_module,
        likelihood=model.likelihood,
        grid_size=(11, 12),
        tolerance=0.0,
    )
    assert_same_model(model, finer, points())
    model.retract(*data[:5].astuple())
    assert_same_model(model, finer.retract(*data[:5].astuple()), points())


def test_forgetting_is_that_of_statistics() -> None:
    data, more = observations(12), observations(3)
    model = build(data)
    moved = in_features(model).forget(0.5).update(*more.astuple())
    assert_same_model(model.forget(0.5).update(*more.astuple()), moved, points())


@pytest.mark.parametrize("sizes", [(5, 5), (5, 20), (20, 5), (20, 20)])
def test_merging_rows_and_statistics(monkeypatch: pytest.MonkeyPatch, sizes: Any) -> None:
    monkeypatch.setattr(row_memory, "MOST_ROWS", 12)
    shards = [observations(n).with_noise("mixed") for n in sizes]
    models = [build(shard, outcome_transform=None) for shard in shards]
    merged = models[0].merge(models[1])
    whole = build(
        Observations(
            *(torch.cat(pair) for pair in zip(*(s.astuple() for s in shards), strict=True))
        ),
        outcome_transform=None,
    )
    whole.load_state_dict(merged.state_dict())
    assert_same_model(merged, whole, points())


def test_a_new_class_is_missed_by_all_rows() -> None:
    X, labels = torch.rand(15, 2).double(), torch.arange(15).remainder(2).unsqueeze(-1).double()
    options: dict[str, Any] = {"grid_size": 7, "tolerance": 0.0}
    model = DirichletWISKI(X, labels, **options)
    known = DirichletWISKI(X, labels, num_classes=4, **options)
    more = torch.rand(3, 2).double(), torch.tensor([[3.0], [0.0], [2.0]]).double()
    for grown in (model, known):
        grown.update(*more)
    known.load_state_dict(model.state_dict(), strict=False)
    assert isinstance(model._memory, RowMemory)
    assert isinstance(known._memory, RowMemory)
    assert_close(
        model._memory.rows.targets + model._outcomes.shift[:, None],
        known._memory.rows.targets + known._outcomes.shift[:, None],
    )
    assert_close(model._memory.rows.noise, known._memory.rows.noise)


# --- those who ask for features -------------------------------------------------------------------


def _paths(model: WISKI) -> Tensor:
    return sample_paths(model, 3, seed=1)(torch.linspace(0.1, 0.9, 12).view(6, 2).double())


def _integrated(model: WISKI) -> Tensor:
    X = torch.linspace(0.1, 0.9, 12).view(3, 2, 2).double()
    return FeatureNIPV(model, bounds=torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double())(X)


def _picks(model: WISKI) -> Tensor:
    pool = torch.linspace(0.05, 0.95, 40).view(20, 2).double().sin()
    return select_from_pool(model, pool, 5, pool).double()


def _left_out(model: WISKI) -> Tensor:
    data = DATA
    posterior = leave_one_out(model, *data.astuple()).posterior
    rest = without(model, *data[:4].astuple()).posterior(data.X)
    return torch.cat(
        (
            posterior.mean.flatten(),
            posterior.variance.flatten(),
            rest.mean.flatten(),
            rest.variance.flatten(),
        )
    )


def _features(model: WISKI) -> Tensor:
    return torch.tensor([model.rank, model.dropped, model.interpolation_error()])


DATA = Observations(
    torch.rand(14, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64),
    torch.rand(14, 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64),
)


def _itself(model: WISKI) -> WISKI:
    return model


def _fantasy(model: WISKI) -> WISKI:
    X = torch.tensor([[0.3, 0.4], [0.6, 0.2]]).double()
    return model.condition_on_observations(X, X[:, :1])


def _of_fantasies(model: WISKI) -> WISKI:
    X = torch.tensor([[0.3, 0.4], [0.6, 0.2]]).double()
    fantasies = model.fantasize(X, SobolQMCNormalSampler(torch.Size([3]), seed=1))
    return fantasies.condition_on_observations(X + 0.1, X[:, :1])


@pytest.mark.parametrize("ask", [_paths, _integrated, _picks, _left_out, _features])
@pytest.mark.parametrize("way", [_itself, _fantasy])
def test_who_asks_for_features_has_them(
    ask: Callable[[WISKI], Tensor], way: Callable[[WISKI], WISKI]
) -> None:
    if way is _fantasy and ask in (_left_out, _features):
        return
    held = build(DATA)
    assert_close(ask(way(held)), ask(way(in_features(held))))
    held.update(*DATA[:3].astuple()).retract(*DATA[:3].astuple())
    assert_close(ask(way(held)), ask(way(in_features(held))))


def test_fantasies_of_fantasies_are_those_in_features() -> None:
    held = build(DATA)
    T = points()
    one, other = (_of_fantasies(model).posterior(T) for model in (held, in_features(held)))
    assert_close(one.mean, other.mean)
    assert_close(joint_covariance(one), joint_covariance(other))


# --- asked for outside the bounds, in inference mode, saved ---------------------------------------


def test_queries_outside_are_solved_once_and_follow_the_rows() -> None:
    data, more, T = observations(12), observations(3), points() + 0.4
    model = build(data)
    inside = model.process()
    outside = model.process(T)
    assert model.process(T) is outside
    assert model.process() is inside
    model.update(*more.astuple())
    assert [wider.rows is not None for wider in model._cache.wider] == [True]
    assert model.process(T) is model._cache.wider[0].rows.process
    anew = copy.deepcopy(model)
    anew._set_memory(anew._memory)
    assert_close(model.posterior(T).mean, anew.posterior(T).mean)
    assert_close(joint_covariance(model.posterior(T)), joint_covariance(anew.posterior(T)))


def test_features_and_rows_outside_are_the_same_posterior() -> None:
    model, T = build(observations(12)), points() + 0.4
    mean, variance = model.process(T).marginals(T)
    features = model.feature_process(T)
    assert model.feature_process(T) is features
    assert model.process(T) is not features
    assert_close(features.marginals(T)[0], mean)
    assert_close(features.marginals(T)[1], variance)


def test_what_inference_mode_leaves_can_be_differentiated() -> None:
    data = observations(12)
    model = build(data)
    with torch.inference_mode():
        model.log_marginal_likelihood()
        sample_paths(model, n=2, seed=0)
        FeatureNIPV(model, mc_points=data.X)(data.X[:2].unsqueeze(-3))
    X = data.X[:2].clone().requires_grad_()
    FeatureNIPV(model, mc_points=data.X)(X.unsqueeze(-3)).sum().backward()
    sample_paths(model, n=2, seed=0).posterior(X).mean.sum().backward()
    model.train()
    model.log_marginal_likelihood().sum().backward()
    assert all(p.grad is not None for p in model.covar_module.parameters())


@pytest.mark.parametrize("name", KERNELS)
def test_few_rows_are_saved_with_any_kernel(name: str, tmp_path: Path) -> None:
    model = build(observations(9), covar_module=kernel(name, 2, ()))
    T = points()
    inside, outside = model.posterior(T).mean, model.posterior(T + 0.4).mean
    model.save(tmp_path / "model.pt")
    loaded = WISKI.load(tmp_path / "model.pt")
    assert isinstance(loaded._memory, RowMemory)
    assert torch.equal(loaded.posterior(T).mean, inside)
    assert torch.equal(loaded.posterior(T + 0.4).mean, outside)


@pytest.mark.parametrize("batch_shape", [(), (2,)])
def test_a_fit_to_few_rows_builds_no_matrix_of_the_nodes(
    batch_shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = WISKI(*observations(9, 1, 2, batch_shape).astuple())
    few = model.log_marginal_likelihood()
    learned = [*model.covar_module.parameters()]
    gradients = torch.autograd.grad(few.sum(), learned)
    monkeypatch.setattr(row_memory, "NODES_OF_PAIRS", torch.inf)
    many = model.log_marginal_likelihood()
    assert_close(few, many)
    for own, other in zip(gradients, torch.autograd.grad(many.sum(), learned), strict=True):
        assert_close(own, other)

    def refuse(*_: Any) -> Tensor:
        raise AssertionError("a matrix of all nodes")

    monkeypatch.setattr(row_memory, "NODES_OF_PAIRS", 40)
    monkeypatch.setattr("bo_stream.bases.grid.interpolation.node_correlation", refuse)
    model.log_marginal_likelihood().sum().backward()
