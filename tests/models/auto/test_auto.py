"""A model that is exact at first: against the dense oracle, and across its hand-overs."""

from __future__ import annotations

import copy
import math
import re
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from botorch.acquisition.logei import qLogExpectedImprovement
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms.input import Warp
from botorch.posteriors.posterior import Posterior
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    LinearKernel,
    MultitaskKernel,
    RBFKernel,
    RBFKernelGrad,
    ScaleKernel,
)
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    MultitaskGaussianLikelihood,
    StudentTLikelihood,
)
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Size, Tensor

from bo_stream import (
    OSGPR,
    WISKI,
    AutoGP,
    CoarsePointsWarning,
    GridResolutionWarning,
    HandOverWarning,
    sample_paths,
)
from bo_stream.diagnostics import leave_one_out, report, stability, without
from bo_stream.diagnostics.alarms import _relearning
from bo_stream.diagnostics.approximation import capacity_of, finer
from bo_stream.models.auto import auto, families, inference
from bo_stream.testing.streams import assert_close, assert_gradient, gaussian
from tests.oracles.gaussian_process import DenseGP

UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
NOISE, MEAN = 0.05, 0.3


def data(n: int = 30, d: int = 2) -> tuple[Tensor, Tensor]:
    X = torch.rand(n, d, dtype=torch.float64)
    return X, (5.0 * X.sum(-1, keepdim=True)).sin() + 0.1 * torch.randn(n, 1).double()


def raw(X: Tensor, Y: Tensor, **options: Any) -> AutoGP:
    """A model whose units are those of the data, with hyperparameters that a test knows."""
    options = {"covar_module": short_kernel(), **options}
    model = AutoGP(X[:0], Y[:0], outcome_transform=None, **options)
    with torch.no_grad():
        model.mean_module.constant.fill_(MEAN)
        model.likelihood.noise = NOISE
    return model.eval().update(X, Y)


def short_kernel() -> Kernel:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2)).double()
    kernel.base_kernel.lengthscale = torch.tensor([0.5, 0.8])
    kernel.outputscale = 1.3
    return kernel


def rough_kernel() -> Kernel:
    kernel = RBFKernel(ard_num_dims=2).double()
    kernel.lengthscale = 0.1
    return kernel


def oracle(model: AutoGP, X: Tensor, Y: Tensor, weight: Tensor | None = None) -> DenseGP:
    noise = torch.full_like(Y.squeeze(-1), NOISE)
    noise = noise if weight is None else noise / weight
    mean = torch.full((1,), MEAN, dtype=torch.float64)
    kernel = copy.deepcopy(model.covar_module).requires_grad_(False)
    return DenseGP(lambda A, B: kernel(A, B).to_dense(), mean, X, Y.squeeze(-1), noise)


def same(actual: Posterior, expected: Posterior) -> None:
    """Assert that two posteriors at the same points are equal, in mean and covariance."""
    one, other = gaussian(actual), gaussian(expected)
    assert_close(one.mean, other.mean)
    assert_close(one.distribution.covariance_matrix, other.distribution.covariance_matrix)


def assert_on_grid_always(model: AutoGP, X: Tensor, Y: Tensor) -> None:
    """Assert that a model is as if it had been on a grid from the first of all observations on."""
    assert model.family == "WISKI"
    always = raw(X, Y, families="WISKI", bounds=UNIT)
    T = torch.rand(6, 2, dtype=torch.float64)
    same(model.posterior(T), always.posterior(T))


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A likelihood's own parameters take ten steps with the first observations, not a hundred."""
    monkeypatch.setattr(auto, "FIRST", 2)


