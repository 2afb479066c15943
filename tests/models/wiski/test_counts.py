"""Counts on a grid, by sites, against OSVGP at all inputs and in streams."""

import copy
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.fit import fit_gpytorch_mll
from gpytorch.kernels import AdditiveKernel, Kernel, RBFKernel, ScaleKernel
from gpytorch.means import ZeroMean
from gpytorch.mlls import VariationalELBO
from torch import Tensor

from bo_stream import OSVGP, WISKI, AutoGP, BinomialLikelihood, prevalence
from bo_stream.diagnostics import leave_one_out
from bo_stream.testing.streams import assert_untouched, fingerprint
from tests.models.inducing.test_counts import (
    count_kernel,
    largest_gap,
    logits,
    small_surveys,
    surveys,
)

BOX = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def _additive() -> ScaleKernel:
    parts = [ScaleKernel(RBFKernel(active_dims=(i,))) for i in range(2)]
    for part in parts:
        part.outputscale, part.base_kernel.lengthscale = 2.0, 0.5
    return ScaleKernel(AdditiveKernel(*parts)).double()


KERNELS = {"one grid": count_kernel, "additive": _additive}


def _wiski(
    X: Tensor,
    Y: Tensor,
    kernel: Kernel,
    overdispersed: bool = False,
    window: int = 0,
    grid_size: int = 24,
) -> WISKI:
    likelihood = BinomialLikelihood(overdispersion=overdispersed)
    grid = {"bounds": BOX, "grid_size": grid_size, "tolerance": 0.0}
    return WISKI(X, Y, None, likelihood, kernel, ZeroMean(), window=window, **grid)


def _osvgp(X: Tensor, Y: Tensor, kernel: Kernel, overdispersed: bool = False) -> OSVGP:
    likelihood = BinomialLikelihood(overdispersion=overdispersed)
    return OSVGP(X, Y, likelihood, kernel, ZeroMean(), inducing_points=X)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("overdispersed", [False, True])
def test_a_batch_ends_where_osvgp_ends(kernel: str, overdispersed: bool) -> None:
    X, Y = surveys(60)
    own = _wiski(X, Y, KERNELS[kernel](), overdispersed)
    mean, deviation = logits(_osvgp(X, Y, KERNELS[kernel](), overdispersed), X)
    found, spread = logits(own, X)
    assert (np.abs(found - mean) < 0.02 * deviation).all()
    assert spread == pytest.approx(deviation, rel=0.02)


def test_only_rows_that_are_held_are_retracted() -> None:
    X, Y = surveys(20)
    model = _wiski(X, Y, count_kernel())
    before = fingerprint(model)
    with pytest.raises(InputDataError, match="not among its rows"):
        model.retract(X[:1], Y[:1] + 1.0)
    assert_untouched(model, before)


