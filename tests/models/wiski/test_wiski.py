"""WISKI against the dense process with the kernel ``W K Wᵀ``, and what only a grid model does."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.exceptions.warnings import InputDataWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms.input import Normalize, Warp
from botorch.models.transforms.outcome import (
    Bilog,
    ChainedOutcomeTransform,
    Log,
    OutcomeTransform,
    Power,
    Standardize,
)
from botorch.utils.datasets import SupervisedDataset
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ZeroMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bo_stream import WISKI, CoarsePointsWarning
from bo_stream.models.outcomes.noise import NOISE_FLOOR
from bo_stream.models.wiski import memory as row_memory
from bo_stream.models.wiski.resolution import GridResolutionWarning, TruncationWarning
from bo_stream.testing.streams import (
    assert_close,
    assert_untouched,
    fingerprint,
    gaussian,
    joint_covariance,
)
from tests.oracles.gaussian_process import DenseGP, standardization
from tests.oracles.interpolation import interpolation_weights, line_weights, node_inputs
from tests.oracles.kernels import dense_kernel
from tests.oracles.reference import lift, reference, reference_posterior
from tests.support.problems import KERNELS, Observations, kernel, observations

pytestmark = [
    pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid"),
    pytest.mark.filterwarnings("ignore:The 20 features .max_rank. leave out"),
]

SIZES = {1: (12,), 2: (7, 8), 3: (5, 7, 6), 4: (5, 5, 5, 5)}


@dataclass(frozen=True)
class Problem:
    """A grid model's setting; every combination must equal the dense computation.

    Attributes:
        rows: Up to how many observations are held as rows.
    """

    kernel: str = "scaled"
    dim: int = 2
    noise: str = "learned"
    outputs: int = 1
    batch_shape: tuple[int, ...] = ()
    tolerance: float = 0.0
    max_rank: int = 1024
    rows: int = row_memory.MOST_ROWS

    def __str__(self) -> str:
        parts = (self.kernel, f"{self.dim}-D", self.noise, f"m{self.outputs}")
        space = f"{self.rows} rows"
        return "-".join((*parts, f"batch{list(self.batch_shape)}", f"{self.tolerance:g}", space))

    def data(self, n: int) -> Observations:
        data = observations(n, self.dim, self.outputs, self.batch_shape)
        return data.with_noise(self.noise)

    def model(self, data: Observations, **options: Any) -> WISKI:
        """A model with random hyperparameters."""
        shape = (*self.batch_shape, *([self.outputs] if self.outputs > 1 else []))
        with mock.patch.object(row_memory, "MOST_ROWS", self.rows):
            model = WISKI(
                *data.astuple(),
                covar_module=kernel(self.kernel, self.dim, shape),
                grid_size=SIZES[self.dim],
                tolerance=self.tolerance,
                max_rank=self.max_rank,
                **options,
            )
        with torch.no_grad():
            model.mean_module.constant = torch.randn_like(model.mean_module.constant)
            if isinstance(model.likelihood, GaussianLikelihood):
                model.likelihood.noise = 0.02 + 0.2 * torch.rand_like(model.likelihood.noise)
        return model

    def points(self) -> Tensor:
        """Test points, the corners of the box among them."""
        T = torch.rand(*self.batch_shape, 6, self.dim, dtype=torch.float64)
        T[..., 0, :], T[..., 1, :] = 0.0, 1.0
        return T


HELD_AS_ROWS = [
    *(Problem(kernel=name) for name in KERNELS),
    *(Problem(kernel=name, dim=dim) for dim in (1, 3, 4) for name in ("RBF", "product")),
    Problem(kernel="Matérn-1/2", dim=3),
    *(
        Problem(noise=noise, outputs=outputs, batch_shape=batch_shape)
        for noise in ("learned", "known", "mixed")
        for outputs in (1, 2)
        for batch_shape in ((), (2,))
    ),
]
EVERY = [
    *HELD_AS_ROWS,
    *(replace(problem, rows=0) for problem in HELD_AS_ROWS),
    *(Problem(noise=noise, outputs=2, batch_shape=(2,), rows=10) for noise in ("known", "mixed")),
]
TRUNCATED = [
    *(Problem(kernel="RBF", dim=dim, tolerance=1e-9, rows=0) for dim in (1, 2, 3)),
    *(Problem(kernel="product", dim=dim, tolerance=1e-3, rows=0) for dim in (2, 3)),
    Problem(kernel="scaled", tolerance=1e-2, rows=0),
    Problem(kernel="Matérn-1/2", tolerance=1e-9, max_rank=20),
    Problem(tolerance=1e-3, noise="mixed", rows=0),
]


def streamed(problem: Problem, data: Observations) -> WISKI:
    """A model that saw the data in three parts and was standardised by all of them."""
    model = problem.model(data[:7]).update(*data[7:8].astuple())
    model.posterior(problem.points())
    model.update(*data[8:].astuple()).train()
    return model


@pytest.mark.parametrize("problem", EVERY + TRUNCATED, ids=str)
def test_posterior_marginal_likelihood_and_all_gradients_are_the_dense_ones(
    problem: Problem,
) -> None:
    data, T = problem.data(18), problem.points()
    model = streamed(problem, data)
    rank = model.rank if problem in TRUNCATED else None
    posterior = model.posterior(T)
    mean, covariance = reference_posterior(model, data.X, data.Y, T, data.Yvar, rank=rank)
    assert_close(posterior.mean, mean)
    assert_close(joint_covariance(posterior), covariance)
    assert_close(posterior.variance, covariance.diagonal(dim1=-2, dim2=-1).mT)
    model.train()
    dense = reference(model, *data.astuple(), rank=rank).log_marginal_likelihood()
    own = model.log_marginal_likelihood()
    assert own.shape == dense.shape
    assert_close(own, dense)
    parameters = [p for p in model.parameters() if p.requires_grad]
    weights = torch.rand_like(dense)
    actual = torch.autograd.grad((weights * own).sum(), parameters)
    expected = torch.autograd.grad((weights * dense).sum(), parameters)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)


def test_the_truncated_problems_truncate() -> None:
    for problem in TRUNCATED:
        model = problem.model(problem.data(5))
        assert model.rank < torch.tensor(model.grid_size).prod()
        assert model.dropped > 0.0


@pytest.mark.parametrize("rows", [0, 55, 150])
def test_many_small_updates_do_not_drift(rows: int) -> None:
    problem = Problem(noise="mixed", outputs=2, rows=rows)
    data, T = problem.data(180), problem.points()
    model = problem.model(data[:20], outcome_transform=None)
    model.posterior(T)
    for i in range(20, len(data)):
        model.update(*data[slice(i, i + 1)].astuple())
        if i % 5 == 0:
            model.posterior(T)
    mean, covariance = reference_posterior(model, data.X, data.Y, T, data.Yvar)
    posterior = model.posterior(T)
    assert_close(posterior.mean, mean)
    assert_close(joint_covariance(posterior), covariance)


def test_two_outputs_of_very_different_lengthscales() -> None:
    """One set of features serves both, in which some eigenvalues of the smooth one are zero."""
    problem = Problem(kernel="RBF", outputs=2)
    data = problem.data(18)
    model = problem.model(data)
    model.covar_module.lengthscale = torch.tensor([[[5.0, 4.0]], [[0.06, 0.05]]])
    dense = reference(model, *data.astuple()).log_marginal_likelihood()
    assert_close(model.log_marginal_likelihood(), dense)
    parameters = list(model.parameters())
    actual = torch.autograd.grad(model.log_marginal_likelihood().sum(), parameters)
    expected = torch.autograd.grad(dense.sum(), parameters)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)


def test_a_shared_kernel_serves_all_outputs() -> None:
    data = observations(18, 2, outputs=2)
    model = WISKI(*data.astuple(), covar_module=kernel("product", 2), grid_size=7, tolerance=0.0)
    own = model.log_marginal_likelihood()
    dense = reference(model, *data.astuple()).log_marginal_likelihood()
    assert_close(own, dense)
    parameters = list(model.parameters())
    for a, e in zip(
        torch.autograd.grad(own.sum(), parameters),
        torch.autograd.grad(dense.sum(), parameters),
        strict=True,
    ):
        assert_close(a, e)


def test_a_zero_mean_stays_zero() -> None:
    data, T = observations(18), torch.rand(4, 2).double()
    model = WISKI(*data.astuple(), mean_module=ZeroMean(), grid_size=8, tolerance=0.0)
    mean, _ = reference_posterior(model, data.X, data.Y, T)
    assert_close(model.posterior(T).mean, mean)
    assert_close(
        model.log_marginal_likelihood(), reference(model, data.X, data.Y).log_marginal_likelihood()
    )


# --- forgetting, merging, refining, growing ------------------------------------------------------


@pytest.mark.parametrize("noise", ["learned", "known", "mixed"])
def test_forgetting_is_down_weighting(noise: str) -> None:
    """Observations that count γ times have the noise variance σ²/γ."""
    problem = Problem(noise=noise, outputs=2)
    old, new, T = problem.data(12), problem.data(6), problem.points()
    model = problem.model(old, outcome_transform=None)
    model.forget(0.5).forget(0.4).update(*new.astuple())
    dense = reference(
        model, torch.cat((old.X, new.X)), torch.cat((old.Y, new.Y)), joined(old.Yvar, new.Yvar)
    )
    factor = torch.cat((torch.full((12,), 0.2), torch.ones(6))).double()
    mean, covariance = replace(dense, noise=dense.noise / factor).posterior(lift(T, 2))
    posterior = model.posterior(T)
    assert_close(posterior.mean.mT, mean)
    assert_close(joint_covariance(posterior), covariance)
    assert model.num_observations == pytest.approx(0.2 * 12 + 6)


def joined(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return None if first is None or second is None else torch.cat((first, second))


@pytest.mark.parametrize("noise", ["learned", "known", "mixed"])
def test_the_noise_level_of_a_stream(noise: str) -> None:
    problem = Problem(noise=noise, outputs=2)
    data = problem.data(12)
    model = problem.model(data[:5]).update(*data[5:].astuple())
    if noise == "known":
        assert data.Yvar is not None
        expected = data.Yvar.mean(-2) / model.outcome_transform.stdvs.squeeze(-2) ** 2
    else:
        expected = model.likelihood.noise.squeeze(-1)
    assert_close(model.noise_level(), expected)
    model.forget(0.3)
    assert_close(model.noise_level(), expected)


def past_on_another_grid(model: WISKI, sizes: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """Weights on the model's nodes of points interpolated from the nodes of another grid."""

    def weights(X: Tensor) -> Tensor:
        old = node_inputs(model.bounds, sizes)
        W = torch.ones(len(old), 1, dtype=torch.float64)
        for i, size in enumerate(model.grid_size):
            line = beyond(old[:, i], *model.bounds[:, i].tolist(), size)
            W = (W.unsqueeze(-1) * line.unsqueeze(-2)).flatten(-2)
        return interpolation_weights(X, model.bounds, sizes) @ W

    return weights


