"""Counts in AutoGP: all rows held, their sites at the optimum, then OSVGP."""

from functools import partial

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.fit import fit_gpytorch_mll
from botorch.utils.datasets import SupervisedDataset
from gpytorch.means import ZeroMean
from gpytorch.mlls import VariationalELBO
from scipy.stats import betabinom
from torch import Tensor

from bo_stream import AutoGP, BinomialLikelihood, prevalence
from bo_stream.diagnostics import leave_one_out
from bo_stream.testing.streams import assert_untouched, fingerprint
from tests.models.inducing.test_counts import (
    count_kernel,
    count_model,
    largest_gap,
    logits,
    small_surveys,
    surveys,
)

X, Y = surveys(20)
KINDS = [False, True]
FEW_STEPS = {"optimizer_kwargs": {"options": {"maxiter": 15}}}


def _auto(X: Tensor, Y: Tensor, overdispersed: bool = False, **options: int | str) -> AutoGP:
    likelihood = BinomialLikelihood(overdispersion=overdispersed)
    return AutoGP(X, Y, None, likelihood, count_kernel(), ZeroMean(), **options)


@pytest.mark.parametrize("overdispersed", KINDS)
def test_it_ends_where_osvgp_at_all_inputs_ends_in_any_order(overdispersed: bool) -> None:
    mean, deviation = logits(count_model(X, Y, X, overdispersed), X)
    for batch in (2, 5):
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(batch))
        stream = _auto(X[:0], Y[:0], overdispersed)
        for rows in order.split(batch):
            stream.update(X[rows], Y[rows])
        assert stream.family == "exact"
        assert logits(stream, X)[0] == pytest.approx(mean, abs=1e-6)
        assert logits(stream, X)[1] == pytest.approx(deviation, rel=1e-6)


def test_only_rows_that_are_held_are_retracted() -> None:
    model = _auto(X, Y)
    before = fingerprint(model)
    with pytest.raises(InputDataError, match="not among its rows"):
        model.retract(X[:1], Y[:1] + 1.0)
    with pytest.raises(UnsupportedError, match="counts"):
        leave_one_out(model, X[5:7], Y[5:7])
    assert_untouched(model, before)


def test_a_row_that_is_forgotten_by_half_counts_half() -> None:
    """One of half as many positives and examined has the same likelihood, but for a constant."""
    whole = _auto(X, 2.0 * Y).forget(0.5)
    assert logits(whole, X)[0] == pytest.approx(logits(_auto(X, Y), X)[0], abs=1e-7)
    assert whole.num_observations == len(X) / 2


@pytest.mark.parametrize("overdispersed", KINDS)
def test_the_objective_is_the_bound_of_osvgp(overdispersed: bool) -> None:
    model = _auto(X, Y, overdispersed)
    bound = count_model(X, Y, X, overdispersed).elbo()
    assert model.log_marginal_likelihood().item() == pytest.approx(bound.item(), rel=1e-8)
    assert len([p for p in model.parameters() if p.requires_grad]) == 2 + overdispersed