class TestExact:
    """While all observations are held."""

    def test_posterior_is_that_of_the_dense_oracle(self) -> None:
        X, Y = data()
        T = torch.rand(6, 2, dtype=torch.float64)
        model = raw(X[:20], Y[:20])
        for i in range(20, 30, 3):  # one by one, and solved in between
            model.posterior(T)
            model.update(X[i : i + 3], Y[i : i + 3])
        posterior = model.posterior(T)
        mean, covariance = oracle(model, X, Y).posterior(T)
        assert model.family == "exact"
        assert_close(posterior.mean.squeeze(-1), mean)
        assert_close(posterior.distribution.covariance_matrix, covariance)

    def test_marginal_likelihood_is_that_of_the_dense_oracle(self) -> None:
        X, Y = data()
        model = raw(X, Y)
        assert_close(model.log_marginal_likelihood(), oracle(model, X, Y).log_marginal_likelihood())

    def test_gradient_of_the_marginal_likelihood_is_that_of_differences(self) -> None:
        model = raw(*data(12))
        raw_lengthscale = model.covar_module.base_kernel.raw_lengthscale

        def value(x: Tensor) -> Tensor:
            with torch.no_grad():
                raw_lengthscale.copy_(x)
            return model.log_marginal_likelihood()

        at = raw_lengthscale.detach().clone()
        expected = torch.zeros_like(at)
        for i in range(2):
            step = torch.zeros_like(at)
            step[0, i] = 1e-5
            expected[0, i] = ((value(at + step) - value(at - step)) / 2e-5).detach()
        (gradient,) = torch.autograd.grad(value(at), raw_lengthscale)
        assert torch.allclose(gradient, expected, rtol=1e-6, atol=1e-7)

    def test_an_observation_that_counts_in_part_has_more_noise(self) -> None:
        X, Y = data(20)
        T = torch.rand(5, 2, dtype=torch.float64)
        model = raw(X[:12], Y[:12]).forget(0.25).update(X[12:], Y[12:]).forget(0.5)
        weight = torch.cat((torch.full((12,), 0.125), torch.full((8,), 0.5))).double()
        dense = oracle(model, X, Y, weight)
        mean, covariance = dense.posterior(T)
        assert_close(model.posterior(T).mean.squeeze(-1), mean)
        assert_close(model.posterior(T).variance.squeeze(-1), covariance.diagonal())
        logs = math.log(2.0 * math.pi * NOISE)
        powers = 0.5 * ((1.0 - weight) * logs - weight.log()).sum()
        assert_close(model.log_marginal_likelihood(), dense.log_marginal_likelihood() + powers)

    def test_a_power_of_the_likelihood_is_that_of_repeated_observations(self) -> None:
        X, Y = data(8)
        once, twice = raw(X, Y), raw(torch.cat((X, X)), torch.cat((Y, Y))).forget(0.5)
        same(once.posterior(X), twice.posterior(X))
        assert_close(once.log_marginal_likelihood(), twice.log_marginal_likelihood())

    def test_gradient_of_the_posterior_is_that_of_differences(self) -> None:
        model = raw(*data(15))
        assert_gradient(lambda X: model.posterior(X).variance.sum(), torch.rand(3, 2).double())

    def test_features_have_the_same_posterior(self) -> None:
        X, Y = data(15)
        model = raw(torch.cat((X, X[:3])), torch.cat((Y, Y[:3])))  # three inputs twice
        T = torch.rand(5, 2, dtype=torch.float64)
        process = model.feature_process()
        assert_close(process.mean(T), model.process().mean(T))
        assert_close(process.covariance(T), model.process().covariance(T))

    def test_functions_are_drawn_from_the_posterior(self) -> None:
        X, Y = data(25)
        model = raw(X, Y)
        T = torch.rand(3, 2, dtype=torch.float64)
        draws = sample_paths(model, n=1500, seed=0)(T).squeeze(-1).detach()
        posterior = model.posterior(T)
        deviation = posterior.variance.squeeze(-1).sqrt()
        assert bool(((draws.mean(0) - posterior.mean.squeeze(-1)).abs() < 0.15 * deviation).all())
        assert bool(((draws.std(0) / deviation - 1.0).abs() < 0.15).all())

    def test_a_fit_ends_where_that_of_an_exact_model_does(self) -> None:
        X, Y = data(40)
        model, peer = AutoGP(X, Y), SingleTaskGP(X, Y)
        for each in (model, peer):
            fit_gpytorch_mll(ExactMarginalLogLikelihood(each.likelihood, each))
        T = torch.rand(8, 2, dtype=torch.float64)
        posterior, expected = model.posterior(T), peer.posterior(T)
        assert torch.allclose(posterior.mean, expected.mean, atol=1e-2)
        assert torch.allclose(posterior.variance, expected.variance, rtol=0.1, atol=1e-3)

    def test_what_counts_in_part_cannot_be_taken_out(self) -> None:
        X, Y = data(10)
        model = raw(X, Y).forget(0.5)
        before = model.posterior(X)
        with pytest.raises(InputDataError, match="never put in"):
            model.retract(X[:1], Y[:1])
        same(model.posterior(X), before)