def beyond(x: Tensor, lower: float, upper: float, size: int) -> Tensor:
    """Interpolation weights whose cubics go on outside the box, through four points of its cell."""
    cell = (upper - lower) / (size - 3)
    result = line_weights(x, lower, upper, size)
    for row, value in enumerate(x.tolist()):
        start = lower if value < lower else upper - cell if value > upper else None
        if start is not None:
            support = start + cell * torch.tensor([0.1, 0.4, 0.6, 0.9], dtype=torch.float64)
            inside = line_weights(support, lower, upper, size)
            powers = (support - start).unsqueeze(-1) ** torch.arange(4)
            at = (value - start) ** torch.arange(4, dtype=torch.float64)
            result[row] = at @ torch.linalg.solve(powers, inside)
    return result


def dense_after_refining(model: WISKI, past: DenseGP, old: tuple[int, ...], n: int) -> DenseGP:
    """The dense process in which the first n observations are interpolated twice."""
    nodes = node_inputs(model.bounds, model.grid_size)
    K = dense_kernel(model.covar_module, nodes, nodes)
    twice = past_on_another_grid(model, old)

    def weights(X: Tensor) -> Tensor:
        once = interpolation_weights(X, model.bounds, model.grid_size)
        if X is past.X:
            once[:n] = twice(X[:n])
        return once

    return replace(past, kernel=lambda X, X2: weights(X) @ K @ weights(X2).mT)


