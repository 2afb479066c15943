"""WISKI with kernels that add up over groups of inputs, against the dense process."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.exceptions.errors import UnsupportedError
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms.input import FilterFeatures
from gpytorch.kernels import AdditiveKernel, Kernel, RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream import WISKI
from bo_stream.acquisition import FeatureNIPV, sample_paths, select_from_pool
from bo_stream.acquisition.feature_nipv import FEW_POINTS
from bo_stream.bases.kernels import ProductMatern
from bo_stream.models.wiski.resolution import GridResolutionWarning
from bo_stream.testing.streams import assert_close, joint_covariance
from tests.acquisition.examples import greedy_choice
from tests.oracles.interpolation import additive_interpolated_kernel
from tests.oracles.kernels import DenseKernel, dense_kernel
from tests.oracles.reference import reference, reference_posterior
from tests.support.problems import Observations, observations

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")

SIZES = (9, 7, 8)
GROUPS: dict[str, tuple[tuple[int, ...], ...]] = {
    "one each": ((2,), (0,), (1,)),
    "disjoint": ((1, 2), (0,)),
    "overlapping": ((0,), (0, 1), (2,), (1, 2)),
    "the same twice": ((0, 1), (2,), (0, 1)),
    "two on one input": ((0,), (2,), (0,), (1,)),
}


def additive(
    groups: tuple[tuple[int, ...], ...], batch: tuple[int, ...] = (), nu: float | None = None
) -> Kernel:
    """A scaled sum of scaled kernels, rough and smooth in turn or all of one smoothness."""
    parts, shape = [], torch.Size(batch)
    for i, group in enumerate(groups):
        options = {"ard_num_dims": len(group), "active_dims": group, "batch_shape": shape}
        rough = ProductMatern(nu=1.5 if nu is None else nu, **options)
        base = RBFKernel(**options) if nu is None and i % 2 else rough
        parts.append(ScaleKernel(base, batch_shape=shape).double())
        base.lengthscale = 0.3 + 0.6 * torch.rand_like(base.lengthscale)
        parts[-1].outputscale = 0.3 + torch.rand_like(parts[-1].outputscale)
    whole = ScaleKernel(AdditiveKernel(*parts), batch_shape=shape).double()
    whole.outputscale = 0.5 + torch.rand_like(whole.outputscale)
    return whole


def model_of(name: str, data: Observations, **options: object) -> WISKI:
    outputs = data.Y.shape[-1]
    batch = (*data.X.shape[:-2], *([outputs] if outputs > 1 else []))
    defaults = {"grid_size": SIZES, "tolerance": 0.0, "max_rank": 5000}
    kernel = additive(GROUPS[name], batch)
    return WISKI(*data.astuple(), covar_module=kernel, **{**defaults, **options})


def interpolated(model: WISKI) -> DenseKernel:
    """The dense kernel on the model's own grids, whatever has become of them."""
    mesh = model._memory.grid
    grids = dict(zip(mesh.groups, mesh.parts, strict=True))
    return additive_interpolated_kernel(
        model.covar_module, lambda dims: (grids[dims].bounds, grids[dims].size)
    )


def assert_equals_dense(model: WISKI, data: Observations) -> None:
    """Posterior, log marginal likelihood and its gradient in every hyperparameter."""
    T, kernel = torch.rand_like(data.X[..., :6, :]), interpolated(model)
    mean, covariance = reference_posterior(model, *data.astuple()[:2], T, data.Yvar, kernel=kernel)
    posterior = model.posterior(T)
    assert_close(posterior.mean, mean)
    assert_close(joint_covariance(posterior), covariance)
    own = model.log_marginal_likelihood()
    dense = reference(model, *data.astuple(), kernel=kernel).log_marginal_likelihood()
    assert_close(own, dense)
    parameters, weights = list(model.parameters()), torch.rand_like(dense)
    actual = torch.autograd.grad((weights * own).sum(), parameters)
    expected = torch.autograd.grad((weights * dense).sum(), parameters)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, factor=10)


@pytest.mark.parametrize("name", GROUPS)
def test_equals_the_dense_process(name: str) -> None:
    data = observations(20, 3)
    assert_equals_dense(model_of(name, data), data)


