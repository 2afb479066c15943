"""Functions drawn from priors: their covariance is the kernel, and each is one function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from torch import Size, Tensor

from bo_stream import ProductMatern
from bo_stream.bases import spectral
from bo_stream.bases.inducing import InducingFunctions, kernel_matrix
from bo_stream.bases.spectral import FourierFunctions, RandomDraws, draw_prior
from bo_stream.tensors import map_tensors
from bo_stream.testing.streams import assert_close, assert_gradient
from tests.support.moments import assert_moments

DIM = 3
DRAWS = 10_000


@pytest.fixture(autouse=True)
def _few_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """The covariance is exact over draws whatever the number of cosines in each."""
    monkeypatch.setattr(spectral, "FEATURES", 16)


def scaled(kernel: Kernel, size: float) -> ScaleKernel:
    result = ScaleKernel(kernel, batch_shape=kernel.batch_shape)
    result.outputscale = size
    return result


def selecting(kernel: Kernel, active: tuple[int, ...]) -> Kernel:
    kernel.active_dims = torch.tensor(active)
    return kernel


def rational_quadratic() -> RQKernel:
    kernel = RQKernel(ard_num_dims=DIM)
    kernel.alpha = 1.7
    return kernel


def periodic() -> PeriodicKernel:
    kernel = PeriodicKernel(ard_num_dims=DIM)
    kernel.lengthscale = torch.tensor([1.5, 0.8, 2.0])
    kernel.period_length = torch.tensor([0.7, 1.3, 2.0])
    return kernel


def constant() -> ConstantKernel:
    kernel = ConstantKernel()
    kernel.constant = torch.tensor([0.6])
    return kernel


KERNELS: dict[str, Callable[[], Kernel]] = {
    "RBF": lambda: RBFKernel(),
    "RBF, a lengthscale an input": lambda: RBFKernel(ard_num_dims=DIM),
    "Matérn 1/2": lambda: MaternKernel(0.5, ard_num_dims=DIM),
    "Matérn 5/2 of some inputs": lambda: MaternKernel(2.5, ard_num_dims=2, active_dims=(2, 0)),
    "product Matérn 3/2": lambda: ProductMatern(1.5, ard_num_dims=DIM),
    "product Matérn 5/2 of some inputs": lambda: ProductMatern(2.5, active_dims=(2, 0)),
    "rational quadratic": rational_quadratic,
    "periodic": periodic,
    "constant": constant,
    "scaled": lambda: scaled(MaternKernel(1.5), 2.3),
    "scaled, of some inputs": lambda: scaled(RBFKernel(ard_num_dims=2, active_dims=(2, 0)), 0.7),
    "selected twice": lambda: selecting(AdditiveKernel(RBFKernel(active_dims=(1,))), (0, 2)),
    "sum": lambda: AdditiveKernel(
        scaled(RBFKernel(active_dims=(0,)), 0.4),
        AdditiveKernel(scaled(MaternKernel(2.5), 1.5), constant()),
    ),
    "product": lambda: scaled(ProductKernel(RBFKernel(active_dims=(1,)), periodic()), 1.3),
    "product of sums": lambda: ProductKernel(
        AdditiveKernel(scaled(RBFKernel(active_dims=(0,)), 0.4), constant()),
        AdditiveKernel(MaternKernel(2.5), scaled(RBFKernel(active_dims=(2, 1)), 0.7)),
    ),
}


def spread(kernel: Kernel) -> Kernel:
    """With lengthscales that differ."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in kernel.named_parameters():
        if name.endswith("raw_lengthscale"):
            parameter.data += torch.rand(parameter.shape, generator=generator)
    return kernel.double().requires_grad_(False)


def drawn(
    kernel: Kernel, n: int = DRAWS, shape: tuple[int, ...] = (1,), seed: int = 3
) -> FourierFunctions:
    generator = torch.Generator().manual_seed(seed)
    draws = RandomDraws(Size((n, *shape)), torch.device("cpu"), generator)
    return draw_prior(kernel, DIM, shape[-1], draws)


def points(n: int = 5) -> Tensor:
    return 1.5 * torch.rand(n, DIM, dtype=torch.float64)


