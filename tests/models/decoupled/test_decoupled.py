"""Decoupled models against dense formulas: posterior, bound, draws of it, steps and limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

from bo_stream import DecoupledGP
from bo_stream.bases.inducing import InducingFunctions
from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.models.decoupled.posterior import (
    DecoupledPosterior,
    DirectCovariance,
    Draw,
    Expanded,
    HybridCovariance,
    SpectralCovariance,
    drawn_columns,
)
from bo_stream.models.inference import Hyperparameters
from bo_stream.models.stochastic.replay import generator_at
from bo_stream.tensors import map_tensors
from bo_stream.testing.streams import assert_gradient, joint_covariance
from tests.oracles.decoupled import DecoupledOracle, hybrid_divergence
from tests.oracles.kernels import averaged_kernel, dense_kernel
from tests.oracles.likelihoods import log_probs
from tests.support.problems.likelihoods import LIKELIHOODS, outcomes

D, N, M_ALPHA, M_BETA = 3, 40, 12, 5
NOISE, CONSTANT = 0.5, 0.3


def kernel(smooth: bool = True) -> ScaleKernel:
    base = RBFKernel(ard_num_dims=D) if smooth else MaternKernel(nu=1.5, ard_num_dims=D)
    chosen = ScaleKernel(base).double()
    chosen.outputscale = 2.0
    chosen.base_kernel.lengthscale = torch.tensor([[0.4, 0.6, 1.5]])
    return chosen.requires_grad_(False)


def data(name: str = "gaussian", n: int = N) -> tuple[Tensor, Tensor]:
    X = torch.rand(n, D, dtype=torch.float64)
    return X, outcomes(name, X)


def model_of(X: Tensor, Y: Tensor, name: str = "gaussian", **options: Any) -> DecoupledGP:
    """With hyperparameters that stay, and no step taken."""
    defaults = {
        "likelihood": LIKELIHOODS[name]().requires_grad_(False),
        "covar_module": kernel(),
        "mean_module": gpytorch.means.ConstantMean().double().requires_grad_(False),
        "num_mean": M_ALPHA,
        "num_covar": M_BETA,
        "update_steps": 0,
        "num_added": 50,
    }
    model = DecoupledGP(X, Y, **{**defaults, **options})
    with torch.no_grad():
        for parameter in model.mean_module.parameters():
            parameter.fill_(CONSTANT)
    return model


def with_posterior(model: DecoupledGP, posterior: DecoupledPosterior) -> DecoupledGP:
    model._set_memory(replace(model._memory, posterior=posterior))
    return model


def functions(count: int, factors: bool) -> InducingFunctions:
    points = torch.rand(1, count, D, dtype=torch.float64)
    return InducingFunctions(points, 0.3 * torch.randn_like(points) if factors else None)


def direct(factors: bool = False, jacobi: bool = False) -> DecoupledPosterior:
    root = torch.randn(1, M_BETA, M_BETA, dtype=torch.float64)
    return DecoupledPosterior(
        functions(M_ALPHA, factors),
        torch.randn(1, M_ALPHA, dtype=torch.float64),
        functions(M_BETA, factors),
        DirectCovariance(root, jacobi),
        jacobi,
    )


def hybrid(factors: bool = False) -> DecoupledPosterior:
    gram = torch.randn(1, M_BETA, M_BETA, dtype=torch.float64)
    moment = torch.randn(1, M_BETA, 1, dtype=torch.float64)
    return replace(direct(factors), covariance=HybridCovariance(moment, gram @ gram.mT))


def spectral(factors: bool = False) -> DecoupledPosterior:
    whole = hybrid(factors)
    combination, _ = torch.linalg.qr(torch.randn(1, 2 * M_BETA, M_BETA, dtype=torch.float64))
    covariance = SpectralCovariance(whole.covariance.moment, whole.covariance.gram, combination)
    return replace(whole, beta=whole.alpha.rows(slice(0, 2 * M_BETA)), covariance=covariance)


class Dense:
    """A posterior's kernel matrices, entry by entry."""

    def __init__(self, posterior: DecoupledPosterior, covar_module: ScaleKernel) -> None:
        self.posterior, self.kernel = posterior, covar_module

    def matrix(self, A: InducingFunctions | Tensor, B: InducingFunctions | Tensor) -> Tensor:
        A, B = (InducingFunctions(f) if isinstance(f, Tensor) else f for f in (A, B))
        first, second = (f.points.reshape(-1, D) for f in (A, B))
        if A.log_factors is None and B.log_factors is None:
            return dense_kernel(self.kernel, first, second)
        factors = [
            torch.ones_like(p) if f.log_factors is None else f.log_factors.exp().reshape(-1, D)
            for f, p in ((A, first), (B, second))
        ]
        lengthscale = self.kernel.base_kernel.lengthscale[0]
        scale = float(self.kernel.outputscale)
        return averaged_kernel(lengthscale, scale, first, factors[0], second, factors[1])

    def oracle(self) -> DecoupledOracle:
        p = self.posterior
        scale = float(self.kernel.outputscale) if p.jacobi else 1.0
        a = p.coefficients[0] / scale
        alpha, K = self.matrix(p.alpha, p.alpha), self.between()
        if isinstance(p.covariance, DirectCovariance):
            root = p.covariance.root[0] / scale
            return DecoupledOracle(alpha, a, K, root @ root.mT, CONSTANT)
        return self._of_hybrid(a, alpha, K)

    def _of_hybrid(self, a: Tensor, alpha: Tensor, K: Tensor) -> DecoupledOracle:
        """``S⁻¹ = K⁻¹ + B``; the values' own part of the mean is more of α."""
        p, L = self.posterior, torch.linalg.cholesky(K)
        B = torch.linalg.solve(L.mT, torch.linalg.solve(L, p.covariance.gram[0], left=False))
        own = torch.linalg.solve(K, self.own_values())
        cross = self.to_beta(p.alpha)
        both = torch.cat((torch.cat((alpha, cross), 1), torch.cat((cross.mT, K), 1)))
        return DecoupledOracle(both, torch.cat((a, own)), K, B, CONSTANT)

    def values(self) -> tuple[Tensor, Tensor]:
        """Mean and covariance of a hybrid's values at β, without the prior mean."""
        p = self.posterior
        L = torch.linalg.cholesky(self.between())
        Q = torch.eye(M_BETA).double() + p.covariance.gram[0]
        return (L @ torch.linalg.solve(Q, p.covariance.moment[0]))[:, 0], L @ torch.linalg.inv(
            Q
        ) @ L.mT

    def own_values(self) -> Tensor:
        """m̃: those values less what α makes of them."""
        p = self.posterior
        return self.values()[0] - self.to_beta(p.alpha).T @ p.coefficients[0]

    def to_alpha(self, X: Tensor) -> Tensor:
        p = self.posterior
        cross = self.matrix(X, p.alpha)
        if isinstance(p.covariance, HybridCovariance):
            cross = torch.cat((cross, self.to_beta(X)), 1)
        return cross

    def to_beta(self, X: InducingFunctions | Tensor) -> Tensor:
        """With the covariance's functions, which may combine those at β."""
        return self.matrix(X, self.posterior.beta) @ self.combination()

    def between(self) -> Tensor:
        beta, left = self.posterior.beta, self.combination()
        return left.T @ self.matrix(beta, beta) @ left

    def combination(self) -> Tensor:
        p = self.posterior
        if isinstance(p.covariance, SpectralCovariance):
            return p.covariance.combination[0]
        return torch.eye(len(p.beta), dtype=torch.float64)


