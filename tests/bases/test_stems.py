"""A model with a stem is a model without one on the projected inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms.input import Normalize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream import WISKI, DirichletWISKI, FeatureNIPV
from bo_stream.bases.kernels import LinearStem, MLPStem, RandomProjection, Stem
from bo_stream.testing.streams import assert_close, assert_untouched, fingerprint
from tests.support.problems import OpenStem, observations
from tests.support.smooth_points import smooth_points

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")

D = 5
STEMS: dict[str, Callable[[], Stem]] = {
    "linear": lambda: LinearStem(D, 2),
    "perceptron": lambda: MLPStem(D, 7, 2),
    "two hidden layers": lambda: MLPStem(D, [6, 4], 3),
    "random": lambda: RandomProjection(D, 2, seed=3),
    "to a line": lambda: LinearStem(D, 1),
}


@pytest.fixture(params=STEMS)
def stem(request: pytest.FixtureRequest) -> Stem:
    return STEMS[request.param]()


def test_coordinates_are_normalised_and_squashed(stem: Stem) -> None:
    X = torch.randn(30, D, dtype=torch.float64)
    coordinates = stem.calibrate(X)(X)
    with torch.no_grad():
        projected = stem.project(X)
    normal = (projected - projected.mean(0)) / projected.std(0)
    assert_close(coordinates, 0.5 * (1.0 + normal.tanh()))
    stem.train()
    assert_close(stem(X[:3]), coordinates[:3])


def test_calibration_is_differentiated(stem: Stem) -> None:
    X = torch.randn(8, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: stem.calibrated_forward(x)[:4], X)


def test_a_random_projection_is_orthonormal_and_never_learned() -> None:
    stem = RandomProjection(D, 2, seed=3)
    assert_close(stem.weight @ stem.weight.mT, torch.eye(2))
    assert not any(parameter.requires_grad for parameter in stem.parameters())
    assert torch.equal(stem.weight, RandomProjection(D, 2, seed=3).weight)
    assert not torch.allclose(stem.weight, RandomProjection(D, 2, seed=4).weight)


@pytest.mark.parametrize("noise", ["learned", "known"])
def test_model_is_that_of_the_projected_inputs(stem: Stem, noise: str) -> None:
    data, more = (observations(n, D, 2).with_noise(noise) for n in (20, 5))
    normalize = Normalize(D, bounds=torch.tensor([[-1.0] * D, [2.0] * D]).double())
    model = WISKI(*data.astuple(), stem=stem, input_transform=normalize, grid_size=7)
    with torch.no_grad():
        projected, more_projected = stem(normalize(data.X)), stem(normalize(more.X))
    cube = torch.tensor([[0.0] * stem.k, [1.0] * stem.k])
    plain = WISKI(projected, data.Y, data.Yvar, bounds=cube, grid_size=7)
    model.update(*more.astuple())
    plain.update(more_projected, more.Y, more.Yvar)
    T = torch.rand(4, D).double()
    with torch.no_grad():
        projected_T = stem(normalize(T))
    own, expected = model.posterior(T), plain.posterior(projected_T)
    assert_close(own.mean, expected.mean)
    assert_close(own.variance, expected.variance)
    assert_close(model.log_marginal_likelihood(), plain.log_marginal_likelihood())
    sampler = SobolQMCNormalSampler(torch.Size([2]), seed=0)
    fantasy = model.fantasize(T[:2], sampler).posterior(T)
    conditioned = plain.fantasize(projected_T[:2], sampler).posterior(projected_T)
    assert_close(fantasy.mean, conditioned.mean)


def test_gradients_reach_the_raw_inputs(stem: Stem) -> None:
    data = observations(20, D)
    model = WISKI(*data.astuple(), stem=stem, grid_size=7)
    X = smooth_points(model, 3).requires_grad_()
    acquisition = FeatureNIPV(model, mc_points=torch.rand(6, D).double())
    assert torch.autograd.gradcheck(lambda x: model.posterior(x).mean, X)
    assert torch.autograd.gradcheck(lambda x: acquisition(x.unsqueeze(0)), X)


@pytest.mark.filterwarnings("ignore:A not p.d.")  # where a search brings two points together
def test_the_best_raw_inputs_are_found_through_a_stem(stem: Stem) -> None:
    data = observations(20, D)
    model = WISKI(*data.astuple(), stem=stem, grid_size=9)
    bounds = torch.tensor([[0.0] * D, [1.0] * D]).double()
    acquisition = qLogExpectedImprovement(
        model,
        data.Y.max() - 0.5,
        SobolQMCNormalSampler(torch.Size([32]), seed=0),
        X_pending=data.X[:2],
    )
    others = torch.rand(50, 2, D).double()
    others[..., 1] = 0.5
    values = acquisition(others).detach()
    X, value = optimize_acqf(
        acquisition,
        bounds,
        2,
        num_restarts=2,
        batch_initial_conditions=others[values.topk(2).indices],
        fixed_features={1: 0.5},
    )
    assert X.shape == (2, D)
    assert bool((X[:, 1] == 0.5).all() & (X >= 0.0).all() & (X <= 1.0).all())
    assert value >= values.max()


def test_a_fit_learns_hyperparameters_and_leaves_the_stem() -> None:
    data, stem = observations(30, D), LinearStem(D, 2)
    model = WISKI(*data.astuple(), stem=stem, grid_size=9)
    before, likelihood = stem.weight.detach().clone(), model.log_marginal_likelihood().item()
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    assert model.eval().log_marginal_likelihood().item() > likelihood
    assert torch.equal(stem.weight, before)


@pytest.mark.parametrize("k", [0, 4, 1.5])
def test_too_many_coordinates(k: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"k from 1 to 3 of 5 inputs, .* got {k}"):
        LinearStem(D, k)
    with pytest.raises(UnsupportedError, match="k from 1 to 2 of 2 inputs"):
        RandomProjection(2, 3, seed=0)


def test_bad_widths() -> None:
    for hidden in (0, [4, 0], []):
        with pytest.raises(ValueError, match="hidden widths of at least 1"):
            MLPStem(D, hidden, 2)


def test_a_stem_must_fit_the_inputs() -> None:
    data = observations(6, 3)
    with pytest.raises(
        BotorchTensorDimensionError, match=r"the 3 \(transformed\) inputs of train_X"
    ):
        WISKI(*data.astuple(), stem=LinearStem(D, 2))
    with pytest.raises(ValueError, match="no bounds with a stem"):
        WISKI(*data.astuple(), stem=LinearStem(3, 2), bounds=torch.rand(2, 2).sort(0)[0])
    with pytest.raises(InputDataError, match="at least 2 points to calibrate"):
        WISKI(*data[:1].astuple(), stem=LinearStem(3, 2))
    prior = WISKI(*data[:0].astuple(), stem=LinearStem(3, 2).calibrate(data.X))
    assert prior.posterior(data.X).mean.shape == (6, 1)


class Runaway(LinearStem):
    """Leaves the unit cube."""

    def forward(self, X: Tensor) -> Tensor:
        return 3.0 * super().forward(X)


def test_a_stem_that_leaves_the_grid_is_refused() -> None:
    data = observations(8, D)
    with pytest.raises(InputDataError, match="project into the unit cube"):
        WISKI(*data.astuple(), stem=Runaway(D, 2))


def test_a_stem_that_leaves_the_grid_later_changes_nothing() -> None:
    data = observations(8, D)
    model = WISKI(*data.astuple(), stem=OpenStem(D))
    before = fingerprint(model)
    with pytest.raises(InputDataError, match=r"project into the unit cube.*End it with a sigmoid"):
        model.update(data.X + 5.0, data.Y)
    assert_untouched(model, before)


@pytest.mark.parametrize("stem", [torch.nn.Linear(D, 2), "linear", LinearStem])
def test_what_is_no_stem_is_refused(stem: Any) -> None:
    data = observations(8, D)
    with pytest.raises(UnsupportedError, match=r"Expected stem to be a LinearStem, .* got"):
        WISKI(*data.astuple(), stem=stem)
    with pytest.raises(UnsupportedError, match=r"Expected stem to be a LinearStem, .* got"):
        DirichletWISKI(data.X, torch.zeros(8), stem=stem)


def test_what_a_stem_forbids() -> None:
    data = observations(8, D)
    model, other = (WISKI(*data.astuple(), stem=LinearStem(D, 2, seed=i)) for i in range(2))
    with pytest.raises(UnsupportedError, match="different stem"):
        model.merge(other)
    with pytest.raises(UnsupportedError, match="the image of a box of bounds is no box"):
        FeatureNIPV(model, bounds=torch.tensor([[0.0] * D, [1.0] * D]))


def test_many_inputs_without_a_stem_name_it() -> None:
    with pytest.raises(UnsupportedError, match=r"stem=LinearStem\(d=5, k=2\)"):
        WISKI(*observations(6, D).astuple())
