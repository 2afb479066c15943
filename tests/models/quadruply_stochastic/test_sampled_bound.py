"""Estimates of a bound from a few data and a few functions, against dense formulas."""

from __future__ import annotations

import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood, LaplaceLikelihood
from torch import Tensor

from bo_stream.likelihoods.outcome_model import LogisticLikelihood
from bo_stream.models.quadruply_stochastic.function_process import projected
from bo_stream.models.quadruply_stochastic.steps import SampledGradient
from bo_stream.testing.streams import assert_close
from tests.oracles.likelihoods import expectation, log_probs
from tests.oracles.weight_space import bound_of_likelihood, bound_of_single_functions
from tests.support.problems.weights import DATA, SIZE, Problem

KINDS = ("fourier", "inducing", "relevance")
DRAWS = 120


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [0, 3])
def test_all_data_and_all_functions_give_the_bound_and_its_gradient(
    kind: str, columns: int
) -> None:
    problem = Problem(kind, columns)
    steps = problem.steps
    value, gradient = steps.sampled(problem.data(torch.Generator()), torch.Generator())
    for output in range(2):
        space, mean, C = problem.dense(output)
        mean.requires_grad_()
        C.requires_grad_()
        bound = space.bound(mean, C)
        assert_close(value[output], bound.detach())
        of_mean, of_root = torch.autograd.grad(bound, (mean, C))
        assert_close(gradient.coefficients[output, :, 0], of_mean, factor=10)
        below = torch.ones(SIZE, SIZE).tril(-1)[:, :columns]
        assert_close(gradient.coefficients[output, :, 1:], of_root[:, :columns] * below, factor=10)
        entries = (of_root * C).diagonal()[:columns].detach()
        assert_close(gradient.log_scale[output, :columns], entries, factor=10)


def _average(problem: Problem, draws: int) -> tuple[Tensor, Tensor]:
    """Mean over draws of the bound and all its gradients, ``2 x numbers``, and standard errors."""
    total = squares = torch.zeros(())
    for i in range(draws):
        one = _one_draw(problem, i)
        total, squares = total + one / draws, squares + one.square() / draws
    return total, ((squares - total.square()).clamp_min(0.0) / draws).sqrt()


def _one_draw(problem: Problem, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    steps, data, learns = problem.steps, problem.data(generator), problem.kind != "inducing"
    drawn = steps.draw(data, generator, learns)
    value = steps.value(drawn, data, learns)
    problem.hyper.zero_grad()
    (-value.sum()).backward()
    gradient = SampledGradient.of(drawn)
    whole = torch.zeros(2, SIZE, 2 + problem.columns, dtype=torch.float64)
    parts = (gradient.coefficients, gradient.log_scale.unsqueeze(-1))
    whole[:, gradient.index] = torch.cat(parts, -1)
    hyper = [p.grad.flatten() for p in problem.hyper.parameters() if p.grad is not None]
    return torch.cat((value.detach(), whole.flatten(), *hyper))


@pytest.mark.parametrize("controlled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_few_data_and_functions_are_unbiased(kind: str, controlled: bool) -> None:
    """Bound and gradients in weights and hyperparameters, within four standard errors."""
    torch.manual_seed(1)
    full = Problem(kind, columns=2, controlled=controlled)
    part = Problem(kind, columns=2, controlled=controlled, drawn=5, rows=4)
    part.X, part.Y, part.hyper = full.X, full.Y, full.hyper
    part.precisions = full.precisions
    part.steps = part._steps()
    part.steps.progress = full.steps.progress
    expected = _one_draw(full, 0)
    mean, error = _average(part, DRAWS)
    assert bool(((mean - expected).abs() <= 4.0 * error + 1e-9).all())


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["fourier", "inducing"])
def test_the_control_variate_lowers_the_variance_of_the_gradient(kind: str) -> None:
    spreads = []
    for controlled in (False, True):
        torch.manual_seed(0)
        problem = Problem(kind, controlled=controlled, drawn=1, support=DATA)
        spreads.append(_average(problem, 300)[1][2 : 2 + 4 * SIZE].square().sum())
    assert float(spreads[1]) < 0.5 * float(spreads[0])


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["fourier", "inducing"])
def test_support_points_say_more_of_a_sample_than_of_themselves(kind: str) -> None:
    spreads = []
    for sample in (6, DATA):
        torch.manual_seed(0)
        problem = Problem(kind, controlled=True, drawn=2, support=6, sample=sample)
        spreads.append(_average(problem, 300)[1][2 : 2 + 4 * SIZE].square().sum())
    assert float(spreads[1]) < 0.9 * float(spreads[0])


def test_a_projection_is_least_squares_in_the_kernel() -> None:
    problem = Problem("fourier")
    kernel, X, points = problem.hyper.covar_module, problem.X, problem.X[:4]
    root, targets, ones = projected(kernel, points, (X, problem.Y), weight=3.0)
    K = kernel(points).to_dense().detach() + 1e-6 * torch.diag_embed(
        kernel(points).diagonal(dim1=-2, dim2=-1).detach()
    )
    B = torch.linalg.solve(K, kernel(points, X).to_dense().detach()).mT
    one, other = torch.randn(2, 2, 4, 1, dtype=torch.float64)

    def misfits(a: Tensor, mean: float) -> tuple[Tensor, Tensor]:
        dense = 3.0 * ((B @ a).squeeze(-1) - problem.Y + mean).square().sum(-1)
        said = (root @ a).squeeze(-1) - targets + mean * ones
        return dense, said.square().sum(-1)

    for mean in (0.0, 0.7):
        dense, said = (u - v for u, v in zip(misfits(one, mean), misfits(other, mean), strict=True))
        assert_close(said, dense)


