"""The parts of a search in a region: the box, candidates, climbing, leaps, and the domain."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpytorch.kernels import LinearKernel, RBFKernel, ScaleKernel
from torch import Tensor
from torch.distributions import MultivariateNormal

from bo_stream import AutoGP
from bo_stream.acquisition import sample_paths
from bo_stream.errors import UsageError
from bo_stream.loops.models import KERNELS, many_input_kernel
from bo_stream.loops.optimization import region as region_module
from bo_stream.loops.optimization.region import (
    CHANGED,
    FIRST_LENGTH,
    IMPROVEMENT,
    LONGEST,
    NOISES,
    POINTS,
    SCALES,
    SHAPE,
    TOLERANCE,
    AdditiveTrend,
    Domain,
    LogScale,
    TrustRegion,
    improves,
    input_lengthscales,
    maximize_paths,
    region_candidates,
)

BETTER = torch.tensor([2.0]), torch.tensor([0.0, 1.0])
SAME = torch.tensor([1.0]), torch.tensor([0.0, 1.0])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=seeded(seed), dtype=torch.float64)


def model_of(d: int, lengthscales: Tensor) -> AutoGP:
    X = uniform(6, d)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=d)).double()
    kernel.base_kernel.lengthscale = lengthscales
    return AutoGP(X, X.sum(-1, keepdim=True).sin(), covar_module=kernel, families="exact")


# --- the box -------------------------------------------------------------------------------------


def test_a_region_doubles_after_three_successes_in_sequence() -> None:
    region = TrustRegion(dim=20, batch=10)
    assert [region.update(*BETTER) for _ in range(2)] == [True, True]
    assert not region.update(*SAME)
    for length in (FIRST_LENGTH, FIRST_LENGTH, LONGEST, LONGEST, LONGEST, LONGEST):
        region.update(*BETTER)
        assert region.length == length
    assert region.failures == 0


@pytest.mark.parametrize(("dim", "batch", "patience"), [(20, 10, 2), (21, 10, 3), (2, 1, 4)])
def test_a_region_halves_after_failures_of_about_d_evaluations(
    dim: int, batch: int, patience: int
) -> None:
    region = TrustRegion(dim, batch)
    lengths = []
    for _ in range(2 * patience):
        region.update(*SAME)
        lengths.append(region.length)
    halved = [FIRST_LENGTH] * (patience - 1) + [FIRST_LENGTH / 2] * patience
    assert lengths == [*halved, FIRST_LENGTH / 4]


def test_failures_are_counted_in_evaluations() -> None:
    """Of batches of any size: seven of one and one of three are ten evaluations of twenty."""
    region = TrustRegion(20, 1)
    for batch in (*[1] * 7, 3, 9):
        region.batch = batch
        region.update(*SAME)
        assert region.length == FIRST_LENGTH
    region.batch = 1
    region.update(*SAME)
    assert region.length == FIRST_LENGTH / 2


def test_a_region_collapses_and_begins_again() -> None:
    region = TrustRegion(dim=4, batch=4)
    count = 0
    while not region.has_collapsed:
        region.update(*SAME)
        count += 1
    assert count == 7
    region.restart()
    assert region == TrustRegion(dim=4, batch=4)


def test_what_rounding_or_noise_may_be_is_no_improvement() -> None:
    known = torch.tensor([-1.0, 1.0])  # of standard deviation 1
    assert not improves(torch.tensor([1.0 + 0.9 * IMPROVEMENT]), known)
    assert improves(torch.tensor([1.0 + 1.1 * IMPROVEMENT, -5.0]), known)
    equal = torch.full((3,), 4.0)
    assert not improves(equal, equal)


def test_sides_follow_the_lengthscales() -> None:
    scales = torch.tensor([0.1, 0.4, 1.6], dtype=torch.float64)
    region = TrustRegion(dim=3, batch=1, length=0.1)
    centre = torch.full((3,), 0.5, dtype=torch.float64)
    low, high = region.bounds(model_of(3, scales), centre)
    sides = high - low
    torch.testing.assert_close((low + high) / 2, centre)
    assert sides.log().mean().exp() == pytest.approx(0.1)
    torch.testing.assert_close(sides[1:] / sides[:-1], torch.full((2,), 4.0).double() ** SHAPE)


def test_the_box_is_within_the_unit_cube_and_a_cube_without_lengthscales() -> None:
    X = uniform(6, 2)
    linear = AutoGP(X, X[:, :1], covar_module=LinearKernel().double(), families="exact")
    region = TrustRegion(dim=2, batch=1, length=0.5)
    bounds = region.bounds(linear, torch.tensor([0.1, 0.5], dtype=torch.float64))
    assert bounds.tolist() == pytest.approx(torch.tensor([[0.0, 0.25], [0.35, 0.75]]))


@pytest.mark.parametrize(("dim", "batch"), [(0, 1), (1, 0), (2.5, 1)])
def test_sizes_are_checked(dim: int, batch: int) -> None:
    with pytest.raises(ValueError, match=r"Expected (dim|batch) .*(at least 1|whole)"):
        TrustRegion(dim, batch)


@pytest.mark.parametrize("length", [math.nan, math.inf, 0.0, -1.0])
def test_the_length_is_checked(length: float) -> None:
    with pytest.raises(ValueError, match=f"length to be positive and finite, got {length}"):
        TrustRegion(2, 1, length=length)


def test_a_batch_without_values_is_refused() -> None:
    region = TrustRegion(3, 2)
    with pytest.raises(ValueError, match="new to have the values of the last batch, got none"):
        region.update(torch.empty(0), torch.tensor([1.0]))
    assert region == TrustRegion(3, 2)


# --- candidates and their climb ------------------------------------------------------------------


def test_candidates_are_steps_along_differences_and_perturbations() -> None:
    d, n = 100, 400
    good = uniform(5, d)
    bounds = torch.stack((good[0] - 0.2, good[0] + 0.2)).clamp(0.0, 1.0)
    C = region_candidates(good, bounds, n, seeded(1))
    assert C.shape == (n, d)
    assert bool(((bounds[0] <= C) & (bounds[1] >= C)).all())
    moved, perturbed = C[: n // 2], C[n // 2 :]
    changed = (perturbed != good[0]).sum(-1)
    assert int(changed.min()) >= 1
    assert float(changed.double().mean()) == pytest.approx(20.0, abs=2.0)  # 14 standard errors
    wide = region_candidates(good, torch.tensor([[-9.0] * d, [9.0] * d]).double(), n, seeded(1))
    directions = torch.stack([a - b for a, b in itertools.product(good, good)]).mT
    steps = (wide[: n // 2] - good[0]).mT
    solution = torch.linalg.lstsq(directions, steps, driver="gelsd").solution
    torch.testing.assert_close(directions @ solution, steps)
    assert int((moved != good[0]).any(-1).sum()) > n // 3


def test_every_candidate_of_few_inputs_differs_from_the_best_point() -> None:
    X = uniform(1, 2)
    C = region_candidates(X, torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double(), 50, seeded())
    assert bool((C[25:] != X).all())
    torch.testing.assert_close(C[:25], X.expand(25, 2))  # one point has no differences
    again = region_candidates(X, torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double(), 50, seeded())
    assert torch.equal(C, again)


def test_each_function_is_climbed_within_the_box() -> None:
    model = model_of(3, torch.full((3,), 0.5).double())
    C = uniform(30, 3, seed=2)
    paths = sample_paths(model, 4, seed=0, at=C)
    bounds = torch.tensor([[0.1] * 3, [0.9] * 3]).double()
    starts = C[:4].clamp(0.1, 0.9)
    X = maximize_paths(paths, starts, bounds, 200)
    assert bool(((bounds[0] <= X) & (bounds[1] >= X)).all())
    X.requires_grad_()
    values = paths(X.unsqueeze(-2)).squeeze()
    assert bool((values >= paths(starts.unsqueeze(-2)).squeeze()).all())
    (slope,) = torch.autograd.grad(values.sum(), X)
    low, high = bounds
    blocked = (X.eq(low) & (slope < 0)) | (X.eq(high) & (slope > 0))
    assert float(slope[~blocked].abs().max()) < 1e-3  # a maximum in the box


def test_inputs_without_width_stay() -> None:
    model = model_of(3, torch.full((3,), 0.5).double())
    starts = uniform(4, 3, seed=2)
    paths = sample_paths(model, 4, seed=0, at=starts)
    low, high = torch.zeros(4, 3).double(), torch.ones(4, 3).double()
    low[:, 1] = high[:, 1] = starts[:, 1]
    X = maximize_paths(paths, starts, torch.stack((low, high)), 20)
    assert torch.equal(X[:, 1], starts[:, 1])
    still = maximize_paths(paths, starts, torch.stack((starts, starts)), 20)
    assert torch.equal(still, starts)
    assert still.data_ptr() != starts.data_ptr()  # a caller changes one of them


def test_candidates_need_a_good_point() -> None:
    with pytest.raises(ValueError, match="X to have the best point at least, got no rows"):
        region_candidates(torch.empty(0, 2), torch.tensor([[0.0, 0.0], [1.0, 1.0]]), 5)


@pytest.mark.parametrize("wrong", ["above", "not a number", "bounds upside down"])
def test_starts_outside_of_the_bounds_are_refused(wrong: str) -> None:
    starts, bounds = uniform(2, 3), torch.stack((torch.zeros(3), torch.ones(3))).double()
    paths = sample_paths(model_of(3, torch.full((3,), 0.5).double()), 2, seed=0, at=starts)
    if wrong == "bounds upside down":
        bounds = bounds.flip(0)
    else:
        starts[1, 2] = 1.1 if wrong == "above" else math.nan
    with pytest.raises(ValueError, match=r"starts within the bounds, .* got some"):
        maximize_paths(paths, starts, bounds, 5)


def test_functions_of_several_outputs_are_not_maximised() -> None:
    X = uniform(6, 3)
    paths = sample_paths(AutoGP(X, X[:, :2].sin(), families="exact"), 2, seed=0, at=X)
    bounds = torch.stack((torch.zeros(3), torch.ones(3))).double()
    with pytest.raises(ValueError, match=r"one output, got 2: take paths.subset_output\(\[0\]\)"):
        maximize_paths(paths, X[:2], bounds, 5)


@pytest.mark.parametrize("name", KERNELS)
def test_lengthscales_are_expected_to_grow_with_the_root_of_the_inputs(name: str) -> None:
    few, many = (many_input_kernel(name, d).base_kernel.double() for d in (5, 500))
    ratio = many.lengthscale[0, 0] / few.lengthscale[0, 0]
    assert float(ratio.detach()) == pytest.approx(10.0)
    prior = few.lengthscale_prior
    raw = few.raw_lengthscale.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(prior.log_prob(raw.exp()).sum(), raw)
    assert slope.abs().max() < 1e-6  # it begins at the mode of the prior
    outer = many_input_kernel(name, 5)
    assert float(outer.outputscale.detach()) == pytest.approx(1.0)


# --- outcomes on a logarithmic scale -------------------------------------------------------------


def test_outcomes_on_a_logarithmic_scale_keep_their_order_and_come_back() -> None:
    Y = torch.tensor([-1e3, -300.0, -2.0, -1.0, -0.5, 0.0], dtype=torch.float64)
    scale = LogScale.of(Y)
    values = scale.to_scale(Y)
    assert bool((values.diff() > 0.0).all())
    assert float(values.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(values.std(correction=0)) == pytest.approx(1.0)
    assert scale.floor is not None
    assert scale.floor < float(values[0])
    assert [scale.to_outcome(float(v)) for v in values] == pytest.approx(Y.tolist(), abs=1e-9)


@pytest.mark.parametrize("low", [1e3, 1e12])
def test_outliers_below_all_others_are_raised_to_a_floor(low: float) -> None:
    usual = torch.linspace(-2.0, 0.0, 20, dtype=torch.float64)
    Y = torch.cat((torch.tensor([-2.0 * low, -low], dtype=torch.float64), usual))
    scale = LogScale.of(Y)
    values = scale.to_scale(Y)
    assert scale.floor is not None
    assert values[:2].tolist() == [scale.floor, scale.floor]
    assert bool((values[2:].diff() > 0.0).all())
    assert scale.floor < float(values[2])
    assert float(values.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(values.std(correction=0)) == pytest.approx(1.0)
    logs = -torch.log1p(-Y / scale.unit)
    quarter, most = logs.quantile(0.25), logs.quantile(0.75)
    fence = float(quarter - 1.5 * (most - quarter))
    assert scale.floor * scale.sd + scale.mean == pytest.approx(fence)


@pytest.mark.parametrize("rounding", [0.0, 1e-14])
def test_nothing_is_an_outlier_where_most_outcomes_are_equal(rounding: float) -> None:
    Y = torch.tensor([-5.0, -3.0, *[0.0] * 8, 0.5], dtype=torch.float64)
    Y[2:10] += rounding * torch.arange(8)
    scale = LogScale.of(Y)
    assert scale.floor is None  # which a record of the run can hold
    assert [scale.to_outcome(float(v)) for v in scale.to_scale(Y)] == pytest.approx(Y.tolist())


def test_better_outcomes_than_those_of_the_scale_are_on_it() -> None:
    scale = LogScale.of(torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64))
    above = torch.tensor([2.0, 2.0 + 1e-6, 1e3], dtype=torch.float64)
    values = scale.to_scale(above)
    assert bool(values.isfinite().all() and (values.diff() > 0.0).all())
    assert [scale.to_outcome(float(v)) for v in values] == pytest.approx(above.tolist())


@pytest.mark.parametrize("value", [0.0, -7.5, 1e70])
def test_equal_outcomes_are_zero(value: float) -> None:
    scale = LogScale.of(torch.full((4,), value, dtype=torch.float64))
    assert scale.to_scale(torch.tensor([value], dtype=torch.float64)).tolist() == [0.0]


# --- leaps ---------------------------------------------------------------------------------------


def features_of(trend: AdditiveTrend, X: Tensor) -> Tensor:
    """The feature map itself, from a trend's root: tested by the covariance below."""
    return trend._features(X).reshape(len(X), -1) / math.sqrt(X.shape[-1])


