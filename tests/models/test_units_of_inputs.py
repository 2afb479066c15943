"""Inputs in any unit, with their bounds, make the model of the unit cube."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream import (
    WISKI,
    AutoGP,
    BinomialLikelihood,
    DirichletWISKI,
    HeteroscedasticWISKI,
)
from bo_stream.bases.kernels import default_kernel
from bo_stream.models.base import StreamingGP
from bo_stream.models.stochastic.budget import ConstrainedAdam

LOW = torch.tensor([1.7e9, -3.0], dtype=torch.float64)
WIDTH = torch.tensor([3.1e7, 2e-5], dtype=torch.float64)
"""A year of seconds since 1970, and lengths of some micrometres."""

UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)

Build = Callable[..., Any]

REGRESSION: dict[str, Build] = {
    "exact": AutoGP,
    "wiski": WISKI,
    "auto on a grid": partial(AutoGP, families="WISKI"),
    "auto at inducing points": partial(AutoGP, families="OSGPR"),
    "noise with a model": partial(HeteroscedasticWISKI, rounds=1),
}
OTHER: dict[str, Build] = {
    "classes": DirichletWISKI,
    "counts": partial(AutoGP, likelihood=BinomialLikelihood()),
    "counts on a grid": partial(WISKI, likelihood=BinomialLikelihood()),
}


def _cube(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    U = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    noise = 0.05 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return U, torch.sin(8.0 * U[:, :1]) + U[:, 1:] + noise


def _in_box(U: Tensor) -> Tensor:
    return LOW + WIDTH * U


def _outcomes(name: str, Y: Tensor) -> Tensor:
    if name == "classes":
        return (Y[:, 0] > 0.5).long() + (Y[:, 0] > 1.0).long()
    if name.startswith("counts"):
        positive = (20.0 * torch.sigmoid(Y)).round()
        return torch.cat((positive, torch.full_like(positive, 20.0)), -1)
    return Y


def _both(name: str, n: int) -> tuple[Any, Any]:
    U, Y = _cube(n)
    build = (REGRESSION | OTHER)[name]
    Y = _outcomes(name, Y)
    return build(U, Y, bounds=UNIT), build(_in_box(U), Y, bounds=_in_box(UNIT))


def _assert_same(cube: StreamingGP, box: StreamingGP, tolerance: float) -> None:
    X = torch.rand(9, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected, got = cube.posterior(X), box.posterior(_in_box(X))
    torch.testing.assert_close(got.mean, expected.mean, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.variance, expected.variance, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [*REGRESSION, *OTHER])
def test_bounds_make_the_model_of_the_unit_cube(name: str) -> None:
    _assert_same(*_both(name, 30), tolerance=1e-6)


@pytest.mark.parametrize("name", ["exact", "wiski", "auto at inducing points"])
def test_a_fit_does_not_depend_on_the_units_of_inputs(name: str) -> None:
    models = _both(name, 30)
    for model in models:
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    cube, box = (model.covar_module.lengthscale for model in models)
    torch.testing.assert_close(box / WIDTH, cube, rtol=1e-4, atol=0.0)
    _assert_same(*models, tolerance=1e-4)


def test_no_warning_of_scaling_with_bounds() -> None:
    U, Y = _cube(20)
    for build in (AutoGP, WISKI, HeteroscedasticWISKI):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            build(_in_box(U), (Y - Y.mean()) / Y.std(), bounds=_in_box(UNIT))


def test_prior_bound_and_first_lengthscale_are_relative_to_the_box() -> None:
    expected = default_kernel(2, torch.Size([3]))
    kernel = default_kernel(2, torch.Size([3]), _in_box(UNIT)).double()
    torch.testing.assert_close(kernel.lengthscale / WIDTH, expected.lengthscale.double())
    prior = kernel.lengthscale_prior.log_prob(kernel.lengthscale * 0.3) + WIDTH.log()
    torch.testing.assert_close(
        prior, expected.double().lengthscale_prior.log_prob(0.3 * expected.lengthscale)
    )
    bound = kernel.raw_lengthscale_constraint.lower_bound / WIDTH
    torch.testing.assert_close(bound, torch.full((3, 1, 2), 0.025, dtype=torch.float64))


def test_steps_stop_at_the_bound_of_a_box() -> None:
    kernel = default_kernel(2, torch.Size(), _in_box(UNIT)).double()
    adam = ConstrainedAdam(kernel, list(kernel.parameters()), 1.0)
    for _ in range(10):
        adam.ascend(-(kernel.lengthscale / WIDTH).log().sum())
    torch.testing.assert_close(kernel.lengthscale / WIDTH, torch.full_like(WIDTH, 0.025)[None])


@pytest.mark.parametrize("batch_shape", [(), (1,), (2,)])
def test_outputs_of_a_box_have_their_own_lengthscales(batch_shape: tuple[int, ...]) -> None:
    U, Y = _cube(12)
    X = _in_box(U).expand(*batch_shape, 12, 2)
    model = AutoGP(X, torch.cat((Y, 2.0 * Y), -1).expand(*batch_shape, 12, 2), bounds=_in_box(UNIT))
    model.covar_module.lengthscale = model.covar_module.lengthscale * torch.tensor(
        [[[1.0]], [[0.5]]], dtype=torch.float64
    )
    part = model.subset_output([1])
    torch.testing.assert_close(
        part.covar_module.lengthscale, model.covar_module.lengthscale[..., 1, :, :]
    )
    torch.testing.assert_close(part.posterior(X).mean, model.posterior(X).mean[..., 1:])
    fit_gpytorch_mll(ExactMarginalLogLikelihood(part.likelihood, part))
    assert not torch.equal(
        part.covar_module.lengthscale, model.covar_module.lengthscale[..., 1, :, :]
    )


def test_a_box_is_in_the_file_of_a_model(tmp_path: Any) -> None:
    _, model = _both("exact", 12)
    model.save(tmp_path / "model")
    loaded = AutoGP.load(tmp_path / "model")
    for one in (model, loaded):
        fit_gpytorch_mll(ExactMarginalLogLikelihood(one.likelihood, one))
    torch.testing.assert_close(
        loaded.covar_module.lengthscale, model.covar_module.lengthscale, rtol=1e-9, atol=0.0
    )