POSTERIORS: dict[str, Callable[[], DecoupledPosterior]] = {
    "direct": direct,
    "direct, averages": lambda: direct(factors=True),
    "direct, preconditioned": lambda: direct(jacobi=True),
    "hybrid": hybrid,
    "hybrid, averages": lambda: hybrid(factors=True),
    "spectral": spectral,
    "spectral, averages": lambda: spectral(factors=True),
}


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# --- the posterior and the bound ----------------------------------------------------------------


@pytest.mark.parametrize("kind", POSTERIORS)
def test_predicts_as_the_formulas_say(kind: str) -> None:
    X, Y = data()
    model = with_posterior(model_of(X, Y), POSTERIORS[kind]())
    dense = Dense(model._memory.posterior, model.covar_module)
    T = torch.rand(6, D, dtype=torch.float64)
    posterior, oracle = model.posterior(T), dense.oracle()
    assert_near(posterior.mean[:, 0], oracle.mean(dense.to_alpha(T)))
    expected = oracle.covariance(dense.matrix(T, T), dense.to_beta(T))
    assert_near(joint_covariance(posterior)[0], expected)
    assert_near(posterior.variance[:, 0], expected.diagonal())


@pytest.mark.parametrize("kind", POSTERIORS)
@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "student"])
def test_the_bound_is_that_of_the_formulas(kind: str, name: str) -> None:
    X, Y = data(name)
    model = with_posterior(model_of(X, Y, name), POSTERIORS[kind]())
    dense = Dense(model._memory.posterior, model.covar_module)
    log_prob = log_probs(name, Y[:, 0], NOISE)
    expected = dense.oracle().bound(
        dense.matrix(X, X), dense.to_alpha(X), dense.to_beta(X), log_prob
    )
    tolerance = 1e-8 if name == "gaussian" else 1e-4  # quadrature by 20 nodes
    assert_near(model.elbo(), expected, tolerance)