class TestHandOver:
    """When the observations have become too many to be held exactly."""

    @pytest.mark.parametrize("family", ["WISKI", "OSGPR"])
    def test_is_to_the_family_as_if_it_had_been_there_from_the_start(self, family: str) -> None:
        X, Y = data(40)
        model = raw(X[:30], Y[:30], families=("exact", family), max_exact=30, bounds=UNIT)
        assert model.family == "exact"
        model.update(X[30:], Y[30:])
        always = raw(X, Y, families=family, bounds=UNIT)
        assert model.family == always.family == family
        assert model.num_observations == 40
        T = torch.rand(6, 2, dtype=torch.float64)
        same(model.posterior(T), always.posterior(T))
        assert_close(model.log_marginal_likelihood(), always.log_marginal_likelihood())

    def test_is_to_the_public_model(self) -> None:
        X, Y = data(60)
        options: dict[str, Any] = {"grid_size": 24, "max_rank": 200}
        model = AutoGP(X, Y, bounds=UNIT, max_exact=30, **options)
        peers = [
            WISKI(X, Y, bounds=UNIT, **options),
            OSGPR(X, Y, max_points=20, window=10),
        ]
        T = torch.rand(6, 2, dtype=torch.float64)
        for peer in peers:
            same(model.eval().posterior(T), peer.eval().posterior(T))
            with pytest.warns(HandOverWarning, match="to OSGPR at 60 observations"):
                model.move_to("OSGPR", max_points=20, window=10)

    def test_what_it_cost_is_kept(self) -> None:
        X, Y = data(40)
        model = raw(X[:30], Y[:30], families=("exact", "OSGPR"), max_exact=30, max_points=10)
        exact = raw(X, Y).process()
        with pytest.warns(HandOverWarning, match=r"up to .* posterior standard deviations from"):
            model.update(X[30:], Y[30:])
        (move,) = model.history
        process, prior = model.process(), 1.3
        mean = (process.mean(X) - exact.mean(X)).abs().max() / math.sqrt(prior)
        variance = (process.variance(X) - exact.variance(X)).abs().max() / prior
        assert (move.before, move.after, move.observations) == ("exact", "OSGPR", 40.0)
        assert move.seconds > 0.0
        assert move.mean_error > 1e-6  # ten points are not enough for an exact posterior
        assert_close(torch.tensor(move.mean_error).double(), mean)
        assert_close(torch.tensor(move.variance_error).double(), variance)
        many = torch.cat((X, torch.rand(2000, 2, dtype=torch.float64)))  # those compared and others
        deviation = (process.mean(many) - exact.mean(many)).abs() / exact.variance(many).sqrt()
        ratio = process.variance(many) / exact.variance(many)
        assert float(deviation.max()) == pytest.approx(move.deviation, rel=0.2)
        assert float(ratio.min()) == pytest.approx(move.least_ratio, rel=0.2)
        assert float(ratio.max()) == pytest.approx(move.largest_ratio, rel=0.2)

    @pytest.mark.parametrize("family", ["WISKI", "OSGPR"])
    def test_rows_that_count_in_part_do_so_afterwards(self, family: str) -> None:
        X, Y = data(40)
        options: dict[str, Any] = {"families": ("exact", family), "bounds": UNIT}
        model = raw(X[:10], Y[:10], **options).forget(0.5)
        model.update(X[10:25], Y[10:25]).forget(0.25).update(X[25:], Y[25:])
        model.move_to(family)
        always = raw(X[:10], Y[:10], families=family, bounds=UNIT).forget(0.5)
        always.update(X[10:25], Y[10:25]).forget(0.25).update(X[25:], Y[25:])
        T = torch.rand(6, 2, dtype=torch.float64)
        assert_close(torch.tensor(model.num_observations), torch.tensor(always.num_observations))
        same(model.posterior(T), always.posterior(T))

    def test_a_model_is_saved_on_either_side(self, tmp_path: Path) -> None:
        X, Y = data(50)
        T = torch.rand(6, 2, dtype=torch.float64)
        model = raw(X[:25], Y[:25], bounds=UNIT, max_exact=30)
        for start in (25, 30, 40):  # before, at and after the move
            path = tmp_path / f"{start}.safetensors"
            model.save(path)
            loaded = AutoGP.load(path)
            assert loaded.family == model.family
            assert loaded.history == model.history
            for each in (model, loaded):
                each.update(X[start : start + 10], Y[start : start + 10])
            assert loaded.family == model.family
            same(loaded.posterior(T), model.posterior(T))
        assert [move.after for move in model.history] == ["WISKI"]

    def test_what_is_retracted_is_not_there_after_the_next_move(self) -> None:
        X, Y = data(40)
        model = raw(X, Y, bounds=UNIT, max_exact=30)
        model.retract(X[5:9], Y[5:9]).move_to("exact")
        rest = [*range(5), *range(9, 40)]
        same(model.posterior(X), raw(X[rest], Y[rest]).posterior(X))

    def test_acquisition_goes_on_across_it(self) -> None:
        X, Y = data(40)
        model = raw(X[:30], Y[:30], bounds=UNIT, max_exact=32)
        T = torch.rand(4, 1, 2, dtype=torch.float64)
        for start in (30, 35):
            fantasy = model.fantasize(T, SobolQMCNormalSampler(torch.Size([2]), seed=1))
            assert fantasy.posterior(T).mean.isfinite().all()
            value = qLogExpectedImprovement(model, best_f=Y.max())
            assert_gradient(lambda X, value=value: value(X).sum(), T)
            model.update(X[start : start + 5], Y[start : start + 5])
        assert model.family == "WISKI"

    def test_a_fantasy_made_before_it_stays_as_it_was(self) -> None:
        X, Y = data(40)
        model = raw(X[:30], Y[:30], bounds=UNIT, max_exact=32)
        fantasy = model.condition_on_observations(X[30:33], Y[30:33])
        before = fantasy.posterior(X).mean.clone()
        model.update(X[30:], Y[30:])
        assert model.family == "WISKI"
        assert torch.equal(fantasy.posterior(X).mean, before)

    def test_a_sum_of_kernels_has_a_grid_for_each_part(self) -> None:
        X, Y = data(40, 6)
        parts = [ScaleKernel(RBFKernel(active_dims=(i, i + 1))) for i in (0, 2, 4)]
        box = torch.tensor([[0.0] * 6, [1.0] * 6])
        model = AutoGP(X, Y, covar_module=AdditiveKernel(*parts), bounds=box, max_exact=30)
        assert model.family == "WISKI"

    def test_clear_begins_anew(self) -> None:
        X, Y = data(40)
        model = raw(X, Y, bounds=UNIT, max_exact=30)
        model.clear()
        assert model.family == "exact"
        assert len(model.history) == 1
        same(model.update(X[:9], Y[:9]).posterior(X), raw(X[:9], Y[:9]).posterior(X))

    @pytest.mark.filterwarnings(
        "ignore::bo_stream.GridResolutionWarning", "ignore::bo_stream.HandOverWarning"
    )
    def test_a_family_that_errs_less_is_preferred_to_one_that_errs_much(self) -> None:
        X, Y = data(40)
        options: dict[str, Any] = {"bounds": UNIT, "grid_size": 4}
        model = raw(X[:30], Y[:30], max_exact=30, covar_module=rough_kernel(), **options)
        model.update(X[30:], Y[30:])
        alone = raw(X, Y, families="WISKI", covar_module=rough_kernel(), **options)
        exact = raw(X, Y, covar_module=rough_kernel()).posterior(X).mean
        assert (alone.posterior(X).mean - exact).abs().max() > 0.2  # prior standard deviations
        assert model.family == "OSGPR"
        assert model.history[0].mean_error < 1e-6

    @pytest.mark.filterwarnings("ignore::bo_stream.GridResolutionWarning")
    @pytest.mark.parametrize("is_given", [False, True])
    def test_a_family_that_follows_one_that_errs_much_waits_until_it_is_cheaper(
        self, is_given: bool
    ) -> None:
        def until(names: tuple[str, ...], *_: Any) -> int:
            return 30 if "WISKI" in names else 36

        X, Y = data(40)
        options: dict[str, Any] = {"bounds": UNIT, "grid_size": 4, "covar_module": rough_kernel()}
        with (
            mock.patch.object(auto, "most_exact", until),
            mock.patch.object(inference, "most_exact", until),
        ):
            model = raw(X[:30], Y[:30], **options)
            assert model.max_exact == 30
            if is_given:
                model.max_exact = 31
            for n, waits in ((30, True), (33, not is_given), (36, not is_given), (37, False)):
                if n > model.num_observations:
                    rows = slice(int(model.num_observations), n)
                    with warnings.catch_warnings():
                        warnings.simplefilter("error", HandOverWarning)
                        model.update(X[rows], Y[rows])
                assert model.family == ("exact" if waits else "OSGPR"), n
        same(model.posterior(X), raw(X[:37], Y[:37], covar_module=rough_kernel()).posterior(X))

    @pytest.mark.filterwarnings("ignore::bo_stream.GridResolutionWarning")
    @pytest.mark.parametrize("way", ["update", "merge", "max_exact"])
    def test_a_wait_ends_before_rows_that_are_too_many_to_compare(self, way: str) -> None:
        """Or where ``max_exact`` is set; and not in the family that was far off."""
        X, Y = data(60)
        options: dict[str, Any] = {"bounds": UNIT, "grid_size": 4, "covar_module": rough_kernel()}
        until = {"side_effect": lambda names, *_: 30 if "WISKI" in names else 50}
        with (
            mock.patch.object(auto, "most_exact", **until),
            mock.patch.object(inference, "most_exact", **until),
            mock.patch.object(inference, "COMPARABLE", 52),
        ):
            model = raw(X[:45], Y[:45], **options)
            assert model.family == "exact"
            assert f"of at most {50}" in str(capacity_of(model))
            if way == "update":
                model.update(X[45:], Y[45:])
            elif way == "merge":
                model.merge(raw(X[45:], Y[45:], **options))
            else:
                model.max_exact = 40
                model.update(X[45:46], Y[45:46])
        assert model.family == "OSGPR"
        assert model.history[0].excess < 1.0
        n = int(model.num_observations)
        exact = raw(X[:n], Y[:n], covar_module=rough_kernel())
        same(model.posterior(X), exact.posterior(X))

    @pytest.mark.filterwarnings("ignore::bo_stream.HandOverWarning")
    def test_twice_as_many_points_wait_until_they_are_cheaper(self) -> None:
        X, Y = data(40)
        few = [mock.patch.object(module, "MAX_POINTS", 10) for module in (families, inference)]
        most = mock.patch.object(inference, "MOST_EXACT", 35)
        least = [
            mock.patch.object(module, "most_exact", return_value=30) for module in (auto, inference)
        ]
        with few[0], few[1], most, least[0], least[1]:
            model = raw(X[:30], Y[:30], covar_module=rough_kernel())
            assert model.update(X[30:35], Y[30:35]).family == "exact"
            assert model.update(X[35:], Y[35:]).family == "OSGPR"
        assert model._memory.inference.max_points == 20

    def test_where_points_are_too_few_twice_as_many_are_taken(self) -> None:
        X, Y = data(40)
        few = [mock.patch.object(module, "MAX_POINTS", 10) for module in (families, inference)]
        with few[0], few[1]:
            model = raw(X[:30], Y[:30], max_exact=30, covar_module=rough_kernel())
            with pytest.warns(HandOverWarning):  # for twice as many are too few, too
                model.update(X[30:], Y[30:])
        assert model._memory.inference.max_points == 20
        given = raw(X[:30], Y[:30], max_exact=30, covar_module=rough_kernel(), max_points=10)
        with pytest.warns(HandOverWarning):
            given.update(X[30:], Y[30:])
        assert given._memory.inference.max_points == 10

    def test_a_family_that_is_not_taken_warns_of_nothing(self) -> None:
        X, Y = data(40)
        options: dict[str, Any] = {"bounds": UNIT, "grid_size": 24, "max_points": 3}
        order = ("exact", "OSGPR", "WISKI")
        model = raw(X[:30], Y[:30], families=order, max_exact=30, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.update(X[30:], Y[30:])
        assert model.family == "WISKI"
        coarse = r"move_to\(model.family, max_points=6\)"
        with pytest.warns(HandOverWarning), pytest.warns(CoarsePointsWarning, match=coarse):
            model.move_to("OSGPR")  # for it was not said before
        model = raw(X[:30], Y[:30], families=order[:2], max_exact=30, **options)
        with pytest.warns(HandOverWarning), pytest.warns(CoarsePointsWarning, match=coarse) as told:
            model.update(X[30:], Y[30:])
        assert [each.category for each in told] == [CoarsePointsWarning, HandOverWarning]

    def test_the_line_in_a_grids_warning_works(self) -> None:
        X, Y = data(40)
        options: dict[str, Any] = {"families": "WISKI", "bounds": UNIT, "grid_size": 4}
        with pytest.warns(GridResolutionWarning) as told:
            model = raw(X, Y, **options)
        line = re.search(
            r'AutoGP: move_to\("WISKI", grid_size=\((\d+), (\d+)\)\)', str(told[0].message)
        )
        assert line is not None
        size = int(line[1]), int(line[2])
        with pytest.warns(HandOverWarning) as told:  # but none of the grid's resolution
            model.move_to("WISKI", grid_size=size)
        assert len(told) == 1
        assert model._memory.inner.grid.size == size


class TestDiagnostics:
    """What is asked of a model, whatever the family that it is in."""

    def test_each_observation_is_left_out_while_exact(self) -> None:
        X, Y = data(12)
        model = raw(X, Y)
        found = leave_one_out(model, X, Y, observation_noise=False).posterior
        others = [[j for j in range(12) if j != i] for i in range(12)]
        each = [raw(X[rest], Y[rest]).posterior(X[i : i + 1]) for i, rest in enumerate(others)]
        assert_close(found.mean.flatten(), torch.cat([p.mean.flatten() for p in each]))
        assert_close(found.variance.flatten(), torch.cat([p.variance.flatten() for p in each]))
        rest = without(model, X[3:5], Y[3:5])
        kept = [0, 1, 2, *range(5, 12)]
        same(rest.posterior(X), raw(X[kept], Y[kept]).posterior(X))

    @pytest.mark.parametrize(("family", "peer"), [("WISKI", WISKI), ("OSGPR", OSGPR)])
    def test_a_family_is_asked_as_its_public_model(self, family: str, peer: type) -> None:
        X, Y = data(30)
        model = AutoGP(X, Y, families=family, bounds=UNIT).eval()
        public = peer(X, Y, **({"bounds": UNIT} if family == "WISKI" else {})).eval()
        found, expected = (leave_one_out(each, X, Y).posterior for each in (model, public))
        assert_close(found.mean, expected.mean)
        assert_close(found.variance, expected.variance)
        ours, theirs = stability(model), stability(public)
        assert ours.condition.value == pytest.approx(theirs.condition.value, rel=1e-3)

    def test_the_certificate_of_an_exact_model_is_of_what_it_solves(self) -> None:
        X, Y = data(25)
        model = raw(X, Y).forget(0.5)
        covariance = model.covar_module(X, X).to_dense().detach() / (NOISE / 0.5)
        expected = torch.linalg.cond(torch.eye(25).double() + covariance)
        assert stability(model).condition.value == pytest.approx(float(expected), rel=1e-3)

    @pytest.mark.filterwarnings("ignore::bo_stream.GridResolutionWarning")
    @pytest.mark.filterwarnings("ignore::bo_stream.HandOverWarning")
    def test_a_report_is_of_the_family_and_its_remedies_are_verbs_of_this_model(self) -> None:
        X, Y = data(60)
        held_out = data(40)
        exact = AutoGP(X, Y)
        found = report(exact, X=held_out[0], Y=held_out[1])
        expected = f"60 observations, exactly of at most {exact.max_exact:,}"
        assert str(found.capacity) == expected
        for options in (
            {"families": "WISKI", "grid_size": 4},
            {"families": "OSGPR", "max_points": 4},
        ):
            model = AutoGP(X, Y, bounds=UNIT, covar_module=rough_kernel(), **options)
            found = report(model, X=held_out[0], Y=held_out[1])
            assert not isinstance(found.gap, str)
            assert found.gap.mean > 0.1
            line = finer(model)
            assert line.startswith(f'model.move_to("{model.family}", ')
            exec(line, {"model": model})
            assert len(model.history) == 1

    @pytest.mark.parametrize("max_rows", [100, 0])
    def test_the_line_that_learns_the_noise_of_heavy_tails_works(
        self, max_rows: int, few_steps: None
    ) -> None:
        X, Y = data(15)
        model = AutoGP(X, Y, likelihood=StudentTLikelihood(), hyper_steps=0, max_rows=max_rows)
        before = model.likelihood.noise.clone()
        names: dict[str, Any] = {"model": model, "X": X, "Y": Y, "AutoGP": AutoGP}
        exec(_relearning(model, 2.0), {**names, "StudentTLikelihood": StudentTLikelihood}, names)
        assert names["model"].family == "OSVGP"
        assert not torch.equal(names["model"].likelihood.noise, before)


class TestFamilies:
    """Which family follows, and what a user can say about it."""

    def test_without_bounds_there_is_no_grid(self) -> None:
        assert AutoGP(*data()).families == ("exact", "OSGPR")
        assert AutoGP(*data(), bounds=UNIT).families == ("exact", "WISKI", "OSGPR")

    def test_what_a_grid_cannot_take_goes_to_inducing_points(self) -> None:
        X, Y = data(20, 5)
        box = torch.tensor([[0.0] * 5, [1.0] * 5])
        assert AutoGP(X, Y, bounds=box).families == ("exact", "OSGPR")
        assert AutoGP(*data(), bounds=UNIT, covar_module=ScaleKernel(LinearKernel())).families == (
            "exact",
            "OSGPR",
        )
        warped = Warp(d=2, indices=[0, 1])
        assert AutoGP(*data(), bounds=UNIT, input_transform=warped).families == ("exact", "OSGPR")

    @pytest.mark.parametrize("likelihood", [LaplaceLikelihood(), StudentTLikelihood()])
    def test_heavy_tails_are_standardised_and_learned(
        self, likelihood: Likelihood, few_steps: None
    ) -> None:
        X, Y = data()
        model = AutoGP(X, 1e3 * Y + 7.0, likelihood=likelihood)
        assert model.family == "OSVGP"
        assert model.families == ("OSVGP",)
        assert float(model.posterior(X).mean.std()) > 100.0  # in units of the outcomes
        before = copy.deepcopy(model.likelihood.state_dict())
        model.update(X, 1e3 * Y + 7.0)
        after = model.likelihood.state_dict()
        assert any(not torch.equal(before[name], after[name]) for name in before)

    def test_a_kernel_that_was_frozen_when_it_was_given_learns_once_it_is_freed(
        self, few_steps: None
    ) -> None:
        X, Y = data()
        frozen = ScaleKernel(RBFKernel(ard_num_dims=2)).double().requires_grad_(False)
        model = AutoGP(X, Y, likelihood=StudentTLikelihood(), covar_module=frozen)
        before = model.covar_module.outputscale.clone()
        model.update(X, Y)
        assert torch.equal(before, model.covar_module.outputscale)
        model.covar_module.requires_grad_(True)
        model.update(X, Y)
        assert not torch.equal(before, model.covar_module.outputscale)

    def test_labels_stay_as_they_are(self) -> None:
        X, Y = data()
        model = AutoGP(X, (Y > 0.0).double(), likelihood=BernoulliLikelihood())
        assert model.family == "OSVGP"
        assert bool(((model.predictive(X).mean > 0.5) == (Y > 0.0)).double().mean() > 0.8)

    @pytest.mark.parametrize("family", ["WISKI", "OSGPR"])
    def test_one_name_is_the_family_from_the_start(self, family: str) -> None:
        model = AutoGP(*data(), families=family, bounds=UNIT)
        assert model.family == family
        assert model.history == ()

    def test_an_exact_one_stays_exact(self) -> None:
        X, Y = data(40)
        model = AutoGP(X, Y, families="exact", max_exact=10)
        assert model.family == "exact"
        with pytest.raises(UnsupportedError, match="Expected family to be one of exact, got"):
            model.move_to("OSGPR")

    @pytest.mark.parametrize(
        ("options", "error", "says"),
        [
            ({"families": "WISKI"}, UnsupportedError, "Expected bounds"),
            ({"families": ("exact", "OSVGP")}, UnsupportedError, "with a GaussianLikelihood"),
            (
                {"families": "WISKI", "covar_module": LinearKernel(), "bounds": UNIT},
                UnsupportedError,
                "LinearKernel",
            ),
            (
                {"families": "OSGPR", "likelihood": BernoulliLikelihood()},
                UnsupportedError,
                "with a BernoulliLikelihood",
            ),
            ({"families": ()}, ValueError, "Expected families to be some of exact"),
            ({"families": "KISS"}, ValueError, "Expected families to be some of exact"),
            ({"max_exact": 0}, ValueError, "max_exact"),
            ({"max_rows": -1}, ValueError, "max_rows"),
            ({"max_points": 0}, ValueError, "max_points"),
            ({"max_rank": 0}, ValueError, "max_rank"),
            ({"tolerance": 1.5}, ValueError, "tolerance"),
            ({"points": 7}, TypeError, "Expected options grid_size"),
        ],
    )
    def test_bad_arguments(
        self, options: dict[str, Any], error: type[Exception], says: str
    ) -> None:
        X, Y = data(10)
        with pytest.raises(error, match=says):
            AutoGP(X, (Y > 0.0).double(), **options)

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"likelihood": MultitaskGaussianLikelihood(2)}, "got MultitaskGaussianLikelihood"),
            ({"likelihood": StudentTLikelihood(batch_shape=Size([3]))}, r"batch shape \(2,\)"),
            ({"covar_module": RBFKernel(batch_shape=Size([3]))}, r"batch shape \(2,\).*got \(3,"),
            ({"covar_module": MultitaskKernel(RBFKernel(), 2)}, "got a MultitaskKernel of 2"),
            ({"covar_module": ScaleKernel(RBFKernelGrad())}, "got a ScaleKernel of 3"),
        ],
    )
    def test_parts_for_another_number_of_outputs(self, options: dict[str, Any], says: str) -> None:
        X, Y = data(10)
        with pytest.raises(UnsupportedError, match=says):
            AutoGP(X, torch.cat((Y, Y), -1), **options)

    def test_too_many_inputs_for_a_grid(self) -> None:
        X, Y = data(10, 5)
        box = torch.tensor([[0.0] * 5, [1.0] * 5])
        with pytest.raises(UnsupportedError, match="1 to 4 inputs"):
            AutoGP(X, Y, families=("exact", "WISKI"), bounds=box)

    @pytest.mark.parametrize("family", ["exact", "WISKI", "OSGPR", "OSVGP"])
    def test_a_kernel_of_another_number_of_outputs(self, family: str) -> None:
        """Every family takes any number of outputs, and refuses a kernel of three for two."""
        X, Y = data(10)
        Y = torch.cat((Y, Y), -1)
        three = torch.Size([3])
        kernel = ScaleKernel(RBFKernel(batch_shape=three), batch_shape=three).double()
        options: dict[str, Any] = {"families": family, "bounds": UNIT}
        if family == "OSVGP":
            Y, options["likelihood"] = (Y > 0.0).double(), BernoulliLikelihood()
        with pytest.raises(
            UnsupportedError, match=r"covar_module of batch shape \(2,\).*got \(3,\)"
        ):
            AutoGP(X, Y, covar_module=kernel, **options)
        assert AutoGP(X, Y, **options).num_outputs == 2


