"""Certificates against dense spectra, brute force, and what Cholesky does."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import Normalize
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
)
from torch import Tensor

from bo_stream import OSGPR, WISKI, AutoGP, ClusteredGP, LocalGP
from bo_stream.allocation import OIPS, CoverTree
from bo_stream.diagnostics import (
    condition_limit,
    condition_number,
    report,
    stability,
    stability_of_points,
    stability_of_precision,
    trace_limit,
)
from bo_stream.diagnostics.certificate import eigenvalue_bounds, resolution, separation

ISOTROPIC: dict[str, Callable[[], Kernel]] = {
    "rbf": RBFKernel,
    "matern 1/2": lambda: MaternKernel(nu=0.5),
    "matern 3/2": lambda: MaternKernel(nu=1.5),
    "matern 5/2": lambda: MaternKernel(nu=2.5),
}

COMPOSED: dict[str, Callable[[], Kernel]] = {
    "sum": lambda: AdditiveKernel(ScaleKernel(RBFKernel()), ScaleKernel(LinearKernel())),
    "groups": lambda: AdditiveKernel(
        ScaleKernel(RBFKernel(active_dims=(0, 1))), ScaleKernel(MaternKernel(active_dims=(2,)))
    ),
    "product": lambda: ScaleKernel(
        ProductKernel(MaternKernel(nu=1.5, ard_num_dims=3), PeriodicKernel(active_dims=(1,)))
    ),
    "scaled on some inputs": lambda: ScaleKernel(MaternKernel(ard_num_dims=2, active_dims=(2, 0))),
    "linear product": lambda: RBFKernel() * LinearKernel(),
}


def spectrum(kernel: Kernel, Z: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.linalg.eigvalsh(kernel(Z).to_dense())


@cache
def covered(d: int, epsilon: float, n: int = 400) -> Tensor:
    return CoverTree(epsilon).insert(torch.rand(n, d, dtype=torch.float64)).centres


@pytest.mark.parametrize("name", ISOTROPIC)
@pytest.mark.parametrize(("d", "resolutions"), [(1, (0.003, 0.03)), (2, (0.05, 0.3)), (3, (0.2,))])
@pytest.mark.parametrize("lengthscale", [0.02, 0.2])
def test_bounds_hold_on_cover_trees(
    name: str, d: int, resolutions: tuple[float, ...], lengthscale: float
) -> None:
    kernel = ISOTROPIC[name]().double()
    kernel.lengthscale = lengthscale
    for epsilon in resolutions:
        Z = covered(d, epsilon)
        values, bounds = spectrum(kernel, Z), eigenvalue_bounds(kernel, Z)
        rounding = 1e-14 * len(Z) * float(values[-1])
        assert 0.0 <= float(bounds.lower) <= float(values[0]) + rounding
        assert float(values[-1]) <= float(bounds.upper) + rounding
        found = stability_of_points(kernel, Z)
        assert found.separation is not None
        assert found.separation > epsilon
        assert found.condition_bound is not None
        if found.condition.exact:
            assert found.condition_bound >= found.condition.value * (1.0 - 1e-12)


@pytest.mark.parametrize("name", ISOTROPIC)
@pytest.mark.parametrize("d", [5, 12, 40, 150])
def test_bounds_hold_in_many_dimensions(name: str, d: int) -> None:
    kernel, Z = ISOTROPIC[name]().double(), torch.rand(60, d, dtype=torch.float64)
    for scale in (0.1, 0.5, 2.0):
        kernel.lengthscale = scale * d**0.5
        values, bounds = spectrum(kernel, Z), eigenvalue_bounds(kernel, Z)
        assert 0.0 <= float(bounds.lower) <= float(values[0]) + 1e-12
        assert float(values[-1]) <= float(bounds.upper) + 1e-12


@pytest.mark.parametrize("name", ISOTROPIC)
def test_bounds_are_sharp_on_a_line(name: str) -> None:
    """Of evenly spaced points; the paper's Kac-Murdock-Szegö matrix among them."""
    kernel = ISOTROPIC[name]().double()
    kernel.lengthscale = 1.0
    Z = 0.6 * torch.arange(300, dtype=torch.float64).unsqueeze(-1)
    found = stability_of_points(kernel, Z)
    assert found.condition.exact
    assert found.condition_bound is not None
    assert found.condition.value < found.condition_bound < 2.0 * found.condition.value


