"""Functions drawn from every model's posterior: their law, and that each is one function."""

from __future__ import annotations

import copy
import pickle
from itertools import groupby

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import AdditiveKernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

from bo_stream import OSGPR, AutoGP, ClusteredGP, LocalGP
from bo_stream.acquisition import SamplePaths, mean_path, sample_paths
from bo_stream.bases import spectral
from bo_stream.models.base import StreamingGP
from bo_stream.testing.streams import (
    ExampleData,
    assert_close,
    assert_gradient,
    gaussian,
    joint_covariance,
)
from tests.laws.cases import STREAMS
from tests.laws.registry import Stream, condition_on, shared_out
from tests.support.moments import assert_moments

pytestmark = pytest.mark.filterwarnings("ignore:The kernel.s lengthscale is too short for the grid")

DRAWS = 3000

AS_THEY_ARE = [
    stream
    for stream in STREAMS
    if not any(word in stream.case.name for word in ("LocalGP", "log", "power"))
]
ONE_EACH = [next(group) for _, group in groupby(AS_THEY_ARE, lambda s: s.case.name)]
WHOLE = ("OSGPR", "OSVGP, Gaussian", "ClusteredGP", "DecoupledGP", "WISKI, linear stem")
MORE = [s for s in AS_THEY_ARE if s.case.name in WHOLE and s not in ONE_EACH]
FUNCTIONS = [
    next(stream for stream in ONE_EACH if stream.case.name == name)
    for name in (*WHOLE, "QSGP, inducing points", "OSGPR, scaled Matérn")
]


@pytest.fixture(autouse=True)
def _few_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """The moments over draws are exact whatever the number of cosines in each."""
    monkeypatch.setattr(spectral, "FEATURES", 32)


def assert_drawn_from(model: StreamingGP, X: Tensor) -> None:
    """Means, and covariances of all points and outputs jointly, by their standard errors."""
    posterior = gaussian(model.posterior(X))
    draws = sample_paths(model, DRAWS, seed=1)(X).double()
    assert draws.shape == (DRAWS, *posterior.mean.shape)
    own = joint_covariance(posterior).detach().double().unbind(-3)
    *batch, q, m = posterior.mean.shape
    covariance = torch.zeros(*batch, m, q, m, q, dtype=torch.float64)
    for i, block in enumerate(own):
        covariance[..., i, :, i, :] = block
    mean = posterior.mean.detach().double().mT.flatten(-2)
    assert_moments(draws.mT.flatten(-2), mean, covariance.flatten(-2).flatten(-3, -2))


class TestLaw:
    @pytest.mark.parametrize("stream", shared_out([*ONE_EACH, *MORE]))
    def test_is_the_posterior(self, stream: Stream) -> None:
        assert_drawn_from(stream.model(stream.data(25)), stream.points)

    @pytest.mark.parametrize("stream", shared_out(ONE_EACH))
    def test_is_the_posterior_given_hypothetical_observations(self, stream: Stream) -> None:
        model = stream.model(stream.data(25))
        for _ in range(2):
            model = condition_on(model, stream.data(2))
        assert_drawn_from(model, stream.points)

    def test_of_some_outputs(self) -> None:
        stream = next(s for s in MORE if s.setting.outputs == 2)
        model = condition_on(stream.model(stream.data(25)), stream.data(2))
        assert_drawn_from(model.subset_output([1]), stream.points)

    def test_is_the_prior_before_any_data(self) -> None:
        X = torch.rand(3, 2).double()
        assert_drawn_from(OSGPR(X[:0], X[:0, :1], covar_module=RBFKernel()).eval(), X)
        assert_drawn_from(ClusteredGP(X[:0], X[:0, :1], resolution=0.1).eval(), X)
        assert_drawn_from(AutoGP(X[:0], X[:0, :1]), X)

    def test_of_the_mean_before_any_data_is_flat(self) -> None:
        X = torch.rand(3, 2).double()
        for model in (AutoGP(X, X[:, :1]).clear(), OSGPR(X, X[:, :1]).clear()):
            inputs = X.clone().requires_grad_()
            values = mean_path(model)(inputs)
            (gradient,) = torch.autograd.grad(values.sum(), inputs)
            assert torch.equal(values, values[:1].expand(3, 1))
            assert torch.equal(gradient, torch.zeros_like(X))

    def test_of_a_sum_of_kernels(self) -> None:
        X, Y = torch.rand(20, 2).double(), torch.rand(20, 1).double()
        parts = [ScaleKernel(MaternKernel(2.5, active_dims=(i,))) for i in range(2)]
        model = OSGPR(X, Y, covar_module=ScaleKernel(AdditiveKernel(*parts)))
        assert_drawn_from(model.eval(), torch.rand(5, 2).double())