class TestMoves:
    """Moves that cannot be made leave the model as it was."""

    def test_the_former_family_is_kept_with_one_warning(self) -> None:
        X, Y = data(40)
        narrow = torch.tensor([[0.4, 0.4], [0.45, 0.45]], dtype=torch.float64)
        model = raw(X[:20], Y[:20], families=("exact", "WISKI"), bounds=narrow, max_exact=20)
        with pytest.warns(HandOverWarning, match="stays exact at 21 observations"):
            model.update(X[20:21], Y[20:21])
        for i in range(21, 40):  # a warning would be an error
            model.update(X[i : i + 1], Y[i : i + 1])
        with pytest.warns(HandOverWarning, match="stays exact at 43 observations"):
            model.update(X[:3], Y[:3])
        model.retract(X[:3], Y[:3])
        assert model.family == "exact"
        same(model.posterior(X), raw(X, Y).posterior(X))

    def test_the_next_family_is_tried(self) -> None:
        X, Y = data(40)
        narrow = torch.tensor([[0.4, 0.4], [0.45, 0.45]], dtype=torch.float64)
        assert raw(X, Y, bounds=narrow, max_exact=20).family == "OSGPR"

    def test_a_memory_that_would_be_too_large(self) -> None:
        X, Y = data(40)
        model = raw(X[:20], Y[:20], families=("exact", "WISKI"), bounds=UNIT, max_exact=40)
        before = model.posterior(X)
        with pytest.raises(ValueError, match="grid"):
            model.move_to("WISKI", grid_size=100_000)
        same(model.posterior(X), before)
        options: dict[str, Any] = {"bounds": UNIT, "max_exact": 20, "grid_size": 100_000}
        model = raw(X[:20], Y[:20], families=("exact", "WISKI"), **options)
        with pytest.warns(HandOverWarning, match="stays exact at 21 observations") as told:
            model.update(X[20:21], Y[20:21])
        assert len(told) == 1
        for i in range(21, 40):  # a warning would be an error
            model.update(X[i : i + 1], Y[i : i + 1])
        assert model.family == "exact"
        same(model.posterior(X), raw(X, Y).posterior(X))

    def test_rows_that_are_gone(self) -> None:
        X, Y = data(40)
        model = raw(X, Y, max_exact=20, max_rows=30)
        before = model.posterior(X)
        with pytest.raises(UnsupportedError, match="30 at most"):
            model.move_to("exact")
        same(model.posterior(X), before)

    def test_an_unknown_option(self) -> None:
        with pytest.raises(TypeError, match="Expected options"):
            raw(*data()).move_to("OSGPR", points=3)

    @pytest.mark.parametrize("family", ["exact", "OSGPR", "WISKI"])
    @pytest.mark.parametrize("share", [1.0, -1.0, math.nan])
    def test_a_share_to_truncate_that_cannot_be(self, family: str, share: float) -> None:
        model = raw(*data(), families=family, bounds=UNIT)
        with pytest.raises(ValueError, match=r"left_out in \[0, 1\)"):
            model.truncate(share)

    def test_a_conditioned_model(self) -> None:
        X, Y = data()
        with pytest.raises(UnsupportedError, match="move_to needs"):
            raw(X, Y).condition_on_observations(X[:1], Y[:1]).move_to("OSGPR")