@pytest.mark.fixed_seed
def test_the_hybrid_divergence_is_equation_14() -> None:
    posterior = hybrid()
    dense = Dense(posterior, kernel())
    _, S = dense.values()
    p = posterior
    expected = hybrid_divergence(
        dense.matrix(p.beta, p.beta),
        dense.own_values(),
        S,
        dense.matrix(p.beta, p.alpha),
        dense.matrix(p.alpha, p.alpha),
        p.coefficients[0],
    )
    expanded = Expanded(posterior, kernel(), torch.zeros(1).double(), 1)
    apart = expanded.posterior.covariance.divergence(expanded.basis)
    found = expanded.exact_mean_divergence() + apart
    assert_near(found[0], expected)
    assert_near(found[0], dense.oracle().divergence())


@pytest.mark.fixed_seed
def test_the_logarithm_of_appendix_a_3_has_to_be_halved() -> None:
    """``½ log |I + K_β B| = −½ log |K⁻¹ S|``, printed as ``−log |K⁻¹ S|``. [Cheng2017, A.3]"""
    root = torch.randn(M_BETA, M_BETA, dtype=torch.float64)
    eye = torch.eye(M_BETA, dtype=torch.float64)
    K = root @ root.mT + eye
    S = torch.linalg.inv(torch.linalg.inv(K) + eye)
    B = torch.linalg.inv(-(K + K @ torch.linalg.inv(S - K) @ K))
    assert_near(0.5 * torch.logdet(eye + K @ B), -0.5 * torch.logdet(torch.linalg.inv(K) @ S))


@pytest.mark.fixed_seed
def test_the_lengthscale_s_gradient_in_proposition_3_lacks_a_term() -> None:
    """What it moves in K_β: ``1ᵀ (∂_s K_β ⊙ Ω diag(∇_ŝ e) Ωᵀ) 1``. [Cheng2017, proposition 3]

    Of an expected log-likelihood e of variances ŝ alone, for a kernel of lengthscale s.
    """
    X, beta = torch.rand(7, 1, dtype=torch.float64), torch.rand(3, 1, dtype=torch.float64)
    root, eye = torch.randn(3, 3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    B, weights = root @ root.mT, torch.randn(7, dtype=torch.float64)  # weights: ∇_ŝ e

    def matrix(P: Tensor, Q: Tensor, s: Tensor) -> Tensor:
        return (-0.5 * (P - Q.mT).square() / s.square()).exp()

    def likelihood(s: Tensor) -> Tensor:
        cross, own = matrix(X, beta, s), matrix(beta, beta, s)
        inner = B @ torch.linalg.inv(eye + own @ B)
        return weights @ (1.0 - (cross @ inner * cross).sum(-1))

    s = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(likelihood(s), s)
    with torch.no_grad():
        own, cross = matrix(beta, beta, s), matrix(beta, X, s)
        slopes = [
            m * (P - Q.mT).square() / s**3 for m, P, Q in ((own, beta, beta), (cross, beta, X))
        ]
        omega = B @ torch.linalg.inv(eye + own @ B) @ cross
        printed = -2.0 * ((omega * slopes[1]) @ weights).sum()
        missing = (slopes[0] * (omega * weights @ omega.mT)).sum()
    assert_near(slope, printed + missing)
    assert abs(float(missing)) > 1e-3


class SVGP(gpytorch.models.ApproximateGP):
    """gpytorch's own sparse variational model, without jitter."""

    def __init__(self, Z: Tensor, m: Tensor, S: Tensor) -> None:
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(Z))
        strategy = gpytorch.variational.VariationalStrategy(
            self, Z, distribution, learn_inducing_locations=False, jitter_val=0.0
        )
        super().__init__(strategy)
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), kernel()
        self.double()
        strategy.variational_params_initialized.fill_(1)
        L = torch.linalg.cholesky(dense_kernel(self.covar_module, Z, Z))
        half = torch.linalg.solve(L, torch.linalg.cholesky(S))
        with torch.no_grad():
            self.mean_module.constant.fill_(CONSTANT)
            distribution.variational_mean.copy_(torch.linalg.solve(L, m - CONSTANT))
            distribution.chol_variational_covar.copy_(torch.linalg.cholesky(half @ half.mT))

    def forward(self, X: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(X), self.covar_module(X))


