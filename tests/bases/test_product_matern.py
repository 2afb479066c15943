"""Matérn kernels as products over inputs, and kernels of the distance that become so."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.constraints import Interval
from gpytorch.kernels import AdditiveKernel, Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from torch import Tensor

from bo_stream import (
    OSGPR,
    WISKI,
    AutoGP,
    HeteroscedasticWISKI,
    ProductKernelWarning,
    ProductMatern,
)
from bo_stream.bases.grid.kernel import kernel_factors
from bo_stream.bases.kernels import as_product, radial_parts
from bo_stream.distributed import Sums, zero
from bo_stream.testing.streams import assert_close, assert_gradient, gaussian
from tests.oracles.kernels import matern

BOX = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
NUS = (0.5, 1.5, 2.5)


def product(nu: float, d: int, batch: tuple[int, ...] = ()) -> ProductMatern:
    kernel = ProductMatern(nu, ard_num_dims=d, batch_shape=torch.Size(batch)).double()
    kernel.lengthscale = 0.3 + torch.rand(*batch, 1, d).double()
    return kernel


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("nu", NUS)
def test_it_is_the_product_of_one_dimensional_kernels(nu: float, batch: tuple[int, ...]) -> None:
    kernel, A, B = product(nu, 3, batch), torch.rand(5, 3).double(), torch.rand(4, 3).double()
    scaled = (A.unsqueeze(-2) - B).abs() / kernel.lengthscale.unsqueeze(-2)
    assert_close(kernel(A, B).to_dense(), matern(nu, scaled).prod(-1))
    assert_close(kernel(A, A + 0.1, diag=True), kernel(A, A + 0.1).to_dense().diagonal(0, -2, -1))


@pytest.mark.parametrize("nu", NUS)
def test_in_one_input_it_is_gpytorchs(nu: float) -> None:
    own, theirs = product(nu, 1), MaternKernel(nu, ard_num_dims=1).double()
    theirs.load_state_dict(own.state_dict())
    X = torch.rand(6, 1).double()
    assert_close(own(X).to_dense(), theirs(X).to_dense())
    assert radial_parts(theirs, 1) == []


@pytest.mark.parametrize("nu", NUS)
def test_gradients_are_those_of_differences(nu: float) -> None:
    kernel, B = product(nu, 2), torch.rand(4, 2).double()
    assert_gradient(lambda X: kernel(X, B).to_dense().sin().sum(), torch.rand(3, 2).double())


def test_bad_arguments() -> None:
    with pytest.raises(RuntimeError, match=r"nu to be 0.5, 1.5 or 2.5, got 2"):
        ProductMatern(2.0)
    with pytest.raises(UnsupportedError, match="last_dim_is_batch"):
        ProductMatern().forward(BOX, BOX, last_dim_is_batch=True)


def compound() -> Kernel:
    """A Matérn kernel of the distance in a sum, in a product, and scaled, beside others."""
    own: dict[str, Any] = {
        "lengthscale_prior": GammaPrior(3.0, 6.0),
        "lengthscale_constraint": Interval(0.01, 4.0),
    }
    far = ScaleKernel(MaternKernel(2.5, ard_num_dims=2, active_dims=(2, 0), **own))
    line = MaternKernel(1.5, active_dims=(1,))
    return AdditiveKernel(far, line * MaternKernel(0.5, active_dims=(0, 1)), RBFKernel()).double()


def test_parts_are_found_wherever_they_are() -> None:
    kernel = compound()
    found = [(part.kernel.nu, part.inputs) for part in radial_parts(kernel, 3)]
    assert found == [(2.5, (2, 0)), (0.5, (0, 1))]
    assert radial_parts(as_product(kernel, 3), 3) == []
    assert radial_parts(None, 3) == []
    smooth = RBFKernel()
    assert as_product(smooth, 3) is smooth


def test_all_but_the_values_stays() -> None:
    kernel = compound()
    before = deepcopy(kernel)
    found = as_product(kernel, 3)
    assert str(kernel) == str(before)  # what was given is as it was
    kinds = [type(part).__name__ for part in found.modules() if isinstance(part, Kernel)]
    assert kinds.count("ProductMatern") == 2
    assert kinds.count("MaternKernel") == 1
    found.load_state_dict(kernel.state_dict())
    priors = [(name, str(prior)) for name, _, prior, *_ in found.named_priors()]
    assert priors == [(name, str(prior)) for name, _, prior, *_ in kernel.named_priors()]
    part: Any = found.kernels[0].base_kernel
    part.sample_from_prior("lengthscale_prior")
    assert part.raw_lengthscale_constraint.upper_bound == 4.0
    assert part.active_dims.tolist() == [2, 0]
    assert kernel_factors(found, 3).groups(3)[0] == (0, 2)


def test_a_grid_takes_no_kernel_of_the_distance() -> None:
    with pytest.raises(UnsupportedError, match=r"MaternKernel of inputs \(0, 1\).*ProductMatern"):
        kernel_factors(MaternKernel(), 2)


def test_the_warning_says_what_changes() -> None:
    """From c(√2) to c(1)²: the correlations of the first of the reports on this."""
    kernel = MaternKernel(2.5, ard_num_dims=2).double()
    kernel.lengthscale = 0.3
    none = torch.empty(0, 2).double()
    with pytest.warns(ProductKernelWarning, match=r"nu 2.5: 0.317 becomes 0.275") as told:
        model = WISKI(none, none[:, :1], covar_module=kernel, bounds=BOX, outcome_transform=None)
    assert len(told) == 1
    assert told[0].filename == __file__
    T = torch.tensor([[0.0, 0.0], [0.3, 0.3]]).double()
    own = gaussian(model.posterior(T)).distribution.covariance_matrix.detach()
    shown = model.covar_module(T).to_dense().detach()
    for covariance in (own, shown):
        assert float(covariance[0, 1]) == pytest.approx(0.27457, abs=1e-5)
    assert type(kernel) is MaternKernel


def data(n: int = 30) -> tuple[Tensor, Tensor]:
    X = torch.rand(n, 2).double()
    return X, (5.0 * X.sum(-1, keepdim=True)).sin() + 0.1 * torch.randn(n, 1).double()


def as_once(model: WISKI) -> WISKI:
    """Make a model as it was when a grid did not show its product."""
    for part in model.modules():
        if isinstance(part, ProductMatern):
            part.__class__ = MaternKernel  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("kind", [WISKI, HeteroscedasticWISKI, AutoGP])
def test_a_file_of_a_grid_that_did_not_show_its_product_is_read(kind: Any, tmp_path: Path) -> None:
    (X, Y), T = data(), torch.rand(5, 2).double()
    options = {"families": "WISKI"} if kind is AutoGP else {}
    kernel = ScaleKernel(ProductMatern(1.5, ard_num_dims=2))
    model = kind(X, Y, covar_module=kernel, bounds=BOX, **options).eval()
    expected = model.posterior(T)
    as_once(model).save(tmp_path / "old")
    with pytest.warns(ProductKernelWarning):
        found = kind.load(tmp_path / "old")
    assert type(found.covar_module.base_kernel) is ProductMatern
    assert_close(found.posterior(T).mean, expected.mean)
    assert_close(found.posterior(T).variance, expected.variance)
    found.update(X[:3], Y[:3]).save(tmp_path / "new")
    again = kind.load(tmp_path / "new")  # a warning would be an error
    assert_close(again.posterior(T).mean, found.posterior(T).mean)


def test_sums_of_such_a_grid_are_read() -> None:
    X, Y = data()
    kernel = ScaleKernel(ProductMatern(1.5, ard_num_dims=2))
    content = zero(as_once(WISKI(X, Y, covar_module=kernel, bounds=BOX).eval()))
    with pytest.warns(ProductKernelWarning):
        found = Sums.from_bytes(content.to_bytes())
    assert type(found.model.covar_module.base_kernel) is ProductMatern


def test_a_file_of_another_family_keeps_its_kernel(tmp_path: Path) -> None:
    X, Y = data()
    OSGPR(X, Y, covar_module=MaternKernel(ard_num_dims=2)).save(tmp_path / "model")
    assert type(OSGPR.load(tmp_path / "model").covar_module) is MaternKernel


class TestAutoGP:
    """The kernel that is given is there after the hand-over, too."""

    def handed_over(self, kernel: Kernel, **options: Any) -> AutoGP:
        X, Y = data(60)
        kernel = kernel.double()
        kernel.lengthscale = 0.5
        none = (X[:0], Y[:0])
        model = AutoGP(*none, covar_module=kernel, bounds=BOX, max_exact=40, **options).eval()
        exact = AutoGP(*none, covar_module=deepcopy(model.covar_module)).eval()
        for start in (0, 30):
            for each in (model, exact):
                each.update(X[start : start + 30], Y[start : start + 30])
        T = torch.rand(20, 2).double()
        known, found = exact.posterior(T), model.posterior(T)
        deviation = (found.mean - known.mean).abs() / known.variance.sqrt()
        ratio = found.variance / known.variance
        assert float(deviation.max()) < 0.3
        assert 0.75 < float(ratio.min()) <= float(ratio.max()) < 1.0 / 0.75
        assert len(model.history) == 1
        return model

    def test_a_kernel_of_the_distance_is_kept_by_another_family(self) -> None:
        model = self.handed_over(MaternKernel(2.5, ard_num_dims=2))
        assert (model.family, type(model.covar_module)) == ("OSGPR", MaternKernel)
        assert "WISKI" not in model.families

    def test_a_product_is_of_a_grid(self) -> None:
        model = self.handed_over(ProductMatern(2.5, ard_num_dims=2))
        assert (model.family, type(model.covar_module)) == ("WISKI", ProductMatern)

    def test_a_grid_that_is_asked_for_makes_a_product_from_the_first_on(self) -> None:
        with pytest.warns(ProductKernelWarning) as told:
            model = self.handed_over(MaternKernel(2.5, ard_num_dims=2), families=("exact", "WISKI"))
        assert len(told) == 1
        assert (model.family, type(model.covar_module)) == ("WISKI", ProductMatern)
