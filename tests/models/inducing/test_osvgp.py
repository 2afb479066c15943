"""O-SVGP against O-SGPR, dense optima and the papers' bound; other likelihoods; bad input."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms.input import Normalize
from botorch.models.transforms.outcome import Log, Standardize
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    BetaLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    MultitaskGaussianLikelihood,
    NegativeBinomialLikelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
)
from gpytorch.mlls import VariationalELBO
from gpytorch.priors import GammaPrior, LogNormalPrior
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from benchmarks.peers.svgp_peer import batch_accuracy
from bo_stream import OSGPR, OSVGP, ProjectionWarning
from bo_stream.allocation import OIPS
from bo_stream.allocation.oips import NOVEL
from bo_stream.bases.inducing import InducingBasis
from bo_stream.models.fitting import learn_hyperparameters, total_loss
from bo_stream.models.inducing.inference import basis_of_independent
from bo_stream.models.inducing.sites import OnlineUpdate
from bo_stream.models.inference import Hyperparameters
from bo_stream.testing.streams import (
    GRADIENT_TOLERANCE,
    assert_close,
    assert_gradient,
    assert_same_posterior,
    assert_untouched,
    fingerprint,
)
from tests.oracles.inducing import SGPR
from tests.oracles.likelihoods import Normal, log_probs, uncollapsed_bound, variational_optimum
from tests.support.problems.likelihoods import CONCAVE, LIKELIHOODS, OTHERS, outcomes

D = 3


def data(name: str, n: int = 60) -> tuple[Tensor, Tensor]:
    X = torch.rand(n, D, dtype=torch.float64)
    return X, outcomes(name, X)


def kernel() -> ScaleKernel:
    chosen = ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=D)).double()
    chosen.outputscale = 2.0
    chosen.base_kernel.lengthscale = torch.tensor([[0.4, 0.6, 1.5]])
    return chosen


def small(name: str, X: Tensor, Y: Tensor, **options: Any) -> OSVGP:
    """A model with points that stay and a constant mean of 0.3, which has seen its data so."""
    model = OSVGP(X[:0], Y[:0], LIKELIHOODS[name](), **{"covar_module": kernel(), **options})
    with torch.no_grad():
        model.mean_module.constant.fill_(0.3)
    return model.eval().update(X, Y)


def points(n: int = 12) -> Tensor:
    return torch.quasirandom.SobolEngine(D).draw(n, dtype=torch.float64)


# --- a Gaussian likelihood ----------------------------------------------------------------------


@pytest.mark.parametrize("batches", [(30,), (10, 1, 19), tuple([1] * 30)])
def test_a_gaussian_likelihood_is_osgpr(batches: tuple[int, ...]) -> None:
    X, Y = data("gaussian", 30)
    model = small("gaussian", X[:0], Y[:0], inducing_points=points())
    options = {"inducing_points": points(), "outcome_transform": None, "window": 0}
    peer = OSGPR(X[:0], Y[:0], covar_module=kernel(), **options)
    with torch.no_grad():
        peer.mean_module.constant.fill_(0.3)
        peer.likelihood.noise = 0.5
    for rows in zip(X.split(list(batches)), Y.split(list(batches)), strict=True):
        model.update(*rows)
        peer.update(*rows)
    T = torch.rand(7, D, dtype=torch.float64)
    assert_same_posterior(model, peer.eval(), T)
    assert_close(model.elbo(), peer.elbo())
    with torch.no_grad():
        K, cross, inner = (kernel()(a, b).to_dense() for a, b in _pairs(X, points()))
        oracle = SGPR(K, cross, inner, Y.squeeze(-1) - 0.3, torch.full((30,), 0.5).double())
        assert_close(model.elbo(), oracle.bound())
        assert_close(model.elbo(), small("gaussian", X, Y, inducing_points=points()).elbo())


def _pairs(X: Tensor, Z: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    return (X, X), (X, Z), (Z, Z)


def test_a_gaussian_likelihood_can_be_retracted() -> None:
    X, Y = data("gaussian")
    model = small("gaussian", X[:40], Y[:40], inducing_points=points())
    before = copy.deepcopy(model)
    model.update(X[40:], Y[40:]).retract(X[40:], Y[40:])
    assert_same_posterior(model, before, X[:5])
    assert_close(model.elbo(), before.elbo())


def test_beta_counts_a_gaussian_outcome_several_times() -> None:
    X, Y = data("gaussian")
    tempered = small("gaussian", X, Y, inducing_points=points(), beta=0.25)
    plain = small("gaussian", X[:0], Y[:0], inducing_points=points())
    for _ in range(4):
        plain.update(X, Y)
    assert_same_posterior(tempered, plain, X[:5])
    more = X[:3] + 0.02
    assert_same_posterior(
        tempered.condition_on_observations(more, Y[:3]),
        plain.condition_on_observations(*(t.repeat(4, 1) for t in (more, Y[:3]))),
        X[:5],
    )
    assert tempered.num_observations == 60


# --- the bound ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONCAVE)
@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_the_online_bound_is_the_papers(name: str, beta: float) -> None:
    """After the points and the kernel have moved, and at the best q that there is."""
    X, Y = data(name, 30)
    old_Z, Z = points(8), points(19)[8:]
    options = {"beta": beta, "natural_steps": 200}
    model = small(name, X[:20], Y[:20], inducing_points=old_Z, **options)
    before = copy.deepcopy(model)
    old_kernel = before.covar_module
    with torch.no_grad():
        model.covar_module.outputscale *= 1.3
        model.covar_module.base_kernel.lengthscale *= 0.8
    model._set_memory(model._memory.in_basis(basis_of_independent(model.covar_module, Z, 1)))
    model.update(X[20:], Y[20:])
    with torch.no_grad():
        expected = uncollapsed_bound(
            at_points(model, Z),
            at_points(before, old_Z),
            log_probs(name, Y[20:, 0]),
            X[20:],
            Z,
            old_Z,
            lambda a, b: model.covar_module(a, b).to_dense(),
            lambda a, b: old_kernel(a, b).to_dense(),
            0.3,
            beta,
        )
        found = beta * (model.elbo() - before.elbo())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-5)


def at_points(model: OSVGP, Z: Tensor) -> Normal:
    distribution = model.posterior(Z).distribution
    return Normal(distribution.mean, distribution.covariance_matrix)


@pytest.mark.parametrize("name", CONCAVE)
def test_points_at_the_data_are_the_best_normal_there_is(name: str) -> None:
    X, Y = data(name, 15)
    model = small(name, X, Y, inducing_points=X, natural_steps=200)
    with torch.no_grad():
        K = kernel()(X).to_dense()
    mean, covariance, bound = variational_optimum(
        torch.full((15,), 0.3).double(), K, log_probs(name, Y[:, 0])
    )
    found = at_points(model, X)
    error = 1e-2 if name == "laplace" else 1e-4  # the oracle's slopes
    torch.testing.assert_close(model.elbo().detach(), bound, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.mean, mean, rtol=0.0, atol=error)
    torch.testing.assert_close(found.covariance, covariance, rtol=0.0, atol=error)


@pytest.mark.parametrize("name", ["bernoulli", "laplace", "poisson"])
def test_a_stream_is_nearly_its_batch(name: str) -> None:
    """Old sites stay where they were found: a small difference in bound and posterior.

    Of six draws of labels the worst has means 0.12 standard deviations apart and variances by a
    factor of 1.13 on average, the others means 0.03 and factors of 1.04 to 1.08. The limits are
    twice the worst.
    """
    X, Y = data(name)
    options = {"inducing_points": points(20), "natural_steps": 200}
    batch = small(name, X, Y, **options)
    stream = small(name, X[:0], Y[:0], **options)
    for rows in zip(X.split(10), Y.split(10), strict=True):
        stream.update(*rows)
    T = torch.rand(200, D, dtype=torch.float64)
    a, b = (m.posterior(T) for m in (batch, stream))
    gap = ((a.mean - b.mean) / a.variance.sqrt()).abs()
    assert 1e-6 < float(gap.max()) < 0.65
    assert float(gap.mean()) < 0.25
    assert float((a.variance / b.variance).log().abs().mean()) < 0.25
    assert abs(float((batch.elbo() - stream.elbo()).detach())) < 0.01 * 60


@pytest.mark.parametrize("name", OTHERS)
def test_the_bounds_gradient_from_memory(name: str) -> None:
    X, Y = data(name, 20)
    model = small(name, X, Y, inducing_points=points(7))
    with torch.no_grad():
        for parameter in (model.covar_module.raw_outputscale, model.mean_module.raw_constant):
            parameter.add_(0.3)
    model.elbo().backward()
    for parameter in (*model.covar_module.parameters(), *model.mean_module.parameters()):
        assert_gradient_of_parameter(parameter, parameter.grad, lambda: model.elbo())


def assert_gradient_of_parameter(
    parameter: Tensor, gradient: Tensor, value: Callable[[], Tensor], tolerance: float = 100.0
) -> None:
    """By central differences."""
    flat, step = parameter.data.view(-1), 1e-4
    for i in range(flat.numel()):
        values = []
        for sign in (1.0, -1.0):
            flat[i] += sign * step
            values.append(float(value().detach()))
            flat[i] -= sign * step
        difference = (values[0] - values[1]) / (2.0 * step)
        error = abs(float(gradient.view(-1)[i]) - difference)
        assert error <= tolerance * GRADIENT_TOLERANCE * max(1.0, abs(difference))


@pytest.mark.parametrize(("name", "beta"), [("bernoulli", 0.2), ("laplace", 0.2), ("poisson", 1.0)])
def test_the_gradient_that_updates_follow(name: str, beta: float) -> None:
    """At the optimal q, it is that of the optimal bound in every hyperparameter."""
    X, Y = data(name, 25)
    options = {"inducing_points": points(7), "natural_steps": 80, "beta": beta}
    model = small(name, X[:15], Y[:15], **options)
    new = model._observations(X[15:], Y[15:], None, 1.0)
    update = online_update(model, new)
    hyper = update.hyper
    parameters = hyper.learned(())

    with torch.enable_grad():
        basis = InducingBasis.of(
            hyper.covar_module, update.basis.Z, update.basis.outputs, live=True
        )
        at = replace(update, memory=update.memory.in_basis(basis), basis=basis)
        gradients = torch.autograd.grad(at.bound(at.fit()).sum(), parameters)
    old = float(model.elbo().detach())

    def optimum() -> Tensor:
        with torch.no_grad():
            trial = copy.deepcopy(model)
            for name, value in hyper.named_parameters():
                trial.get_parameter(name).copy_(value)
            return beta * (trial.update(X[15:], Y[15:]).elbo() - old)

    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert_gradient_of_parameter(parameter, gradient, optimum, 1000.0)


def online_update(model: OSVGP, new: Any) -> OnlineUpdate:
    hyper = Hyperparameters(model.covar_module, model.mean_module, model.likelihood)
    inference, memory, prior = model._inference, model._memory, model.prior
    before = inference.current(memory, None, prior)
    return inference._begun(before, hyper, new, prior, new.X, moved=False)[1]


# --- learning -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param("laplace", marks=pytest.mark.integration), "student"]
)
def test_updates_learn_the_noise_of_heavy_tails(name: str) -> None:
    X = torch.rand(300, 2, dtype=torch.float64)
    Y, fresh = outcomes(name, X), type(LIKELIHOODS[name]())()
    Z = torch.quasirandom.SobolEngine(2).draw(16, dtype=torch.float64)
    options = {"inducing_points": Z, "hyper_steps": 30, "learning_rate": 0.08}
    model = OSVGP(X[:200], Y[:200], fresh, **options)
    model.hyper_steps = 3
    for rows in torch.arange(200, 300).split(25):
        model.update(X[rows], Y[rows])
    assert float(model.likelihood.noise.sqrt()) == pytest.approx(0.5**0.5, rel=0.3)
    assert not model.likelihood.raw_noise.requires_grad


def test_noise_learned_row_by_row_is_that_of_the_batch() -> None:
    """Its prior, which wants a seventh of it, counts once, and not at every row."""
    X = torch.rand(100, 1, dtype=torch.float64)
    Y, Z = (6.0 * X).sin() + 0.5 * torch.randn(100, 1, dtype=torch.float64), X[:6]
    prior = LogNormalPrior(-5.0, 1.0)
    batch, stream = (
        OSVGP(
            X[:n],
            Y[:n],
            GaussianLikelihood(noise_prior=prior),
            inducing_points=Z,
            hyper_steps=40,
            learning_rate=0.1,
        )
        for n in (100, 40)
    )
    stream.hyper_steps = 1
    for rows in torch.arange(40, 100).split(1):
        stream.update(X[rows], Y[rows])
    noise = float(batch.likelihood.noise.sqrt())
    assert noise == pytest.approx(0.5, rel=0.3)
    assert float(stream.likelihood.noise.sqrt()) == pytest.approx(noise, rel=0.3)


def test_a_prior_of_the_likelihood_counts_by_the_batchs_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    X, shares, log_prior = torch.rand(28, 1, dtype=torch.float64), [], Hyperparameters.log_prior

    def recorded(hyper: Hyperparameters, share: Tensor | float = 1.0) -> Tensor:
        shares.append(float(share))
        with torch.no_grad():
            whole, part = log_prior(hyper), log_prior(hyper, share)
            of_noise = prior.log_prob(hyper.likelihood.noise).sum()
            expected = whole - (1.0 - share) * of_noise  # the kernel's counts in full
            torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-5)  # priors: single
        return log_prior(hyper, share)

    monkeypatch.setattr(Hyperparameters, "log_prior", recorded)
    prior = GammaPrior(2.0, 3.0)
    model = OSVGP(
        X[:20],
        X[:20],
        GaussianLikelihood(noise_prior=prior),
        ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(3.0, 6.0))),
        inducing_points=X[:5],
        hyper_steps=1,
    )
    model.update(X[20:25], X[20:25]).update(X[25:], X[25:])
    assert shares == pytest.approx([1.0, 5 / 25, 3 / 28])


def test_a_fit_from_memory_moves_kernel_and_mean_alone() -> None:
    X = torch.rand(500, 2, dtype=torch.float64)
    Y = ((6.0 * X[:, :1]).sin() + 0.3 * torch.randn(500, 1) > 0).double()
    model = OSVGP(X, Y, BernoulliLikelihood(), inducing_points=X[:60])
    before = float(model.elbo().detach())
    fit_gpytorch_mll(VariationalELBO(model.likelihood, model, num_data=1))
    lengthscale = model.covar_module.base_kernel.lengthscale.flatten().tolist()
    assert lengthscale[1] > 2.0 * lengthscale[0]
    assert float(model.elbo().detach()) > before + 5.0
    noisy = OSVGP(X, Y, LaplaceLikelihood(noise_prior=GammaPrior(2.0, 0.1)))
    noise = float(noisy.likelihood.noise)
    fit_gpytorch_mll(VariationalELBO(noisy.likelihood, noisy, num_data=1))
    assert float(noisy.likelihood.noise) == noise


@pytest.mark.parametrize("name", OTHERS)
def test_a_fit_begins_as_the_bound_does(name: str) -> None:
    """Where sites were found the objective is the bound, and so is its gradient."""
    X, Y = data(name, 20)
    model = small(name, X, Y, inducing_points=points(7))
    assert -total_loss(model) == pytest.approx(float(model.elbo().detach()), abs=1e-6)
    parameters = (*model.covar_module.parameters(), *model.mean_module.parameters())
    objective, _ = model._inference.objective(model._memory, None, model.prior)
    found = torch.autograd.grad(objective.sum(), parameters)
    expected = torch.autograd.grad(model.elbo(), parameters)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("name", ["laplace", "student"])
def test_a_fit_does_not_run_away_from_outcomes_that_all_look_like_outliers(
    name: str, window: int
) -> None:
    """Of a process that has become a constant; the bound of fixed sites has no limit there."""
    X, likelihood = torch.rand(40, 2, dtype=torch.float64), LIKELIHOODS[name]()
    Y = 3.0 * (6.0 * X[:, :1]).sin() + 0.3 * torch.randn(40, 1, dtype=torch.float64)
    flat = ScaleKernel(RBFKernel()).double()
    flat.outputscale, flat.base_kernel.lengthscale = 1e-3, 0.3
    model = OSVGP(X[:20], Y[:20], likelihood, flat, window=window)
    model.update(X[20:], Y[20:])
    zero = torch.zeros(1, dtype=torch.float64)
    least = -40.0 * float(likelihood(zero).log_prob(zero).detach())
    for scale in (1e-2, 1.0, 1e2, 1e4, 1e8):
        model.covar_module.outputscale = scale
        assert total_loss(model) > least
    model.covar_module.outputscale = 1e-3
    for _ in range(3):
        fit_gpytorch_mll(VariationalELBO(model.likelihood, model, num_data=1))
        assert total_loss(model) > least
        assert float(model.posterior(X).mean.abs().max()) < 2.0 * float(Y.abs().max())
    assert float(model.covar_module.outputscale.detach()) > 1e-2


def test_what_a_fit_maximises_is_kept(tmp_path: Path) -> None:
    """Where points move, by half where half is forgotten, and in a file."""
    X, Y = data("laplace", 30)
    model = small("laplace", X, Y, inducing_points=points())
    lost = copy.deepcopy(model).forget(0.5)
    parts = (model._memory.whole.anchors, lost._memory.whole.anchors)
    for whole, half in zip(*((a.gram, a.moment, a.energy) for a in parts), strict=True):
        assert float(whole.abs().max()) > 0.0
        assert_close(half, 0.5 * whole)
    with torch.no_grad():
        model.covar_module.outputscale *= 3.0
    loss = total_loss(model)
    assert loss > -float(model.elbo().detach()) + 1e-3
    model.save(tmp_path / "model")
    assert total_loss(OSVGP.load(tmp_path / "model")) == pytest.approx(loss)
    basis = basis_of_independent(model.covar_module, torch.cat((points(), X)), 1)
    moved = model._memory.in_basis(basis)
    objective, _ = model._inference.objective(moved, None, model.prior)
    assert -float(objective.detach()) == pytest.approx(loss)


def test_what_the_user_fixed_is_not_learned() -> None:
    X, Y = data("laplace", 30)
    likelihood, fixed = LaplaceLikelihood(), kernel()
    OSVGP(X, Y, likelihood)
    assert likelihood.raw_noise.requires_grad
    likelihood.raw_noise.requires_grad_(False)
    fixed.raw_outputscale.requires_grad_(False)
    model = OSVGP(X, Y, likelihood, fixed, hyper_steps=5)
    assert float(model.likelihood.raw_noise) == 0.0
    assert float(model.covar_module.outputscale) == pytest.approx(2.0)
    assert float(model.mean_module.constant.detach()) != 0.0


def test_what_the_user_fixes_between_updates_is_not_learned_until_it_is_freed() -> None:
    X, Y = data("laplace", 60)
    model = OSVGP(X[:30], Y[:30], LaplaceLikelihood(), kernel(), hyper_steps=5)

    def moved(kernel_is_free: bool, mean_is_free: bool) -> list[bool]:
        model.covar_module.requires_grad_(kernel_is_free)
        model.mean_module.requires_grad_(mean_is_free)
        before = copy.deepcopy(model)
        model.update(X[30:], Y[30:])
        pairs = zip(before.parameters(), model.parameters(), strict=True)
        differ = {name: not torch.equal(*pair) for name, pair in zip(names, pairs, strict=True)}
        parts = ("likelihood", "mean_module", "covar_module")
        return [any(differ[name] for name in names if name.startswith(part)) for part in parts]

    names = [name for name, _ in model.named_parameters()]
    assert moved(False, True) == [True, True, False]
    assert moved(True, False) == [True, False, True]
    assert moved(False, False) == [True, False, False]


@pytest.mark.parametrize("name", OTHERS)
def test_every_likelihood_beats_the_prior(name: str) -> None:
    X, Y = data(name, 180)
    Z = points(20)
    model = OSVGP(X[:60], Y[:60], LIKELIHOODS[name](), kernel(), inducing_points=Z, hyper_steps=5)
    for rows in torch.arange(60, 120).split(30):
        model.update(X[rows], Y[rows])
    prior = OSVGP(X[:0], Y[:0], LIKELIHOODS[name](), kernel())
    better = model.log_predictive(X[120:], Y[120:]) - prior.log_predictive(X[120:], Y[120:])
    assert float(better.mean()) > 0.05


# --- outcomes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_predictions_of_outcomes_are_those_of_draws(name: str) -> None:
    X, Y = data(name)
    model = small(name, X, Y, inducing_points=points())
    T = torch.rand(4, D, dtype=torch.float64)
    found = model.predictive(T)
    latent = model.posterior(T)
    with torch.no_grad():
        values = latent.mean + latent.variance.sqrt() * torch.randn(100_000, 4, 1).double()
        conditional = model.likelihood(values.squeeze(-1))
    drawn = conditional.sample()
    error = drawn.std(0) / 100_000**0.5
    assert bool(((drawn.mean(0) - found.mean[:, 0]).abs() < 5.0 * error).all())
    torch.testing.assert_close(drawn.var(0), found.variance[:, 0], rtol=0.1, atol=0.0)
    density = model.likelihood(values.squeeze(-1)).log_prob(drawn[0]).logsumexp(0)
    density = density - torch.tensor(100_000.0).double().log()
    log_predictive = model.log_predictive(T, drawn[0].unsqueeze(-1))
    torch.testing.assert_close(log_predictive[:, 0], density, rtol=0.0, atol=0.03)


def test_labels_of_several_outputs_and_batches() -> None:
    X = torch.rand(2, 30, D, dtype=torch.float64)
    Y = torch.cat([outcomes("bernoulli", X) for _ in range(3)], -1)
    model = OSVGP(X, Y, BernoulliLikelihood(), inducing_points=points())
    T = torch.rand(5, D, dtype=torch.float64)
    assert model.predictive(T).mean.shape == (2, 5, 3)
    for i in range(2):
        for j in range(3):
            alone = OSVGP(X[i], Y[i, :, j : j + 1], BernoulliLikelihood(), inducing_points=points())
            torch.testing.assert_close(
                model.posterior(T).mean[i, :, j], alone.posterior(T).mean[:, 0], rtol=0, atol=1e-6
            )


def test_noise_of_each_output() -> None:
    X = torch.rand(30, D, dtype=torch.float64)
    Y = torch.cat([outcomes("laplace", X), outcomes("laplace", X)], -1)
    likelihood = LaplaceLikelihood(batch_shape=torch.Size([2])).double()
    likelihood.noise = torch.tensor([[0.1], [2.0]], dtype=torch.float64)
    model = OSVGP(X, Y, likelihood, inducing_points=points())
    alone = LaplaceLikelihood().double()
    alone.noise = 2.0
    second = OSVGP(X, Y[:, 1:], alone, inducing_points=points())
    torch.testing.assert_close(
        model.posterior(X).mean[:, 1:], second.posterior(X).mean, rtol=0.0, atol=1e-6
    )
    assert_same_posterior(model.subset_output([1]), second, X[:4], factor=100.0)


def test_any_dtype_and_device(dtype: torch.dtype, device: torch.device) -> None:
    X, Y = data("bernoulli")
    model = OSVGP(X.to(device, dtype), Y.to(device, dtype), BernoulliLikelihood(), hyper_steps=3)
    T = torch.rand(4, D).to(device, dtype)
    found = model.predictive(T).mean
    assert (found.dtype, found.device.type) == (dtype, device.type)
    reference = OSVGP(X, Y, BernoulliLikelihood(), hyper_steps=3).predictive(T.double().cpu()).mean
    torch.testing.assert_close(found.double().cpu(), reference, rtol=0.0, atol=1e-3)
    moved = model.to("cpu").update(X[:3].to(dtype), Y[:3].to(dtype))
    assert moved.num_observations == 63


def test_the_prior_comes_before_the_data_and_after_clear() -> None:
    X, Y = data("bernoulli")
    model = small("bernoulli", X, Y, inducing_points=points())
    model.clear()
    posterior = model.posterior(X)
    assert model.num_observations == 0
    assert_close(posterior.mean, torch.full_like(Y, 0.3))
    assert_close(posterior.variance, torch.full_like(Y, 2.0))


def test_merged_labels_are_both_models_sites() -> None:
    X, Y = data("bernoulli")
    options = {"inducing_points": points()}
    one, two = (small("bernoulli", X[r], Y[r], **options) for r in (slice(30), slice(30, 60)))
    merged = copy.deepcopy(one).merge(two)
    assert merged.num_observations == 60
    batch = small("bernoulli", X, Y, **options)
    gap = (merged.posterior(X).mean - batch.posterior(X).mean).abs()
    assert float((gap / batch.posterior(X).variance.sqrt()).mean()) < 0.3
    with pytest.warns(ProjectionWarning):
        one.merge(small("bernoulli", X[30:], Y[30:], inducing_points=X[:9]))
    with pytest.raises(UnsupportedError, match="different likelihood"):
        one.merge(small("poisson", X[:5], Y[:5], **options))


def test_old_labels_fade() -> None:
    X, Y = data("bernoulli")
    model = small("bernoulli", X, Y, inducing_points=points())
    variance = model.posterior(X).variance.mean()
    assert float(model.forget(0.2).posterior(X).variance.mean()) > 1.2 * float(variance)


@pytest.mark.parametrize("name", OTHERS)
def test_gradients_of_predictions(name: str) -> None:
    X, Y = data(name)
    model = small(name, X, Y, inducing_points=points())
    T = torch.rand(3, D, dtype=torch.float64)
    assert_gradient(lambda T: model.predictive(T).mean.sin().sum(), T)
    assert_gradient(lambda T: model.predictive(T).variance.sin().sum(), T)
    assert_gradient(lambda T: model.log_predictive(T, Y[:3]).sum(), T)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "value", "message"),
    [
        (BernoulliLikelihood(), -1.0, r"Boolean.*got \[-1.0\].*\(Y \+ 1\) / 2"),
        (BernoulliLikelihood(), 0.5, r"Boolean"),
        (PoissonLikelihood(), 1.5, r"got \[1.5\]"),
        (PoissonLikelihood(), -1.0, r"got \[-1.0\]"),
        (NegativeBinomialLikelihood(), 0.5, r"got \[0.5\]"),
        (BetaLikelihood(), 1.0, r"got \[1.0\]"),
        (BetaLikelihood(), 1.5, r"got \[1.5\]"),
    ],
)
def test_outcomes_that_cannot_be(likelihood: Likelihood, value: float, message: str) -> None:
    X, start = torch.rand(6, 2, dtype=torch.float64), torch.ones(6, 1, dtype=torch.float64)
    start = 0.5 * start if isinstance(likelihood, BetaLikelihood) else start
    bad = start.clone()
    bad[3] = value
    with pytest.raises(InputDataError, match=message):
        OSVGP(X, bad, copy.deepcopy(likelihood))
    model = OSVGP(X, start, copy.deepcopy(likelihood))
    model.posterior(X)
    before = fingerprint(model)
    for verb in (model.update, model.condition_on_observations, model.log_predictive):
        with pytest.raises(InputDataError, match=message):
            verb(X, bad)
    assert_untouched(model, before)


@pytest.mark.parametrize(
    ("likelihood", "message"),
    [
        (SoftmaxLikelihood(num_features=2, num_classes=3), "got SoftmaxLikelihood"),
        (MultitaskGaussianLikelihood(num_tasks=2), "got MultitaskGaussianLikelihood"),
        (FixedNoiseGaussianLikelihood(torch.ones(6)), "OSGPR"),
        (LaplaceLikelihood(batch_shape=torch.Size([3])), r"batch shape \(\)"),
        (GaussianLikelihood(batch_shape=torch.Size([2, 1])), r"batch shape \(\)"),
    ],
)
def test_likelihoods_that_it_cannot_take(likelihood: Likelihood, message: str) -> None:
    X, Y = torch.rand(6, 2, dtype=torch.float64), torch.ones(6, 1, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match=message):
        OSVGP(X, Y, likelihood)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"outcome_transform": Standardize(m=1)}, UnsupportedError, "no real numbers of some unit"),
        ({"outcome_transform": Log()}, UnsupportedError, "to be Standardize or None, got Log"),
        ({"beta": 0.0}, ValueError, "beta"),
        ({"beta": 1.5}, ValueError, "beta"),
        ({"natural_rate": 0.0}, ValueError, "natural_rate"),
        ({"natural_steps": 0}, ValueError, "natural_steps"),
        ({"natural_steps": 2.5}, ValueError, "natural_steps to be a whole number"),
        ({"hyper_steps": -1}, ValueError, "hyper_steps"),
        ({"fantasy_steps": 0}, ValueError, "fantasy_steps"),
        ({"learning_rate": -0.1}, ValueError, "learning_rate"),
        ({"allocator": None}, ValueError, "neither"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    X, Y = data("bernoulli", 6)
    with pytest.raises(error, match=message):
        OSVGP(X, Y, BernoulliLikelihood(), **options)


@pytest.mark.parametrize("name", ["natural_rate", "natural_steps", "hyper_steps", "learning_rate"])
def test_an_option_that_is_set_later_is_checked_too(name: str) -> None:
    X, Y = data("bernoulli", 6)
    model = OSVGP(X, Y, BernoulliLikelihood())
    before = getattr(model, name)
    with pytest.raises(ValueError, match=name):
        setattr(model, name, -1)
    assert getattr(model, name) == before
    setattr(model, name, type(before)(1))
    assert model.update(X, Y).num_observations == 12


def test_what_other_likelihoods_have_not() -> None:
    X, Y = data("bernoulli")
    model = small("bernoulli", X, Y, inducing_points=points())
    model.posterior(X)
    before = fingerprint(model)
    with pytest.raises(UnsupportedError, match="retract needs a Gaussian likelihood"):
        model.retract(X[:3], Y[:3])
    with pytest.raises(UnsupportedError, match="no Gaussian noise"):
        model.posterior(X, observation_noise=True)
    with pytest.raises(UnsupportedError, match="Expected no Yvar"):
        model.update(X, Y, torch.ones_like(Y))
    with pytest.raises(UnsupportedError, match="Expected no noise"):
        model.condition_on_observations(X, Y, noise=torch.ones_like(Y))
    assert_untouched(model, before)


def test_a_failed_update_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    X, Y = data("bernoulli", 40)
    model = OSVGP(X[:30], Y[:30], BernoulliLikelihood(), hyper_steps=3)
    model.posterior(X)
    before = fingerprint(model)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a full disk, say")

    monkeypatch.setattr(OnlineUpdate, "remembered", fail)
    with pytest.raises(RuntimeError):
        model.update(X[30:], Y[30:])
    assert_untouched(model, before)


def test_equal_rows_an_outlier_and_large_counts_do_not_break_it() -> None:
    X = torch.full((3_000, 2), 0.5, dtype=torch.float64)
    model = OSVGP(X, (torch.rand(3_000, 1) > 0.3).double(), BernoulliLikelihood())
    assert len(model.inducing_points) == 1
    model.update(torch.full((1, 2), 1e6).double(), torch.ones(1, 1).double())
    assert float(model.predictive(X[:1]).mean) == pytest.approx(0.7, abs=0.03)
    X, counts = torch.rand(20, 2, dtype=torch.float64), torch.full((20, 1), 1e6).double()
    large = OSVGP(X, counts, PoissonLikelihood())
    assert bool(large.posterior(X).variance.isfinite().all())
    assert bool(large.predictive(X).mean.isfinite().all())


def test_a_refit_from_memory_takes_any_likelihood() -> None:
    X = torch.rand(100, 2, dtype=torch.float64)
    model = OSVGP(X, ((6.0 * X[:, :1]).sin() > 0).double(), BernoulliLikelihood())
    before = model.elbo().detach()
    learn_hyperparameters(model)
    assert float(model.elbo().detach() - before) > 5.0


def test_inputs_are_normalised_and_allocated() -> None:
    X, Y = data("bernoulli")
    bounds = torch.tensor([[0.0] * D, [2.0] * D], dtype=torch.float64)
    model = OSVGP(
        X,
        Y,
        BernoulliLikelihood(),
        input_transform=Normalize(D, bounds=bounds),
        allocator=OIPS(0.7),
    )
    assert 1 < len(model.inducing_points) < 60
    assert float(model.inducing_points.max()) <= 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.posterior(X).mean.shape == (60, 1)


# --- real labels --------------------------------------------------------------------------------


@pytest.mark.integration
def test_banana_in_a_stream_is_as_good_as_a_batch(shared_data: Path) -> None:
    """Within a point of gpytorch's SVGP with as many points, trained on the whole batch."""
    with np.load(shared_data / "banana.npz") as arrays:
        X, y = (torch.as_tensor(arrays[key]).double() for key in ("X", "y"))
    X = (X - X.amin(0)) / (X.amax(0) - X.amin(0))
    Y = (y.unsqueeze(-1) + 1.0) / 2.0
    order = torch.randperm(len(X))
    train, test = order[:2_000], order[2_000:]
    model = OSVGP(
        X[train[:200]], Y[train[:200]], BernoulliLikelihood(), allocator=OIPS(0.8), hyper_steps=100
    )
    model.hyper_steps = 2
    for rows in train[200:].split(20):
        model.update(X[rows], Y[rows])
    hits = (model.predictive(X[test]).mean > 0.5) == (Y[test] > 0.5)
    accuracy = 100.0 * float(hits.double().mean())
    peer = batch_accuracy(X[train], Y[train], X[test], Y[test], len(model.inducing_points))
    assert accuracy > peer - 1.0