class TestLaw:
    @pytest.mark.parametrize("name", KERNELS)
    def test_the_covariance_is_the_kernel(self, name: str) -> None:
        kernel, X = spread(KERNELS[name]()), points()
        values = drawn(kernel)(X).squeeze(-2)
        assert_moments(values, torch.zeros(5).double(), kernel(X).to_dense())

    def test_of_batches_and_outputs(self) -> None:
        kernel, X = spread(scaled(RBFKernel(batch_shape=Size([2, 3])), 1.0)), points(4)
        kernel.outputscale = 0.5 + torch.rand(2, 3).double()
        values = drawn(kernel, shape=(2, 3))(X)
        expected = kernel_matrix(kernel, X.expand(2, 4, DIM), X.expand(2, 4, DIM), 3)
        assert_moments(values, torch.zeros(2, 3, 4).double(), expected)

    def test_outputs_that_share_a_kernel_are_independent(self) -> None:
        kernel, X = spread(RBFKernel()), points(2)
        values = drawn(kernel, shape=(2,))(X).flatten(-2)
        expected = torch.block_diag(*[kernel(X).to_dense()] * 2)
        assert_moments(values, torch.zeros(4).double(), expected)

    def test_values_are_normal(self) -> None:
        values = drawn(spread(RBFKernel()))(points(1)).flatten()
        for power, moment, spread_of in ((3, 0.0, 15.0), (4, 3.0, 96.0)):
            error = (values**power).mean() - moment
            assert abs(float(error)) <= 6.0 * (spread_of / DRAWS) ** 0.5

    @pytest.mark.parametrize("outputs", [1, 2])
    def test_averages(self, outputs: int) -> None:
        """Of lengthscales between half and twice the kernel's."""
        batch = Size([2]) if outputs == 2 else Size()
        kernel = spread(scaled(RBFKernel(ard_num_dims=DIM, batch_shape=batch), 1.4))
        Z = points(2 * outputs).view(outputs, 2, DIM)
        logs = torch.linspace(-0.5, 0.7, Z.numel()).double().view_as(Z)
        averages, X = InducingFunctions(Z, logs), points(2)
        functions = drawn(kernel, shape=(outputs,))
        values = torch.cat((functions.of(averages, kernel, outputs), functions(X)), -1)
        cross = averages.with_values(kernel, X, outputs)
        own = averages.with_functions(kernel, averages, outputs)
        others = kernel_matrix(kernel, X, X, outputs)
        expected = torch.cat((torch.cat((own, cross), -1), torch.cat((cross.mT, others), -1)), -2)
        assert_moments(values, torch.zeros(outputs, 4).double(), expected)


class TestFunction:
    @pytest.mark.parametrize("numbers", [1, 40, 1 << 21])
    def test_is_one(self, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same however it is evaluated: a part of the cosines at a time, point by point."""
        functions, X = drawn(spread(MaternKernel(2.5)), 3), points(6)
        expected = functions(X)
        monkeypatch.setattr(spectral, "NUMBERS", numbers)
        assert_close(functions(X), expected)
        assert_close(functions(X[2:3]), expected[..., 2:3])
        own = functions(X.expand(3, 6, DIM))
        assert_close(own, expected)
        assert_close(map_tensors(functions, lambda t: t[1])(X), expected[1])

    @pytest.mark.parametrize("numbers", [5, 1 << 21])
    def test_gradient(self, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(spectral, "NUMBERS", numbers)
        functions = drawn(spread(MaternKernel(2.5)), 3)
        assert_gradient(lambda X: functions(X).square().sum(), points(2))

    def test_follows_its_generator(self) -> None:
        kernel, X = spread(KERNELS["product of sums"]()), points()
        state = torch.get_rng_state()
        assert torch.equal(drawn(kernel, 2)(X), drawn(kernel, 2)(X))
        assert torch.equal(torch.get_rng_state(), state)
        assert not torch.equal(drawn(kernel, 2)(X), drawn(kernel, 2, seed=4)(X))


class TestUnknown:
    @pytest.mark.parametrize("part", [lambda k: k, ScaleKernel])
    def test_kernel(self, part: Callable[[Kernel], Kernel]) -> None:
        with pytest.raises(UnsupportedError, match="LinearKernel: its spectral measure"):
            drawn(part(LinearKernel()), 1)

    def test_class_of_its_own(self) -> None:
        class Other(RBFKernel):
            pass

        with pytest.raises(UnsupportedError, match="Other: its spectral measure"):
            drawn(Other(), 1)


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5])
def test_frequencies_of_a_product_have_its_characteristic_function(nu: float) -> None:
    kernel, T = spread(ProductMatern(nu, ard_num_dims=DIM)), points(6)
    functions = drawn(kernel, 200)
    waves = (functions.frequencies.flatten(0, -2) @ T.mT).cos()
    expected = kernel(T, torch.zeros(1, DIM).double()).to_dense().squeeze(-1)
    assert bool(((waves.mean(0) - expected).abs() < 5.0 / len(waves) ** 0.5).all())
