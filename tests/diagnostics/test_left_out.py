"""Observations left out in closed form, against models that never had them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.cross_validation import loo_cv
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.models import SingleTaskGP
from botorch.models.transforms.input import Normalize
from botorch.models.transforms.outcome import ChainedOutcomeTransform, Log, Standardize
from gpytorch.kernels import AdditiveKernel, RBFKernel, ScaleKernel
from torch import Tensor

from bo_stream import (
    OSGPR,
    OSVGP,
    WISKI,
    ClusteredGP,
    DirichletWISKI,
    HeteroscedasticWISKI,
    LinearStem,
    LocalGP,
)
from bo_stream.diagnostics import leave_one_out, without
from bo_stream.models.base import StreamingGP
from bo_stream.testing.streams import assert_close
from tests.oracles.gaussian_process import DenseGP, standardization
from tests.oracles.reference import lift, reference
from tests.support.problems import Observations, observations

Build = Callable[..., StreamingGP]

pytestmark = pytest.mark.usefixtures("both_spaces")


def rbf(lengthscale: float = 0.5) -> RBFKernel:
    kernel = RBFKernel()
    kernel.lengthscale = lengthscale
    return kernel


def wiski(data: Observations, **options: Any) -> WISKI:
    defaults = {"grid_size": 9, "tolerance": 0.0, "covar_module": rbf()}
    return WISKI(*data.astuple(), **{**defaults, **options}).eval()


def dense_left_out(gp: DenseGP, rows: list[int]) -> tuple[Tensor, Tensor]:
    """Mean and variance at some rows, of a process that is built without them."""
    mean, covariance = gp.without(rows).posterior(gp.X[..., rows, :])
    return mean, covariance.diagonal(dim1=-2, dim2=-1)


def in_units(data: Observations, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Standardised moments ``... (x m) x k`` as ``... x k x m`` in the data's units."""
    centre, scale = standardization(data.Y.double())
    if data.Y.shape[-1] == 1:
        mean, variance = mean.unsqueeze(-2), variance.unsqueeze(-2)
    return centre + scale * mean.mT, scale**2 * variance.mT


def rebuilt(model: StreamingGP, build: Build, data: Observations, left: list[int]) -> StreamingGP:
    """A model of some of the rows, with the hyperparameters of the model of all."""
    Yvar = None if data.Yvar is None else data.Yvar[..., left, :]
    other = build(Observations(data.X[..., left, :], data.Y[..., left, :], Yvar))
    other.load_state_dict(model.state_dict())
    return other.eval()


def assert_equals_rebuilding(model: StreamingGP, build: Build, data: Observations) -> None:
    """Each row left out, and three at once, seen from everywhere."""
    n = len(data)
    found = leave_one_out(model, *data.astuple(), observation_noise=False).posterior
    for i in range(0, n, 3):
        left = [j for j in range(n) if j != i]
        expected = rebuilt(model, build, data, left).posterior(data.X[..., [i], :])
        assert_close(found.mean[..., i, :, :], expected.mean)
        assert_close(found.variance[..., i, :, :], expected.variance)
    Yvar = None if data.Yvar is None else data.Yvar[..., :3, :]
    found = without(model, data.X[..., :3, :], data.Y[..., :3, :], Yvar).posterior(data.X)
    expected = rebuilt(model, build, data, list(range(3, n))).posterior(data.X)
    assert_close(found.mean, expected.mean)
    assert_close(found.variance, expected.variance)


@pytest.mark.parametrize("noise", ["learned", "known", "mixed"])
@pytest.mark.parametrize("batch_shape", [(), (2,)])
@pytest.mark.parametrize("outputs", [1, 2])
def test_it_is_the_dense_process_without_the_row(
    noise: str, batch_shape: tuple[int, ...], outputs: int, dtype: torch.dtype, device: torch.device
) -> None:
    data = observations(5, 2, outputs, batch_shape, dtype).with_noise(noise)
    data = Observations(*(t if t is None else t.to(device) for t in data.astuple()))
    model = wiski(data)
    gp = reference(model, *data.astuple())
    gp = DenseGP(gp.kernel, gp.mean, lift(data.X.double(), outputs), gp.y, gp.noise)
    silent = leave_one_out(model, *data.astuple(), observation_noise=False)
    noisy = leave_one_out(model, *data.astuple()).posterior
    assert silent.posterior.mean.shape == (*batch_shape, 5, 1, outputs)
    assert silent.posterior.mean.dtype == dtype
    assert torch.equal(silent.observed_Y.squeeze(-2), data.Y)
    for i in range(5):
        mean, variance = in_units(data, *dense_left_out(gp, [i]))
        own = in_units(data, mean.new_zeros(()).expand_as(gp.y[..., [i]]), gp.noise[..., [i]])[1]
        assert_close(silent.posterior.mean[..., i, :, :], mean)
        assert_close(silent.posterior.variance[..., i, :, :], variance)
        assert_close(noisy.variance[..., i, :, :], variance + own)


