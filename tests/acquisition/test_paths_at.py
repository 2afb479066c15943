"""Functions that are drawn jointly at given points: their law there and between, in closed form."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.models.transforms.input import Normalize
from botorch.models.transforms.outcome import Log
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PolynomialKernel,
    RBFKernel,
    ScaleKernel,
)
from torch import Tensor

from bo_stream import OSGPR, WISKI, AutoGP, ClusteredGP, observation_space
from bo_stream.acquisition import mean_path, sample_paths
from bo_stream.bases.inducing import frozen
from bo_stream.bases.spectral import RandomDraws
from bo_stream.linalg import stack_rows
from bo_stream.models.base import StreamingGP
from bo_stream.observation_space import ObservationSpaceProcess
from bo_stream.process import ConditionedProcess, SelectedProcess
from bo_stream.testing.streams import (
    TOLERANCE,
    assert_close,
    assert_gradient,
    gaussian,
    joint_covariance,
)
from tests.acquisition.test_paths_of_models import assert_is_one_function_each, change
from tests.laws.cases import STREAMS
from tests.laws.registry import Stream, condition_on, shared_out

pytestmark = pytest.mark.filterwarnings("ignore:The kernel.s lengthscale is too short for the grid")

AFFINE = [s for s in STREAMS if not any(word in s.case.name for word in ("log", "power"))]
ONE_EACH = [next(group) for _, group in groupby(AFFINE, lambda s: s.case.name)]
SUMS = ("WISKI", "Heteroscedastic", "Dirichlet", "Bayesian", "QS", "AutoGP, handed over to a grid")
EXACT = [
    s for s in ONE_EACH if s.case.name.startswith(SUMS) and s.case.name != "QSGP, inducing points"
]
DRAWN = [s for s in ONE_EACH if s not in EXACT]
WHOLE = ("AutoGP", "OSGPR", "OSVGP, Gaussian", "ClusteredGP", "DecoupledGP", "LocalGP")
MORE = [s for s in AFFINE if s.case.name in WHOLE and s not in ONE_EACH]
FUNCTIONS = [next(s for s in DRAWN if s.case.name == name) for name in WHOLE]


class Bent(Kernel):
    """``k(x, x') = cos(x₁) cos(x'₁) / (1 + ¼ |x − x'|²)``: a user's own, and not stationary."""

    is_stationary = False

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("unused", torch.nn.Parameter(torch.zeros(1)))

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        own = x1[..., :1].cos(), x2[..., :1].cos()
        if diag:
            return (own[0] * own[1]).squeeze(-1) * torch.ones_like(x1[..., 0])
        distance = self.covar_dist(x1, x2, square_dist=True)
        return own[0] * own[1].mT / (1.0 + 0.25 * distance)


NUMBERS = 128
"""Functions that are drawn from unit vectors, at least as many as numbers in each."""


@pytest.fixture
def unit_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw from unit vectors, each number for another function, which is linear in its numbers."""

    def normal(draws: RandomDraws, count: int, one: int) -> Tensor:
        start = draws.__dict__.get("taken", 0)
        draws.__dict__["taken"] = start + count
        assert draws.shape[0] == NUMBERS >= start + count
        unit = torch.eye(NUMBERS, dtype=torch.float64)[:, start : start + count]
        ahead = (1,) * (len(draws.shape) - 1)
        return unit.reshape(NUMBERS, *ahead, count, one).expand(*draws.shape, count, one)

    monkeypatch.setattr(RandomDraws, "normal", normal)


def assert_law(model: StreamingGP, C: Tensor, X: Tensor, factor: float = 10.0) -> None:
    """The sum of squares over unit vectors is what values at the points explain, at X and C."""
    both = torch.cat((X.expand(*C.shape[:-2], *X.shape[-2:]), C), -2)
    values = sample_paths(model, NUMBERS, at=C)(both) - mean_path(model)(both)
    values = values.double().movedim(0, -1).transpose(-3, -2)  # ... m x t x NUMBERS
    process, inputs = model.process(), model.process_inputs(both)
    base, points = process, inputs[..., -C.shape[-2] :, :]
    while isinstance(base, ConditionedProcess | SelectedProcess):
        base = base.base
    if isinstance(base, ObservationSpaceProcess):  # whose rows are drawn, too
        points = stack_rows(base.told.X, points)
    cross, own = process.covariance(inputs, points), process.covariance(points)
    nugget = torch.diag_embed(observation_space.NUGGET * own.diagonal(dim1=-2, dim2=-1))
    explained = cross @ torch.linalg.solve(own + nugget, cross.mT)
    full = joint_covariance(gaussian(model.posterior(both))).detach().double()
    unit = process.covariance(inputs).abs().amax((-2, -1), keepdim=True)
    found = values @ values.mT / full.abs().amax((-2, -1), keepdim=True)
    expected = (explained / unit).expand_as(found)
    there = slice(-C.shape[-2], None)
    assert_close(found[..., there, there].to(X.dtype), expected[..., there, there], factor)
    if base is not process or not isinstance(base, ObservationSpaceProcess):
        assert_close(found.to(X.dtype), expected, factor)
    else:  # between points the other nugget of the prior shows
        assert_close(found.to(X.dtype), expected, max(factor, 1e-3 / TOLERANCE[X.dtype]))


def data(n: int, d: int = 2) -> tuple[Tensor, Tensor]:
    X = torch.rand(n, d, dtype=torch.float64)
    return X, (3.0 * X.sum(-1, keepdim=True)).sin()


def exact(kernel: Kernel | None = None, **options: Any) -> AutoGP:
    """A model of twelve rows, held exactly."""
    model = AutoGP(*data(12), covar_module=kernel, families="exact", **options)
    return model.eval()


KERNELS: dict[str, Callable[[], Kernel]] = {
    "squared-exponential": lambda: RBFKernel(ard_num_dims=2),
    "scaled": lambda: ScaleKernel(RBFKernel(ard_num_dims=2)),
    "Matérn 1/2": lambda: MaternKernel(0.5),
    "Matérn 3/2": lambda: MaternKernel(1.5, ard_num_dims=2),
    "scaled Matérn 5/2": lambda: ScaleKernel(MaternKernel(2.5)),
    "of one input": lambda: RBFKernel(active_dims=(1,)),
    "linear": lambda: LinearKernel(),
    "polynomial": lambda: PolynomialKernel(power=2),
    "a sum": lambda: AdditiveKernel(LinearKernel(), RBFKernel(active_dims=(0,))),
    "a user's": Bent,
}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return KERNELS[request.param]()


@pytest.mark.usefixtures("unit_draws")
class TestLaw:
    @pytest.mark.parametrize("stream", shared_out([*DRAWN, *MORE]))
    def test_is_the_posterior_there_and_its_mean_between(self, stream: Stream) -> None:
        model = stream.model(stream.data(25))
        assert_law(model, stream.data(4).X, stream.points)

    @pytest.mark.parametrize("stream", shared_out([*DRAWN, *MORE]))
    def test_given_hypothetical_observations(self, stream: Stream) -> None:
        model = stream.model(stream.data(25))
        for _ in range(2):
            model = condition_on(model, stream.data(2))
        assert_law(model, stream.data(4).X, stream.points)

    def test_of_fantasies_and_of_some_outputs(self) -> None:
        stream = next(s for s in MORE if s.case.name == "AutoGP" and s.setting.outputs == 2)
        model = stream.model(stream.data(25))
        fantasies = model.fantasize(stream.data(2).X, stream.sampler(3))
        assert_law(fantasies, stream.data(4).X, stream.points)
        assert_law(fantasies.subset_output([1]), stream.data(4).X, stream.points)

    def test_of_any_kernel(self, kernel: Kernel) -> None:
        """By the dense formulas of Rasmussen and Williams (2006), eq. 2.23 and 2.24."""
        (X, Y), C, T = data(12), data(5)[0], data(3)[0]
        model = AutoGP(X, Y, covar_module=kernel, families="exact", outcome_transform=None).eval()
        kernel, noise = frozen(model.covar_module), model.likelihood.noise.detach()
        noisy = kernel(X).to_dense() + noise * torch.eye(len(X))
        level = model.mean_module(X[:1]).detach()
        points = torch.cat((C, T, X))
        cross = kernel(points, X).to_dense()
        mean = level + cross @ torch.linalg.solve(noisy, Y - level)
        covariance = kernel(points).to_dense() - cross @ torch.linalg.solve(noisy, cross.mT)
        assert_close(mean_path(model)(points), mean)
        values = (sample_paths(model, NUMBERS, at=C)(points) - mean).squeeze(-1).detach()
        found, drawn = values.mT @ values, [*range(5), *range(8, 20)]
        assert_close(found[drawn][:, drawn], covariance[drawn][:, drawn], 10.0)
        inverse = torch.linalg.pinv(covariance[drawn][:, drawn], rtol=1e-9, hermitian=True)
        assert_close(found, covariance[:, drawn] @ inverse @ covariance[drawn], 1e3)

    def test_in_the_users_units(self) -> None:
        """Of inputs in a box, and outcomes behind a logarithm."""
        (X, Y), C, T = data(12), data(4)[0], data(3)[0]
        box = torch.tensor([[-1.0, 2.0], [1.0, 5.0]], dtype=torch.float64)
        options: dict[str, Any] = {"families": "exact", "covar_module": RBFKernel()}
        unit = AutoGP(X, Y, **options, outcome_transform=None).eval()
        options["input_transform"] = Normalize(2, bounds=box)
        wide = [box[0] + (box[1] - box[0]) * points for points in (X, C, T)]
        model = AutoGP(wide[0], Y.exp(), **options, outcome_transform=Log()).eval()
        expected = sample_paths(unit, NUMBERS, at=C)(T).exp()
        assert_close(sample_paths(model, NUMBERS, at=wide[1])(wide[2]), expected)

    def test_before_any_data(self) -> None:
        X = data(3)[0]
        for model in (
            AutoGP(X[:0], X[:0, :1], families="exact"),
            OSGPR(X[:0], X[:0, :1], covar_module=LinearKernel()),
            ClusteredGP(X[:0], X[:0, :1], resolution=0.1),
        ):
            assert_law(model.eval(), data(3)[0], X)

    def test_inputs_of_a_batch_of_models(self) -> None:
        stream = next(s for s in MORE if s.case.name == "OSGPR" and s.setting.batch_shape)
        model, C = stream.model(stream.data(25)), stream.data(4).X
        same = sample_paths(model, NUMBERS, at=C[0])(stream.points)
        assert_close(sample_paths(model, NUMBERS, at=C[0].expand(2, 4, 2))(stream.points), same)
        own = sample_paths(model, NUMBERS, at=C)(stream.points)
        assert_close(own[:, 0], same[:, 0])
        assert bool((own[:, 1] != same[:, 1]).any())


class TestExactFunctions:
    @pytest.mark.parametrize("stream", shared_out(EXACT))
    def test_need_no_points(self, stream: Stream) -> None:
        model, C = stream.model(stream.data(25)), stream.data(4).X
        for each in (model, condition_on(model, stream.data(2))):
            expected = sample_paths(each, 3, seed=1)(stream.points)
            assert_close(sample_paths(each, 3, seed=1, at=C)(stream.points), expected)

    def test_reach_beyond_the_bounds(self) -> None:
        model = WISKI(*data(9), bounds=torch.tensor([[0.0, 0.0], [1.0, 1.0]]), grid_size=11).eval()
        C = torch.tensor([[1.3, 0.5]], dtype=torch.float64)
        with pytest.raises(InputDataError, match="outside the box"):
            sample_paths(model, 2)(C)
        assert sample_paths(model, 2, at=C)(C).shape == (2, 1, 1)


class TestFunction:
    @pytest.mark.parametrize("stream", FUNCTIONS, ids=str)
    def test_is_one(self, stream: Stream) -> None:
        """The same values in every company, at every call, alone and in a batch."""
        model = stream.model(stream.data(25))
        paths, X = sample_paths(model, 3, seed=1, at=stream.data(4).X), torch.rand(5, 2).double()
        assert_is_one_function_each(paths, X)

    @pytest.mark.parametrize("stream", FUNCTIONS, ids=str)
    def test_outlives_changes_of_its_model(self, stream: Stream) -> None:
        model, X, C = stream.model(stream.data(25)), stream.points, stream.data(4).X
        paths = sample_paths(model, 2, seed=1, at=C)
        before, more = paths(X), stream.data(10)
        assert torch.equal(sample_paths(model, 2, seed=1, at=C)(X), before)
        assert not torch.equal(sample_paths(model, 2, seed=2, at=C)(X), before)
        change(model, more)
        assert torch.equal(paths(X), before)

    @pytest.mark.parametrize("stream", FUNCTIONS[:-1], ids=str)
    def test_gradient_is_that_of_differences(self, stream: Stream) -> None:
        model = stream.model(stream.data(25))
        conditioned = condition_on(model, stream.data(2))
        for each in (model, conditioned):
            paths = sample_paths(each, 2, seed=1, at=stream.data(4).X)
            assert_gradient(lambda X: paths(X).sin().sum(), torch.rand(3, 2).double())  # noqa: B023

    def test_gradient_of_any_kernel(self, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
        """With a nugget so large that of a kernel of low rank differences show no rounding."""
        monkeypatch.setattr(observation_space, "PRIOR_NUGGET", 1e-6)
        paths = sample_paths(exact(kernel), 2, seed=1, at=data(2)[0])
        for shape in ((3, 2), (2, 1, 2)):  # of every function, and each of its own
            assert_gradient(lambda X: paths(X).sin().sum(), torch.rand(*shape).double())

    def test_gradient_at_the_points_themselves(self) -> None:
        """Of a Matérn kernel of 3/2, whose distance has no gradient there."""
        C = data(4)[0]
        paths = sample_paths(exact(MaternKernel(1.5)), 2, seed=1, at=C)
        assert_gradient(lambda X: paths(X).sin().sum(), C)

    def test_follows_its_seed_alone(self) -> None:
        model, C = exact(), data(4)[0]
        state = torch.get_rng_state()
        first = sample_paths(model, 2, seed=7, at=C)(C)
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(3)
        assert torch.equal(sample_paths(model, 2, seed=7, at=C)(C), first)
        assert not torch.equal(sample_paths(model, 2, at=C)(C), sample_paths(model, 2, at=C)(C))

    @pytest.mark.filterwarnings("ignore:Negative variance values detected")
    @pytest.mark.parametrize("noise", [1e-2, 1e-6, 1e-10])
    def test_of_equal_points_and_of_observed_ones(self, noise: float) -> None:
        """Where the outcome is known, functions are the outcome, as far as rounding lets them."""
        (X, Y), others = data(20), data(10)[0]
        model = AutoGP(X, Y, torch.full_like(Y, noise), families="exact").eval()
        C = torch.cat((X, others, X, others, others + 1e-9))
        values = sample_paths(model, 50, seed=1, at=C)(C)
        posterior = gaussian(model.posterior(C))
        spread = posterior.variance.detach().sqrt() + 1e-6
        assert bool(((values - posterior.mean).abs() <= 7.0 * spread).all())
        assert_close(values[:, :30], values[:, 30:60], 1e3)


class TestBadInput:
    @pytest.fixture
    def model(self) -> AutoGP:
        return exact()

    @pytest.mark.parametrize(
        "shape",
        [(3, 1), (3,), (0, 2), (2, 3, 2), (1, 3, 2)],
        ids=["width", "row", "none", "two", "one"],
    )
    def test_shape(self, model: AutoGP, shape: tuple[int, ...]) -> None:
        with pytest.raises(BotorchTensorDimensionError, match="Expected at of shape"):
            sample_paths(model, 2, at=torch.rand(*shape).double())

    def test_values(self, model: AutoGP) -> None:
        bad = torch.full((2, 2), torch.nan, dtype=torch.float64)
        state = torch.get_rng_state()
        with pytest.raises(InputDataError, match="Expected at to be finite"):
            sample_paths(model, 2, at=bad)
        with pytest.raises(InputDataError, match=r"Expected at as torch\.float64"):
            sample_paths(model, 2, at=torch.rand(3, 2).float())
        with pytest.raises(InputDataError, match=r"Expected at to be a torch\.Tensor"):
            sample_paths(model, 2, at=[[0.5, 0.5]])  # type: ignore[arg-type]
        torch.set_rng_state(state)
        assert sample_paths(model, 2, at=torch.rand(3, 2).double()).batch_shape == (2,)

    def test_out_of_reach(self) -> None:
        model = WISKI(*data(9), bounds=torch.tensor([[0.0, 0.0], [1.0, 1.0]]), grid_size=11).eval()
        C = torch.full((1, 2), 99.0, dtype=torch.float64)
        with pytest.raises(InputDataError, match="Of the inputs at: X lies too far outside"):
            sample_paths(model, 2, at=C)
        X = data(2)[0]
        conditioned = model.condition_on_observations(X, X[:, :1])
        with pytest.raises(InputDataError, match="Of the inputs at: X lies outside"):
            sample_paths(conditioned, 2, at=1.3 + 0.0 * C)


# --- draws nearer to the mean, or farther from it ------------------------------------------------


@pytest.mark.parametrize("stream", FUNCTIONS + EXACT[:2], ids=lambda s: s.case.name)
@pytest.mark.parametrize("joint", [True, False])
def test_deviations_from_the_mean_are_multiplied(stream: Stream, joint: bool) -> None:
    if stream.case.name == "LocalGP" and not joint:
        pytest.skip("it has functions at given points only")
    model, X = stream.model(stream.data(25)), stream.data(5).X
    at = X if joint else None
    drawn = sample_paths(model, 3, seed=1, at=at)(X)
    factors = torch.tensor([0.0, 0.5, 2.0])
    moved = sample_paths(model, 3, seed=1, at=at, spread=factors)
    mean = mean_path(model)(X)
    spread = factors.to(drawn).reshape(3, *[1] * (drawn.ndim - 1))
    expected = mean + spread * (drawn - mean)
    torch.testing.assert_close(moved(X), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(moved.path(2)(X), expected[2], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "spread", [torch.ones(2), torch.tensor(1.0), torch.tensor([1.0, torch.nan, 0.0])]
)
def test_a_spread_that_is_none_is_named(spread: Tensor) -> None:
    X = torch.rand(4, 2, dtype=torch.float64)
    model = AutoGP(X, X.sum(-1, keepdim=True))
    with pytest.raises(ValueError, match="Expected spread to be a tensor of 3 finite numbers"):
        sample_paths(model, 3, spread=spread)