def test_one_basis_for_both_is_svgp() -> None:
    """α = β = Z: gpytorch's bound, with the posterior ``(K a, (K⁻¹ + B)⁻¹)`` of the values at Z."""
    X, Y = data()
    posterior = direct()
    posterior = replace(
        posterior, alpha=posterior.beta, coefficients=posterior.coefficients[:, :M_BETA]
    )
    model = with_posterior(model_of(X, Y), posterior)
    oracle = Dense(posterior, model.covar_module).oracle()
    S = torch.linalg.inv(torch.linalg.inv(oracle.beta) + oracle.B)
    peer = SVGP(posterior.beta.points[0], CONSTANT + oracle.beta @ oracle.a, 0.5 * (S + S.mT))
    mll = gpytorch.mlls.VariationalELBO(model.likelihood, peer, N)
    with torch.no_grad():
        expected = N * mll(peer.eval()(X), Y[:, 0])
    torch.testing.assert_close(model.elbo(), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("parametrization", ["direct", "hybrid", "spectral"])
def test_no_covariance_basis_is_kernel_ridge_regression(parametrization: str) -> None:
    """M_β = 0: the prior's covariance, and the mean of an exact process with α at all data."""
    X, Y = data()
    model = model_of(
        X,
        Y,
        num_mean=N,
        num_covar=0,
        num_columns=N,
        learning_rate=0.0,
        natural_rate=1.0,
        mean_rate=1.0,
        parametrization=parametrization,
    )
    model.fit(20, progress=False)
    T = torch.rand(6, D, dtype=torch.float64)
    points = model._memory.posterior.alpha.points[0]
    K, cross = (dense_kernel(model.covar_module, A, points) for A in (points, T))
    targets = torch.stack([Y[(point == X).all(-1), 0][0] for point in points]) - CONSTANT
    exact = torch.linalg.solve(K + NOISE * torch.eye(N, dtype=torch.float64), targets)
    assert_near(model.posterior(T).mean[:, 0], CONSTANT + cross @ exact, 1e-3)
    with_posterior(model, replace(model._memory.posterior, coefficients=exact.unsqueeze(0)))
    model.fit(3, progress=False)  # it stays where the bound is highest
    posterior = model.posterior(T)
    assert_near(posterior.mean[:, 0], CONSTANT + cross @ exact)
    assert_near(joint_covariance(posterior)[0], dense_kernel(model.covar_module, T, T))


# --- draws of the bound -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", POSTERIORS)
def test_columns_that_are_equally_likely_stand_for_all(kind: str) -> None:
    expanded = Expanded(POSTERIORS[kind](), kernel(), torch.zeros(1).double(), 1)
    each = [expanded.columns(one) for one in torch.arange(M_ALPHA).split(1)]
    mean = torch.stack([expanded.mean_divergence(columns) for columns in each]).mean(0)
    assert_near(mean, expanded.exact_mean_divergence())


def leaves(posterior: DecoupledPosterior) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(posterior, lambda tensor: found.append(tensor) or tensor)
    return found


def draw_with_gradient(model: DecoupledGP, generator: torch.Generator | None) -> Tensor:
    """The bound, or a draw of it, and all its gradients, in one vector."""
    memory = model._memory
    posterior = map_tensors(memory.posterior, lambda t: t.detach().clone().requires_grad_())
    hyper = Hyperparameters(model.covar_module, model.mean_module, model.likelihood)
    hyper.requires_grad_(True)
    m = posterior.coefficients.shape[-2]
    expanded = Expanded(
        posterior, hyper.covar_module, hyper.constant(posterior.coefficients.shape[:-1]), m
    )
    size, columns = (N, M_ALPHA) if generator is None else (7, 3)
    generator = generator or generator_at(0, 0)
    batch = memory.replay.in_units(memory.replay.draw(size, generator), model.prior)
    expected = OutcomeModel(hyper.likelihood, m).expected_log_prob(batch.targets)
    index = drawn_columns(posterior, columns, generator)
    value = Draw.of(expanded, batch.X, expected, N / size, index).value.sum()
    inputs = [*leaves(posterior), *hyper.parameters()]
    gradients = torch.autograd.grad(value, inputs, allow_unused=True)
    parts = [value.detach().reshape(1)]
    parts += [g.flatten() for g in gradients if g is not None]
    return torch.cat(parts)


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["direct", "hybrid, averages", "spectral"])
@pytest.mark.parametrize("name", ["gaussian", "bernoulli"])
def test_draws_of_the_bound_and_its_gradient_are_unbiased(kind: str, name: str) -> None:
    """Within 4 standard errors each, over 600 draws of 7 observations and 3 columns."""
    X, Y = data(name)
    model = with_posterior(model_of(X, Y, name), POSTERIORS[kind]())
    exact = draw_with_gradient(model, None)
    assert_near(exact[0], model.elbo())
    draws = torch.stack([draw_with_gradient(model, generator_at(3, i)) for i in range(600)])
    error = draws.std(0) / len(draws) ** 0.5
    gap = (draws.mean(0) - exact).abs()
    assert bool((gap <= 4.0 * error + 1e-9).all()), (gap / error).max()
    assert float(error[0]) > 1e-3  # they are draws