@pytest.mark.parametrize("name", COMPOSED)
def test_bounds_of_composed_kernels_hold(name: str) -> None:
    kernel = COMPOSED[name]().double()
    for part in kernel.modules():
        if isinstance(part, Kernel) and part.has_lengthscale:
            part.lengthscale = 0.1 + 0.3 * torch.rand_like(part.lengthscale)
        if isinstance(part, ScaleKernel):
            part.outputscale = 0.5 + torch.rand_like(part.outputscale)
    Z = covered(3, 0.3)
    values, bounds = spectrum(kernel, Z), eigenvalue_bounds(kernel, Z)
    assert bounds.known
    assert float(bounds.lower) <= float(values[0]) + 1e-12
    assert float(values[-1]) <= float(bounds.upper) + 1e-12
    assert float(bounds.upper) <= float(kernel(Z, diag=True).detach().sum()) + 1e-9
    if name in {"product", "sum"}:
        assert float(bounds.lower) > 0.0


def test_no_bound_is_known_of_a_linear_kernel() -> None:
    Z = torch.rand(8, 12, dtype=torch.float64)
    found = stability_of_points(ScaleKernel(LinearKernel()).double(), Z)
    assert found.condition_bound is None
    assert "none is known" in str(found)
    assert found.float64.safe  # by the condition number itself


def test_a_batch_of_kernels_is_as_its_worst() -> None:
    Z = covered(2, 0.1)
    batched = ScaleKernel(RBFKernel(batch_shape=torch.Size([3])), batch_shape=torch.Size([3]))
    batched = batched.double()
    batched.base_kernel.lengthscale = torch.tensor([0.05, 0.1, 0.08]).double().view(3, 1, 1)
    batched.outputscale = torch.tensor([1e3, 1.0, 1e-3]).double()
    single = RBFKernel().double()
    single.lengthscale = 0.1
    found, expected = stability_of_points(batched, Z, 3), stability_of_points(single, Z)
    assert found.condition_bound == pytest.approx(expected.condition_bound)
    assert found.condition.value == pytest.approx(expected.condition.value, rel=1e-6)


def test_noise_bounds_the_condition_number_where_nothing_else_does() -> None:
    """Corollary 5, for a kernel without decay and points that meet."""
    Z = torch.rand(30, 2, dtype=torch.float64).repeat(2, 1)
    kernel = PeriodicKernel().double()
    with torch.no_grad():
        K = kernel(Z).to_dense()
    found = stability_of_points(kernel, Z, precision=torch.full((60,), 10.0).double())
    true = float(torch.linalg.cond(K + 0.1 * torch.eye(60).double()))
    assert found.condition.value == pytest.approx(true)
    assert found.condition_bound is not None
    assert true <= found.condition_bound == pytest.approx(1.0 + 10.0 * 60.0)
    precision = 10.0 * torch.rand(60, dtype=torch.float64)
    precision[5] = 0.0  # nothing was observed there
    found = stability_of_points(kernel, Z, precision=precision)
    matrix = torch.eye(60) + precision.sqrt().outer(precision.sqrt()) * K
    true = float(torch.linalg.cond(matrix))
    assert found.condition.value == pytest.approx(true)
    assert found.condition_bound is not None
    assert true <= found.condition_bound
    assert found.float32.safe


def test_of_a_model_with_clusters() -> None:
    X, Y = torch.rand(60, 2, dtype=torch.float64), torch.randn(60, 1).double()
    normalize = Normalize(2, bounds=torch.tensor([[0.0, 0.0], [2.0, 2.0]]).double())
    model = ClusteredGP(X, Y, resolution=0.15, input_transform=normalize)
    found = stability(model, X)
    Z, precision = model.centres, model.cluster_precision()
    assert float(precision.sum()) == pytest.approx(60.0 / float(model.noise_level().detach()))
    assert found == stability_of_points(model.covar_module, Z, 1, 0.5 * X, precision)
    assert found.resolution <= 0.15
    assert found.condition_bound is not None
    assert found.condition.value <= found.condition_bound


def test_separation_and_resolution_by_brute_force() -> None:
    Z, X = torch.rand(1500, 3, dtype=torch.float64), torch.rand(2100, 3, dtype=torch.float64)
    nearest = min(float((Z[i + 1 :] - z).norm(dim=-1).min()) for i, z in enumerate(Z[:-1]))
    farthest = max(float((Z - x).norm(dim=-1).min()) for x in X)
    assert separation(Z) == pytest.approx(nearest, abs=1e-12)
    assert resolution(Z, X) == pytest.approx(farthest, abs=1e-12)
    assert separation(Z[:1]) == math.inf
    assert separation(torch.cat((Z, Z[-1:]))) == 0.0


def random_matrix(size: int, condition: float) -> Tensor:
    """Symmetric, with eigenvalues from 1 to ``condition``; half of the time most are large."""
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q
    position = torch.linspace(0.0, 1.0, size, dtype=torch.float64)
    values = condition ** (position ** (0.2 if torch.rand(()) < 0.5 else 5.0))
    return (basis * values) @ basis.mT