@pytest.mark.parametrize("sizes", [(10, 13), (5, 6), (7, 11)], ids=["finer", "coarser", "mixed"])
def test_refining_interpolates_the_past_twice(sizes: tuple[int, ...]) -> None:
    problem = Problem(noise="mixed", rows=0)
    old, new, T = problem.data(10), problem.data(6), problem.points()
    model = problem.model(old)
    assert model.refine(sizes) is model
    assert model.grid_size == sizes
    model.update(*new.astuple()).train()
    data = Observations(
        torch.cat((old.X, new.X)), torch.cat((old.Y, new.Y)), joined(old.Yvar, new.Yvar)
    )
    dense = dense_after_refining(model, reference(model, *data.astuple()), SIZES[2], len(old))
    mean, covariance = dense.posterior(T)
    posterior = model.posterior(T)
    centre, scale = standardization(data.Y)
    assert_close(posterior.mean, centre + scale * mean.unsqueeze(-1))
    assert_close(joint_covariance(posterior), scale**2 * covariance.unsqueeze(0))
    assert_close(model.log_marginal_likelihood(), dense.log_marginal_likelihood())


def test_refining_to_the_same_grid_changes_nothing() -> None:
    problem = Problem()
    data, T = problem.data(12), problem.points()
    model, same = (problem.model(data) for _ in range(2))
    same.load_state_dict(model.state_dict())
    same.refine(SIZES[2])
    assert_close(same.posterior(T).mean, model.posterior(T).mean)
    assert_close(same.posterior(T).variance, model.posterior(T).variance)


@pytest.mark.parametrize("rows", [0, 300])
def test_merging_a_refined_shard_is_one_refined_stream(rows: int) -> None:
    problem = Problem(noise="mixed", rows=rows)
    before, after, T = problem.data(10), problem.data(6), problem.points()
    shard = problem.model(before[:4]).refine((10, 13)).update(*after.astuple())
    merged = copy.deepcopy(shard).merge(problem.model(before[4:]))
    stream = problem.model(before).refine((10, 13)).update(*after.astuple())
    for model in (merged, stream):
        model.load_state_dict(shard.state_dict())
        model.train()
    assert_close(merged.posterior(T).mean, stream.posterior(T).mean)
    assert_close(joint_covariance(merged.posterior(T)), joint_covariance(stream.posterior(T)))
    assert_close(merged.log_marginal_likelihood(), stream.log_marginal_likelihood())


