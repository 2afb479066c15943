"""A fit of a batched model is a fit of each of its elements."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import ModelFittingError
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.optim.closures import BatchedNDarrayOptimizationClosure
from botorch.optim.core import OptimizationResult
from botorch.optim.fit import fit_gpytorch_mll_torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel, SpectralMixtureKernel
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from bo_stream import OSGPR, WISKI, AutoGP, ClusteredGP
from bo_stream.models.base import StreamingGP
from bo_stream.models.fitting import learn_hyperparameters
from bo_stream.models.lbfgs import are_apart, fit_in_logarithms
from tests.laws.cases import CASES
from tests.laws.registry import Stream
from tests.support.fits import evaluations

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")

WAVES = torch.tensor([2.0, 3.0, 4.0, 2.5, 3.5], dtype=torch.float64)
"""Frequency of each element's function."""


def observations(elements: int, n: int = 12) -> tuple[Tensor, Tensor]:
    """Noisy waves, ``elements x n x 2`` and ``elements x n x 1``."""
    X = torch.rand(elements, n, 2, dtype=torch.float64)
    waves = torch.sin(WAVES[:elements, None, None] * X.sum(-1, keepdim=True))
    return X, waves + 0.1 * torch.randn_like(waves)


def outcomes_of(X: Tensor, outputs: int) -> Tensor:
    """Noisy waves at the same inputs, ``n x outputs``."""
    waves = torch.sin(WAVES[:outputs] * X.sum(-1, keepdim=True))
    return waves + 0.1 * torch.randn_like(waves)


def objective(model: Model) -> ExactMarginalLogLikelihood:
    return ExactMarginalLogLikelihood(model.likelihood, model)


def loss(model: StreamingGP) -> Tensor:
    return model.train().compute_custom_loss(objective(model)).detach()


def on_the_sum(mll: ExactMarginalLogLikelihood, **kwargs: Any) -> OptimizationResult:
    """An optimizer that BoTorch does not take for its default one."""
    return fit_in_logarithms(mll, **kwargs)


@pytest.mark.parametrize(
    "kind", [WISKI, *(pytest.param(k, marks=pytest.mark.integration) for k in (OSGPR, ClusteredGP))]
)
def test_a_fit_of_a_batch_is_a_fit_of_each_element(kind: type[StreamingGP]) -> None:
    X, Y = observations(5, 8)
    batched, singles = kind(X, Y), [kind(x, y) for x, y in zip(X, Y, strict=True)]
    with evaluations() as together:
        fit_gpytorch_mll(objective(batched))
    most = 0
    for single in singles:
        with evaluations() as alone:
            fit_gpytorch_mll(objective(single))
        most = max(most, len(alone))
    torch.testing.assert_close(
        loss(batched), torch.stack([loss(single) for single in singles]), atol=1e-5, rtol=0.0
    )
    assert len(together) <= 1.5 * most


def test_a_fit_of_outputs_is_a_fit_of_each_output() -> None:
    X = torch.rand(12, 2, dtype=torch.float64)
    Y = outcomes_of(X, 3)
    together = WISKI(X, Y)
    fit_gpytorch_mll(objective(together))
    for j in range(3):
        alone = WISKI(X, Y[:, j : j + 1])
        fit_gpytorch_mll(objective(alone))
        torch.testing.assert_close(loss(together)[j], loss(alone), atol=1e-5, rtol=0.0)


