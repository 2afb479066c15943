"""The integrated variance in feature space: against BoTorch's, a dense GP, and on its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.acquisition.input_constructors import get_acqf_input_constructor
from botorch.acquisition.objective import (
    ExpectationPosteriorTransform,
    ScalarizedPosteriorTransform,
)
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.models.transforms.input import Normalize
from botorch.models.transforms.outcome import Log
from botorch.optim import optimize_acqf
from gpytorch.kernels import RBFKernel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bo_stream import WISKI
from bo_stream.acquisition import FeatureNIPV
from bo_stream.acquisition.feature_nipv import FEW_POINTS, PointMeasure
from bo_stream.testing.streams import assert_close, assert_gradient
from tests.acquisition.examples import dense, small_model, some
from tests.oracles.gaussian_process import integrated_posterior_variance
from tests.support.problems import Observations
from tests.support.smooth_points import smooth_points

UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]])


def points(n: int, dim: int = 2, like: Tensor | None = None) -> Tensor:
    return 0.02 + 0.96 * torch.rand(n, dim, dtype=torch.float64).to(like)


def midpoints(bounds: Tensor, lines: int = 400) -> Tensor:
    """Of ``lines x lines`` equal parts of a box."""
    line = (torch.arange(lines, dtype=torch.float64) + 0.5) / lines
    return bounds[0] + (bounds[1] - bounds[0]) * torch.cartesian_prod(line, line)


def wide(data: Observations) -> Observations:
    """The same observations on other scales of inputs and outcomes."""
    factors = torch.tensor([100.0, 0.01])
    return Observations(data.X * factors, 1000.0 * data.Y, data.Yvar)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"outcome_transform": None},
    "Standardize": {},
    "Standardize and Normalize": {"input_transform": Normalize(2, bounds=UNIT * 1.0)},
    "truncated": {"tolerance": 1e-4},
}


@pytest.fixture(params=OPTIONS)
def model(request: pytest.FixtureRequest) -> WISKI:
    return small_model(some(), **OPTIONS[request.param])


class TestEqualsBoTorch:
    @pytest.mark.usefixtures("in_features")  # a truncated posterior is BoTorch's only there
    @pytest.mark.parametrize("pending", [0, 3])
    @pytest.mark.parametrize("q", [1, 4])
    def test_for_every_transform(self, model: WISKI, q: int, pending: int) -> None:
        mc_points = points(60)
        X_pending = points(pending) if pending else None
        X = torch.rand(5, q, 2, dtype=torch.float64)
        expected = qNegIntegratedPosteriorVariance(model, mc_points, X_pending=X_pending)(X)
        actual = FeatureNIPV(model, mc_points, X_pending=X_pending)(X)
        assert_close(actual / expected, torch.ones(5, dtype=torch.float64))

    def test_on_other_scales(self) -> None:
        data = wide(some())
        bounds = UNIT * torch.tensor([100.0, 0.01])
        model = small_model(data, input_transform=Normalize(2), bounds=bounds)
        mc_points, X = points(60) * bounds[1], points(8).view(2, 4, 2) * bounds[1]
        expected = qNegIntegratedPosteriorVariance(model, mc_points)(X)
        actual = FeatureNIPV(model, mc_points)(X)
        assert expected.abs().min() > 100.0
        assert_close(actual / expected, torch.ones(2, dtype=torch.float64))

    def test_with_known_noise(self) -> None:
        for kind in ("known", "mixed"):
            model = small_model(some().with_noise(kind))
            mc_points, X = points(60), points(8).view(2, 4, 2)
            expected = qNegIntegratedPosteriorVariance(model, mc_points)(X)
            assert_close(FeatureNIPV(model, mc_points)(X) / expected, torch.ones_like(expected))

    def test_of_a_weighted_sum_of_outputs(self) -> None:
        model = small_model(some(outputs=2))
        transform = ScalarizedPosteriorTransform(torch.tensor([2.0, -0.5], dtype=torch.float64))
        mc_points, X = points(20), points(8).view(2, 4, 2)
        expected = qNegIntegratedPosteriorVariance(model, mc_points, posterior_transform=transform)(
            X
        )
        actual = FeatureNIPV(model, mc_points, posterior_transform=transform)(X)
        assert_close(actual, expected)

    def test_with_a_batch_of_models(self) -> None:
        model = small_model(some(batch_shape=(3,)))
        mc_points, X = points(20), points(12).view(3, 4, 2)
        expected = qNegIntegratedPosteriorVariance(model, mc_points)(X)
        assert_close(FeatureNIPV(model, mc_points)(X), expected)

    def test_in_float32(self) -> None:
        model = small_model(some(dtype=torch.float32))
        mc_points, X = points(20, like=model.train_targets), points(8).view(2, 4, 2).float()
        actual = FeatureNIPV(model, mc_points)(X)
        expected = qNegIntegratedPosteriorVariance(model, mc_points)(X)
        assert actual.dtype == torch.float32
        assert_close(actual, expected)

    @pytest.mark.parametrize("times", [1, 2])
    def test_of_a_model_conditioned_on_hypothetical_data(self, times: int) -> None:
        model = small_model(some())
        for _ in range(times):
            model = model.condition_on_observations(points(3), points(3)[:, :1])
        mc_points, X = points(60), points(8).view(2, 4, 2)
        expected = qNegIntegratedPosteriorVariance(model, mc_points)(X)
        assert_close(FeatureNIPV(model, mc_points)(X) / expected, torch.ones_like(expected))

    def test_of_a_batch_of_hypothetical_data(self) -> None:
        model = small_model(some())
        model = model.condition_on_observations(
            points(6).view(2, 3, 2), points(6).view(2, 6, 1)[:, :3]
        )
        mc_points, X = points(30), points(8).view(2, 4, 2)
        expected = qNegIntegratedPosteriorVariance(model, mc_points)(X)
        assert_close(FeatureNIPV(model, mc_points)(X), expected)


class TestValue:
    def test_is_the_dense_process(self) -> None:
        data, mc_points, X = some(), points(50), points(4)
        model = small_model(data, outcome_transform=None)
        noise = model.noise_level().expand(4).detach()
        expected = -integrated_posterior_variance(dense(model, data), X, noise, mc_points)
        assert_close(FeatureNIPV(model, mc_points)(X).squeeze(), expected.detach())

    def test_weights_are_repetitions(self) -> None:
        model, mc_points, X = small_model(some()), points(4), points(3)
        weights = torch.tensor([1.0, 0.0, 3.0, 2.0])
        repeated = mc_points.repeat_interleave(weights.long(), 0)
        assert_close(
            FeatureNIPV(model, mc_points, weights=weights)(X), FeatureNIPV(model, repeated)(X)
        )

    def test_many_points_are_as_few(self) -> None:
        model, X = small_model(some()), points(3)
        mc_points = points(2 * FEW_POINTS)
        halves = [FeatureNIPV(model, half)(X) for half in mc_points.split(FEW_POINTS)]
        assert_close(FeatureNIPV(model, mc_points)(X), torch.stack(halves).mean(0))

    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_many_points_give_the_gram_of_their_features(self, dim: int) -> None:
        basis = small_model(some(dim=dim), grid_size=6).feature_process().basis
        few, many = points(10, dim), points(FEW_POINTS, dim)
        weights = torch.rand(FEW_POINTS + 10, dtype=torch.float64)
        together = PointMeasure(torch.cat((few, many)), weights).gram(basis)
        first = PointMeasure(few, weights[:10]).gram(basis)
        assert_close(together, first + PointMeasure(many, weights[10:]).gram(basis))

    def test_over_a_box_is_that_of_a_fine_quadrature(self) -> None:
        model, X = small_model(some()), points(6).view(2, 3, 2)
        bounds = torch.tensor([[0.13, 0.0], [0.71, 0.55]], dtype=torch.float64)
        actual = FeatureNIPV(model, bounds=bounds)(X)
        expected = FeatureNIPV(model, midpoints(bounds))(X)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=0.0)

    def test_over_a_box_is_exact(self) -> None:
        """Gauss points in each cell integrate the cellwise polynomials of degree six."""
        kernel = RBFKernel(ard_num_dims=2)
        kernel.lengthscale = 0.6
        model, X = small_model(some(), grid_size=7, covar_module=kernel), points(3)
        nodes, shares = (
            torch.tensor([0.0694318442, 0.3300094782]),
            torch.tensor([0.1739274226, 0.3260725774]),
        )
        nodes = torch.cat((nodes, 1.0 - nodes)).double()
        cells = torch.arange(4, dtype=torch.float64).unsqueeze(-1)
        line = ((cells + nodes) / 4).flatten()
        share = torch.cat((shares, shares)).double().repeat(4)
        exact = FeatureNIPV(
            model, torch.cartesian_prod(line, line), weights=torch.outer(share, share).flatten()
        )(X)
        assert_close(FeatureNIPV(model, bounds=UNIT.double())(X), exact)

    def test_over_a_box_before_the_input_transform(self) -> None:
        size = torch.tensor([100.0, 0.01], dtype=torch.float64)
        data, X = wide(some()), points(3) * size
        model = small_model(
            data, input_transform=Normalize(2, bounds=UNIT * size), bounds=UNIT * size
        )
        bounds = torch.tensor([[0.2, 0.1], [0.9, 0.6]], dtype=torch.float64) * size
        actual = FeatureNIPV(model, bounds=bounds)(X)
        expected = FeatureNIPV(model, midpoints(bounds))(X)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=0.0)

    def test_one_set_is_as_a_batch(self) -> None:
        acquisition, X = FeatureNIPV(small_model(some()), bounds=UNIT), points(3)
        assert acquisition(X).shape == (1,)
        assert acquisition(X.expand(2, 5, 3, 2)).shape == (2, 5)
        assert_close(acquisition(X.expand(2, 5, 3, 2)), acquisition(X).expand(2, 5))

    def test_more_points_never_leave_more_variance(self) -> None:
        acquisition, X = FeatureNIPV(small_model(some()), bounds=UNIT), points(5)
        values = torch.stack([acquisition(X[:q]) for q in range(6)]).squeeze()
        assert bool((values.diff() >= 0.0).all())

    def test_without_observations_in_memory(self) -> None:
        model = small_model(some(0), outcome_transform=None)
        assert_close(FeatureNIPV(model, bounds=UNIT)(points(0)), -torch.ones(1).double(), 1e6)


class TestGradient:
    @pytest.mark.parametrize("pending", [False, True])
    def test_is_that_of_differences(self, model: WISKI, pending: bool) -> None:
        X_pending = points(2) if pending else None
        for measure in ({"mc_points": points(40)}, {"bounds": UNIT}):
            acquisition = FeatureNIPV(model, **measure, X_pending=X_pending)
            assert_gradient(lambda X, f=acquisition: f(X).sin().sum(), smooth_points(model, 2, 3))

    def test_climbs(self) -> None:
        acquisition, start = FeatureNIPV(small_model(some()), bounds=UNIT), points(2)
        X, value = optimize_acqf(
            acquisition, UNIT.double(), 2, num_restarts=1, batch_initial_conditions=start[None]
        )
        assert X.shape == (2, 2)
        assert float(value) > float(acquisition(start))


class TestFollowsItsModel:
    def test_through_an_update(self) -> None:
        model, X, more = small_model(some()), points(3), some(5)
        acquisition = FeatureNIPV(model, bounds=UNIT)
        before = acquisition(X)
        model.update(more.X, more.Y)
        assert_close(acquisition(X), FeatureNIPV(model, bounds=UNIT)(X))
        assert float(acquisition(X)) > float(before)

    def test_beyond_the_bounds_from_a_wider_basis(self) -> None:
        model = small_model(some())
        X, bounds = points(3), model.bounds
        T = points(20)
        acquisition = FeatureNIPV(model, T)
        inside = acquisition(X)
        outside = X.clone()
        outside[0] = 1.3
        mc_points = acquisition.measure.corners
        reference = qNegIntegratedPosteriorVariance(model, mc_points=T)
        assert_close(acquisition(outside), reference(outside))
        assert torch.equal(model.bounds, bounds)
        assert_close(acquisition(X), inside, 1e5)
        assert torch.equal(acquisition.measure.corners, mc_points)

    def test_and_leaves_it_as_it_is(self) -> None:
        model, T = small_model(some()), points(4)
        before = model.posterior(T).variance
        X = points(3).requires_grad_()
        FeatureNIPV(model, bounds=UNIT)(X).sum().backward()
        assert torch.equal(model.posterior(T).variance, before)
        assert all(parameter.grad is None for parameter in model.parameters())


class TestConstructor:
    def test_is_found_by_botorch(self) -> None:
        model, X = small_model(some()), points(3)
        construct = get_acqf_input_constructor(FeatureNIPV)
        pending, mc_points = points(2), points(9)
        box = construct(model=model, bounds=[(0.0, 1.0), (0.0, 1.0)], X_pending=pending)
        expected = FeatureNIPV(model, bounds=UNIT.double(), X_pending=pending)(X)
        assert torch.equal(FeatureNIPV(**box)(X), expected)
        listed = construct(model=model, bounds=[(0.0, 1.0)] * 2, mc_points=mc_points)
        assert torch.equal(FeatureNIPV(**listed)(X), FeatureNIPV(model, mc_points)(X))

    def test_wants_one_measure(self) -> None:
        model = small_model(some())
        with pytest.raises(ValueError, match="exactly one of mc_points and bounds, got none"):
            FeatureNIPV(model)
        with pytest.raises(ValueError, match="got both"):
            FeatureNIPV(model, points(3), UNIT)
        with pytest.raises(ValueError, match="weights only with mc_points"):
            FeatureNIPV(model, bounds=UNIT, weights=torch.ones(3))

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"mc_points": torch.rand(3, 3)}, BotorchTensorDimensionError, "mc_points of shape"),
            ({"mc_points": torch.rand(1, 3, 2)}, BotorchTensorDimensionError, "mc_points of shape"),
            ({"mc_points": torch.rand(0, 2)}, InputDataError, "at least one point"),
            ({"mc_points": torch.full((3, 2), torch.nan)}, InputDataError, "finite"),
            ({"mc_points": torch.ones(3, 2).long()}, InputDataError, "floating point"),
            ({"bounds": torch.rand(3, 2)}, BotorchTensorDimensionError, "bounds of shape"),
            ({"bounds": UNIT.flip(0)}, ValueError, "lower < upper"),
            ({"bounds": 100.0 * UNIT}, InputDataError, "outside the bounds"),
        ],
    )
    def test_checks_its_measure(self, arguments: Any, error: type, message: str) -> None:
        with pytest.raises(error, match=message):
            FeatureNIPV(small_model(some()), **arguments)

    @pytest.mark.parametrize(
        ("weights", "error", "message"),
        [
            (torch.ones(2), BotorchTensorDimensionError, "weights of shape"),
            (torch.tensor([1.0, -1.0, 1.0]), InputDataError, "1 negative"),
            (torch.zeros(3), InputDataError, "0 positive"),
            (torch.tensor([1.0, torch.inf, 1.0]), InputDataError, "finite"),
        ],
    )
    def test_checks_weights(self, weights: Tensor, error: type, message: str) -> None:
        with pytest.raises(error, match=message):
            FeatureNIPV(small_model(some()), points(3), weights=weights)

    def test_wants_a_scalar(self) -> None:
        model = small_model(some(outputs=2))
        with pytest.raises(UnsupportedError, match="posterior_transform for a model of 2"):
            FeatureNIPV(model, points(3))
        with pytest.raises(UnsupportedError, match="ExpectationPosteriorTransform"):
            FeatureNIPV(model, points(3), posterior_transform=ExpectationPosteriorTransform(1))

    def test_wants_affine_outcomes(self) -> None:
        with pytest.raises(UnsupportedError, match="got Log"):
            FeatureNIPV(small_model(some(), outcome_transform=Log()), points(3))

    def test_wants_outputs_chosen_first(self) -> None:
        model = small_model(some(outputs=2))
        conditioned = model.condition_on_observations(points(2), points(2))
        with pytest.raises(UnsupportedError, match="subset_output first"):
            FeatureNIPV(conditioned.subset_output([0]), points(3))

    def test_checks_candidates(self) -> None:
        acquisition = FeatureNIPV(small_model(some()), points(3))
        with pytest.raises(BotorchTensorDimensionError, match="X of shape"):
            acquisition(points(3, dim=3))


class LongestTensor(TorchDispatchMode):
    """Notes the largest dimension of all tensors that operations are given."""

    length = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        shapes = [value.shape for value in args if isinstance(value, Tensor)]
        self.length = max(self.length, *(size for shape in shapes for size in shape), 0)
        return operation(*args, **(kwargs or {}))


def test_an_evaluation_looks_at_none_of_the_integration_points(model: WISKI) -> None:
    many = points(2 * FEW_POINTS)
    acquisition, X = FeatureNIPV(model, mc_points=many), points(6).unflatten(0, (2, 3))
    acquisition(X)
    with LongestTensor() as longest:  # type: ignore[no-untyped-call]
        acquisition(X)
    assert 0 < longest.length < len(many)


@pytest.mark.parametrize("rows", [12, 700])  # stored as they are, and on the grid
def test_what_was_evaluated_in_inference_mode_can_be_differentiated(rows: int) -> None:
    X = torch.rand(rows, 2, dtype=torch.float64)
    Y = X.sum(-1, keepdim=True).sin()
    box = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    model = WISKI(X, Y, grid_size=(12, 12), bounds=box)
    with torch.inference_mode():
        former = FeatureNIPV(model, mc_points=X[:5].clone())
        former(X[:2].unsqueeze(-3))
    points = X[:2].clone().requires_grad_()
    for function in (former, FeatureNIPV(model, mc_points=X[:5])):
        (gradient,) = torch.autograd.grad(function(points.unsqueeze(-3)).sum(), points)
        assert float(gradient.norm()) > 0.0