@pytest.mark.parametrize("rows", [0, 300])
def test_a_merged_shard_of_another_grid_goes_its_own_way(rows: int) -> None:
    problem = Problem(rows=rows)
    data = problem.data(6)
    model, shard = problem.model(data[:0]).refine((10, 13)), problem.model(data)
    model.merge(shard).posterior(problem.points())
    before = fingerprint(model)
    shard.update(*data.astuple())
    assert_untouched(model, before)


def test_merging_many_shards_of_another_grid_takes_no_more_memory() -> None:
    problem = Problem(rows=0)
    model = problem.model(problem.data(5)).refine((10, 13))
    grids = []
    for _ in range(3):
        model.merge(problem.model(problem.data(5)))
        grids.append(sum(1 for _ in model._memory))
    assert grids == [2, 2, 2]
    assert model.num_observations == 20


@pytest.mark.parametrize("noise", ["learned", "mixed"])
def test_what_all_lies_on_the_grid_from_before_refining_is_taken_out_there(noise: str) -> None:
    problem = Problem(noise=noise)
    data, T = problem.data(12), problem.points()
    model, never = problem.model(data), problem.model(data[:9])
    never.load_state_dict(model.state_dict())
    model.posterior(T)
    model.refine((10, 13)).retract(*data[9:].astuple())
    never.refine((10, 13))
    assert_close(model.posterior(T).mean, never.posterior(T).mean)
    assert_close(joint_covariance(model.posterior(T)), joint_covariance(never.posterior(T)))
    more = problem.data(3)
    model.retract(*data[:9].astuple()).update(*more.astuple()).retract(*more[:1].astuple())
    assert model.num_observations == 2


def test_what_may_lie_on_either_grid_is_not_taken_out() -> None:
    problem = Problem(rows=0)
    data, T = problem.data(12), problem.points()
    model = problem.model(data[:8]).refine((10, 13)).update(*data[8:].astuple())
    model.posterior(T)
    before = fingerprint(model)
    for rows in (data[:2], data[10:]):
        with pytest.raises(UnsupportedError, match=r"memory on 2 grids.* Retract before refine"):
            model.retract(*rows.astuple())
    assert_untouched(model, before)


def test_rows_are_taken_out_before_and_after_a_refinement() -> None:
    problem = Problem(noise="mixed")
    data, T = problem.data(12), problem.points()
    model = problem.model(data[:8]).refine((10, 13)).update(*data[8:].astuple())
    rest = copy.deepcopy(model)
    model.retract(*data[10:].astuple()).retract(*data[:2].astuple())
    assert_close(
        model.posterior(T).mean, rest.clear().update(*data[2:10].astuple()).posterior(T).mean
    )


