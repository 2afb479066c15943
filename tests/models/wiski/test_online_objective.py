"""Hyperparameters followed in fixed features, against the model's own likelihood and posterior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from gpytorch.kernels import Kernel, PeriodicKernel, RBFKernel, ScaleKernel
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.nn import Parameter

from bo_stream import WISKI, learning
from bo_stream.bases.grid.contraction import prior_covariance
from bo_stream.bases.grid.kernel import kernel_factors
from bo_stream.bases.kernels import LinearStem, ProductMatern
from bo_stream.learning import LEFT_OUT, OnlineObjective
from bo_stream.marginal_likelihood import subspace_log_marginal_likelihood, subspace_posterior
from bo_stream.models.wiski.cache import FEW_FEATURES, WHITENED_ROWS
from bo_stream.testing.streams import assert_close
from tests.support.problems import Observations, observations

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")

KERNELS: dict[str, Callable[[], Kernel]] = {
    "RBF": lambda: RBFKernel(ard_num_dims=2),
    "scaled Matern": lambda: ScaleKernel(ProductMatern(nu=1.5, ard_num_dims=2)),
    "periodic": lambda: PeriodicKernel(ard_num_dims=2),
    "additive": lambda: (
        ScaleKernel(ProductMatern(nu=1.5, active_dims=(1,)))
        + ScaleKernel(RBFKernel(active_dims=(0, 1)))
    ),
}


def model_of(
    kernel: str = "scaled Matern", noise: str = "learned", outputs: int = 1, n: int = 40
) -> WISKI:
    return model_from(observations(n, 2, outputs).with_noise(noise), kernel)


def model_from(data: Observations, kernel: str = "scaled Matern") -> WISKI:
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    model = WISKI(
        *data.astuple(), covar_module=KERNELS[kernel](), grid_size=8, tolerance=0.0, bounds=bounds
    )
    return model.eval()


def value_and_gradient(model: WISKI, value: Tensor) -> list[Tensor]:
    parameters = list(model.parameters())
    return [value.sum(), *torch.autograd.grad(value.sum(), parameters, allow_unused=True)]


def move(model: WISKI, log_step: float) -> None:
    """All positive hyperparameters, together."""
    with torch.no_grad():
        for _, parameter, constraint in model.named_parameters_and_constraints():
            if constraint is not None:
                actual = constraint.transform(parameter) * torch.tensor(log_step).exp()
                parameter.copy_(constraint.inverse_transform(actual))


def assert_follows(model: WISKI, factor: float = 1e3) -> None:
    followed = value_and_gradient(
        model, OnlineObjective(model, left_out=0.0).log_marginal_likelihood()
    )
    expected = value_and_gradient(model, model.log_marginal_likelihood())
    for actual, wanted in zip(followed, expected, strict=True):
        assert_close(actual, wanted, factor=factor)


@pytest.mark.parametrize("kernel", list(KERNELS))
@pytest.mark.parametrize("noise", ["learned", "known", "mixed"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_likelihood_and_gradient_are_the_models(kernel: str, noise: str, outputs: int) -> None:
    model = model_of(kernel, noise, outputs)
    assert_follows(model)
    model.update(*observations(5, 2, outputs).with_noise(noise).astuple())
    assert_follows(model)


@pytest.mark.parametrize("kernel", ["RBF", "scaled Matern", "additive"])
@pytest.mark.parametrize("most", [0, FEW_FEATURES])
def test_a_kernel_that_moved_is_another_prior_in_the_same_features(
    kernel: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "FEW_FEATURES", most)
    model = model_of(kernel)
    OnlineObjective(model, left_out=0.0)
    before = model._cache.subspace
    move(model, 0.2)
    assert_follows(model, factor=1e5)
    assert model._cache.subspace is before


def test_features_are_chosen_anew_when_too_much_lies_outside() -> None:
    model = model_of(n=200)
    OnlineObjective(model)
    before = model._cache.subspace
    move(model, -0.01)
    OnlineObjective(model)
    assert model._cache.subspace is before
    move(model, -1.0)
    OnlineObjective(model)
    assert before is not None
    assert model._cache.subspace is not None
    assert model._cache.subspace.basis.rank > before.basis.rank


def test_few_features_lose_little() -> None:
    """With more noise than the outcomes have: they surprise the model no more than it expects."""
    data = observations(300, 2)
    model = WISKI(*data.astuple(), grid_size=16).eval()
    model.likelihood.noise = 0.05
    more = observations(20, 2)
    follower = OnlineObjective(model)
    assert model._cache.subspace is not None
    assert model._cache.subspace.basis.rank < 0.6 * model.rank
    exact = OnlineObjective(_copy_without_subspace(model), left_out=0.0)
    short = exact.log_density(*more.astuple()) - follower.log_density(*more.astuple())
    assert abs(short) < 2 * LEFT_OUT * 20
    lost = exact.log_marginal_likelihood() - follower.log_marginal_likelihood()
    assert abs(lost) < 2 * LEFT_OUT * 300


def _copy_without_subspace(model: WISKI) -> WISKI:
    copy = model._shallow_copy()
    copy._cache = replace(copy._cache, subspace=None)
    return copy


@pytest.mark.parametrize("verb", ["update", "retract", "merge", "forget", "refine", "clear"])
@pytest.mark.parametrize("most", [0, FEW_FEATURES])
def test_whatever_changes_the_memory_is_followed(
    verb: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "FEW_FEATURES", most)
    data, more = observations(40, 2), observations(6, 2)
    model = model_from(data)
    follower = OnlineObjective(model, left_out=0.0)
    changes: dict[str, Callable[[], object]] = {
        "update": lambda: model.update(*observations(WHITENED_ROWS + 1, 2).astuple()),
        "retract": lambda: model.retract(*data[:6].astuple()),
        "merge": lambda: model.merge(model_of(n=7)),
        "forget": lambda: model.forget(0.5),
        "refine": lambda: model.refine(10),
        "clear": model.clear,
    }
    changes[verb]()
    assert_close(follower.log_marginal_likelihood(), model.log_marginal_likelihood(), factor=1e3)
    joint = model.posterior(more.X, observation_noise=True).distribution
    assert_close(follower.log_density(*more.astuple()), joint.log_prob(more.Y.squeeze(-1)), 1e3)


def dense_values(model: WISKI, more: Observations) -> tuple[Tensor, Tensor]:
    """Log density and log marginal likelihood with the prior covariance in full, by one LU factor.

    ``Cov[w] = P − P K P`` and ``E[w] = P u``.
    """
    assert model._cache is not None
    subspace = model._cache.subspace
    assert subspace is not None
    kernel = kernel_factors(model.covar_module, model._process_dim)
    kernel = kernel.for_single_output() if model.num_outputs == 1 else kernel
    P, groups = prior_covariance(subspace.basis, kernel), model.prior.noise_groups(subspace.memory)
    likelihood = subspace_log_marginal_likelihood(groups, model.prior.target_map(), P)
    outcomes, noise = model.standardized(*more.astuple())
    with torch.no_grad():
        posterior = subspace_posterior(model.prior.evidence_of(groups), P)
    prior = P.detach()
    z = subspace.basis.features(model.hypothetical_inputs(more.X))
    mean = (z @ prior @ posterior.u).squeeze(-1) + model.prior.mean.unsqueeze(-1).detach()
    covariance = z @ (prior - prior @ posterior.K @ prior) @ z.mT
    normal = MultivariateNormal(mean, covariance + torch.diag_embed(noise.detach()))
    units = outcomes.shape[-1] * model.outcome_scale().log().sum()
    return normal.log_prob(outcomes).sum() - units, likelihood.sum()


@pytest.mark.matrix
@pytest.mark.parametrize("kernel", list(KERNELS))
@pytest.mark.parametrize("noise", ["learned", "known", "mixed"])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("most", [0, FEW_FEATURES])
def test_values_and_gradients_are_those_of_the_dense_prior(
    kernel: str, noise: str, outputs: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a move of the kernel, and again after a small update, through a stem."""
    monkeypatch.setattr(learning, "FEW_FEATURES", most)
    data, more = (observations(n, 4, outputs).with_noise(noise) for n in (40, 5))
    stem = LinearStem(4, 2)
    model = WISKI(*data.astuple(), covar_module=KERNELS[kernel](), grid_size=8, stem=stem).eval()
    OnlineObjective(model)
    move(model, 0.05)
    follower = OnlineObjective(model)
    for is_updated in (False, True):
        if is_updated:
            model.update(*more.astuple())
            assert model._cache is not None
            followed = model._cache.followed
            assert most > 0 or (followed is not None and followed.downdate.shape[-1] == 5)
        own = follower.log_density(*more.astuple()), follower.log_marginal_likelihood().sum()
        dense = dense_values(model, more)
        parameters = list(stem.parameters()), list(hyperparameters(model))
        for actual, expected, learned in zip(own, dense, parameters, strict=True):
            same(actual, expected)
            pairs = (
                torch.autograd.grad(value, learned, allow_unused=True, retain_graph=True)
                for value in (actual, expected)
            )
            for a, e in zip(*pairs, strict=True):
                assert (a is None) == (e is None)
                if a is not None:
                    same(a, e)


