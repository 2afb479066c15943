"""The record of jitters and fallbacks, and models that survive what calls for them."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from botorch.exceptions.errors import ModelFittingError
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel, RBFKernel
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream import OSGPR, WISKI, ClusteredGP, HeteroscedasticWISKI
from bo_stream.allocation.allocator import capped
from bo_stream.linalg import cholesky_with_jitter, independent_rows
from bo_stream.models.fitting import relearn
from bo_stream.models.inducing.inference import basis_of_independent
from bo_stream.warnings import NumericalEvent, with_event

JITTER = "jitter on the kernel matrix of inducing points"


def data(n: int = 40) -> tuple[Tensor, Tensor]:
    X = torch.rand(n, 2, dtype=torch.float64)
    return X, (4.0 * X.sum(-1, keepdim=True)).sin() + 0.1 * torch.randn(n, 1).double()


def awkward(name: str) -> Tensor:
    Z = torch.rand(30, 2, dtype=torch.float64)
    if name == "healthy":
        return Z[:6]
    if name == "duplicates":
        return torch.cat((Z, Z))
    if name == "near duplicates":
        return torch.cat((Z, Z + 1e-9))
    if name == "equal":
        return torch.full((400, 2), 0.5).double()
    if name == "constant column":
        return Z * torch.tensor([1.0, 0.0]).double()
    return torch.cat((Z, torch.full((1, 2), float(name.removeprefix("outlier at "))).double()))


AWKWARD = {
    "duplicates": {JITTER},
    "near duplicates": {JITTER},
    "equal": {JITTER},
    "constant column": {JITTER},
    "outlier at 1e6": set[str](),  # distances of such points are computed from differences
    "outlier at 1e8": set[str](),
    "outlier at 1e12": set[str](),
}


def campaign(model: OSGPR, X: Tensor, Y: Tensor) -> None:
    """All that a loop asks of a model."""
    model.update(X[:5] + 0.01, Y[:5]).retract(X[:2] + 0.01, Y[:2])
    model.posterior(X[:7]).rsample(torch.Size([2]))
    model.fantasize(X[:3], SobolQMCNormalSampler(torch.Size([2]), seed=1)).posterior(X[:7])
    relearn(model)
    model.update(X[:5] - 0.01, Y[:5])


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_points_are_survived_and_on_record(name: str) -> None:
    X, Y = data()
    model = OSGPR(X, Y, covar_module=_short(RBFKernel()), inducing_points=awkward(name))
    campaign(model, X, Y)
    used = {event.what for event in model.numerical_log}
    assert bool(used) == bool(AWKWARD[name])
    assert used <= AWKWARD[name]
    assert bool(model.posterior(X).variance.isfinite().all())
    error = float((model.posterior(X).mean - Y).square().mean().sqrt() / Y.std())
    assert error < (1.1 if name in {"equal", "constant column"} else 0.5)
    if name.startswith("outlier"):
        assert len(model.inducing_points) == 31


def _short(kernel: Kernel) -> Kernel:
    kernel.lengthscale = 0.4
    return kernel


@pytest.mark.parametrize(
    "rows",
    [
        torch.full((10_000, 2), 0.5),
        torch.rand(50, 2) * torch.tensor([1.0, 0.0]),
        torch.cat((torch.rand(50, 2), torch.full((1, 2), 1e6))),
        torch.rand(25, 2).repeat(2, 1) + 1e-9 * torch.arange(50).unsqueeze(-1),
    ],
    ids=["equal rows", "constant column", "outlier", "near duplicates"],
)
def test_awkward_data_with_an_allocator_are_survived(rows: Tensor) -> None:
    X, Y = data()
    model = OSGPR(X, Y, max_points=10)
    model.update(rows.double(), torch.randn(len(rows), 1).double())
    campaign(model, X, Y)
    assert bool(model.posterior(X).variance.isfinite().all())
    assert model.num_observations == 40 + len(rows) + 8


def test_a_healthy_model_has_an_empty_record() -> None:
    X, Y = data()
    for model in (OSGPR(X, Y, inducing_points=awkward("healthy")), WISKI(X, Y, grid_size=8)):
        campaign(model, X, Y)
        assert model.numerical_log == ()


def test_the_record_says_what_when_and_how_often() -> None:
    X, Y = data()
    model = OSGPR(X, Y, inducing_points=awkward("duplicates"))
    (event,) = model.numerical_log
    assert (event.what, event.size, event.observations) == (JITTER, 60, 0.0)
    assert event.jitter > 0.0
    for scale in (0.5, 0.6, 0.7):
        model.covar_module.lengthscale = scale
        model.posterior(X)
    assert len(model.numerical_log) <= 3
    assert sum(again.times for again in model.numerical_log) == event.times + 3
    assert str(model.numerical_log[0]).startswith(f"{JITTER} (size 60, jitter 1e-")


def test_the_record_does_not_grow_with_the_stream() -> None:
    log: tuple[NumericalEvent, ...] = ()
    for i in range(1000):
        log = with_event(log, NumericalEvent("a", i, 1e-10, 10.0 * i))
        log = with_event(log, NumericalEvent("b", 0, 0.0, 10.0 * i))
    assert log == (
        NumericalEvent("a", 999, 1e-10, 0.0, 1000),
        NumericalEvent("b", 0, 0.0, 0.0, 1000),
    )
    assert [str(event) for event in log] == [
        "a (size 999, jitter 1e-10), first at 0 observations, 1,000 times",
        "b, first at 0 observations, 1,000 times",
    ]


def test_the_record_goes_with_the_model(tmp_path: Path) -> None:
    X, Y = data()
    model = OSGPR(X, Y, inducing_points=awkward("duplicates"))
    model.save(tmp_path / "model.pt")
    twin, loaded = copy.deepcopy(model), OSGPR.load(tmp_path / "model.pt")
    fantasy = model.condition_on_observations(X[:2], Y[:2])
    model.log_event("later")
    assert len(model.numerical_log) == 2
    for other in (twin, loaded, fantasy):
        assert [event.what for event in other.numerical_log] == [JITTER]


def test_a_refit_that_fails_is_on_record() -> None:
    X, Y = data()
    model = WISKI(X, Y, grid_size=8)
    before = model.covar_module.lengthscale.clone()
    model.covar_module.register_prior("none", _Nowhere(), "lengthscale")
    with pytest.warns(RuntimeWarning, match="could not be relearned"):
        relearn(model)
    assert [str(e) for e in model.numerical_log] == [
        "a refit that failed, first at 40 observations"
    ]
    assert torch.equal(model.covar_module.lengthscale, before)


def test_refits_of_drafts_that_fail_are_on_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: WISKI) -> None:
        raise ModelFittingError("no luck")

    monkeypatch.setattr("bo_stream.models.fitting.learn_hyperparameters", fail)
    with pytest.warns(RuntimeWarning, match="could not be relearned"):
        model = HeteroscedasticWISKI(*data(), grid_size=8, noise_grid_size=8, rounds=2)
    for part in (model, model.noise_model):
        (event,) = part.numerical_log
        assert (event.what, event.times) == ("a refit that failed, of a draft", 2)


class _Nowhere(torch.nn.Module):
    """A prior under which nothing is possible."""

    def log_prob(self, value: Tensor) -> Tensor:
        raise NotPSDError("no such lengthscale")


class _Indefinite(Kernel):
    """No covariance at all, but for few points."""

    has_lengthscale = False

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: object) -> Tensor:
        if diag:
            return torch.ones_like(x1[..., 0])
        distance = (x1.unsqueeze(-2) - x2.unsqueeze(-3)).norm(dim=-1)
        return torch.where(distance == 0.0, 1.0, 0.9 * (distance < 0.5).double())


def test_points_whose_matrix_is_indefinite_are_thinned() -> None:
    Z = torch.rand(40, 2, dtype=torch.float64)
    basis = basis_of_independent(_Indefinite(), Z, 1)
    assert 1 < basis.rank < 40
    assert basis.jitter == 0.0


def test_a_cap_needs_no_definite_matrix() -> None:
    Z, more = torch.rand(20, 2, dtype=torch.float64), torch.rand(10, 2, dtype=torch.float64)
    assert torch.equal(capped(Z, torch.cat((Z, more)), _Indefinite(), 20), Z)


def test_nan_in_a_kernel_is_an_error() -> None:
    kernel = RBFKernel().double()
    kernel.raw_lengthscale.data.fill_(math.nan)
    with pytest.raises(NotPSDError, match="NaN"):
        basis_of_independent(kernel, torch.rand(4, 2).double(), 1)


def test_independent_rows_are_independent_for_every_kernel() -> None:
    """Five rows are others to the bit, which kernels make only nearly so."""
    Z = torch.cat((torch.zeros(1, 2), 0.1 + 0.9 * torch.rand(20, 2))).double()
    again = torch.cat((torch.arange(21), torch.arange(1, 6)))
    kernels = (MaternKernel(nu=0.5).double(), LinearKernel().double())
    with torch.no_grad():
        first, second = (kernel(Z).to_dense()[again][:, again] for kernel in kernels)
    assert len(set(independent_rows(first).tolist())) == 21
    rows = independent_rows(torch.stack((first, second)))
    assert len(rows) == 2
    for matrix in (first, second):
        assert cholesky_with_jitter(matrix[rows][:, rows])[1] == 0.0


@pytest.mark.parametrize("kind", [OSGPR, WISKI, ClusteredGP])
def test_what_was_said_once_is_saved_with_the_model(
    kind: type[OSGPR] | type[WISKI] | type[ClusteredGP], tmp_path: Path
) -> None:
    model = kind(*data())
    model.says("the first thing")
    model.says("the second")
    model.save(tmp_path / "model.pt")
    loaded = kind.load(tmp_path / "model.pt")
    assert loaded.has_said("the first thing")
    assert loaded.has_said("the second")
    assert not loaded.has_said("the third")