def assert_is_one_function_each(paths: SamplePaths, X: Tensor) -> None:
    """Three have the same values in every company, at every call, alone and in a batch."""
    together = paths(X)
    assert torch.equal(paths(X), together)
    assert_close(paths(X[2:3]), together[:, 2:3], 10.0)
    assert_close(paths(X.expand(4, 1, 5, 2)), together.expand(4, *together.shape), 10.0)
    assert_close(paths(torch.stack((X, X.flip(0), X)))[1], together[1].flip(0), 10.0)
    for i in range(3):
        assert_close(paths.path(i)(X), together[i], 10.0)
    assert_close(paths.path(slice(1, 3))(X), together[1:], 10.0)
    for copied in (copy.deepcopy(paths), pickle.loads(pickle.dumps(paths))):
        assert torch.equal(copied(X), together)


@torch.no_grad()
def change(model: StreamingGP, more: ExampleData) -> None:
    """Give a model other observations, hyperparameters and modes."""
    model.update(more.X, more.Y, more.Yvar)
    for parameter in model.parameters():
        parameter.add_(0.1)
    model.train().eval()


class TestFunction:
    @pytest.mark.parametrize("stream", FUNCTIONS, ids=str)
    def test_is_one(self, stream: Stream) -> None:
        """The same values in every company, at every call, alone and in a batch."""
        paths, X = sample_paths(stream.model(stream.data(25)), 3, seed=1), torch.rand(5, 2).double()
        assert_is_one_function_each(paths, X)

    @pytest.mark.parametrize("stream", FUNCTIONS, ids=str)
    def test_gradient_is_that_of_differences(self, stream: Stream) -> None:
        paths = sample_paths(stream.model(stream.data(25)), 2, seed=1)
        assert_gradient(lambda X: paths(X).sin().sum(), torch.rand(3, 2).double())

    @pytest.mark.parametrize("stream", FUNCTIONS, ids=str)
    def test_outlives_changes_of_its_model(self, stream: Stream) -> None:
        model, X = stream.model(stream.data(25)), stream.points
        paths = sample_paths(model, 2, seed=1)
        before, more = paths(X), stream.data(10)
        assert torch.equal(sample_paths(model, 2, seed=1)(X), before)
        assert not torch.equal(sample_paths(model, 2, seed=2)(X), before)
        change(model, more)
        assert torch.equal(paths(X), before)

    @pytest.mark.parametrize("stream", FUNCTIONS, ids=str)
    def test_mean(self, stream: Stream) -> None:
        model, X = stream.model(stream.data(25)), stream.points
        conditioned = condition_on(model, stream.data(2))
        for each in (model, conditioned):
            paths = mean_path(each)
            assert paths.batch_shape == each.batch_shape
            assert_close(paths(X), each.posterior(X).mean.detach())

    @pytest.mark.parametrize("stream", shared_out(ONE_EACH))
    def test_of_fantasies(self, stream: Stream) -> None:
        """Each of its own, of fantasies of fantasies too."""
        model, T = stream.model(stream.data(25)), stream.points
        X = torch.rand(3, *stream.setting.batch_shape, 1, 2).to(T)
        fantasies = model.fantasize(X, stream.sampler(4))
        for given in (fantasies, fantasies.fantasize(X, stream.sampler(2))):
            mean, expected = mean_path(given), given.posterior(T)
            assert mean.batch_shape == given.batch_shape
            assert_close(mean(T), expected.mean.detach(), 10.0)
            paths = sample_paths(given, 500, seed=1)
            assert paths.batch_shape == (500, *given.batch_shape)
            error = (paths(T).mean(0) - expected.mean).abs()
            assert bool((error <= 6.0 * (expected.variance / 500).sqrt() + 1e-6).all())
            one = sample_paths(given, 4, seed=1)  # as many draws as fantasies
            assert one.path(0)(T).shape == expected.mean.shape


class TestRefusals:
    def test_local_models(self) -> None:
        X = torch.rand(9, 2).double()
        with pytest.raises(UnsupportedError, match="LocalGP has no functions to draw"):
            sample_paths(LocalGP(X, X[:, :1]), 1)

    def test_kernel(self) -> None:
        X = torch.rand(9, 2).double()
        with pytest.raises(UnsupportedError, match="LinearKernel: its spectral measure"):
            sample_paths(OSGPR(X, X[:, :1], covar_module=LinearKernel()), 1)