def test_a_fit_learns_the_concentration() -> None:
    random = np.random.default_rng(0)
    points = torch.rand(50, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positives = torch.as_tensor(betabinom.rvs(40, 1.0, 3.0, size=50, random_state=random))
    counts = torch.stack((positives.double(), torch.full((50,), 40.0).double()), -1)
    model = AutoGP(points, counts, likelihood=BinomialLikelihood(overdispersion=True))
    fit_gpytorch_mll(VariationalELBO(model.likelihood, model, num_data=50), **FEW_STEPS)
    assert 2.0 < float(model.likelihood.concentration.detach()) < 8.0
    fixed = BinomialLikelihood(overdispersion=True).requires_grad_(False)
    model = AutoGP(points[:12], counts[:12], likelihood=fixed)
    fit_gpytorch_mll(VariationalELBO(model.likelihood, model, num_data=12), **FEW_STEPS)
    assert float(model.likelihood.concentration.detach()) == pytest.approx(50.0)


@pytest.mark.parametrize("overdispersed", KINDS)
def test_the_hand_over_to_osvgp_is_exact_and_measured(overdispersed: bool) -> None:
    mean = logits(_auto(X, Y, overdispersed), X)[0]
    options = {"max_exact": 10, "window": 4}
    model = _auto(X[:9], Y[:9], overdispersed, **options).update(X[9:], Y[9:])
    assert model.family == "OSVGP"
    assert model.history[-1].mean_error < 1e-6
    assert logits(model, X)[0] == pytest.approx(mean, abs=1e-6)
    with pytest.raises(UnsupportedError, match="retract needs"):
        model.retract(X[:1], Y[:1])
    fit_gpytorch_mll(VariationalELBO(model.likelihood, model, num_data=len(X)))
    model.move_to("exact")
    again = _auto(X, Y, overdispersed)
    again.load_state_dict(model.state_dict())
    assert logits(model, X)[0] == pytest.approx(logits(again, X)[0], abs=1e-6)


def test_rows_that_are_held_beside_enter_anew_after_a_fit() -> None:
    stream = _auto(X[:10], Y[:10], max_exact=9, window=0).eval()
    for rows in torch.arange(10, len(X)).split(2):
        stream.update(X[rows], Y[rows])
    far = np.abs(logits(stream, X)[0] - logits(_auto(X, Y), X)[0]).max()
    stream.train()
    stream.covar_module.outputscale = 3.0
    stream.eval()
    again = _auto(X, Y)
    again.load_state_dict(stream.state_dict())
    assert far > 1e-3
    assert logits(stream, X)[0] == pytest.approx(logits(again, X)[0], abs=1e-6)


def test_a_window_is_held_from_the_hand_over_on() -> None:
    """So that a stream ends where all rows end while the window holds them, and some can go."""
    stream = _auto(X[:10], Y[:10], max_exact=9).eval()
    for rows in torch.arange(10, len(X)).split(2):
        stream.update(X[rows], Y[rows])
    assert stream.family == "OSVGP"
    assert logits(stream, X)[0] == pytest.approx(logits(_auto(X, Y), X)[0], abs=1e-6)
    rest = logits(_auto(X[1:], Y[1:]), X)[0]
    assert logits(stream.retract(X[:1], Y[:1]), X)[0] == pytest.approx(rest, abs=1e-6)


@pytest.mark.integration
def test_by_default_a_stream_ends_near_its_batch() -> None:
    """Of 400 small surveys in tens, of which the first 100 are held together."""
    X, Y = small_surveys()
    batch = _auto(X, Y)
    assert largest_gap(partial(_auto, max_exact=100), X, Y, batch) < 0.03
    assert largest_gap(partial(_auto, max_exact=100, window=100), X, Y, batch) > 0.05


def test_no_rows_enter_anew_where_none_are_held() -> None:
    model = _auto(X[:0], Y[:0], families="OSVGP").eval()
    assert model.update(X, Y).num_observations == len(X)


def test_one_family_is_taken_at_once_and_others_refused() -> None:
    assert _auto(X, Y, families="OSVGP").family == "OSVGP"
    with pytest.raises(UnsupportedError, match="exact, OSVGP with a BinomialLikelihood"):
        _auto(X, Y, families="OSGPR")


def test_data_sets_and_single_precision() -> None:
    data = SupervisedDataset(
        X.float(), Y.float(), feature_names=["x", "y"], outcome_names=["positives", "examined"]
    )
    model = AutoGP(**AutoGP.construct_inputs(data, likelihood=BinomialLikelihood()))
    double = AutoGP(X, Y, likelihood=BinomialLikelihood())
    found = prevalence(model, X.float()).mean
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), prevalence(double, X).mean, atol=1e-4)