@pytest.mark.parametrize("kernel", KERNELS)
def test_on_the_grid_streams_end_near_the_batch(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a quarter of a deviation: there sites of earlier rows stay as they were found."""
    monkeypatch.setattr("bo_stream.models.wiski.memory.MOST_ROWS", 0)
    X, Y = surveys(20)
    mean, deviation = logits(_wiski(X, Y, KERNELS[kernel]()), X)
    for seed in (0, 1):
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
        stream = _wiski(X[:0], Y[:0], KERNELS[kernel]())
        for rows in order.split(5):
            stream.update(X[rows], Y[rows])
        found, spread = logits(stream, X)
        assert (np.abs(found - mean) < 0.25 * deviation).all()
        assert spread == pytest.approx(deviation, rel=0.2)


def test_rows_move_to_the_grid_as_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    X, Y = surveys(20)
    monkeypatch.setattr("bo_stream.models.wiski.memory.MOST_ROWS", 10)
    stream = _wiski(X[:9], Y[:9], count_kernel(), window=0).update(X[9:], Y[9:])
    together = _wiski(X, Y, count_kernel())
    assert logits(stream, X)[0] == pytest.approx(logits(together, X)[0], abs=1e-6)
    with pytest.raises(UnsupportedError, match="retract needs"):
        stream.retract(X[:1], Y[:1])


@pytest.fixture
def no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models begin on the grid."""
    monkeypatch.setattr("bo_stream.models.wiski.memory.MOST_ROWS", 0)


def _same_logits(model: WISKI, other: WISKI, X: Tensor) -> None:
    for found, expected in zip(logits(model, X), logits(other, X), strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.usefixtures("no_rows")
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_window_of_all_ends_where_rows_end(kernel: str) -> None:
    """A stream in single rows, a merge, a retraction, a finer grid, a wider one, other parameters.

    All sites are found anew each time, so that all end at the optimum of the rows in memory.
    """
    X, Y = surveys(20)
    options: dict[str, Any] = {"window": 16, "grid_size": 10}
    whole, stream = (_wiski(X[:n], Y[:n], KERNELS[kernel](), **options) for n in (16, 0))
    for i in reversed(range(12)):
        stream.update(X[i : i + 1], Y[i : i + 1])
    other = _wiski(X[12:], Y[12:], KERNELS[kernel](), **options)
    stream.merge(other)
    _same_logits(stream, whole, X)
    rest = _wiski(X[4:], Y[4:], KERNELS[kernel](), **options)
    _same_logits(stream.retract(X[:4], Y[:4]), rest, X)
    for model in (stream, rest):
        model.refine(14)
        model.update(X[:4] + 0.5, Y[:4])
    assert float(stream.bounds.max()) > 1.0
    anew = _wiski(X[:0], Y[:0], KERNELS[kernel](), **options).refine(14)
    anew.update(torch.cat((X[4:], X[:4] + 0.5)), torch.cat((Y[4:], Y[:4])))
    _same_logits(stream, anew, X)
    for model in (stream, anew):
        model.train()
        model.covar_module.outputscale = 2.0
        model.eval()
    scaled = KERNELS[kernel]()
    scaled.outputscale = 2.0
    again = _wiski(X[:0], Y[:0], scaled, **options).refine(14)
    again.update(torch.cat((X[4:], X[:4] + 0.5)), torch.cat((Y[4:], Y[:4])))
    _same_logits(stream, again, X)


@pytest.mark.usefixtures("no_rows")
def test_rows_of_a_window_are_in_sums_and_objective_as_those_before() -> None:
    """What is asked of the memory does not depend on which of its sites are held."""
    X, Y = surveys(20)
    model = _wiski(X, Y, count_kernel(), window=10)
    settled = copy.deepcopy(model)
    settled._set_memory(model._memory.settled())
    assert len(model._memory.held) == 10
    assert settled._memory.held is None
    _same_logits(model, settled, X)
    assert torch.allclose(model.solved_gram(), settled.solved_gram(), atol=1e-9)
    assert model.num_observations == settled.num_observations == len(X)
    values = [each.log_marginal_likelihood().item() for each in (model, settled)]
    assert values[0] == pytest.approx(values[1], rel=1e-9)
    losses = [
        each.train().compute_custom_loss(VariationalELBO(each.likelihood, each, num_data=1)).item()
        for each in (model, settled)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert model.eval().forget(0.5)._memory.held is None
    _same_logits(model, settled.eval().forget(0.5), X)


@pytest.mark.usefixtures("no_rows")
def test_only_outcomes_of_the_window_are_retracted_from_the_grid() -> None:
    X, Y = surveys(20)
    model = _wiski(X, Y, count_kernel(), window=4)
    model.posterior(X)
    before = fingerprint(model)
    with pytest.raises(UnsupportedError, match="outcomes in the model's window"):
        model.retract(X[10:], Y[10:])
    assert_untouched(model, before)
    rest = _wiski(X[:12], Y[:12], count_kernel(), window=4)
    gap = np.abs(logits(model.retract(X[12:], Y[12:]), X)[0] - logits(rest, X)[0])
    assert model._memory.held is None
    assert (gap < 0.25 * logits(rest, X)[1]).all()  # those before had been found with the others


def test_rows_that_move_to_the_grid_leave_the_latest_of_them_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    X, Y = surveys(20)
    monkeypatch.setattr("bo_stream.models.wiski.memory.MOST_ROWS", 10)
    stream = _wiski(X[:9], Y[:9], count_kernel(), window=12).update(X[9:], Y[9:])
    assert len(stream._memory.held) == 12
    assert stream.retract(X[6:7], Y[6:7]).num_observations == 15
    halves = [
        _wiski(X[rows], Y[rows], count_kernel(), window=12) for rows in (slice(8), slice(8, 16))
    ]
    both = halves[0].merge(halves[1])
    assert len(both._memory.held) == 12
    assert logits(both, X)[0] == pytest.approx(logits(_wiski(X, Y, count_kernel()), X)[0], abs=1e-5)


@pytest.mark.integration
@pytest.mark.parametrize("rows_held", [0, 300])
def test_by_default_a_stream_ends_at_its_batch(rows_held: int) -> None:
    """Of many small surveys in tens, on the grid from the first one on or after 300 of them.

    Against all rows of the exact process, of which the grid's batch is off by 0.0025 deviations.
    """
    X, Y = small_surveys()
    exact = AutoGP(X, Y, None, BinomialLikelihood(), count_kernel(), ZeroMean())

    def build(X: Tensor, Y: Tensor, **options: int) -> WISKI:
        grid = {"bounds": BOX, "grid_size": 24, "tolerance": 0.0}
        with mock.patch("bo_stream.models.wiski.memory.MOST_ROWS", rows_held):
            return WISKI(
                X, Y, None, BinomialLikelihood(), count_kernel(), ZeroMean(), **grid, **options
            )

    assert largest_gap(build, X, Y, exact) < 0.005
    if rows_held == 0:
        assert largest_gap(partial(build, window=100), X, Y, exact) > 0.03


def test_many_rows_enter_by_features_as_few_do_jointly() -> None:
    X = torch.rand(400, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    Y = torch.stack(((20.0 * X[:, 0] * X[:, 1]).round(), torch.full((400,), 20.0).double()), -1)
    together = _wiski(X, Y, count_kernel())
    halves = _wiski(X[:200], Y[:200], count_kernel()).update(X[200:], Y[200:])
    mean, deviation = logits(together, X)
    found, spread = logits(halves, X)
    assert (np.abs(found - mean) < 0.25 * deviation).all()
    assert spread == pytest.approx(deviation, rel=0.1)
    rates = prevalence(together, X).mean[:, 0]
    assert float((rates - X[:, 0] * X[:, 1]).abs().mean()) < 0.03


def test_the_objective_of_rows_is_the_bound_of_osvgp() -> None:
    X, Y = surveys(20)
    model = _wiski(X, Y, count_kernel(), overdispersed=True)
    same = _osvgp(X, Y, count_kernel(), overdispersed=True)
    assert model.log_marginal_likelihood().item() == pytest.approx(same.elbo().item(), rel=1e-4)
    learned = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(learned) == 3  # output scale, length scale, concentration


def test_a_fit_of_rows_finds_their_sites_anew() -> None:
    X = torch.rand(60, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    chance = (6.0 * X[:, 0] - 4.0).sigmoid()
    Y = torch.stack(((50.0 * chance).round(), torch.full((60,), 50.0).double()), -1)
    model = WISKI(X, Y, likelihood=BinomialLikelihood(), bounds=BOX, grid_size=16)
    before = float(model.log_marginal_likelihood().detach())
    fit_gpytorch_mll(VariationalELBO(model.likelihood, model, num_data=len(X)))
    assert float(model.log_marginal_likelihood().detach()) > before
    fitted = prevalence(model, X).mean
    assert torch.allclose(prevalence(model.clear().update(X, Y), X).mean, fitted, atol=1e-7)
    assert float((fitted[:, 0] - chance).abs().max()) < 0.05


def test_hyperparameters_are_learned_from_sites_on_the_grid() -> None:
    X = torch.rand(310, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    chance = (6.0 * X[:, 0] - 4.0).sigmoid()
    Y = torch.stack(((50.0 * chance).round(), torch.full((310,), 50.0).double()), -1)
    likelihood = BinomialLikelihood(overdispersion=True)
    model = WISKI(X, Y, likelihood=likelihood, bounds=BOX, grid_size=12)
    before = float(model.log_marginal_likelihood().detach())
    fit_gpytorch_mll(VariationalELBO(model.likelihood, model, num_data=len(X)))
    assert float(model.log_marginal_likelihood().detach()) > before
    concentration = model.likelihood.concentration.detach()
    assert float(concentration) == pytest.approx(50.0)  # it needs the counts, which are gone


def test_what_a_model_of_counts_cannot_do_is_said() -> None:
    X, Y = surveys(20)
    model = _wiski(X, Y, count_kernel())
    model.posterior(X)
    before = fingerprint(model)
    with pytest.raises(UnsupportedError, match="counts"):
        leave_one_out(model, X[:2], Y[:2])
    with pytest.raises(UnsupportedError, match="no Gaussian noise"):
        model.posterior(X, observation_noise=True)
    with pytest.raises(UnsupportedError, match="log_predictive"):
        model.batch_log_marginal_likelihood(X, Y)
    with pytest.raises(InputDataError, match="row 1, column 0"):
        model.update(X[:2], torch.tensor([[1.0, 2.0], [3.0, 2.0]]).double())
    with pytest.raises(InputDataError, match="too far outside"):
        model.update(X[:2] + 90.0, Y[:2])
    with pytest.raises(UnsupportedError, match="Yvar"):
        model.update(X, Y, torch.ones_like(Y))
    with pytest.raises(ValueError, match="window"):
        _wiski(X, Y, count_kernel(), window=-1)
    assert_untouched(model, before)