def test_a_fit_of_a_batch_evaluates_about_as_often_as_the_exact_model_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    X, Y = observations(5)
    exact, calls = SingleTaskGP(X, Y), list[None]()
    evaluate = BatchedNDarrayOptimizationClosure.__call__

    def counting(self: BatchedNDarrayOptimizationClosure, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return evaluate(self, *args, **kwargs)

    monkeypatch.setattr(BatchedNDarrayOptimizationClosure, "__call__", counting)
    fit_gpytorch_mll(objective(exact))
    most = 2 * len(calls)
    with evaluations() as ours:
        fit_gpytorch_mll(objective(WISKI(X, Y)))
    assert 0 < len(ours) <= most


@pytest.mark.parametrize(
    "kernel",
    [ScaleKernel(RBFKernel()), SpectralMixtureKernel(2, ard_num_dims=2)],
    ids=["rbf", "sm"],
)
def test_what_elements_share_is_learned_on_their_sum(kernel: Kernel) -> None:
    X = torch.rand(12, 2, dtype=torch.float64)
    Y = outcomes_of(X, 2)
    together, summed = (WISKI(X, Y, covar_module=deepcopy(kernel)) for _ in range(2))
    fit_gpytorch_mll(objective(together), optimizer_kwargs={"options": {"maxiter": 5}})
    learned = [p.detach().clone() for p in together.parameters()]
    fit_gpytorch_mll(
        objective(summed), optimizer=on_the_sum, optimizer_kwargs={"options": {"maxiter": 5}}
    )
    for parameter, value in zip(summed.parameters(), learned, strict=True):
        torch.testing.assert_close(parameter.detach(), value)


def test_options_limit_each_search() -> None:
    X, Y = observations(3)
    counts = []
    for options in ({}, {"ftol": 1e-2}, {"gtol": 1e-1}, {"maxiter": 1, "maxls": 5, "maxcor": 3}):
        with evaluations() as counted:
            fit_gpytorch_mll(objective(WISKI(X, Y)), optimizer_kwargs={"options": options})
        counts.append(len(counted))
    assert max(counts[1:]) < counts[0]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"optimizer": fit_gpytorch_mll_torch, "optimizer_kwargs": {"step_limit": 2}},
        {"optimizer_kwargs": {"options": {"maxfun": 2}}},
        {"optimizer_kwargs": {"timeout_sec": 1e-9}},
        {"closure_kwargs": {}},
    ],
    ids=["torch", "maxfun", "timeout", "closure"],
)
def test_a_caller_s_own_way_of_fitting_is_kept(
    kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("fitted apart")

    monkeypatch.setattr("botorch.optim.batched_lbfgs_b.fmin_l_bfgs_b_batched", refuse)
    model = WISKI(*observations(2, 8))
    before = model.covar_module.raw_lengthscale.detach().clone()
    fit_gpytorch_mll(objective(model), max_attempts=1, **kwargs)
    assert not torch.equal(model.covar_module.raw_lengthscale, before)


def test_a_refit_of_outputs_takes_few_steps() -> None:
    X = torch.rand(12, 2, dtype=torch.float64)
    model = WISKI(X, outcomes_of(X, 2))
    before = loss(model)
    learn_hyperparameters(model)
    assert bool((loss(model) < before).all())


def test_a_fit_whose_loss_is_not_finite_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = WISKI(*observations(2, 8))
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def fail(self: StreamingGP, mll: ExactMarginalLogLikelihood) -> Tensor:
        raise NanError("for a test")

    monkeypatch.setattr(StreamingGP, "compute_custom_loss", fail)
    with (
        pytest.warns(match="The loss of 2 of 2 batch elements or outputs is not finite"),
        pytest.raises(ModelFittingError),
    ):
        fit_gpytorch_mll(objective(model))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert callable(model.custom_fit)


@pytest.mark.parametrize("elements", [1, 2])
def test_a_step_to_a_matrix_that_cannot_be_factorised_is_taken_back(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, Y = observations(elements)
    model = AutoGP(X.squeeze(0), Y.squeeze(0))
    start = loss(model).sum()
    learn_hyperparameters(other := deepcopy(model))
    compute, calls = StreamingGP.compute_custom_loss, list[None]()

    def fails_at_the_third(self: StreamingGP, mll: ExactMarginalLogLikelihood) -> Tensor:
        calls.append(None)
        if len(calls) == 3:
            raise NotPSDError("for a test")
        return compute(self, mll)

    monkeypatch.setattr(StreamingGP, "compute_custom_loss", fails_at_the_third)
    learn_hyperparameters(model)
    assert len(calls) > 6
    assert float(start - loss(model).sum()) > 0.5 * float(start - loss(other).sum())


@pytest.mark.parametrize(
    "stream",
    [
        Stream(case, setting)
        for case in CASES
        for setting in case.settings
        if setting.outputs * len(setting.batch_shape) > 1
    ],
    ids=str,
)
def test_what_an_element_learns_moves_no_other_s_loss(stream: Stream) -> None:
    model = stream.model(stream.data(8)).train()
    mll, shape = MarginalLogLikelihood(model.likelihood, model), model._parameter_shape
    if not are_apart(mll, shape):
        pytest.skip("elements share hyperparameters, or learn none in a fit")
    before = model.compute_custom_loss(mll).detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(shape.numel(), -1)[0] += 0.2
    after = model.compute_custom_loss(mll).detach()
    first, *others = (after - before).flatten()
    scale = float(before.abs().max())
    assert float(first.abs()) > 1e-6 * scale
    assert float(torch.stack(others).abs().max()) < 1e-9 * scale


@pytest.mark.fixed_seed
def test_outputs_with_bounds_of_their_own_are_fitted_inside_them() -> None:
    X, Y = observations(1)
    kernel = RBFKernel(batch_shape=torch.Size([2]))
    least = torch.tensor([0.01, 3.0], dtype=torch.float64).view(2, 1, 1)
    kernel.register_constraint("raw_lengthscale", GreaterThan(least, transform=None))
    kernel.lengthscale = torch.tensor([1.0, 4.0]).view(2, 1, 1)
    model = OSGPR(X[0], torch.cat((Y[0], Y[0]), -1), covar_module=kernel)
    fit_gpytorch_mll(objective(model))
    first, second = model.covar_module.lengthscale.flatten().tolist()
    assert first < 3.0
    assert second == pytest.approx(3.0)