def test_an_estimate_follows_its_generator_and_may_be_exact() -> None:
    X, Y = data()
    model = with_posterior(model_of(X, Y, batch_size=7, num_columns=3), hybrid())
    one, same, other = (
        model.elbo_estimate(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    whole = with_posterior(model_of(X, Y, num_columns=M_ALPHA), model._memory.posterior)
    assert_near(whole.elbo_estimate(), whole.elbo())


@pytest.mark.parametrize("kind", POSTERIORS)
def test_gradients_of_the_bound_are_those_of_differences(kind: str) -> None:
    X, Y = data()
    model = with_posterior(model_of(X, Y), POSTERIORS[kind]())
    posterior = model._memory.posterior

    def of_points(points: Tensor) -> Tensor:
        moved = replace(posterior, beta=replace(posterior.beta, points=points))
        expanded = Expanded(moved, model.covar_module, torch.full((1,), CONSTANT).double(), 1)
        apart = expanded.posterior.covariance.divergence(expanded.basis)
        return expanded.at(X).variance.sum() - apart.sum()

    assert_gradient(of_points, posterior.beta.points)
    model.covar_module.requires_grad_(True)
    model.log_marginal_likelihood().backward()
    found = model.covar_module.raw_outputscale.grad
    step = 1e-5
    values = []
    for sign in (1.0, -1.0):
        with torch.no_grad():
            model.covar_module.raw_outputscale += sign * step
            values.append(model.elbo())
            model.covar_module.raw_outputscale -= sign * step
    assert_near(found, (values[0] - values[1]) / (2.0 * step), 1e-5)


def test_a_second_derivative_of_a_drawn_bound_is_refused() -> None:
    X, Y = data()
    model = model_of(X, Y, batch_size=20, num_columns=8)
    model.covar_module.requires_grad_(True)
    value, leaves = model.log_marginal_likelihood().sum(), list(model.covar_module.parameters())
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(value, leaves, create_graph=True)