@pytest.mark.parametrize("kernel", list(KERNELS))
@pytest.mark.parametrize("log_step", [0.0, 1.0, 2.0])
def test_a_kernel_that_moved_far_is_whitened(
    kernel: str, log_step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its smallest eigenvalues, and those that are zero of a periodic one, are rounding errors."""
    monkeypatch.setattr(learning, "FEW_FEATURES", 0)
    model, more = model_of(kernel, "mixed"), observations(5, 2).with_noise("mixed")
    OnlineObjective(model, left_out=0.0)
    move(model, log_step)
    model.likelihood.noise = 0.01
    own = OnlineObjective(model, left_out=0.0)
    density, likelihood = dense_values(model, more)
    same(own.log_density(*more.astuple()), density)
    followed = value_and_gradient(model, own.log_marginal_likelihood())
    for actual, expected in zip(followed, value_and_gradient(model, likelihood), strict=True):
        same(actual, expected)


def hyperparameters(model: WISKI) -> list[Parameter]:
    own = {id(parameter) for parameter in model.stem.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in own]


def same(actual: Tensor, expected: Tensor) -> None:
    size = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-9 * size)


def test_what_is_solved_is_of_the_present_hyperparameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update at others, which are then taken back, is not a change of low rank."""
    monkeypatch.setattr(learning, "FEW_FEATURES", 0)
    model, more = model_of(), observations(5, 2)
    noise = model.likelihood.noise.item()
    OnlineObjective(model).log_marginal_likelihood()
    model.likelihood.noise = 3.0 * noise
    model.update(*more.astuple())
    model.likelihood.noise = noise
    own = OnlineObjective(model)
    same(own.log_marginal_likelihood().sum(), dense_values(model, more)[1])
    same(own.log_density(*more.astuple()), dense_values(model, more)[0])