def test_an_outlier_of_1e8_standard_deviations_is_the_exact_gps() -> None:
    """Points that left out more than a jitter would put the mean many standard deviations off.

    What is left is rounding: features at points that keep 1e-12 of the prior variance lose the
    square root of that in digits.
    """
    X = torch.rand(200, 2, dtype=torch.float64)
    Y = (3.0 * X).sin().sum(-1, keepdim=True)
    Y[7] += 1e8
    kernel, likelihood = RBFKernel().double(), GaussianLikelihood().double()
    kernel.lengthscale, likelihood.noise = 0.3, 0.01
    model = OSVGP(X, Y, likelihood, covar_module=kernel)
    test_X = torch.rand(100, 2, dtype=torch.float64)
    with torch.no_grad():
        K, cross = kernel(X).to_dense(), kernel(test_X, X).to_dense()
        factor = torch.linalg.cholesky(K + 0.01 * torch.eye(200))
        weights = torch.cholesky_solve(Y, factor)
        weights += torch.cholesky_solve(Y - K @ weights - 0.01 * weights, factor)
        error = (model.posterior(test_X).mean - cross @ weights).abs()
    assert float(error.max()) < 30.0 * torch.finfo(torch.float64).eps * NOVEL**-0.5 * 1e8


@pytest.mark.parametrize("model_class", [OSVGP, OSGPR])
def test_an_outcome_too_far_out_for_float64_is_said_once(model_class: type[OSVGP | OSGPR]) -> None:
    X = torch.rand(40, 1, dtype=torch.float64)

    def model(outlier: float, noise: float) -> OSVGP | OSGPR:
        Y = (5.0 * X).sin().index_fill(0, torch.tensor([7]), outlier)
        likelihood, covar_module = GaussianLikelihood().double(), RBFKernel().double()
        likelihood.noise, covar_module.lengthscale = noise, 0.4
        return model_class(
            X, Y, likelihood=likelihood, covar_module=covar_module, outcome_transform=None
        )

    far = model(1e8, 1e-4)
    with pytest.warns(NumericalWarning, match=r"float64 does not resolve.* Drop or clip outliers"):
        far.posterior(X)
    far.update(X[:1], X[:1]).posterior(X)
    model(1e5, 1e-2).posterior(X)
    model(3.0, 1e-4).posterior(X)