def test_the_trend_is_a_sum_of_matern_processes_of_each_input() -> None:
    X, nodes = uniform(5, 2), torch.linspace(0.0, 1.0, 16).double()
    trend = AdditiveTrend(X, X.sum(-1))
    length = 2.0 * 0.96 / 16

    def matern(a: Tensor, b: Tensor) -> Tensor:
        r = math.sqrt(5.0) * (a.unsqueeze(-1) - b).abs() / length
        return (1.0 + r + r.square() / 3.0) * (-r).exp()

    gram = matern(nodes, nodes) + 1e-6 * torch.eye(16).double()
    regressors = [matern(x, nodes) for x in X.mT]
    covariance = sum(K @ torch.linalg.solve(gram, K.mT) for K in regressors) / 2
    Phi = features_of(trend, X)
    torch.testing.assert_close(Phi @ Phi.mT, covariance, rtol=1e-6, atol=1e-8)
    # near the nodes it is the kernel itself
    exact = sum(matern(x, x) for x in X.mT) / 2
    torch.testing.assert_close(covariance, exact, rtol=0.05, atol=0.02)


def test_the_trend_is_the_posterior_of_largest_evidence() -> None:
    X = uniform(40, 3)
    y = (7.0 * X[:, 0]).sin() + X[:, 1].square() + 0.1 * uniform(40, seed=5)
    trend = AdditiveTrend(X, y)
    Phi = features_of(trend, X)
    target = (y - y.mean()) / y.std(correction=0)
    eye = torch.eye(40).double()
    evidence = {
        (float(noise), float(scale)): float(
            MultivariateNormal(
                torch.zeros(40).double(), scale * Phi @ Phi.mT + noise * eye
            ).log_prob(target)
        )
        for noise, scale in itertools.product(NOISES, SCALES)
    }
    noise, scale = max(evidence, key=lambda pair: evidence[pair])
    precision = Phi.mT @ Phi / noise + torch.eye(Phi.shape[1]).double() / scale
    mean = trend.weights(torch.zeros(len(precision)).double())
    torch.testing.assert_close(
        mean, torch.linalg.solve(precision, Phi.mT @ target / noise), rtol=1e-6, atol=1e-8
    )
    root = torch.stack([trend.weights(e) - mean for e in torch.eye(len(precision)).double()], -1)
    torch.testing.assert_close(root @ root.mT, torch.linalg.inv(precision), rtol=1e-5, atol=1e-9)