class TestMerges:
    """Two models in any two families."""

    def test_exact_models_join_rows_and_move_on(self) -> None:
        X, Y = data(40)
        model = raw(X[:15], Y[:15], max_exact=30, bounds=UNIT)
        model.merge(raw(X[15:25], Y[15:25]))
        assert model.family == "exact"
        same(model.posterior(X), raw(X[:25], Y[:25]).posterior(X))
        model.merge(raw(X[25:], Y[25:]))
        assert model.family == "WISKI"
        assert model.num_observations == 40

    @pytest.mark.parametrize("exact_first", [True, False])
    def test_rows_enter_the_family_of_the_other(self, exact_first: bool) -> None:
        X, Y = data(40)
        options: dict[str, Any] = {"bounds": UNIT, "max_exact": 20}
        one, other = raw(X[:10], Y[:10], **options), raw(X[10:], Y[10:], **options)
        first, second = (one, other) if exact_first else (other, one)
        first.merge(second)
        assert_on_grid_always(first, X, Y)

    @pytest.mark.filterwarnings("ignore:.*zero or less than what float64 resolves")
    def test_a_hand_over_of_a_merge_is_in_the_units_of_both(self) -> None:
        X, Y = data(40)
        few: dict[str, Any] = {"bounds": UNIT, "max_exact": 20}
        many: dict[str, Any] = {"bounds": UNIT, "max_exact": 100}
        empty = AutoGP(X[:0], Y[:0], **few)
        empty.merge(AutoGP(X, Y + 1000.0, **many))
        noisy = AutoGP(X[:10], Y[:10], torch.full_like(Y[:10], 0.01), **few)
        noisy.merge(AutoGP(X[10:], Y[10:], torch.zeros_like(Y[10:]), **many))
        for model in (empty, noisy):
            assert model.family != "exact"
            kept = model.posterior(X)
            model._cache = None
            same(model.posterior(X), kept)

    def test_two_families_meet_by_the_rows_of_one(self) -> None:
        X, Y = data(50)
        grid = raw(X[:25], Y[:25], bounds=UNIT, max_exact=20)
        points = raw(X[25:], Y[25:], bounds=UNIT, max_exact=20).move_to("OSGPR")
        grid.merge(points)
        assert_on_grid_always(grid, X, Y)

    def test_two_families_without_rows(self) -> None:
        X, Y = data(50)
        options: dict[str, Any] = {"bounds": UNIT, "max_exact": 5, "max_rows": 0}
        grid = raw(X[:25], Y[:25], families=("exact", "WISKI"), **options)
        points = raw(X[25:], Y[25:], families=("exact", "OSGPR"), **options)
        before = grid.posterior(X)
        with pytest.raises(UnsupportedError, match="Cannot merge a model in family WISKI"):
            grid.merge(points)
        same(grid.posterior(X), before)


def test_a_given_noise_level_is_kept() -> None:
    likelihood = GaussianLikelihood()
    likelihood.noise = 0.2
    model = AutoGP(*data(), likelihood=likelihood)
    assert model.likelihood is likelihood
