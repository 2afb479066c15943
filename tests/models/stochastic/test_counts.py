"""Counts in the models that learn by steps, against OSVGP at all inputs and dense optima."""

from copy import deepcopy
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.means import ZeroMean
from torch import Tensor
from torch.utils.data import TensorDataset

from bo_stream import (
    QSGP,
    AutoGP,
    BinomialLikelihood,
    Chevron,
    DecoupledGP,
    FourierFeatures,
    InducingAtData,
    prevalence,
)
from tests.models.inducing.test_counts import (
    count_kernel,
    count_model,
    logits,
    small_surveys,
    surveys,
)
from tests.oracles.counts import variational

X, Y = surveys(60)
OPTIONS = {"likelihood": BinomialLikelihood(), "mean_module": ZeroMean()}


@pytest.mark.parametrize(
    "overdispersed", [False, pytest.param(True, marks=pytest.mark.integration)]
)
def test_decoupled_steps_end_where_osvgp_ends(overdispersed: bool) -> None:
    mean, deviation = logits(count_model(X, Y, X, overdispersed), X)
    options = {**OPTIONS, "likelihood": BinomialLikelihood(overdispersion=overdispersed)}
    sizes = {"num_mean": len(X), "num_covar": len(X), "initial_points": 0}
    kernel = count_kernel().requires_grad_(False)
    options["likelihood"].requires_grad_(False)
    model = DecoupledGP(X, Y, covar_module=kernel, parametrization="hybrid", **sizes, **options)
    model.fit(25, progress=False)
    found, spread = logits(model, X)
    assert (np.abs(found - mean) < 0.1 * deviation).all()
    assert spread == pytest.approx(deviation, rel=0.1)


def decoupled(rows: Tensor, **options: Any) -> DecoupledGP:
    """A model of some of the small surveys, whose hyperparameters stay."""
    X, Y = small_surveys()
    modules: dict[str, Any] = {"covar_module": count_kernel(), **OPTIONS}
    modules = {name: deepcopy(module).requires_grad_(False) for name, module in modules.items()}
    return DecoupledGP(X[rows], Y[rows], initial_points=0, **modules, **options)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("sizes", "options", "steps", "bound"),
    [
        ((10, 40), {"num_covar": 60}, 50, 0.01),
        ((10,), {"parametrization": "hybrid", "num_mean": 100, "num_covar": 60}, 200, 0.05),
    ],
)
def test_a_decoupled_stream_ends_where_its_batch_ends_after_more_steps(
    sizes: tuple[int, ...], options: dict[str, Any], steps: int, bound: float
) -> None:
    """400 small surveys in two orders: all are held, so that steps look at them again.

    Points of a hybrid parametrization move by Adam, which without an end that settles is half a
    deviation off after 200 steps more of those in tens, as they were drawn.
    """
    X, Y = small_surveys()
    whole = AutoGP(X, Y, None, BinomialLikelihood(), count_kernel(), ZeroMean())
    mean, deviation = logits(whole, X)
    for order, size in product((torch.arange(400), X[:, 0].argsort()), sizes):
        first, *others = order.split(size)
        stream = decoupled(first, **options)
        for rows in others:
            stream.update(X[rows], Y[rows])
        assert (np.abs(logits(stream, X)[0] - mean) / deviation).max() > 0.2
        stream.fit(steps, settle=True, progress=False)
        assert (np.abs(logits(stream, X)[0] - mean) / deviation).max() < bound


def test_a_step_of_everything_estimates_the_bound_of_qsgp() -> None:
    basis = FourierFeatures(40)
    model = QSGP(X, Y, basis=basis, covar_module=count_kernel(), initial_points=0, **OPTIONS)
    assert float(model.elbo_estimate()) == pytest.approx(float(model.elbo()), rel=1e-6)
    before = float(model.elbo())
    model.fit(50, progress=False)
    assert float(model.elbo()) > before


@pytest.mark.integration
def test_qsgp_comes_near_osvgp() -> None:
    kernel = count_kernel().requires_grad_(False)
    options = {"basis": InducingAtData(len(X)), "learning_rate": 0.3, "initial_points": 0}
    model = QSGP(X, Y, covar_module=kernel, empirical_bayes=False, **options, **OPTIONS)
    model.fit(1000, progress=False)
    gap = prevalence(model, X).mean - prevalence(count_model(X, Y, X), X).mean
    assert float(gap.abs().max()) < 0.2


def streamed(order: Tensor, size: int, steps: int, **options: Any) -> QSGP:
    """A model of the small surveys in some order, so many at a time, then of further steps."""
    X, Y = small_surveys()
    first, *others = order.split(size)
    options = {"empirical_bayes": False, "initial_points": 0, **OPTIONS, **options}
    kernel = count_kernel().requires_grad_(False)
    model = QSGP(X[first], Y[first], covar_module=kernel, **options)
    for rows in others:
        model.update(X[rows], Y[rows])
    model.fit(steps, progress=False)
    return model


@pytest.mark.integration
@pytest.mark.parametrize("columns", [0, 60])
def test_a_stream_of_qsgp_ends_where_its_batch_ends(columns: int) -> None:
    """Within a tenth of the batch's deviation after 1,000 steps more, in two orders and batchings.

    With a dense column for each function both have the best normal distribution of its weights;
    without any the optimum has twice the deviation and more, whatever the steps.
    """
    X, Y = small_surveys()
    options: dict[str, Any] = {"basis": FourierFeatures(60), "learning_rate": 0.3}
    if columns > 0:
        options["covariance"] = Chevron(columns)
    batch = streamed(torch.arange(400), 400, 1000, **options)
    mean, deviation = logits(batch, X)
    functions = batch._memory.basis(batch.covar_module).functions(X, torch.arange(60))
    phi = functions.detach()[0].numpy()
    best, variance = variational(4.0 * phi @ phi.T, *Y.T.numpy())
    if columns > 0:
        assert (np.abs(mean - best) < 0.1 * np.sqrt(variance)).all()
        assert deviation == pytest.approx(np.sqrt(variance), rel=0.05)
    else:
        assert np.median(deviation) > 2.0 * np.median(np.sqrt(variance))
    for order, size in ((torch.arange(400), 10), (X[:, 0].argsort(), 40)):
        found, spread = logits(streamed(order, size, 1000, **options), X)
        assert (np.abs(found - mean) < 0.1 * deviation).all()
        assert spread == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize("kind", [DecoupledGP, QSGP])
def test_data_sets_of_counts(kind: type[DecoupledGP | QSGP]) -> None:
    sizes = {"basis": FourierFeatures(20)} if kind is QSGP else {"num_mean": 8, "num_covar": 4}
    model = kind.from_dataset(TensorDataset(X, Y), **sizes, **OPTIONS)
    model.fit(3, progress=False)
    assert model.posterior(X).mean.shape == (len(X), 1)
    assert model.num_observations == len(X)


def test_qsgp_takes_no_overdispersion() -> None:
    with pytest.raises(
        UnsupportedError, match=r"overdispersed or contaminated Binomial.*DecoupledGP"
    ):
        QSGP(X, Y, BinomialLikelihood(overdispersion=True))


def test_a_model_of_some_outputs_keeps_the_trials() -> None:
    model = DecoupledGP(X, Y, num_mean=8, num_covar=4, **OPTIONS)
    part = model.subset_output([0]).update(X[:2], Y[:2])
    assert part.num_observations == len(X) + 2
    assert torch.equal(model._memory.replay.at(torch.arange(3)).Y, Y[:3])
