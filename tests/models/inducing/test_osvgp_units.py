"""Standardised outcomes under a likelihood: the model of outcomes that a user standardises."""

from __future__ import annotations

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.outcome import Standardize
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.likelihoods import GaussianLikelihood, LaplaceLikelihood, StudentTLikelihood
from gpytorch.mlls import VariationalELBO
from torch import Tensor

from bo_stream import OSGPR, OSVGP
from bo_stream.models.fitting import relearn
from bo_stream.testing.streams import assert_close
from tests.support.problems.likelihoods import LIKELIHOODS, outcomes

REAL = ("gaussian", "laplace", "student")
OFFSET, SCALE = 300.0, 40.0


class Pair:
    """A model of outcomes in some unit, and one of the same outcomes as the first has them."""

    def __init__(self, name: str, n: int = 40, **options: object) -> None:
        self.X = torch.rand(n, 3, dtype=torch.float64)
        self.Y = OFFSET + SCALE * outcomes(name, self.X)
        self.mean, self.sd = self.Y.mean(), self.Y.std()
        Z = self.X[:12]
        transform = Standardize(m=1)
        self.model = OSVGP(
            self.X,
            self.Y,
            LIKELIHOODS[name](),
            outcome_transform=transform,
            inducing_points=Z,
            **options,  # type: ignore[arg-type]
        )
        self.plain = OSVGP(
            self.X,
            self.own(self.Y),
            LIKELIHOODS[name](),
            inducing_points=Z,
            **options,  # type: ignore[arg-type]
        )

    def own(self, Y: Tensor) -> Tensor:
        return (Y - self.mean) / self.sd

    def assert_same(self) -> None:
        test = torch.rand(9, 3, dtype=torch.float64)
        got, expected = self.model.posterior(test), self.plain.posterior(test)
        assert_close(got.mean, self.mean + self.sd * expected.mean)
        assert_close(got.variance, self.sd.square() * expected.variance)
        assert_close(self.model.log_marginal_likelihood(), self.plain.log_marginal_likelihood())


@pytest.mark.parametrize("name", REAL)
def test_posteriors_in_a_stream(name: str) -> None:
    pair = Pair(name, hyper_steps=3)
    pair.assert_same()
    X = torch.rand(15, 3, dtype=torch.float64)
    Y = OFFSET + SCALE * outcomes(name, X)
    pair.model.update(X, Y)
    pair.plain.update(X, pair.own(Y))
    pair.assert_same()
    for model in (pair.model, pair.plain):
        model.forget(0.9)
        relearn(model)
    pair.assert_same()


@pytest.mark.parametrize("name", REAL)
def test_predictions_of_outcomes(name: str) -> None:
    pair = Pair(name)
    test = torch.rand(9, 3, dtype=torch.float64)
    got, expected = pair.model.predictive(test), pair.plain.predictive(test)
    assert_close(got.mean, pair.mean + pair.sd * expected.mean)
    assert_close(got.variance, pair.sd.square() * expected.variance)
    Y = OFFSET + SCALE * outcomes(name, test)
    density = pair.plain.log_predictive(test, pair.own(Y)) - pair.sd.log()
    assert_close(pair.model.log_predictive(test, Y), density)


@pytest.mark.parametrize("name", REAL)
def test_conditioning_and_fantasies(name: str) -> None:
    pair = Pair(name)
    test, X = torch.rand(9, 3, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64)
    Y = OFFSET + SCALE * outcomes(name, X)
    got = pair.model.condition_on_observations(X, Y).posterior(test).mean
    expected = pair.plain.condition_on_observations(X, pair.own(Y)).posterior(test).mean
    assert_close(got, pair.mean + pair.sd * expected)
    fantasies = [
        model.fantasize(X, SobolQMCNormalSampler(torch.Size([4]), seed=2)).posterior(test).mean
        for model in (pair.model, pair.plain)
    ]
    assert_close(fantasies[0], pair.mean + pair.sd * fantasies[1])


def test_with_gaussian_noise_it_is_osgpr() -> None:
    X = torch.rand(30, 2, dtype=torch.float64)
    Y = OFFSET + SCALE * (4.0 * X.sum(-1, keepdim=True)).sin()
    theirs = OSGPR(X, Y, inducing_points=X[:10], window=0)
    ours = OSVGP(
        X,
        Y,
        covar_module=theirs.covar_module,
        outcome_transform=Standardize(m=1),
        inducing_points=X[:10],
    )
    more = torch.rand(5, 2, dtype=torch.float64)
    for model in (ours, theirs):
        model.update(more, OFFSET + SCALE * more[:, :1]).retract(X[:3], Y[:3])
    test = torch.rand(9, 2, dtype=torch.float64)
    got, expected = ours.posterior(test), theirs.posterior(test)
    assert_close(got.mean, expected.mean)
    assert_close(got.variance, expected.variance)
    assert_close(ours.standardized(X, Y)[0], theirs.standardized(X, Y)[0])


def test_merge_needs_the_same_units() -> None:
    X = torch.rand(30, 2, dtype=torch.float64)
    first, second, other = (
        OSVGP(X, Y, StudentTLikelihood(), outcome_transform=Standardize(m=1), inducing_points=X)
        for Y in (X[:, :1], X[:, :1], 5.0 * X[:, :1])
    )
    assert first.merge(second).num_observations == 60
    with pytest.raises(UnsupportedError, match="standardised alike"):
        first.merge(other)
    assert first.num_observations == 60


def test_each_output_has_its_own() -> None:
    X = torch.rand(30, 2, dtype=torch.float64)
    Y = torch.cat((X[:, :1], OFFSET + SCALE * X[:, 1:]), -1)
    likelihood = LaplaceLikelihood(batch_shape=torch.Size([2]))
    model = OSVGP(X, Y, likelihood, outcome_transform=Standardize(m=2), inducing_points=X[:15])
    alone = model.subset_output([1])
    assert_close(alone.posterior(X).mean, model.posterior(X).mean[:, 1:])
    assert_close(alone.predictive(X).mean, model.predictive(X).mean[:, 1:])
    assert float((model.posterior(X).mean - Y).abs()[:, 1].max()) < SCALE


def test_a_fit_keeps_the_units() -> None:
    pair = Pair("gaussian")
    before = pair.model.posterior(pair.X).mean
    mll = VariationalELBO(pair.model.likelihood, pair.model, num_data=1)
    mll.train()
    mll.eval()
    assert torch.equal(pair.model.posterior(pair.X).mean, before)


def test_without_first_outcomes_they_stay_as_they_are() -> None:
    empty = torch.empty(0, 1, dtype=torch.float64)
    X = torch.rand(20, 1, dtype=torch.float64)
    models = [
        OSVGP(empty, empty, GaussianLikelihood().double(), outcome_transform=transform)
        for transform in (Standardize(m=1), None)
    ]
    means = [model.update(X, 3.0 * X).posterior(X).mean for model in models]
    assert_close(means[0], means[1])