@pytest.mark.parametrize("size", [2, 11, 60, 200])
def test_cholesky_succeeds_in_float32_up_to_the_limit(size: int) -> None:
    limit = condition_limit(size, torch.float32)
    for _ in range(40):
        matrix = random_matrix(size, 0.99 * limit).float()
        assert int(torch.linalg.cholesky_ex(matrix).info) == 0


@pytest.mark.parametrize("size", [2, 11, 60, 200])
@pytest.mark.parametrize("large", [1, 5])
def test_cholesky_succeeds_in_float32_up_to_the_trace_s_limit(size: int, large: int) -> None:
    """With some large eigenvalues, and the others 1."""
    limit = trace_limit(size, torch.float32)
    for _ in range(20):
        values = torch.ones(size, dtype=torch.float64)
        values[:large] += (0.99 * limit - size) / min(large, size)
        basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q
        matrix = (basis * values) @ basis.mT
        verdict = stability_of_precision(matrix - torch.eye(size)).float32
        assert verdict.safe
        if large < size:  # else all eigenvalues are equal, and the condition number says more
            assert verdict.to_spare == pytest.approx(1.0 / 0.99)
        assert int(torch.linalg.cholesky_ex(matrix.float()).info) == 0


def test_of_clusters_that_are_alike_to_the_kernel_float32_is_sure() -> None:
    """Their matrix has few large eigenvalues: more than its condition number tells."""
    X, Y = data(1000)
    model = ClusteredGP(X, Y, resolution=0.05, covar_module=RBFKernel())
    with torch.no_grad():
        model.likelihood.noise = 0.05
    found = stability(model)
    Z, precision = model.centres, model.cluster_precision()[0]
    with torch.no_grad():
        root = precision.sqrt()
        matrix = root.unsqueeze(-1) * model.covar_module(Z).to_dense() * root + torch.eye(len(Z))
    assert found.condition.value > found.float32.limit
    spare = trace_limit(len(Z), torch.float32) / float(matrix.trace())
    assert found.float32.to_spare == pytest.approx(spare)
    assert found.float32.safe
    assert int(torch.linalg.cholesky_ex(matrix.float()).info) == 0


@pytest.mark.parametrize("name", ISOTROPIC)
def test_the_trace_is_told_in_eigenvalues_that_are_not_too_large(name: str) -> None:
    kernel = ISOTROPIC[name]().double()
    kernel.lengthscale = 0.3
    Z = covered(2, 0.2, 200)
    found, values = stability_of_points(kernel, Z), spectrum(kernel, Z)
    true = trace_limit(len(Z), torch.float64) * float(values[0] / values.sum())
    by_condition = found.float64.limit / found.condition.value
    assert found.float64.to_spare <= max(true, by_condition) * (1.0 + 1e-6)
    assert found.float64.to_spare > 0.5 * true


def test_what_is_safe_in_float32_never_fails() -> None:
    """Kernel matrices from hopeless to harmless."""
    safe = failed = 0
    for d, epsilon in ((1, 0.05), (1, 0.2), (2, 0.1), (2, 0.2), (3, 0.2), (3, 0.3)):
        Z = covered(d, epsilon, 200)
        for make, third in product(ISOTROPIC.values(), range(3)):
            kernel = make().double()
            kernel.lengthscale = float(10.0 ** (-2.0 + 2.5 * (third + torch.rand(())) / 3.0))
            verdict = stability_of_points(kernel, Z).float32
            matrix = kernel.float()(Z.float()).to_dense().detach()
            fails = bool(torch.linalg.cholesky_ex(matrix).info)
            assert not (verdict.safe and fails)
            safe += verdict.safe
            failed += fails
    assert safe > 55  # the verdict is no empty one: nine tenths of all that succeed
    assert failed > 1


def test_the_limit_is_that_of_the_paper() -> None:
    assert condition_limit(100, torch.float32) == pytest.approx(2.0**24 / 3900.0)
    assert condition_limit(100, torch.float64) == pytest.approx(2.0**53 / 3900.0)
    assert condition_limit(3, torch.float32) == condition_limit(11, torch.float32)
    assert condition_limit(600_000, torch.float32) == 0.0


def test_large_matrices_are_estimated_from_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bo_stream.diagnostics.certificate._EXACT_POINTS", 512)
    kernel = MaternKernel(nu=0.5).double()
    kernel.lengthscale = 1.0
    Z = 0.3 * torch.arange(600, dtype=torch.float64).unsqueeze(-1)
    found = stability_of_points(kernel, Z)
    rho = math.exp(-0.3)
    limit = ((1.0 + rho) / (1.0 - rho)) ** 2  # of infinitely many points
    assert not found.condition.exact
    assert 0.9 * limit < found.condition.value <= limit
    assert found.condition_bound is not None
    assert limit <= found.condition_bound
    assert "at least" in str(found)


