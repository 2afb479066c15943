"""What a user gets wrong when a model is built is named in a sentence, by every model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.models import SingleTaskGP
from botorch.models.transforms.input import Normalize
from botorch.models.transforms.outcome import Standardize
from gpytorch.kernels import Kernel, MultitaskKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from torch import Size, Tensor

import bo_stream
from bo_stream import OSGPR, OSVGP, QSGP, Chevron
from bo_stream.acquisition import (
    IntegratedVariance,
    PoolSelector,
    mean_path,
    sample_paths,
    select_from_pool,
    select_sites,
)
from bo_stream.diagnostics import ProgressiveValidation, report
from bo_stream.models.base import StreamingGP

OPTIONS: dict[str, dict[str, Any]] = {
    "WISKI": {"grid_size": 8},
    "HeteroscedasticWISKI": {"grid_size": 8, "noise_grid_size": 8},
    "DirichletWISKI": {"grid_size": 8},
    "OSGPR": {},
    "OSVGP": {"likelihood": GaussianLikelihood()},
    "ClusteredGP": {},
    "LocalGP": {},
    "BayesianLastLayer": {},
    "QSGP": {"update_steps": 1},
    "QSRVM": {"update_steps": 1},
    "DecoupledGP": {"num_mean": 6, "num_covar": 4},
}
"""Of each public model, so that it is built fast."""

OF_OUTCOMES = [name for name in OPTIONS if name != "DirichletWISKI"]
OF_KERNELS = [name for name in OPTIONS if name != "BayesianLastLayer"]

Arguments = tuple[Tensor, Tensor]


def first(name: str) -> Arguments:
    X = torch.quasirandom.SobolEngine(2).draw(8, dtype=torch.float64)
    Y = X.sum(-1, keepdim=True).sin()
    return X, (Y > 0.7).to(Y) if name == "DirichletWISKI" else Y


def build(name: str, *data: Any, **options: Any) -> StreamingGP:
    model: StreamingGP = getattr(bo_stream, name)(*data, **{**OPTIONS[name], **options})
    return model


def with_nan(values: Tensor) -> Tensor:
    return torch.cat((values[:-1], torch.full_like(values[-1:], math.nan)))


MISTAKES: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Any, Any]], type[Exception], str]] = {
    "X a vector": (lambda X, Y: (X[:, 0], Y), BotorchTensorDimensionError, "X"),
    "X whole numbers": (lambda X, Y: ((9 * X).long(), Y), InputDataError, "X"),
    "X a list": (lambda X, Y: (X.tolist(), Y), InputDataError, "X"),
    "X of NumPy": (lambda X, Y: (X.numpy(), Y), InputDataError, "X"),
    "X None": (lambda X, Y: (None, Y), InputDataError, "X"),
    "X with NaN": (lambda X, Y: (with_nan(X), Y), InputDataError, "X"),
    "Y a list": (lambda X, Y: (X, Y.tolist()), InputDataError, "Y|labels"),
    "Y None": (lambda X, Y: (X, None), InputDataError, "Y|labels"),
    "Y with NaN": (lambda X, Y: (X, with_nan(Y)), InputDataError, "Y|labels"),
    "a row too few": (lambda X, Y: (X, Y[1:]), BotorchTensorDimensionError, "Y|labels"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", OPTIONS)
def test_bad_first_observations_are_named(name: str, mistake: str) -> None:
    spoil, error, argument = MISTAKES[mistake]
    with pytest.raises(error, match=rf"\bExpected .*\b(train_)?({argument})\b"):
        build(name, *spoil(*first(name)))


@pytest.mark.parametrize("name", OF_OUTCOMES)
def test_outcomes_without_finite_squares_are_refused(name: str) -> None:
    X, Y = first(name)
    with pytest.raises(InputDataError, match=r"outcomes Y of at most 1e\+150 in size"):
        build(name, X, 1e160 * Y)
    model = build(name, X, Y)
    with pytest.raises(InputDataError, match=r"outcomes Y of at most 1e\+150 in size"):
        model.update(X[:1], torch.full_like(Y[:1], torch.finfo(Y.dtype).max))
    assert bool(model.posterior(X).mean.isfinite().all())


@pytest.mark.parametrize("name", OF_OUTCOMES)
def test_outcomes_without_columns_are_refused(name: str) -> None:
    X, Y = first(name)
    with pytest.raises(BotorchTensorDimensionError, match="train_Y of one column or more"):
        build(name, X, Y[:, :0])


def kernel_of(dim: int, batch: int) -> Kernel:
    return ScaleKernel(RBFKernel(ard_num_dims=dim, batch_shape=Size([batch] * (batch > 0))))


@pytest.mark.parametrize("name", OF_KERNELS)
def test_a_kernel_that_does_not_fit_is_refused(name: str) -> None:
    data = first(name)
    for wrong in ("rbf", RBFKernel):
        with pytest.raises(UnsupportedError, match=r"covar_module .*\bScaleKernel"):
            build(name, *data, covar_module=wrong)
    for kernel in (kernel_of(3, 0), RBFKernel(ard_num_dims=1)):
        with pytest.raises(UnsupportedError, match=r"ard_num_dims=2\b"):
            build(name, *data, covar_module=kernel)
    narrow = RBFKernel(ard_num_dims=2, active_dims=(0, 2))
    with pytest.raises(UnsupportedError, match="active_dims"):
        build(name, *data, covar_module=narrow)
    with pytest.raises(UnsupportedError, match="MultitaskKernel"):
        build(name, *data, covar_module=MultitaskKernel(RBFKernel(), 2))
    batched = ScaleKernel(RBFKernel(), batch_shape=Size([3]))
    with pytest.raises(UnsupportedError, match="batch shape"):
        build(name, *data, covar_module=batched)


@pytest.mark.parametrize("name", OF_OUTCOMES)
def test_transforms_that_are_none_are_refused(name: str) -> None:
    data = first(name)
    for wrong in ("normalize", Normalize):
        with pytest.raises(UnsupportedError, match=r"input_transform .*such as Normalize"):
            build(name, *data, input_transform=wrong)
    for other in ("standardize", Standardize):
        with pytest.raises(UnsupportedError, match=r"outcome_transform .*\bStandardize"):
            build(name, *data, outcome_transform=other)


@pytest.mark.parametrize("name", ["WISKI", "OSGPR", "ClusteredGP", "LocalGP"])
def test_a_mean_and_a_likelihood_of_another_batch_shape_are_refused(name: str) -> None:
    data = first(name)
    with pytest.raises(UnsupportedError, match=r"mean_module of batch shape \(\).* got \(3,\)"):
        build(name, *data, mean_module=ConstantMean(batch_shape=Size([3])))
    with pytest.raises(UnsupportedError, match=r"likelihood of batch shape \(\).* got \(3,\)"):
        build(name, *data, likelihood=GaussianLikelihood(batch_shape=Size([3])))


@pytest.mark.parametrize("of", [OSGPR, OSVGP])
def test_inducing_points_that_are_none_are_refused(of: type[OSGPR | OSVGP]) -> None:
    X, Y = first(of.__name__)
    for wrong in (5, X.tolist(), X.numpy(), (9 * X).long()):
        with pytest.raises(InputDataError, match="Expected inducing_points"):
            build(of.__name__, X, Y, inducing_points=wrong)


def test_functions_and_covariances_that_are_none_are_refused() -> None:
    X, Y = first("QSGP")
    with pytest.raises(UnsupportedError, match="FourierFeatures or InducingAtData"):
        QSGP(X, Y, basis="fourier")
    with pytest.raises(UnsupportedError, match="MeanField or Chevron"):
        QSGP(X, Y, covariance=Chevron)


def test_a_number_of_paths_that_is_none_is_refused() -> None:
    X, Y = first("WISKI")
    model = build("WISKI", X, Y)
    for wrong in ("a", None, 2.5, Size([2])):
        with pytest.raises(ValueError, match="Expected n to be a whole number"):
            sample_paths(model, wrong)


VERBS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "report": lambda model, X, Y: report(model, X=X, Y=Y),
    "observe": lambda model, X, Y: ProgressiveValidation().observe(model, X, Y),
    "sample_paths": lambda model, X, Y: sample_paths(model, 2),
    "mean_path": lambda model, X, Y: mean_path(model),
    "select_from_pool": lambda model, X, Y: select_from_pool(model, X, 1, X),
    "PoolSelector": lambda model, X, Y: PoolSelector(model, X, X),
    "select_sites": lambda model, X, Y: select_sites(model, X, 1, IntegratedVariance()),
}


@pytest.mark.parametrize("name", VERBS)
def test_a_model_of_another_package_is_refused(name: str) -> None:
    verb, (X, Y) = VERBS[name], first("OSGPR")
    for model, got in ((SingleTaskGP(X, Y), "a SingleTaskGP"), (OSGPR, "the class OSGPR")):
        with pytest.raises(UnsupportedError, match=rf"model to be an instance .* got {got}\."):
            verb(model, X, Y)