def two_basins(X: Tensor) -> Tensor:
    """The basin at 0.8 is the better one in input 1; input 0 has one, at 0.3."""
    other = torch.maximum(1.0 - 8.0 * (X[:, 1] - 0.2).abs(), 2.0 - 8.0 * (X[:, 1] - 0.8).abs())
    return other - 5.0 * (X[:, 0] - 0.3).square()


def test_a_leap_goes_to_the_better_basin_and_leaves_other_inputs() -> None:
    X = uniform(400, 6, seed=3)
    trend = AdditiveTrend(X, two_basins(X))
    best = torch.tensor([0.3, 0.2, 0.5, 0.5, 0.5, 0.5]).double()
    bounds = torch.stack((best - 0.1, best + 0.1))
    for seed in range(5):
        leapt = trend.leap(best, bounds, seeded(seed))
        assert float(leapt[1]) == pytest.approx(0.8, abs=0.1)
        assert bool(((leapt == best) | (leapt < bounds[0]) | (leapt > bounds[1])).all())


def test_an_input_that_the_box_fills_does_not_leap() -> None:
    X = uniform(100, 2)
    trend = AdditiveTrend(X, two_basins(X))
    best = torch.tensor([0.3, 0.2]).double()
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
    assert torch.equal(trend.leap(best, bounds, seeded()), best)
    bounds[1, 0] = 0.6
    leapt = trend.leap(best, bounds, seeded())
    assert float(leapt[0]) > 0.6
    assert leapt[1] == best[1]


