"""The marginal likelihood of clustered data, exact or by its stochastic gradient; its KL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.linalg import inverse_root, product_of_triangular_root
from bo_stream.marginal_likelihood import NoiseGroup, combine, expected_misfit
from bo_stream.models.clustered.solver import CentreSolver, CholeskySolver, RootEvidence
from bo_stream.weights import InformationForm, log_marginal_likelihood


@dataclass(frozen=True)
class _Solution:
    """What the likelihood and its gradient are made of, constants of hyperparameters.

    Attributes:
        log_determinant: ``log |Q|``, ``... x m``.
        inverse: ``Q⁻¹``, ``... x m x M x M``.
        representer: ``v = (K + Λ)⁻¹ u``, ``... x m x M x 1``.
        mean: Posterior mean ``K v`` at the centres, float64.
    """

    log_determinant: Tensor
    inverse: Tensor
    representer: Tensor
    mean: Tensor

    @classmethod
    def of(cls, scaled: RootEvidence, K: Tensor) -> _Solution:
        """Cost O(M³)."""
        solver = CholeskySolver(inverse_root(scaled.system(K)))
        v = scaled.root * solver.solve(scaled.target)
        roots = solver.root.diagonal(dim1=-2, dim2=-1).double()
        inverse = product_of_triangular_root(solver.root)
        return cls(-2.0 * roots.log().sum(-1), inverse, v, (K @ v).double())

    @property
    def certainty(self) -> Tensor:
        """``1 − diag Q⁻¹``: what part of the prior is explained, ``... x m x M x 1``, float64."""
        return 1.0 - self.inverse.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).double()


def clustered_log_marginal_likelihood(
    groups: Sequence[NoiseGroup], residual: Tensor, prior: Tensor
) -> Tensor:
    """Return the log marginal likelihood of all observations at their centres, ``... x m``: O(M³).

    Exact with its gradient, that of the expected complete-data log likelihood (Fisher's identity);
    ``∂/∂K = ½ (v vᵀ − R Q⁻¹ R)``: no factorisation is differentiated.

    Args:
        groups: Noise groups, their grams diagonals kept as columns.
        residual: Combination of [Y, 1] to explain, ``... x m x 2 x 1``.
        prior: Covariance K of the centres, ``... x m x M x M``, in the dtype to compute in.
    """
    with torch.no_grad():
        evidence = combine(groups, residual)
        scaled = RootEvidence.of(evidence, prior.dtype)
        solution = _Solution.of(scaled, prior)
        value = log_marginal_likelihood(evidence, solution.mean, solution.log_determinant)
        v = solution.representer
        sensitivity = 0.5 * (scaled.root * solution.inverse * scaled.root.mT - v @ v.mT)
        certainty = solution.certainty
    expected = (sensitivity * prior).sum((-2, -1)).double()
    expected = expected + _misfit(groups, residual, evidence.gram, solution.mean, certainty)
    return value - (expected - expected.detach())


def _misfit(
    groups: Sequence[NoiseGroup], residual: Tensor, precision: Tensor, mean: Tensor, share: Tensor
) -> Tensor:
    """Sum the groups' expected misfits, for ``Var[f(Z)]`` the ``share`` of ``1 / precision``."""
    total = []
    for group in groups:
        gram = group.statistics.gram
        part = torch.where(precision > 0.0, gram / precision, 0.0)
        spread = (part * share + gram * mean.square()).sum((-2, -1))
        total.append(expected_misfit(group, residual, mean, spread))
    return torch.stack(total).sum(0)


def clustered_kl_divergence(evidence: InformationForm, prior: Tensor) -> Tensor:
    """KL from the prior to the posterior process, ``... x m``. Cost O(M³).

    ``½ (log |K + Λ| / |Λ| − tr((K + Λ)⁻¹ K) + vᵀ K v)``. [Terenin2024, eq. 24]

    Args:
        evidence: At the centres, its gram a diagonal kept as a column.
        prior: Covariance K of the centres, ``... x m x M x M``.
    """
    solution = _Solution.of(RootEvidence.of(evidence, prior.dtype), prior)
    energy = (solution.representer.double() * solution.mean).sum((-2, -1))
    return 0.5 * (solution.log_determinant - solution.certainty.sum((-2, -1)) + energy)


def stochastic_objective(
    groups: Sequence[NoiseGroup],
    residual: Tensor,
    prior: Tensor,
    kernel_rows: Callable[[Tensor], Tensor],
    make_solver: Callable[[Tensor], CentreSolver],
    signs: Tensor,
    rows: Tensor,
) -> Tensor:
    """Return a number whose gradient estimates that of the log marginal likelihood, ``... x m``.

    See :meth:`ClusteredGP.stochastic_objective`: traces by Hutchinson's probes, sums over pairs of
    centres by a minibatch of rows. [Terenin2024, eq. 85 to 87]

    Args:
        groups: As of :func:`clustered_log_marginal_likelihood`.
        residual: As there.
        prior: As there, without gradients.
        kernel_rows: Maps ``rows`` to those of K, ``... x m x b x M``, differentiable.
        make_solver: Of a matrix Q.
        signs: Hutchinson's probes, ±1, ``... x m x M x l``.
        rows: Centres whose rows of K are visited, ``b``, without repetition.
    """
    with torch.no_grad():
        evidence = combine(groups, residual)
        scaled = RootEvidence.of(evidence, prior.dtype)
        solver = make_solver(scaled.system(prior))
        solved = solver.solve(torch.cat((scaled.target, signs), -1))
        certainty = 1.0 - (signs * solved[..., 1:]).mean(-1, keepdim=True).double()
        left = scaled.root * solved
        right = torch.cat((left[..., :1], scaled.root * signs), -1)
        mean = (prior @ left[..., :1]).double()
    count = signs.shape[-1]
    weight = torch.tensor([1.0] + [-1.0 / count] * count).to(left)
    fraction = len(rows) / prior.shape[-1]
    products = left[..., rows, :] * (kernel_rows(rows) @ right)
    pull = 0.5 / fraction * (products.sum(-2) * weight).sum(-1).double()
    return pull - _misfit(groups, residual, evidence.gram, mean, certainty)
