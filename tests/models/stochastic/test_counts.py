"""Counts in the models that learn by steps, against OSVGP at all inputs."""

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.means import ZeroMean
from torch.utils.data import TensorDataset

from bo_stream import (
    QSGP,
    AutoGP,
    BinomialLikelihood,
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


@pytest.mark.integration
def test_a_decoupled_stream_ends_where_its_batch_ends_after_more_steps() -> None:
    """400 small surveys in tens, in two orders: all are held, so that steps look at them again."""
    X, Y = small_surveys()
    mean, deviation = logits(
        AutoGP(X, Y, None, BinomialLikelihood(), count_kernel(), ZeroMean()), X
    )
    for order in (torch.arange(400), X[:, 0].argsort()):
        first, sizes = order[:10], {"num_mean": 100, "num_covar": 60, "initial_points": 0}
        kernel, likelihood = count_kernel(), BinomialLikelihood()
        modules = {"covar_module": kernel, "likelihood": likelihood, "mean_module": ZeroMean()}
        for module in modules.values():
            module.requires_grad_(False)
        stream = DecoupledGP(X[first], Y[first], parametrization="hybrid", **sizes, **modules)
        for rows in order[10:].split(10):
            stream.update(X[rows], Y[rows])
        gaps = [(np.abs(logits(stream, X)[0] - mean) / deviation).max()]
        stream.fit(125, progress=False)
        gaps.append((np.abs(logits(stream, X)[0] - mean) / deviation).max())
        assert gaps[0] > 0.2
        assert gaps[1] < 0.05


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