def test_many_inputs_have_few_features_each() -> None:
    assert len(AdditiveTrend(uniform(9, 200), uniform(9))._nodes) == region_module.FEWEST_NODES
    assert AdditiveTrend(uniform(9, 40), uniform(9)).draw(seeded()).shape == (40, POINTS)


# --- inputs of few values, and linear constraints ------------------------------------------------


D = 5
LEVELS = {1: torch.tensor([0.1, 0.5, 0.6]), 4: torch.tensor([0.25, 0.75])}
A = torch.tensor([[1.0, 1.0, 0.0, 0.0, 1.0], [0.0, -2.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
B = torch.tensor([1.2, 0.3], dtype=torch.float64)
INSIDE = torch.tensor([0.1, 0.5, 0.2, 0.3, 0.25], dtype=torch.float64)


def values_of(j: int) -> list[float]:
    return LEVELS[j].double().tolist()


def test_inputs_take_the_nearest_of_their_values() -> None:
    X = uniform(200, D)
    snapped = Domain(LEVELS).snap(X)
    for x, s in zip(X.tolist(), snapped.tolist(), strict=True):
        for j in range(D):
            known = values_of(j) if j in LEVELS else [x[j]]
            assert s[j] == min(known, key=lambda value: abs(value - x[j]))


def test_admitted_points_are_in_the_domain_and_those_inside_stay() -> None:
    domain, X = Domain(LEVELS, A, B), uniform(500, D)
    admitted = domain.admit(X, INSIDE)
    assert bool((admitted @ A.mT <= B + TOLERANCE).all())
    assert bool((admitted >= 0.0).all() & (admitted <= 1.0).all())
    torch.testing.assert_close(domain.snap(admitted), admitted)
    torch.testing.assert_close(domain.admit(admitted, INSIDE), admitted)
    snapped = domain.snap(X)
    held = (snapped @ A.mT <= B).all(-1) & (X @ A.mT <= B).all(-1)
    assert bool(held.any())
    torch.testing.assert_close(admitted[held], snapped[held])


@pytest.mark.parametrize("value", [0.65, 0.75, 1.0])
def test_a_point_near_another_has_the_fixed_values(value: float) -> None:
    """The nearest one in the domain; another input of few values moves, too, where it must."""
    domain = Domain({**LEVELS, 4: torch.tensor([value], dtype=torch.float64)}, A, B)
    near = domain.nearest(INSIDE)
    assert float(near[4]) == value
    assert bool((near @ A.mT <= B + TOLERANCE).all())
    torch.testing.assert_close(domain.snap(near[None])[0], near)
    others = domain.admit(uniform(500, D), near)
    distances = (others - INSIDE).abs().sum(-1)
    assert float((near - INSIDE).abs().sum()) <= float(distances.min()) + TOLERANCE


def test_a_point_that_has_no_fixed_value_to_take_stays() -> None:
    outside = torch.full((D,), 0.9, dtype=torch.float64)
    assert Domain(LEVELS, A, B).nearest(outside) is outside
    fixed = torch.tensor([0.3], dtype=torch.float64)
    for domain in (Domain({0: fixed}), Domain({0: fixed}, A, B)):
        near = domain.nearest(INSIDE)
        assert float(near[0]) == 0.3
        assert torch.equal(near[1:], INSIDE[1:])


def test_fixed_values_with_which_no_point_keeps_the_constraints_are_refused() -> None:
    domain = Domain({**LEVELS, 4: torch.tensor([1.0]), 0: torch.tensor([0.15])}, A, B)
    with pytest.raises(UsageError, match="No point with the fixed values"):
        domain.nearest(INSIDE)


def test_without_levels_and_constraints_points_stay() -> None:
    X = uniform(9, D)
    assert torch.equal(Domain().admit(X, INSIDE), X)


def test_a_box_reaches_the_next_values_on_both_sides() -> None:
    narrow = torch.stack((INSIDE - 0.01, INSIDE + 0.01))
    low, high = Domain(LEVELS).widened(narrow, INSIDE)
    assert (low[1].item(), high[1].item()) == (values_of(1)[0], values_of(1)[2])
    assert high[4].item() == values_of(4)[1]
    assert low[4].item() == narrow[0, 4].item()
    others = [0, 2, 3]
    assert torch.equal(torch.stack((low, high))[:, others], narrow[:, others])


def test_searches_leave_inputs_of_few_values_where_they_start() -> None:
    bounds = torch.stack((torch.zeros(D), torch.ones(D))).double()
    starts = Domain(LEVELS).snap(uniform(3, D))
    low, high = Domain(LEVELS).pinned(bounds, starts)
    few = list(LEVELS)
    assert torch.equal(low[:, few], starts[:, few])
    assert torch.equal(high[:, few], starts[:, few])
    assert bool((low[:, [0, 2, 3]] == 0.0).all() & (high[:, [0, 2, 3]] == 1.0).all())


def test_candidates_of_few_values_are_not_repeated() -> None:
    X = uniform(300, D)
    X[:, [0, 2, 3]] = 0.5
    found = Domain(LEVELS).candidates(X, INSIDE, seeded())
    assert len(found) == len(values_of(1)) * len(values_of(4))
    assert torch.equal(Domain().candidates(X, INSIDE, seeded()), X)


def test_candidates_differ_from_the_centre_in_few_inputs_of_few_values() -> None:
    levels = {j: torch.tensor([0.0, 0.5, 1.0]) for j in range(20)}
    centre = torch.full((30,), 0.5, dtype=torch.float64)
    X = torch.where(torch.arange(30) < 20, 1.0, 0.25).double().repeat(500, 1)
    X[:, 20] = torch.linspace(0.0, 1.0, 500)
    found = Domain(levels).candidates(X, centre, seeded())
    changed = (found[:, :20] != centre[:20]).double().sum(-1)
    assert float(changed.mean()) == pytest.approx(CHANGED, abs=0.4)  # six standard errors
    assert torch.equal(found[:, 21:], X[:, 21:])


@pytest.mark.parametrize("outer", [False, True])
def test_lengthscales_are_in_the_order_of_the_inputs(outer: bool) -> None:
    order: dict[str, Any] = {"active_dims": (2, 0, 1)}
    base = RBFKernel(ard_num_dims=3, **({} if outer else order)).double()
    base.lengthscale = torch.tensor([0.1, 1.0, 10.0])
    kernel = ScaleKernel(base, **order).double() if outer else base
    X = torch.rand(6, 3, dtype=torch.float64)
    model = AutoGP(X, X.sum(-1, keepdim=True), covar_module=kernel)
    found = input_lengthscales(model)
    assert found is not None
    torch.testing.assert_close(found, torch.tensor([1.0, 10.0, 0.1]).double())


def test_values_before_which_there_are_none_improve() -> None:
    region, none = TrustRegion(3, 2), torch.empty(0)
    assert region.update(torch.tensor([1.0]), none)
    assert (region.successes, region.failures) == (1, 0)
    before = replace(region)
    for new, known in (([math.nan], [1.0]), ([1.0], [0.0, math.nan])):
        with pytest.raises(ValueError, match="without NaN"):
            region.update(torch.tensor(new), torch.tensor(known))
    assert region == before