def test_a_singular_matrix_is_not_safe() -> None:
    found = stability_of_points(RBFKernel().double(), torch.full((50, 2), 0.5).double())
    assert found.separation == 0.0
    assert found.condition_bound == math.inf
    assert not found.condition.exact
    assert not found.float64.safe
    assert not found.float32.safe


def data(n: int = 300) -> tuple[Tensor, Tensor]:
    X = 2.0 * torch.rand(n, 2, dtype=torch.float64)
    return X, X.sum(-1, keepdim=True).sin() + 0.1 * torch.randn(n, 1).double()


def test_of_a_model_with_inducing_points() -> None:
    X, Y = data()
    bounds = torch.tensor([[0.0, 0.0], [2.0, 2.0]]).double()
    normalize = Normalize(2, bounds=bounds)
    model = OSGPR(X, Y, input_transform=normalize, allocator=OIPS(0.8))
    found = stability(model, X)
    Z = model.inducing_points
    assert found.size == len(Z)
    assert found.separation == pytest.approx(separation(Z))
    assert found.resolution == pytest.approx(resolution(Z, X / 2.0))
    with torch.no_grad():
        true = float(torch.linalg.cond(model.covar_module(Z).to_dense()))
    assert found.condition.value == pytest.approx(true, rel=1e-6)
    lines = str(found).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "system",
        "separation",
        "resolution",
        "condition number",
        "its bound",
        "float32",
        "float64",
    ]
    assert lines[-1].endswith("times to spare")
    assert "resolution" not in str(stability(model))


def test_every_device(device: torch.device) -> None:
    X, Y = (t.to(device) for t in data())
    for model in (OSGPR(X / 2.0, Y, allocator=OIPS(0.8)), WISKI(X / 2.0, Y)):
        found, expected = stability(model), stability(model.to("cpu"))
        assert found.condition.value == pytest.approx(expected.condition.value, rel=1e-6)
        assert found.condition_bound == pytest.approx(expected.condition_bound, rel=1e-6)


def test_of_a_grid_model() -> None:
    X, Y = data()
    model = WISKI(X[:, :2] / 2.0, Y)
    found = stability(model)
    weights = model.feature_process().weights
    true = float(torch.linalg.cond(torch.linalg.inv(weights.covariance())))
    assert found.size == model.rank
    assert found.separation is None
    assert found.condition.value == pytest.approx(true, rel=1e-4)
    assert found.condition_bound is not None
    assert true <= found.condition_bound
    assert found.float64.safe


def test_of_local_models_it_is_that_of_the_worst() -> None:
    X, Y = data(60)
    model = LocalGP(X / 2.0, Y, w_gen=0.9, max_size=10)
    assert int(model.num_models) > 1
    found, memory = stability(model), model._memory
    noise = float(model.likelihood.noise.detach())
    worst = 0.0
    for number, count in enumerate(memory.entered.flatten().clamp_max(10).tolist()):
        rows = memory.by_age(number).X[0, 10 - count :]
        if count > 0:
            worst = max(worst, 1.0 + float(spectrum(model.covar_module, rows)[-1]) / noise)
    assert found.condition.value == pytest.approx(worst, rel=1e-6)
    assert found.condition_bound is not None
    assert worst <= found.condition_bound
    assert found.float64.safe


def test_a_precision_is_never_below_the_identity() -> None:
    features = torch.randn(3, 5, 40, dtype=torch.float64)
    gram = features.mT @ features
    found = stability_of_precision(gram)
    largest = float(torch.linalg.eigvalsh(gram).max())
    assert found.condition.value == pytest.approx(1.0 + largest)
    assert found.condition_bound is not None
    assert 1.0 + largest <= found.condition_bound


def test_a_batch_of_condition_numbers_is_its_largest() -> None:
    matrices = torch.stack([torch.diag(torch.tensor([1.0, c])) for c in (2.0, 7.0, 3.0)])
    assert condition_number(matrices.double()).value == pytest.approx(7.0)


def test_what_has_no_certificate() -> None:
    X, Y = data()
    for empty in (OSGPR(X[:0], Y[:0]), AutoGP(X.clamp(0.0, 1.0), Y).clear()):
        with pytest.raises(ValueError, match="at least one point"):
            stability(empty)
        assert "at least one point" in str(report(empty).stability)
    with pytest.raises(UnsupportedError, match="inducing points or clusters, on a grid"):
        stability(object())  # type: ignore[arg-type]