@pytest.mark.parametrize("noise", ["learned", "mixed", "known"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_batches_outputs_and_noise_equal_the_dense_process(outputs: int, noise: str) -> None:
    data = observations(14, 3, outputs, (2,)).with_noise(noise)
    assert_equals_dense(model_of("overlapping", data), data)


def test_a_kernel_that_all_outputs_share() -> None:
    data = observations(14, 3, 2)
    kernel = additive(GROUPS["disjoint"])
    model = WISKI(*data.astuple(), covar_module=kernel, grid_size=SIZES, tolerance=0.0)
    assert_equals_dense(model, data)


def test_a_grown_stream_equals_the_dense_process_on_the_grown_grids() -> None:
    """Grids that share an input grow by cells of their own."""
    data = observations(20, 3)
    far = Observations(1.4 * data.X - 0.2, data.Y)
    far.X[0], far.X[1] = -0.2, 1.2
    model = model_of("overlapping", data, grid_size=((9,), (7, 8), (6,), (5, 7)))
    model.update(*far.astuple()).train()
    widths = {float(grid.bounds.diff(dim=0)[0, 0]) for grid in model._memory.grid.parts}
    assert len(widths) > 2
    both = Observations(torch.cat((data.X, far.X)), torch.cat((data.Y, far.Y)))
    assert_equals_dense(model, both)
    assert model.bounds.shape == (2, 3)


@pytest.mark.parametrize("name", ["one each", "overlapping"])
def test_a_stream_is_its_batch(name: str) -> None:
    data, T = observations(60, 3), torch.rand(7, 3).double()
    kernel = additive(GROUPS[name])
    options = {"grid_size": SIZES, "outcome_transform": None}
    streamed = WISKI(*data[:10].astuple(), covar_module=kernel, **options)
    whole = WISKI(*data.astuple(), covar_module=kernel, **options)
    for start in range(10, 60, 10):
        streamed.update(*data[slice(start, start + 10)].astuple()).posterior(T)
    ours, theirs = streamed.posterior(T), whole.posterior(T)
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours.variance, theirs.variance, rtol=1e-10, atol=1e-10)


def test_is_the_exact_process_up_to_interpolation() -> None:
    data = observations(60, 4)
    kernel = additive(((0,), (1, 2), (3,)))
    model = WISKI(*data.astuple(), covar_module=kernel)
    assert model.grid_size == ((192,), (36, 36), (192,))
    T = torch.rand(50, 4).double()
    exact = reference_posterior(
        model, *data.astuple()[:2], T, kernel=lambda X, X2: dense_kernel(kernel, X, X2)
    )
    posterior = model.posterior(T)
    scale = float(exact[0].std().detach())
    assert float((posterior.mean - exact[0]).detach().abs().max()) < 0.01 * scale
    variance = exact[1].diagonal(dim1=-2, dim2=-1).mT
    assert float((posterior.variance - variance).detach().abs().max()) < 0.01 * scale**2
    assert model.interpolation_error() < 0.05


# --- learning -----------------------------------------------------------------------------------


def loss_of(model: WISKI) -> Tensor:
    return model.compute_custom_loss(ExactMarginalLogLikelihood(model.likelihood, model)).sum()


@pytest.mark.parametrize("factor", [1.0, 1.2, 0.3])
def test_the_objective_of_a_fit_is_the_dense_one(factor: float) -> None:
    """Rough kernels keep every eigenvector; from one centre and from a new one."""
    data = observations(25, 3)
    rough = additive(GROUPS["overlapping"], nu=0.5)
    model = WISKI(*data.astuple(), covar_module=rough, grid_size=SIZES)
    loss_of(model)
    with torch.no_grad():
        for part in model.covar_module.base_kernel.kernels:
            part.outputscale = part.outputscale / factor
            part.base_kernel.lengthscale = factor * part.base_kernel.lengthscale
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    dense = reference(model, *data.astuple(), kernel=interpolated(model)).log_marginal_likelihood()
    own, expected = loss_of(model), -mll._add_other_terms(dense, []) / len(data)
    assert_close(own, expected)
    parameters = [p for p in model.parameters() if p.requires_grad]
    pairs = zip(
        torch.autograd.grad(own, parameters), torch.autograd.grad(expected, parameters), strict=True
    )
    for a, e in pairs:
        assert_close(a, e, factor=10)


def test_a_part_that_comes_to_matter_enters_the_objective() -> None:
    """A part too small for any feature may grow while lengthscales stay."""
    data = observations(40, 2)
    kernel = additive(((0,), (1,)))
    small = kernel.base_kernel.kernels[1]
    small.outputscale = 1e-14
    model = WISKI(*data.astuple(), covar_module=kernel, grid_size=20)
    loss_of(model)
    small.outputscale = 1.0
    fresh = copy.deepcopy(model)
    fresh._cache = None
    assert_close(loss_of(model), loss_of(fresh), factor=100)


def ten(n: int) -> tuple[Tensor, Tensor]:
    """Inputs, and a sum of functions of each of ten and of one pair."""
    X = torch.rand(n, 10).double()
    frequencies = torch.linspace(1.0, 6.0, 10).double()
    f = torch.sin(frequencies * X).sum(-1) + 2.0 * torch.cos(4.0 * X[:, 0] * X[:, 1])
    return X, f.unsqueeze(-1)


def ten_kernel() -> Kernel:
    parts = [ScaleKernel(RBFKernel(active_dims=(i,))) for i in range(10)]
    pair = ScaleKernel(RBFKernel(ard_num_dims=2, active_dims=(0, 1)))
    return AdditiveKernel(*parts, pair).double()


@pytest.mark.integration
def test_a_fit_in_ten_dimensions_predicts_as_the_exact_process() -> None:
    (X, f), (T, truth) = ten(250), ten(200)
    Y = f + 0.1 * torch.randn_like(f)
    model = WISKI(X, Y, covar_module=ten_kernel(), grid_size=24)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    kernel = model.covar_module
    exact, _ = reference_posterior(model, X, Y, T, kernel=lambda A, B: dense_kernel(kernel, A, B))
    ours, best = (
        float((mean.detach() - truth).square().mean().sqrt())
        for mean in (model.posterior(T).mean, exact)
    )
    assert ours <= 1.02 * best
    assert ours < 0.1
    assert model.rank <= 1024


# --- acquisition --------------------------------------------------------------------------------


def test_feature_nipv_is_botorchs() -> None:
    data = observations(25, 3)
    model, X = model_of("overlapping", data).eval(), torch.rand(4, 2, 3).double()
    for count in (50, FEW_POINTS + 1):
        mc_points = torch.rand(count, 3).double()
        expected = qNegIntegratedPosteriorVariance(model, mc_points)(X)
        assert_close(FeatureNIPV(model, mc_points)(X) / expected, torch.ones(4).double())
    line = (torch.arange(24).double() + 0.5) / 24
    midpoints = torch.cartesian_prod(line, line, line)
    box = FeatureNIPV(model, bounds=torch.tensor([[0.0] * 3, [1.0] * 3]))(X)
    torch.testing.assert_close(box, FeatureNIPV(model, midpoints)(X), rtol=0.02, atol=0.0)


def test_the_choice_from_a_pool_is_that_of_trying_all() -> None:
    data, pool, points = observations(25, 3), torch.rand(30, 3).double(), torch.rand(20, 3).double()
    model = model_of("overlapping", data)
    gp = reference(model, *data.astuple(), kernel=interpolated(model))
    noise = model.noise_level().detach()
    expected = greedy_choice(gp, pool, points, 5, noise, set(range(30)))
    assert select_from_pool(model, pool, 5, points).tolist() == expected


def test_paths_have_the_posteriors_moments() -> None:
    data, T = observations(20, 3), torch.rand(6, 3).double()
    model = model_of("disjoint", data)
    draws = sample_paths(model, 4000, seed=0)(T).squeeze(-1)
    posterior = model.posterior(T)
    sd = posterior.variance.detach().sqrt().squeeze(-1)
    assert bool(((draws.mean(0) - posterior.mean.detach().squeeze(-1)).abs() < 0.1 * sd).all())
    assert bool(((draws.std(0) / sd - 1.0).abs() < 0.1).all())


# --- the grids ----------------------------------------------------------------------------------


def test_refining_to_the_same_grids_changes_nothing() -> None:
    data, T = observations(20, 3), torch.rand(6, 3).double()
    model = model_of("overlapping", data)
    before = model.posterior(T)
    after = model.refine(SIZES).posterior(T)
    assert_close(after.mean, before.mean)
    assert_close(after.variance, before.variance)


def test_what_comes_after_refining_is_on_the_new_grids() -> None:
    data, T = observations(20, 3), torch.rand(6, 3).double()
    model = model_of("overlapping", data[:0], outcome_transform=None)
    assert model.refine(12).grid_size == ((12,), (12, 12), (12,), (12, 12))
    sizes = ((10,), (9, 11), (6,), (8, 7))
    assert model.refine(sizes).grid_size == sizes
    model.update(*data.astuple())
    mean, _ = reference_posterior(model, *data.astuple()[:2], T, kernel=interpolated(model))
    assert_close(model.posterior(T).mean, mean)


def test_merging_a_refined_shard_is_one_refined_stream() -> None:
    before, after, T = observations(10, 3), observations(6, 3), torch.rand(6, 3).double()
    kernel = additive(GROUPS["overlapping"])
    options = {"covar_module": kernel, "grid_size": SIZES, "outcome_transform": None}
    shard = WISKI(*before[:4].astuple(), **options).refine(10).update(*after.astuple())
    merged = shard.merge(WISKI(*before[4:].astuple(), **options))
    stream = WISKI(*before.astuple(), **options).refine(10).update(*after.astuple())
    assert_close(merged.posterior(T).mean, stream.posterior(T).mean)
    assert_close(merged.posterior(T).variance, stream.posterior(T).variance)


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    data, T = observations(20, 3), torch.rand(6, 3).double()
    model = model_of("overlapping", data)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    more = observations(5, 3)
    ours, theirs = (m.update(*more.astuple()).posterior(T) for m in (model, loaded))
    assert torch.equal(ours.mean, theirs.mean)
    assert torch.equal(ours.variance, theirs.variance)


def test_the_warning_names_a_size_for_each_grid() -> None:
    model = model_of("disjoint", observations(20, 3))
    with torch.no_grad():
        for part in model.covar_module.base_kernel.kernels:
            part.base_kernel.lengthscale = 0.05
    with pytest.warns(GridResolutionWarning, match=r"refine\(grid_size=\(\(\d+, \d+\), \(\d+,\)\)"):
        model.train().eval()


@pytest.mark.parametrize(
    "grid_size",
    [3, (9, 9), ((9,), (9, 9)), ((9, 9), (9,), (9,)), ((9, 9), 9), ((9, 3), (9,)), (9, 9, 9.0)],
)
def test_sizes_that_fit_no_group_are_refused(grid_size: object) -> None:
    with pytest.raises(ValueError, match=r"grid_size .* grids of \(\(1, 2\), \(0,\)\)"):
        model_of("disjoint", observations(5, 3), grid_size=grid_size)


def test_five_inputs_in_one_part_are_too_many() -> None:
    data = observations(5, 6)
    wide = RBFKernel(active_dims=(0, 1, 2, 3, 4)) + RBFKernel(active_dims=(5,))
    with pytest.raises(UnsupportedError, match=r"1 to 4 inputs, got .* \(0, 1, 2, 3, 4\)"):
        WISKI(*data.astuple(), covar_module=wide)


def test_a_product_over_many_inputs_is_told_of_sums() -> None:
    data = observations(5, 6)
    for kernel in (None, RBFKernel(), RBFKernel(active_dims=(0, 1))):
        with pytest.raises(UnsupportedError, match="sum of kernels with at most 4 active_dims"):
            WISKI(*data.astuple(), covar_module=kernel)


def test_an_input_that_no_part_acts_on_is_named() -> None:
    data = observations(5, 4)
    kernel = RBFKernel(active_dims=(0,)) + RBFKernel(active_dims=(2,))
    with pytest.raises(UnsupportedError, match=r"all 4 inputs, but no part acts on \[1, 3\]"):
        WISKI(*data.astuple(), covar_module=kernel)
    two = RBFKernel(active_dims=(0,)) + RBFKernel(active_dims=(1,))
    chosen = FilterFeatures(torch.tensor([0, 2]))
    assert WISKI(*data.astuple(), covar_module=two, input_transform=chosen).rank > 2


def test_memories_of_other_groups_are_not_merged() -> None:
    data = observations(8, 3)
    with pytest.raises(UnsupportedError, match=r"different groups of inputs"):
        model_of("disjoint", data).merge(model_of("one each", data))
