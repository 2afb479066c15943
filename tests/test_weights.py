"""The weight posterior against the dense Gaussian process of a linear model."""

from __future__ import annotations

import pytest
import torch
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream.testing.streams import assert_close
from bo_stream.weights import (
    DenseRoot,
    InformationForm,
    InverseRoot,
    at_noise,
    log_marginal_likelihood,
    solve,
    weighted_statistics,
)
from tests.oracles.gaussian_process import DenseGP

N, P, M = 8, 5, 2
Problem = tuple[Tensor, Tensor, Tensor]

LEVEL = torch.tensor([0.3, 0.05], dtype=torch.float64)
MEAN = torch.tensor([0.4, -1.0], dtype=torch.float64)


def evidence(Phi: Tensor, y: Tensor, relative: Tensor) -> InformationForm:
    residual = torch.stack((torch.ones_like(MEAN), -MEAN), -1).unsqueeze(-1)
    statistics = weighted_statistics(Phi, y, relative, torch.ones_like(relative))
    return at_noise(statistics, LEVEL, residual)


def likelihood_of(found: InformationForm) -> Tensor:
    posterior = solve(found)
    return log_marginal_likelihood(found, posterior.mean, posterior.log_precision())


@pytest.fixture
def problem() -> Problem:
    Phi = torch.randn(M, N, P, dtype=torch.float64)
    return Phi, torch.randn(M, N).double(), 0.5 + torch.rand(M, N).double()


def dense(Phi: Tensor, y: Tensor, relative: Tensor) -> DenseGP:
    noise = LEVEL.unsqueeze(-1) * relative
    return DenseGP(lambda a, b: a @ b.mT, MEAN.unsqueeze(-1), Phi, y, noise)


def test_posterior_is_that_of_the_linear_kernel(problem: Problem) -> None:
    posterior = solve(evidence(*problem))
    T = torch.randn(M, 4, P, dtype=torch.float64)
    mean, covariance = dense(*problem).posterior(T)
    assert_close(MEAN.unsqueeze(-1) + (T @ posterior.mean).squeeze(-1), mean)
    assert_close(T @ posterior.covariance() @ T.mT, covariance)
    assert_close(posterior.root @ posterior.root.mT, posterior.covariance())


def test_marginal_is_that_of_the_linear_kernel(problem: Problem) -> None:
    found = evidence(*problem)
    likelihood = likelihood_of(found)
    assert_close(likelihood, dense(*problem).log_marginal_likelihood())


def test_evidence_of_two_noise_groups_adds(problem: Problem) -> None:
    Phi, y, relative = problem
    halves = [evidence(Phi[:, s], y[:, s], relative[:, s]) for s in (slice(3), slice(3, N))]
    both = halves[0] + halves[1]
    likelihood = likelihood_of(both)
    assert_close(likelihood, dense(*problem).log_marginal_likelihood())


def test_no_evidence_leaves_the_prior() -> None:
    empty = evidence(torch.zeros(M, 0, P).double(), *(torch.zeros(M, 0).double(),) * 2)
    posterior = solve(empty)
    assert_close(posterior.mean, torch.zeros(M, P, 1))
    assert_close(posterior.covariance(), torch.eye(P).expand(M, P, P))
    assert_close(likelihood_of(empty), torch.zeros(M))


@pytest.mark.parametrize("many", [False, True])
def test_observing_is_solving_anew(problem: Problem, many: bool) -> None:
    Phi, y, relative = problem
    posterior = solve(evidence(Phi[:, :3], y[:, :3], relative[:, :3]))
    for rows in (slice(3, 4), slice(4, N)):
        noise = LEVEL.unsqueeze(-1) * relative[:, rows]
        residual = y[:, rows] - MEAN.unsqueeze(-1)
        told = Phi[:, rows], residual, noise
        posterior = posterior.observe_many(*told) if many else posterior.observe(*told)
    anew = solve(evidence(*problem))
    assert_close(posterior.mean, anew.mean)
    assert_close(posterior.covariance(), anew.covariance())
    columns = torch.randn(M, P, 2, dtype=torch.float64)
    assert_close(posterior.covariance_times(columns), anew.covariance() @ columns)
    assert_close(posterior.row_product(columns.mT), columns.mT @ posterior.root)


@pytest.mark.parametrize("size", [P, 400])  # as a matrix, and by triangular solves
@pytest.mark.parametrize("ahead", [(), (3,)])
def test_the_root_of_an_inverse_is_its_matrix_in_each_product(
    size: int, ahead: tuple[int, ...]
) -> None:
    A = torch.randn(M, size, size).double()
    precision = torch.eye(size).double() + A @ A.mT / size
    root = InverseRoot(torch.linalg.cholesky(precision))
    dense = DenseRoot(root.matrix)
    assert_close(dense.matrix @ dense.matrix.mT @ precision, torch.eye(size).expand(M, -1, -1), 1e3)
    rows = torch.randn(*ahead, M, 4, size).double().requires_grad_()
    weights, columns = torch.randn(*ahead, M, 4, size).double(), torch.randn(M, size, 2).double()
    found, expected = root.row_product(rows), dense.row_product(rows)
    assert_close(found, expected, factor=1e2)
    assert_close(
        *(torch.autograd.grad((each * weights).sum(), rows)[0] for each in (found, expected)),
        factor=1e2,
    )
    assert_close(root.product(columns), dense.product(columns), factor=1e2)
    assert_close(root.log_precision(), dense.log_precision(), factor=1e2)


@pytest.mark.parametrize("updated", [False, True])
def test_what_inference_mode_computes_can_be_differentiated_with(
    problem: Problem, updated: bool
) -> None:
    Phi, y, relative = problem
    posterior = solve(evidence(*problem))
    if updated:
        posterior = posterior.observe(Phi, y, relative)
    rows = Phi.clone()
    with torch.inference_mode():
        inside = posterior.row_product(rows), rows @ posterior.root, rows @ posterior.mean
    rows.requires_grad_()
    outside = posterior.row_product(rows), rows @ posterior.root, rows @ posterior.mean
    for found, expected in zip(outside, inside, strict=True):
        assert_close(found, expected.clone())
        found.sum().backward(retain_graph=True)
    assert bool(rows.grad.isfinite().all())


@pytest.mark.parametrize("observed", [0, 5])
def test_retracting_is_solving_without(problem: Problem, observed: int) -> None:
    Phi, y, relative = problem
    noise, residual = LEVEL.unsqueeze(-1) * relative, y - MEAN.unsqueeze(-1)
    posterior = solve(evidence(Phi[:, observed:], y[:, observed:], relative[:, observed:]))
    if observed > 0:
        told = (t[:, :observed] for t in (Phi, residual, noise))
        posterior = posterior.observe(*told)
    posterior = posterior.retract(Phi[:, 1:4], residual[:, 1:4], noise[:, 1:4])
    left = [0, *range(4, N)]
    anew = solve(evidence(Phi[:, left], y[:, left], relative[:, left]))
    assert_close(posterior.mean, anew.mean)
    assert_close(posterior.covariance(), anew.covariance())


def test_what_was_not_told_cannot_be_retracted(problem: Problem) -> None:
    Phi, y, relative = problem
    posterior = solve(evidence(Phi[:, 1:], y[:, 1:], relative[:, 1:]))
    with pytest.raises(NotPSDError):
        posterior.retract(10.0 * Phi[:, :1], y[:, :1], relative[:, :1])