def test_the_control_variate_stays_current() -> None:
    problem = Problem("inducing", columns=2, controlled=True, drawn=5, rows=6)
    for _ in range(20):
        problem.steps.take_step()
    progress = problem.steps.progress
    assert progress.control is not None
    columns = progress.dense_columns(torch.arange(SIZE))
    assert_close(progress.control.values, progress.control.functions(torch.arange(SIZE)) @ columns)


LIKELIHOODS = {
    "laplace": lambda: LaplaceLikelihood(batch_shape=torch.Size([2])),
    "probit": BernoulliLikelihood,
    "logistic": LogisticLikelihood,
}


def _labels(problem: Problem, name: str) -> None:
    if name != "laplace":
        problem.Y = (problem.Y > 0.0).double()


def _oracle(problem: Problem, name: str, output: int):
    y, constant = problem.Y[output], problem.hyper.mean_module.constant[output]
    if name == "logistic":
        return lambda f: torch.nn.functional.logsigmoid((2.0 * y - 1.0) * (f + constant))
    noise = float(problem.hyper.likelihood.noise[output].detach()) if name == "laplace" else 1.0
    oracle = log_probs("laplace" if name == "laplace" else "bernoulli", y, noise)
    return lambda f: oracle(f + constant)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_any_likelihood_with_all_functions_gives_the_bound_by_quadrature(
    kind: str, name: str
) -> None:
    problem = Problem(kind, columns=2, likelihood=LIKELIHOODS[name]())
    _labels(problem, name)
    value, _ = problem.steps.sampled(problem.data(torch.Generator()), torch.Generator())
    for output in range(2):
        space, mean, C = problem.dense(output)
        log_prob = _oracle(problem, name, output)
        bound = bound_of_likelihood(space.functions, space.precision, mean, C, log_prob)
        torch.testing.assert_close(value[output], bound.detach(), rtol=0.0, atol=5e-4)


@pytest.mark.fixed_seed
@pytest.mark.parametrize("columns", [0, 3])
def test_equation_5_has_to_scale_by_a_root(columns: int) -> None:
    """Only ``φ μ + z √(φ Σ φᵀ)`` has the value of eq. 2; printed is ``z φ Σ φᵀ``. [Evans2020]"""
    space, mean, C = Problem("fourier", columns).dense(0)
    mean, C, noise = mean.detach(), C.detach(), float(space.noise.detach())
    log_prob = log_probs("gaussian", space.y, noise)
    variance = (space.functions @ C).square().sum(-1)
    expected, printed = (
        expectation(log_prob, space.functions @ mean, scale.square()).sum()
        for scale in (variance.sqrt(), variance)
    )
    none = bound_of_likelihood(space.functions, space.precision, mean, C, lambda f: 0.0 * f)
    torch.testing.assert_close((expected + none).detach(), space.bound(mean, C).detach())
    assert abs(float((printed - expected).detach())) > 1e-3


def _of_single_functions(problem: Problem, name: str, drawn: int, draws: int) -> Tensor:
    steps, data = problem.steps, problem.data(torch.Generator())
    steps.functions = drawn
    generators = (torch.Generator().manual_seed(i) for i in range(draws))
    return torch.stack([steps.sampled(data, generator)[0] for generator in generators])


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_few_functions_give_less_than_the_bound(name: str) -> None:
    """Single functions give what enumeration gives, more of them more. [Evans2020, theorem 3]"""
    problem = Problem("fourier", likelihood=LIKELIHOODS[name]())
    _labels(problem, name)
    singles, more = (_of_single_functions(problem, name, drawn, 150) for drawn in (1, 6))
    (whole,) = _of_single_functions(problem, name, SIZE, 1)
    for output in range(2):
        space, mean, C = problem.dense(output)
        log_prob = _oracle(problem, name, output)
        parts = (space.functions, space.precision, mean, C)
        apart = bound_of_likelihood(*parts, lambda f: 0.0 * f)
        expected = apart + bound_of_single_functions(parts[0], mean, C.diagonal(), log_prob)
        error = 4.0 * float(singles[:, output].std()) / 150**0.5
        assert abs(float((singles[:, output].mean() - expected).detach())) < error
        assert singles[:, output].mean() < more[:, output].mean() < whole[output]


@pytest.mark.parametrize("name", ["coefficients", "log_scale", "noise", "outputscale"])
def test_what_is_not_finite_or_positive_is_not_valid(name: str) -> None:
    problem = Problem("fourier", columns=2)
    steps, progress = problem.steps, problem.steps.progress
    assert steps.is_valid
    with torch.no_grad():
        if name == "outputscale":
            problem.hyper.covar_module.raw_outputscale.fill_(-1e4)
        elif name == "noise":
            problem.hyper.likelihood.raw_noise.fill_(torch.inf)
        else:
            getattr(progress, name)[0, 0] = torch.nan
    assert not steps.is_valid
