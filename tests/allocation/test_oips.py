"""OIPS: as the paper's loop, one by one or in batches, whatever the kernel."""

from __future__ import annotations

import math

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from gpytorch.kernels import (
    Kernel,
    LinearKernel,
    MaternKernel,
    PolynomialKernel,
    RBFKernel,
    ScaleKernel,
)
from torch import Tensor

from bo_stream.allocation import OIPS, Isolation, expected_points_bound, nystroem_error_bound
from bo_stream.allocation.allocator import correlation
from tests.oracles.allocation import oips, printed_points_bound


def rbf(lengthscale: float = 0.3, outputscale: float = 4.0) -> ScaleKernel:
    kernel = ScaleKernel(RBFKernel()).double()
    kernel.base_kernel.lengthscale, kernel.outputscale = lengthscale, outputscale
    return kernel


def batch_of_two() -> Kernel:
    kernel = RBFKernel(batch_shape=torch.Size([2])).double()
    kernel.lengthscale = torch.tensor([[[0.2]], [[0.5]]])
    return kernel


KERNELS = {
    "rbf": rbf,
    "matern": lambda: ScaleKernel(MaternKernel(nu=0.5, ard_num_dims=2)).double(),
    "polynomial": lambda: PolynomialKernel(power=3).double(),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("rho", [0.3, 0.8, 0.95])
def test_a_batch_is_its_rows_one_by_one_is_the_papers_loop(name: str, rho: float) -> None:
    kernel, X = KERNELS[name](), torch.rand(60, 2, dtype=torch.float64)
    whole = OIPS(rho).update(X[:0], X, kernel)
    steps = X[:0]
    for row in X.split(1):
        steps = OIPS(rho).update(steps, row, kernel)
    parts = X[:0]
    for rows in X.split(23):
        parts = OIPS(rho).update(parts, rows, kernel)
    with torch.no_grad():
        expected = X[oips(kernel(X).to_dense(), rho)]
    assert torch.equal(whole, expected)
    assert torch.equal(steps, expected)
    assert torch.equal(parts, expected)


def test_an_output_scale_changes_nothing() -> None:
    X = torch.rand(200, 2, dtype=torch.float64)
    chosen = [OIPS(0.7).update(X[:0], X, rbf(outputscale=s)) for s in (1e-3, 1.0, 50.0)]
    assert torch.equal(chosen[0], chosen[1])
    assert torch.equal(chosen[1], chosen[2])


def test_a_batch_of_kernels_is_served_by_the_most_demanding() -> None:
    X = torch.rand(300, 2, dtype=torch.float64)
    assert torch.equal(
        OIPS(0.8).update(X[:0], X, batch_of_two()), OIPS(0.8).update(X[:0], X, rbf(0.2))
    )


def test_longer_lengthscales_prune_and_shorter_ones_grow() -> None:
    X, allocator = torch.rand(400, 2, dtype=torch.float64), OIPS(0.8)
    Z = allocator.update(X[:0], X, rbf(0.1))
    fewer = allocator.update(Z, X[:0], rbf(0.4))
    assert 0 < len(fewer) < len(Z)
    rows = {tuple(row) for row in Z.tolist()}
    assert all(tuple(row) in rows for row in fewer.tolist())
    with torch.no_grad():
        correlations = rbf(0.4, 1.0)(fewer).to_dense() - torch.eye(len(fewer))
    assert float(correlations.max()) < allocator.prune
    more = allocator.update(fewer, X, rbf(0.1))
    assert torch.equal(more[: len(fewer)], fewer)
    with torch.no_grad():
        assert float(rbf(0.1, 1.0)(X, more).to_dense().amax(-1).min()) >= 0.8
    assert torch.equal(OIPS(0.8, prune=1.0).update(Z, X[:0], rbf(0.4)), Z)


@pytest.mark.parametrize("statistic", ["median", "mean"])
def test_outliers_are_passed_over_and_new_regions_are_not(statistic: str) -> None:
    isolation = Isolation(below=0.1, nearest=3, statistic=statistic)
    inside, outlier = torch.rand(100, 2, dtype=torch.float64), torch.full((1, 2), 1e6).double()
    allocator = OIPS(0.8, isolation=isolation)
    Z = allocator.update(inside[:0], torch.cat((inside, outlier)), rbf())
    assert torch.equal(Z, OIPS(0.8).update(inside[:0], inside, rbf()))
    assert torch.equal(allocator.update(Z, outlier, rbf()), Z)
    region = 20.0 + 0.5 * torch.rand(30, 2, dtype=torch.float64)
    entered = allocator.update(Z, region, rbf())
    assert len(entered) > len(Z) + 1
    assert len(OIPS(0.8).update(Z, outlier, rbf())) == len(Z) + 1
    assert len(allocator.update(Z[:0], outlier, rbf())) == 1  # nothing to be isolated from


def test_equal_rows_give_one_point() -> None:
    X = torch.full((10_000, 3), 0.5, dtype=torch.float64)
    assert len(OIPS(0.9).update(X[:0], X, rbf())) == 1


@pytest.mark.parametrize("isolation", [None, Isolation(nearest=1)])
@pytest.mark.parametrize("outputs", [(), (2,)])
def test_an_input_without_prior_variance_is_no_point(
    isolation: Isolation | None, outputs: tuple[int, ...]
) -> None:
    kernel = LinearKernel(batch_shape=torch.Size(outputs)).double()
    none, X = torch.zeros(50, 2).double(), torch.tensor([[1.0, 0.0], [1.0, 0.01]]).double()
    allocator = OIPS(0.8, isolation=isolation)
    assert len(allocator.update(none[:0], none, kernel)) == 0
    assert torch.equal(allocator.update(none[:0], torch.cat((none, X, none)), kernel), X[:1])
    assert torch.equal(allocator.update(X[:1], none, kernel), X[:1])


@pytest.mark.parametrize("d", [1, 2, 3, 5])
def test_the_expected_number_stays_below_the_corrected_bound(d: int) -> None:
    kernel = rbf(0.3)
    counts = [
        len(OIPS(0.7, prune=1.0).update(torch.zeros(0, d).double(), X, kernel))
        for X in torch.rand(8, 400, d, dtype=torch.float64)
    ]
    bound = expected_points_bound(400, d, 0.7, 0.3)
    assert sum(counts) / len(counts) <= bound <= 400.0
    assert expected_points_bound(1, d, 0.7, 0.3) == pytest.approx(1.0)


@pytest.mark.parametrize(("d", "apart", "n"), [(4, 0.35, 3000), (5, 0.35, 2000), (6, 0.5, 1000)])
def test_the_papers_first_bound_fails_from_four_dimensions_on(d: int, apart: float, n: int) -> None:
    """Its cubes overlap and leave the domain; from five dimensions on they leave the balls, too."""
    rho, X = 0.5, torch.rand(4, n, d, dtype=torch.float64)
    lengthscale = apart / math.sqrt(-2.0 * math.log(rho))
    allocator, kernel = OIPS(rho, prune=1.0), rbf(lengthscale)
    found = sum(len(allocator.update(X[0, :0], rows, kernel)) for rows in X) / len(X)
    assert printed_points_bound(n, d, rho, lengthscale) < found
    assert found <= expected_points_bound(n, d, rho, lengthscale)


def test_the_bound_of_a_cube_scales_with_it() -> None:
    assert expected_points_bound(500, 3, 0.8, 0.2, 1.0) == pytest.approx(
        expected_points_bound(500, 3, 0.8, 2.0, 10.0)
    )
    assert math.isfinite(expected_points_bound(10**9, 2, 0.5, 100.0))


@pytest.mark.parametrize("rho", [0.3, 0.9])
def test_what_the_points_miss_stays_below_the_second_bound(rho: float) -> None:
    X, kernel = torch.rand(120, 2, dtype=torch.float64), rbf(0.2, 1.0)
    Z = OIPS(rho).update(X[:0], X, kernel)
    assert missed(kernel, X, Z) <= nystroem_error_bound(len(X), len(Z), rho)


def missed(kernel: Kernel, X: Tensor, Z: Tensor) -> float:
    """Largest eigenvalue of what Nyström's approximation at Z leaves out."""
    with torch.no_grad():
        cross = kernel(X, Z).to_dense()
        left = kernel(X).to_dense() - cross @ torch.linalg.solve(kernel(Z).to_dense(), cross.mT)
    return float(torch.linalg.matrix_norm(left, 2))


def test_the_second_bound_is_of_algorithm_1_at_the_present_hyperparameters() -> None:
    """Neither of points that :class:`Isolation` keeps out, nor of another lengthscale."""
    line = torch.linspace(0.0, 3.0, 4, dtype=torch.float64).unsqueeze(-1)
    X, kernel = torch.cat((line, torch.full((1, 1), 100.0).double())), rbf(1.5, 1.0)
    Z = OIPS(0.9, isolation=Isolation()).update(X[:0], X, kernel)
    assert torch.equal(Z, line)
    assert missed(kernel, X, Z) > nystroem_error_bound(len(X), len(Z), 0.9)
    near = torch.linspace(0.0, 0.1, 9, dtype=torch.float64).unsqueeze(-1)
    Z = OIPS(0.99).update(near[:0], near, kernel)
    assert missed(kernel, near, Z) <= nystroem_error_bound(len(near), len(Z), 0.99)
    assert missed(rbf(1e-3, 1.0), near, Z) > nystroem_error_bound(len(near), len(Z), 0.99)


@pytest.mark.parametrize("rho", [0.3, 0.9])
def test_row_sums_bound_the_points_matrix_more_tightly_than_the_paper(rho: float) -> None:
    """Its largest eigenvalue is at most ``1 + (M − 1) rho``, by Gershgorin's theorem."""
    X, kernel = torch.rand(120, 2, dtype=torch.float64), rbf(0.2, 1.0)
    Z = OIPS(rho).update(X[:0], X, kernel)
    with torch.no_grad():
        largest = float(torch.linalg.eigvalsh(kernel(Z).to_dense())[-1])
    assert largest <= 1.0 + (len(Z) - 1) * rho


@pytest.mark.parametrize("rho", [0.0, 1.0, -0.5, 1.5, math.nan])
def test_a_rho_out_of_range(rho: float) -> None:
    with pytest.raises(ValueError, match=r"Expected rho in \(0, 1\)"):
        OIPS(rho)
    with pytest.raises(ValueError, match=r"Expected rho in \(0, 1\)"):
        nystroem_error_bound(10, 2, rho)
    with pytest.raises(ValueError, match=r"Expected rho in \(0, 1\)"):
        expected_points_bound(10, 2, rho, 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 2, 0.5, 1.0), "n to be a whole number"),
        ((10, 0, 0.5, 1.0), "d to be a whole number"),
        ((10, 2, 0.5, -1.0), "lengthscale to be positive"),
        ((10, 2, 0.5, 1.0, math.inf), "side to be positive"),
    ],
)
def test_bounds_of_what_cannot_be(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expected_points_bound(*arguments)
    with pytest.raises(ValueError, match="points of at most n = 3, the inputs, got 5"):
        nystroem_error_bound(3, 5, 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"below": 1.0}, "below in"), ({"nearest": 0}, "nearest"), ({"statistic": "max"}, "'max'")],
)
def test_an_isolation_out_of_range(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Isolation(**options)
    with pytest.raises(ValueError, match="prune from rho"):
        OIPS(0.8, prune=0.5)


@pytest.mark.parametrize("bad", ["shape", "width", "dtype", "nan"])
def test_bad_points(bad: str) -> None:
    Z, X = torch.rand(4, 2, dtype=torch.float64), torch.rand(5, 2, dtype=torch.float64)
    changed: dict[str, tuple[Tensor, type[Exception]]] = {
        "shape": (X[0], BotorchTensorDimensionError),
        "width": (X[:, :1], BotorchTensorDimensionError),
        "dtype": (X.float(), InputDataError),
        "nan": (X * math.nan, InputDataError),
    }
    value, error = changed[bad]
    with pytest.raises(error, match="Expected"):
        OIPS(0.5).update(Z, value, rbf())


def test_points_of_another_origin_are_pruned() -> None:
    X, kernel = torch.rand(30, 2, dtype=torch.float64), rbf(0.4)
    allocator = OIPS(0.8)
    Z = allocator.update(X[:0], X, kernel)
    twin = Z[:1] + 1e-6
    assert torch.equal(allocator.update(torch.cat((Z, twin)), X[:0], kernel), Z)


def test_a_point_as_like_as_the_threshold_is_not_accepted() -> None:
    pair, kernel = torch.tensor([[0.0, 0.0], [0.3, 0.0]]).double(), rbf(0.4)
    threshold = float(correlation(kernel, pair, pair)[0, 1])
    nothing = pair[:0]
    for rho, count in ((threshold, 1), (math.nextafter(threshold, 1.0), 2)):
        assert len(OIPS(rho).update(nothing, pair, kernel)) == count
        assert len(OIPS(rho).update(pair[:1], pair[1:], kernel)) == count