@pytest.mark.parametrize("rows", [0, 300])
def test_many_rows_at_once_are_taken_out_as_one_by_one(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(noise="mixed", rows=rows)
    data, T = problem.data(20), problem.points()
    model = problem.model(data)
    few = copy.deepcopy(model).retract(*data[:9].astuple())
    monkeypatch.setattr("bo_stream.models.wiski.inference.WHITENED_ROWS", 8)
    assert_close(model.retract(*data[:9].astuple()).posterior(T).mean, few.posterior(T).mean)
    with pytest.raises(InputDataError, match="in memory"):
        model.retract(*data[:9].astuple())


@pytest.mark.parametrize(
    ("rows", "told"),
    [(0, r"outside the bounds .* never put in"), (300, r"not among its rows: .* never put in")],
)
def test_what_lies_outside_the_grid_was_never_in(rows: int, told: str) -> None:
    problem = Problem(rows=rows)
    model, more = problem.model(problem.data(8)), problem.data(2)
    before = fingerprint(model)
    with pytest.raises(InputDataError, match=told):
        model.retract(more.X + 1.0, more.Y)
    assert_untouched(model, before)


@pytest.mark.usefixtures("in_features")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shards_with_the_bounds_of_a_model_share_its_nodes(dtype: torch.dtype) -> None:
    X = (3.0 + 7.0 * torch.rand(30, 2)).to(dtype)
    Y = X.sum(-1, keepdim=True).sin()
    options = {"covar_module": RBFKernel(ard_num_dims=2), "grid_size": 12}
    model = WISKI(X[:10], Y[:10], **options)
    bounds = model.bounds
    for rows in (slice(10, 20), slice(20, 30)):
        model.merge(WISKI(X[rows], Y[rows], bounds=bounds, **options))
    assert sum(1 for _ in model._memory) == 1
    assert model.num_observations == 30


@pytest.mark.usefixtures("both_spaces")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shards_with_the_bounds_of_a_model_that_grew_share_its_nodes(dtype: torch.dtype) -> None:
    width = torch.tensor([0.3, 7.0]).to(dtype)
    X = (torch.rand(60, 2).to(dtype) + 3.3) * width
    Y = (X / width).sum(-1, keepdim=True).sin()
    options: dict[str, Any] = {"covar_module": RBFKernel(ard_num_dims=2).to(dtype)}
    model = WISKI(X[:10], Y[:10], grid_size=12, **options)
    whole = copy.deepcopy(model)
    for step, move in enumerate((0.47, -0.61, 0.93, -0.77)):
        rows = slice(10 * step + 10, 10 * step + 20)
        far = X[:1] + move * width
        model.update(far, Y[:1])
        bounds, size = model.bounds, model.grid_size
        beyond = bounds[1:] + 0.05 * width
        shard = WISKI(X[rows], Y[rows], bounds=bounds, grid_size=size, **options)
        model.merge(shard.update(beyond, Y[:1]))
        whole.update(far, Y[:1]).update(X[rows], Y[rows]).update(beyond, Y[:1])
        assert model.grid_size == whole.grid_size
    assert not getattr(model._memory, "earlier", ())  # rows are on one grid
    for each in (model, whole):
        each.train()
        each.eval()
    assert_close(model.posterior(X[50:]).mean, whole.posterior(X[50:]).mean)


@pytest.mark.parametrize("rows", [0, 300])
def test_growth_has_a_limit_and_says_so(rows: int) -> None:
    problem = Problem(rows=rows)
    model, T = problem.model(problem.data(8)), problem.points()
    model.posterior(T)
    before = fingerprint(model)
    far = torch.tensor([[0.5, 4.5]]).double()
    for verb in (
        lambda: model.update(far, far[:, :1]),
        lambda: model.posterior(far),
        lambda: model.condition_on_observations(far, far[:, :1]),
    ):
        with pytest.raises(InputDataError, match=r"too far outside the bounds .* dimension 1"):
            verb()
    assert_untouched(model, before)
    model.update(far - torch.tensor([0.0, 1.0]), far[:, :1])
    assert float(model.bounds[1, 1]) >= 3.5


def test_a_query_outside_takes_no_feature_from_the_inside() -> None:
    problem = Problem(kernel="Matérn-1/2", tolerance=1e-9, max_rank=20)
    model, T = problem.model(problem.data(30)), problem.points()
    variance, dropped = model.posterior(T).variance, model.dropped
    outside = model.posterior(T + 0.7)
    assert model.dropped == dropped
    assert torch.equal(model.posterior(T).variance, variance)
    model.posterior(T + 1.6)
    assert torch.equal(model.posterior(T + 0.7).mean, outside.mean)
    assert torch.equal(model.posterior(T + 0.7).variance, outside.variance)


@pytest.mark.parametrize("rows", [0, 300])
def test_a_query_outside_is_that_of_a_grid_that_grew(rows: int) -> None:
    problem = Problem(rows=rows)
    model, T = problem.model(problem.data(12)), problem.points() + 0.3
    grown = problem.model(problem.data(0))
    grown.load_state_dict(model.state_dict())
    grown.merge(model).update(T, T[:, :1]).retract(T, T[:, :1])
    assert bool((grown.bounds[1] >= 1.3).all())
    assert_close(model.posterior(T).mean, grown.posterior(T).mean)
    assert_close(joint_covariance(model.posterior(T)), joint_covariance(grown.posterior(T)))


def test_features_that_leave_out_much_of_the_prior_are_said() -> None:
    problem = Problem(kernel="Matérn-1/2", tolerance=1e-9, max_rank=12)
    model = problem.model(problem.data(9))
    with pytest.warns(TruncationWarning, match=r"12 features .* larger max_rank"):
        model.posterior(problem.points())
    assert model.dropped > 0.05


@pytest.mark.parametrize("rows", [0, 300])
def test_a_model_conditioned_on_data_cannot_grow_and_says_so(rows: int) -> None:
    problem = Problem(rows=rows)
    model, more = problem.model(problem.data(8)), problem.data(2)
    conditioned = model.condition_on_observations(more.X, more.Y)
    with pytest.raises(InputDataError, match="wider bounds"):
        conditioned.posterior(more.X + 1.0)


@pytest.mark.parametrize("size", [3, (7,), (7, 3), 7.5, "8"])
def test_refining_to_no_grid_changes_nothing(size: Any) -> None:
    problem = Problem()
    model = problem.model(problem.data(8))
    model.posterior(problem.points())
    before = fingerprint(model)
    with pytest.raises((ValueError, TypeError), match="grid_size"):
        model.refine(size)
    assert_untouched(model, before)


def test_refining_beyond_memory_is_refused() -> None:
    problem = Problem(dim=4)
    model = problem.model(problem.data(3))
    model.posterior(problem.points())
    before = fingerprint(model)
    with pytest.raises(ValueError, match=r"200 x 200 x 200 x 200 nodes would need [\d,.]+ GiB"):
        model.refine(200)
    assert_untouched(model, before)


def unlike(**options: Any) -> Callable[[Observations], WISKI]:
    options = {"grid_size": 7, "covar_module": RBFKernel(), **options}
    return lambda data: WISKI(*data.astuple(), **options)


@pytest.mark.parametrize(
    ("mine", "theirs", "difference"),
    [
        (unlike(), lambda d: WISKI(d.X, torch.cat((d.Y, d.Y), -1)), "outputs"),
        (unlike(), lambda d: WISKI(d.X[:, :1], d.Y), "input"),
        (unlike(), lambda d: WISKI(d.X.unsqueeze(0), d.Y.unsqueeze(0), grid_size=7), "batch_shape"),
        (unlike(), lambda d: WISKI(d.X, d.Y, torch.rand_like(d.Y), grid_size=7), "noise"),
        (unlike(outcome_transform=Log()), unlike(outcome_transform=None), "outcome transform"),
        (unlike(outcome_transform=Power(2.0)), unlike(outcome_transform=Power(0.5)), "outcome"),
        (
            unlike(input_transform=Normalize(2, bounds=torch.tensor([[0.0, 0], [1, 1]]).double())),
            unlike(input_transform=Normalize(2, bounds=torch.tensor([[0.0, 0], [1, 2]]).double())),
            "input transform",
        ),
        (unlike(), lambda d: torch.nn.Linear(1, 1), "Linear"),
    ],
)
def test_models_of_other_quantities_cannot_be_merged(
    mine: Callable[[Observations], WISKI], theirs: Callable[[Observations], Any], difference: str
) -> None:
    data = observations(6)
    model = mine(data)
    model.posterior(data.X)
    before = fingerprint(model)
    with pytest.raises(UnsupportedError, match=difference):
        model.merge(theirs(data))
    assert_untouched(model, before)


# --- known noise --------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 1e3])
def test_zero_noise_is_raised_to_a_part_of_the_outcomes_variance(factor: float) -> None:
    data, T = observations(12), torch.rand(4, 2).double()
    Y = 7.0 + factor * data.Y
    with pytest.warns(InputDataWarning, match="Yvar holds .* zero or less"):
        model = WISKI(data.X, Y, torch.zeros_like(Y), grid_size=9, tolerance=0.0)
    floored = torch.full_like(Y, NOISE_FLOOR) * Y.var()
    mean, covariance = reference_posterior(model, data.X, Y, T, floored)
    scale = standardization(Y)[1]
    assert_close(model.posterior(T).mean / scale, mean / scale, factor=100)
    assert_close(joint_covariance(model.posterior(T)) / scale**2, covariance / scale**2, factor=100)
    with pytest.warns(InputDataWarning, match="Yvar holds .* zero or less"):
        model.update(data.X, Y, torch.zeros_like(Y))


@pytest.mark.filterwarnings("ignore:Yvar holds .* zero or less")
def test_zero_noise_is_raised_alike_before_and_after_a_refit() -> None:
    """So that what was put in can be taken out again when the outcomes' scale has moved."""
    data = observations(12)
    zeros = torch.zeros_like(data.Y)
    model, other = (WISKI(data.X[:6], data.Y[:6], zeros[:6], grid_size=9) for _ in range(2))
    model.update(data.X[6:], 100.0 * data.Y[6:], zeros[6:])
    model.train().eval()
    model.retract(data.X[6:], 100.0 * data.Y[6:], zeros[6:])
    model.train().eval()
    T = torch.rand(4, 2).double()
    assert_close(model.posterior(T).mean, other.posterior(T).mean, factor=1e3)
    assert_close(model.posterior(T).variance, other.posterior(T).variance, factor=1e3)


def test_a_model_of_known_noise_needs_it_ever_after() -> None:
    data = observations(8).with_noise("known")
    model = WISKI(*data.astuple(), grid_size=7)
    model.posterior(data.X)
    before = fingerprint(model)
    assert data.Yvar is not None
    for Yvar in (None, torch.full_like(data.Yvar, torch.nan)):
        with pytest.raises(InputDataError, match="Yvar for every observation"):
            model.update(data.X, data.Y, Yvar)
    assert_untouched(model, before)


def test_known_noise_of_log_outcomes_follows_the_delta_method() -> None:
    data, T = observations(12).with_noise("known"), torch.rand(4, 2).double()
    transform = ChainedOutcomeTransform(log=Log(), standardize=Standardize(m=1))
    options = {"grid_size": 9, "tolerance": 0.0, "outcome_transform": transform}
    model = WISKI(*data[:5].astuple(), **options).update(*data[5:].astuple())
    model.train()
    assert data.Yvar is not None
    mean, covariance = reference_posterior(
        model, data.X, data.Y.log(), T, data.Yvar / data.Y.square()
    )
    posterior = gaussian(model.posterior(T))
    assert_close(posterior.mean, mean)
    assert_close(joint_covariance(posterior), covariance)


@pytest.mark.parametrize("transform", [Power(0.5), Bilog()], ids=["Power", "Bilog"])
def test_known_noise_of_other_transformed_outcomes_is_refused(transform: OutcomeTransform) -> None:
    data = observations(8).with_noise("known")
    with pytest.raises(UnsupportedError, match=r"cannot transform noise variances.*train_Yvar"):
        WISKI(*data.astuple(), outcome_transform=transform, grid_size=7)


def test_outcomes_without_a_logarithm_are_refused() -> None:
    data = observations(8)
    model = log_model(data)
    model.posterior(data.X)
    before = fingerprint(model)
    with pytest.raises(InputDataError, match="Y after its outcome transform"):
        model.update(data.X, data.Y - 100.0)
    with pytest.raises(InputDataError, match="Y after its outcome transform"):
        model.condition_on_observations(data.X, data.Y - 100.0)
    assert_untouched(model, before)


def log_model(data: Observations) -> WISKI:
    transform = ChainedOutcomeTransform(log=Log(), standardize=Standardize(m=1))
    return WISKI(*data.astuple(), outcome_transform=transform, grid_size=7)


# --- what the grid can carry --------------------------------------------------------------------


def test_too_short_a_lengthscale_is_told_with_the_grid_that_would_do() -> None:
    data = observations(10)
    model = WISKI(*data.astuple(), covar_module=RBFKernel(ard_num_dims=2), grid_size=12)
    model.posterior(data.X)
    model.covar_module.lengthscale = torch.tensor([[0.1, 0.6]])
    model.train()
    with pytest.warns(GridResolutionWarning, match=r"refine\(grid_size=\(\d+, 12\)\)") as caught:
        model.eval()
    message = str(caught[0].message)
    enough = eval(message.split("grid_size=")[1].split(") (of")[0])
    assert model.interpolation_error() > 0.05
    model.refine(enough)
    assert model.interpolation_error() <= 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train()
        model.eval()


def on_a_line(noise: float, dim: int = 4) -> WISKI:
    """A model of collinear inputs with the default grid, before its first training ends."""
    X = torch.linspace(0.02, 0.98, 60, dtype=torch.float64).unsqueeze(-1).repeat(1, dim)
    Y = (6.0 * X[:, :1]).sin() + noise**0.5 * torch.randn(60, 1).double()
    covar_module = RBFKernel(ard_num_dims=dim).double()
    covar_module.lengthscale = 0.3
    Yvar = torch.full_like(Y, noise)
    return WISKI(X, Y, Yvar, covar_module=covar_module, outcome_transform=None)


def test_a_default_grid_coarser_than_the_noise_is_said_once() -> None:
    model = on_a_line(1e-4)
    with pytest.warns(CoarsePointsWarning, match=r"coarser than the noise.*OSGPR") as caught:
        model.eval()
    assert caught[0].filename == __file__
    model.train()
    model.covar_module.lengthscale = 0.31
    model.eval()


@pytest.mark.parametrize(("noise", "dim"), [(1e-2, 4), (1e-6, 2), (1e-3, 3)])
def test_a_default_grid_is_fine_enough_for_ordinary_noise(noise: float, dim: int) -> None:
    on_a_line(noise, dim).eval()


def test_a_grid_that_the_noise_asks_for_is_advised() -> None:
    model = on_a_line(1e-4, 3)
    with pytest.warns(
        CoarsePointsWarning, match=r"refine\(grid_size=\(\d+, \d+, \d+\)\)"
    ) as caught:
        model.eval()
    enough = eval(str(caught[0].message).split("grid_size=")[1].split(") (of")[0])
    assert model.interpolation_error() > 5e-4
    assert model.refine(enough).interpolation_error() <= 5e-4
    on_a_line(1e-4, 3).refine((18, 18, 18)).eval()


@pytest.mark.usefixtures("in_features")
def test_fewer_features_where_the_noise_hides_them() -> None:
    data, more = observations(60), observations(20)
    model = WISKI(*data.astuple(), grid_size=12, tolerance=0.0)
    whole, exact = model.rank, model.posterior(more.X)
    few = model.truncate(1e-3).rank
    assert few < whole / 2
    assert model.dropped * 1.0 <= 1e-3 * model.noise_level().item()
    posterior = model.posterior(more.X)
    off = (posterior.mean - exact.mean).abs() / exact.variance.sqrt()
    assert 0.0 < off.max() < 0.05
    model.truncate(0.0)
    assert model.rank == whole
    assert_close(model.posterior(more.X).mean, exact.mean)
    with pytest.raises(ValueError, match=r"left_out in \[0, 1\)"):
        model.truncate(1.0)
    assert model.rank == whole


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_warning_points_at_the_users_line(wrapped: bool) -> None:
    data = observations(10)
    model = WISKI(*data.astuple(), covar_module=RBFKernel(ard_num_dims=2), grid_size=12)
    model.covar_module.lengthscale = 0.1
    owner = ExactMarginalLogLikelihood(model.likelihood, model) if wrapped else model
    owner.train()
    with pytest.warns(GridResolutionWarning) as caught:
        owner.eval()
    assert caught[0].filename == __file__


def test_a_fit_in_raw_units_finds_the_lengthscales() -> None:
    data = observations(40)
    Y = (4.0 * data.X).sin().sum(-1, keepdim=True)
    box = torch.tensor([[0.0, 0.0], [100.0, 20.0]], dtype=torch.float64)
    plain = WISKI(data.X, Y, grid_size=14)
    model = WISKI(box[1] * data.X, Y, bounds=box, grid_size=14)
    widths = model.covar_module.lengthscale / plain.covar_module.lengthscale
    assert_close(widths, box[1:], factor=1e3)  # BoTorch makes its kernel in float32
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    T = torch.rand(30, 2).double()
    error = model.posterior(box[1] * T).mean - (4.0 * T).sin().sum(-1, keepdim=True)
    assert float(error.square().mean().sqrt()) < 0.1


def test_a_grid_too_coarse_for_raw_units_advises_to_normalise() -> None:
    data = observations(10)
    box = torch.tensor([[0.0, 0.0], [100.0, 1.0]], dtype=torch.float64)
    kernel_of_user = RBFKernel(ard_num_dims=2)
    model = WISKI(
        box[1] * data.X, data.Y, covar_module=kernel_of_user, bounds=box, grid_size=12
    ).train()
    model.covar_module.lengthscale = 0.3
    with pytest.warns(GridResolutionWarning, match=r"input_transform=Normalize\(d=2\)"):
        model.eval()


def test_bounds_and_sizes_are_those_asked_for() -> None:
    data = observations(6)
    box = torch.tensor([[-1.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    model = WISKI(*data.astuple(), bounds=box, grid_size=(9, 11))
    assert_close(model.bounds, box)
    assert model.grid_size == (9, 11)
    assert_close(WISKI(*data.astuple()).bounds, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))


def test_bounds_are_transformed_like_inputs() -> None:
    data = observations(6)
    box = torch.tensor([[10.0, 20.0], [30.0, 50.0]], dtype=torch.float64)
    X = box[0] + (box[1] - box[0]) * data.X
    model = WISKI(X, data.Y, input_transform=Normalize(2, bounds=box), bounds=box, grid_size=9)
    plain = WISKI(data.X, data.Y, grid_size=9)
    assert_close(model.bounds, plain.bounds)
    assert_close(model.posterior(X).mean, plain.posterior(data.X).mean)
    assert_close(
        model.fantasize(X, lambda p: p.mean[None] + 1.0).posterior(X).mean,
        plain.fantasize(data.X, lambda p: p.mean[None] + 1.0).posterior(data.X).mean,
    )


def test_transforms_with_parameters_to_learn_are_refused() -> None:
    data = observations(6)
    warp = Warp(d=2, indices=[0, 1], bounds=torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    with pytest.raises(UnsupportedError, match="Warp has parameters to learn"):
        WISKI(*data.astuple(), input_transform=warp)


def test_five_inputs_are_refused_with_alternatives() -> None:
    data = observations(6, dim=5)
    with pytest.raises(UnsupportedError, match=r"1 to 4 inputs .*SingleTaskGP"):
        WISKI(*data.astuple())


def test_a_grid_beyond_memory_is_refused_with_its_size() -> None:
    data = observations(6, dim=4)
    with pytest.raises(ValueError, match=r"150 x 150 x 150 x 150 nodes would need [\d,.]+ GiB"):
        WISKI(*data.astuple(), grid_size=150)


# --- BoTorch's habits ---------------------------------------------------------------------------


def test_is_built_from_a_data_set() -> None:
    data = observations(8).with_noise("known")
    dataset = SupervisedDataset(
        data.X, data.Y, Yvar=data.Yvar, feature_names=["a", "b"], outcome_names=["y"]
    )
    model = WISKI(**WISKI.construct_inputs(dataset, grid_size=9))
    assert model.grid_size == (9, 9)
    direct = WISKI(*data.astuple(), grid_size=9)
    assert_close(model.posterior(data.X).mean, direct.posterior(data.X).mean)


def test_does_not_change_its_arguments() -> None:
    data = observations(8).with_noise("mixed")
    transform = Standardize(m=1)
    before = copy.deepcopy((data.astuple(), transform.state_dict()))
    for _ in range(2):
        model = WISKI(*data.astuple(), outcome_transform=transform, grid_size=7)
        model.update(*data.astuple()).retract(*data.astuple())
        model.condition_on_observations(data.X, data.Y)
        model.train()
    for now, then in zip(data.astuple(), before[0], strict=True):
        assert now is not None
        assert torch.equal(now.nan_to_num(), then.nan_to_num())
    for name, value in transform.state_dict().items():
        assert torch.equal(value, before[1][name])


def test_the_work_of_an_update_does_not_grow_with_the_stream() -> None:
    problem = Problem(kernel="RBF", tolerance=1e-9, rows=0)
    T, more = problem.points(), problem.data(3)
    work = []
    for n in (10, 5_000):
        model = problem.model(problem.data(10)).update(*problem.data(n).astuple())
        model.covar_module.lengthscale = 0.5
        model.posterior(T)
        with FlopCounterMode(display=False) as counter:
            model.update(*more.astuple()).posterior(T)
        work.append(counter.get_total_flops())
    assert work[0] == work[1] > 0


def test_a_crash_while_saving_leaves_the_old_file(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, path = observations(8), tmp_path / "model.pt"
    model = WISKI(*data.astuple(), grid_size=7)
    model.save(path)
    old = path.read_bytes()
    model.update(*data.astuple())

    def dies(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", dies)
    with pytest.raises(OSError, match="No space left"):
        model.save(path)
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]