def test_it_is_botorchs_where_both_models_are_the_same() -> None:
    data = observations(12, 1)
    model = wiski(data, grid_size=200, covar_module=rbf(0.8))
    exact = SingleTaskGP(data.X, data.Y, covar_module=rbf(0.8))
    exact.load_state_dict({**exact.state_dict(), **model.state_dict()})
    exact.eval()
    for noise in (True, False):
        ours = leave_one_out(model, data.X, data.Y, observation_noise=noise)
        theirs = loo_cv(exact, observation_noise=noise)
        torch.testing.assert_close(ours.posterior.mean, theirs.posterior.mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            ours.posterior.variance, theirs.posterior.variance, rtol=1e-5, atol=1e-5
        )
        assert_close(ours.observed_Y, theirs.observed_Y)


@pytest.mark.parametrize("kind", ["inputs", "outcomes", "nothing", "sum", "truncated", "stem"])
def test_transforms_sums_and_stems(kind: str) -> None:
    data = observations(12, 2)
    stem = LinearStem(2, 1).calibrate(data.X).eval()
    parts = AdditiveKernel(*(ScaleKernel(RBFKernel(active_dims=(i,))) for i in range(2)))
    transforms = ChainedOutcomeTransform(log=Log(), standardize=Standardize(1))
    bounds = torch.tensor([[0.0, -1.0], [1.0, 2.0]]).double()
    options: dict[str, Any] = {
        "inputs": {"input_transform": Normalize(2, bounds=bounds)},
        "outcomes": {"outcome_transform": transforms},
        "nothing": {"outcome_transform": None},
        "sum": {"covar_module": parts},
        "truncated": {"tolerance": 1e-3},
        "stem": {"stem": stem},
    }[kind]

    def build(rows: Observations) -> WISKI:
        return wiski(rows, **copy.deepcopy(options))

    assert_equals_rebuilding(build(data), build, data)


def test_a_stream_after_updates_and_duplicates() -> None:
    data = observations(70, 2)
    data.X[40:50] = data.X[:1]
    model = wiski(data[:30], bounds=torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    model.posterior(data.X)
    for start in range(30, 70, 5):
        model.update(*data[slice(start, start + 5)].astuple()).posterior(data.X[:2])
    assert_equals_rebuilding(model, wiski, data)


@pytest.mark.parametrize("noise", [1e-4, 1e-6])
def test_little_noise_and_many_features(noise: float) -> None:
    """A share of ``s / (s + v)`` is left to each row, here 1e-6 and less, and so many digits go."""
    data = observations(20, 2)
    data = Observations(data.X, data.Y, torch.full_like(data.Y, noise))

    def build(rows: Observations) -> WISKI:
        return wiski(rows, covar_module=rbf(0.2), grid_size=16, outcome_transform=None)

    model = build(data)
    found = leave_one_out(model, *data.astuple(), observation_noise=False).posterior
    gp = reference(model, *data.astuple())
    for i in range(20):
        mean, variance = dense_left_out(gp, [i])
        torch.testing.assert_close(found.mean[i, 0], mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.variance[i, 0], variance, rtol=1e-6, atol=1e-6)


def test_chunks_are_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data = observations(11, 2)
    model = wiski(data)
    whole = leave_one_out(model, data.X, data.Y).posterior
    monkeypatch.setattr("bo_stream.diagnostics.cross_validation.ROWS", 4)
    parts = leave_one_out(model, data.X, data.Y).posterior
    assert_close(parts.mean, whole.mean)
    assert_close(parts.variance, whole.variance)


def test_the_model_stays_as_it_is() -> None:
    data = observations(20, 2)
    model, twin = wiski(data), wiski(data)
    twin.posterior(data.X)
    leave_one_out(model, data.X, data.Y)
    conditioned = without(model, data.X[:4], data.Y[:4])
    conditioned.posterior(data.X)
    assert model.num_observations == 20
    new = observations(3, 2)
    ours, theirs = (m.update(new.X, new.Y).posterior(data.X) for m in (model, twin))
    assert torch.equal(ours.mean, theirs.mean)
    assert torch.equal(ours.variance, theirs.variance)
    with pytest.raises(UnsupportedError, match="original model"):
        conditioned.update(new.X, new.Y)


def osgpr(data: Observations, **options: Any) -> OSGPR:
    Z = torch.rand(6, 2, generator=torch.Generator().manual_seed(1)).double()
    defaults = {"covar_module": rbf(), "inducing_points": Z}
    return OSGPR(*data.astuple(), **{**defaults, **options}).eval()


@pytest.mark.parametrize("noise", ["learned", "mixed"])
def test_rows_of_an_osgpr_at_its_points(noise: str) -> None:
    data = observations(15, 2).with_noise(noise)
    model = osgpr(data[:10])
    model.update(*data[slice(10, 15)].astuple())
    assert_equals_rebuilding(model, osgpr, data)


def test_rows_of_an_osgpr_whose_points_and_kernel_have_moved() -> None:
    data = observations(15, 2)
    model = osgpr(data)
    model.place_points(torch.rand(5, 2).double())
    model.covar_module.lengthscale = 0.7

    def build(rows: Observations) -> OSGPR:
        return osgpr(rows, inducing_points=model.inducing_points, covar_module=rbf(0.7))

    assert_equals_rebuilding(model, build, data)


def test_rows_that_left_the_window_are_refused() -> None:
    data = observations(15, 2)
    model = osgpr(data, window=10)
    assert leave_one_out(model, data.X[5:], data.Y[5:]).posterior.mean.shape == (10, 1, 1)
    with pytest.raises(UnsupportedError, match="5 that it does not"):
        leave_one_out(model, data.X, data.Y)


def test_noise_that_depends_on_the_inputs() -> None:
    data = observations(30, 2)
    model = HeteroscedasticWISKI(data.X[:0], data.Y[:0], grid_size=9, noise_grid_size=8, rounds=0)
    entry = model.observe(data.X, data.Y)
    noise = entry.observations.noise.mT
    found = leave_one_out(model, data.X, data.Y, noise, observation_noise=False).posterior
    taken = copy.deepcopy(model).retract(data.X[4:5], data.Y[4:5], noise[4:5])
    assert_close(found.mean[4], taken.posterior(data.X[4:5]).mean)
    assert_close(found.variance[4], taken.posterior(data.X[4:5]).variance)
    with pytest.raises(InputDataError, match="Pass Yvar"):
        leave_one_out(model, data.X, data.Y)


def test_scores_of_labels() -> None:
    X, labels = torch.rand(12, 2).double(), torch.arange(12).unsqueeze(-1) % 3
    model = DirichletWISKI(X, labels, grid_size=9)
    found = leave_one_out(model, X, labels, observation_noise=False).posterior
    taken = copy.deepcopy(model).retract(X[4:5], labels[4:5])
    assert_close(found.mean[4], taken.posterior(X[4:5]).mean)
    assert_close(found.variance[4], taken.posterior(X[4:5]).variance)


@pytest.mark.parametrize("kind", [OSVGP, ClusteredGP, LocalGP])
def test_other_models_are_refused(kind: type[StreamingGP]) -> None:
    data = observations(10, 2)
    model = kind(data.X, data.Y)
    for leave in (leave_one_out, without):
        with pytest.raises(UnsupportedError, match="WISKI.*got a " + kind.__name__):
            leave(model, data.X, data.Y)


def test_bad_rows() -> None:
    data = observations(10, 2)
    model = wiski(data)
    with pytest.raises(BotorchTensorDimensionError):
        leave_one_out(model, data.X, data.Y[:5])
    with pytest.raises(InputDataError, match="at most the 10 observations"):
        leave_one_out(model, data.X.repeat(2, 1), data.Y.repeat(2, 1))
    known = torch.full_like(data.Y, 1e-6)
    for leave in (leave_one_out, without):
        with pytest.raises(InputDataError, match="observations that are in memory"):
            leave(model, data.X, data.Y, known)
    with pytest.raises(UnsupportedError, match="hypothetical"):
        leave_one_out(model.condition_on_observations(data.X, data.Y), data.X, data.Y)


def test_rows_on_a_former_grid_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bo_stream.models.wiski.memory.MOST_ROWS", 0)
    data = observations(10, 2)
    with pytest.raises(UnsupportedError, match="on one grid"):
        leave_one_out(wiski(data).refine(12), data.X, data.Y)


def test_no_rows() -> None:
    data = observations(10, 2)
    model = wiski(data)
    assert leave_one_out(model, data.X[:0], data.Y[:0]).posterior.mean.shape == (0, 1, 1)
    same = without(model, data.X[:0], data.Y[:0]).posterior(data.X)
    assert_close(same.variance, model.posterior(data.X).variance)


def test_a_model_that_keeps_its_data_is_sent_to_botorch() -> None:
    X = torch.rand(5, 2, dtype=torch.float64)
    model = SingleTaskGP(X, X.sum(-1, keepdim=True))
    with pytest.raises(UnsupportedError, match=r"SingleTaskGP.* botorch\.cross_validation\.loo_cv"):
        leave_one_out(model, X, X.sum(-1, keepdim=True))
